"""The experts that an SGLang server returns: what is asked for, read, and refused."""

import base64

import numpy as np
import pytest

from grpo_jax.engines import launching, routed_experts, sglang_messages
from grpo_jax.engines.routed_experts import WrongExperts
from grpo_jax.types import ExpertShape
from tests.engines import tiny
from tests.engines.test_messages import ANSWER, answer

SHAPE = ExpertShape(layers=2, chosen=3, experts=8)
# Of 2 tokens of the prompt and 3 that were sampled, the last of which has none.
EXPERTS = np.arange(4 * 2 * 3, dtype="<i4").reshape(4, 2, 3) % 8


def encoded(array: np.ndarray) -> str:
  return base64.b64encode(array.tobytes()).decode()


def read(reply, shape=SHAPE):
  request = tiny.request("x", [1, 2], max_tokens=3)
  return sglang_messages.generation(reply, request, vocab_size=61, version=9, experts=shape)


@pytest.mark.parametrize(("experts", "dtype"), [(8, np.int8), (512, np.int16)])
def test_experts_are_those_of_the_tokens_that_were_fed(experts, dtype):
  shape = ExpertShape(2, 3, experts)
  generation = read(answer(routed_experts=encoded(EXPERTS)), shape)
  assert generation.prompt_experts is not None and generation.experts is not None
  assert generation.prompt_experts.dtype == generation.experts.dtype == dtype
  np.testing.assert_array_equal(generation.prompt_experts, EXPERTS[:2])
  np.testing.assert_array_equal(generation.experts[:2], EXPERTS[2:])
  assert (generation.experts[2] == -1).all() and len(generation.experts) == 3


def test_they_are_asked_for_and_read_only_if_the_run_replays_them():
  request = tiny.request("x", [1, 2], max_tokens=3)
  asked = sglang_messages.generate_body(request, "n", seeded=False, has_experts=True)
  plain = sglang_messages.generate_body(request, "n", seeded=False)
  assert asked == {**plain, "return_routed_experts": True}
  assert read(answer(routed_experts="nothing that is read"), None).experts is None
  room = sglang_messages.answer_bytes(request, SHAPE) - sglang_messages.answer_bytes(request)
  assert room >= len(encoded(EXPERTS))


BAD = {
  "missing": (None, "no routed_experts came .*--enable-return-routed-experts"),
  "a list": ([1, 2], "no routed_experts came"),
  "no base64": ("%%%", "not base64"),
  "no ASCII": ("é" * 8, "not base64"),
  "a token too few": (encoded(EXPERTS[:-1]), "has 72 bytes.* = .4, 2, 3. takes 96"),
  "a token too many": (encoded(np.concatenate([EXPERTS, EXPERTS[:1]])), "has 120 bytes"),
  "other numbers": (encoded(EXPERTS.astype("<i8")), "has 192 bytes"),
  "an expert too many": (encoded(EXPERTS + 1), "names expert 8, .* experts 0 to 7"),
  "less than none": (encoded(EXPERTS - 1), "names expert -1"),
  "empty": ("", "has 0 bytes"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_not_the_experts_of_the_request_is_refused(what):
  value, message = BAD[what]
  reply = ANSWER if value is None else answer(routed_experts=value)
  with pytest.raises(WrongExperts, match=message):
    read(reply)


@pytest.mark.parametrize("info", [{}, [], {"enable_return_routed_experts": False}, None])
def test_a_server_without_the_argument_is_refused_before_it_samples(info):
  why = routed_experts.refusal(info)
  assert why is not None and "--enable-return-routed-experts" in why
  assert "loss.router_replay=False" in why
  assert routed_experts.refusal({"enable_return_routed_experts": True}) is None


def test_the_argument_is_that_of_the_run():
  refused = launching.refusals(
    addresses=(), arguments=(routed_experts.ARGUMENT,), command=None, environment={}
  )
  assert any("loss.router_replay" in line for line in refused)
