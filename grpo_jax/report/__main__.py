"""`python -m grpo_jax.report RUN_FOLDER`."""

import sys

from grpo_jax import report

if __name__ == "__main__":
  sys.exit(report.main(sys.argv[1:]))
