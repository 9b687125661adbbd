"""The command line: every kind of value reaches its field, every mistake has its message."""

import math
import pathlib
import re

import pytest

from grpo_jax.config import command_line, configuration
from grpo_jax.config.command_line import HelpWanted
from grpo_jax.config.configuration import ConfigError
from grpo_jax.config.options import Config
from grpo_jax.values import options

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = """
from ml_collections import ConfigDict, FieldReference, config_dict
def get_config(word="none"):
  return ConfigDict({
    "word": word, "seed": 1, "rate": 1e-3, "on": True, "off": False,
    "untyped": None, "number": config_dict.placeholder(float), "name": config_dict.placeholder(str),
    "count": config_dict.placeholder(int), "clamp": FieldReference(20.0),
    "loss": {"clip_low": 0.2, "kl_weight": "score"},
    "pair": (1, 2), "words": ("a", "b"), "empty": (), "many": [1, 2],
    "args": {}, "sources": [{"path": "x"}],
    "data": {"task_args": {}}, "environments": {"math": {"workers": 2, "settings": {"a": 1}}},
  })
"""


@pytest.fixture
def path(tmp_path):
  (tmp_path / "some.py").write_text(CONFIG)
  return str(tmp_path / "some.py")


def config_of(path, *arguments):
  return command_line.parse([f"--config={path}", *arguments]).config


@pytest.mark.parametrize(
  "argument, field, expected",
  [
    ("--config.seed=7", "seed", 7),
    ("--config.seed=-7", "seed", -7),
    ("--config.rate=5e-6", "rate", 5e-6),
    ("--config.rate=1", "rate", 1.0),
    ("--config.rate=inf", "rate", math.inf),
    ("--config.word=None of it", "word", "None of it"),
    ("--config.word=a=b", "word", "a=b"),
    ("--config.word=", "word", ""),
    ("--config.on=false", "on", False),
    ("--config.on=no", "on", False),
    ("--config.off=True", "off", True),
    ("--config.off", "off", True),
    ("--noconfig.on", "on", False),
    ("--config.untyped=0.3", "untyped", 0.3),
    ("--config.untyped=3", "untyped", 3),
    ("--config.untyped=word", "untyped", "word"),
    ("--config.untyped=true", "untyped", True),
    ("--config.untyped=None", "untyped", None),
    ("--config.number=0.3", "number", 0.3),
    ("--config.number=3", "number", 3.0),
    ("--config.number=None", "number", None),
    ("--config.name=/a/b.jsonl", "name", "/a/b.jsonl"),
    ("--config.count=5", "count", 5),
    ("--config.clamp=None", "clamp", None),
    ("--config.loss.kl_weight=none", "loss.kl_weight", "none"),
    ("--config.clamp=5", "clamp", 5.0),
    ("--config.loss.clip_low=0.3", "loss.clip_low", 0.3),
    ("--config.pair=3,4,5", "pair", (3, 4, 5)),
    ("--config.pair=(3,)", "pair", (3,)),
    ("--config.pair=3", "pair", (3,)),
    ("--config.words=c,d", "words", ("c", "d")),
    ("--config.words=</action>", "words", ("</action>",)),
    ("--config.words=('c,d', ' e')", "words", ("c,d", " e")),
    ("--config.empty=1,2", "empty", (1, 2)),
    ("--config.words=()", "words", ()),
    ("--config.words=", "words", ()),
    ("--config.many=[3]", "many", [3]),
    ("--config.many=3,4", "many", [3, 4]),
    ("--config.args={'depth': 3}", "args", {"depth": 3}),
    ("--config.environments.math.bonus=0.1", "environments.math.bonus", 0.1),
    ("--config.environments.math.workers=3", "environments.math.workers", 3),
    ("--config.environments.math.settings.b=c", "environments.math.settings.b", "c"),
    (
      "--config.environments.own.module=my_env.Guess",
      "environments.own",
      {"module": "my_env.Guess"},
    ),
    ("--config.data.task_args.most=2", "data.task_args", {"most": 2}),
    ("--config.sources[0].path=y", "sources", [{"path": "y"}]),
  ],
)
def test_override_sets_a_field_by_its_type(path, argument, field, expected):
  value = config_of(path, argument)
  for part in field.split("."):
    value = value[part]
  if isinstance(expected, dict):
    value = value.to_dict()
  if field == "sources":
    value = [source.to_dict() if not isinstance(source, dict) else source for source in value]
  assert (value, type(value)) == (expected, type(expected))


def test_a_new_environment_takes_its_settings_from_flags_in_any_order(path):
  flags = ("low=1", "module=my_env.Guess", "words=a,b")
  config = config_of(path, *(f"--config.environments.mine.{flag}" for flag in flags))
  expected = {"low": 1, "module": "my_env.Guess", "words": "a,b"}
  assert config.environments.mine.to_dict() == expected
  assert config.environments.math.workers == 2


def test_value_may_be_an_argument_of_its_own_and_the_last_one_counts(path):
  command = command_line.parse(
    ["--config.seed", "4", "--config", path, "--workdir", "w", "--config.rate=1", "--config.rate=2"]
  )
  assert (command.config.seed, command.config.rate) == (4, 2.0)
  assert (command.workdir, command.config_path) == (pathlib.Path("w"), path)


def test_two_parses_do_not_share_anything(path):
  assert config_of(path, "--config.seed=9").seed == 9
  assert config_of(path).seed == 1
  assert command_line.parse([f"--config={path}:tiny"]).config.word == "tiny"


def test_flags_are_read_from_a_flagfile(path, tmp_path):
  (tmp_path / "flags").write_text(f"--config={path}\n--config.seed=8\n")
  assert command_line.parse([f"--flagfile={tmp_path / 'flags'}"]).config.seed == 8


@pytest.mark.parametrize(
  "argument, message",
  [
    ("--config.loss.clp_low=0.3", "--config.loss.clp_low: .*did you mean 'loss.clip_low'"),
    ("--noconfig.of", "--config.of: .*did you mean 'off'"),
    ("--config.environments.mth.bonus=1", "no field .*did you mean 'environments.math"),
    ("--config.environments.math=1", "--config.environments.math: it is a section"),
    ("--config.environments={'a': 1}", "it is a section.* --config.environments.NAME.module="),
    ("--config.environments.own.low=1", "no field 'environments.own.low'"),
    ("--config.environment.own.module=x", "no field 'environment.own.module'"),
    ("--config.environments.update.module=x", "no field 'environments.update.module'"),
    ("--config.data.task_arg.most=2", "no field 'data.task_arg.most'"),
    ("--config.seed=1.5", "--config.seed=1.5: expected an integer, got '1.5'"),
    ("--config.seed=abc", "--config.seed=abc: expected an integer, got 'abc'"),
    ("--config.rate=fast", "expected a number, got 'fast'"),
    ("--config.number=fast", "expected a number, got 'fast'"),
    ("--config.on=maybe", "expected true or false, got 'maybe'"),
    ("--config.seed=None", "--config.seed=None: this field needs a value"),
    ("--config.loss=3", "--config.loss: it is a section"),
    ("--config.args=3", "expected a Python dict, got '3'"),
    ("--config.seed", "Missing value for flag --config.seed"),
    ("--config.sources[7].path=y", "cannot be applied"),
    ("--wrkdir=x", "unknown flag --wrkdir; did you mean --workdir"),
    ("--confg.loss.clip_low=1", "did you mean --config.loss.clip_low"),
    ("--workdir=", "--workdir needs the path of a folder"),
    ("--workdir.local=x", "--workdir.local was removed: .*set GRPO_JAX_CACHE=FOLDER"),
    ("-config.seed=3", "-config.seed=3: a flag begins with two dashes: --config.seed=3"),
    ("-noconfig.off", "a flag begins with two dashes: --noconfig.off"),
    ("-workdir=x", "a flag begins with two dashes: --workdir=x"),
    ("config.seed=3", "unexpected argument 'config.seed=3'; did you mean --config.seed=3"),
    ("--flagfile=/nowhere/at/all", "/nowhere/at/all"),
    ("--config=other.py", "--config was given 2 times"),
  ],
)
def test_mistake_is_named_with_what_would_be_right(path, argument, message):
  with pytest.raises(ConfigError, match=message):
    config_of(path, argument)


def test_flags_of_other_commands_begin_with_two_dashes(path):
  config = config_of(path)
  with pytest.raises(ConfigError, match="a flag begins with two dashes: --config.seed=3"):
    command_line.override(config, ["-config.seed=3"])
  assert config.seed == 1


def test_every_mistyped_field_is_named_at_once(path):
  with pytest.raises(ConfigError, match="(?s)--config.sed: .*--config.loss.clp: "):
    config_of(path, "--config.sed=1", "--config.loss.clp=2")


def test_missing_config_shows_an_example_and_the_files_present(tmp_path, monkeypatch):
  (tmp_path / "configs").mkdir()
  (tmp_path / "configs" / "tiny.py").write_text("")
  monkeypatch.chdir(tmp_path)
  with pytest.raises(ConfigError, match=r"(?s)--config is missing.*example.*configs/tiny.py"):
    command_line.parse(["--workdir=x"])
  with pytest.raises(ConfigError, match="--config is missing"):
    command_line.parse(["--config"])
  with pytest.raises(ConfigError, match="no file tiny.py .did you mean 'configs/tiny.py'"):
    command_line.parse(["--config=tiny.py"])
  with pytest.raises(HelpWanted, match=r"(?s)Exit codes.*configs/tiny.py"):
    command_line.parse(["--help"])


def test_help_with_a_config_lists_its_fields(path):
  with pytest.raises(HelpWanted, match=r"(?s)--config.word='none'.*--config.loss.clip_low=0.2"):
    command_line.parse([f"--config={path}", "--help"])


def help_of(*arguments):
  with pytest.raises(HelpWanted) as text:
    command_line.parse(arguments)
  return str(text.value)


@pytest.mark.parametrize("width", [80, 120])
def test_help_explains_the_fields_in_the_order_of_the_file(monkeypatch, width):
  monkeypatch.setenv("COLUMNS", str(width))
  text = help_of(f"--config={ROOT / 'configs' / 'quickstart.py'}", "--help")
  text = text.split("Fields of")[1]
  one_line = " ".join(text.split())
  for expected in (
    "--config.seed=0 random seed of the data order, sampling and initialisation",
    "loss: formulas: docs/algorithms.md --config.loss.loss='clipped' clipped, gspo",
    "--config.loss.kl_coef=0.0 coefficient of the KL to the reference policy",  # its value.
    "--config.batching.microbatch_tokens=512 tokens computed at once on one",  # base's line.
    "--config.data.tasks={} task_name of a row",
    "--config.engine.sglang.servers=1 number of servers that each process launches",
    "environments.arithmetic --config.environments.arithmetic.answer='last_number'",
  ):
    assert expected in one_line
  fields = [re.match(r" *--config\.([a-z_.0-9]+)=", line) for line in text.splitlines()]
  names = [found[1] for found in fields if found]
  config = configuration.load(str(ROOT / "configs" / "quickstart.py"))
  assert len(names) == len({*names}) and {*names} == {*configuration.fields(config)}
  order = ["seed", "model.path", "mesh.data", "loss.loss", "loss.kl_coef", "export.dtype"]
  assert sorted(order, key=names.index) == order
  too_long = [line for line in text.splitlines() if len(line) > width and len(line.split()) > 1]
  assert too_long == []


def test_help_of_one_section_shows_that_one(monkeypatch):
  monkeypatch.setenv("COLUMNS", "100")
  path = f"--config={ROOT / 'configs' / 'base.py'}"
  text = help_of(path, "--help=engine")
  assert "--config.engine.name=" in text and "--config.engine.sglang.port=" in text
  assert "--config.loss" not in text and "Exit codes" not in text
  assert help_of(path, "--help=config.engine") == text
  assert help_of(path, "--help=seed").startswith("  --config.seed=42")
  with pytest.raises(ConfigError, match="no section 'los' .did you mean 'loss'"):
    command_line.parse([path, "--help=los"])
  with pytest.raises(ConfigError, match="--help=loss needs --config=FILE.py"):
    command_line.parse(["--help=loss"])


@pytest.mark.parametrize(
  "text",
  [
    "from grpo_jax.config import base",
    "import configs.base\nbase = configs.base",
    "import configs.quickstart as base",
  ],
)
def test_a_file_anywhere_shows_the_explanations_of_the_base_that_it_imports(
  tmp_path, monkeypatch, text
):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "my.py").write_text(
    f"{text}\n\ndef get_config():\n  config = base.get_config()\n  config.seed = 7\n"
    "  return config\n"
  )
  lines = help_of("--config=my.py", "--help").split("Fields of")[1]
  explained = dict(options.meanings(Config))
  assert explained["seed"] and explained["loss.clip_low"]
  assert f"--config.seed=7 {explained['seed']}" in " ".join(lines.split())
  assert explained["loss.clip_low"] in " ".join(lines.split())


def test_without_a_folder_of_configs_the_message_says_how_one_begins(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(ConfigError, match="from grpo_jax.config import base"):
    command_line.parse([])


WITH_FALLBACK = """
from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

def get_config():
  config = ConfigDict(dict(model=dict(path="org/model", fallback=placeholder(str))))
  config.model.fallback = "pypi:other"
  return config
"""


@pytest.mark.parametrize(
  ("flags", "fallback"),
  [
    ([], "pypi:other"),
    (["--config.model.path=org/model"], "pypi:other"),
    (["--config.model.path=org/typo"], None),
    (["--config.model.path=org/mine", "--config.model.fallback=/mine"], "/mine"),
  ],
  ids=["as-in-the-file", "same-model", "another-model", "both"],
)
def test_the_fallback_of_a_file_is_for_the_model_of_the_file(flags, fallback, tmp_path):
  (tmp_path / "a.py").write_text(WITH_FALLBACK)
  command = command_line.parse(["main", f"--config={tmp_path / 'a.py'}", *flags][1:])
  assert command.config.model.fallback == fallback
