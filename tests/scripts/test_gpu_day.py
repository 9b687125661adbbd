"""scripts/gpu_day.py: its arithmetic, its judgement, and that no part can spoil the others."""

import gzip
import json
import math
import pathlib
import subprocess
import sys
import textwrap
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "scripts"), str(ROOT / "scripts" / "benchmark")]

import gpu_day  # noqa: E402
from gpu_day_parts import (  # noqa: E402
  arithmetic,
  document,
  gpu_tests,
  models,
  rows,
  running,
  schedule,
  summary,
  traces,
  verdict,
  wheels,
)
from gpu_day_parts import head as heads  # noqa: E402

GOLDEN = ROOT / "tests" / "golden"


class Small:
  """Sizes by which operations are counted by hand."""

  vocab_size = 100
  hidden_size = 8
  intermediate_size = 16
  num_layers = 3
  num_heads = 4
  num_kv_heads = 2
  head_dim = 5


# --- arithmetic ---


def test_operations_of_an_update_are_those_counted_by_hand():
  # A layer: q and o are 8 × 20, k and v 8 × 10, three of the MLP 8 × 16: 320 + 160 + 384 = 864.
  assert arithmetic.weights_of_layers(Small) == 3 * 864
  # 10 tokens: 2 · 10 · 2592 = 51840. 7 pairs: 4 · 7 · 20 · 3 = 1680. Head: 2 · 6 · 8 · 100 = 9600.
  counts = {"tokens": 10, "pairs": 7, "predicted": 6}
  assert arithmetic.forward_operations(Small, **counts) == 51840 + 1680 + 9600
  assert arithmetic.update_operations(Small, **counts) == 3 * 63120


def test_mfu_is_operations_per_second_over_the_data_sheet():
  # 989e12 operations in 4 s on a device of 989 TFLOP/s are a quarter.
  sheet = arithmetic.data_sheet("NVIDIA H100 80GB HBM3")
  assert sheet is not None
  assert arithmetic.share_of_peak(989e12, 4.0, sheet.bf16_tflops) == pytest.approx(0.25)
  assert arithmetic.data_sheet("NVIDIA H100 PCIe") != sheet
  assert arithmetic.data_sheet("cpu") is None
  assert arithmetic.data_sheet("NVIDIA GeForce RTX 4090") is None


def test_a_decode_step_reads_weights_and_caches_once():
  # Weights 2592 + 100 · 8 = 3392. A token has 2 · 3 · 2 · 5 = 60 numbers of keys and values; cached
  # are 6 rows × 10 of their own and 2 prompts × 20: 100 tokens.
  needed = arithmetic.decode_bytes(
    Small, rows=6, own_tokens=10, prompts=2, prompt_tokens=20, itemsize=2
  )
  assert needed == 2 * (3392 + 6000)


def test_pairs_are_those_of_the_mask_of_the_model():
  arrays, _ = rows.make(2, 48, rows.Lengths(6, 3, 2, 7), vocabulary=50, seed=3)
  segments, branches = arrays["segment_ids"], arrays["branch_ids"]
  from grpo_kernels.attention import visible

  mask = visible.mask(visible.visible(jnp.asarray(segments), jnp.asarray(branches)))
  assert arithmetic.attended_pairs(segments, branches) == int(np.asarray(mask).sum())
  # A prompt of 2 and completions of 1 and 2: 3 + (2 + 1) + (4 + 3); padding adds nothing.
  by_hand = np.array([[1, 1, 1, 1, 1, 0, 0]]), np.array([[0, 0, 1, 2, 2, 0, 0]])
  assert arithmetic.attended_pairs(*by_hand) == 3 + 3 + 7


def test_rows_are_such_as_a_run_makes():
  lengths = rows.Lengths(prompt=6, completions=3, shortest=2, longest=7)
  arrays, counted = rows.make(3, 64, lengths, vocabulary=50)
  assert counted.places == 3 * 64
  assert counted.tokens == (arrays["segment_ids"] > 0).sum()
  assert counted.predicted == arrays["loss_mask"].sum() == (arrays["loss_places"] >= 0).sum()
  assert counted.loss_places == arrays["loss_places"].size
  for row in range(3):
    of = {name: array[row] for name, array in arrays.items()}
    assert (np.flatnonzero(of["loss_mask"]) == of["loss_places"][of["loss_places"] >= 0]).all()
    assert not of["loss_mask"][of["branch_ids"] == 0].any()
    for place in np.flatnonzero(of["branch_ids"] > 0):
      before = of["predecessors"][place]
      assert of["segment_ids"][before] == of["segment_ids"][place]
      assert of["positions"][before] == of["positions"][place] - 1
      assert of["branch_ids"][before] in (0, of["branch_ids"][place])


# --- traces ---


def test_a_recorded_trace_of_a_cpu_is_read():
  trace = json.loads((GOLDEN / "cpu_trace.json").read_text())
  profile = traces.summarise(trace, "cpu")
  # One fusion of 2688.346 and one of 533.441 µs; what surrounds them does not count.
  (kernel,) = profile.kernels
  assert (kernel.name, kernel.calls) == ("ynn_fusion", 2)
  assert kernel.ms == pytest.approx(3.221787) and kernel.share == 1.0
  assert (profile.total_ms, profile.busy_ms) == pytest.approx((3.221787, 3.221787))
  # From 187.239 to 880.671 + 2688.346 µs.
  assert profile.span_ms == pytest.approx(3.381778)


def gpu_trace():
  """A trace as XLA writes it of a GPU: by hand, since none was recorded."""
  name = lambda kind, pid, tid, of: {
    **{"ph": "M", "name": f"{kind}_name", "pid": pid, "tid": tid, "args": {"name": of}}
  }
  event = lambda pid, tid, of, start, length: {
    **{"ph": "X", "pid": pid, "tid": tid, "name": of, "ts": start, "dur": length}
  }
  return {
    "traceEvents": [
      name("process", 1, 0, "/device:GPU:0"),
      name("process", 2, 0, "/host:CPU"),
      name("thread", 1, 10, "Stream #13(Compute)"),
      name("thread", 1, 11, "Stream #14(MemcpyD2D)"),
      name("thread", 1, 20, "XLA Modules"),
      name("thread", 1, 21, "XLA Ops"),
      name("thread", 2, 10, "Stream of the host"),
      event(1, 10, "gemm", 0, 300),
      event(1, 10, "fusion", 300, 100),
      event(1, 10, "gemm", 500, 300),
      event(1, 11, "copy", 350, 100),
      event(1, 20, "jit_differentiate", 0, 800),
      event(1, 21, "dot.1", 0, 300),
      event(2, 10, "wait", 0, 5000),
      {},
    ]
  }


def test_kernels_of_a_gpu_are_those_of_its_streams():
  profile = traces.summarise(gpu_trace(), "gpu", longest=2)
  assert [(k.name, k.calls, k.ms) for k in profile.kernels] == [("gemm", 2, 0.6), ("copy", 1, 0.1)]
  assert [k.share for k in profile.kernels] == [600 / 800, 100 / 800]
  # Kernels cover 0 to 450 and 500 to 800 µs.
  assert (profile.total_ms, profile.busy_ms, profile.span_ms) == pytest.approx((0.8, 0.75, 0.8))


def test_a_trace_without_kernels_is_an_error_that_names_what_is_there(tmp_path):
  with pytest.raises(traces.NoKernels, match="host:CPU"):
    traces.summarise(json.loads((GOLDEN / "cpu_trace.json").read_text()), "gpu")
  with pytest.raises(traces.NoKernels, match="no .*trace.json.gz"):
    traces.load(tmp_path)
  (tmp_path / "a").mkdir()
  with gzip.open(tmp_path / "a" / "vm.trace.json.gz", "wt") as stream:
    json.dump(gpu_trace(), stream)
  assert traces.load(tmp_path) == gpu_trace()


# --- verdict ---


def head(times, *, width=100, loss=None, why=()):
  """A result of the head: {form: (forward ms, with gradients ms)}."""
  shape = {"tokens": 1000, "width": width, "vocabulary": 5000}
  measurements = []
  for name, of in times.items():
    for which, ms in zip(("forward", "forward+backward"), of, strict=True):
      measurements.append(
        {
          **{"shape": shape, "variant": name, "pass": which, "why": None, "samples_s": [ms / 1e3]},
          **{"temporary_bytes": 2**30, "peak_bytes": 2**31},
          "loss": (loss or {}).get(name, 10.0),
        }
      )
  for name in why:
    for which in ("forward", "forward+backward"):
      measurements.append(
        {**{"shape": shape, "variant": name, "pass": which, "why": "no", "samples_s": []}}
      )
  matmul = {"size": 1000, "samples_s": [1e-3]}
  return {"shape": shape, "dtype": "bfloat16", "matmul": matmul, "measurements": measurements}


def test_the_fastest_form_over_all_sizes_should_be_the_default():
  forms = {"mosaic_gpu": (2, 6), "xla_chunked": (1, 9), "token_local": (1, 8), "liger": (1, 1)}
  forward, both = verdict.judge([head(forms), head({**forms, "mosaic_gpu": (4, 2)}, width=200)])
  # Forward: xla_chunked takes 1 and 1, mosaic_gpu 2 and 4 times as long: √8 in the mean.
  assert (forward.choice, forward.present) == ("xla_chunked", "mosaic_gpu")
  assert forward.slowdowns["mosaic_gpu"] == pytest.approx(math.sqrt(8))
  # A peer is shown, and is no candidate, however fast: 1/6 and 1/2.
  assert (both.choice, both.present) == ("mosaic_gpu", "token_local")
  assert both.slowdowns["liger"] == pytest.approx(math.sqrt(1 / 12))
  assert "now it is token_local" in both.sentence and "liger 0.29" in both.sentence


def test_the_default_stays_where_a_change_gains_next_to_nothing():
  forms = {"mosaic_gpu": (1.02, 6), "xla_chunked": (1.0, 9), "token_local": (1, 6.3)}
  forward, both = verdict.judge([head(forms)])
  assert forward.choice == "mosaic_gpu" and "as it is now" in forward.sentence
  assert both.choice == "mosaic_gpu"  # 5 % are worth a change.


def test_forms_that_failed_or_are_wrong_are_not_chosen():
  times = {"xla_chunked": (3, 9), "token_local": (2, 8), "xla_materialised": (2, 7)}
  wrong = {"token_local": 20.0}
  forward, both = verdict.judge([head(times, loss=wrong, why=["mosaic_gpu"])])
  assert (forward.choice, forward.present) == ("xla_chunked", None)
  assert (both.choice, both.present) == ("xla_chunked", None)
  assert "did not run" in both.sentence and "left out: token_local" in both.sentence
  undecided, _ = verdict.judge([head({"liger": (1, 2)})])
  assert undecided.choice is None and "undecided" in undecided.sentence


def test_a_form_of_ours_that_does_not_run_where_it_should_is_a_failure():
  times = {"xla_chunked": (3, 9), "token_local": (2, 8), "xla_materialised": (2, 7)}
  result = head(times, why=["mosaic_gpu", "liger"])
  assert heads.complaints(result, ["xla_chunked", "token_local"]) == []  # not on Hopper.
  (line,) = heads.complaints(result, ["mosaic_gpu", "xla_chunked"])
  assert line == "mosaic_gpu should run here and did not: no"
  wrong = head(times, loss={"token_local": float("nan")})
  assert all("token_local" in line for line in heads.complaints(wrong, []))
  assert len(heads.complaints(wrong, [])) == 2  # forward, and with gradients.


# --- the tests of make test-gpu ---

PYTEST = """
collecting ... collected 31 items / 2 deselected / 29 selected
tests/kernels/test_gpu.py::test_a[vd-SmolLM2-135M] PASSED                    [  3%]
tests/kernels/test_gpu.py::test_b[1-49152] FAILED                            [  6%]
tests/kernels/test_gpu.py::test_c SKIPPED (mosaic_gpu runs on NVIDIA (Hopper)) [ 9%]
tests/kernels/test_gpu.py::test_d ERROR [ 12%]
FAILED tests/kernels/test_gpu.py::test_b[1-49152] - AssertionError: 0.3 of 0.1
ERROR tests/kernels/test_gpu.py::test_d - RuntimeError: no
""".splitlines()


def test_outcomes_of_pytest_are_read():
  found = gpu_tests.outcomes(PYTEST)
  assert found.collected == 29 and found.passed == ["test_a[vd-SmolLM2-135M]"]
  reasons = {"test_b[1-49152]": "AssertionError: 0.3 of 0.1", "test_d": "RuntimeError: no"}
  assert found.failed == reasons
  assert found.skipped == {"test_c": "mosaic_gpu runs on NVIDIA (Hopper)"}


@pytest.mark.parametrize(
  "found, code, message",
  [
    (gpu_tests.Outcomes(2, ["a"], {"b": "no"}, {}), 1, "1 of 2 tests failed"),
    (gpu_tests.Outcomes(3, ["a", "b"], {}, {}), -11, "1 tests did not run"),
    (gpu_tests.Outcomes(3, ["a", "b"], {}, {}), 0, "1 tests did not run"),
    (gpu_tests.Outcomes(0, [], {}, {}), 5, "exit code 5"),
    (gpu_tests.Outcomes(2, [], {}, {"a": "no GPU", "b": "no GPU"}), 0, "all 2 tests: no GPU"),
  ],
)
def test_tests_that_failed_or_did_not_run_are_never_taken_for_passed(found, code, message):
  with pytest.raises(Exception, match=message):
    gpu_tests.judge(found, code)


def test_tests_that_passed_are_a_success():
  gpu_tests.judge(gpu_tests.Outcomes(2, ["a"], {}, {"b": "needs two GPUs"}), 0)


# --- running ---

PLANTED = textwrap.dedent(
  """
  import os, signal, sys, time
  from gpu_day_parts import child

  def measure(record, settings, *, what):
    record.set_device({"platform": "gpu", "kind": "planted"})
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
    record.append("after", what)
  """
)


def planted(what, *, limit_s=20.0):
  """A part that does `what`."""
  return running.Part(what, what, "planted_part", limit_s, {"what": what}, {"what": what})


@pytest.fixture
def run(tmp_path, monkeypatch):
  """Runs planted parts; returns the result as the file has it."""
  (tmp_path / "planted_part.py").write_text(PLANTED)
  monkeypatch.setenv("PYTHONPATH", str(tmp_path))
  monkeypatch.setattr(running, "GRACE_S", 0.2)
  settings = running.Settings(tiny=True, scratch=str(tmp_path))

  def run(*parts, result=None, minutes=1.0):
    reported = []
    result = result or running.new_result(["test"], tiny=True)
    running.run(parts, settings, tmp_path / "out", result, minutes=minutes, log=reported.append)
    found = json.loads((tmp_path / "out" / running.RESULT).read_text())
    assert found == result
    return found, reported

  return run


@pytest.mark.long
def test_a_part_that_fails_leaves_the_others_whole(run):
  kinds = ("raises", "memory", "killed", "exits", "skipped")
  parts = [planted("first"), *map(planted, kinds), planted("hangs", limit_s=2.0), planted("last")]
  started = time.monotonic()
  result, reported = run(*parts)
  assert time.monotonic() - started < 30
  found = result["parts"]
  assert {name: entry["status"] for name, entry in found.items()} == {
    **{"first": "done", "raises": "failed", "memory": "out of memory", "killed": "killed"},
    **{"exits": "failed", "skipped": "skipped", "hangs": "timed out", "last": "done"},
  }
  for name, entry in found.items():  # what was measured before stays.
    assert entry["result"]["before"] == name and entry["device"]["kind"] == "planted"
  assert [n for n, e in found.items() if e["result"].get("after")] == ["first", "last"]
  assert found["raises"]["reason"] == "ValueError: planted"
  assert "said by raises" in "".join(found["raises"]["last_lines"])
  assert "SIGKILL" in found["killed"]["reason"] and "7" in found["exits"]["reason"]
  assert "limit of 2 s" in found["hangs"]["reason"] and "last_lines" not in found["first"]
  assert len(reported) == 2 * len(parts)
  failed = ["raises", "memory", "killed", "exits", "hangs"]
  assert summary.failures(result) == failed
  assert all(f"  {name}: " in summary.text(result) for name in failed)


@pytest.mark.long
def test_the_processes_of_a_part_that_hangs_are_gone(run, tmp_path):
  run(planted("hangs", limit_s=1.5))
  listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
  assert str(tmp_path) not in listed


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
  running.write_json(out / running.PARTIAL, partial)
  result = running.resume(out, tiny=True)
  assert result is not None
  assert result["parts"]["last"]["status"] == "cut off"
  assert result["parts"]["last"]["result"] == {"x": 1}
  result, _ = run(planted("first"), planted("last"), result=result)
  assert result["parts"]["last"]["status"] == "done"
  with pytest.raises(ValueError, match="tiny sizes"):
    running.resume(out, tiny=False)


def test_without_an_accelerator_nothing_more_is_begun(run):
  result, _ = run(planted("no accelerator"), planted("last"))
  assert result["parts"]["no accelerator"]["reason"] == "only a CPU"
  assert result["parts"]["last"]["status"] == "not run"


def test_a_part_for_which_no_time_is_left_is_not_begun(run):
  result, _ = run(planted("last"), minutes=0.1)
  assert result["parts"]["last"] == {"status": "not run", "reason": "no time was left"}
  assert summary.failures(result) == ["last"]


# --- the schedule ---


def test_all_parts_take_at_most_25_minutes():
  assert sum(part.limit_s for part in schedule.PARTS) <= 60 * schedule.MINUTES == 25 * 60
  for part in schedule.PARTS:
    assert set(part.sizes) == set(part.tiny), f"{part.name}: a tiny run takes the same arguments"


def test_the_models_have_as_many_parameters_as_those_on_the_hub():
  from grpo_jax.models import leaves

  for name, published in (("Qwen2.5-1.5B", 1_543_714_304), ("SmolLM2-135M", 134_515_008)):
    shapes = [leaf.shape for leaf in jax.tree.leaves(leaves.tree(models.config_of(name)))]
    assert sum(math.prod(shape) for shape in shapes) == published
  model = models.config_of("Qwen2.5-1.5B")
  # 28 layers of 12·2 + 2·2 heads of 128 and three MLP matrices of 8960, width 1536.
  assert arithmetic.weights_of_layers(model) == 28 * 1536 * (28 * 128 + 3 * 8960)


@pytest.mark.parametrize(
  "arguments, message",
  [
    (["--parts", "devise"], "no part 'devise'"),
    (["--parts", "device", "--skip", "device"], "leave no part"),
    (["--minutes", "0"], "above 0"),
  ],
)
def test_a_mistyped_command_line_is_refused(arguments, message, capsys):
  with pytest.raises(SystemExit):
    gpu_day.main(arguments)
  assert message in capsys.readouterr().err


# --- documents ---


def of_gpu(**entries):
  """A result of an H100 in which an update of 1e15 operations took 2 s: 500 TFLOP/s."""
  device = {"platform": "gpu", "kind": "NVIDIA H100 80GB HBM3"}
  update = {
    **{"model": "Qwen2.5-1.5B", "microbatch": [16, 1024], "operations": int(1e15)},
    **{"places": 16384, "tokens": 12288, "predicted": 9000, "peak_bytes": 2**35},
    "samples": [{"differentiate_s": d, "apply_s": 0.5} for d in (1.0, 1.5, 4.0)],
  }
  entry = {"status": "done", "reason": "", "seconds": 9.0, "device": device, "result": update}
  result = running.new_result(["test"], tiny=False)
  result["parts"] = {"update_1024": entry}
  for name, changes in entries.items():
    result["parts"][name] = {**entry, **changes}
  return result


def test_numbers_of_an_update_are_derived_from_its_samples():
  products = {"products": [{"shape": [8192] * 3, "name": "bfloat16", "tflops": 800.0}]}
  numbers = summary.update_numbers(of_gpu(device={"result": products}), "update_1024")
  assert numbers is not None
  # The median of 1.5, 2 and 4.5 s; 12288 of 16384 places are tokens.
  assert (numbers["seconds"], numbers["least_s"], numbers["most_s"]) == (2.0, 1.5, 4.5)
  assert numbers["tokens_per_s"] == 6144 and numbers["padding"] == 0.25
  assert numbers["tflops"] == pytest.approx(500)
  assert numbers["mfu"] == pytest.approx(500 / 989) and numbers["share"] == pytest.approx(0.625)
  assert numbers["peak_gib"] == 32


def saved(tmp_path, result):
  """Writes a result to a file."""
  path = tmp_path / "result.json"
  path.write_text(json.dumps(result))
  return path


@pytest.fixture
def pages(tmp_path, monkeypatch):
  """Copies of docs/gpu.md and README.md take their places."""
  for name in ("PAGE", "README"):
    copy = tmp_path / getattr(document, name).name
    copy.write_text(getattr(document, name).read_text())
    monkeypatch.setattr(document, name, copy)


def test_a_result_of_a_gpu_is_written_into_both_pages(tmp_path, pages):
  before = document.PAGE.read_text(), document.README.read_text()
  result = of_gpu(tests={"status": "timed out", "reason": "its limit | was over", "result": {}})
  assert document.write(saved(tmp_path, result)) == [document.PAGE, document.README]
  page, readme = document.PAGE.read_text(), document.README.read_text()
  assert document.PENDING not in page and document.PENDING_README not in readme
  assert "NVIDIA H100 80GB HBM3" in page and "| 2.000 (1.500–4.500) |" in page
  assert "| `tests` | timed out | 9 | its limit \\| was over |" in page
  assert "an update of Qwen2.5-1.5B with\n16384 places takes 2.00 s (MFU 50.6 %" in readme
  for old, new in zip(before, (page, readme), strict=True):  # nothing else has changed.
    assert old.split(document.BEGIN)[0] == new.split(document.BEGIN)[0]
    assert old.split(document.END)[1] == new.split(document.END)[1]
  again = document.PAGE.read_text()
  document.write(saved(tmp_path, result))
  assert document.PAGE.read_text() == again


CPU = {"device": {"platform": "cpu", "kind": "cpu"}}
H200 = {"device": {"platform": "gpu", "kind": "NVIDIA H200"}}


@pytest.mark.parametrize(
  "result, reason",
  [
    (of_gpu(update_1024=CPU), "ran on a CPU"),
    (of_gpu(decode={**CPU, "status": "failed"}), "ran on a CPU"),
    (
      of_gpu(decode={**H200, "result": {}}),
      "different devices: NVIDIA H100 80GB HBM3, NVIDIA H200",
    ),
    ({**of_gpu(), "tiny": True}, "sizes are tiny"),
    ({**of_gpu(), "parts": {}}, "no part says on which device"),
    ({"format": 0}, "not a result"),
    ([], "not a result"),
  ],
)
def test_what_is_not_an_accelerators_is_never_written_down(tmp_path, pages, result, reason):
  before = document.PAGE.read_text(), document.README.read_text()
  path = saved(tmp_path, result)
  for page, allow in ((None, False), (None, True), (document.PAGE, True), (document.PAGE, False)):
    with pytest.raises(document.Refused, match=reason):
      document.write(path, page, allow_cpu=allow)
  assert (document.PAGE.read_text(), document.README.read_text()) == before


def test_a_result_of_a_cpu_is_written_elsewhere_on_demand_and_marked(tmp_path, pages):
  readme = document.README.read_text()
  page = tmp_path / "trial.md"
  document.write(saved(tmp_path, of_gpu(update_1024=CPU)), page, allow_cpu=True)
  assert document.CPU_NOTICE in page.read_text() and document.README.read_text() == readme


def test_pages_say_that_nothing_was_measured_or_show_numbers_both():
  page, readme = document.PAGE.read_text(), document.README.read_text()
  pending = f"{document.BEGIN}\n{document.PENDING}\n{document.END}" in page
  of_readme = f"{document.BEGIN}\n{document.PENDING_README}\n{document.END}" in readme
  assert pending == of_readme
  assert pending or "## Measured" in page
  assert document.BEGIN in readme.split("## What you get")[0], "README's first screen says it"
  for part in schedule.PARTS:
    assert f"| `{part.name}` | {part.limit_s:.0f} |" in page


# --- wheels ---


def test_what_to_carry_is_the_closure_of_the_requirements():
  requirements = {
    "grpo-jax": ["JAX>=0.10", 'torch; extra == "test"', "Some_Thing[fast]"],
    "jax": ["numpy", 'old; python_version < "3"'],
    "some-thing": ['speed; extra == "fast"', 'slow; extra == "slow"'],
    **{name: [] for name in ("numpy", "speed", "slow", "old", "torch")},
  }
  found = wheels.closure(requirements, ["grpo-jax"])
  assert found == ["grpo-jax", "jax", "numpy", "some-thing", "speed"]


@pytest.mark.long
def test_packages_that_are_there_are_left_out():
  listed = "# list\nJAX==0.11.2\nml_dtypes @ file:///x\nnumpy   2.0\n\n-e ."
  assert wheels.names_in(listed) == {"jax", "ml-dtypes", "numpy"}
  everything = wheels.to_carry()
  assert any(line.startswith("flax==") for line in everything)
  assert not any(line.startswith("grpo-jax==") for line in everything)
  assert set(everything) - set(wheels.to_carry({"flax"})) == {
    line for line in everything if line.startswith("flax==")
  }


def test_sizes_of_wheels_are_those_of_the_files():
  text = wheels.table({"a_b-1.0-py3-none-any.whl": 1_500_000, "c-2-cp312-x.whl": 12_000_000})
  assert text.splitlines()[2:] == [
    "| c | 2 | 12.00 |",
    "| a-b | 1.0 | 1.50 |",
    "| 2 wheels | | 13.5 |",
  ]


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
  assert [*result["parts"]] == [part.name for part in schedule.PARTS] and skipped == {"tests"}
  for name in result["parts"]:
    assert summary.headline(result, name), name
  for name in ("update_1024", "update_4096"):
    assert result["parts"][name]["result"]["profile"]["kernels"]
  assert len(summary.quickstart_numbers(result)) == 3
  assert sorted(path.name for path in out.iterdir()) == ["gpu_day.json", "gpu_day.log"]
  with pytest.raises(document.Refused, match="tiny"):
    document.write(out / running.RESULT)
  again = subprocess.run(
    [*command, "--out", str(out), "--resume"], capture_output=True, text=True, check=True
  )
  assert again.stdout.count("is done already") == len(schedule.PARTS)
