"""`grpo-jax export`: what it prints, and what it says of mistakes."""

import pytest

from grpo_jax.commands import cli
from tests import stored_runs


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  return stored_runs.write(tmp_path_factory.mktemp("runs") / "first", {10: 0.5, 20: 0.25})


def test_a_checkpoint_becomes_a_folder(run, tmp_path, capsys):
  out = tmp_path / "out"
  assert (
    cli.run(["export", f"{run}:best", str(out), "--dtype=bfloat16", "--max-shard-gb=1e-5"]) == 0
  )
  files = len(list(out.glob("*.safetensors")))
  first, *others = capsys.readouterr().out.splitlines()
  assert first == f"{run}:10: 0.1 MB of bfloat16 in {files} files: {out}" and files > 1
  assert [line.split(":")[0].strip() for line in others] == ["in transformers", "in SGLang"]


def test_an_adapter_becomes_a_folder_of_its_own(tmp_path, capsys):
  run, out = stored_runs.write_lora(tmp_path / "run", [3]), tmp_path / "out"
  assert cli.run(["export", str(run), str(out), "--adapter"]) == 0
  first, *others = capsys.readouterr().out.splitlines()
  assert first == f"{run}:3: adapter, 0.0 MB of float32 in 1 file: {out}"
  assert [line.split(":")[0].strip() for line in others] == ["in PEFT", "to train it further"]
  assert {path.name for path in out.iterdir()} == {
    "adapter_config.json",
    "adapter_model.safetensors",
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json"),
  }


@pytest.mark.parametrize(
  ("words", "code", "message"),
  [
    (["{run}:best"], 2, "required: OUT"),
    (
      ["{run}:15", "{out}"],
      2,
      "no checkpoint of step 15; {run} has checkpoints of",
    ),
    (["{run}:bst", "{out}"], 2, "not 'bst' (did you mean 'best'?)"),
    (["{run}", "{out}", "--dtyp=float32"], 2, "unknown flag --dtyp; did you mean --dtype?"),
    (["{run}", "{out}", "--adapter"], 2, "{run}:20 has no adapter: every weight was trained"),
    (["{run}", "{out}", "--dtype=int8"], 2, "export.dtype must be one of"),
    (["{run}", "{out}", "--max-shard-gb=many"], 2, "--max-shard-gb"),
    (["{run}", "gs://bucket/out"], 1, "OUT=gs://bucket/out: only paths of this machine"),
    (["{run}", "{run}"], 1, "{run} is there, and nothing is overwritten: choose another name"),
    (["{run}/nothing:3", "{out}"], 2, "there is no run folder {run}/nothing"),
  ],
)
def test_a_mistake_is_one_message(run, tmp_path, capsys, words, code, message):
  places = {"run": run, "out": tmp_path / "out"}
  assert cli.run(["export", *(word.format(**places) for word in words)]) == code
  printed = capsys.readouterr().err
  assert message.format(**places) in printed and printed.count("\n") == 1
  assert not (tmp_path / "out").exists()
