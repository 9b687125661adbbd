"""The two forms of the sampler's cache, behind the same functions. Pure.

`ProgramOptions.form` names the form, and `on_platform` chooses it, once. All else that differs
between CPUs and accelerators follows from it:

* `ring_cache`, "ring", for CPUs: loops over short blocks and pages, and conditionals, which are
  cheap where the host computes.
* `row_cache`, "rows", for accelerators: no loop and no conditional that the host would have to be
  asked about within a decode step, and layouts for matrix products.

Each has the same functions: `empty` makes the cache of sampled tokens, `grown` enlarges a layer,
`moved` moves its rows, `attend` is attention in a decode step, and `write_again` and `over_past`
serve completions that new weights read again. `sharing` has the host's side.
"""

from typing import Any

from grpo_jax.engines import ring_cache, row_cache
from grpo_jax.engines.sampler_inputs import ProgramOptions

_FORMS: dict[str, Any] = {"ring": ring_cache, "rows": row_cache}


def on_platform(platform: str) -> str:
  """Returns the name of the form for a platform, such as "cpu" or "gpu"."""
  return "ring" if platform == "cpu" else "rows"


def of(options: ProgramOptions) -> Any:
  """Returns the module of the form."""
  return _FORMS[options.form]
