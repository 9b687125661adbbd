"""Executes the cells of a notebook in a kernel of its own, in a folder of the test."""

import os
import pathlib

import nbclient
import nbformat

ROOT = pathlib.Path(__file__).parents[2]
FAST_FORM = ROOT / "tests" / "notebooks" / "fast_form.py"
PYTHONPATH = f"{ROOT}:{ROOT / 'kernels'}:{ROOT / 'packages'}"
# Settings of the suite: what a user runs is optimised, and keeps its programs elsewhere.
OF_THE_SUITE = ("XLA_FLAGS", "JAX_COMPILATION_CACHE", "JAX_PERSISTENT_CACHE")


def execute(name, folder, first_cell, *, timeout, as_users=False):
  """Returns the notebook with its outputs; an exception in a cell is raised.

  Args:
    name: Name of the notebook.
    folder: Working folder of the kernel.
    first_cell: Code that runs in the kernel before the cells of the notebook.
    timeout: Seconds that a cell may take.
    as_users: Whether the kernel has the environment of users in place of the suite's.
  """
  notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
  notebook.cells.insert(0, nbformat.v4.new_code_cell(first_cell))
  left_out = OF_THE_SUITE if as_users else ()
  environment = {key: value for key, value in os.environ.items() if not key.startswith(left_out)}
  client = nbclient.NotebookClient(
    notebook, timeout=timeout, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
  )
  client.execute(env={**environment, "PYTHONPATH": PYTHONPATH})
  notebook.cells.pop(0)
  return notebook
