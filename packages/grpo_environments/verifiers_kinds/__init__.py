"""The two kinds of environments of the package verifiers; see `grpo_environments/verifiers.py`."""
