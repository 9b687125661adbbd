"""The first function of a sandboxed process: confines itself, then takes its role.

    python -c "…; inside.main()" ROLE SETTINGS

SETTINGS is JSON: {"limits": arguments of confine.limit, "shut": arguments of confine.shut,
or null under bubblewrap, "max_bytes": longest message between program and judge}.
"""

import json
import sys


def main() -> None:
  """Runs the role that the arguments name: program, functions or judge."""
  role, settings = sys.argv[1], json.loads(sys.argv[2])
  # All is imported before the walls close: afterwards the package is out of reach.
  from grpo_jax.sandbox import confine

  if role == "judge":
    from grpo_jax.sandbox import judge

    run = lambda: judge.serve(settings["max_bytes"])
  else:
    from grpo_jax.sandbox import candidate

    serve = lambda: candidate.serve_functions(settings["max_bytes"])
    run = candidate.run_program if role == "program" else serve
  del sys.argv[1:], sys.orig_argv[1:], sys.path[0]
  confine.limit(**settings["limits"])
  if settings["shut"]:
    shut = settings["shut"]
    confine.shut(**{**shut, "seccomp": bytes.fromhex(shut["seccomp"])})
  run()
