"""A real SGLang server for tests: its interpreter, a tiny model for it, engines that use it.

Its tokenizer writes one letter for each id, so that texts are those of the other engines' tests.
"""

import asyncio
import json
import os
import pathlib

import numpy as np
import psutil
from tokenizers import Tokenizer, decoders, models

from grpo_jax import engines
from grpo_jax.engines.server_process import LaunchOptions, ServerProcess
from grpo_jax.models import export
from tests.engines import tiny

ROOT = pathlib.Path(__file__).parents[2]
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
MAX_LENGTH = tiny.config().max_position_embeddings


def decode(ids):
  return "".join(LETTERS[i] for i in ids)


def server_python():
  """Returns the interpreter of the server's environment.

  Tests that need a server run on purpose only: without one they fail, and are not skipped.
  """
  python = pathlib.Path(os.environ.get("SGLANG_PYTHON", ROOT / ".venv-sglang" / "bin" / "python"))
  assert python.exists(), f"no server environment at {python}: `make sglang-cpu`, or SGLANG_PYTHON"
  return python


def write_model(folder, *, seed=0, config=None):
  """Writes the tiny model of these tests, or one of another config, as a Hugging Face folder."""
  config = config or tiny.config()
  export.to_huggingface(tiny.params(config, seed), config, folder)
  vocabulary = {letter: i for i, letter in enumerate(LETTERS[: tiny.VOCABULARY])}
  tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
  tokenizer.decoder = decoders.Fuse()
  tokenizer.save(str(folder / "tokenizer.json"))
  settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
  (folder / "tokenizer_config.json").write_text(json.dumps(settings))
  return folder


def launch_options(log_folder, **changes):
  return LaunchOptions(
    **{
      "python": server_python(),
      "log_folder": log_folder,
      "device": "cpu",
      "max_running": 64,
      "context_length": MAX_LENGTH,
      **changes,
    }
  )


def start(model, log_folder, *, key="", **changes):
  """Starts a server that no engine owns, for `attach`."""
  return ServerProcess.start(launch_options(log_folder, **changes), 0, model, -1, key)


def make(model, workdir, *, version=3, seed=0, config=None, **settings):
  """Returns an engine with weights: of a server that it launches, or of given `addresses`."""
  engine = engines.make(
    "sglang",
    config=config or tiny.config(),
    source_directory=model,
    workdir=workdir,
    **{
      "python": str(server_python()),
      "device": "cpu",
      "weights_folder": str(workdir / "weights"),
      "start_timeout_s": 280.0,
      **settings,
    },
  )
  try:
    if version is not None:
      engine.load_weights(tiny.params(tiny.config(), seed), version=version)
  except BaseException:
    engine.close()
    raise
  return engine


def collect(engine, requests, *, after_first=lambda: None):
  """Returns the generations of one call by the request's id; fails if one comes twice.

  Args:
    engine: that generates.
    requests: of the call.
    after_first: called when the first generation has come.
  """

  async def all_of():
    found = []
    async for generation in engine.generate(requests):
      found.append(generation)
      if len(found) == 1:
        after_first()
    return found

  found = asyncio.run(all_of())
  ids = [generation.request_id for generation in found]
  assert len(set(ids)) == len(ids), f"came twice: {sorted(i for i in ids if ids.count(i) > 1)}"
  return dict(zip(ids, found, strict=True))


def check(generations, requests, *, version=3, seed=0):
  """Checks that each completion is there, of the one version, and the model's own."""
  assert generations.keys() == {r.request_id for r in requests}
  tree = tiny.params(tiny.config(), seed)
  for request in requests:
    generation = generations[request.request_id]
    assert set(generation.weight_versions.tolist()) == {version}
    ids = generation.token_ids
    wanted = tiny.model_logprobs(tiny.config(), tree, request.prompt_ids, ids)
    np.testing.assert_allclose(generation.logprobs, tiny.of_tokens(wanted, ids), atol=1e-4)


def processes_in(folder, title=""):
  """Returns the processes of servers whose log folder this is; `title`: a part of their names."""
  found = []
  for process in psutil.process_iter():
    try:
      if process.cwd() == str(folder) and title in " ".join(process.cmdline()):
        found.append(process)
    except psutil.Error:
      continue  # it ended meanwhile.
  return found
