"""Several datasets: their order, weights, turns, curricula, splits; all of it resumes exactly."""

import collections
import json
import pathlib

import pytest

from grpo_jax import data
from grpo_jax.data.byte_tokenizer import ByteTokenizer
from grpo_jax.data.formats import PromptStyle
from grpo_jax.data.row_selection import RowSelection
from grpo_jax.errors import ExpectedFailure

TOKENIZER = ByteTokenizer()


@pytest.fixture
def two(tmp_path):
  """The guide's datasets: [a b c d] and [1 … 8]."""
  found = []
  for name, words in (("letters", "abcd"), ("digits", "12345678")):
    path = tmp_path / f"{name}.jsonl"
    rows = [{"problem": word, "expected_answer": word} for word in words]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found.append({"path": str(path)})
  return found


def stream(datasets, **settings):
  return data.make(TOKENIZER, datasets=datasets, **settings)


def words(prompts):
  return "".join(p.info["problem"] for p in prompts)


def batches(source, count, size=4):
  return [words(source.take(size)) for _ in range(count)]


def test_without_a_loader_each_datasets_follow_each_other(two):
  ordered = stream(two, shuffle=False)
  assert batches(ordered, 4) == ["abcd", "1234", "5678", "abcd"]
  assert ordered.take(1)[0].prompt_id == "digits:1:0"


def test_loaders_side_by_side_are_those_of_the_guide(two):
  ordered = stream(two, shuffle=False, num_prompts_per_dataloader=2)
  assert batches(ordered, 3) == ["ab12", "cd34", "ab56"]


def test_turns_continue_where_the_last_step_ended(two):
  ordered = stream(two, shuffle=False, num_prompts_per_dataloader=2)
  assert batches(ordered, 5, size=3) == ["ab1", "2cd", "34a", "b56", "cd7"]


def test_all_rows_of_all_datasets_are_shuffled_together(two):
  epoch = words(stream(two, seed=1).take(12))
  assert sorted(epoch) == sorted("abcd12345678")
  assert not set(epoch[:4]) <= set("abcd") and not set(epoch[:4]) <= set("12345678")


def test_loaders_have_orders_of_their_own_whatever_their_place(two):
  def order_of(datasets, word):
    taken = stream(datasets, num_prompts_per_dataloader=4, seed=3).take(8)
    return [p.info["problem"] for p in taken if p.info["problem"] in word]

  assert order_of(two, "abcd") == order_of(two[::-1], "abcd")
  same = [{**two[1], "name": name} for name in ("one", "other")]
  taken = words(stream(same, num_prompts_per_dataloader=8, seed=3).take(16))
  assert taken[:8] != taken[8:]


def test_weights_are_shares_of_every_stretch(two):
  weighted = [{**two[0], "weight": 3}, {**two[1], "weight": 1}]
  taken = words(stream(weighted, shuffle=False).take(400))
  for end in range(1, 401):
    letters = sum(word in "abcd" for word in taken[:end])
    assert abs(letters - 0.75 * end) <= 1, end
  assert set(words(stream([{**two[0], "weight": 0}, {**two[1], "weight": 0.1}]).take(30))) <= set(
    "12345678"
  )


class Squares:
  """A source that gives itself a name."""

  name = "squares"

  def __len__(self):
    return 3

  def __getitem__(self, row):
    return {"problem": str(row), "expected_answer": str(row**2)}

  def where(self, row):
    return f"squares:{row}"


def squares(config):
  """Opens a source of a user's own."""
  return Squares()


def test_user_sources_have_the_names_of_the_config(two):
  own = {"kind": f"{__name__}.squares", "name": "mine", "weight": 1}
  taken = stream([own, {**two[0], "weight": 1}], shuffle=False).take(2)
  assert [p.prompt_id for p in taken] == ["mine:0:0", "letters:0:0"]
  (alone,) = data.make(TOKENIZER, kind=own["kind"], shuffle=False).take(1)
  assert (alone.prompt_id, alone.dataset) == ("squares:0:0", "squares")


def test_the_first_loader_that_is_over_ends_the_stream(two):
  ending = stream(two, shuffle=False, epochs=1, num_prompts_per_dataloader=2)
  assert batches(ending, 4) == ["ab12", "cd34", "", ""]
  whole = stream(two, shuffle=False, epochs=1)
  assert batches(whole, 3, size=5) == ["abcd1", "23456", "78"]


def test_repeat_gives_every_row_so_often_under_names_of_its_own(two):
  ordered = stream([{**two[0], "repeat": 3}], shuffle=False)
  prompts = ordered.take(13)
  assert words(prompts) == "abcdabcdabcda"
  assert len({p.prompt_id for p in prompts}) == 13
  assert [p.prompt_id for p in prompts[3:5]] == ["letters:0:3", "letters:0:4"]
  held_out = data.make_held_out(TOKENIZER, **two[0], repeat=2, limit=3)
  assert words(held_out) == "abcabc"
  assert len({p.prompt_id for p in held_out}) == 6


# --- resuming ---


def favour_the_worse(loaders, *, num_prompts, records, memory, start):
  """A loader function that depends on everything it is given."""
  memory.setdefault("calls", start)
  memory["calls"] += 1
  means = {n: [r[f"data/{n}/reward_mean"] for r in records] or [0.0] for n in loaders}
  worst = min(loaders, key=lambda name: sum(means[name]))
  others = [name for name in loaders if name != worst]
  first = loaders[worst].take(num_prompts - memory["calls"] % 2)
  return first + loaders[others[0]].take(memory["calls"] % 2)


WAYS = {
  "all-together": {},
  "in-turn": {"num_prompts_per_dataloader": 2},
  "function": {"dataloader": f"{__name__}.favour_the_worse", "dataloader_args": {"start": 7}},
}


def rewards_of(step, prompts):
  """Returns metrics as a run would record them: they depend on what was taken."""
  shares = collections.Counter(p.dataset for p in prompts)
  means = {f"data/{n}/reward_mean": shares[n] / (step + 2) for n in ("letters", "digits")}
  return {**means, "train/loss": float("nan")}


def steps(source, first, last, resume=None):
  """What is taken in some steps; `resume` makes a new stream of the state after every one."""
  taken = []
  for step in range(first, last):
    prompts = source.take(3)
    source.record_metrics(step, rewards_of(step, prompts))
    taken.append(([p.prompt_id for p in prompts], source.metrics()))
    source = resume(json.loads(json.dumps(source.state()))) if resume else source
  return taken


@pytest.mark.long
@pytest.mark.parametrize("way", [*WAYS, "weights"])
def test_a_stream_resumed_after_every_step_is_the_unbroken_one(two, way):
  datasets = [{**one, "weight": i + 1} for i, one in enumerate(two)] if way == "weights" else two
  make = lambda state=None: stream(datasets, seed=4, state=state, **WAYS.get(way, {}))
  unbroken = steps(make(), 0, 45)
  assert steps(make(), 0, 16, resume=make) == unbroken[:16]
  assert len({tuple(ids) for ids, _ in unbroken}) == 45


def test_records_are_the_metrics_of_past_steps(two, monkeypatch):
  seen = []

  def look(loaders, *, num_prompts, records, memory):
    seen.append(records)
    return loaders["letters"].take(num_prompts)

  monkeypatch.setattr("grpo_jax.data.streams.DATALOADERS", {"look": look})
  source = stream(two, dataloader="look")
  source.take(1)
  source.record_metrics(0, {"data/letters/reward_mean": 0.25, "train/kl": float("inf")})
  source.take(1)
  source.record_metrics(1, {"data/letters/reward_mean": 0.5})
  source.take(1)
  first = {"step": 0, "data/letters/reward_mean": 0.25}
  assert seen == [(), (first,), (first, {"step": 1, "data/letters/reward_mean": 0.5})]
  for step in range(2, 60):
    source.record_metrics(step, {})
  assert [record["step"] for record in source.state()["records"]] == list(range(28, 60))


def too_few(loaders, *, num_prompts, records, memory):
  return loaders["letters"].take(num_prompts - 1)


def keeps_a_set(loaders, *, num_prompts, records, memory):
  memory["seen"] = {1}
  return loaders["letters"].take(num_prompts)


def test_a_loader_function_that_breaks_its_contract_is_reported(two):
  with pytest.raises(ValueError, match="dataloader returned 3 prompts, expected 4"):
    stream(two, dataloader=f"{__name__}.too_few").take(4)
  with pytest.raises(TypeError, match="the memory of data.dataloader must be JSON"):
    stream(two, dataloader=f"{__name__}.keeps_a_set").take(4)
  with pytest.raises(
    ExpectedFailure, match=r"failed: .*test_loaders.py:\d+: ZeroDivisionError: div"
  ):
    stream(two, dataloader=f"{__name__}.divides").take(4)


def divides(loaders, *, num_prompts, records, memory):
  return num_prompts / 0


def test_data_that_differ_from_the_state_are_reported(two, caplog):
  state = stream(two, num_prompts_per_dataloader=2).state()
  renamed = [two[0], {**two[1], "name": "numbers"}]
  stream(renamed, num_prompts_per_dataloader=2, state=state)
  expected = "was not read before (only letters, digits); it starts from its beginning"
  assert f"'numbers' {expected}" in caplog.text
  caplog.clear()
  twice = [two[0], {**two[1], "repeat": 2}]
  stream(twice, num_prompts_per_dataloader=2, state=state)
  assert "'digits' had 8 rows, now 16" in caplog.text
  caplog.clear()
  stream(two, num_prompts_per_dataloader=2, state=state)
  assert not caplog.text
  path = pathlib.Path(two[1]["path"])
  path.write_text("".join(path.read_text().splitlines(keepends=True)[::-1]))
  stream(two, num_prompts_per_dataloader=2, state=state)
  assert "the rows of 'digits' are not those that the run began with" in caplog.text


@pytest.mark.long
def test_shares_begin_again_if_weights_differ_from_the_state(two):
  more = [{**two[0], "weight": 1}, {**two[1], "weight": 1}, {**two[1], "weight": 2, "name": "new"}]
  source = stream(more[:2])
  source.take(40)
  counts = collections.Counter(p.dataset for p in stream(more, state=source.state()).take(40))
  assert counts == {"letters": 10, "digits": 10, "new": 20}
  in_turn = stream(two, num_prompts_per_dataloader=2, state=source.state())
  assert collections.Counter(p.dataset for p in in_turn.take(8)) == {"letters": 4, "digits": 4}


# --- the curriculum ---


def climb(two, rewards, **settings):
  """Datasets that the steps take from, if a step on a dataset earns this reward."""
  source = stream(two, dataloader="by_success", dataloader_args=settings)
  path = []
  for step in range(6):
    names = [p.dataset for p in source.take(4)]
    path.append(names)
    shown = {f"data/{n}/prompts": 1.0 for n in set(names)}
    source.record_metrics(step, shown | {f"data/{n}/reward_mean": rewards[n] for n in set(names)})
  return path


def test_curriculum_climbs_when_a_dataset_is_solved_and_not_before(two):
  easy, hard = ["letters"] * 4, ["digits"] * 4
  solved = climb(two, {"letters": 0.8, "digits": 0.1}, threshold=0.8, window=2)
  assert solved == [easy, easy, hard, hard, hard, hard]
  assert climb(two, {"letters": 0.79, "digits": 0.1}, threshold=0.8, window=2) == [easy] * 6
  review = climb(two, {"letters": 0.9, "digits": 0.1}, window=1, review_share=0.25)
  assert review == [easy] + [["digits"] * 3 + ["letters"]] * 5


def test_curriculum_names_a_metric_that_is_not_there(two):
  with pytest.raises(ValueError, match="no metric 'data/letters/accuracy'"):
    climb(two, {"letters": 1.0}, metric="accuracy")


@pytest.mark.parametrize(
  "settings",
  [
    {"window": 0},
    {"window": 33},  # records have 32 steps: it would never climb.
    {"window": 2.0},
    {"threshold": "0.5"},
    {"metric": "acuracy"},
    {"review_share": 1.5},
  ],
)
def test_a_curriculum_that_could_not_work_is_refused(two, settings):
  with pytest.raises(ValueError, match=f"by_success: {next(iter(settings))} must be"):
    stream(two, dataloader="by_success", dataloader_args=settings)


# --- splits ---


@pytest.mark.parametrize("size", [1, 3, 0.05, 0.5, 9])
def test_a_split_parts_the_rows_in_their_order(size):
  sides = {}
  for side in ("train", "validation"):
    part = RowSelection(10, side=side, split_validation_size=size, split_seed=1)
    sides[side] = [part.source_row(row) for row in range(len(part))]
    assert sides[side] == sorted(sides[side])
  assert sorted(sides["train"] + sides["validation"]) == list(range(10))
  assert len(sides["validation"]) == {1: 1, 3: 3, 0.05: 1, 0.5: 5, 9: 9}[size]


def test_a_split_depends_on_its_seed_alone():
  drawn = lambda seed: [
    RowSelection(1000, side="validation", split_validation_size=9, split_seed=seed).source_row(row)
    for row in range(9)
  ]
  assert drawn(1) == drawn(1) != drawn(2)


def test_splits_that_leave_a_side_empty_are_refused():
  for size, reason in ((10, "splits 10 of 10"), (-1, "negative"), (2.5, "a whole number")):
    with pytest.raises(ValueError, match=reason):
      RowSelection(10, side="train", split_validation_size=size)


def test_a_stream_never_sees_what_is_split_off(two):
  shared = {**two[1], "split_validation_size": 3, "split_seed": 5}
  epoch = words(data.make(TOKENIZER, **shared).take(5))
  sets = data.evaluation_sets(shared, (), {}, (), name="heldout")
  held_out = words(data.make_held_out(TOKENIZER, **sets["heldout"]))
  assert sorted(epoch + held_out) == sorted("12345678")


# --- what a config may say ---


def test_ways_of_mixing_exclude_each_other(two):
  with pytest.raises(ValueError, match="give only one of num_prompts_per_dataloader, dataloader"):
    stream(two, num_prompts_per_dataloader=2, dataloader="by_success")
  with pytest.raises(ValueError, match="every dataset needs a weight"):
    stream([{**two[0], "weight": 1}, two[1]])
  with pytest.raises(ValueError, match=r"datasets\[1\].weight must be a finite number >= 0"):
    stream([{**two[0], "weight": 1}, {**two[1], "weight": float("nan")}])
  with pytest.raises(ValueError, match="dataloader_args needs data.dataloader"):
    stream(two, dataloader_args={"threshold": 1})
  with pytest.raises(ValueError, match="by_success takes no 'treshold' .did you mean 'thr"):
    stream(two, dataloader="by_success", dataloader_args={"treshold": 1})
  with pytest.raises(ValueError, match="unknown dataloader 'by_sucess'.*'by_success'"):
    stream(two, dataloader="by_sucess")


def test_mistakes_in_a_list_name_its_place(two):
  with pytest.raises(ValueError, match=r"data.datasets\[1\] has no field 'pth'.*'path'"):
    stream([two[0], {"pth": "x"}])
  with pytest.raises(ValueError, match="two datasets called 'letters': give one of them a name"):
    stream([two[0], two[0]])
  with pytest.raises(ValueError, match=r"data.datasets\[0\] has no data"):
    stream([{"weight": 1}])
  with pytest.raises(
    ValueError, match=r"data.datasets\[1\].repeat must be an integer >= 1, got '2' \(str\)"
  ):
    stream([two[0], {**two[1], "repeat": "2"}])
  with pytest.raises(
    ValueError, match=r"data.datasets\[0\].weight must be a finite number >= 0, or None, got '1'"
  ):
    stream([{**two[0], "weight": "1"}])
  with pytest.raises(
    ValueError, match=r"data.datasets\[0\].overlong must be one of 'drop', 'zero_weight', got True"
  ):
    stream([{**two[0], "overlong": True}])
  with pytest.raises(ValueError, match=r"data.datasets\[0\] must be a mapping"):
    stream(["letters.jsonl"])


# --- the examples of docs/data.md ---

DOCS = pathlib.Path(__file__).parents[2] / "docs" / "data.md"


def example(first_line):
  """Returns what the block of the page that begins so defines."""
  blocks = [block.split("```")[0] for block in DOCS.read_text().split("```python\n")[1:]]
  (block,) = [block for block in blocks if block.startswith(first_line)]
  scope = {}
  exec(block, scope)
  return scope


def test_the_loader_function_of_the_page_works(two, monkeypatch):
  worse_first = example("# my_loaders.py")["worse_first"]
  monkeypatch.setattr("grpo_jax.data.streams.DATALOADERS", {"worse_first": worse_first})
  source = stream(two, dataloader="worse_first", dataloader_args={"extra": 1})
  counts = []
  for step, (letters, digits) in enumerate([(0.9, 0.2), (0.1, 0.2)]):
    counts.append(collections.Counter(p.dataset for p in source.take(4)))
    source.record_metrics(
      step, {"data/letters/reward_mean": letters, "data/digits/reward_mean": digits}
    )
  counts.append(collections.Counter(p.dataset for p in source.take(4)))
  letters_first, digits_first = {"letters": 3, "digits": 1}, {"letters": 1, "digits": 3}
  assert counts == [letters_first, digits_first, letters_first]


def test_the_processor_of_the_page_works():
  choices = example("# my_rows.py")["choices"]
  row = {"question": "2+2?", "options": ["3", "4"], "correct": "B"}
  record = choices(row, "x.jsonl:1", PromptStyle(system_prompt="Be brief."))
  assert [message["content"] for message in record.messages] == [
    "Be brief.",
    "2+2?\nA. 3\nB. 4\nAnswer in \\boxed{} with one letter.",
  ]
  assert record.info["expected_answer"] == "B"
