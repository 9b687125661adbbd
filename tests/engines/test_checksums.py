"""Checksums of a server's tensors: what did not arrive is found and named, and nothing else."""

import asyncio
import random

import numpy as np
import pytest

from grpo_jax.engines import checksums, sglang_messages
from grpo_jax.engines.base import WrongWeights
from grpo_jax.engines.checksums import Changes, Known
from grpo_jax.engines.tensor_check import TensorCheck
from grpo_jax.engines.version_changes import Comparison
from grpo_jax.http.failures import Refused
from grpo_jax.models import safetensors
from tests import side_by_side

LAYERS, DEVICES = 16, 3
KERNELS = ("q_proj", "k_proj", "v_proj", "o_proj")
FILES = [f"layers.{i}.{name}.weight" for i in range(LAYERS) for name in KERNELS] + ["norm.weight"]
SERVED = [f"layers.{i}.{name}.weight" for i in range(LAYERS) for name in ("qkv_proj", "o_proj")] + [
  "norm.weight"
]
INFO = {"dtype": "bfloat16", "quantization": None}


def known(version, *, of=None):
  """Returns the checksums of a server that has the tensors of a version; `of`: of other ones."""
  of = of or {}
  return Known(
    version, {n: {d: f"{n}.{d}.{of.get((n, d), version)}" for d in range(DEVICES)} for n in SERVED}
  )


def changes(*, kept=(), unknown=()):
  return Changes(6, {n: None if n in unknown else n not in kept for n in FILES})


def all_of(names, version):
  return {(name, device): version for name in names for device in range(DEVICES)}


def test_new_weights_are_not_complained_about():
  same = ["layers.1.q_proj.weight", "layers.2.o_proj.weight", "norm.weight"]
  given = {"changes": changes(kept=same), "started_with": known(0).checksums}
  kept = all_of(["layers.2.o_proj.weight", "norm.weight"], 6)  # but q is a part of qkv.
  assert checksums.fault(known(6), known(7, of=kept), **given) is None
  part = {("layers.0.o_proj.weight", 1): 6}  # an update may leave a part of a tensor.
  assert checksums.fault(known(6), known(7, of=kept | part), **given) is None
  assert checksums.fault(known(7), known(7), **given) is None


@pytest.mark.parametrize(
  ("fault", "kept", "message"),
  [
    (
      all_of(SERVED, 6),
      (),
      r"33 of 33 tensors \(.* and others\).*are those of version 6.*no effect",
    ),
    (all_of(SERVED, 0), (), "33 of 33 tensors .* that it was started with.*release_memory=False"),
    (
      all_of(["layers.2.qkv_proj.weight"], 6),
      (),
      r"1 of 33 tensors \(layers.2.qkv_proj.weight\) .* those of version 6.*lost on the way",
    ),
    (
      all_of(["layers.3.o_proj.weight", "norm.weight"], 6),
      ["norm.weight"],  # nobody misses it.
      r"1 of 32 tensors \(layers.3.o_proj.weight\)",
    ),
    (
      all_of(["layers.1.qkv_proj.weight"], 6),
      ["layers.1.q_proj.weight", "layers.1.v_proj.weight"],  # of its three parts k has changed.
      r"1 of 33 tensors \(layers.1.qkv_proj.weight\) .* those of version 6",
    ),
    ({(name, 1): 6 for name in SERVED}, (), "its device 1 has kept its parts of all 33 tensors"),
    (
      {},
      ["norm.weight", "layers.0.o_proj.weight"],
      r"2 of 2 tensors \(layers.0.o_proj.weight, norm.weight\) .* left as they were have changed",
    ),
  ],
)
def test_what_is_wrong_is_named(fault, kept, message):
  given = {"changes": changes(kept=kept), "started_with": known(0).checksums}
  with pytest.raises(AssertionError, match=message):
    raise AssertionError(checksums.fault(known(6), known(7, of=fault), **given))


def test_nothing_is_concluded_from_what_is_not_known():
  stale = known(7, of=all_of(SERVED, 6))
  assert checksums.fault(known(6), stale, changes=None) is None
  assert checksums.fault(known(5, of=all_of(SERVED, 6)), stale, changes=changes()) is None
  assert checksums.fault(known(6), stale, changes=changes(unknown=FILES)) is None
  assert checksums.fault(known(6), known(7), changes=changes(unknown=FILES)) is None


def test_what_few_tensors_show_may_be_chance():
  few = [*SERVED[:6], SERVED[-1]]
  kept = {f for f in FILES if not f.startswith(("layers.0.", "layers.1.", "layers.2.", "norm"))}
  given = {"changes": changes(kept=kept), "started_with": known(0).checksums}
  of = all_of(set(SERVED) - set(few), 6) | all_of(few, 0)
  assert checksums.fault(known(6), known(7, of=of), **given) is None


@pytest.mark.parametrize(("kept", "elsewhere"), [(2, []), (0, [(SERVED[3], 2)])])
def test_a_device_may_have_no_part_of_what_has_changed(kept, elsewhere):
  """31 tensors are changed on the other devices alone; or 33 are, but one not on all of these."""
  same = [f"layers.{i}.o_proj.weight" for i in range(kept)]
  of = all_of(same, 6) | {(name, 1): 6 for name in SERVED} | dict.fromkeys(elsewhere, 6)
  assert checksums.fault(known(6), known(7, of=of), changes=changes(kept=same)) is None


def test_exchanged_tensors_are_found_if_another_server_has_the_version():
  exchanged = all_of(["layers.0.o_proj.weight"], "7 of layer 1")
  assert "(layers.0.o_proj.weight) are not what they are with this version on another" in (
    checksums.fault(known(7), known(7, of=exchanged), changes=None)
  )


@pytest.mark.parametrize(
  ("info", "message"),
  [
    ({"dtype": "auto"}, "its --dtype is auto, and the files of weights are in bfloat16"),
    ({"dtype": "half"}, "its --dtype is half"),
    (INFO | {"quantization": "fp8"}, "it quantises its weights (--quantization fp8)"),
    ([], "it does not describe itself"),
    (INFO, "None"),
  ],
)
def test_servers_that_round_what_they_load_are_not_compared(info, message):
  assert message in str(checksums.refusal(info, "bfloat16"))


def test_only_answers_of_the_right_form_are_read():
  target, draft = [{"role": "target"}], [{"role": "draft"}]
  one = {"checksums": {"a": "1", "b": "2"}, "parallelism_info": target}
  other = {"checksums": {"a": "3"}, "parallelism_info": target}
  beside = {"checksums": {"a": "4"}, "parallelism_info": draft}
  found = sglang_messages.checksums_of({"ranks": [one, beside, other]})
  assert found == {"a": {0: "1", 2: "3"}, "b": {0: "2"}}
  broken = {"checksums": {"a\nb": "4"}, "parallelism_info": target}
  for answer in (None, {}, {"ranks": 3}, {"ranks": [3]}, {"ranks": [{}]}, {"ranks": [broken]}):
    with pytest.raises(sglang_messages.Garbled):
      sglang_messages.checksums_of(answer)


class Client:
  """A server whose tensors the test sets."""

  def __init__(self, info=INFO):
    self.info, self.tensors = info, known(0)
    self.asked = 0

  async def server_info(self):
    if self.info is None:
      raise Refused("http://s/server_info: answered 404", status=404)
    return self.info

  async def checksums(self):
    self.asked += 1
    if isinstance(self.tensors, Exception):
      raise self.tensors
    return self.tensors.checksums


def compared(check, client, tensors, *, since, reference=None):
  client.tensors = tensors
  changed = Changes(since, dict.fromkeys(FILES, True))
  asyncio.run(check.compare(tensors.version, changed, lambda: reference))


def made(client, *, is_ours=True):
  check = TensorCheck("bfloat16")
  asyncio.run(check.prepare(client, name="server 0 at h", is_ours=is_ours))
  return check


def test_a_server_is_compared_with_itself_from_version_to_version():
  client = Client()
  check = made(client)
  compared(check, client, known(0), since=-1)
  compared(check, client, known(1), since=0)
  with pytest.raises(WrongWeights, match="server 0 at h does not have version 2 .* of version 1"):
    compared(check, client, known(2, of=all_of(SERVED[3:4], 1)), since=1)
  assert check.known.version == 1
  with pytest.raises(WrongWeights, match="33 of 33 .* that it was started with"):
    compared(check, client, known(2, of=all_of(SERVED, 0)), since=1)
  compared(check, client, known(2), since=1)


def test_a_server_that_was_found_may_have_the_weights_that_come():
  """Those of a run that is continued, and that ended after it had given them to the server."""
  client = Client()
  client.tensors = known(2)
  check = made(client, is_ours=False)
  compared(check, client, known(1), since=0)
  compared(check, client, known(2), since=1)
  client.tensors = known(2)
  check = made(client)
  compared(check, client, known(1), since=0)
  with pytest.raises(WrongWeights, match="33 of 33 .* that it was started with"):
    compared(check, client, known(2), since=1)


def test_a_server_that_was_replaced_is_compared_with_the_others():
  client = Client()
  check = made(client)
  compared(check, client, known(5), since=4)
  check.forget()
  assert check.known is None
  asyncio.run(check.prepare(client, name="server 0 at h", is_ours=True))
  lost = all_of(SERVED[1:2], 0)
  with pytest.raises(WrongWeights, match="1 of 33 .*with this version on another server"):
    compared(check, client, known(6, of=lost), since=5, reference=known(6))
  stale = all_of(SERVED[1:2], 5)
  with pytest.raises(WrongWeights, match="1 of 33 tensors .* are those of version 5"):
    compared(check, client, known(6, of=stale), since=5, reference=known(5))
  compared(check, client, known(6), since=5, reference=known(5))


@pytest.mark.parametrize(
  ("info", "failure", "asked"),
  [
    (None, None, 0),
    (INFO | {"dtype": "auto"}, None, 0),
    (INFO, Refused("http://s/weights_checker: answered 404", status=404), 1),
    (INFO, sglang_messages.Garbled("ranks"), 1),
  ],
)
def test_a_server_without_checksums_is_not_asked_again_and_says_so_once(
  info, failure, asked, caplog
):
  caplog.set_level("INFO")
  client = Client(info)
  client.tensors = failure or client.tensors
  check = made(client)
  for version in range(3):
    asyncio.run(check.compare(version, None, lambda: None))
  assert client.asked == asked and check.known is None
  (line,) = caplog.messages
  assert line.startswith("the tensors of server 0 at h are not compared after a load: ")


def to_write(name, values):
  return safetensors.ToWrite(name, values.shape, values.dtype, lambda: values)


def test_a_single_changed_byte_is_found_wherever_it_is(tmp_path):
  chance = random.Random(0)
  old = {f"t{i}": np.zeros(chance.choice((1, 4095, 4096, 70_000)), np.uint8) for i in range(40)}
  old = {name: values.view(np.uint8).astype(np.float32) for name, values in old.items()}
  safetensors.write_folder(
    tmp_path, [to_write(*each) for each in old.items()], max_shard_bytes=1 << 20
  )
  new = {name: values.copy() for name, values in old.items()}
  changed = set(chance.sample(sorted(old), 20))
  for name in changed:
    new[name].view(np.uint8)[chance.randrange(new[name].nbytes)] ^= 1 << chance.randrange(8)
  comparison = Comparison(tmp_path, 4)
  same = min(old.keys() - changed)
  for name, values in new.items():
    tensor = comparison.on(to_write(name, values), is_same=name == same)
    assert tensor.values() is values
  comparison.on(to_write("new", np.zeros(3)))
  found = comparison.changes()
  assert found == Changes(4, {**{name: name in changed for name in new}, "new": None})


def test_each_process_compares_what_it_writes_and_all_know_the_rest(tmp_path):
  values = {name: np.full(9, number, np.float32) for number, name in enumerate("abcd")}
  safetensors.write_folder(tmp_path, [to_write(*each) for each in values.items()])

  def write(index):
    comparison = Comparison(tmp_path, 4)
    changed = {name: each + (name == "c") for name, each in values.items()}
    tensors = [comparison.on(to_write(*each)) for each in changed.items()]
    for tensor in tensors[index:3:2]:  # nobody writes d.
      tensor.values()
    return comparison.changes()

  wanted = Changes(4, {"a": False, "b": False, "c": True, "d": None})
  assert side_by_side.Room(2).run(write) == [wanted, wanted]


def test_experts_are_parts_of_the_tensors_of_their_layer():
  names = [
    f"layers.0.mlp.experts.{i}.{part}_proj.weight" for i in (0, 11) for part in ("up", "down")
  ]
  served = ["layers.0.mlp.experts.w13_weight", "layers.0.mlp.experts.w2_weight", "norm.weight"]
  of = lambda version, kept=(): Known(
    version, {name: {0: f"{name}.{6 if name in kept else version}"} for name in served}
  )
  changed = Changes(6, dict.fromkeys([*names, "norm.weight"], True))
  assert checksums.fault(of(6), of(7), changes=changed) is None
  found = checksums.fault(of(6), of(7, kept=served[1:2]), changes=changed)
  assert found is not None and "1 of 3 tensors (layers.0.mlp.experts.w2_weight)" in found
