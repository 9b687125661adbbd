"""Every message on docs/troubleshooting.md is one that the program prints, and every name exists.

Each entry of the page has a producer here: a function that yields messages, made by the code that
makes them in a run. On the page N is a number; "…" and the words of ANYTHING are any text.
"""

import asyncio
import dataclasses
import errno
import json
import os
import pathlib
import re
import socket
import types
from importlib import metadata
from typing import Any

import jax
import numpy as np
import pytest

from configs import base
from grpo_jax import data, metrics, report
from grpo_jax.building import (
  checks,
  endpoint,
  evaluation_sets,
  kept_programs,
  memory_choices,
  policy_model,
)
from grpo_jax.compilation import accelerators, compiling, programs
from grpo_jax.config import command_line, configuration
from grpo_jax.config.configuration import typed
from grpo_jax.data.byte_tokenizer import ByteTokenizer
from grpo_jax.engines import fleet, launching, merge_rounding, probe, server, sync_proof
from grpo_jax.engines.base import SamplingParams, mismatch_warning
from grpo_jax.engines.checksums import Changes, Known
from grpo_jax.engines.tensor_check import TensorCheck
from grpo_jax.environments.base import SingleTurn
from grpo_jax.files import disk, installed
from grpo_jax.groups import learning_signal
from grpo_jax.learn import sharding, train_step
from grpo_jax.learn.update_memory import UpdateMemory
from grpo_jax.models import leaves
from grpo_jax.models.products import LowRank
from grpo_jax.processes import watchdog
from grpo_jax.report import figures, run_data
from grpo_jax.rollouts import failures, rollout
from grpo_jax.run_folder import checkpointing, console, earlier_run, folder_lock, hosts
from grpo_jax.types import Prompt
from tests import scripted_engine

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"
NUMBER = r"[-+]?\d[\d.,]*(?:e[-+]?\d+)?"
ANYTHING = ("FOLDER", "FILE", "NAME", "REASON", "ADDRESS", "PROMPT")
PRODUCERS: dict[str, Any] = {}


def producer(entry):
  """Registers a function that yields the messages of an entry."""

  def register(function):
    PRODUCERS[entry] = function
    return function

  return register


class Given:
  """What producers take: a folder, a monkeypatch, and what the package logs."""

  def __init__(self, folder, monkeypatch, noticed):
    self.folder, self.patch, self.noticed = folder, monkeypatch, noticed

  def logged(self, call, *arguments, **named):
    """Returns what a call logs."""
    self.noticed.clear()
    call(*arguments, **named)
    return list(self.noticed)

  def rows(self, *rows):
    """Writes a file of rows; returns its path."""
    path = self.folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def error_of(call, *arguments, **named):
  """Returns the message of the error that a call raises."""
  with pytest.raises(Exception) as caught:
    call(*arguments, **named)
  return str(caught.value)


def config_of(**values):
  values = {name.replace("__", "."): value for name, value in values.items()}
  return typed(configuration.replaced(base.get_config(), values))


def learning(room):
  """Returns what an update takes: 100 GiB for arrays, and 50, 300 or 800 for what it keeps."""
  memory = lambda kept: UpdateMemory(*(size << 30 for size in (kept, 10, 20, 20, 40, 30)))
  updates = {"full": memory(50), "dots": memory(300), "none": memory(800)}
  return memory_choices.Learning(room << 30, 100 << 30, updates)


def exhausted(*_, **__):
  raise jax.errors.JaxRuntimeError(
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8589934592 bytes."
  )


@producer("The reward does not rise")
def _(given):
  yield console.header()
  run = given.folder / "run"
  run.mkdir()
  (run / "config.json").write_text("{}")
  lines = [{"step": step, "all/kl_to_initial": 0.0} for step in range(9)]
  (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
  yield from figures.quiet_panels([run_data.load(run)])


@producer("Nothing to learn from")
def _(given):
  del given
  for name in learning_signal.REASONS:
    yield "\n".join(learning_signal.lines(0, 0, {name: 64}))


@producer("Completions cannot be scored")
def _(given):
  def reward(prompt, text):
    raise LookupError("this reward is broken")

  prompt = Prompt("mine:0:3", scripted_engine.TOKENIZER.encode("1 + 1"), "mine", text="1 + 1")
  groups = rollout.collect_sync(
    scripted_engine.ScriptedEngine(lambda request: "2"),
    {"mine": lambda prompt: SingleTurn(reward, prompt)},
    [prompt],
    scripted_engine.TOKENIZER,
    group_size=2,
    sampling=SamplingParams(max_tokens=4),
    seed=0,
    step=0,
    limits=rollout.AttemptLimits(max_error_share=1.0),
  )
  yield "\n".join(console.failure_lines(groups))
  yield error_of(failures.check_failures, groups, 0.1)


@producer("Memory runs out")
def _(given):
  del given
  remedy = learning(600).remedy("none")
  jitted: Any = types.SimpleNamespace(lower=exhausted, __name__="update")
  yield error_of(programs.Program(jitted, name="update", remedy=remedy).job(detail="7 × 2304"))
  yield error_of(programs.Program(exhausted, name="update", remedy=remedy))
  yield memory_choices.too_large(learning(600), "none")
  yield watchdog.Watchdog.described(
    types.SimpleNamespace(named=lambda number: f"process {number} of 2 (b)"),  # pyright: ignore
    watchdog.Failure(1, watchdog._silent(60)),
  )


@producer("Completions or prompts are cut")
def _(given):
  yield from given.logged(checks.log_lengths, config_of(sampling__max_tokens=1 << 20))
  prompt = Prompt("mine:0:3", jax.numpy.arange(64), "mine", text="1 + 1", is_cut=True)
  yield console.prompt_lines(prompt)[0]
  options = dict(path=given.rows({"problem": "1" * 99, "expected_answer": "1"}), name="train")
  dataset = data.open_dataset(ByteTokenizer(), max_prompt_tokens=64, **options)
  yield from given.logged(data.held_out, dataset)
  dataset = data.open_dataset(ByteTokenizer(), max_prompt_tokens=64, overlong="drop", **options)
  yield error_of(data.held_out, dataset)


@producer("Sampling is slow")
def _(given):
  config = config_of()
  yield memory_choices._without_memory(config, "for a CPU").lines[0]
  sampled = configuration.replaced(config, {"engine.max_rows": 64})
  rows = types.SimpleNamespace(count=64, whole_caches=True, caches=1 << 30)
  held = types.SimpleNamespace(sampler=1 << 30, always=1 << 30)
  yield memory_choices._of_rows(sampled, rows, held, 1 << 36)  # pyright: ignore


@producer("Steps are slow")
def _(given):
  slow = hosts.Stragglers()
  of = lambda name, work: hosts.HostStep(name, work, {"sample": work}, {}, {}, 0.0)
  for step in range(3):
    yield from slow.lines(step, [of("host-a", 1.0), of("host-b", 2.0)])


@producer("Compilation takes minutes")
def _(given):
  monitor = compiling.CompilationMonitor()
  with monitor.listening():
    yield from given.logged(monitor._explain)
  job = programs.CompileJob("update", lambda: None)
  with compiling.BackgroundCompiler([job], monitor) as ahead:
    yield from given.logged(ahead.wait, console.TrainingScreen().progress)
  yield compiling.late_line("step 3", [compiling.Compilation("update", 12.0, False)])
  before = {name: jax.config.values[name] for name in KEPT}
  try:
    jax.config.update("jax_compilation_cache_dir", "/proc/none")
    yield from given.logged(kept_programs.keep)
  finally:
    for name, value in before.items():
      jax.config.update(name, value)


KEPT = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")


@producer("The data cannot be used")
def _(given):
  path = given.rows({"question": "1 + 1", "expected_answer": "2"})
  yield error_of(evaluation_sets.check_sources, config_of(data__dataset=None, data__path=path))
  wanted = config_of(data__dataset=None, data__path=f"{path}x")
  yield error_of(evaluation_sets.check_sources, wanted)
  reason = "it does not answer"
  yield str(policy_model.hub_needed(config_of(), reason, datasets=["nvidia/OpenMathInstruct-2"]))


@producer("The run does not continue")
def _(given):
  run = given.folder / "run"
  with folder_lock.claimed(run):
    yield error_of(folder_lock.claimed, run)
  (run / "checkpoints" / "step_00000001").mkdir(parents=True)
  checkpoints = checkpointing.open(run / "checkpoints")
  yield error_of(checkpoints.restore_latest, {})
  (run / "rollouts").mkdir()
  (run / "rollouts" / "step_000000.jsonl").touch()
  yield from given.logged(earlier_run.set_aside, run)
  configuration.write(config_of(seed=1), run / "config.json")
  yield from given.logged(checks.log_differences, config_of(seed=2), run)


@producer("An SGLang server died, hangs, or has other weights")
def _(given):
  yield error_of(launching.check_environment, given.folder / "python", "cpu")
  with socket.create_server(("127.0.0.1", 0)) as taken:
    yield error_of(launching.check_port, "127.0.0.1", taken.getsockname()[1])

  class Lost(server.Server):
    name = "server 0 at http://127.0.0.1:30000"

    async def end(self):
      return " Its last lines:\nno kernel image is available"

  async def no_pause(_):
    return None

  ended = "exited with code 1"
  listener: Any = types.SimpleNamespace(closed=lambda lost: None)

  async def bury(lost, times):
    servers = fleet.Fleet(server.FleetOptions(max_restarts=3), listener)
    for _ in range(times):
      await servers._bury(lost, ended)

  given.patch.setattr(fleet.asyncio, "sleep", no_pause)
  yield error_of(asyncio.run, bury(Lost(0), 1))
  lost = Lost(0)
  lost.has_been_up = True
  yield from given.logged(asyncio.run, bury(lost, 1))
  yield error_of(asyncio.run, bury(lost, 3))
  served, expected = np.full(5, -1.0), np.full(5, -2.0)
  yield error_of(probe.check, served, expected, tolerance=3e-4, what=Lost(0).name)
  name = "model.layers.3.mlp.down_proj.weight"
  before, client = Known(11, {name: {0: "a"}}), types.SimpleNamespace()
  check: Any = TensorCheck("bfloat16")

  async def same():
    return before.checksums

  client.checksums = same
  changes = Changes(11, {name: True})
  check.known, check._client, check._name = before, client, Lost(0).name
  yield error_of(asyncio.run, check.compare(12, changes, lambda: None))
  old, new = np.full((20, 50), -1.0), np.full((20, 50), -1.0) + np.linspace(-0.1, 0.1, 50)
  evidence = sync_proof.Evidence(12, (), list(old), list(new))
  stale, weak = (
    sync_proof.prove(list(said), evidence, before=None, undecided=sync_proof.Undecided())
    for said in (old, old + np.random.default_rng(0).normal(size=old.shape))
  )
  yield sync_proof.message("server 0", stale, evidence, is_initial=False)
  yield sync_proof.why_unknown(evidence, [weak])


@producer("The mismatch is high")
def _(given):
  yield str(mismatch_warning(SamplingParams(max_tokens=4, top_k=20)))
  share = merge_rounding.MergedShare("bfloat16")
  low_rank = LowRank(*(np.zeros(()) for _ in dataclasses.fields(LowRank)[:3]), scale=1.0)
  given.patch.setattr(share, "_kernels", lambda params, is_apart: {params: low_rank})
  given.patch.setattr(share, "_program", lambda kernels: 0.07)
  yield from given.logged(share.measure, "q")
  share._warns = True
  yield from given.logged(share.measure, leaves.EXPERTS[0])


@producer("Gradients are not finite")
def _(given):
  del given
  skipped = {"train/skipped_share": 1.0}
  yield error_of(train_step.skipped_in_a_row, 2, skipped, limit=3)
  yield next(sentence for name, _, sentence in report.ALARMS if name in skipped).format("100%")


@producer("There is no evaluation")
def _(given):
  path = given.rows(*({"problem": f"{n} + 1", "expected_answer": "2"} for n in range(9)))
  config = config_of(data__dataset=None, data__path=path)
  held_out = lambda: evaluation_sets.held_out(config, ByteTokenizer(), data.open_dataset)
  yield from given.logged(held_out)


@producer("A folder, a disk or a port cannot be used")
def _(given):
  yield error_of(folder_lock.claimed, pathlib.Path("/proc/none"))

  def write():
    with disk.writing(given.folder / "metrics.jsonl"):
      raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  yield error_of(write)
  with socket.create_server(("127.0.0.1", 0)) as taken:
    yield error_of(endpoint._listen, taken.getsockname()[1])


@producer("The run uses the CPU, or the wrong packages")
def _(given):
  cause = accelerators.Cause("the environment has no CUDA plug-in", 'pip install "jax[cuda12]"')
  given.patch.setattr(accelerators, "unused", lambda platform: ("1 x NVIDIA L4", cause))
  yield from given.logged(checks.log_devices, sharding.make_mesh(data=-1, fsdp=1, tensor=1))
  version = metadata.version
  given.patch.setattr(
    installed.metadata, "version", lambda name: "0.6.2" if name == "jax" else version(name)
  )
  yield error_of(installed.check.__wrapped__)


@producer("An option is not known")
def _(given):
  del given
  yield error_of(command_line.parse, ["--config=quickstart", "--config.loss.clip_hihg=0.28"])


def entries():
  """Returns the blocks of messages of each entry of the page, by its heading."""
  found = {}
  for section in PAGE.read_text().split("\n## ")[1:]:
    heading, _, text = section.partition("\n")
    blocks = re.findall(r"^ *```text\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    found[heading] = [part for block in blocks for part in block.strip("\n").split("\n\n")]
  return found


def pattern(message):
  """Returns the expression for a message of the page, without regard to line breaks."""
  of_words = {"N": NUMBER, "…": ".+", **dict.fromkeys(ANYTHING, ".+?")}
  parts = re.split(rf"(…|\b(?:{'|'.join(['N', *ANYTHING])})\b)", " ".join(message.split()))
  return "".join(of_words.get(part, re.escape(part)) for part in parts)


def test_every_entry_has_messages_and_a_producer_of_them():
  assert list(entries()) == list(PRODUCERS) and all(entries().values())


@pytest.mark.parametrize("entry", PRODUCERS)
def test_the_messages_of_an_entry_are_printed(entry, tmp_path, monkeypatch, noticed):
  printed = [
    " ".join(message.split()) for message in PRODUCERS[entry](Given(tmp_path, monkeypatch, noticed))
  ]
  messages = entries()[entry]
  unknown = [
    message
    for message in messages
    if not any(re.fullmatch(pattern(message), each) for each in printed)
  ]
  assert not unknown, "\n".join(["printed are:", *printed])


def test_metrics_and_options_that_the_page_names_exist():
  names = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", PAGE.read_text(), flags=re.DOTALL))
  measured = [name for name in names if re.fullmatch(r"[a-z_]+/[\w*/@]+", name)]
  known = set(configuration.fields(base.get_config()))
  sections = {name.partition(".")[0] for name in known}
  options = [
    name.partition("=")[0]
    for name in names
    if re.match(r"[a-z_]+\.[a-z_.]+(=|$)", name) and name.partition(".")[0] in sections
  ]
  assert len(measured) > 20 and len(options) > 30
  assert [name for name in measured if metrics.definition(name) is None] == []
  assert [name for name in options if name not in known] == []
