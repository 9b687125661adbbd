"""scripts/gpu_day.py: its arithmetic, its judgement, and that no part can spoil the others."""

import contextlib
import json
import math
import os
import pathlib
import subprocess
import sys
import textwrap
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "scripts"), str(ROOT / "scripts" / "benchmark")]

import attention_variants  # noqa: E402
import gpu_day  # noqa: E402
import trace_kinds  # noqa: E402
from gpu_day_parts import (  # noqa: E402
  attention,
  child,
  models,
  running,
  schedule,
  summary,
  update,
  work,
)
from gpu_day_parts import decode as decoding  # noqa: E402
from gpu_day_parts import head as heads  # noqa: E402
from gpu_day_parts import tests as gpu_tests  # noqa: E402

from grpo_plan import chips  # noqa: E402

H100 = "NVIDIA H100 80GB HBM3"


# --- what is counted ---


def test_operations_of_an_update_are_those_counted_by_hand():
  # A layer of "tiny": q and o are 32 × 32, k and v 32 × 16, three of the MLP 32 × 64.
  config = models.config_of("tiny")
  weights = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64)
  batch = types.SimpleNamespace(
    # A prompt of 2 and completions of 1 and 2: 3 + (2 + 1) + (4 + 3) pairs; padding adds nothing.
    segment_ids=np.array([[1, 1, 1, 1, 1, 0, 0]]),
    branch_ids=np.array([[0, 0, 1, 2, 2, 0, 0]]),
    loss_mask=np.array([[0, 0, 1, 1, 1, 0, 0]], bool),
  )
  assert work.attended_pairs(batch.segment_ids, batch.branch_ids) == 13
  forward = 2 * 5 * weights + 4 * 13 * 32 * 2 + 2 * 3 * 32 * 264
  assert work.update_operations(config, batch) == 3 * forward


def test_a_decode_step_reads_weights_and_caches_once():
  config = models.config_of("tiny")
  weights = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64) + 32 * 264
  # A token has 2 (keys, values) · 2 layers · 2 heads · 8 numbers.
  assert work.decode_bytes(config, cached=10, itemsize=2) == 2 * (weights + 64 * 10)


def test_the_rates_of_a_device_are_those_of_its_data_sheet():
  sheet = chips.of_kind(H100)
  assert sheet is not None and (sheet.bfloat16, sheet.bandwidth) == (989e12, 3.35e12)
  assert chips.of_kind("NVIDIA H100 PCIe") is None and chips.of_kind("cpu") is None


def test_pairs_are_those_of_the_mask_of_the_model():
  from grpo_kernels.attention import visible

  sizes = work.Rows(3, 64, 6, 3, 2, 7)
  batch = work.minibatch(sizes, vocabulary=50).microbatches[0]
  assert batch.tokens.shape == (3, 64) and (batch.segment_ids > 0).mean() > 0.8
  ids = jnp.asarray(batch.segment_ids), jnp.asarray(batch.branch_ids)
  mask = visible.mask(visible.visible(*ids))
  pairs = work.attended_pairs(batch.segment_ids, batch.branch_ids)
  assert pairs == int(np.asarray(mask).sum())


def test_numbers_of_an_update_are_derived_from_its_samples():
  measured = {"tokens": 12288, "operations": 10**15, "microbatch": (16, 1024)}
  samples = [(1.0, 0.5), (1.5, 0.5), (4.0, 0.5)]  # the median is 2 s: 500 TFLOP/s.
  found = update.numbers(samples, measured, H100)
  assert found == {
    **{"seconds": 2.0, "tokens_per_s": 6144, "padding": 0.25},
    "mfu": pytest.approx(500 / 989),
  }
  assert update.numbers(samples, measured, "cpu")["mfu"] is None


@pytest.mark.long
def test_an_update_that_recomputes_less_is_measured_if_it_fits(monkeypatch, tmp_path):
  made = update._update

  def short_of_memory(config, dtype, remat):
    found, tx = made(config, dtype, remat)
    if remat == "none":
      found = types.SimpleNamespace(differentiate=exhausted)
    return found, tx

  def exhausted(*_):
    raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 byte.")

  monkeypatch.setattr(update, "_update", short_of_memory)
  monkeypatch.setattr(update, "_profile", lambda *_: {})
  monkeypatch.setattr(child, "alone", lambda settings: contextlib.nullcontext())
  record = child.Record(tmp_path / "partial.json", "update")
  update.measure(record, running.Settings(tiny=True, scratch=str(tmp_path)))
  assert [each["remat"] for each in record.result["updates"]] == ["full", "dots"]
  assert "remat dots: " in record.result["headline"]
  (why,) = record.result["does_not_fit"]
  assert why["remat"] == "none" and "RESOURCE_EXHAUSTED" in why["why"]


def test_the_models_have_as_many_parameters_as_those_on_the_hub():
  from grpo_jax.models import leaves

  shapes = [leaf.shape for leaf in jax.tree.leaves(leaves.tree(models.config_of("Qwen2.5-1.5B")))]
  assert sum(math.prod(shape) for shape in shapes) == 1_543_714_304


# --- traces ---


def test_kernels_of_a_gpu_are_those_of_its_streams():
  event = lambda name, start, end: types.SimpleNamespace(name=name, start_ns=start, end_ns=end)
  line = lambda name, *events: types.SimpleNamespace(name=name, events=events)
  plane = lambda name, *lines: types.SimpleNamespace(name=name, lines=lines)
  streams = (
    line("Stream #13(Compute)", event("gemm", 0, 300), event("add", 300, 400)),
    line("Stream #14(MemcpyD2D)", event("copy", 350, 450), event("gemm", 500, 800)),
  )
  others = (line("XLA Modules", event("jit_differentiate", 0, 800)), line("XLA Ops"))
  host = plane("/host:CPU", line("Stream of the host", event("wait", 0, 5000)))
  trace = [plane("/device:GPU:0", *streams, *others), host]
  by_name, nothing = trace_kinds.seconds(trace_kinds.operations(trace, "gpu"))
  # From 350 to 400 two of them share the time; from 450 to 500 there is none.
  assert by_name == pytest.approx({"gemm": 600e-9, "add": 75e-9, "copy": 75e-9})
  assert nothing == pytest.approx(50e-9)


# --- attention ---


@pytest.fixture(scope="module")
def programs():
  """Inputs of a small layout, and the programs of it."""
  batch = work.minibatch(work.TINY_ROWS, vocabulary=50).microbatches[0]
  inputs = attention_variants.make_inputs(batch, (4, 2, 8), "float32")
  found = attention_variants.compile_programs(["xla_blocked", "unheard_of"], inputs, "float32")
  return inputs, found


@pytest.mark.long
def test_attention_is_compared_with_the_first_head_in_float32(programs):
  inputs, found = programs
  name, which = "xla_blocked", attention_variants.BOTH
  exact = found[attention_variants.REFERENCE, which](*attention_variants.first_head(inputs))
  checked = attention_variants.checked(found[name, which], inputs, exact)
  assert len(checked["errors"]) == 4 and max(checked["errors"]) < 1e-5 and checked["same_bits"]

  def wrong(*given):
    out, *gradients = found[name, which](*given)
    return out, gradients[0], 1.02 * gradients[1], gradients[2]

  errors = attention_variants.checked(wrong, inputs, exact)["errors"]
  assert errors[2] == pytest.approx(0.02, rel=1e-3) and errors[1] < 1e-5
  row = {"name": name, "pass": which, "why": None, "errors": errors, "same_bits": True}
  (line,) = attention.judge([row])
  assert line.startswith("xla_blocked differs from float32 by")
  assert isinstance(found["unheard_of", which], str)  # why it cannot run.


def test_an_implementation_that_fails_where_it_should_run_is_a_failure():
  row = {"name": "a", "pass": "forward", "why": None, "errors": (1e-3, 2e-3), "same_bits": True}
  assert attention.judge([row]) == []
  found = attention.judge([{**row, "why": "no"}, {**row, "errors": (float("nan"),)}])
  assert found[0] == "a (forward) should run here and did not: no" and "nan" in found[1]
  assert "other bits" in attention.judge([{**row, "same_bits": False}])[0]


def test_a_form_of_the_head_that_fails_or_is_wrong_is_a_failure():
  shape = {"tokens": 1000, "width": 100, "vocabulary": 5000}
  rows = [
    {"shape": shape, "variant": name, "pass": "forward", "why": why, "loss": loss}
    for name, why, loss in (("a", None, 10.0), ("b", None, 10.1), ("c", "no", 0), ("d", None, 20))
  ]
  first, second = heads.complaints(rows)
  assert first == "c should run here and did not: no" and "d (forward" in second


# --- the tests of make test-gpu ---


@pytest.mark.long
def test_outcomes_of_pytest_are_recorded(tmp_path):
  file = tmp_path / "test_planted.py"
  file.write_text(
    textwrap.dedent(
      """
      import pytest
      def test_a(): pass
      def test_b(): assert 3 < 1
      @pytest.mark.skip(reason="no GPU")
      def test_c(): pass
      @pytest.fixture
      def broken(): raise RuntimeError("no")
      def test_d(broken): pass
      """
    )
  )
  (tmp_path / "pytest.ini").write_text("[pytest]")
  script = """if True:
    import json, os, sys, types, pytest
    from gpu_day_parts import tests
    result = {}
    record = types.SimpleNamespace(result=result, put=lambda **values: result.update(values))
    options = ["-q", "-p", "no:cacheprovider", "-c", sys.argv[1] + "/pytest.ini", sys.argv[1]]
    code = pytest.main(options, plugins=[tests.Outcomes(record)])
    print("\\n" + json.dumps([int(code), result]))
  """
  environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
  done = subprocess.run(
    [sys.executable, "-c", script, str(tmp_path)],
    capture_output=True,
    text=True,
    check=True,
    env=environment,
  )
  code, result = json.loads(done.stdout.splitlines()[-1])
  assert code == 1 and result["collected"] == 4, done.stdout
  names = lambda tests: [name.partition("::")[2] for name in tests]
  assert names(result["passed"]) == ["test_a"] and names(result["skipped"]) == ["test_c"]
  assert names(result["failed"]) == ["test_b", "test_d"]
  assert list(result["failed"].values()) == ["assert 3 < 1", "RuntimeError: no"]
  assert list(result["skipped"].values()) == ["Skipped: no GPU"]
  assert result["headline"] == "1 passed, 2 failed, 1 skipped"


@pytest.mark.parametrize(
  "collected, passed, failed, skipped, code, message",
  [
    (2, ["a"], {"b": "no"}, {}, 1, "1 of 2 tests failed"),
    (3, ["a", "b"], {}, {}, -11, "1 tests did not run"),
    (3, ["a", "b"], {}, {}, 0, "1 tests did not run"),
    (0, [], {}, {}, 5, "exit code 5"),
    (2, [], {}, {"a": "no GPU", "b": "no GPU"}, 0, "all 2 tests: no GPU"),
    (2, ["a"], {}, {"b": "needs two GPUs"}, 0, None),
  ],
)
def test_tests_that_failed_or_did_not_run_are_never_taken_for_passed(
  collected, passed, failed, skipped, code, message
):
  found = gpu_tests.Outcomes(None)
  vars(found).update(collected=collected, passed=passed, failed=failed, skipped=skipped)
  if message is None:
    gpu_tests.judge(found, code)
    return
  with pytest.raises(Exception, match=message):
    gpu_tests.judge(found, code)


# --- running ---

PLANTED = """
import os, pathlib, signal, sys, time
from gpu_day_parts import child

def measure(record, settings):
  what = settings.part
  record.set_device({"platform": "tpu" if what.startswith("tpu") else "gpu", "kind": "planted"})
  record.put(before=what)
  print("said by", what)
  if what == "raises":
    raise ValueError("planted\\nsecond line")
  if what == "memory":
    raise RuntimeError("RESOURCE_EXHAUSTED: planted")
  if what == "hangs":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.fork()
    time.sleep(60)
  if what == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
  if what == "exits":
    os._exit(7)
  if what == "skipped":
    raise child.Skipped("not here")
  if what == "no accelerator":
    raise child.NoAccelerator("only a CPU")
  if what == "ticks" or what.startswith("tpu"):  # says when it ran.
    for _ in range(30):
      record.append("ticks", time.monotonic())
      time.sleep(0.05)
  if what.startswith("times"):
    time.sleep(0.3)
    with child.alone(settings):
      begin = time.monotonic()
      time.sleep(0.5)
      record.put(alone=[begin, time.monotonic()])
  if what == "times and dies":
    child.alone(settings).__enter__()
    os.kill(os.getpid(), signal.SIGKILL)
  record.append("after", what)
"""


def planted(what, *, limit_s=20.0):
  """A part that does `what`."""
  return running.Part(what, what, "planted_part", limit_s)


@pytest.fixture
def run(tmp_path, monkeypatch):
  """Runs planted parts; returns the result as the file has it."""
  (tmp_path / "planted_part.py").write_text(PLANTED)
  monkeypatch.setenv("PYTHONPATH", str(tmp_path))
  monkeypatch.setattr(running, "GRACE_S", 0.2)
  settings = running.Settings(tiny=True, scratch=str(tmp_path))

  def run(*parts, result=None, minutes=1.0, at_once=1):
    reported = []
    result = result or running.new_result(["test"], tiny=True)
    options = {"minutes": minutes, "at_once": at_once, "log": reported.append}
    running.Day(settings, tmp_path / "out", result, **options).run(parts)
    found = json.loads((tmp_path / "out" / running.RESULT).read_text())
    assert found == result
    return found, reported

  return run


@pytest.mark.long
@pytest.mark.parametrize("at_once", [1, 3])
def test_a_part_that_fails_leaves_the_others_whole(run, at_once, tmp_path):
  kinds = ("raises", "memory", "killed", "exits", "skipped")
  parts = [planted("first"), *map(planted, kinds), planted("hangs", limit_s=2.0), planted("last")]
  result, reported = run(*parts, at_once=at_once)
  found = result["parts"]
  assert {name: entry["status"] for name, entry in found.items()} == {
    **{"first": "done", "raises": "failed", "memory": "out of memory", "killed": "killed"},
    **{"exits": "failed", "skipped": "skipped", "hangs": "timed out", "last": "done"},
  }
  for name, entry in found.items():  # what was measured before stays.
    assert entry["result"]["before"] == name and entry["device"]["kind"] == "planted"
  assert {n for n, e in found.items() if e["result"].get("after")} == {"first", "last"}
  assert found["raises"]["reason"] == "ValueError: planted"
  assert "said by raises" in "".join(found["raises"]["last_lines"])
  assert "SIGKILL" in found["killed"]["reason"] and "7" in found["exits"]["reason"]
  assert "limit of 2 s" in found["hangs"]["reason"] and "last_lines" not in found["first"]
  assert len(reported) == 2 * len(parts)
  assert set(summary.failures(result)) == {"raises", "memory", "killed", "exits", "hangs"}
  listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
  assert str(tmp_path) not in listed, "the processes of a part that hangs are gone"
  assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".json", ".log"}


@pytest.mark.long
def test_nothing_else_runs_while_a_part_has_the_device(run):
  parts = ["ticks", "times", "times too"]
  result, _ = run(*map(planted, parts), at_once=3)
  found = {name: result["parts"][name]["result"] for name in parts}
  assert all(result["parts"][name]["status"] == "done" for name in parts)
  spans = [found["times"]["alone"], found["times too"]["alone"]]
  ticks = found["ticks"]["ticks"]
  assert any(tick < min(begin for begin, _ in spans) for tick in ticks), "they run side by side"
  for begin, end in spans:
    assert end - begin >= 0.5 and not any(begin < tick < end for tick in ticks)
  (_, first_end), (second_begin, _) = sorted(spans)
  assert second_begin >= first_end


@pytest.mark.long
def test_waiting_for_the_device_does_not_count_and_its_holder_may_die(run):
  parts = [planted("times and dies"), planted("ticks", limit_s=2.3), planted("times too")]
  result, _ = run(*parts, at_once=3)
  statuses = {name: entry["status"] for name, entry in result["parts"].items()}
  # The ticks take 1.5 s, and 1 s more in which they are stopped.
  assert statuses == {"times and dies": "killed", "ticks": "done", "times too": "done"}


@pytest.mark.long
def test_a_tpu_runs_one_part_at_a_time(run):
  result, _ = run(planted("tpu"), planted("tpu too"), at_once=3)
  first, second = (result["parts"][name]["result"]["ticks"] for name in ("tpu", "tpu too"))
  assert max(first) < min(second)


def test_resuming_leaves_finished_parts_alone_and_repeats_the_others(run):
  result, _ = run(planted("first"), planted("raises"), planted("skipped"))
  before = json.loads(json.dumps(result))
  result["parts"]["raises"]["result"] = {}
  result, reported = run(planted("first"), planted("raises"), planted("skipped"), result=result)
  for name in ("first", "skipped"):
    assert result["parts"][name] == before["parts"][name]
  assert result["parts"]["raises"]["result"] == {"before": "raises"}
  assert [line.split()[0] for line in reported if "done already" in line] == ["first", "skipped"]


def test_what_a_part_had_measured_when_the_machine_was_cut_off_is_kept(run, tmp_path):
  out = tmp_path / "out"
  run(planted("first"))
  partial = {"part": "last", "device": {"platform": "gpu", "kind": "k"}, "result": {"x": 1}}
  running.write_json(out / f"last{running.PARTIAL}", partial)
  result = running.resume(out, tiny=True)
  assert result is not None
  assert result["parts"]["last"]["status"] == "cut off"
  assert result["parts"]["last"]["result"] == {"x": 1}
  result, _ = run(planted("first"), planted("last"), result=result)
  assert result["parts"]["last"]["status"] == "done"
  with pytest.raises(ValueError, match="tiny sizes"):
    running.resume(out, tiny=False)


def test_without_an_accelerator_or_time_nothing_more_is_begun(run, tmp_path):
  result, _ = run(planted("no accelerator"), planted("last"))
  assert result["parts"]["no accelerator"]["reason"] == "only a CPU"
  assert result["parts"]["last"]["reason"] == "there is no accelerator here"
  result, _ = run(planted("last"), minutes=0.1)
  assert result["parts"]["last"] == {"status": "not run", "reason": "no time was left"}
  assert summary.failures(result) == ["last"]


@pytest.mark.long
def test_a_day_ends_when_its_minutes_are_over(run, monkeypatch):
  monkeypatch.setattr(running, "LEAST_S", 0.0)
  began = time.monotonic()
  result, _ = run(planted("hangs"), minutes=0.05)
  assert time.monotonic() - began < 10
  assert result["parts"]["hangs"]["reason"] == "the 0.05 minutes of all parts were over"


@pytest.mark.parametrize(
  "arguments, message",
  [
    (["--parts", "devise"], "no part 'devise'"),
    (["--minutes", "0"], "above 0"),
    (["--bundle", "x", "--piece-mb", "0"], "above 0"),
  ],
)
def test_a_mistyped_command_line_is_refused(arguments, message, capsys):
  with pytest.raises(SystemExit):
    gpu_day.main(arguments)
  assert message in capsys.readouterr().err


def test_requests_of_a_decode_step_share_prompts_in_groups():
  sizes = types.SimpleNamespace(group=4, prompt_tokens=6)
  requests = decoding._requests(50, 10, sizes, tokens=3)
  prompts = [tuple(request.prompt_ids) for request in requests]
  assert len(prompts) == 10 and len(set(prompts)) == 3 and prompts[0] == prompts[3] != prompts[4]


# --- the page ---


def of_gpu(**entries):
  """A result of an H100."""
  device = {"platform": "gpu", "kind": H100}
  entry = {"status": "done", "reason": "", "seconds": 9.0, "device": device}
  entry["result"] = {"headline": "16 × 1024: 2 s, MFU 50.6 %"}
  result = running.new_result(["test"], tiny=False)
  result["parts"] = {"update": entry}
  for name, changes in entries.items():
    result["parts"][name] = {**entry, **changes}
  return result


def saved(tmp_path, result):
  """Writes a result to a file."""
  path = tmp_path / "result.json"
  path.write_text(json.dumps(result))
  return path


@pytest.fixture
def page(tmp_path, monkeypatch):
  """A copy of docs/gpu.md takes its place."""
  copy = tmp_path / "gpu.md"
  copy.write_text(summary.PAGE.read_text())
  monkeypatch.setattr(summary, "PAGE", copy)
  return copy


def test_a_result_of_a_gpu_is_written_into_the_page(tmp_path, page):
  before = page.read_text()
  result = of_gpu(tests={"status": "timed out", "reason": "its limit | was over", "result": {}})
  summary.write(saved(tmp_path, result))
  after = page.read_text()
  assert H100 in after and "| update | done | 9 | 16 × 1024: 2 s, MFU 50.6 % |" in after
  assert "| tests | timed out | 9 | its limit \\| was over |" in after
  assert after.index("| tests |") < after.index("| update |"), "in the order of the schedule"
  assert before.split(summary.BEGIN)[0] == after.split(summary.BEGIN)[0]
  assert before.split(summary.END)[1] == after.split(summary.END)[1]
  summary.write(saved(tmp_path, result))
  assert page.read_text() == after


CPU = {"device": {"platform": "cpu", "kind": "cpu"}}
H200 = {"device": {"platform": "gpu", "kind": "NVIDIA H200"}}


@pytest.mark.parametrize(
  "result, reason",
  [
    (of_gpu(update=CPU), "ran on a CPU"),
    (of_gpu(decode={**CPU, "status": "failed"}), "ran on a CPU"),
    (of_gpu(decode={**H200, "result": {}}), f"different devices: {H100}, NVIDIA H200"),
    ({**of_gpu(), "tiny": True}, "sizes are tiny"),
    ({**of_gpu(), "parts": {}}, "no part says on which device"),
    ({"format": 0}, "not a result"),
    ([], "not a result"),
  ],
)
def test_what_is_not_an_accelerators_is_never_written_down(tmp_path, page, result, reason, capsys):
  before = page.read_text()
  assert gpu_day.main(["--write-docs", str(saved(tmp_path, result))]) == 2
  assert reason in capsys.readouterr().err and page.read_text() == before


def test_the_page_has_a_row_for_every_part():
  page = summary.PAGE.read_text()
  assert page.count(summary.BEGIN) == page.count(summary.END) == 1
  for part in schedule.PARTS.values():
    assert f"| `{part.name}` | {part.limit_s:.0f} |" in page
  assert schedule.MINUTES == 9


# --- all of it ---


@pytest.mark.slow
def test_a_tiny_day_runs_to_its_end(tmp_path):
  command = [sys.executable, str(ROOT / "scripts" / "gpu_day.py"), "--tiny", "--strict"]
  out = tmp_path / "out"
  done = subprocess.run(
    [*command, "--out", str(out)], capture_output=True, text=True, timeout=280, check=False
  )
  assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
  result = json.loads((out / running.RESULT).read_text())
  skipped = {name for name, entry in result["parts"].items() if entry["status"] == "skipped"}
  assert sorted(result["parts"]) == sorted(schedule.NAMES) and skipped <= {"tests", "peer"}
  for name in set(schedule.NAMES) - {"peer"}:
    assert result["parts"][name]["result"]["headline"], name
  measured, faster = result["parts"]["update"]["result"]["updates"]
  assert (measured["remat"], faster["remat"]) == ("full", "none")
  assert measured["profile"]["longest_s"] and len(measured["samples_s"]) == 2
  quickstart = result["parts"]["quickstart"]["result"]["headline"]
  assert quickstart.startswith("2 steps, ") and " → " in quickstart, "two evaluations"
  if "peer" not in skipped:
    (peer,) = result["parts"]["peer"]["result"]["updates"]
    assert peer["learned"] == measured["predicted"], "the same completions"
  with pytest.raises(summary.Refused, match="tiny"):
    summary.write(out / running.RESULT)
  again = subprocess.run(
    [*command, "--out", str(out), "--resume"], capture_output=True, text=True, check=True
  )
  assert again.stdout.count("is done already") == len(schedule.NAMES)
