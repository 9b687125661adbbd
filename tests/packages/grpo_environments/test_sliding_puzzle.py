"""The sliding puzzle: rules by hand, the generator's promises, what the environment answers."""

import asyncio

import numpy as np
import pytest

from grpo_environments import sliding_puzzle
from grpo_jax import data, environments
from grpo_jax.data.byte_tokenizer import ByteTokenizer
from grpo_jax.data.formats import RowError
from grpo_jax.environments.base import EnvironmentFactory
from grpo_jax.types import FinishReason, Prompt

BOARD = ((1, 2, 3), (4, 0, 5), (7, 8, 6))  # solved by: left, up.


def act(action: str, board=BOARD) -> sliding_puzzle.MoveOutcome:
  return sliding_puzzle.act(board, f"I think. <action>{action}</action>")


@pytest.mark.parametrize(
  ("action", "board", "message"),
  [
    ("up", ((1, 2, 3), (4, 8, 5), (7, 0, 6)), "Slid tile 8 up."),
    ("down", ((1, 0, 3), (4, 2, 5), (7, 8, 6)), "Slid tile 2 down."),
    ("left", ((1, 2, 3), (4, 5, 0), (7, 8, 6)), "Slid tile 5 left."),
    ("right", ((1, 2, 3), (0, 4, 5), (7, 8, 6)), "Slid tile 4 right."),
    (" UP\n", ((1, 2, 3), (4, 8, 5), (7, 0, 6)), "Slid tile 8 up."),
    ("slide 2 1", ((1, 2, 3), (0, 4, 5), (7, 8, 6)), "Slid tile 4 into the empty space."),
    ("Slide  3   2", ((1, 2, 3), (4, 8, 5), (7, 0, 6)), "Slid tile 8 into the empty space."),
  ],
)
def test_a_tile_beside_the_gap_slides_into_it(action, board, message):
  assert act(action) == ("moved", board, message)


@pytest.mark.parametrize(
  ("action", "message"),
  [
    ("slide 1 1", "The tile must be beside the empty space."),
    ("slide 2 2", "The tile must be beside the empty space."),  # the gap itself.
    ("slide 0 2", "Invalid position: row and column run from 1 to 3."),
    ("slide 4 2", "Invalid position: row and column run from 1 to 3."),
    ("slide -1 2", "Unknown action."),
    ("slide 2 ٣", "Unknown action."),
    ("jump", "Unknown action."),
    ("", "Unknown action."),
  ],
)
def test_other_moves_are_refused_and_change_nothing(action, message):
  kind, board, answer = act(action)
  assert (kind, board) == ("refused", BOARD) and answer.startswith(message)


def test_moves_beyond_the_edge_are_refused():
  corner = ((0, 1), (2, 3))
  assert act("down", corner) == ("refused", corner, "Cannot slide down.")
  assert act("right", corner) == ("refused", corner, "Cannot slide right.")


@pytest.mark.parametrize(
  ("text", "kind"),
  [
    ("<action>down</action> no, <action>up</action>", "moved"),
    ("<action>jump</action> <action>up", "refused"),  # the last complete one.
    ("<action><action>up</action>", "moved"),
    ("<ACTION>view</ACTION>", "viewed"),
    ("up", "unreadable"),
    ("</action>up<action>", "unreadable"),
    ("", "unreadable"),
    ("<action>" * 20_000 + "up", "unreadable"),
  ],
)
def test_the_last_complete_tag_is_the_action(text, kind):
  assert sliding_puzzle.act(BOARD, text).kind == kind


def test_of_several_actions_the_last_one_is_taken():
  text = "<action>down</action> no, rather <action>up</action> I think"
  assert sliding_puzzle.act(BOARD, text).message == "Slid tile 8 up."


def test_the_board_is_rendered_as_in_the_original():
  # The example of NeMo RL's guide on the sliding puzzle.
  board = ((1, 0, 3), (4, 2, 5), (7, 8, 6))
  expected = "\n".join(
    [
      "  +---------+",
      "1 | 1     3 |",
      "2 | 4  2  5 |",
      "3 | 7  8  6 |",
      "  +---------+",
      "    1  2  3",
    ]
  )
  assert sliding_puzzle.render(board) == expected
  assert sliding_puzzle.render(sliding_puzzle.solved(4)).splitlines()[4] == "4 | 13  14  15     |"


def test_puzzles_keep_their_bounds_can_be_solved_and_are_never_solved_at_the_start():
  sizes, lengths = set(), set()
  for seed in range(300):
    row = sliding_puzzle.puzzle(seed=seed, size=4, min_size=2, shuffle_moves=6)
    board = sliding_puzzle.read_board(row["board"])
    assert board != sliding_puzzle.solved(row["size"]) and len(board) == row["size"]
    assert is_reachable(board)
    assert sliding_puzzle.render(board) in row["problem"]
    sizes.add(row["size"])
    lengths.add(row["shuffle_moves"])
  assert sizes == {2, 3, 4} and lengths == {1, 3, 5}
  one = sliding_puzzle.puzzle(seed=5, size=3)
  assert one == sliding_puzzle.puzzle(seed=5, size=3) != sliding_puzzle.puzzle(seed=6, size=3)


def is_reachable(board) -> bool:
  """The parity of the tiles' order and of the gap's distance from its corner must agree."""
  size = len(board)
  tiles = [tile or size * size for row in board for tile in row]
  swaps = sum(a > b for i, a in enumerate(tiles) for b in tiles[i + 1 :])
  row, column = sliding_puzzle.gap(board)
  return (swaps + (size - 1 - row) + (size - 1 - column)) % 2 == 0


def test_a_puzzle_of_one_move_is_solved_by_one_move():
  for seed in range(20):
    board = sliding_puzzle.read_board(
      sliding_puzzle.puzzle(seed=seed, size=3, shuffle_moves=1)["board"]
    )
    after = [act(move, board).board for move in sliding_puzzle.MOVES]
    assert sliding_puzzle.solved(len(board)) in after


@pytest.mark.parametrize(
  "settings", [dict(size=1), dict(size=3, min_size=4), dict(min_size=1), dict(shuffle_moves=0)]
)
def test_impossible_bounds_of_a_puzzle_are_refused(settings):
  with pytest.raises(ValueError, match="size|shuffle_moves"):
    sliding_puzzle.puzzle(seed=0, **settings)


@pytest.mark.parametrize(
  "rows", [[[1, 2], [3, 3]], [[1, 2], [0]], [[0]], [], [[1, 2, 0]], [[1, 2], [4, 0]]]
)
def test_a_row_without_a_proper_board_is_refused(rows):
  with pytest.raises(ValueError, match="not a board of a sliding puzzle"):
    sliding_puzzle.read_board(rows)


def play(texts, board=BOARD, **settings):
  """Plays one game; returns the results of its turns."""
  factory = sliding_puzzle.make(**settings)
  prompt = Prompt("p:0:0", np.zeros(1, np.int32), "x", {"board": [list(r) for r in board]})

  async def body():
    game = factory(prompt)
    await game.start()
    empty = np.zeros(0, np.int32)
    results = [await game.step(text, empty, FinishReason.STOP) for text in texts]
    await game.close()
    return results

  return asyncio.run(body())


def test_a_game_is_rewarded_once_it_is_solved():
  texts = ["hm", "<action>view</action>", "<action>slide 1 1</action>", "<action>left</action>"]
  results = play([*texts, "<action>up</action>"])
  assert [r.total for r in results] == [0.0, 0.0, 0.0, 0.0, 1.0]
  assert [r.done for r in results] == [False] * 4 + [True]
  assert results[-1].metrics == {
    "accuracy": 1.0,
    "moves": 2.0,
    "refused_moves": 1.0,
    "views": 1.0,
    "unreadable_turns": 1.0,
    "tiles_in_place_share": 1.0,
  }
  assert results[0].metrics["accuracy"] == 0.0
  assert results[0].metrics["tiles_in_place_share"] == 6 / 8  # 5 and 6 are not.
  assert "<action>your_action</action>" in results[0].observation
  assert sliding_puzzle.render(BOARD) in results[1].observation
  assert results[4].observation.startswith("<environment>\nCongratulations!")
  assert {r.observation_role for r in results} == {"user"}


def test_a_game_ends_after_its_last_move_refused_ones_included():
  texts = ["<action>view</action>", "<action>up</action>", "<action>jump</action>"]
  results = play(texts, max_moves=2)
  assert [r.done for r in results] == [False, False, True]
  assert results[-1].total == 0.0 and results[-1].metrics["accuracy"] == 0.0


def test_penalties_are_a_component_of_their_own():
  texts = ["?", "<action>jump</action>", "<action>left</action>", "<action>up</action>"]
  results = play(texts, invalid_penalty=0.25, reward_solved=2.0)
  assert [r.components for r in results] == [
    {"solved": 0.0, "invalid": -0.25},
    {"solved": 0.0, "invalid": -0.25},
    {"solved": 0.0, "invalid": 0.0},
    {"solved": 2.0, "invalid": 0.0},
  ]


def test_answers_can_show_the_board_and_be_appended_unchanged():
  (result,) = play(["<action>up</action>"], show_board=True, observation_role=None)
  board = sliding_puzzle.render(((1, 2, 3), (4, 8, 5), (7, 0, 6)))
  answer = f"\n<environment>\nSlid tile 8 up.\n\n{board}\n</environment>\n"
  assert result.observation == answer and result.observation_role is None


def test_every_turn_stops_at_the_closing_tag():
  factory = sliding_puzzle.make()
  assert isinstance(factory, EnvironmentFactory) and factory.stop_strings == ("</action>",)


def test_puzzles_come_as_prompts_from_a_function():
  settings = dict(
    kind="function",
    task="grpo_environments.sliding_puzzle.puzzle",
    task_args={"size": 3},
    output_key="",
    environment="sliding_puzzle",
  )
  prompts = data.make_held_out(ByteTokenizer(), size=4, task_seed=7, **settings)
  assert [p.prompt_id for p in prompts] == [f"puzzle-7:0:{row}" for row in range(4)]
  assert prompts[1].info["board"] == sliding_puzzle.puzzle(seed=8, size=3)["board"]
  with environments.make(sliding_puzzle={}) as made:
    made["sliding_puzzle"](prompts[0])
    with pytest.raises(ValueError, match="needs a board in its row"):
      made["sliding_puzzle"](Prompt("x:0:0", np.zeros(1, np.int32), "sliding_puzzle"))
  with pytest.raises(ValueError, match="puzzle takes no 'sise'.*did you mean 'size'"):
    data.make_held_out(ByteTokenizer(), size=4, **(settings | {"task_args": {"sise": 3}}))
  with pytest.raises(ValueError, match="no function 'puzle'.*did you mean 'puzzle'"):
    task = "grpo_environments.sliding_puzzle.puzle"
    data.make_held_out(ByteTokenizer(), size=4, **(settings | {"task": task}))


def test_a_function_that_fails_on_a_seed_breaks_that_row_only(tmp_path, monkeypatch):
  (tmp_path / "my_rows.py").write_text(
    "def row(*, seed):\n  return {'problem': str(seed), 'half': 6 // (seed - 2)}\n"
  )
  monkeypatch.syspath_prepend(tmp_path)
  settings = dict(kind="function", task="my_rows.row", size=4, output_key="")
  with pytest.raises(RowError, match="row-0:3: .*my_rows.py:2: ZeroDivisionError"):
    data.make_held_out(ByteTokenizer(), **settings)
  prompts = data.make_held_out(ByteTokenizer(), on_error="skip", **settings)
  assert [p.info["half"] for p in prompts] == [-3, -6, 6]
