"""Records of experts ↔ one array, for groups that are written as bytes; see `types.ExpertShape`.

Pure.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

# The forms of records in files and messages, by the bytes of an entry.
FORMS = {1: "|i1", 2: "<i2"}

Record = Int[np.ndarray, "_ L k"] | None  # any number of tokens.


def joined(records: Sequence[Record]) -> tuple[np.ndarray, dict[str, Any]]:
  """Returns the entries of all records one after another, and what `split` needs besides.

  Raises:
    ValueError: Records are of models of different sizes.
  """
  present = [each for each in records if each is not None]
  sizes = {(each.dtype.itemsize, *each.shape[1:]) for each in present}
  if len(sizes) > 1:
    raise ValueError(f"experts of several models: (bytes, layers, chosen) are {sorted(sizes)}")
  bytes_each, *shape = next(iter(sizes), (1, 0, 0))
  form = FORMS[bytes_each]
  entries = np.concatenate([np.zeros(0, form), *(each.reshape(-1) for each in present)])
  tokens = [None if each is None else len(each) for each in records]
  return entries.astype(form, copy=False), {"shape": shape, "tokens": tokens}


def split(entries: np.ndarray, described: dict[str, Any]) -> list[Record]:
  """Returns the records that `joined` was given, in memory of their own.

  Raises:
    ValueError: There are more or fewer entries than described.
  """
  layers, chosen = described["shape"]
  size, at, found = layers * chosen, 0, []
  for tokens in described["tokens"]:
    if tokens is None:
      found.append(None)
      continue
    part = entries[at : at + tokens * size]
    found.append(part.reshape(tokens, layers, chosen).copy())
    at += tokens * size
  if at != len(entries):
    raise ValueError(f"{len(entries)} experts came, {at} are described")
  return found
