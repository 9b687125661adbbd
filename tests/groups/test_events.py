"""What happened to an attempt: fields of a rollout, names among the metrics of files."""

import dataclasses
import math

import numpy as np
import pytest

from grpo_jax.groups import group_json
from grpo_jax.metrics import attempt_events, scored_groups
from grpo_jax.run_folder import rollout_log
from grpo_jax.types import FinishReason, Prompt, Rollout, RolloutGroup

PLAIN = Rollout(
  completion_ids=np.asarray([3], np.int32),
  loss_mask=np.ones(1, bool),
  behavior_logprobs=np.zeros(1, np.float32),
  weight_versions=np.zeros(1, np.int32),
  finish_reason=FinishReason.STOP,
  reward=1.0,
  metrics={"accuracy": 1.0},
)
FIELDS = ("failure", "close_failure", "hit_turn_limit")
EVENTS = [
  ({}, {}),
  ({"failure": "timeout"}, {"error/timeout": 1.0}),
  ({"failure": "close_call", "close_failure": "died"}, None),  # told apart by the fields alone.
  ({"hit_turn_limit": True}, {"turn_limit": 1.0}),
  (
    {"hit_turn_limit": True, "close_failure": "timeout"},
    {"turn_limit": 1.0, "error/close_timeout": 1.0},
  ),
]


def group(rollout) -> RolloutGroup:
  return RolloutGroup(Prompt("p", np.ones(2, np.int32), "env"), (rollout,))


@pytest.mark.parametrize(("fields", "names"), EVENTS)
def test_files_name_events_as_they_always_have(fields, names):
  rollout = dataclasses.replace(PLAIN, **fields)
  if names is not None:
    records = rollout_log.rollout_records(0, [group(rollout)], [np.zeros(1)], None, None)
    assert records[0]["metrics"] == {"accuracy": 1.0, **names}
  (back,) = group_json.decode(group_json.encode(group(rollout))).rollouts
  assert [getattr(back, name) for name in FIELDS] == [getattr(rollout, name) for name in FIELDS]
  assert back.metrics == {"accuracy": 1.0}


@pytest.mark.parametrize(("fields", "names"), [event for event in EVENTS if event[1] is not None])
def test_older_checkpoints_have_events_among_the_metrics(fields, names):
  record = group_json.encode(group(PLAIN))
  for name in FIELDS:
    del record["rollouts"][0][name]
  record["rollouts"][0]["metrics"].update(names)
  (back,) = group_json.decode(record).rollouts
  assert back == dataclasses.replace(
    PLAIN,
    **fields,
    completion_ids=back.completion_ids,
    loss_mask=back.loss_mask,
    behavior_logprobs=back.behavior_logprobs,
    weight_versions=back.weight_versions,
  )


def test_a_metric_of_an_environment_is_never_an_event():
  own = {"turn_limit": 0.0, "error/mine": 3.0}
  rollout = dataclasses.replace(PLAIN, metrics=own)
  found = scored_groups.rollout_metrics([group(rollout)])
  assert found["env/env/turn_limit"] == 0.0 and found["env/env/error/mine"] == 3.0
  assert attempt_events.error_kinds([group(rollout)]) == {}
  assert "rollout/turn_limit_share" not in found
  (back,) = group_json.decode(group_json.encode(group(rollout))).rollouts
  assert back.metrics == own and not back.hit_turn_limit and back.failure == ""


def test_failures_are_counted_by_kind():
  failed = dataclasses.replace(PLAIN, reward=math.nan, failure="timeout", close_failure="died")
  limited = dataclasses.replace(PLAIN, hit_turn_limit=True)
  both = RolloutGroup(group(PLAIN).prompt, (failed, failed, limited))
  assert attempt_events.error_kinds([both]) == {"close_died": 2, "timeout": 2}
  assert scored_groups.rollout_metrics([both])["rollout/turn_limit_share"] == pytest.approx(1 / 3)
