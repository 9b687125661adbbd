"""The names of metrics as MLflow takes them; the package mlflow is not needed."""

from grpo_trackers import mlflow


def test_names_are_as_mlflow_takes_them():
  names = {"eval/heldout/pass@1": "eval/heldout/pass_at_1", "env/a+b/reward": "env/a_b/reward"}
  assert {name: mlflow.metric_name(name) for name in names} == names
