"""Trackers of experiments besides wandb: MLflow, Trackio and SwanLab, as sinks of a run.

`logging.sinks=("mlflow",)` finds them by `grpo_jax.registry.SATELLITES`; docs/trackers.md.
"""
