"""JSON, parquet, folders, hub datasets; the cached index of large files."""

import gzip
import json
import os

import pytest

from grpo_jax import data
from grpo_jax.data import file_cache, jsonl, tables
from grpo_jax.data.byte_tokenizer import ByteTokenizer
from grpo_jax.data.formats import RowError
from grpo_jax.data.jsonl import JsonlSource
from grpo_jax.data.sources import SourceConfig, open_source
from grpo_jax.files import hub

TOKENIZER = ByteTokenizer()
ROWS = [{"problem": f"{i}+{i}", "expected_answer": str(2 * i), "n": {"i": [i]}} for i in range(5)]


def problems(**settings):
  return [p.info["problem"] for p in data.make_held_out(TOKENIZER, **settings)]


def write(path, content):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(content)
  return path


def as_lines(rows):
  return "".join(json.dumps(row) + "\n" for row in rows)


def write_parquet(path, rows, **options):
  pyarrow = pytest.importorskip("pyarrow")
  parquet = pytest.importorskip("pyarrow.parquet")
  path.parent.mkdir(parents=True, exist_ok=True)
  parquet.write_table(pyarrow.Table.from_pylist(rows), path, **options)
  return path


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
  monkeypatch.setenv("GRPO_JAX_CACHE", str(tmp_path / "cache"))
  return tmp_path / "cache"


@pytest.mark.parametrize(
  "content",
  [
    json.dumps(ROWS),
    json.dumps(ROWS, indent=2),
    json.dumps({"version": "1", "data": ROWS}),
    "\ufeff" + json.dumps(ROWS),
    as_lines(ROWS),
    "\n\n" + as_lines(ROWS),
  ],
  ids=["list", "indented", "under-a-key", "byte-order-mark", "lines", "blank-lines-first"],
)
def test_json_holds_a_list_of_rows_in_any_of_the_usual_shapes(tmp_path, content):
  path = write(tmp_path / "x.json", content)
  prompts = data.make_held_out(TOKENIZER, path=path)
  assert [p.info for p in prompts] == ROWS
  assert prompts[1].prompt_id == "x:0:1"


def test_json_of_several_splits_needs_one_of_them(tmp_path):
  path = write(tmp_path / "x.json", json.dumps({"train": ROWS[:3], "test": ROWS[3:]}))
  assert problems(path=path, split="test") == ["3+3", "4+4"]
  with pytest.raises(ValueError, match="with the lists of rows 'train', 'test'; data.split"):
    problems(path=path)
  with pytest.raises(ValueError, match="it is 'tets'"):
    problems(path=path, split="tets")
  write(path, json.dumps(ROWS[0]))
  with pytest.raises(ValueError, match="x.json holds one object, and no list of rows"):
    problems(path=path)


def test_json_errors_name_file_and_row(tmp_path):
  path = write(tmp_path / "x.json", '[{"problem": "a", "expected_answer": "1"}, 7]')
  with pytest.raises(RowError, match=r"x.json, row 2: a row must be a JSON object, got 7"):
    problems(path=path)
  for content in ("[1", '[{"problem": NaN}]'):
    with pytest.raises(ValueError, match="x.json: invalid JSON"):
      problems(path=write(path, content))
  with pytest.raises(ValueError, match="x.json has no rows"):
    problems(path=write(path, "[]"))


@pytest.mark.parametrize("unpacked", [False, True])
def test_parquet_gives_the_rows_of_the_same_jsonl(tmp_path, monkeypatch, unpacked):
  if unpacked:
    monkeypatch.setattr(tables, "_IN_MEMORY_BYTES", 0)
    monkeypatch.setattr(tables, "_UNPACKED_ROWS", 2)
  path = write_parquet(tmp_path / "x.parquet", ROWS, row_group_size=3)
  prompts = data.make_held_out(TOKENIZER, path=path)
  assert [p.info for p in prompts] == ROWS
  assert len(list((tmp_path / "cache").rglob("rows.arrow"))) == unpacked


def test_a_file_that_is_not_parquet_is_refused(tmp_path):
  pytest.importorskip("pyarrow")
  with pytest.raises(ValueError, match="x.parquet is not a readable parquet file"):
    problems(path=write(tmp_path / "x.parquet", "PAR0"))


def test_an_unusual_ending_is_read_by_kind_or_by_what_is_in_it(tmp_path):
  assert problems(path=write(tmp_path / "x.txt", as_lines(ROWS)))[4] == "4+4"
  assert problems(path=write_parquet(tmp_path / "x.pq", ROWS))[4] == "4+4"
  assert problems(path=write(tmp_path / "y.txt", json.dumps(ROWS)), kind="json")[4] == "4+4"


def test_a_folder_is_read_by_split_in_the_order_of_its_files(tmp_path):
  for number in (0, 1):
    write_parquet(tmp_path / f"data/train-0000{number}-of-00002.parquet", ROWS[number : number + 1])
  write_parquet(tmp_path / "data/test-00000-of-00001.parquet", ROWS[4:])
  write(tmp_path / "dataset_infos.json", "{}")
  assert problems(path=tmp_path, split="train") == ["0+0", "1+1"]
  assert problems(path=tmp_path, split="test") == ["4+4"]
  assert len(problems(path=tmp_path)) == 3
  with pytest.raises(FileNotFoundError, match="no file of the split 'dev'.*data/test-00000"):
    problems(path=tmp_path, split="dev")


def test_a_split_is_a_word_of_a_files_name_or_is_said_to_choose_nothing(tmp_path, caplog):
  write(tmp_path / "sums_train.jsonl", as_lines(ROWS[:1]))
  write(tmp_path / "train_1M.jsonl", as_lines(ROWS[1:]))
  assert problems(path=tmp_path, split="train") == ["0+0"]
  assert problems(path=tmp_path / "sums_train.jsonl", split="train") == ["0+0"]
  assert not caplog.text
  problems(path=tmp_path / "sums_train.jsonl", split="test")
  assert "all rows of" in caplog.text and "split='test' does not apply to it" in caplog.text


def test_a_compressed_file_of_lines_is_read_from_an_unpacked_copy(tmp_path, cache):
  path = tmp_path / "hub" / "train.jsonl.gz"
  path.parent.mkdir()
  path.write_bytes(gzip.compress((as_lines(ROWS) + "{\n").encode()))
  source = open_source(SourceConfig(kind="auto", path=path))
  assert source.name == "train" and source[4] == ROWS[4]
  with pytest.raises(RowError, match=r"hub/train.jsonl.gz:6: invalid JSON"):
    source[5]
  folder = open_source(SourceConfig(kind="auto", path=path.parent, split="train"))
  assert folder[0] == ROWS[0] and len([*cache.rglob("rows")]) == 1
  path.write_bytes(gzip.compress(as_lines(ROWS).encode())[:-9])
  with pytest.raises(ValueError, match=r"train.jsonl.gz cannot be unpacked: "):
    open_source(SourceConfig(kind="auto", path=path))


def test_a_folder_with_a_named_dataset_has_its_usual_splits(tmp_path):
  rows = [{"question": f"{i}?", "answer": f"#### {i}"} for i in range(3)]
  write(tmp_path / "main" / "train.jsonl", as_lines(rows[:2]))
  write(tmp_path / "main" / "test.jsonl", as_lines(rows[2:]))
  own = dict(dataset="GSM8K", path=tmp_path)
  assert problems(**own) == ["0?", "1?"]
  assert problems(**own, for_evaluation=True) == ["2?"]


def test_hub_datasets_are_read_by_the_library(tmp_path):
  datasets = pytest.importorskip("datasets")
  datasets.disable_progress_bars()
  for split, rows in (("train", ROWS[:3]), ("test", ROWS[3:])):
    write(tmp_path / "set" / f"{split}.jsonl", as_lines(rows))
  own = dict(kind="hub", path=tmp_path / "set", dataset="me/set")
  assert problems(**own) == ["0+0", "1+1", "2+2"]
  prompts = data.make_held_out(TOKENIZER, **own, split="test")
  assert [p.info for p in prompts] == ROWS[3:]
  assert prompts[0].prompt_id == "set:0:0"
  with pytest.raises(ValueError, match=r"cannot open the dataset .*split 'tset'.*data.path"):
    problems(**own, split="tset")
  saved = datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS[1:])})
  saved.save_to_disk(tmp_path / "saved")
  assert problems(kind="hub", path=tmp_path / "saved")[0] == "1+1"


def test_several_subsets_of_a_hub_dataset_follow_each_other(monkeypatch):
  datasets = pytest.importorskip("datasets")
  asked = []

  def load_dataset(repository, subset, *, split):
    asked.append((repository, subset, split))
    return datasets.Dataset.from_list([{"question": subset, "answer": "1"}])

  monkeypatch.setattr(datasets, "load_dataset", load_dataset)
  monkeypatch.setattr("grpo_jax.files.hub.silence", lambda endpoint: "")
  assert problems(dataset="AIME2025") == ["AIME2025-I", "AIME2025-II"]
  assert asked == [("opencompass/AIME2025", f"AIME2025-{part}", "test") for part in ("I", "II")]


def test_a_hub_that_is_silent_is_not_asked_again_and_again(monkeypatch):
  datasets = pytest.importorskip("datasets")
  modes = []

  def load_dataset(repository, subset, *, split):
    modes.append(datasets.config.HF_HUB_OFFLINE)
    raise ConnectionError("not in the cache")

  monkeypatch.setattr(datasets, "load_dataset", load_dataset)
  monkeypatch.setattr("grpo_jax.files.hub.silence", lambda endpoint: f"{endpoint} is silent")
  with pytest.raises(hub.Unavailable, match=r"me/set: cannot be .*: https://.* is silent$"):
    problems(dataset="me/set")
  assert modes == [True] and not datasets.config.HF_HUB_OFFLINE


def test_no_data_at_all_is_reported():
  with pytest.raises(ValueError, match=r"there is no data: give data.path, data.dataset or"):
    problems()


# --- the index of large files ---


@pytest.fixture
def always_cached(monkeypatch):
  monkeypatch.setattr(jsonl, "_CACHED_BYTES", 0)


def indexes(cache):
  return sorted(cache.rglob("starts"))


@pytest.mark.parametrize("blank", ["", "\n \n"])
def test_a_cached_index_finds_the_same_rows_and_is_made_once(
  tmp_path, cache, always_cached, monkeypatch, blank
):
  path = write(tmp_path / "x.jsonl", blank + blank.join(map(as_lines, [ROWS[:2], ROWS[2:]])))
  monkeypatch.setattr(jsonl, "_CHUNK_BYTES", 7)
  first = JsonlSource(path)
  monkeypatch.setattr(jsonl, "_scan", None)  # a second reading of the file would fail.
  second = JsonlSource(path)
  for source in (first, second):
    assert [source[row] for row in range(len(source))] == ROWS
    assert source.where(0) == f"{path}:{blank.count(chr(10)) + 1}"
  assert len(indexes(cache)) == 1


def test_a_changed_file_is_indexed_again_and_the_old_index_removed(tmp_path, cache, always_cached):
  path = write(tmp_path / "x.jsonl", as_lines(ROWS))
  JsonlSource(path)
  (old,) = indexes(cache)
  # The same size, the same modification time: only bytes, and the inode's change time, differ.
  stat = path.stat()
  text = as_lines(ROWS).replace('"0+0"', '"0-0"')
  write(path, text)
  os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
  assert JsonlSource(path)[0]["problem"] == "0-0"
  write(path, as_lines(ROWS[:2]))
  assert len(JsonlSource(path)) == 2
  (new,) = indexes(cache)
  assert new != old and not old.exists()


def test_fingerprint_sees_a_change_within_a_tick_of_the_clock(tmp_path, monkeypatch):
  path = write(tmp_path / "x", "a" * 100_000)
  stat = path.stat()
  before = file_cache.fingerprint(path)
  write(path, "a" * 99_999 + "b")
  monkeypatch.setattr(type(path), "stat", lambda _: stat)  # all that the file system tells.
  assert file_cache.fingerprint(path) != before


def test_without_a_cache_the_index_is_temporary(tmp_path, monkeypatch, always_cached, caplog):
  monkeypatch.setenv("GRPO_JAX_CACHE", str(write(tmp_path / "file", "")))
  assert len(JsonlSource(write(tmp_path / "x.jsonl", as_lines(ROWS)))) == 5
  assert "no cache for the index of" in caplog.text


def test_an_empty_file_leaves_no_index(tmp_path, cache, always_cached):
  with pytest.raises(ValueError, match="has no rows"):
    JsonlSource(write(tmp_path / "x.jsonl", "\n  \n"))
  assert list(cache.rglob("lines-1*")) == []


def test_a_file_that_changes_while_it_is_read_is_not_reported_as_a_broken_row(tmp_path):
  path = write(tmp_path / "x.jsonl", as_lines(ROWS))
  source = open_source(SourceConfig("auto", path=path))
  write(path, as_lines(reversed([*ROWS, {"problem": "x" * 50}])))
  with pytest.raises(ValueError, match="x.jsonl was changed while it was read") as caught:
    [source[row] for row in range(len(source))]
  assert not isinstance(caught.value, RowError)


def test_only_data_files_are_suggested_for_a_missing_one(tmp_path):
  for name in ("constraints", "trains.txt", "train.jsonl.md"):
    write(tmp_path / name, "")
  (tmp_path / "train.json").mkdir()
  missing = tmp_path / "train.jsonl"
  with pytest.raises(FileNotFoundError) as alone:
    open_source(SourceConfig(kind="file", path=str(missing)))
  assert str(alone.value) == f"no data file {missing}"
  write(tmp_path / "train2.jsonl", as_lines(ROWS))
  with pytest.raises(FileNotFoundError, match="did you mean 'train2.jsonl'"):
    open_source(SourceConfig(kind="file", path=str(missing)))
