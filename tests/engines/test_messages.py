"""Bodies say what was asked for, bit for bit; of answers only whole and possible ones are taken."""

import copy
import json

import numpy as np
import pytest

from grpo_jax.engines import sglang_messages as messages
from grpo_jax.types import FinishReason
from tests.engines import tiny

# As SGLang 0.5.23 answered; fields that are not read are left out but for a few.
ANSWER = {
  "text": "hZq",
  "output_ids": [7, 51, 16],
  "meta_info": {
    "id": "n1",
    "finish_reason": {"type": "length", "length": 3},
    "prompt_tokens": 2,
    "weight_version": "4",
    "weight_versions": [{"version": "4", "start": 0, "end": 3}],
    "completion_tokens": 3,
    "cached_tokens": 0,
    "e2e_latency": 0.05,
    "output_token_logprobs": [[-1.25, 7, None], [-0.5, 51, None], [1e-8, 16, None]],
  },
}


def answer(**meta):
  changed = copy.deepcopy(ANSWER)
  changed["meta_info"].update(meta)
  return changed


def read(reply, *, max_tokens=3, version=9, **sampling):
  request = tiny.request("x", [1, 2], max_tokens=max_tokens, **sampling)
  return messages.generation(reply, request, vocab_size=61, version=version)


def test_answer_gives_ids_logprobs_versions_and_reason():
  generation = read(ANSWER)
  assert generation.request_id == "x"
  assert generation.token_ids.tolist() == [7, 51, 16]
  assert generation.logprobs.tolist() == [-1.25, -0.5, 0.0]  # no probability is above 1.
  assert generation.logprobs.dtype == np.float32
  assert generation.weight_versions.tolist() == [4, 4, 4]
  assert generation.finish_reason is FinishReason.LENGTH and generation.matched_stop is None


@pytest.mark.parametrize("matched", [16, "Zq"])
def test_stop_says_what_ended_it(matched):
  generation = read(answer(finish_reason={"type": "stop", "matched": matched}))
  assert generation.finish_reason is FinishReason.STOP and generation.matched_stop == matched


def test_each_token_has_the_version_of_the_span_that_it_is_in():
  spans = [
    {"version": "4", "start": 0, "end": 1},
    {"version": "5", "start": 1, "end": 2},
    {"version": "7", "start": 2, "end": 3},
  ]
  generation = read(answer(weight_version="7", weight_versions=spans))
  assert generation.weight_versions.tolist() == [4, 5, 7]


def test_a_server_that_names_one_version_or_none():
  one, none = copy.deepcopy(ANSWER), copy.deepcopy(ANSWER)
  del one["meta_info"]["weight_versions"]
  del none["meta_info"]["weight_versions"], none["meta_info"]["weight_version"]
  assert read(one).weight_versions.tolist() == [4, 4, 4]
  assert read(none).weight_versions.tolist() == [9, 9, 9]  # sglang-jax: what it was given.


def test_logprobs_that_sglang_jax_repeats_are_dropped():
  """64 tokens came with 114 entries: the first 50 twice."""
  ids = np.random.default_rng(0).integers(0, 61, 64).tolist()
  entries = [[-0.01 * i, token, None] for i, token in enumerate(ids)]
  reply = answer(completion_tokens=64, output_token_logprobs=[*entries[:50], *entries])
  del reply["meta_info"]["weight_versions"], reply["meta_info"]["weight_version"]
  generation = read(reply, max_tokens=64)
  assert generation.token_ids.tolist() == ids
  np.testing.assert_allclose(generation.logprobs, [-0.01 * i for i in range(64)], atol=1e-7)


def without(name):
  changed = copy.deepcopy(ANSWER)
  del changed["meta_info"][name]
  return changed


THREE = ANSWER["meta_info"]["output_token_logprobs"]


@pytest.mark.parametrize(
  ("reply", "message"),
  [
    (None, "'meta_info'"),
    ("ok", "'meta_info'"),
    ([], "'meta_info'"),
    ([ANSWER], "'meta_info'"),
    ({"error": {"message": "busy"}}, "'meta_info'"),
    ({**ANSWER, "meta_info": [1]}, "'meta_info'"),
    (without("finish_reason"), "'finish_reason'"),
    (answer(finish_reason=None), "'finish_reason'"),
    (answer(finish_reason={"type": "tired"}), "'tired'"),
    (without("completion_tokens"), "'completion_tokens'"),
    (answer(completion_tokens="3"), "'completion_tokens'"),
    (without("output_token_logprobs"), "'output_token_logprobs'"),
    (answer(completion_tokens=True), "'completion_tokens'"),
    (answer(completion_tokens=3.0), "'completion_tokens'"),
    (answer(completion_tokens=10**30), "sampled, logprobs came for 3"),
    (answer(output_token_logprobs=[*THREE[:2], [-1.0, True, None]]), "logprob, id"),
    (answer(output_token_logprobs=[*THREE[:2], [False, 5, None]]), "logprob, id"),
    (answer(output_token_logprobs=[*THREE[:2], ["-1.0", 5, None]]), "logprob, id"),
    (answer(output_token_logprobs=[*THREE[:2], [-(10**400), 5, None]]), "logprob, id"),
    (answer(output_token_logprobs=[*THREE[:2], [-1e300, 5, None]]), "finite and at most 0"),
    (answer(weight_versions=5), "weight_versions"),
    (answer(weight_versions=[{"version": True, "start": 0, "end": 3}]), "weight_versions"),
    (answer(weight_versions=[{"version": "4", "start": -3, "end": 3}]), "weight_versions"),
    (answer(weight_versions=[{"version": "4", "start": 0, "end": True}]), "weight_versions"),
    (answer(output_token_logprobs=THREE[:2]), "3 tokens were sampled, logprobs came for 2"),
    (answer(completion_tokens=0), "0 tokens came"),
    (answer(completion_tokens=-1), "0 tokens came"),
    (answer(output_token_logprobs=[*THREE[:2], 5]), "logprob, id"),
    (answer(output_token_logprobs=[*THREE[:2], []]), "logprob, id"),
    (answer(output_token_logprobs=[*THREE[:2], [None, 5, None]]), "logprob, id"),
    (answer(output_token_logprobs=[*THREE[:2], ["much", 5, None]]), "logprob, id"),
    (answer(output_token_logprobs=[*THREE[:2], [-1.0, 5.5, None]]), "logprob, id"),
    (answer(output_token_logprobs=[*THREE[:2], [-1.0, "5", None]]), "logprob, id"),
    (answer(output_token_logprobs=[*THREE[:2], [-1.0, 2**40, None]]), "logprob, id"),
    (answer(output_token_logprobs=[*THREE[:2], [-1.0, 61, None]]), "outside the vocabulary of 61"),
    (answer(output_token_logprobs=[*THREE[:2], [-1.0, -1, None]]), "outside the vocabulary of 61"),
    (answer(output_token_logprobs=[*THREE[:2], [0.5, 5, None]]), "finite and at most 0"),
    (answer(output_token_logprobs=[*THREE[:2], [float("nan"), 5, None]]), "finite and at most 0"),
    (answer(output_token_logprobs=[*THREE[:2], [-float("inf"), 5, None]]), "finite and at most 0"),
    (answer(weight_versions="4"), "weight_versions"),
    (answer(weight_versions=[{"version": "4"}]), "weight_versions"),
    (answer(weight_versions=[{"version": "default", "start": 0, "end": 3}]), "weight_versions"),
    (answer(weight_versions=[{"version": 2**40, "start": 0, "end": 3}]), "weight_versions"),
    (answer(weight_versions=[{"version": "4", "start": 0, "end": float("inf")}]), "weight_ver"),
    (answer(weight_versions=[{"version": "4", "start": 0, "end": 2}]), "do not cover the 3 tokens"),
    (answer(weight_versions=[{"version": "4", "start": 1, "end": 3}]), "do not cover the 3 tokens"),
    (answer(weight_versions=[]), "do not cover the 3 tokens"),
  ],
)
def test_garbage_is_refused_and_says_in_what(reply, message):
  with pytest.raises(messages.Garbled, match=message):
    read(reply)


def places(value, path=()):
  """Yields the path of everything in decoded JSON."""
  yield path
  if isinstance(value, list):
    value = dict(enumerate(value))
  for key, inner in value.items() if isinstance(value, dict) else ():
    yield from places(inner, (*path, key))


def changed(path, value):
  """Returns ANSWER with another value at a place."""
  if not path:
    return value
  whole = copy.deepcopy(ANSWER)
  inner = whole
  for key in path[:-1]:
    inner = inner[key]
  inner[path[-1]] = value
  return whole


# Values of JSON that are nowhere right, and some that are right somewhere.
VALUES = [
  *(None, True, False, 0, -1, 3, 2**31, 2**63, 10**400, -(10**400), 0.5, 1e308, -1e308),
  *(float("nan"), float("inf"), "", "4", "abort", "\ud800", [], [[]], [None] * 3, {}, {"a": {}}),
  json.loads("[" * 300 + "]" * 300),
]


@pytest.mark.parametrize("path", list(places(ANSWER)), ids=lambda path: ".".join(map(str, path)))
def test_garbage_of_any_kind_is_taken_or_is_garbled(path):
  for value in VALUES:
    reply = changed(path, value)
    try:
      generation = read(reply)
    except (messages.Garbled, messages.Aborted) as error:
      assert len(str(error)) < 1000
    else:
      assert generation.token_ids.shape == generation.logprobs.shape == (3,)
      assert isinstance(generation.matched_stop, str | None)
    probe = copy.deepcopy(reply)
    if isinstance(probe, dict) and isinstance(probe.get("meta_info"), dict):
      meta = probe["meta_info"]
      meta["input_token_logprobs"] = meta.get("output_token_logprobs")
    try:
      assert messages.prompt_logprobs(probe, [7, 51, 16]).shape == (2,)
      messages.prompt_version(probe)
    except messages.Garbled as error:
      assert len(str(error)) < 1000


@pytest.mark.parametrize("tokens", [1, 100, 2000])
def test_an_honest_answer_is_within_its_bound(tokens):
  """As long as one can be: the longest text of a token, and logprobs that sglang-jax repeats."""
  request = tiny.request("x", [1, 2], max_tokens=tokens)
  longest = [-12.345678901234567, 151_935, None]
  each = answer(output_token_logprobs=[longest] * tokens * 2, completion_tokens=tokens)
  each |= {"text": "\n" * 128 * tokens, "output_ids": [151_935] * tokens}
  size = len(json.dumps(each).encode())
  assert size < messages.answer_bytes(request) < 20 * size + 1_000_000


def test_more_tokens_than_asked_for_are_refused():
  with pytest.raises(messages.Garbled, match="3 tokens came, 1 to 2 were requested"):
    read(ANSWER, max_tokens=2)


def test_an_aborted_request_is_not_a_completion():
  with pytest.raises(messages.Aborted, match="because"):
    read(answer(finish_reason={"type": "abort", "message": "because"}))


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, 2**63, 2**63 + 5, 2**64 - 1])
def test_seed_reaches_the_server_bit_for_bit(seed):
  body = messages.generate_body(tiny.request("x", [1], seed=seed), "n", seeded=True)
  sent = json.loads(json.dumps(body))["sampling_params"]["sampling_seed"]
  assert -(2**63) <= sent < 2**63
  assert sent % 2**64 == seed


def test_body_says_how_to_sample():
  request = tiny.request(
    "x", [1, 2], max_tokens=5, temperature=0.5, top_k=3, top_p=0.9, stop_ids=(4, 5),
    stop_strings=("ab",),
  )  # fmt: skip
  body = json.loads(json.dumps(messages.generate_body(request, "n1", seeded=False)))
  assert body["input_ids"] == [1, 2] and body["rid"] == "n1" and body["return_logprob"] is True
  params = body["sampling_params"]
  assert "sampling_seed" not in params
  wanted = {"max_new_tokens": 5, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.0}
  assert wanted.items() <= params.items()
  assert params["stop_token_ids"] == [4, 5] and params["ignore_eos"] is False
  assert params["stop"] == ["ab"]


def test_body_without_filters_and_stops_turns_them_off():
  params = messages.generate_body(tiny.request("x", [1]), "n", seeded=True)["sampling_params"]
  assert (params["top_k"], params["top_p"], params["min_p"]) == (-1, 1.0, 0.0)
  assert params["ignore_eos"] is True and "stop" not in params


TRUNCATED = {"logprobs": "truncated", "top_k": 3}


def test_body_asks_for_truncated_logprobs_where_a_request_wants_them():
  plain, truncated = tiny.request("a", [1], top_k=3), tiny.request("b", [1], **TRUNCATED)
  unfiltered = tiny.request("c", [1], logprobs="truncated")
  body = lambda request: messages.generate_body(request, "n", seeded=True)
  assert not any("return_sampling_mask" in body(each) for each in (plain, unfiltered))
  assert body(truncated)["return_sampling_mask"] is True
  large, small = (messages.answer_bytes(each) for each in (truncated, plain))
  assert large > small


def test_truncated_logprobs_are_read_where_they_were_asked_for():
  reply = answer(output_token_sampling_logprobs=[-0.25, -0.125, 0.0])
  assert read(reply, **TRUNCATED).logprobs.tolist() == [-0.25, -0.125, 0.0]
  assert read(reply).logprobs.tolist() == [-1.25, -0.5, 0.0]


@pytest.mark.parametrize(
  ("values", "message"),
  [
    (None, "output_token_sampling_logprobs"),
    ([-0.25], "3 tokens were sampled, 1 truncated logprobs came"),
    ([-0.25, None, -0.5], "is not a number"),
    ([-0.25, float("-inf"), -0.5], "must be finite"),
  ],
)
def test_truncated_logprobs_that_are_missing_or_wrong_are_refused(values, message):
  meta = {} if values is None else {"output_token_sampling_logprobs": values}
  with pytest.raises(messages.Garbled, match=message):
    read(answer(**meta), **TRUNCATED)


def prompt_answer(*entries):
  return {"meta_info": {"input_token_logprobs": list(entries)}}


def test_logprobs_of_a_prompt_are_those_of_all_ids_but_the_first():
  reply = prompt_answer([None, 5, None], [-1.5, 6, None], [-2.5, 7, None])
  assert messages.prompt_logprobs(reply, [5, 6, 7]).tolist() == [-1.5, -2.5]


def test_logprobs_are_asked_for_from_a_token_on():
  assert messages.prompt_body([5, 6, 7, 8], "x", first=2)["logprob_start_len"] == 1
  reply = prompt_answer([None, 6, None], [-1.5, 7, None], [-2.5, 0, None])
  assert messages.prompt_logprobs(reply, [5, 6, 7, 8], 2).tolist() == [-1.5, -2.5]
  with pytest.raises(messages.Garbled, match=r"requested for \[5, 6, 7, 8\], came for"):
    messages.prompt_logprobs(reply, [5, 6, 7, 8], 1)


@pytest.mark.parametrize(
  ("reply", "message"),
  [
    ({}, "meta_info"),
    (prompt_answer(), "came for"),
    (prompt_answer([None, 5, None], [-1.5, 7, None]), r"requested for \[5, 6\], came for \[5, 7\]"),
    (prompt_answer([None, 5, None]), "came for"),
    (prompt_answer([None, 5, None], [None, 6, None]), "logprob, id"),
    (prompt_answer([None, 5, None], [-1.5, float("inf"), None]), "logprob, id"),
    (prompt_answer([None, 5, None], 6), "logprob, id"),
    *(
      (prompt_answer([None, 5, None], [value, 6, None]), "must be finite and at most 0")
      for value in (float("inf"), -float("inf"), float("nan"), 1e300, -1e300, 0.5)
    ),
    (prompt_answer([None, 5, None], [10**400, 6, None]), "logprob, id"),
  ],
)
def test_logprobs_of_another_prompt_are_refused(reply, message):
  with pytest.raises(messages.Garbled, match=message):
    messages.prompt_logprobs(reply, [5, 6])
