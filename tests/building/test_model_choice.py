"""Which model a run takes: wrong ones are refused before anything is made, fallbacks are named."""

import json
import shutil

import pytest

import configs.gsm8k
from grpo_jax import main, report
from grpo_jax.building import checks, policy_model
from grpo_jax.config import configuration, run_options
from grpo_jax.config.configuration import ConfigError, typed
from grpo_jax.models import loading, sources, tiny
from grpo_jax.models.config import ModelConfig, RopeScaling
from grpo_jax.report import run_data


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  return tiny.write(tmp_path_factory.mktemp("models") / "model")


def damaged(model, folder, name, content):
  copy = shutil.copytree(model, folder / "copy")
  (copy / name).write_text(content)
  return copy


@pytest.mark.parametrize("option", ["model.path", "model.fallback"])
@pytest.mark.parametrize("path", ["{}/nomodel", "./nomodel", "a/b/c", "pypi:nothing", "{}/a.txt"])
def test_a_wrong_path_ends_with_code_2_and_no_folder(option, path, tmp_path, capsys):
  (tmp_path / "a.txt").touch()
  path = path.format(tmp_path)
  workdir = tmp_path / "run"
  command = ["--config=configs/gsm8k.py", f"--config.{option}={path}", f"--workdir={workdir}"]
  assert main.main(command) == 2
  reported = capsys.readouterr()
  assert reported.err.startswith(f"error: the configuration cannot work:\n  - {option}: {path}: ")
  assert len(reported.err.splitlines()) == 2 and reported.out == ""
  assert not workdir.exists()


@pytest.mark.parametrize(
  ("name", "content", "message"),
  [
    ("config.json", "[]", "config.json must be a JSON object"),
    ("config.json", '{"architectures": 3}', "architectures needs a list of strings, got 3"),
    ("model.safetensors", "abc", "is cut short or not a safetensors file"),
    ("generation_config.json", "[]", "must be a JSON object, but is a list"),
  ],
)
def test_a_broken_folder_ends_with_code_2_and_no_folder(
  name, content, message, model, tmp_path, capsys
):
  path, workdir = damaged(model, tmp_path, name, content), tmp_path / "run"
  command = ["--config=configs/gsm8k.py", f"--config.model.path={path}"]
  assert main.main([*command, f"--workdir={workdir}"]) == 2
  reported = capsys.readouterr().err
  assert message in reported and len(reported.splitlines()) == 2 and "Traceback" not in reported
  assert not workdir.exists()


def test_a_model_that_is_there_or_may_be_is_not_refused(model):
  config = configs.gsm8k.get_config()
  assert list(run_options._unusable_model(typed(config))) == []
  config.model.path, config.model.fallback = str(model), ""
  assert list(run_options._unusable_model(typed(config))) == []


def remember(config, folder, found):
  """Does with config.json what `building.build` does."""
  config = policy_model.with_fallback(typed(config), found)
  checks.log_differences(typed(config), folder)
  configuration.write(config, folder / "config.json")


def test_a_fallback_is_named_in_config_json_and_in_the_report(model, tmp_path):
  config = configs.gsm8k.get_config()
  found = sources.ResolvedModel(model, "org/model", "pypi:other", "org/model: cannot be downloaded")
  remember(config, tmp_path, found)
  stored = json.loads((tmp_path / "config.json").read_text())
  assert stored["model"]["fallback_taken"] == {
    "asked": "org/model",
    "taken": "pypi:other",
    "reason": "org/model: cannot be downloaded",
  }
  assert "fallback_taken" not in config.model
  facts = dict(report.facts(run_data.load(tmp_path)))
  assert facts["trained instead"] == "pypi:other"
  assert facts["because"] == "org/model: cannot be downloaded"


def test_a_run_that_continues_with_another_model_says_so(model, tmp_path, caplog):
  config = configs.gsm8k.get_config()
  remember(config, tmp_path, sources.ResolvedModel(model, "org/model", "org/model"))
  assert "fallback_taken" not in (tmp_path / "config.json").read_text()
  remember(config, tmp_path, sources.ResolvedModel(model, "org/model", "pypi:other", "gone"))
  assert "model.fallback_taken.taken: was absent" in caplog.text
  assert "model.fallback_taken.reason" not in caplog.text


def test_no_configuration_has_an_empty_fallback():
  for path in configuration.present():
    config = configuration.load(path)
    assert config.model.fallback is None or sources.refusal(config.model.fallback) is None


def test_the_run_keeps_the_text_of_its_chat_template(tmp_path, caplog):
  """Commands that render later need no file; a run that continues with another text says so."""
  file = tmp_path / "own.jinja"
  for number, text in enumerate(["{{ messages }}", "{{ messages }}", "other" + 300 * "x"]):
    file.write_text(text)
    config = configs.gsm8k.get_config()
    config.model.chat_template = str(file)
    kept = policy_model.with_template(typed(config))
    assert kept.model.chat_template == text and config.model.chat_template == str(file)
    checks.log_differences(kept, tmp_path)
    configuration.write(kept, tmp_path / "config.json")
    assert ("model.chat_template: was" in caplog.text) == (number == 2)
  assert "messages }}" in caplog.text and 200 * "x" not in caplog.text
  assert policy_model.with_template(typed(configs.gsm8k.get_config())).model.chat_template is None


def test_variables_that_the_run_sets_itself_are_refused():
  config = configs.gsm8k.get_config()
  config.model.chat_template_args = {"tools": [], "enable_thinking": False, "messages": 1}
  found = [line for line in run_options.validate(config) if "chat_template_args" in line]
  assert found == ["model.chat_template_args: the run itself sets messages, tools"]


@pytest.mark.parametrize("mode", ["online", "offline"])
@pytest.mark.parametrize(
  ("scaling", "is_refused"),
  [
    (None, False),
    (RopeScaling("yarn", 4.0, original_max_position_embeddings=64), False),
    (RopeScaling("dynamic", 4.0, original_max_position_embeddings=64), True),
  ],
)
def test_contexts_in_which_rotary_frequencies_change_are_refused(
  mode, scaling, is_refused, tmp_path
):
  """Also for recorded responses, which may otherwise be longer than the model's context."""
  config = configuration.replaced(
    configs.gsm8k.get_config(), {"mode": mode, "rollout.max_tokens": 65}
  )
  sizes = ModelConfig("llama", 61, 24, 37, 2, 6, 2, 8, rope_scaling=scaling)
  facts = loading.ModelFacts(sizes, tmp_path, {})
  if not is_refused:
    checks.check_context(config, facts)
    return
  with pytest.raises(ConfigError, match=r"reads 64 \(context of its rotary scaling .*dynamic"):
    checks.check_context(config, facts)
  checks.check_context(configuration.replaced(config, {"rollout.max_tokens": 64}), facts)
