"""A fake SGLang server: counts what it is asked, and computes its logprobs from the weights.

python fake_sglang.py PORT FAULT, in the folder of its log. FAULT: "none", "stale" (it keeps the
first weights that it was given), "broken" (it ends at once), "late" (it answers after a minute).
"""

import collections
import json
import pathlib
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

EMBEDDING = "model.embed_tokens.weight"


def logprobs(embedding, ids, adapter=0.0):
  """Returns a made-up logprob of each id but the first, which depends on the weights.

  Args:
    embedding: Embedding of the model.
    ids: Ids of the prompt.
    adapter: Value of the adapter, see `Server.load_adapter`.
  """
  return -np.abs(np.asarray(embedding, np.float64)[np.asarray(ids)[1:]].sum(-1)) - adapter


class Server(ThreadingHTTPServer):
  """State of the server."""

  daemon_threads = True
  request_queue_size = 128

  def __init__(self, port, fault):
    super().__init__(("127.0.0.1", port), Handler)
    self.version, self.embedding, self.fault = "default", None, fault
    self.adapters = {}  # name → (folder, value).
    self.asked = collections.Counter()
    self.busy, self.most_busy = 0, 0
    self.lock = threading.Lock()

  def load(self, folder, version):
    import safetensors.numpy

    found = {}
    for file in sorted(pathlib.Path(folder).glob("*.safetensors")):
      found |= safetensors.numpy.load_file(file)
    index = pathlib.Path(folder) / "model.safetensors.index.json"
    if index.exists():
      assert sorted(json.loads(index.read_text())["weight_map"]) == sorted(found)
    if self.embedding is None or self.fault != "stale":
      self.embedding = found[EMBEDDING]
    self.version = version

  def load_adapter(self, name, folder):
    """Loads an adapter, whose value is the largest one in B of the queries."""
    import safetensors.numpy

    if name in self.adapters:
      raise ValueError(f"Failed to load LoRA adapter {name} because it is already loaded")
    found = safetensors.numpy.load_file(pathlib.Path(folder) / "adapter_model.safetensors")
    values = [np.abs(found[key]).max() for key in found if key.endswith("q_proj.lora_B.weight")]
    self.adapters[name] = (folder, float(max(values)))

  def listed(self):
    """Returns the answer to /v1/models."""
    own = [{"id": name, "root": root, "parent": "m"} for name, (root, _) in self.adapters.items()]
    return {"data": [{"id": "m", "root": "m", "parent": None}, *own]}


class Handler(BaseHTTPRequestHandler):
  """Answers as SGLang 0.5.23 does."""

  protocol_version = "HTTP/1.1"
  server: Server

  def do_GET(self):
    with self.server.lock:
      self.server.asked[self.path] += 1
    answers = {
      "/asked": dict(self.server.asked) | {"most": self.server.most_busy},
      "/server_info": {"enable_lora": True, "max_lora_rank": 4, "dp_size": 1},
      "/v1/models": self.server.listed(),
    }
    self._answer(answers.get(self.path, {"weight_version": self.server.version}))

  def do_POST(self):
    server = self.server
    body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
    if self.path == "/update_weights_from_disk" and not body:
      self._answer({"success": False, "message": "no model_path"}, 400)
      return
    with server.lock:
      server.asked[self.path] += 1
    if self.path == "/update_weights_from_disk":
      server.load(body["model_path"], body["weight_version"])
      self._answer({"success": True, "message": ""})
    elif self.path == "/load_lora_adapter":
      server.load_adapter(body["lora_name"], body["lora_path"])
      self._answer({"success": True})
    elif self.path == "/unload_lora_adapter":
      del server.adapters[body["lora_name"]]
      self._answer({"success": True})
    elif self.path == "/generate":
      with server.lock:
        server.busy += 1
        server.most_busy = max(server.most_busy, server.busy)
      answer = self._generated(body)
      with server.lock:
        server.busy -= 1
      self._answer(answer)
    else:
      self._answer(None)

  def _generated(self, body):
    ids, params = body["input_ids"], body["sampling_params"]
    meta = {
      "id": body["rid"],
      "finish_reason": {"type": "length"},
      "prompt_tokens": len(ids),
      "weight_version": self.server.version,
    }
    if body.get("logprob_start_len") == 0:
      _, adapter = self.server.adapters.get(body.get("lora_path"), (None, 0.0))
      values = [None, *logprobs(self.server.embedding, ids, adapter).tolist()]
      meta["input_token_logprobs"] = [[v, i, None] for v, i in zip(values, ids, strict=True)]
    n = params["max_new_tokens"]
    sampled = [(params.get("sampling_seed", 0) + i) % 50 for i in range(n)]
    meta |= {"completion_tokens": n, "output_token_logprobs": [[-1.0, i, None] for i in sampled]}
    return {"text": "", "output_ids": sampled, "meta_info": meta}

  def _answer(self, content, status=200):
    data = json.dumps(content).encode()
    self.send_response(status)
    self.send_header("Content-Type", "application/json")
    self.send_header("Content-Length", str(len(data)))
    self.end_headers()
    self.wfile.write(data)

  def log_message(self, *arguments):
    pass


def serve(port, fault):
  if fault == "broken":
    raise SystemExit("this host has no model")
  if fault == "late":
    time.sleep(60)
  Server(port, fault).serve_forever()


if __name__ == "__main__":
  serve(int(sys.argv[1]), sys.argv[2])
