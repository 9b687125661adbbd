"""Files and tasks → prompt streams: order, epochs, resume, broken rows, long prompts."""

import json
import os
import pickle
import tracemalloc

import numpy as np
import pytest

from grpo_jax import data
from grpo_jax.data import formats, jsonl
from grpo_jax.data.byte_tokenizer import ByteTokenizer
from grpo_jax.data.formats import RowError
from grpo_jax.data.generated import ReasoningGymSource
from grpo_jax.data.jsonl import JsonlSource, index_lines
from grpo_jax.data.skipped_rows import OverlongError

TOKENIZER = ByteTokenizer()


def write(path, rows, *, end="\n"):
  path.write_text("".join(json.dumps(r) + end for r in rows))
  return path


@pytest.fixture
def gsm8k(tmp_path):
  """Seven rows of the shape of GSM8K."""
  rows = [{"question": f"What is {i}+{i}?", "answer": f"{i}+{i}\n#### {2 * i}"} for i in range(7)]
  return write(tmp_path / "gsm8k.jsonl", rows)


def stream(path, **settings):
  keys = dict(input_key="question", output_key="answer")
  return data.make(TOKENIZER, path=path, **(keys | settings))


def state_at(cursor, *, rows=7):
  return {"loaders": {"gsm8k": {"cursor": cursor, "rows": rows}}, "memory": {}, "records": []}


def ids(prompts):
  return [p.prompt_id for p in prompts]


def test_stream_makes_prompts_of_rows(gsm8k):
  (prompt,) = stream(gsm8k, shuffle=False, environment="math").take(1)
  assert prompt.prompt_id == "gsm8k:0:0"
  assert prompt.text == "<role>user\nWhat is 0+0?<end><role>assistant\n"
  assert TOKENIZER.decode(prompt.token_ids, skip_special=False) == prompt.text
  assert prompt.info == {"problem": "What is 0+0?", "expected_answer": "0+0\n#### 0"}
  assert (prompt.environment, prompt.weight) == ("math", 1.0)


def called(arguments):
  call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
  return {
    "messages": [
      {"role": "user", "content": "a"},
      {"role": "assistant", "content": None, "tool_calls": [call]},
      {"role": "tool", "content": "1", "tool_call_id": "c"},
      {"role": "user", "content": "b"},
    ]
  }


def test_calls_of_rows_have_objects_as_arguments_also_if_they_were_text(tmp_path):
  """For templates, environments and, without a template for calls, in the prompt's own text."""
  given = {"x": '{"y": 1}', "z": [1, None]}
  rows = [called(given), called(json.dumps(given)), called(""), called(None)]
  path = write(tmp_path / "rows.jsonl", rows)
  prompts = stream(path, shuffle=False, output_key=None).take(4)
  found = [p.messages[1]["tool_calls"][0]["function"]["arguments"] for p in prompts]
  assert found == [given, given, {}, {}]
  assert prompts[0].text == prompts[1].text and json.dumps(given) in prompts[0].text
  assert prompts[0].messages == prompts[1].messages


@pytest.mark.parametrize(
  "arguments", ['{"x": ', "[1]", "7", [1], 7, "NaN", '{"x": 1e999}', '"a"', '{"x": "\\ud800"}']
)
def test_arguments_that_are_not_an_object_are_refused_with_their_place(tmp_path, arguments):
  path = write(tmp_path / "rows.jsonl", [called({}), called(arguments)])
  with pytest.raises(RowError, match=r"rows\.jsonl:2: arguments of call 1 of message 2"):
    stream(path, shuffle=False, output_key=None).take(2)


def test_every_epoch_has_every_row_once_in_an_order_of_its_own(gsm8k):
  taken = ids(stream(gsm8k, seed=1).take(21))
  assert len(set(taken)) == 21
  epochs = [[i.split(":") for i in taken[e * 7 : e * 7 + 7]] for e in range(3)]
  for number, epoch in enumerate(epochs):
    assert {e for _, e, _ in epoch} == {str(number)}
    assert sorted(int(row) for *_, row in epoch) == list(range(7))
  orders = [tuple(row for *_, row in epoch) for epoch in epochs]
  assert len(set(orders)) == 3


def test_order_depends_on_the_seed_and_on_nothing_else(gsm8k):
  assert ids(stream(gsm8k, seed=1).take(14)) == ids(stream(gsm8k, seed=1).take(14))
  # grain adds the epoch to the seed: seed 2's first epoch must not be seed 1's second.
  rows = lambda seed: [i.rpartition(":")[2] for i in ids(stream(gsm8k, seed=seed).take(14))]
  assert rows(1)[7:] != rows(2)[:7]


@pytest.mark.parametrize("cut", [0, 1, 6, 7, 10])
def test_a_resumed_stream_continues_like_an_unbroken_one(gsm8k, cut):
  unbroken = ids(stream(gsm8k, seed=5).take(18))
  first = stream(gsm8k, seed=5)
  head = ids(first.take(cut))
  resumed = stream(gsm8k, seed=5, state=first.state())
  assert head + ids(resumed.take(18 - cut)) == unbroken


def test_resume_passes_over_skipped_rows_as_the_unbroken_stream_does(tmp_path):
  rows = [{"problem": f"{i}", "expected_answer": "1"} if i % 3 else {"oops": i} for i in range(9)]
  path = write(tmp_path / "x.jsonl", rows)
  settings = dict(path=path, on_error="skip", seed=2)
  unbroken, broken = data.make(TOKENIZER, **settings), data.make(TOKENIZER, **settings)
  expected = [(ids(unbroken.take(2)), unbroken.metrics()) for _ in range(8)]
  got = []
  for _ in range(8):
    broken = data.make(TOKENIZER, **settings, state=broken.state())
    got.append((ids(broken.take(2)), broken.metrics()))
  assert got == expected
  assert (
    sum(m["data/broken_rows"] for _, m in got) == unbroken.state()["loaders"]["x"]["cursor"] - 16
  )


def test_stream_ends_after_its_epochs(gsm8k):
  short = stream(gsm8k, epochs=2)
  assert [len(short.take(5)) for _ in range(4)] == [5, 5, 4, 0]
  assert short.metrics()["data/epoch"] == 2.0


def test_a_cursor_outside_of_the_data_is_refused(gsm8k):
  with pytest.raises(ValueError, match="cursor 8 is outside of the data: 7 positions"):
    stream(gsm8k, epochs=1, state=state_at(8))


def test_broken_row_stops_with_file_line_and_reason(tmp_path):
  path = tmp_path / "x.jsonl"
  path.write_bytes(b'\n{"problem": "a", "expected_answer": "1"}\n  \n{"problem": \n')
  with pytest.raises(RowError, match=r"x\.jsonl:4: invalid JSON at column"):
    data.make(TOKENIZER, path=path, shuffle=False).take(2)


def test_broken_rows_are_skipped_counted_and_shown(tmp_path, caplog):
  rows = [{"problem": "a", "expected_answer": "1"}, {"problem": "b"}, {"problem": ""}]
  path = write(tmp_path / "x.jsonl", rows)
  reader = data.make(TOKENIZER, path=path, shuffle=False, on_error="skip", epochs=1)
  assert ids(reader.take(5)) == ["x:0:0"]
  assert reader.metrics()["data/broken_rows"] == 2.0
  assert "x.jsonl:2: no key 'expected_answer'" in caplog.text
  assert "x.jsonl:3: 'problem' is empty" in caplog.text


@pytest.mark.parametrize("make", [lambda **k: data.make(TOKENIZER, **k).take(1), None])
def test_a_file_of_broken_rows_only_raises_instead_of_reading_for_ever(tmp_path, make):
  path = write(tmp_path / "x.jsonl", [{"problem": 1}] * 3)
  make = make or (lambda **k: data.make_held_out(TOKENIZER, **k))
  reason = r"no row of 'x' can be used: skipped 3 of 3 rows: 3 broken; first: .*x.jsonl:"
  with pytest.raises(ValueError, match=reason):
    make(path=path, on_error="skip")


def test_long_prompts_are_dropped_and_counted(gsm8k):
  longest = len(stream(gsm8k, shuffle=False).take(1)[0].token_ids)
  rows = [json.loads(line) for line in gsm8k.read_text().splitlines()]
  rows[2]["question"] += "!"
  write(gsm8k, rows)
  kept = stream(gsm8k, shuffle=False, epochs=1, max_prompt_tokens=longest, overlong="drop")
  assert ids(kept.take(9)) == [f"gsm8k:0:{i}" for i in (0, 1, 3, 4, 5, 6)]
  assert kept.metrics()["data/overlong_prompts"] == 1.0
  assert kept.metrics()["data/broken_rows"] == 0.0


def test_long_prompts_are_kept_with_weight_zero_by_option(gsm8k):
  kept = stream(gsm8k, epochs=1, max_prompt_tokens=8, overlong="zero_weight")
  prompts = kept.take(9)
  assert [(len(p.token_ids), p.weight) for p in prompts] == [(8, 0.0)] * 7
  assert kept.metrics()["data/overlong_prompts"] == 7.0


LONG = 5_000_000  # characters.


class Counting(ByteTokenizer):
  """Counts the characters that are encoded."""

  def __init__(self):
    self.encoded = 0

  def encode(self, text):
    self.encoded += len(text)
    return super().encode(text)


@pytest.fixture
def one_long_row(tmp_path):
  rows = [{"question": "x" * LONG, "answer": "y"}, {"question": "ok", "answer": "z"}]
  rows.append({"messages": [{"role": "user", "content": "x" * LONG}], "more": ["x" * LONG]})
  return write(tmp_path / "long.jsonl", rows)


def test_a_row_of_too_many_characters_is_dropped_unencoded(one_long_row):
  tokenizer = Counting()
  keys = dict(input_key="question", output_key="answer", shuffle=False, epochs=1)
  kept = data.make(tokenizer, path=one_long_row, **keys, max_prompt_tokens=64, overlong="drop")
  (prompt,) = kept.take(3)
  assert (prompt.info["problem"], kept.metrics()["data/overlong_prompts"]) == ("ok", 2.0)
  assert prompt.where == f"{one_long_row}:2"
  assert tokenizer.encoded < 1000
  too_many = rf"long.jsonl:1: {LONG + 32} characters, where 64 tokens have at most 384"
  with pytest.raises(OverlongError, match=too_many):
    of_row = dict(input_key="question", output_key="answer", max_prompt_tokens=64)
    opened = data.open_dataset(tokenizer, path=one_long_row, **of_row, overlong="drop")
    opened.prompt(0, epoch=0)


def test_a_row_of_too_many_characters_is_kept_with_weight_zero_and_without_them(one_long_row):
  tokenizer = Counting()
  keys = dict(input_key="question", output_key="answer", shuffle=False, epochs=1)
  kept = data.make(
    tokenizer, path=one_long_row, **keys, max_prompt_tokens=64, overlong="zero_weight"
  )
  first, second, third = kept.take(3)
  assert kept.metrics()["data/overlong_prompts"] == 2.0
  assert [p.weight for p in (first, second, third)] == [0.0, 1.0, 0.0]
  assert [p.is_cut for p in (first, second, third)] == [True, False, True]
  assert TOKENIZER.decode(first.token_ids, skip_special=False) == "<role>user\n" + "x" * 58
  assert len(pickle.dumps([first, third])) < 10_000  # nothing of the long text is kept.
  assert tokenizer.encoded < 2000


@pytest.mark.parametrize("length", [1, 47, 48, 49, 300, 301, 342, 343, 400, 100_000])
def test_a_prompt_is_too_long_by_its_characters_only_if_it_is_by_its_tokens(length, tmp_path):
  path = write(tmp_path / "a.jsonl", [{"problem": "é" * length, "expected_answer": "1"}])
  dataset = data.open_dataset(TOKENIZER, path=path, max_prompt_tokens=64, overlong="zero_weight")
  messages = [{"role": "user", "content": "é" * length}]
  tokens = len(TOKENIZER.apply_chat_template(messages))
  prompt = dataset.prompt(0, epoch=0)
  assert prompt.is_cut == (tokens > 64)
  np.testing.assert_array_equal(prompt.token_ids, TOKENIZER.apply_chat_template(messages)[:64])
  assert prompt.text == TOKENIZER.decode(prompt.token_ids, skip_special=False)


def test_a_line_that_fits_no_model_is_not_read(tmp_path, monkeypatch):
  monkeypatch.setattr(jsonl, "MOST_BYTES", 100)
  source = JsonlSource(write(tmp_path / "a.jsonl", [{"a": "x"}, {"a": "x" * 100}]))
  assert source[0] == {"a": "x"}
  with pytest.raises(RowError, match=r"a.jsonl:2: the line has 110 bytes; at most 100 are read"):
    source[1]


def test_held_out_prompts_that_are_too_long_are_reported(gsm8k, caplog):
  own = {"path": gsm8k, "input_key": "question", "output_key": "answer"}
  data.make_held_out(TOKENIZER, **own, overlong="zero_weight", limit=3)
  assert not caplog.text
  data.make_held_out(TOKENIZER, **own, overlong="zero_weight", limit=3, max_prompt_tokens=8)
  assert "3 of the 3 held-out prompts of 'gsm8k' are longer than 8 tokens" in caplog.text


def test_held_out_set_is_the_first_rows_in_their_order(gsm8k):
  prompts = data.make_held_out(
    TOKENIZER, path=gsm8k, limit=3, input_key="question", output_key="answer"
  )
  assert ids(prompts) == ["gsm8k:0:0", "gsm8k:0:1", "gsm8k:0:2"]


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("last", ["", "{}"])
def test_line_index_finds_the_lines_that_are_not_blank(tmp_path, monkeypatch, ending, last):
  lines = ["", '{"a": 1}', "  \t", "", '{"bb": "é"}', "{}", "   ", '{"c": 3}', "", last]
  path = tmp_path / "x.jsonl"
  path.write_bytes(ending.join(lines).encode())
  expected = [(i, text) for i, text in enumerate(lines) if text.strip()]
  for chunk in (1, 2, 3, 7, 1 << 20):  # whatever the pieces in which the file is read.
    monkeypatch.setattr("grpo_jax.data.jsonl._CHUNK_BYTES", chunk)
    source = JsonlSource(path)
    got = [(int(source.where(r).rpartition(":")[2]) - 1, source[r]) for r in range(len(source))]
    assert got == [(i, json.loads(text)) for i, text in expected]


def test_a_large_file_is_indexed_in_little_memory_and_never_loaded(tmp_path):
  path = tmp_path / "large.jsonl"
  block = b"".join(b'{"problem": "%0200d", "expected_answer": "1"}\n' % i for i in range(4000))
  with path.open("wb") as file:
    for _ in range(32):
      file.write(block)
  size = os.path.getsize(path)
  tracemalloc.start()
  index = index_lines(path)
  _, peak = tracemalloc.get_traced_memory()
  tracemalloc.stop()
  assert len(index) == 128_000 and size > 29e6
  assert index.starts.nbytes < 1.1e6 and index.filled is None
  # The peak depends on the piece (4 MiB and its masks), not on the file.
  assert peak < 80e6
  assert JsonlSource(path)[127_999]["problem"] == f"{3999:0200d}"


def test_data_errors_name_what_there_is(tmp_path, gsm8k):
  with pytest.raises(FileNotFoundError, match="did you mean 'gsm8k.jsonl'"):
    data.make(TOKENIZER, path=tmp_path / "gsmk8.jsonl")
  (tmp_path / "empty.jsonl").write_text("\n \n")
  with pytest.raises(ValueError, match="empty.jsonl has no rows"):
    data.make(TOKENIZER, path=tmp_path / "empty.jsonl")
  (tmp_path / "x.jsonl").write_bytes(b"\x1f\x8b\x08")
  with pytest.raises(ValueError, match="x.jsonl cannot be unpacked"):
    data.make(TOKENIZER, path=tmp_path / "x.jsonl")
  with pytest.raises(ValueError, match="unknown kind 'jsnl'.*'jsonl'"):
    data.make(TOKENIZER, kind="jsnl")
  with pytest.raises(ValueError, match="unknown format 'message'.*'messages'"):
    data.make(TOKENIZER, path=gsm8k, format="message")
  with pytest.raises(ValueError, match="unknown reasoning-gym task 'chainsum'.*'chain_sum'"):
    data.make(TOKENIZER, kind="reasoning_gym", task="chainsum")
  with pytest.raises(ValueError, match="no argument 'maxterms'.*'max_terms'"):
    data.make(TOKENIZER, kind="reasoning_gym", task="chain_sum", task_args={"maxterms": 2})
  with pytest.raises(ValueError, match="'chain_sum' rejects"):
    data.make(TOKENIZER, kind="reasoning_gym", task="chain_sum", task_args={"min_terms": 9})
  with pytest.raises(ValueError, match="data.task, .*'countdown'.* data.kind='reasoning_gym'"):
    data.make(TOKENIZER, kind="function", task="countdown")
  with pytest.raises(ValueError, match="prompt: give the text or a file, not both"):
    data.make(TOKENIZER, path=gsm8k, prompt_template="{}", prompt_file=gsm8k)
  with pytest.raises(FileNotFoundError, match="no system_prompt_file"):
    data.make(TOKENIZER, path=gsm8k, system_prompt_file=tmp_path / "none.txt")


def test_prompt_files_are_read(tmp_path, gsm8k):
  (tmp_path / "system.txt").write_text("Be brief.")
  (tmp_path / "cot.txt").write_text("Think.\n{}\n")
  (prompt,) = stream(
    gsm8k,
    shuffle=False,
    system_prompt_file=tmp_path / "system.txt",
    prompt_file=tmp_path / "cot.txt",
  ).take(1)
  assert prompt.text.startswith(
    "<role>system\nBe brief.<end><role>user\nThink.\nWhat is 0+0?\n<end>"
  )
  assert prompt.info["problem"] == "What is 0+0?"
  (tmp_path / "cot.txt").write_bytes("\ufeffThink.\r\n{}".encode())
  (prompt,) = stream(gsm8k, shuffle=False, prompt_file=tmp_path / "cot.txt").take(1)
  assert prompt.text.startswith("<role>user\nThink.\nWhat")
  (tmp_path / "cot.txt").write_bytes("Réfléchis. {}".encode("latin-1"))
  with pytest.raises(ValueError, match=r"the prompt_file .*cot\.txt is not UTF-8 text"):
    stream(gsm8k, prompt_file=tmp_path / "cot.txt")


def test_reasoning_gym_rows_are_the_packages_own():
  import reasoning_gym

  args = dict(min_terms=2, max_terms=2, min_digits=1, max_digits=2)
  own = reasoning_gym.create_dataset("chain_sum", size=5, seed=1, **args)
  prompts = data.make_held_out(
    TOKENIZER,
    kind="reasoning_gym",
    task="chain_sum",
    task_args=args,
    task_seed=1,
    size=5,
    environment="reasoning_gym",
  )
  assert [p.info["problem"] for p in prompts] == [own[i]["question"] for i in range(5)]
  assert [p.info["entry"] for p in prompts] == [own[i] for i in range(5)]
  assert prompts[0].info["task_args"] == args | {"size": 5, "seed": 1}
  assert ids(prompts)[0] == "chain_sum-1:0:0"


def test_sources_of_the_users_own_are_found_by_dotted_path(tmp_path, monkeypatch):
  (tmp_path / "my_sources.py").write_text(
    "class Squares:\n"
    "  name = 'squares'\n"
    "  def __init__(self, size): self.size = size\n"
    "  def __len__(self): return self.size\n"
    "  def __getitem__(self, row): return {'problem': f'{row}*{row}', 'expected_answer': row**2}\n"
    "  def where(self, row): return f'squares:{row}'\n"
    "def make(config): return Squares(config.size)\n"
  )
  monkeypatch.syspath_prepend(tmp_path)
  prompts = data.make(TOKENIZER, kind="my_sources.make", size=4, shuffle=False).take(4)
  assert [p.info["expected_answer"] for p in prompts] == ["0", "1", "4", "9"]


def test_reasoning_gym_source_reads_any_row_without_those_before():
  source = ReasoningGymSource("chain_sum", size=100, seed=3)
  again = ReasoningGymSource("chain_sum", size=100, seed=3)
  assert source[73] == again[73] != source[72]
  assert np.unique([source[i]["entry"]["question"] for i in range(20)]).size > 15


def made(tmp_path, *rows, **settings):
  path = write(tmp_path / "rows.jsonl", rows)
  return data.make_held_out(TOKENIZER, path=path, **settings)


def test_loss_multiplier_is_the_prompts_weight_and_no_sign_of_length(tmp_path):
  given = (0, 0.5, 1, None, 2)
  rows = [{"problem": "a", "expected_answer": "1", "loss_multiplier": w} for w in given]
  prompts = made(tmp_path, *rows)
  assert [p.weight for p in prompts] == [0.0, 0.5, 1.0, 1.0, 2.0]
  assert prompts[1].info["loss_multiplier"] == 0.5
  reader = data.make(TOKENIZER, path=tmp_path / "rows.jsonl", shuffle=False)
  reader.take(4)
  assert reader.metrics()["data/overlong_prompts"] == 0.0
  for wrong in (-1, -1e-9, 1e7, 10**400, "1", "0.5", True, [1], {}):
    with pytest.raises(RowError, match=r"rows.jsonl:1: 'loss_multiplier' must be a number from 0"):
      made(tmp_path, {"problem": "a", "expected_answer": "1", "loss_multiplier": wrong})
  for wrong in (float("nan"), float("inf")):  # JSON has none, other kinds of rows may.
    with pytest.raises(RowError, match="'loss_multiplier' must be a number from 0 to 1,000,000"):
      formats.loss_multiplier({"loss_multiplier": wrong}, "rows.parquet:1")


TASKS = {
  "sum": {"environment": "calculator", "prompt_template": "Add: {}"},
  "chat": {"format": "messages"},
}


def test_task_names_lead_rows_to_their_environment_and_prompt(tmp_path):
  chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
  rows = [
    {"task_name": "sum", "problem": "1+1", "expected_answer": "2"},
    {"task_name": "chat", "messages": chat, "tags": ["a", {"b": 1}]},
  ]
  first, second = made(tmp_path, *rows, tasks=TASKS, environment="judge")
  assert (first.environment, first.text.split("<end>")[0]) == ("calculator", "<role>user\nAdd: 1+1")
  assert (second.environment, second.info["expected_answer"]) == ("judge", "hello")
  assert second.info["tags"] == ["a", {"b": 1}] and second.info["task_name"] == "chat"
  with pytest.raises(RowError, match=r"task_name 'sums' is not in data.tasks \(did you mean 'sum'"):
    made(tmp_path, {"task_name": "sums", "problem": "1", "expected_answer": "1"}, tasks=TASKS)
  with pytest.raises(RowError, match="no key 'task_name'"):
    made(tmp_path, {"problem": "1", "expected_answer": "1"}, tasks=TASKS)


def test_a_task_name_that_is_not_a_string_is_a_broken_row(tmp_path):
  path = tmp_path / "tasks.jsonl"
  path.write_text('{"problem": "q", "expected_answer": "a", "task_name": ["sums"]}\n')
  with pytest.raises(RowError, match=r"tasks\.jsonl:1: task_name \['sums'\] is not in"):
    stream(path, tasks={"sums": {}}, input_key=None, output_key=None).take(1)


def test_without_tasks_a_task_name_is_a_field_like_any_other(tmp_path):
  (prompt,) = made(tmp_path, {"task_name": "x", "problem": "1", "expected_answer": "1"})
  assert (prompt.environment, prompt.info["task_name"]) == ("math", "x")


def test_a_tasks_own_text_takes_the_place_of_the_shared_file(tmp_path):
  (tmp_path / "shared.txt").write_text("Shared: {}")
  row = {"task_name": "sum", "problem": "1+1", "expected_answer": "2"}
  (prompt,) = made(tmp_path, row, tasks=TASKS, prompt_file=tmp_path / "shared.txt")
  assert "Add: 1+1" in prompt.text


def test_keys_lead_into_nested_fields(tmp_path):
  row = {"prompt": [{"content": "1+1?"}], "reward_model": {"ground_truth": 2}, "a.b": "dotted"}
  keys = dict(input_key="prompt.0.content", output_key="reward_model.ground_truth")
  (prompt,) = made(tmp_path, row, **keys)
  assert (prompt.info["problem"], prompt.info["expected_answer"]) == ("1+1?", "2")
  (prompt,) = made(tmp_path, row, input_key="a.b", output_key="")
  assert prompt.info["problem"] == "dotted"
  with pytest.raises(RowError, match="no 'prompt.1.content': there is no '1' in a list"):
    made(tmp_path, row, input_key="prompt.1.content")


def shout(row, where, style):
  """A processor of a user's own."""
  from grpo_jax.data import formats

  messages = ({"role": "user", "content": row["text"].upper()},)
  return formats.Record(messages, {**row, "expected_answer": row["label"]})


def test_a_processor_of_the_users_own_is_found_and_its_errors_name_the_row(tmp_path):
  own = f"{__name__}.shout"
  (prompt,) = made(tmp_path, {"text": "hi", "label": "yes"}, format=own)
  assert "HI" in prompt.text and prompt.info["expected_answer"] == "yes"
  with pytest.raises(RowError, match=r"rows.jsonl:2: .*test_prompts.py:\d+: KeyError: 'label'"):
    made(tmp_path, {"text": "hi", "label": "yes"}, {"text": "ho"}, format=own)


# --- tools ---


def tool(name, **fields):
  parameters = {"type": "object", "properties": {}}
  function = {"name": name, "description": "", "parameters": parameters, **fields}
  return {"type": "function", "function": function}


TOOLS_OF = {"calls": (tool("of_environment"),)}


def tools_of(path, row, **settings):
  """Returns the names of the tools of a prompt, which its text must have as well."""
  file = write(path / "rows.jsonl", [{"problem": "?", "expected_answer": "1", **row}])
  dataset = data.open_dataset(TOKENIZER, path=file, tools_of=TOOLS_OF, **settings)
  prompt = dataset.prompt(0, epoch=0)
  names = [each["function"]["name"] for each in prompt.tools]
  assert prompt.text.startswith("<role>tools" if names else "<role>user")
  assert all(f'"{name}"' in prompt.text for name in names)
  return names


@pytest.mark.parametrize(
  ("row", "environment", "names"),
  [
    ({}, "math", []),
    ({}, "calls", ["of_environment"]),
    ({"tools": None}, "calls", ["of_environment"]),
    ({"tools": []}, "calls", []),
    ({"tools": [tool("own")]}, "calls", ["own"]),
    ({"tools": [tool("own"), tool("other")]}, "math", ["own", "other"]),
    ({"tools": [{"type": "function", "name": "flat", "parameters": {}}]}, "math", ["flat"]),
    ({"tools": json.dumps([tool("text")])}, "math", ["text"]),
  ],
)
def test_a_row_s_own_tools_come_before_those_of_its_environment(tmp_path, row, environment, names):
  assert tools_of(tmp_path, row, environment=environment) == names


def test_a_row_chooses_its_environment_and_the_tools_with_it(tmp_path):
  known = ("math", "calls")
  row = {"environment": "calls"}
  assert tools_of(tmp_path, row, known_environments=known) == ["of_environment"]


def test_another_field_may_hold_the_tools_or_none(tmp_path):
  row = {"tools": ["hammer"], "functions": [tool("own")]}
  with pytest.raises(RowError, match=r"rows.jsonl:1: tool 1 must be an object, got 'hammer'"):
    tools_of(tmp_path, row)
  assert tools_of(tmp_path, row, tools_key="functions") == ["own"]
  assert tools_of(tmp_path, row, tools_key="") == []


def test_a_dataset_has_no_field_for_tools_of_environments(gsm8k):
  with pytest.raises(ValueError, match="no field 'tools_of'"):
    stream(gsm8k, tools_of={})
