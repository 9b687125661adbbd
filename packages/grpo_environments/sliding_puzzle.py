"""The sliding puzzle: n × n tiles with a gap, to be put in order with one move per turn.

    model        <action>up</action>
    environment  <environment>
                 Slid tile 6 up.
                 </environment>

`puzzle` makes the rows (`data.kind = "function"`, `data.task` its dotted path), `make` the
environment. Rules, generator and texts follow the example of NeMo RL
(docs/guides/grpo-sliding-puzzle.md there); the reward is 1 for a solved puzzle, else 0.
"""

import random
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from grpo_jax.environments.base import Environment, EnvironmentFactory, StepResult
from grpo_jax.types import FinishReason, Prompt

Board = tuple[tuple[int, ...], ...]  # rows of tiles; 0 is the gap.

# The position of the moving tile relative to the gap: (rows down, columns to the right).
MOVES = {"up": (1, 0), "down": (-1, 0), "left": (0, 1), "right": (0, -1)}

_ACTION = re.compile(r"<action>((?:(?!<action>).)*?)</action>", re.IGNORECASE | re.DOTALL)
_SLIDE = re.compile(r"slide (\d{1,3}) (\d{1,3})", re.ASCII)


def solved(size: int) -> Board:
  """Returns the ordered board: 1, 2, …, with the gap in the last place."""
  tiles = [*range(1, size * size), 0]
  return tuple(tuple(tiles[row * size : (row + 1) * size]) for row in range(size))


def gap(board: Board) -> tuple[int, int]:
  """Returns row and column of the gap."""
  return next((r, row.index(0)) for r, row in enumerate(board) if 0 in row)


def neighbours(board: Board) -> list[tuple[int, int]]:
  """Returns the places next to the gap, whose tiles can move."""
  row, column = gap(board)
  places = [(row + down, column + right) for down, right in MOVES.values()]
  return [(r, c) for r, c in places if 0 <= r < len(board) and 0 <= c < len(board)]


def slide(board: Board, place: tuple[int, int]) -> Board:
  """Returns the board after the tile at a place next to the gap has moved into it."""
  rows = [list(row) for row in board]
  (r, c), (to_row, to_column) = place, gap(board)
  rows[to_row][to_column], rows[r][c] = rows[r][c], 0
  return tuple(map(tuple, rows))


def shuffled(size: int, moves: int, rng: random.Random) -> Board:
  """Returns the board after random moves from the ordered one, each of a tile next to the gap.

  An odd number of moves never leads back: every move takes the gap to a square of the other
  colour of a chessboard.
  """
  board = solved(size)
  for _ in range(moves):
    board = slide(board, rng.choice(neighbours(board)))
  return board


def render(board: Board) -> str:
  """Returns the board as text, with numbered rows and columns; the gap is blank."""
  width = len(str(len(board) ** 2 - 1)) + 2
  cell = lambda tile: f"{tile or '':>{width - 1}} "
  edge = f"  +{'-' * width * len(board)}+"
  rows = [f"{r + 1} |{''.join(map(cell, row))}|" for r, row in enumerate(board)]
  columns = "".join(f"{c + 1:^{width}}" for c in range(len(board)))
  return "\n".join([edge, *rows, edge, f"   {columns}".rstrip()])


def instructions(board: Board) -> str:
  """Returns the prompt: the rules, the board, how to act."""
  size = len(board)
  return f"""===== SLIDING PUZZLE =====
Arrange the {size}x{size} grid by sliding tiles into the empty space.
- The goal is to arrange numbers from 1 to {size * size - 1} in order
- Use 'up', 'down', 'left', 'right' to slide in that direction
- Use 'view' to see the current state of the board

Current Board State:

{render(board)}

Reach the goal state where numbers are ordered 1 through {size * size - 1} with the empty space \
at the bottom right.
Valid actions: 'up', 'down', 'left', 'right', or 'slide row col' (e.g., 'slide 1 2').
After thinking, output your chosen action in tags like this:
<action>your_action</action>
If you just want to see the board, output <action>view</action>
Think carefully step-by-step before acting."""


def puzzle(
  *, seed: int, size: int = 5, min_size: int = 2, shuffle_moves: int = 10
) -> dict[str, Any]:
  """Makes one row: what `data.kind = "function"` calls.

  Args:
    seed: Random seed; the same seed gives the same puzzle.
    size: Largest size of a board; sizes are drawn from `min_size` to it.
    min_size: Smallest size, at least 2.
    shuffle_moves: Largest number of random moves from the ordered board; the number is always
      odd, so that no puzzle is solved at the start.

  Returns:
    Fields problem (the prompt), board (rows of tiles, 0 the gap), size, shuffle_moves.

  Raises:
    ValueError: A bound is too low.
  """
  if not 2 <= min_size <= size:
    raise ValueError(f"needs 2 <= min_size <= size, got min_size={min_size}, size={size}")
  if shuffle_moves < 1:
    raise ValueError(f"shuffle_moves must be at least 1, got {shuffle_moves}")
  rng = random.Random(seed)
  own_size = rng.randint(min_size, size)
  moves = rng.randrange(1, shuffle_moves + 1, 2)
  board = shuffled(own_size, moves, rng)
  return {
    "problem": instructions(board),
    "board": [list(row) for row in board],
    "size": own_size,
    "shuffle_moves": moves,
  }


class MoveOutcome(NamedTuple):
  """The result of one action."""

  kind: str  # "moved", "refused", "viewed", "unreadable".
  board: Board
  message: str


def act(board: Board, text: str) -> MoveOutcome:
  """Applies the last `<action>…</action>` of a turn; case and extra blanks do not matter."""
  found = _ACTION.findall(text)
  if not found:
    hint = "Invalid response format, no move made. Try this: <action>your_action</action>"
    return MoveOutcome("unreadable", board, f"{render(board)}\n\n{hint}")
  action = " ".join(found[-1].lower().split())
  if action == "view":
    return MoveOutcome("viewed", board, f"{render(board)}\n\nViewing the board. No move made.")
  place, done, refusal = _meant(board, action)
  if place not in neighbours(board):
    return MoveOutcome("refused", board, refusal)
  row, column = place
  return MoveOutcome("moved", slide(board, place), f"Slid tile {board[row][column]} {done}.")


def _meant(board: Board, action: str) -> tuple[tuple[int, int], str, str]:
  """Returns the tile that an action would move, and what to say if it moves and if it cannot."""
  if action in MOVES:
    (row, column), (down, right) = gap(board), MOVES[action]
    return (row + down, column + right), action, f"Cannot slide {action}."
  if match := _SLIDE.fullmatch(action):
    place = int(match[1]) - 1, int(match[2]) - 1
    if all(0 <= i < len(board) for i in place):
      return place, "into the empty space", "The tile must be beside the empty space."
    return place, "", f"Invalid position: row and column run from 1 to {len(board)}."
  known = "up, down, left, right, slide row col, view"
  return (-1, -1), "", f"Unknown action. There are: {known}."


class SlidingPuzzleEnvironments(EnvironmentFactory):
  """Makes the environments."""

  stop_strings = ("</action>",)

  def __init__(
    self,
    *,
    max_moves: int,
    reward_solved: float,
    invalid_penalty: float,
    show_board: bool,
    observation_role: str | None,
  ):
    if max_moves < 1:
      raise ValueError(f"max_moves must be at least 1, got {max_moves}")
    if invalid_penalty < 0:
      raise ValueError(f"invalid_penalty is subtracted: at least 0, got {invalid_penalty}")
    self.max_moves = max_moves
    self.reward_solved = reward_solved
    self.invalid_penalty = invalid_penalty
    self.show_board = show_board
    self.observation_role = observation_role
    self.observation_roles = (observation_role,) if observation_role else ()

  def __call__(self, prompt: Prompt) -> Environment:
    if "board" not in prompt.info:
      raise ValueError(
        f"prompt {prompt.prompt_id}: the sliding_puzzle environment needs a board in its row: it "
        "scores data of kind 'function', task grpo_environments.sliding_puzzle.puzzle"
      )
    return SlidingPuzzle(self, read_board(prompt.info["board"]))


class SlidingPuzzle:
  """One game."""

  def __init__(self, options: SlidingPuzzleEnvironments, board: Board):
    self._options = options
    self._board = board
    self._counts: dict[str, int] = {"moved": 0, "refused": 0, "viewed": 0, "unreadable": 0}

  async def start(self) -> None:
    """Does nothing."""

  async def step(
    self, text: str, completion_ids: Int[np.ndarray, " turn"], finish_reason: FinishReason
  ) -> StepResult:
    """Applies the action of a turn. Moves count, even refused ones; views and unreadable
    turns do not."""
    kind, self._board, message = act(self._board, text)
    self._counts[kind] += 1
    is_solved = kind == "moved" and self._board == solved(len(self._board))
    if is_solved:
      message = "Congratulations! You've solved the puzzle!"
    elif self._options.show_board and kind in ("moved", "refused"):
      message = f"{message}\n\n{render(self._board)}"
    is_over = self._counts["moved"] + self._counts["refused"] >= self._options.max_moves
    start = "" if self._options.observation_role else "\n"
    return StepResult(
      reward=self._reward(is_solved, is_invalid=kind in ("refused", "unreadable")),
      done=is_solved or is_over,
      observation=f"{start}<environment>\n{message}\n</environment>{start}",
      observation_role=self._options.observation_role,
      metrics=self._metrics(is_solved),
    )

  async def close(self) -> None:
    """Does nothing."""

  def _reward(self, is_solved: bool, *, is_invalid: bool) -> float | dict[str, float]:
    gain = self._options.reward_solved * is_solved
    if not self._options.invalid_penalty:
      return gain
    return {"solved": gain, "invalid": -self._options.invalid_penalty * is_invalid}

  def _metrics(self, is_solved: bool) -> dict[str, float]:
    tiles = [tile for row in self._board for tile in row]
    goal = [tile for row in solved(len(self._board)) for tile in row]
    in_place = sum(a == b for a, b in zip(tiles, goal, strict=True) if b)
    return {
      "accuracy": float(is_solved),
      "moves": float(self._counts["moved"]),
      "refused_moves": float(self._counts["refused"]),
      "views": float(self._counts["viewed"]),
      "unreadable_turns": float(self._counts["unreadable"]),
      "tiles_in_place_share": in_place / (len(tiles) - 1),
    }


def read_board(rows: Sequence[Sequence[int]]) -> Board:
  """Returns the board of a data row.

  Raises:
    ValueError: The board is not square, or its tiles are not 0, 1, …, n² - 1.
  """
  board = tuple(tuple(row) for row in rows)
  size = len(board)
  tiles = sorted(tile for row in board for tile in row)
  if size < 2 or {len(row) for row in board} != {size} or tiles != [*range(size * size)]:
    raise ValueError(f"not a board of a sliding puzzle: {rows!r:.200}")
  return board


def make(
  *,
  max_moves: int = 30,
  reward_solved: float = 1.0,
  invalid_penalty: float = 0.0,
  show_board: bool = False,
  observation_role: str | None = "user",
) -> SlidingPuzzleEnvironments:
  """Makes the environment of the sliding puzzle.

  Args:
    max_moves: Number of moves, refused ones included, after which the game is lost. Turns without a
      move are bounded by `rollout.max_turns`.
    reward_solved: Reward of the move that solves the puzzle; all other turns have 0.
    invalid_penalty: Subtracted for every refused move and unreadable turn; the reward then
      has the components "solved" and "invalid".
    show_board: Whether the answer to a move shows the board, at the cost of its tokens.
    observation_role: "user": answers are messages of the chat template; None: they are
      appended unchanged, as in NeMo RL.

  Returns:
    A factory of environments. Metrics of an attempt: accuracy (solved), moves, refused_moves,
    views, unreadable_turns, tiles_in_place_share.
  """
  return SlidingPuzzleEnvironments(
    max_moves=max_moves,
    reward_solved=reward_solved,
    invalid_penalty=invalid_penalty,
    show_board=show_board,
    observation_role=observation_role,
  )
