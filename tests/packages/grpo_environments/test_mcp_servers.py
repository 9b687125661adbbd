"""Tools of MCP servers: a real one, and one that dies, hangs, writes garbage or ends badly."""

import asyncio
import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import pytest

from grpo_environments import mcp_servers
from grpo_environments.mcp_servers import McpError
from grpo_jax import environments
from grpo_jax.environments.toolbox.calling import CallLimits, Toolbox
from grpo_jax.types import Prompt

HERE = pathlib.Path(__file__).parent
TROUBLES = [sys.executable, str(HERE / "mcp_troubles.py")]


def needs_mcp():
  return pytest.importorskip("mcp", reason="the package mcp is not installed")


def environment():
  """Variables with which the server's Python finds the package mcp."""
  return {"PYTHONPATH": os.pathsep.join(sys.path)}


@contextlib.contextmanager
def opened(command, **options):
  with contextlib.ExitStack() as stack:
    yield mcp_servers.open_servers({"lib": {"command": command, **options}}, stack)


def calls(tools, *names, timeout_s=5.0, **arguments):
  """Calls tools one after another; returns the texts, and what was counted."""
  box, counts = Toolbox(tools, CallLimits(timeout_s=timeout_s)), Counter()

  async def body():
    return [await box.answer(name, arguments, counts) for name in names]

  return asyncio.run(body()), counts


def is_running(pid):
  """Whether a process exists and is not a zombie."""
  with contextlib.suppress(OSError):
    stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] != "Z"
  return False


def ends(pid, within_s=5.0):
  deadline = time.monotonic() + within_s
  while is_running(pid):
    if time.monotonic() > deadline:
      return False
    time.sleep(0.02)
  return True


@pytest.mark.slow
def test_the_tools_of_a_real_server_are_listed_and_called():
  needs_mcp()
  command = [sys.executable, str(HERE / "mcp_library.py")]
  settings = {"lib": {"command": command, "environment": environment(), "prefix": "lib_"}}
  with environments.make(tool_use={"tools": ("calculator",), "mcp_servers": settings}) as made:
    factory = made["tool_use"]
    declared = {tool["function"]["name"]: tool["function"] for tool in factory.tools}
    assert [*declared] == ["calculator", "lib_year_of", "lib_titles"]
    assert declared["lib_year_of"]["description"].startswith("Returns the year of a book.")
    assert declared["lib_year_of"]["parameters"]["properties"]["title"]["type"] == "string"
    tools = factory.toolbox._tools.values()
    assert calls(tools, "lib_year_of", title="Ulysses")[0] == ["1922"]
    assert calls(tools, "lib_titles", before=1900)[0] == ["Middlemarch"]
    (text,), counts = calls(tools, "lib_year_of", title="Emma")
    assert text.startswith("error: Error executing tool year_of") and counts["tool_errors"] == 1
    (text,), counts = calls(tools, "lib_year_of", title=3)
    assert "title must be a string, got 3" in text and counts["wrong_arguments"] == 1


@pytest.mark.slow
def test_a_server_that_dies_is_started_again_and_all_its_processes_end(tmp_path):
  needs_mcp()
  log = tmp_path / "log"
  with opened(TROUBLES, log=str(log)) as tools:
    assert len(tools) == 9  # of two pages.
    (first, child, died, second), counts = calls(tools, "pid", "child", "die", "pid")
    assert died == "error: the server of this tool has ended" and counts["tool_errors"] == 1
    assert first != second and ends(first) and ends(child) and is_running(second)
    texts, _ = calls(tools, "error", "parts", "garbage", "pid")
    assert texts == ["error: error", "a\n[image: not text]", "garbage", second]
    (child,), _ = calls(tools, "child")
  assert ends(second, 0) and ends(child, 0)
  assert log.read_text() == "no more\n"


@pytest.mark.slow
def test_a_server_that_hangs_costs_its_calls_only(monkeypatch):
  needs_mcp()
  monkeypatch.setattr(mcp_servers, "_PING_S", 0.2)
  with opened(TROUBLES) as tools:
    (muted, first), counts = calls(tools, "mute", "pid", timeout_s=0.5)
    assert muted == "error: mute: no result within 0.5 s" and counts["tool_timeouts"] == 1
    (hung,), _ = calls(tools, "hang", timeout_s=0.5)
    assert hung == "error: hang: no result within 0.5 s"
    (second,), _ = calls(tools, "pid", timeout_s=20.0)
    assert first.isdigit() and second.isdigit() and second != first and ends(first)
    calls(tools, "hang", timeout_s=0.3)
  assert ends(second, 0)


@pytest.mark.slow
def test_a_result_is_not_matched_with_a_regular_expression_of_the_server():
  needs_mcp()
  with opened(TROUBLES) as tools:
    texts, _ = calls(tools, "pattern", "pid")
  assert texts[0] == "matched" and texts[1].isdigit()


@pytest.mark.slow
def test_servers_that_cannot_start_are_refused_with_the_reason(tmp_path):
  needs_mcp()
  log = tmp_path / "log"
  for command, reason in {
    ("/nowhere/server",): "MCP server 'lib' .*/nowhere/server.* cannot be used",
    (*TROUBLES, "dies"): f"cannot be used: .*; its standard error is in {log}",
    (*TROUBLES, "mute"): "did not list its tools within 0.8 s",
    (*TROUBLES, "garbage"): "did not list its tools within 0.8 s",
  }.items():
    with pytest.raises(McpError, match=reason):
      with opened(list(command), log=str(log), start_timeout_s=0.8):
        pass
  assert "No such file or directory" in log.read_text() and "no licence" in log.read_text()
  with pytest.raises(McpError, match="'lib' has no tool 'pit' .did you mean 'pid'"):
    with opened(TROUBLES, tools=["pit"]):
      pass
  assert not [thread for thread in os.listdir("/proc/self/task") if is_mcp(thread)]


def is_mcp(thread):
  with contextlib.suppress(OSError):
    return pathlib.Path(f"/proc/self/task/{thread}/comm").read_text().startswith("mcp ")
  return False


RUN = """
import contextlib, sys, time
from tests.packages.grpo_environments import test_mcp_servers as t
with t.opened(t.TROUBLES) as tools:
  print(*t.calls(tools, "pid", "child")[0], flush=True)
  time.sleep(100)
"""


@pytest.mark.slow
def test_a_killed_run_leaves_no_process():
  needs_mcp()
  run = subprocess.Popen(
    [sys.executable, "-c", RUN],
    stdout=subprocess.PIPE,
    env={**os.environ, **environment()},
    text=True,
  )
  assert run.stdout is not None
  server, child = run.stdout.readline().split()
  assert is_running(server) and is_running(child)
  run.send_signal(signal.SIGKILL)
  run.wait()
  run.stdout.close()
  assert ends(server) and ends(child)


def listing(monkeypatch, *names):
  """Has servers list tools of these names, without a process."""
  needs_mcp()

  async def listed(server):
    return [{"name": name, "description": "", "parameters": {}} for name in names]

  monkeypatch.setattr(mcp_servers._McpServer, "_list", listed)


def test_two_tools_of_one_name_are_refused(monkeypatch):
  listing(monkeypatch, "pid", "other", "pid")
  with pytest.raises(McpError, match="'lib' lists 2 tools named 'pid', and a call could mean any"):
    with opened(TROUBLES):
      pass
  with opened(TROUBLES, tools=["other"]) as tools:
    assert [tool.name for tool in tools] == ["other"]
  listing(monkeypatch, "calculator")
  settings = {"tools": ("calculator",), "mcp_servers": {"lib": {"command": TROUBLES}}}
  with pytest.raises(ValueError, match="two tools have the name 'calculator'; .*setting `prefix`"):
    environments.make(tool_use=settings)
  settings["mcp_servers"]["lib"]["prefix"] = "lib_"
  with environments.make(tool_use=settings) as made:
    names = [tool["function"]["name"] for tool in made["tool_use"].tools]
    assert names == ["calculator", "lib_calculator"]
    twice = Prompt(
      "a:0", np.zeros(1, np.int32), "tool_use", tools=(*made["tool_use"].tools[:1],) * 2
    )
    with pytest.raises(ValueError, match="a:0: its row declares 2 tools named 'calculator'"):
      made["tool_use"](twice)


def test_what_a_server_says_is_one_line_of_printable_characters(monkeypatch):
  listing(monkeypatch, "a\x1b[2J\nb")
  with pytest.raises(McpError) as caught:
    with opened(TROUBLES, tools=["c"]):
      pass
  assert "there are: a\\x1b[2J b" in str(caught.value) and str(caught.value).isprintable()
  with pytest.raises(McpError, match="the MCP server 'lib': the name of a tool is letters"):
    with opened(TROUBLES):
      pass
  monkeypatch.undo()

  async def fails(server):
    raise RuntimeError("2 validation errors\n  Input should be\x1b[0m a string")

  monkeypatch.setattr(mcp_servers._McpServer, "_connected", fails)
  with pytest.raises(McpError, match="2 validation errors Input should be.* a string;") as caught:
    with opened(TROUBLES):
      pass
  assert str(caught.value).isprintable()


@pytest.mark.parametrize(
  ("settings", "reason"),
  [
    ({"comand": ["x"]}, "mcp_servers.lib takes no 'comand' .did you mean 'command'"),
    ({}, "mcp_servers.lib needs command"),
    ({"command": "server --fast"}, "mcp_servers.lib.command must be a list that"),
    ({"command": []}, "mcp_servers.lib.command must be a list that"),
    ({"command": ["x"], "start_timeout_s": 0}, "mcp_servers.lib.start_timeout_s must be"),
    ("server", "mcp_servers.lib must be a mapping of settings"),
  ],
)
def test_settings_of_servers_are_checked(settings, reason):
  with pytest.raises(ValueError, match=reason):
    environments.make(tool_use={"mcp_servers": {"lib": settings}})


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
  monkeypatch.setitem(sys.modules, "mcp", None)
  with pytest.raises(McpError, match=r"need the package mcp: pip install 'grpo-jax\[mcp\]'"):
    with opened(TROUBLES):
      pass
