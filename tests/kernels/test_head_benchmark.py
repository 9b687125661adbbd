"""The measuring script of the fused head: its arithmetic, its variants, one run on the CPU."""

import json
import os
import pathlib
import re
import subprocess
import sys

import conformance
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo_kernels.linear_logprobs import reference

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts" / "benchmark"
sys.path.append(str(SCRIPTS))

import head_table  # noqa: E402
import head_variants  # noqa: E402

SHAPE = {"tokens": 1000, "width": 100, "vocabulary": 5000}


def measurement(variant, which, samples, *, loss=10.0, why=None):
  """A record as the script makes it."""
  return {
    **{"shape": SHAPE, "variant": variant, "pass": which, "why": why, "samples_s": samples},
    **{"temporary_bytes": 2**29, "peak_bytes": 2**30, "loss": loss},
  }


def result(*measurements):
  """A result on a device whose matmul of 1000³ takes 1 ms: 2 TFLOP/s."""
  return {
    **{"date": "2026-01-01", "command": "c", "device": "d", "versions": "v", "dtype": "bfloat16"},
    **{"layout": "vd", "rounds": 3, "matmul": {"size": 1000, "samples_s": [9e-3, 1e-3, 1e-4]}},
    "measurements": list(measurements),
  }


def test_rates_are_of_the_operations_that_the_result_needs():
  forward, both = head_table.summarise(
    result(
      measurement("mosaic_gpu", "forward", [2e-3, 1e-3, 5e-3]),
      measurement("mosaic_gpu", "forward+backward", [6e-3]),
    )
  )
  # 2 · 1000 · 100 · 5000 = 1e9 operations in 2 ms are 0.5 TFLOP/s, a quarter of the matmul's 2.
  assert forward["median_ms"] == pytest.approx(2.0)
  assert (forward["least_ms"], forward["most_ms"]) == (pytest.approx(1.0), pytest.approx(5.0))
  assert forward["tflops"] == pytest.approx(0.5)
  assert forward["share_of_matmul"] == pytest.approx(0.25)
  assert (forward["temporary_gib"], forward["peak_gib"]) == (0.5, 1.0)
  # Three times the operations in three times the time.
  assert both["tflops"] == pytest.approx(0.5)


def test_speedup_is_of_the_same_shape_and_pass():
  measured = result(
    measurement("xla_materialised", "forward", [3e-3]),
    measurement("mosaic_gpu", "forward", [2e-3]),
    measurement("xla_materialised", "forward+backward", [1e-3]),
    measurement("liger", "forward", [], why="not installed"),
  )
  rows = head_table.summarise(measured)
  (only,) = head_table.speedups(rows, of=head_table.ours(rows))
  assert (only["variant"], only["pass"]) == ("xla_materialised", "forward")
  assert only["times"] == pytest.approx(1.5)
  text = head_table.text(measured)
  assert "liger                     not run: not installed" in text
  assert "1.50× as fast as xla_materialised" in text


def test_variant_with_another_loss_is_called_out():
  same = [measurement(name, "forward", [1e-3]) for name in ("a", "b", "c")]
  assert head_table.disagreements(head_table.summarise(result(*same))) == []
  wrong = measurement("wrong", "forward", [1e-3], loss=11.0)
  (line,) = head_table.disagreements(head_table.summarise(result(*same, wrong)))
  assert line.startswith("NOT THE SAME RESULT: wrong")


@pytest.mark.parametrize("name", ["xla_tiles_1024x2048", "xla_materialised", "token_local"])
def test_what_is_compared_computes_the_same(name, monkeypatch):
  monkeypatch.setattr(head_variants, "TILE", (8, 32))
  hidden, head, targets = conformance.random_case(13, 16, 77, dtype="float32", head_layout="dv")
  weights = jnp.linspace(-1.0, 1.0, 13)

  def theirs(h, w):
    return head_variants.VARIANTS[name].loss(h, w, targets, weights, layout="dv")

  def definition(h, w):
    return jnp.sum(weights * reference.linear_logprobs(h, w, targets, head_layout="dv"))

  got, expected = (
    jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(hidden, head) for f in (theirs, definition)
  )
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, expected)


def run(*arguments, **environment):
  """Runs the script in a process of its own."""
  return subprocess.run(
    [sys.executable, str(SCRIPTS / "linear_logprobs.py"), *arguments],
    env={**os.environ, **environment},
    capture_output=True,
    text=True,
  )


@pytest.mark.long
def test_script_measures_prints_and_says_what_could_not_run(tmp_path):
  output = tmp_path / "cpu.json"
  done = run(
    *("--device", "cpu", "--shape", "40,64,1000", "--rounds", "2", "--json", str(output)),
    JAX_NUM_CPU_DEVICES="1",
  )
  assert done.returncode == 0, done.stderr
  rows = head_table.summarise(json.loads(output.read_text()))
  why = {row["variant"]: row["why"] for row in rows}
  ran = {"xla_chunked", "token_local", "xla_materialised", "xla_tiles_1024x2048"}
  assert {name for name, reason in why.items() if reason is None} >= ran
  assert "runs on NVIDIA GPUs of the Hopper generation" in why["mosaic_gpu"]
  assert "needs a GPU" in why["liger"]
  assert all(row["median_ms"] > 0 for row in rows if row["why"] is None)
  assert "NOT THE SAME RESULT" not in done.stdout
  assert re.search(r"xla_chunked +[\d.]+ +[\d.]+–[\d.]+ ", done.stdout)
  shown = run("--show", str(output))
  assert done.stdout.endswith(shown.stdout)


@pytest.mark.long
def test_script_without_a_gpu_says_so(tmp_path):
  done = run("--json", str(tmp_path / "never.json"), JAX_PLATFORMS="cpu")
  assert done.returncode != 0
  assert "no gpu here" in done.stderr
  assert "Traceback" not in done.stderr
