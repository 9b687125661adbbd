"""Makes notebooks/NAME.ipynb, which Colab opens, from the percent script notebooks/NAME.py.

python scripts/make_notebooks.py    (or `make notebooks`)

The scripts are the source. No outputs are stored, and the same script gives the same file.
"""

import argparse
import pathlib
import sys

import jupytext
import nbformat

FOLDER = pathlib.Path(__file__).parents[1] / "notebooks"


def notebook_of(script: str) -> str:
  """Returns the notebook of a percent script as JSON."""
  made = jupytext.reads(script, fmt="py:percent")
  for number, cell in enumerate(made.cells):
    cell["id"] = f"cell-{number}"  # jupytext draws a random one.
  made.metadata.pop("jupytext", None)
  # The header of a script may name the runtime that Colab opens it on: accelerator, colab.gpuType.
  made.metadata["colab"] = {"provenance": [], **made.metadata.get("colab", {})}
  made.metadata["language_info"] = {"name": "python"}
  made.nbformat, made.nbformat_minor = 4, 5  # the first version whose cells have ids.
  nbformat.validate(made)
  return nbformat.writes(made) + "\n"


def main() -> int:
  """Writes a notebook beside every script; returns the exit code."""
  argparse.ArgumentParser(description=__doc__).parse_args()
  for path in sorted(FOLDER.glob("*.py")):
    target = path.with_suffix(".ipynb")
    target.write_text(notebook_of(path.read_text(encoding="utf-8")), encoding="utf-8")
    print(target)
  return 0


if __name__ == "__main__":
  sys.exit(main())
