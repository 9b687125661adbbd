"""Proofs of new weights at a real SGLang server in bfloat16, and loads that go wrong there."""

import dataclasses
import random
import shutil
import threading

import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.building import sync_check
from grpo_jax.building.sync_check import SyncCheck
from grpo_jax.engines import transfer
from grpo_jax.engines.base import WrongWeights
from grpo_jax.engines.jax_sampler import JaxSampler
from grpo_jax.engines.prompt_scoring import Passage
from grpo_jax.engines.sglang_client import Client
from grpo_jax.engines.tensor_check import TensorCheck
from grpo_jax.models import export, safetensors
from tests.engines import proofs, sglang_fixtures, tiny

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

CONFIG = tiny.config()


@pytest.fixture(scope="module")
def server(sglang_model, tmp_path_factory):
  """An engine that has launched a server in bfloat16."""
  workdir = tmp_path_factory.mktemp("proofs")
  settings = {"version": None, "compute_dtype": "bfloat16"}
  with sglang_fixtures.make(sglang_model, workdir, **settings) as engine:
    engine.load_weights(tiny.params(CONFIG), version=0)
    yield engine


@pytest.fixture(scope="module")
def steps():
  """The weights of two optimizer steps, and what was sampled before each."""
  with JaxSampler(CONFIG, max_rows=16, max_length=128) as sampler:
    return proofs.two_steps(sampler, CONFIG, jnp.bfloat16, groups=12, tokens=24)


def half_of(one, other):
  """Returns weights whose kernels have half of their columns of one and half of the other."""

  def mix(name, x):
    half = x.shape[-1] // 2
    return x.at[..., half:].set(other["layers"][name][..., half:]) if x.ndim == 3 else x

  return {**one, "layers": {name: mix(name, x) for name, x in one["layers"].items()}}


def test_each_load_that_goes_wrong_is_named_and_a_right_one_is_proven(
  server, steps, tmp_path, monkeypatch
):
  """The server reports the new version each time, since the load itself was answered.

  It is as if it gave no checksums of its tensors.
  """
  monkeypatch.setattr(server._fleet.servers[0].tensors, "_client", None)
  monkeypatch.setattr(sync_check, "_COST_SHARE", 1e9)  # every time, whatever it costs.
  initial, old, new, groups = steps.initial, steps.old, steps.new, steps.groups
  check = SyncCheck(server, proofs.scorer(CONFIG, jnp.bfloat16), tokens=1024, begins_new=True)
  proofs.checked(server, check, initial, old, groups[0], old, 1)
  faults = {
    "still samples from the weights before the update": old,
    "samples from the initial weights": initial,
    "neither the new weights nor|only a part of its tensors": half_of(new, old),
  }
  loaded = Client.load
  for number, (message, weights) in enumerate(faults.items()):
    folder = export.to_huggingface(weights, CONFIG, tmp_path / str(number), dtype=jnp.bfloat16)
    at = 2 * number + 2
    with monkeypatch.context() as patch:
      load = lambda self, _, version, folder=folder: loaded(self, str(folder), version)
      patch.setattr(Client, "load", load)
      with pytest.raises(WrongWeights, match=f"server 0 does not .*: .*{message}"):
        proofs.checked(server, check, old, new, groups[1], new, at)
    assert server.weight_version == at  # the version says nothing.
    server.load_weights(old, version=at + 1)
  found = proofs.checked(server, check, old, new, groups[1], new, 20)
  assert found["mismatch/sync_proven"] == 1.0
  assert abs(found["mismatch/sync_share"] - 1.0) <= max(
    6 * found["mismatch/sync_share_error"], 0.02
  )


def test_passages_are_scored_while_completions_are_under_way(server):
  passages = [
    Passage(np.asarray(ids), 3 + number)
    for number, ids in enumerate(proofs.prompts_for(CONFIG, 5, 12))
  ]
  idle = server.score_given(passages)
  requests = tiny.groups(proofs.prompts_for(CONFIG, 8), 8, max_tokens=100)
  thread = threading.Thread(target=sglang_fixtures.collect, args=(server, requests))
  thread.start()
  try:
    busy = server.score_given(passages)
  finally:
    thread.join()
  assert list(idle) == list(busy) == ["server 0"]
  for passage, one, other in zip(passages, idle["server 0"], busy["server 0"], strict=True):
    assert len(one) == len(passage.tokens) - passage.first
    np.testing.assert_allclose(one, other, atol=0.05)
  wanted = tiny.model_logprobs(
    CONFIG, server_weights(), passages[0].tokens[:3], passages[0].tokens[3:]
  )
  assert np.abs(tiny.of_tokens(wanted, passages[0].tokens[3:]) - idle["server 0"][0]).max() < 1.0


def server_weights():
  return tiny.params(CONFIG)


def stored(folder):
  """Returns what writes the tensors of a folder again, by their names."""
  read = safetensors.open_folder(folder)
  return {
    name: safetensors.ToWrite(name, entry.shape, entry.dtype, lambda name=name: read.read(name))
    for name, entry in read.entries.items()
  }


def mixture(new, old, names, target):
  """Writes a folder that has some tensors of an older one."""
  shutil.copytree(new, target)
  before, after = stored(old), stored(new)
  safetensors.write_folder(target, [(before if n in names else after)[n] for n in after])
  return target


def exchanged(new, target):
  """Writes a folder in which both layers have each other's down projection."""
  shutil.copytree(new, target)
  zero, one = (f"model.layers.{i}.mlp.down_proj.weight" for i in range(2))
  others = {zero: one, one: zero}
  tensors = stored(new)
  safetensors.write_folder(
    target,
    [dataclasses.replace(tensors[others.get(n, n)], name=n) for n in tensors],
  )
  return target


def test_each_tensor_that_does_not_arrive_is_named(server, sglang_model, tmp_path):
  """At a rate of 1e-6 in bfloat16, of which no single proof by logprobs is certain."""
  process = server._fleet.servers[0]
  client, shape = process.client, {"source_directory": sglang_model, "dtype": jnp.bfloat16}
  folders = transfer.WeightFolders(tmp_path / "root", CONFIG, **shape)
  check, right = TensorCheck("bfloat16"), TensorCheck("bfloat16")
  asked = lambda call: server._run(call)
  weights, (begin, step) = tiny.params(CONFIG), proofs.learner(CONFIG, 1e-6, jnp.bfloat16)
  groups = proofs.sampled(server, proofs.prompts_for(CONFIG, 4), tokens=16)
  asked(client.load(str(sglang_model), "0"))
  for each in (check, right):
    asked(each.prepare(client, name="server 0", is_ours=True))
  state, chance = begin(weights), random.Random(0)
  old = folders.write(weights, version=0)

  def given(folder, version, own, *, reference=lambda: None):
    asked(client.load(str(folder), str(version)))
    return own.compare(version, folders.changes, reference)

  asked(given(old, 0, check))
  for version in range(1, 11):
    weights, state = step(weights, state, groups, version)
    new = folders.write(weights, version=version)
    changed = [name for name, is_changed in folders.changes.is_changed.items() if is_changed]
    assert 8 <= len(changed) < len(folders.changes.is_changed)  # norms are rounded.
    lost = chance.choice([n for n in changed if "qkv" not in n and not is_part(n)])
    half = set(changed[: len(changed) // 2])
    of = lambda names, to, new=new, old=old: mixture(new, old, names, tmp_path / f"{new.name}{to}")
    faults = {
      "the load was answered but had no effect": old,
      "that it was started with. To do: it fell back": sglang_model if version > 1 else None,
      rf"1 of \d+ tensors \({lost}\) .* are those of version {version - 1}": of({lost}, "lost"),
      r"[2-9] of \d+ tensors \(.*lost on the way": of(half, "twice"),  # in place of the other one.
    }
    for message, folder in faults.items():
      if folder is not None:
        with pytest.raises(WrongWeights, match=f"does not have version {version} .*{message}"):
          asked(given(folder, version, check))
        assert check.known.version == version - 1
    asked(given(new, version, check))
    with pytest.raises(WrongWeights, match="2 of .*down_proj.weight, .* on another server"):
      place = exchanged(new, tmp_path / f"{new.name}exchanged")
      asked(given(place, version, right, reference=lambda: check.known))
    asked(given(new, version, check))  # the same version again.
    folders.discard(old)
    old = new
  folders.close()


def is_part(name):
  return any(part in name for part in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"))


def test_an_engine_whose_server_keeps_a_tensor_ends(server, monkeypatch):
  """The last test of this server, whose engine has failed."""
  process = server._fleet.servers[0]
  server.load_weights(tiny.params(CONFIG, 1), version=101)
  kept = dict(process.tensors.known.checksums)
  checksums = Client.checksums

  async def stale(self):
    name = "model.layers.1.mlp.down_proj.weight"
    return {**await checksums(self), name: kept[name]}

  monkeypatch.setattr(Client, "checksums", stale)
  found = server.metrics()
  assert 0.0 < found["perf/sync_checksum_s"] < 5.0
  message = (
    r"server 0 at .* version 102 .*: 1 of 14 tensors \(model.layers.1.mlp.down_proj.weight\)"
  )
  with pytest.raises(WrongWeights, match=message):
    server.load_weights(tiny.params(CONFIG, 2), version=102)
