"""Recorded responses are not scored by agents, which would have to sample."""

import pytest
from scripted_engine import TOKENIZER

import configs.base
from grpo_jax.building import offline
from grpo_jax.config.configuration import ConfigError, typed
from grpo_jax.rollouts.rollout import AttemptLimits
from tests.conversing import Measuring


def test_an_agent_cannot_score_recorded_responses():
  config = configs.base.get_config()
  config.mode = "offline"
  config.offline.rewards = "environment"
  with pytest.raises(ConfigError, match="the environment 'agent' drives its own conversation"):
    offline.make_rescore(typed(config), {"agent": Measuring}, TOKENIZER, AttemptLimits())
