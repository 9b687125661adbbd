"""Which tensors of a server a load has changed, by the checksums that the server reports. Pure.

A server fuses, splits and reorders tensors, so a checksum does not say whether a tensor is right.
It says whether it is another one than before: a tensor that the update has changed and that is the
same on all devices of a server has not arrived. Unlike a proof by logprobs (`sync_proof`), this
finds a single tensor of any size, in every dtype, and names it; unlike it, it cannot see that two
tensors were exchanged, unless another server has the same version.
"""

import dataclasses
import re
from collections.abc import Collection, Mapping

# Checksum of each tensor of a server: by its name there, and by the number of the device.
Checksums = Mapping[str, Mapping[int, str]]

_SHOWN = 3  # names in a message.
_SEVERAL = 8  # tensors that do not all go back to earlier values by chance.
# Tensors whose changes are not all on the other devices by chance: each may be of one element only.
_MANY = 32
# Part of a name in the files → that part of the name of the tensor of SGLang that it belongs to.
_FUSED = {
  **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
  **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
}
# The tensors of experts: SGLang has gate and up, and down, of all experts of a layer in one each.
_EXPERT = re.compile(r"\.experts\.\d+\.(gate|up|down)_proj\.weight$")
_DTYPES = {"half": "float16", "float": "float32"}  # other names that SGLang takes.
_AGAIN = "see what it logged about the load, and start it again"


@dataclasses.dataclass(frozen=True)
class Changes:
  """How the tensors of a version differ from those of the version before.

  Attributes:
    since: The version before.
    is_changed: Whether the bytes of a tensor differ, by its name in the files; None: not known.
  """

  since: int
  is_changed: Mapping[str, bool | None]


@dataclasses.dataclass(frozen=True)
class Known:
  """Checksums of a server when it had a version of the weights."""

  version: int
  checksums: Checksums


def refusal(info: object, dtype: str) -> str | None:
  """Returns why the checksums of a server say nothing; None if they do.

  Rounding may undo the change of a tensor.

  Args:
    info: Answer to GET /server_info.
    dtype: Dtype of the files that the server loads.
  """
  if not isinstance(info, dict):
    return "it does not describe itself"
  if info.get("quantization"):
    return f"it quantises its weights (--quantization {info['quantization']!s:.50})"
  served = info.get("dtype")
  if _DTYPES.get(str(served), served) != dtype:
    return f"its --dtype is {served!s:.50}, and the files of weights are in {dtype}"
  return None


def fault(
  before: Known,
  after: Known,
  *,
  changes: Changes | None,
  started_with: Checksums | None = None,
) -> str | None:
  """Returns what is wrong with the weights that a server was given, and what to do.

  Args:
    before: Checksums that this server, or another one with the same options, had before.
    after: Checksums that the server has now.
    changes: Tensors in which the version differs from the one before; None: not known.
    started_with: Checksums of what the server was started with; None: not known.

  Returns:
    One line; None if nothing is known to be wrong.
  """
  is_same = {
    name: after.checksums[name] == before.checksums[name]
    for name in sorted(after.checksums.keys() & before.checksums.keys())
  }
  if before.version == after.version:
    others = [name for name, same in is_same.items() if not same]
    what = "are not what they are with this version on another server, or were here"
    return _named(others, is_same, f"{what}. To do: {_AGAIN}")
  if changes is None or before.version != changes.since:
    return None
  of_server: dict[str, list[bool | None]] = {}
  for name, changed in changes.is_changed.items():
    of_server.setdefault(_at_server(name), []).append(changed)
  changed = [name for name in is_same if any(of_server.get(name, ()))]
  kept = [name for name in is_same if set(of_server.get(name, ())) == {False}]
  return (
    _stale(changed, is_same, changes.since)
    or _fallen_back(changed, after.checksums, started_with)
    or _stale_device(changed, before.checksums, after.checksums)
    or _named(
      [name for name in kept if not is_same[name]],
      kept,
      f"that the update left as they were have changed. To do: {_AGAIN}",
    )
  )


def _stale(changed: list[str], is_same: Mapping[str, bool], since: int) -> str | None:
  stale = [name for name in changed if is_same[name]]
  if stale == changed:
    do = f"the load was answered but had no effect: {_AGAIN}"
  else:
    do = f"tensors were lost on the way: see which names it logged as skipped, and {_AGAIN}"
  return _named(
    stale, changed, f"that the update changed are those of version {since}. To do: {do}"
  )


def _fallen_back(
  changed: list[str], after: Checksums, started_with: Checksums | None
) -> str | None:
  if started_with is None or len(changed) < _SEVERAL:
    return None
  if any(after[name] != started_with.get(name) for name in changed):
    return None
  return _named(
    changed,
    changed,
    "that the update changed are those that it was started with. To do: it fell back to them, as"
    " after its memory was freed: set engine.sglang.release_memory=False, see what it logged, and"
    " start it again",
  )


def _stale_device(changed: list[str], before: Checksums, after: Checksums) -> str | None:
  """Returns what is wrong if one of several devices has kept its parts of all tensors.

  An update may change few elements of a tensor, and none on some devices. Then parts on other
  devices are the same, too, and nothing is concluded.
  """
  kept: dict[int, list[bool]] = {}
  for name in changed:
    for device, checksum in after[name].items():
      kept.setdefault(device, []).append(checksum == before[name].get(device))
  stale = [device for device, parts in kept.items() if all(parts)]
  if not stale or any(any(kept[device]) for device in kept.keys() - {*stale}):
    return None
  if min(len(parts) for parts in kept.values()) < _MANY:
    return None
  return (
    f"its device {stale[0]} has kept its parts of all {len(kept[stale[0]])} tensors that the update"
    f" changed. To do: {_AGAIN}"
  )


def _named(found: list[str], of: Collection[str], what: str) -> str | None:
  if not found:
    return None
  listed = ", ".join(found[:_SHOWN]) + (" and others" if len(found) > _SHOWN else "")
  return f"{len(found)} of {len(of)} tensors ({listed}) {what}"


def _at_server(name: str) -> str:
  """Returns the name of the tensor of a server that a tensor of the files belongs to."""
  if expert := _EXPERT.search(name):
    return f"{name[: expert.start()]}.experts.{'w2' if expert[1] == 'down' else 'w13'}_weight"
  return ".".join(_FUSED.get(part, part) for part in name.split("."))
