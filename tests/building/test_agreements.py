"""What must be equal on all hosts: which facts are compared, and what a difference looks like."""

import json
import os

import pytest

import configs.base
from grpo_jax import processes
from grpo_jax.building import agreements
from grpo_jax.config import configuration
from tests import side_by_side

HOSTS = ["h0", "h1", "h2"]


def a_config(**values):
  return configuration.replaced(configs.base.get_config(), values)


def facts_of(**values):
  return agreements._options(a_config(**values))


def test_equal_facts_do_not_differ():
  assert agreements.differences([facts_of()] * 3, HOSTS) == []


def test_each_option_that_differs_is_named_with_its_values_and_processes():
  found = [facts_of(), facts_of(**{"loss.clip_high": 0.3, "seed": 1}), facts_of()]
  assert agreements.differences(found, HOSTS) == [
    "loss.clip_high: null on processes 0, 2 (h0, h2); 0.3 on process 1 (h1)",
    "seed: 42 on processes 0, 2 (h0, h2); 1 on process 1 (h1)",
  ]


@pytest.mark.parametrize(
  ("name", "value", "where"),
  [
    ("data.datasets", ({"path": "a.jsonl"}, {"path": "b.jsonl"}), "data.datasets"),
    ("environments.math.verifier", "minerva", "environments.math.verifier"),
    ("rollout.max_turns", 2, "rollout.max_turns"),
    ("total_steps", 7, "total_steps"),
    ("evaluation.pass_k", (1, 2), "evaluation.pass_k"),
  ],
)
def test_options_of_every_section_are_compared(name, value, where):
  lines = agreements.differences([facts_of(), facts_of(**{name: value})], HOSTS)
  assert lines and all(line.startswith(where) for line in lines)


@pytest.mark.parametrize(
  ("name", "value"),
  [
    ("distributed.index", 1),
    ("distributed.coordinator", "h0:1234"),
    ("engine.sglang.gpus", (4, 5)),
    ("model.cache_dir", "/scratch/h1"),
    ("model.path", "/models/on/h1"),
  ],
)
def test_options_of_one_host_may_differ(name, value):
  assert agreements.differences([facts_of(), facts_of(**{name: value})], HOSTS) == []


def test_a_long_value_is_cut_and_its_difference_still_shown():
  one, other = (facts_of(**{"data.system_prompt": "x" * 300 + end}) for end in "ab")
  (line,) = agreements.differences([one, other], HOSTS)
  assert len(line) < 400 and line.count("digest") == 2


def test_a_copy_of_a_file_may_have_another_path_but_not_other_contents(tmp_path):
  for name, text in (("a", "1\n"), ("b", "1\n"), ("stale", "2\n")):
    (tmp_path / f"{name}.jsonl").write_text(text)
  at = [facts_of(**{"data.path": str(tmp_path / f"{name}.jsonl")}) for name in ("a", "b", "stale")]
  assert agreements.differences(at[:2], HOSTS) == []
  (line,) = agreements.differences(at, HOSTS)
  assert line.startswith("data.path: 2 bytes, digest ")
  assert "on processes 0, 1 (h0, h1); 2 bytes, digest " in line
  assert line.endswith("on process 2 (h2)")


def test_a_stale_file_of_the_same_size_and_times_is_found(tmp_path):
  file = tmp_path / "train.jsonl"
  file.write_text("1\n")
  os.utime(file, (1, 1))
  before = facts_of(**{"data.path": str(file)})
  file.write_text("2\n")
  os.utime(file, (1, 1))
  now = facts_of(**{"data.path": str(file)})
  assert len(agreements.differences([before, now], HOSTS)) == 1


def test_a_file_that_one_host_does_not_have_is_said_with_its_host(tmp_path):
  file = tmp_path / "a.txt"
  file.write_text("{}\n")
  here = facts_of(**{"data.prompt_file": str(file)})
  file.unlink()
  (line,) = agreements.differences([here, facts_of(**{"data.prompt_file": str(file)})], HOSTS)
  assert line.startswith("data.prompt_file: 3 bytes, digest ")
  assert line.endswith(f'"{file}" on process 1 (h1)')


def test_files_in_lists_and_own_settings_are_read(tmp_path):
  rows, words = tmp_path / "rows.jsonl", tmp_path / "words.txt"
  values = {
    "data.datasets": ({"path": str(rows)},),
    "environments": {"own": {"module": "mine", "words": str(words)}},
  }
  found = []
  for text in ("1\n", "2\n"):
    rows.write_text(text)
    words.write_text(text)
    found.append(facts_of(**values))
  lines = agreements.differences(found, HOSTS)
  assert [line.partition(":")[0] for line in lines] == [
    "data.datasets[0].path",
    "environments.own.words",
  ]


def test_of_a_large_file_the_size_and_samples_are_compared(tmp_path, monkeypatch):
  monkeypatch.setattr(agreements, "_LARGE", 8 << 20)
  file = tmp_path / "large.jsonl"
  file.write_bytes(bytes(8 << 20))
  digests = [agreements.digest_of(file)]
  for place in (0, (8 << 20) - 1):
    with file.open("r+b") as stream:
      stream.seek(place)
      stream.write(b"y")
    digests.append(agreements.digest_of(file))
  assert len(set(digests)) == 3


def test_weights_are_compared_by_size_and_samples(tmp_path):
  file = tmp_path / "model.safetensors"
  file.write_bytes(bytes(8 << 20))
  first = agreements.digest_of(file)
  with file.open("r+b") as stream:
    stream.write(b"header")
  assert agreements.digest_of(file) != first
  file.write_bytes(bytes((8 << 20) + 1))
  assert agreements.digest_of(file) != first


def test_variables_that_change_numbers_are_compared_and_those_of_a_process_are_not():
  same = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_b=1 --xla_a=2",
  }
  here = {**same, "JAX_PROCESS_ID": "0", "JAX_COMPILATION_CACHE_DIR": "/a", "HOME": "/x"}
  there = {
    **same,
    "XLA_FLAGS": "--xla_a=2 --xla_dump_to=/tmp/h1 --xla_b=1",
    "JAX_PROCESS_ID": "1",
    "JAX_COMPILATION_CACHE_DIR": "/b",
  }
  facts = [agreements._variables(each) for each in (here, there)]
  assert agreements.differences(facts, HOSTS) == []
  other = agreements._variables({**same, "JAX_ENABLE_X64": "1"})
  assert agreements.differences([facts[0], other], HOSTS) == [
    "environment variable JAX_ENABLE_X64: absent on process 0 (h0); '1' on process 1 (h1)"
  ]


def test_versions_code_and_devices_are_compared():
  names = {*agreements._code(), *agreements._devices()}
  for name in ("Python", "grpo_jax", "jax", "jaxlib", "numpy"):
    assert f"version of {name}" in names
  assert "devices of a process" in names
  old = {"version of jax": "0.10.1"}
  new = {"version of jax": "0.10.2"}
  assert agreements.differences([new, old, new], HOSTS) == [
    "version of jax: 0.10.2 on processes 0, 2 (h0, h2); 0.10.1 on process 1 (h1)"
  ]


def exchanged(monkeypatch, change):
  """Makes this process 0 of 2; process 1 sends what `change` makes of the same values."""
  sent = []

  def exchange(value, *, what, timeout_s=None):
    del what, timeout_s
    sent.append(json.loads(json.dumps(value)))
    return [sent[-1], change(json.loads(json.dumps(value)))]

  side_by_side.pretend(monkeypatch, 0)
  monkeypatch.setattr(processes, "exchange", exchange)
  return sent


def test_a_difference_ends_the_run_with_one_message(monkeypatch):
  def change(own):
    own["host"] = "h1"
    own["facts"]["seed"] = "7"
    own["facts"]["version of jax"] = "0.1"
    return own

  exchanged(monkeypatch, change)
  monkeypatch.setattr(agreements.socket, "gethostname", lambda: "h0")
  with pytest.raises(configuration.ConfigError) as caught:
    agreements.check_start(a_config())
  first, *lines, last = str(caught.value).splitlines()
  assert first == "the processes of this run differ in what must be equal on all hosts:"
  assert lines[0] == "  - seed: 42 on process 0 (h0); 7 on process 1 (h1)"
  assert lines[1].startswith("  - version of jax: ") and len(lines) == 2
  assert last.startswith("Start all processes with the same options, code and data")


def test_one_process_reads_nothing(monkeypatch):
  monkeypatch.setattr(agreements, "digest_of", None)
  agreements.check_start(a_config(**{"data.path": __file__}))
