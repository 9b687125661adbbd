"""Programs of scripts/: --help explains and does nothing, a mistake does not end in a traceback."""

import ast
import pathlib
import subprocess
import sys

import pytest

from grpo_jax.commands import cli
from scripts import make_notebooks, rounding, staleness

# No words, standard input, and the words of another program of scripts/.
OTHERS = ("can_install", "peer_liger", "child")
SCRIPTS = pathlib.Path(__file__).parents[2] / "scripts"


def test_every_program_reads_its_words_with_a_parser():
  wrong = []
  for path in sorted(SCRIPTS.rglob("*.py")):
    text = path.read_text()
    if "__main__" in text and path.stem not in OTHERS:
      calls = [ast.unparse(n.func) for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call)]
      read = any(
        c.endswith(("ArgumentParser", "command_line")) or c.startswith("cli.") for c in calls
      )
      wrong += [] if read and "main(*sys.argv" not in text else [path.name]
  assert wrong == []


def test_help_of_a_shell_script_is_the_text_at_its_head():
  scripts = [*SCRIPTS.glob("*.sh"), *SCRIPTS.glob("launch/*.sh")]
  assert len(scripts) >= 5
  for path in scripts:
    done = subprocess.run(["bash", path, "--help"], capture_output=True, text=True, timeout=20)
    first = path.read_text().splitlines()[1].removeprefix("# ")
    assert done.returncode == 0 and done.stdout.startswith(first), (path, done)
  done = subprocess.run(
    ["bash", SCRIPTS / "compile_for_devices.sh", "h200"], capture_output=True, text=True
  )
  assert done.returncode == 2 and "no target 'h200'; there are: h100, tpu" in done.stderr


def test_a_mistake_is_one_message(capsys, tmp_path):
  assert cli.reported(rounding.main, [str(tmp_path / "nowhere")]) in (1, 2)
  printed = capsys.readouterr()
  assert printed.err.startswith("error: ") and not printed.out
  assert "config.json does not exist" in printed.err
  with pytest.raises(SystemExit, match="2"):
    staleness.main(["--wrong=1"])
  assert "unrecognized arguments: --wrong=1" in capsys.readouterr().err


def test_help_of_the_notebooks_writes_none(monkeypatch, capsys):
  monkeypatch.setattr(make_notebooks, "notebook_of", None)  # a call would fail.
  for word, code in (("--help", "0"), ("--wrong", "2")):
    monkeypatch.setattr(sys, "argv", ["make_notebooks.py", word])
    with pytest.raises(SystemExit, match=code):
      make_notebooks.main()
