"""What JAX does on this machine. It runs in a process of its own, because it may hang or crash.

It prints one JSON object a line, as soon as each is known, so that what is known is not lost.
"""

import json
import time
from typing import Any

CODE = "from grpo_jax.commands import jax_probe; jax_probe.main()"


def main() -> None:
  """Asks JAX for its devices, computes on them, imports the trainer, and asks for the hub."""
  try:
    devices_and_product()
    trainer()
  except BaseException as error:  # whatever it is, the parent reports it.
    say(error=f"{type(error).__name__}: {error}")
    raise SystemExit(1) from error


def devices_and_product() -> None:
  """Prints the devices, and how long their first product takes, compilation included."""
  import jax
  import jax.numpy as jnp

  from grpo_jax.compilation import accelerators

  devices = jax.devices()
  limits = [(device.memory_stats() or {}).get("bytes_limit") for device in devices]
  say(platform=devices[0].platform, used=accelerators.used(devices), bytes_limits=limits)
  began = time.monotonic()
  for device in devices:
    ones = jax.device_put(jnp.ones((128, 128)), device)
    total = float((ones @ ones).sum())
    if total != 128.0**3:
      raise ArithmeticError(f"{device} computes {total} where 2097152.0 is right")
  say(product_s=time.monotonic() - began)


def trainer() -> None:
  """Imports all that a run imports, and prints why the hub does not answer."""
  import grpo_jax.train  # as an attribute it would refuse wrong packages, which `packages` reports.
  from grpo_jax.files import hub

  say(trainer=grpo_jax.train.__name__)
  say(hub=hub.unreachable())


def say(**facts: Any) -> None:
  """Prints facts as a line."""
  print(json.dumps(facts), flush=True)
