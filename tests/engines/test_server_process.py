"""Servers end with the trainer, whatever happens; what cannot be started is refused, and why."""

import importlib.util
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest

from grpo_jax import engines
from grpo_jax.engines import launching, server_process, sglang_servers
from grpo_jax.engines.server_process import LaunchOptions, ServerError, ServerProcess
from grpo_jax.processes import guard
from tests.engines import tiny
from tests.engines.processes import eventually, is_gone

ROOT = pathlib.Path(__file__).parents[2]
GUARD = guard.__file__
KEY = "a-secret-of-36-letters-and-some-more"

# Says who it is, and starts a daemon that has left its session and its parent.
SERVER = """
import os, signal, sys, time
if os.fork() == 0:
  os.setsid()
  if os.fork() == 0:
    open("daemon", "w").write(str(os.getpid()))
    time.sleep(1000)
  os._exit(0)
os.wait()
while not (os.path.exists("daemon") and open("daemon").read()):
  time.sleep(0.01)
def bye(*_):
  print("bye", flush=True)
  sys.exit(0)
signal.signal(signal.SIGTERM, signal.SIG_IGN if "stubborn" in sys.argv else bye)
print("ready", os.getpid(), open("daemon").read(), flush=True)
time.sleep(1000)
"""


def options(folder, *code, **changes):
  command = (sys.executable, "-c", *code) if code else (sys.executable, "-c", SERVER)
  return LaunchOptions(
    **{
      "python": pathlib.Path("unused"),
      "log_folder": folder / "servers",
      "device": "cpu",
      "command": command,
      "grace_s": 0.5,
      **changes,
    }
  )


@pytest.fixture
def start(tmp_path):
  """Returns a function that starts a stand-in for a server; all are killed in the end."""
  started = []

  def start(*code, key="", index=0, **changes):
    settings = options(tmp_path, *code, **changes)
    started.append(ServerProcess.start(settings, index, tmp_path, 7, key))
    return started[-1]

  yield start
  for server in started:
    server.kill()
    assert server.wait(30.0)


def processes_of(log):
  """Returns the pids of a stand-in and its daemon, once it is ready."""

  def ready():
    text = log.read_text() if log.exists() else ""
    return [line for line in text.splitlines() if line.startswith("ready")]

  return [int(pid) for pid in eventually(ready)[0].split()[1:]]


@pytest.mark.parametrize(
  ("code", "text"),
  [
    ("raise SystemExit(0)", "exited with code 0"),
    ("raise SystemExit(3)", "exited with code 3"),
    ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL"),
    ("import os, signal; os.kill(os.getpid(), signal.SIGABRT)", "killed by SIGABRT"),
  ],
)
def test_server_that_ends_says_how(start, code, text):
  server = start(f"print('first and last', flush=True); {code}")
  assert server.wait(30.0)
  assert not server.is_running
  assert server.exit_text() == text
  *_, said, ending = server.last_lines().splitlines()
  assert said == "first and last"
  assert ending.endswith(text)


def test_last_lines_are_those_of_this_start(start):
  for word in ("once", "twice"):
    server = start(f"print('{word}')")
    assert server.wait(30.0)
  assert "once" in server.log.read_text()
  assert "once" not in server.last_lines()
  assert len(server.last_lines(2).splitlines()) == 2


def test_what_a_dead_server_has_started_is_killed(start):
  server = start()
  main, daemon = processes_of(server.log)
  os.kill(main, signal.SIGKILL)
  assert server.wait(30.0)
  assert is_gone(daemon)
  assert server.exit_text() == "killed by SIGKILL"


def test_terminated_server_may_say_goodbye(start):
  server = start(grace_s=30.0)
  pids = processes_of(server.log)
  server.terminate()
  assert server.wait(25.0)
  assert server.exit_text() == "exited with code 0"
  assert "bye" in server.last_lines().splitlines()
  assert all(map(is_gone, pids))


def test_terminated_server_that_does_not_listen_is_killed_after_the_grace_period(start):
  server = start(SERVER, "stubborn", grace_s=0.5)
  pids = processes_of(server.log)
  began = time.monotonic()
  server.terminate()
  assert server.wait(30.0)
  assert time.monotonic() - began >= 0.4
  assert server.exit_text() == "killed by SIGKILL"
  assert all(map(is_gone, pids))


def test_stopped_server_can_be_killed(start):
  server = start(grace_s=60.0)
  pids = processes_of(server.log)
  for pid in pids:
    os.kill(pid, signal.SIGSTOP)
  server.terminate()  # it cannot hear.
  server.kill()
  assert server.wait(30.0)
  assert all(map(is_gone, pids))


def test_killing_what_has_ended_does_nothing(start):
  server = start("pass")
  assert server.wait(30.0)
  server.kill()
  server.terminate()
  assert server.exit_text() == "exited with code 0"


TRAINER = """
import os, pathlib, sys, time
from grpo_jax.engines.server_process import LaunchOptions, ServerProcess
folder = pathlib.Path(sys.argv[1])
options = LaunchOptions(python=folder, log_folder=folder / "servers", device="cpu", grace_s=0.5,
  command=tuple(sys.argv[3:]), scratch=(folder / "scratch",))
server = ServerProcess.start(options, 0, folder, 1)
log = folder / "servers" / "server_0.log"
while "ready" not in log.read_text().replace("print('ready'", ""):
  time.sleep(0.01)
end = sys.argv[2]
if end == "forks and is killed" and os.fork() == 0:
  time.sleep(15)  # a worker, which still holds the pipe to the guard.
  os._exit(0)
if end == "raises":
  raise ValueError
if end == "os._exit":
  os._exit(1)
time.sleep(1000)
"""


@pytest.mark.long
@pytest.mark.parametrize("end", ["is killed", "forks and is killed", "raises", "os._exit"])
def test_server_ends_with_the_trainer(tmp_path, end):
  (tmp_path / "scratch").mkdir()
  (tmp_path / "scratch" / "weights").write_text("")
  code = SERVER.replace('print("ready"', 'print("rea" + "dy"')  # the log shows the command, too.
  trainer = subprocess.Popen(
    [sys.executable, "-c", TRAINER, str(tmp_path), end, sys.executable, "-c", code, "stubborn"],
    env={**os.environ, "PYTHONPATH": str(ROOT)},
    stderr=subprocess.DEVNULL,
  )
  pids = processes_of(tmp_path / "servers" / "server_0.log")
  guard = psutil.Process(pids[0]).ppid()
  if "killed" in end:
    trainer.kill()
  trainer.wait(30)
  for pid in (*pids, guard):
    eventually(lambda pid=pid: is_gone(pid), timeout_s=10)
  assert not (tmp_path / "scratch").exists()


def test_folders_stay_when_only_one_server_ends(start, tmp_path):
  """The weights in them are those of all servers."""
  (tmp_path / "scratch").mkdir()
  for end in (ServerProcess.terminate, ServerProcess.kill):
    server = start(scratch=(tmp_path / "scratch",))
    end(server)
    assert server.wait(30.0)
    assert (tmp_path / "scratch").exists()


def test_server_does_not_outlive_its_guard(start):
  server = start()
  main, _ = processes_of(server.log)
  psutil.Process(main).parent().kill()
  assert server.wait(30.0)
  eventually(lambda: is_gone(main))
  assert "SIGKILL" in server.exit_text()
  os.kill(processes_of(server.log)[1], signal.SIGKILL)  # only a guard can find a daemon.


def test_log_holds_no_key(start):
  code = (
    "import os, sys, time\n"
    "key = os.environ['GRPO_JAX_SGLANG_API_KEY']\n"
    "print('whole', key)\n"
    "sys.stdout.flush()\n"
    "os.write(1, b'parts ' + key[:9].encode()); time.sleep(0.1); os.write(1, key[9:].encode())\n"
    "print(); sys.stdout.flush()\n"
    "os.write(1, b'y' * 70000 + key[:20].encode()); time.sleep(0.3)\n"
    "os.write(1, key[20:].encode() + b'y' * 70000 + key.encode())"
  )
  server = start(code, key=KEY)
  assert server.wait(30.0)
  log = server.log.read_text()
  assert "whole ***\nparts ***\n" in log
  assert log.count("***") == 4
  assert log.count("y") >= 140_000
  assert KEY[:9] not in log
  assert server.exit_text() == "exited with code 0"


def test_log_moves_when_it_is_full(tmp_path):
  log = tmp_path / "log"
  code = "for i in range(1000): print(f'line {i:04d}')"
  guard = subprocess.Popen(
    [sys.executable, GUARD, "--log", log, "--max-bytes", "4000", "--", sys.executable, "-c", code],
    stdin=subprocess.PIPE,
  )
  with guard.stdin:
    assert guard.wait(30.0) == 0
  assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "log.1"]
  assert log.stat().st_size <= 4000
  assert (tmp_path / "log.1").stat().st_size <= 4000
  lines = [
    line
    for name in ("log.1", "log")
    for line in (tmp_path / name).read_text().splitlines()
    if line.startswith("line")
  ]
  assert len(lines) > 300
  assert lines == [f"line {i:04d}" for i in range(1000 - len(lines), 1000)]


def test_server_sees_its_gpus_its_key_and_nothing_of_the_trainer(start, monkeypatch, tmp_path):
  monkeypatch.setenv("PYTHONPATH", "of-the-trainer")
  monkeypatch.setenv("OMP_NUM_THREADS", "1")
  names = ("CUDA_VISIBLE_DEVICES", "PYTHONPATH", "OMP_NUM_THREADS", "GRPO_JAX_SGLANG_API_KEY")
  code = (
    "import json, os, sys\n"
    f"seen = [os.environ.get(name) for name in {names}]\n"
    "print(json.dumps([*seen, os.getcwd(), sys.argv[1:]]).replace('a-secret', 'the-secret'))"
  )
  server = start(
    code,
    '{"a": {"b": 1}}',
    "{port}",
    "{weight_version}",
    index=1,
    key=KEY,
    device="cuda",
    gpus=(4, 5, 6, 7),
    gpus_per_server=2,
    environment={"OMP_NUM_THREADS": "3"},
  )
  assert server.wait(30.0)
  seen = next(line for line in server.last_lines().splitlines() if line.startswith("[" + '"'))
  arguments = ['{"a": {"b": 1}}', str(server.port), "7"]
  key = KEY.replace("a-secret", "the-secret")
  assert json.loads(seen) == ["6,7", None, "3", key, str(tmp_path / "servers"), arguments]


def test_given_arguments_come_after_those_made_here(tmp_path):
  settings = LaunchOptions(
    python=pathlib.Path("env/bin/python"),
    log_folder=tmp_path,
    device="cpu",
    arguments=("--max-total-tokens", "4096"),
    context_length=512,
    max_running=4,
  )
  command = launching.command_of(settings, 30001, "/model", -1)
  assert command[0] == f"{os.getcwd()}/env/bin/python"
  pairs = dict(zip(command[2::2], command[3::2], strict=False))
  assert pairs["--port"] == "30001"
  assert pairs["--max-total-tokens"] == "2048"
  assert pairs["--weight-version"] == "-1"
  assert command[-3:] == ["--enable-deterministic-inference", "--max-total-tokens", "4096"]


def test_taken_port_is_refused_with_its_owner(start, tmp_path):
  with socket.create_server(("127.0.0.1", 0)) as taken:
    port = taken.getsockname()[1]
    for index, first in ((0, port), (1, port - 1)):
      with pytest.raises(ServerError) as caught:
        start("pass", index=index, port=first)
      assert f"port {port} is taken by process {os.getpid()} " in str(caught.value)
      assert "engine.sglang.port" in str(caught.value)
    with pytest.raises(ServerError, match=f"port {port} is taken"):
      server_process.check(options(tmp_path, port=port - 1), servers=2)
  assert start("pass", port=port).port == port


def test_servers_of_another_process_of_the_host_have_the_gpus_and_ports_before(start):
  settings = {"device": "cuda", "gpus": (4, 5, 6, 7), "environment": {}}
  code = "import os; print('has', os.environ['CUDA_VISIBLE_DEVICES'])"
  server = start(code, index=1, first=5, slot=2, **settings)
  assert server.wait(30.0)
  assert "has 7" in server.last_lines()
  assert server.log.name == "server_6.log"
  with pytest.raises(ServerError, match="2 servers of 1 GPUs, after 3 of other processes on this"):
    server_process.check(options(server.log.parent, slot=3, **settings), servers=2)
  with pytest.raises(ServerError, match="server 6 would listen on port 65536, above 65535"):
    server_process.check(options(server.log.parent, port=65534, slot=1, first=5), servers=2)


def test_free_ports_are_outside_the_range_of_outgoing_connections():
  low, _ = map(int, pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
  ports = {server_process.free_port("127.0.0.1") for _ in range(20)}
  assert len(ports) > 10
  assert max(ports) < low or low < 20000
  for port in ports:
    server_process.check_port("127.0.0.1", port)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"command": None, "python": pathlib.Path("/nowhere/python")}, "install_sglang.sh cpu"),
    ({"command": None, "python": pathlib.Path(sys.executable)}, "no SGLang in the environment"),
    ({"device": "tpu"}, "cuda or cpu, got 'tpu'"),
    ({"device": "cpu", "gpus": (0,)}, "use no GPUs"),
    ({"device": "cuda", "gpus": (0, 1, 2), "gpus_per_server": 2}, "need 4, but gpus lists 3"),
    ({"gpus_per_server": 0}, "at least 1 GPU"),
    ({"host": "0.0.0.0"}, "GRPO_JAX_SGLANG_API_KEY"),
    ({"command": ("run", "{model}")}, "knows {model_path}, {host}, {port}, {weight_version}"),
    ({"command": ("no-such-program", "{port}")}, "no program 'no-such-program'"),
    ({"host": "192.0.2.1", "port": 30000}, "GRPO_JAX_SGLANG_API_KEY"),
    ({"arguments": ("--host=0.0.0.0",)}, "engine.sglang.host"),
    ({"command": ("sh", "-c", "serve --host 0.0.0.0")}, "engine.sglang.host"),
    ({"environment": {"GRPO_JAX_SGLANG_API_KEY": ""}}, "in the environment of the run"),
  ],
)
def test_what_cannot_be_started_is_refused(tmp_path, changes, message):
  with pytest.raises(ServerError) as caught:
    server_process.check(options(tmp_path, **changes), servers=2)
  assert message in str(caught.value)


NOTHING = {"addresses": (), "arguments": (), "command": None, "environment": {}}


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"arguments": ("--host=0.0.0.0",)}, "--host cannot .*: set engine.sglang.host"),
    ({"arguments": ("--host", "0.0.0.0")}, "--host cannot .*: set engine.sglang.host"),
    ({"arguments": ("--host 0.0.0.0",)}, "--host cannot .*: set engine.sglang.host"),
    ({"arguments": ("--log-level", "info", "--hos", "::")}, r"--hos \(short for --host\)"),
    ({"arguments": ("--ho=::",)}, r"--ho \(short for --host\)"),
    ({"arguments": ("--port=1",)}, "set engine.sglang.port"),
    ({"arguments": ("--api-key=KEY",)}, "environment variable GRPO_JAX_SGLANG_API_KEY"),
    ({"arguments": ("--api", "KEY")}, "environment variable GRPO_JAX_SGLANG_API_KEY"),
    ({"arguments": ("--admin-api-key=KEY",)}, "environment variable GRPO_JAX_SGLANG_API_KEY"),
    ({"arguments": ("--config", "f.yaml")}, "list the arguments that the file holds"),
    ({"arguments": ("--dist-init-addr=0.0.0.0:1",)}, "on this host alone"),
    ({"arguments": ("--grpc-mode",)}, "speaks HTTP"),
    ({"arguments": ("--model-path=/m",)}, "set model.path"),
    ({"arguments": ("--model", "/m")}, "set model.path"),
    ({"arguments": ("--device=cpu",)}, "set engine.sglang.device"),
    ({"arguments": ("--dty=float16",)}, "set model.compute_dtype"),
    ({"arguments": ("--max-run=3",)}, "set engine.max_rows"),
    ({"arguments": ("--tp", "2")}, "set engine.sglang.gpus_per_server"),
    ({"arguments": ("--tensor-parallel-size=2",)}, "set engine.sglang.gpus_per_server"),
    ({"arguments": ("--enable-deterministic-inference",)}, "set engine.sglang.deterministic"),
    ({"arguments": ("--enable-memory-saver",)}, "set engine.sglang.release_memory"),
    ({"arguments": ("--log-level", 3)}, "a tuple of strings"),
    ({"arguments": "--host=0.0.0.0"}, "a tuple of strings"),
    ({"command": "serve --host 0.0.0.0"}, "a tuple of strings"),
    ({"command": ("serve", "--host", "0.0.0.0")}, r"listen on 0.0.0.0: write --host {host}"),
    ({"command": ("serve", "--host=::", "{port}")}, r"listen on ::: write --host {host}"),
    ({"command": ("sh", "-c", "exec serve --hos '10.0.0.1'")}, "write --hos {host}"),
    ({"command": ("serve", "--api-key", "KEY")}, "where the command finds it"),
    ({"command": ("sh", "-c", "serve --api-key=KEY")}, "where the command finds it"),
    ({"environment": {"GRPO_JAX_SGLANG_API_KEY": "KEY"}}, "in the environment of the run"),
    ({"addresses": ("http://a:1", "localhost:30000")}, "'http://host:port', got 'localhost:30000'"),
    ({"addresses": ("http://me:KEY@a:1",)}, "without a password"),
    ({"addresses": ("http://a:1/?key=KEY",)}, "without a password"),
    ({"addresses": ("http://a:KEY",)}, "cannot be read"),
  ],
)
def test_options_that_would_go_around_others_are_refused_without_showing_a_key(changes, message):
  (refusal,) = server_process.refusals(**{**NOTHING, **changes})
  assert re.search(message, refusal) and "KEY" not in refusal.replace("API_KEY", "")


def test_other_arguments_commands_and_addresses_are_taken():
  settings = {
    "addresses": ("http://host:30000", "https://[::1]:1", "http://10.0.0.1"),
    "arguments": ("--mem-fraction-static=0.5", "--log-level", "info", "-x", "--", "--host-memory"),
    "command": ("serve", "--host", "{host}", "--port", "{port}", '{"a": {"b": 1}}'),
    "environment": {"OMP_NUM_THREADS": 3},
  }
  assert list(server_process.refusals(**settings)) == []
  assert list(server_process.refusals(**{**settings, "command": ("s", "--host=127.0.0.1")})) == []


@pytest.mark.parametrize("given", [None, "", f" {KEY}\n"])
def test_servers_of_a_run_always_ask_for_a_key(monkeypatch, given):
  monkeypatch.delenv("GRPO_JAX_SGLANG_API_KEY", raising=False)
  if given is not None:
    monkeypatch.setenv("GRPO_JAX_SGLANG_API_KEY", given)
  keys = [sglang_servers.api_key(is_launched=True) for _ in range(2)]
  if given and given.strip():
    assert keys == [KEY, KEY]
  else:
    assert len(set(keys)) == 2 and min(map(len, keys)) >= 32
  assert sglang_servers.api_key(is_launched=False) == (KEY if given else None)


def test_server_of_a_run_on_loopback_gets_a_key_that_no_command_line_shows(monkeypatch, tmp_path):
  monkeypatch.delenv("GRPO_JAX_SGLANG_API_KEY", raising=False)
  code = (
    "import os, time; open('seen.part', 'w').write(os.environ['GRPO_JAX_SGLANG_API_KEY'])\n"
    "os.rename('seen.part', 'seen'); time.sleep(1000)"
  )
  engine = engines.make(
    "sglang",
    config=tiny.config(),
    source_directory=tmp_path,
    workdir=tmp_path,
    weights_folder=str(tmp_path / "weights"),
    device="cpu",
    command=(sys.executable, "-c", code),
  )
  try:
    seen = tmp_path / "servers" / "seen"
    eventually(seen.exists)
    key = seen.read_text()
    assert len(key) >= 32
    lines = [" ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])]
    assert not [line for line in lines if key in line]
  finally:
    engine.close()
  assert key not in (tmp_path / "servers" / "server_0.log").read_text()


def test_log_of_a_server_is_shown_without_what_a_terminal_would_obey(start):
  server = start(r"print('\x1b]0;title\x07 \x9b2J \u202e')")
  assert server.wait(30.0)
  assert all(line.isprintable() for line in server.last_lines().split("\n"))
  assert r"\x1b]0;title\x07" in server.last_lines()


def test_environment_for_the_cpu_is_refused_for_gpus(tmp_path):
  python = tmp_path / "python"
  python.write_text("#!/bin/sh\necho 0.5.23 2.13.0+cpu\n")
  python.chmod(0o755)
  settings = options(tmp_path, command=None, python=python)
  server_process.check(settings, servers=1)
  with pytest.raises(ServerError, match="is for the CPU"):
    server_process.check(options(tmp_path, command=None, python=python, device="cuda"), servers=1)


def load_script(name):
  spec = importlib.util.spec_from_file_location(name, launching.SERVER_SIDE / f"{name}.py")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def murmur3(blocks):
  """MurmurHash3_x86_32 with seed 0 of 32-bit blocks, as published."""
  mask, h = 0xFFFFFFFF, 0
  rotate = lambda x, bits: (x << bits | x >> 32 - bits) & mask
  for block in blocks:
    h ^= rotate(block * 0xCC9E2D51 & mask, 15) * 0x1B873593 & mask
    h = (rotate(h, 13) * 5 + 0xE6546B64) & mask
  h ^= 4 * len(blocks)
  h = (h ^ h >> 16) * 0x85EBCA6B & mask
  h = (h ^ h >> 13) * 0xC2B2AE35 & mask
  return h ^ h >> 16


def test_hash_of_seeds_is_murmur3():
  assert murmur3([int.from_bytes(b"test", "little")]) == 0xBA6BD213  # a published value.
  seeds = [0, 1, 2**32, 2**63 - 1, 2**64 - 1, 0x0123456789ABCDEF]
  positions = [0, 1, 77, 2**31, 5, 6]
  columns = [0, 1, 2, 49151, 151935]
  hashed = load_script("cpu_shims").murmur_hash32(
    np.array(seeds, np.uint64), np.array(positions), np.array(columns)
  )
  expected = [
    [murmur3([seed & 0xFFFFFFFF, seed >> 32, position, column]) for column in columns]
    for seed, position in zip(seeds, positions, strict=True)
  ]
  assert hashed.dtype == np.uint32
  np.testing.assert_array_equal(hashed, expected)


def test_hash_does_not_depend_on_the_rows_beside_it():
  hash_of = load_script("cpu_shims").murmur_hash32
  seeds, positions, columns = np.arange(9, dtype=np.uint64), np.arange(9), np.arange(30_000)
  together = hash_of(seeds, positions, columns)
  for row in range(9):
    alone = hash_of(seeds[row : row + 1], positions[row : row + 1], columns)
    np.testing.assert_array_equal(together[row : row + 1], alone)


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["{model}", "--host", "0.0.0.0"], "GRPO_JAX_SGLANG_API_KEY"),
    (["{model}"], "scripts/install_sglang.sh cpu"),
    (["nowhere"], "no config.json"),
  ],
)
def test_server_by_hand_refuses_with_a_reason(tmp_path, arguments, message):
  (tmp_path / "config.json").write_text("{}")
  environment = {k: v for k, v in os.environ.items() if k != server_process.API_KEY_VARIABLE}
  done = subprocess.run(
    [
      *(sys.executable, ROOT / "scripts" / "serve_sglang.py", "--device", "cpu"),
      *("--python", tmp_path / "none"),
      *(each.format(model=tmp_path) for each in arguments),
    ],
    env=environment,
    capture_output=True,
    text=True,
    timeout=60,
  )
  assert done.returncode == 2
  assert message in done.stderr
  assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ([], "usage"),
    (["tpu"], "usage"),
    (["cpu", "{folder}"], "is no Python environment"),
  ],
)
def test_installation_refuses_with_a_reason(tmp_path, arguments, message):
  (tmp_path / "mine").write_text("")
  done = subprocess.run(
    [ROOT / "scripts" / "install_sglang.sh", *(each.format(folder=tmp_path) for each in arguments)],
    env={**os.environ, "PYTHON": sys.executable},
    capture_output=True,
    text=True,
    timeout=60,
  )
  assert done.returncode == 1
  assert message in done.stderr
  assert (tmp_path / "mine").exists()
