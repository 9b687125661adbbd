"""What every engine must do, run on the embedded sampler, on the fake one and on SGLang."""

import asyncio

import numpy as np
import pytest
from grpo_kernels.attention import AUTOMATIC

from grpo_jax import engines
from grpo_jax.data.byte_tokenizer import ByteTokenizer
from grpo_jax.engines import base
from grpo_jax.engines.fake import FakeEngine
from grpo_jax.engines.sglang import SGLangEngine
from grpo_jax.serving.request_fields import RequestOptions
from grpo_jax.serving.request_scheduling import ImmediateScheduler, RoundScheduler
from grpo_jax.serving.requests import TextRequest
from grpo_jax.serving.session import ServedPolicy, Session
from grpo_jax.serving.terms import RunDecides
from grpo_jax.types import FinishReason
from tests.engines import sglang_fixtures, tiny
from tests.engines.sglang_fixtures import decode

BIGRAMS = np.random.default_rng(0).normal(size=(tiny.VOCABULARY, tiny.VOCABULARY)) * 1.5


def model_logprobs(prompt, completion, temperature=1.0):
  config = tiny.config()
  return tiny.model_logprobs(
    config, tiny.params(config), prompt, completion, temperature=temperature
  )


def make_jax(request):
  return tiny.sampler(decode=decode, version=3), model_logprobs


def make_fake(request):
  engine = FakeEngine(BIGRAMS, decode=decode, max_length=256)
  engine.load_weights({}, version=3)

  def logprobs(prompt, completion, temperature=1.0):
    logits = BIGRAMS[[prompt[-1], *completion[:-1]]] / temperature
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

  return engine, logprobs


def make_sglang(request):
  server, model = (request.getfixturevalue(name) for name in ("sglang_server", "sglang_model"))
  workdir = request.getfixturevalue("tmp_path_factory").mktemp("engine")
  engine = sglang_fixtures.make(model, workdir, addresses=(server.address,))
  return engine, model_logprobs


MAKERS = [
  pytest.param(make_jax, id="jax_sampler"),
  pytest.param(make_fake, id="fake"),
  pytest.param(make_sglang, id="sglang", marks=pytest.mark.sglang),
]


@pytest.fixture(scope="module", params=MAKERS)
def made(request):
  engine, logprobs = request.param(request)
  yield engine, logprobs
  engine.close()


@pytest.fixture
def engine(made):
  return made[0]


def likely_token(engine, prompt):
  """Returns the token that greedy sampling writes second, and where it stands first, from 1."""
  ids = tiny.run(engine, [tiny.request("x", prompt, temperature=0.0)])["x"].token_ids
  return int(ids[1]), int(np.nonzero(ids == ids[1])[0][0]) + 1


@pytest.mark.long
def test_every_request_is_answered_once_with_aligned_arrays(engine):
  requests = tiny.groups([[1, 2, 3], [4], [5, 6]], 4)
  generations = tiny.run(engine, requests)
  assert set(generations) == {r.request_id for r in requests}
  for generation in generations.values():
    assert len(generation.token_ids) == 12
    assert generation.finish_reason is FinishReason.LENGTH and generation.matched_stop is None
    assert len(generation.logprobs) == len(generation.weight_versions) == 12
    assert (generation.weight_versions == 3).all() and engine.weight_version == 3
    assert (generation.logprobs <= 0).all() and np.isfinite(generation.logprobs).all()


@pytest.mark.long
@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_logprobs_are_those_of_the_model_at_the_sampling_temperature(made, temperature):
  engine, logprobs = made
  requests = tiny.groups([[1, 2, 3], [9, 8, 7, 6, 5]], 2, temperature=temperature)
  generations = tiny.run(engine, requests)
  for request in requests:
    generation = generations[request.request_id]
    wanted = logprobs(request.prompt_ids, generation.token_ids, temperature or 1.0)
    wanted = tiny.of_tokens(wanted, generation.token_ids)
    np.testing.assert_allclose(generation.logprobs, wanted, atol=1e-5)


@pytest.mark.long
def test_temperature_zero_writes_the_most_likely_tokens(made):
  engine, logprobs = made
  generation = tiny.run(engine, [tiny.request("x", [1, 2], temperature=0.0)])["x"]
  best = logprobs([1, 2], generation.token_ids).argmax(-1)
  assert generation.token_ids.tolist() == best.tolist()


@pytest.mark.long
def test_same_seed_writes_the_same_completion_and_another_seed_another(engine):
  one, two, other = (tiny.request(i, [1, 2], seed=s) for i, s in enumerate([5, 5, 6]))
  generations = tiny.run(engine, [one, two, other])
  assert generations["0"].token_ids.tolist() == generations["1"].token_ids.tolist()
  assert generations["0"].token_ids.tolist() != generations["2"].token_ids.tolist()


def test_seeds_of_64_bits_differ_in_every_bit(engine):
  seeds = [1, 1 + 2**32, 1 + 2**63, 2**64 - 1]
  generations = tiny.run(engine, [tiny.request(s, [1, 2], seed=s) for s in seeds])
  assert len({tuple(g.token_ids.tolist()) for g in generations.values()}) == len(seeds)


def test_any_of_the_stop_ids_ends_the_completion_and_is_part_of_it(engine):
  stop, length = likely_token(engine, [1, 2])
  written = tiny.run(engine, [tiny.request("x", [1, 2], temperature=0.0)])["x"].token_ids
  others = [i for i in range(tiny.VOCABULARY) if i not in written][:4]
  request = tiny.request("x", [1, 2], temperature=0.0, stop_ids=(*others, stop))
  generation = tiny.run(engine, [request])["x"]
  assert generation.finish_reason is FinishReason.STOP and generation.matched_stop == stop
  assert len(generation.token_ids) == length and generation.token_ids[-1] == stop


def test_a_stop_id_as_the_first_token_gives_a_completion_of_one_token(engine):
  first = int(tiny.run(engine, [tiny.request("x", [1], temperature=0.0)])["x"].token_ids[0])
  request = tiny.request("x", [1], temperature=0.0, stop_ids=(first,))
  generation = tiny.run(engine, [request])["x"]
  assert generation.token_ids.tolist() == [first] and len(generation.logprobs) == 1
  assert generation.finish_reason is FinishReason.STOP


def test_a_stop_id_as_the_last_allowed_token_is_a_stop_and_no_truncation(engine):
  stop, length = likely_token(engine, [1, 2])
  request = tiny.request("x", [1, 2], temperature=0.0, stop_ids=(stop,), max_tokens=length)
  assert tiny.run(engine, [request])["x"].finish_reason is FinishReason.STOP


def test_a_stop_string_over_two_tokens_ends_with_the_token_that_completes_it(engine):
  ids = tiny.run(engine, [tiny.request("x", [1, 2], temperature=0.0)])["x"].token_ids
  text = decode(ids)
  for start in range(10):
    string = text[start : start + 2]
    end = text.index(string) + 2
    request = tiny.request("x", [1, 2], temperature=0.0, stop_strings=("..", string))
    generation = tiny.run(engine, [request])["x"]
    assert generation.token_ids.tolist() == ids[:end].tolist()
    assert len(generation.logprobs) == len(generation.weight_versions) == end
    assert (generation.finish_reason, generation.matched_stop) == (FinishReason.STOP, string)


@pytest.mark.parametrize(
  "truncation", [{"top_k": 3}, {"top_p": 0.3}, {"min_p": 0.3}, {"top_k": 5, "top_p": 0.5}]
)
def test_truncated_sampling_stays_within_what_the_filters_keep(made, truncation):
  engine, logprobs = made
  requests = tiny.groups([[1, 2]], 8, max_tokens=8, **truncation)
  if "min_p" in truncation and isinstance(engine, SGLangEngine):
    with pytest.raises(ValueError, match="SGLang cannot sample with min_p and seeds"):
      engine.generate(requests)  # it would end on the first such request.
    return
  is_joint = isinstance(engine, SGLangEngine)  # its top-p is a share of all, not of the top k.
  generations = tiny.run(engine, requests)
  for generation in generations.values():
    p = np.exp(logprobs([1, 2], generation.token_ids))
    for of_step, token in zip(p, generation.token_ids, strict=True):
      ranked = np.argsort(-of_step)[: truncation.get("top_k", None)]
      within = of_step[ranked] / (1.0 if is_joint else of_step[ranked].sum())
      ranked = ranked[np.cumsum(within) - within < truncation.get("top_p", 1.0) + 1e-5]
      assert token in ranked
      assert of_step[token] >= truncation.get("min_p", 0.0) * of_step.max() - 1e-5
    np.testing.assert_allclose(
      generation.logprobs, np.log(tiny.of_tokens(p, generation.token_ids)), atol=1e-5
    )


def test_truncated_logprobs_are_renormalised_over_what_the_filters_keep(made):
  engine, logprobs = made
  filters = {"top_k": 5}
  requests = tiny.groups([[1, 2]], 4, max_tokens=6, logprobs="truncated", **filters)
  requests += [tiny.request("full", [1, 2], max_tokens=6, **filters)]
  for name, generation in tiny.run(engine, requests).items():
    table = logprobs([1, 2], generation.token_ids)
    mass = np.log(np.sort(np.exp(table), axis=1)[:, -5:].sum(axis=1))
    wanted = tiny.of_tokens(table, generation.token_ids) - (0 if name == "full" else mass)
    np.testing.assert_allclose(generation.logprobs, wanted, atol=3e-5)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"prompt": []}, "the prompt is empty"),
    ({"prompt": [1, 61]}, "token id 61 is outside the vocabulary of 61"),
    ({"prompt": [-1]}, "token id -1 is outside"),
    ({"max_tokens": 255}, r"prompt of 2 \+ max_tokens 255 = 257 tokens exceeds the limit of 256"),
    ({"seed": 2**64}, "seed must be in"),
  ],
)
def test_a_request_that_cannot_be_served_is_refused_before_anything_runs(engine, change, message):
  request = tiny.request(**{"name": "bad", "prompt": [1, 2], **change})
  with pytest.raises(ValueError, match=f"request 'bad': .*{message}"):
    engine.generate([tiny.request("good", [1]), request])


def test_two_requests_of_one_name_are_refused(engine):
  with pytest.raises(ValueError, match="'a' appears twice"):
    engine.generate([tiny.request("a", [1]), tiny.request("a", [2])])


def test_no_requests_give_no_generations(engine):
  assert tiny.run(engine, []) == {}


def test_progress_counts_up_to_all_completions_and_tokens(engine):
  seen = []
  requests = tiny.groups([[1, 2], [3]], 8)
  tiny.run(engine, requests, on_progress=lambda *numbers: seen.append(numbers))
  done, total, tokens = zip(*seen, strict=True)
  assert set(total) == {16} and list(done) == sorted(done) and list(tokens) == sorted(tokens)
  assert max(tokens) <= 16 * 12 and len(seen) > 1


def test_two_calls_in_flight_are_both_answered(engine):
  async def both():
    async def collect(requests):
      return {g.request_id: g.token_ids.tolist() async for g in engine.generate(requests)}

    return await asyncio.gather(
      collect(tiny.groups([[1, 2]], 6)), collect(tiny.groups([[7], [8, 9]], 6))
    )

  first, second = asyncio.run(both())
  assert len(first) == 6 and len(second) == 12
  alone = tiny.run(engine, tiny.groups([[7], [8, 9]], 6))
  assert second == {name: g.token_ids.tolist() for name, g in alone.items()}


def test_a_caller_that_leaves_does_not_disturb_the_next(engine):
  async def leave():
    async for generation in engine.generate(tiny.groups([[1, 2]], 20)):
      return generation

  assert asyncio.run(leave()) is not None
  assert len(tiny.run(engine, tiny.groups([[1, 2]], 2))) == 2


@pytest.mark.parametrize("make", MAKERS)
def test_close_may_be_called_twice_and_generate_fails_afterwards(make, request):
  engine, _ = make(request)
  engine.close()
  engine.close()
  with pytest.raises(RuntimeError, match="closed"):
    engine.generate([tiny.request("x", [1])])


@pytest.mark.parametrize("make", MAKERS)
def test_close_fails_the_calls_in_flight(make, request):
  engine, _ = make(request)

  async def closed_upon():
    first = tiny.request("first", [1, 2], max_tokens=1)  # the others have far to go then.
    others = tiny.groups([[1, 2]], 60, max_tokens=40)
    async for _ in engine.generate([first, *others]):
      engine.close()

  with pytest.raises(RuntimeError, match="closed"):
    asyncio.run(closed_upon())


def test_fake_engine_writes_its_script_with_the_logprobs_of_the_table():
  engine = FakeEngine(BIGRAMS, script=lambda request: [5, 6, 7, 8])
  generation = tiny.run(engine, [tiny.request("x", [1], stop_ids=(7,))])["x"]
  assert generation.token_ids.tolist() == [5, 6, 7]
  logits = BIGRAMS[[1, 5, 6]]
  wanted = logits[[0, 1, 2], [5, 6, 7]] - np.log(np.exp(logits).sum(-1))
  np.testing.assert_allclose(generation.logprobs, wanted, atol=1e-5)


def test_make_finds_engines_by_name_and_lists_them_otherwise():
  engine = engines.make("fake", logits=BIGRAMS)
  assert isinstance(engine, FakeEngine)
  with pytest.raises(ValueError, match="did you mean 'jax_sampler'"):
    engines.make("jax_sampller")
  with pytest.raises(ValueError, match="takes no 'max_rowz' .did you mean 'max_rows'"):
    engines.make("jax_sampler", config=tiny.config(), max_rowz=3)


@pytest.mark.parametrize("name", ["fake", "jax_sampler", "sglang"])
def test_make_passes_on_how_the_trainer_computes_only_where_it_is_taken(name, tmp_path):
  folders = {"source_directory": tmp_path, "workdir": tmp_path}
  own = {
    "fake": {"logits": BIGRAMS},
    "jax_sampler": {"config": tiny.config(), **folders},
    "sglang": {"config": tiny.config(), "addresses": ("http://127.0.0.1:9",), **folders},
  }
  numerics = {"matmul_precision": None, "product_dtype": None, "attention": AUTOMATIC}
  engines.make(name, **own[name], **numerics).close()


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("max_tokens", 0),
    ("temperature", -0.1),
    ("temperature", float("nan")),
    ("top_k", -1),
    ("top_p", 0.0),
    ("top_p", 1.1),
    ("min_p", 2.0),
    ("stop_strings", ("a", "")),
    ("logprobs", "some"),
  ],
)
def test_sampling_params_refuse_what_has_no_meaning(field, value):
  with pytest.raises(ValueError, match=field):
    base.SamplingParams(**{"max_tokens": 4, field: value})


def test_released_weights_are_asked_for_again_and_change_nothing():
  engine = tiny.sampler()
  before = tiny.run(engine, [tiny.request("a", [1, 2, 3])])
  engine.release()
  with pytest.raises(RuntimeError, match="load_weights"):
    tiny.run(engine, [tiny.request("a", [1, 2, 3])])
  engine.load_weights(tiny.params(tiny.config()), version=2)
  after = tiny.run(engine, [tiny.request("a", [1, 2, 3])])
  assert after["a"].token_ids.tolist() == before["a"].token_ids.tolist()
  engine.close()


class Numbers(ByteTokenizer):
  """Ids of the tiny model as text."""

  vocab_size = tiny.VOCABULARY

  def decode(self, ids, *, skip_special=True):
    return decode([int(i) for i in ids])


@pytest.mark.long
@pytest.mark.parametrize(
  "scheduler", [ImmediateScheduler, RoundScheduler], ids=["at_once", "rounds"]
)
def test_turns_of_sessions_have_the_logprobs_of_the_model_after_all_tokens_before(made, scheduler):
  engine, logprobs = made

  async def converse(policy, number):
    session = Session(policy, name=f"p{number}#0", number=number, seed=lambda turn: 7 * turn)
    prompt = (1, 2, 3 + number)
    policy.scheduler.join()
    try:
      for _ in range(2):
        request = TextRequest(prompts=(prompt,), options=RequestOptions(has_token_ids=True))
        (answer,) = await session.complete(request)()
        prompt = (*prompt, *map(int, answer.generation.token_ids), 5)
    finally:
      policy.scheduler.leave()
    return session.last_chain()

  async def all_of_them():
    sampling = base.SamplingParams(max_tokens=6)
    policy = ServedPolicy(
      scheduler=scheduler(engine),
      tokenizer=Numbers(),
      sampling=sampling,
      terms=RunDecides(),
      max_tokens=64,
      tool_form=None,
    )
    try:
      return await asyncio.gather(*(converse(policy, number) for number in range(4)))
    finally:
      await policy.scheduler.close()

  for first, second in asyncio.run(all_of_them()):
    assert second.prompt_ids.tolist() == [*first.token_ids, 5]
    for turn in (first, second):
      ids = turn.generation.token_ids
      wanted = tiny.of_tokens(logprobs(turn.prompt_ids, ids), ids)
      np.testing.assert_allclose(turn.generation.logprobs, wanted, atol=1e-5)
      assert (turn.generation.weight_versions == 3).all()
