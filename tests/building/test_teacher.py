"""The teacher of a run: which one is taken, which is refused, and what it says of a batch."""

import contextlib
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import configs.base
from grpo_jax import batching, train
from grpo_jax.batching import layout, packing
from grpo_jax.building import computation, distillation_teacher, phases, stored
from grpo_jax.config.configuration import ConfigError, typed
from grpo_jax.data import vocabularies
from grpo_jax.engines.prompt_scoring import ScoringError
from grpo_jax.groups import learning_signal
from grpo_jax.learn import sharding
from grpo_jax.models import loading, tiny, transformer
from grpo_jax.models.placement import AXES
from grpo_jax.rl import estimators
from grpo_jax.rl.logprobs import sequence_logprobs
from grpo_jax.types import Batch, Denominators, Minibatch
from tests import stored_runs
from tests.environments.scripted_server import answer, serving
from tests.equivalence.equivalence_case import group

TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def mesh():
  return sharding.make_mesh(data=1, devices=jax.devices()[:1])


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
  """A model of another family and width than the policy."""
  folder = tmp_path_factory.mktemp("teacher")
  return tiny.write(folder / "teacher", family="qwen3", seed=5, hidden_size=64)


def config_of(**settings):
  config = configs.base.get_config()
  config.update_from_flattened_dict(
    {
      "model.compute_dtype": "float32",
      "rollout.max_tokens": 96,
      "loss.kl_coef": 0.0,
      **{name.replace("__", "."): value for name, value in settings.items()},
    }
  )
  return config


# --- what a batch holds, and what a teacher says of it ---


def a_group(rng, prompt, lengths):
  return group(rng, f"p{prompt}", prompt, lengths, vocabulary=256, reward=0.0, turns=True)


def assembled(groups, **options):
  zeros = [np.zeros(len(group.rollouts), np.float32) for group in groups]
  shapes = (packing.Shape(6, 48, 48),)
  return batching.assemble(groups, zeros, shapes=shapes, skip_zero_advantage=False, **options)


@pytest.fixture(scope="module")
def groups():
  rng = np.random.default_rng(0)
  return [a_group(rng, *sizes) for sizes in ((5, (7, 3)), (9, (6, 1)), (4, (8,)))]


@pytest.mark.parametrize("options", [{}, {"pack": False, "share_prefixes": False}])
def test_the_completions_of_a_batch_are_those_that_were_packed(groups, options):
  made = assembled(groups, **options)
  (part,) = made.minibatches
  found = {
    (number, one.row, one.start): one
    for number, batch in enumerate(part.microbatches)
    for one in layout.completions(batch)
  }
  assert len(found) == len(made.placements) == 5
  for place in made.placements:
    one = found[place.microbatch, place.row, place.start]
    group = groups[place.group]
    ids = [*group.prompt.token_ids, *group.rollouts[place.rollout].completion_ids]
    assert one.tokens.tolist() == ids and one.prompt_tokens == len(group.prompt.token_ids)


@pytest.fixture(scope="module")
def expected(groups, teacher):
  """The teacher's logprobs of every completion, computed one by one without packing."""
  loaded = loading.load(teacher)
  module = transformer.Transformer(loaded.config)
  head, head_layout = transformer.head(loaded.params, loaded.config)
  rows = [[*g.prompt.token_ids, *r.completion_ids] for g in groups for r in g.rollouts]
  tokens = np.zeros((len(rows), 24), np.int32)
  for row, ids in zip(tokens, rows, strict=True):
    row[: len(ids)] = ids

  @jax.jit
  def compute(params, temperature):
    positions = jnp.broadcast_to(jnp.arange(24)[None], tokens.shape)
    ids = jnp.asarray(tokens)
    hidden = module.apply({"params": params}, ids, positions, jnp.ones_like(ids))
    return sequence_logprobs(hidden, head / temperature, ids, head_layout=head_layout)

  at = lambda temperature: np.asarray(compute(loaded.params, temperature))
  return {TEMPERATURE: at(TEMPERATURE), 1.0: at(1.0)}, rows


def scores_of(made, groups, score, mesh):
  """Returns what a teacher says of each completion, in the order of `expected`."""
  values = score(sharding.put(made.minibatches, mesh))
  return [x for of in batching.per_rollout(made, jax.device_get(values), groups) for x in of]


def check(found, groups, expected, rows):
  prompts = [len(g.prompt.token_ids) for g in groups for _ in g.rollouts]
  masks = [r.loss_mask for g in groups for r in g.rollouts]
  for values, of, n, ids, mask in zip(found, expected, prompts, rows, masks, strict=True):
    np.testing.assert_array_equal(np.isfinite(values), mask)
    np.testing.assert_allclose(values[mask], of[n : len(ids)][mask], atol=1e-4)


@pytest.mark.parametrize(
  "sizes", [(1, 1, 1), pytest.param((2, 1, 2), marks=pytest.mark.slow)], ids=str
)
def test_a_second_model_scores_packed_batches_at_the_temperature_of_sampling(
  groups, expected, teacher, sizes
):
  devices = jax.devices()[: np.prod(sizes)]
  mesh = sharding.make_mesh(**dict(zip(AXES, sizes, strict=True)), devices=devices)
  config = config_of(sampling__temperature=TEMPERATURE)
  found = stored.find(str(teacher))
  program = computation.make_teacher(typed(config), found.config, mesh)
  score = distillation_teacher.in_trainer(found, program)
  of_temperature, rows = expected
  check(
    scores_of(assembled(groups), groups, score, mesh), groups, of_temperature[TEMPERATURE], rows
  )


@pytest.mark.parametrize("options", [{}, {"pack": False, "share_prefixes": False}])
def test_a_server_scores_the_same_tokens(groups, expected, mesh, options):
  """A real HTTP server, which knows the model's own logprobs of the sequences that it is sent."""
  of_temperature, rows = expected
  known = {tuple(ids): row for ids, row in zip(rows, of_temperature[1.0], strict=True)}

  def respond(handler, server):
    body = json.loads(handler.body)
    ids, first = body["input_ids"], body["logprob_start_len"]
    values = known[tuple(ids)] if tuple(ids) in known else np.full(len(ids), -1.0)
    entries = [[float(values[i]), ids[i], None] for i in range(first, len(ids))]
    entries[0][0] = None
    answer({"meta_info": {"input_token_logprobs": entries}})(handler, server)

  with serving(respond) as server, contextlib.ExitStack() as stack:
    config = config_of(teacher__urls=(server.url,))
    score = distillation_teacher.at_servers(
      typed(config), mesh=mesh, vocab_size=259, stack=stack, stop=False
    )
    (probed,) = server.requests
    assert max(probed[2]["input_ids"]) == 258
    found = scores_of(assembled(groups, **options), groups, score, mesh)
  check(found, groups, of_temperature[1.0], rows)


def test_a_server_that_is_down_ends_the_build_in_one_line(mesh):
  with serving(answer({})) as server:
    url = server.url
  settings = {"mesh": mesh, "vocab_size": 259, "stop": False}
  with contextlib.ExitStack() as stack, pytest.raises(ConfigError) as error:
    distillation_teacher.at_servers(config_of(teacher__urls=(url,)), stack=stack, **settings)
  assert str(error.value).startswith(f"teacher.urls: {url}/generate: ")
  assert "\n" not in str(error.value)


def test_a_server_that_fails_later_ends_the_run_with_its_reason(groups, mesh):
  def respond(handler, server):
    ids = json.loads(handler.body)["input_ids"]
    is_check = len(server.requests) == 1
    entries = [[-1.0 if is_check else None, token, None] for token in ids]
    answer({"meta_info": {"input_token_logprobs": entries}})(handler, server)

  with serving(respond) as server, contextlib.ExitStack() as stack:
    config = config_of(teacher__urls=(server.url,), teacher__retries=0)
    score = distillation_teacher.at_servers(
      typed(config), mesh=mesh, vocab_size=259, stack=stack, stop=False
    )
    with pytest.raises(ScoringError, match="^teacher.urls: a completion was not scored in .*None$"):
      scores_of(assembled(groups), groups, score, mesh)


# --- which teacher is taken ---


def test_a_run_is_a_teacher_too(tmp_path, model, mesh):
  run = stored_runs.write(tmp_path / "run", {3: 0.5, 7: 0.25}, model=model)
  for path, step in ((f"{run}", 7), (f"{run}:3", 3), (f"{run}:best", 3)):
    found = distillation_teacher.find(typed(config_of(teacher__path=path)), model, mesh)
    assert found is not None and found.step == step
    program = computation.make_teacher(
      typed(config_of(teacher__dtype="bfloat16")), found.config, mesh
    )
    embed = distillation_teacher.read(found, program)["embed"]
    assert embed.dtype == jnp.bfloat16
    exact = stored_runs.params_of(step)["embed"]
    np.testing.assert_allclose(np.asarray(embed, np.float32), exact, rtol=1e-2)


def test_there_is_no_teacher_unless_one_is_named(model, mesh):
  assert distillation_teacher.find(typed(config_of()), model, mesh) is None


def changed(folder, target, name, change):
  """Copies a model's folder, with a JSON file of it changed."""
  shutil.copytree(folder, target)
  content = json.loads((target / name).read_text())
  change(content)
  (target / name).write_text(json.dumps(content))
  return target


def other_ids(tokenizer):
  vocabulary = tokenizer["model"]["vocab"]
  one, other = list(vocabulary)[65:67]
  vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]


@pytest.mark.parametrize(
  ("name", "change", "message"),
  [
    ("tokenizer.json", other_ids, "its tokenizer must be the same: .*2 of 259 ids differ: id 65"),
    (
      "config.json",
      lambda x: x.update(max_position_embeddings=64),
      r"may have 96 tokens, but the teacher reads 64 \(max_position_embeddings\)",
    ),
    ("config.json", lambda x: x.update(hidden_size=40), "does not fit its config"),
  ],
)
def test_a_teacher_that_cannot_read_the_policy_is_refused(
  name, change, message, model, teacher, mesh, tmp_path
):
  other = changed(teacher, tmp_path / "other", name, change)
  with pytest.raises(ConfigError, match=f"(?s)^teacher.path.*{message}"):
    distillation_teacher.find(config_of(teacher__path=str(other)), model, mesh)


def test_a_teacher_that_does_not_exist_is_refused(model, mesh, tmp_path):
  path = str(tmp_path / "none")
  with pytest.raises(ConfigError, match="^teacher.path: "):
    distillation_teacher.find(typed(config_of(teacher__path=path)), model, mesh)


def test_an_adapter_cannot_teach_without_its_base(model, mesh, tmp_path):
  (tmp_path / "adapter_config.json").write_text("{}")
  with pytest.raises(ConfigError, match=f"^teacher.path={tmp_path} is an adapter, and .* export"):
    distillation_teacher.find(config_of(teacher__path=str(tmp_path)), model, mesh)


def test_a_teacher_may_know_more_tokens():
  policy = {"a": 0, "b": 1}
  assert vocabularies._difference(policy, {**policy, "<think>": 2}) is None
  assert vocabularies._difference(policy, {"a": 0}) == (
    "1 of 2 ids differ: id 1 is 'b' in one and nothing there"
  )


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({"teacher__urls": ("http://a",)}, "teacher.path and teacher.urls name two teachers"),
    ({"mode": "offline"}, "mode='offline' learns from recorded completions"),
    ({"filters__drop_no_signal": True}, "filters.drop_no_signal=True drops groups"),
    ({"dynamic_sampling__enabled": True}, "dynamic_sampling.enabled=True drops groups"),
    ({"loss__loss": "kl_cov"}, "loss.loss='kl_cov' chooses tokens by the advantages of rewards"),
    ({"sampling__logprobs": "truncated"}, "a teacher's logprobs are of its whole distribution"),
    ({"teacher__coef": 0.0}, "teacher.coef must be a finite number > 0"),
    ({"teacher__clamp": -1.0}, "teacher.clamp must be a finite number > 0"),
    ({"teacher__path": None, "teacher__urls": ("a:1",)}, "url must be http"),
    (
      {"teacher__path": None, "teacher__urls": ("http://a",), "teacher__api": "vllm"},
      "teacher.api='vllm' needs teacher.model",
    ),
    (
      {"teacher__path": None, "teacher__urls": ("http://a",), "teacher__api_key_env": "NO_KEY"},
      "api_key_env names NO_KEY, which is not set",
    ),
    (
      {"teacher__path": None, "teacher__urls": ("http://a",), "sampling__temperature": 0.7},
      "servers score at temperature 1, not at 0.7: set sampling.temperature=1, or",
    ),
  ],
)
def test_options_that_cannot_work_are_named(settings, message, teacher):
  config = config_of(**{"teacher__path": str(teacher), **settings})
  assert [x for x in train.validate(config) if message in x], list(train.validate(config))


def test_one_completion_of_a_prompt_is_enough(teacher):
  about = "rollout.group_size=1 gives every completion advantage 0"
  complaints = lambda **x: [c for c in train.validate(config_of(rollout__group_size=1, **x))]
  assert any(about in c for c in complaints())
  assert not any(about in c for c in complaints(teacher__path=str(teacher)))


# --- what a teacher changes elsewhere ---


def test_completions_without_advantage_are_not_lost(groups):
  zeros = [np.zeros(len(group.rollouts), np.float32) for group in groups]
  given = groups, groups, zeros, {(0, 1): "truncated"}, estimators.make("grpo")
  assert learning_signal.find(*given).is_empty
  taught = learning_signal.find(*given, needs_advantage=False)
  assert not taught.is_empty and dict(taught.lost) == {"truncated": 1}


def test_logprobs_follow_their_batches():
  batches = [Batch(**layout.blank(packing.Shape(1, 4, 4))) for _ in range(3)]
  numbers = [np.full((1, 4), number, np.float32) for number in range(3)]
  counts = Denominators(1.0, 1.0)
  parts = Minibatch((batches[0], batches[1]), counts), Minibatch((batches[2],), counts)
  fields = [{"teacher_logprobs": each} for each in numbers]
  first, second = phases._with(parts, [fields[:2], fields[2:]])
  found = [batch.teacher_logprobs for part in (first, second) for batch in part.microbatches]
  assert [int(x[0, 0]) for x in found] == [0, 1, 2]
