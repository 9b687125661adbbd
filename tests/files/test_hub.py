"""Files of the Hugging Face hub, from a hub on this machine."""

import logging

import pytest
from huggingface_hub import constants

from grpo_jax import data
from grpo_jax.data.byte_tokenizer import ByteTokenizer
from grpo_jax.data.named import DATASETS
from grpo_jax.files import hub as files
from tests import hub

ROWS = [{"problem": f"{n} + 1?", "expected_answer": str(n + 1)} for n in range(8)]
NAME = DATASETS["OpenMathInstruct-2"].hub


def problems(**fields):
  dataset = data.open_dataset(ByteTokenizer(), dataset="OpenMathInstruct-2", **fields)
  return [dataset.source[row]["problem"] for row in range(len(dataset))], dataset.source


@pytest.fixture
def parts(tmp_path, monkeypatch):
  """A hub with a split of three files, and one of another."""
  monkeypatch.setenv("GRPO_JAX_CACHE", str(tmp_path / "cache"))
  monkeypatch.setattr(files, "_downloaded", {})
  folder = tmp_path / "repository"
  for number, rows in enumerate((ROWS[:3], ROWS[3:5], ROWS[5:])):
    hub.rows_file(folder / "data" / f"train_1M-0000{number}-of-00003.parquet", rows)
  hub.rows_file(folder / "data" / "train-00000-of-00001.parquet", ROWS[:1])
  with hub.used(monkeypatch, tmp_path / "hub", datasets={NAME: folder}) as found:
    yield found


def test_the_files_of_one_split_are_downloaded_once(parts, monkeypatch):
  found, source = problems()
  assert found == [row["problem"] for row in ROWS]
  assert source.where(4) == f"{NAME}/train_1M-00001-of-00003.parquet, row 2"
  assert len(parts.fetched) == 3 and all("train_1M" in name for name in parts.fetched)
  asked = parts.requests
  assert problems()[0] == found and parts.requests == asked
  files._downloaded.clear()  # another process: it asks the hub whether there is a newer version.
  assert problems()[0] == found and parts.requests > asked and len(parts.fetched) == 3
  assert problems(split="train")[0] == [ROWS[0]["problem"]]


def test_a_split_that_is_not_there_is_named(parts):
  with pytest.raises(ValueError, match=f"{NAME} has no split 'test': no file data/test-"):
    problems(split="test")


def test_without_the_hub_the_cache_is_used_if_all_files_are_there(parts, monkeypatch, noticed):
  expected = problems()[0]
  files._downloaded.clear()
  monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
  assert problems()[0] == expected
  assert noticed[-1].endswith("HF_HUB_OFFLINE is set; using the cached copy")
  (file,) = (files.cached(NAME, ["*1M*"], kind="dataset") / "data").glob("train_1M-00001*")
  file.unlink()
  files._downloaded.clear()
  with pytest.raises(files.Unavailable) as raised:  # two of three are not a smaller dataset.
    problems()
  assert raised.value.is_silent and raised.value.reason == "HF_HUB_OFFLINE is set"


def test_an_unknown_repository_is_the_answer_of_a_hub_and_not_its_silence(parts):
  with pytest.raises(files.Unavailable, match="me/set: cannot be downloaded from ") as raised:
    files.download("me/set", ["*"], kind="dataset")
  assert not raised.value.is_silent


def test_where_there_is_no_terminal_a_download_logs_a_line_now_and_then(monkeypatch, caplog):
  monkeypatch.setattr(files, "_LINE_S", 0.0)
  with caplog.at_level(logging.INFO, logger=files.__name__):
    bar = files._bar()(total=300, unit="B", unit_scale=True, desc="Downloading", name="of the hub")
    for _ in range(3):
      bar.update(100)
    bar.close()
  lines = [record.getMessage() for record in caplog.records]
  assert any(line.startswith("Downloading: 67%") and "200/300" in line for line in lines)
  monkeypatch.setattr(files, "_LINE_S", 60.0)
  caplog.clear()
  with caplog.at_level(logging.INFO, logger=files.__name__):
    bar = files._bar()(total=2, desc="Fetching 2 files")
    bar.update(2)
    bar.close()
  assert not caplog.records  # it took no minute.
