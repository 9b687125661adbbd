"""The page that renews itself: it follows the run folder, and answers nobody but this machine."""

import contextlib
import fcntl
import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import urllib.parse
from pathlib import Path

import chromium
import fake_run
import pytest
from rich.console import Console

from grpo_jax import report
from grpo_jax.commands import cli
from grpo_jax.report import run_data, watching
from grpo_jax.run_folder import console, folder_lock


def add_step(folder: Path, step: int) -> None:
  with open(folder / "metrics.jsonl", "a") as file:
    file.write(json.dumps({"step": step, "rollout/reward_mean": step / 8}) + "\n")


@pytest.fixture
def folder(tmp_path):
  """A run folder of one step."""
  (tmp_path / "config.json").write_text('{"total_steps": 5}')
  add_step(tmp_path, 0)
  return tmp_path


@contextlib.contextmanager
def working_in(folder):
  with open(folder / folder_lock.LOCK, "w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    yield


def asked(url, path=None, method="GET", **headers):
  """Status, headers and content of an answer."""
  place = urllib.parse.urlsplit(url)
  connection = http.client.HTTPConnection(place.hostname, place.port, timeout=10)
  with contextlib.closing(connection):
    path = place.path if path is None else path
    connection.request(method, path, headers={n.replace("_", "-"): v for n, v in headers.items()})
    answer = connection.getresponse()
    return answer.status, answer.headers, answer.read().decode()


@pytest.fixture
def rendered(monkeypatch):
  """What was rendered, as it comes."""
  found, render = [], report.render
  monkeypatch.setattr(report, "render", lambda *a, **k: found.append(render(*a, **k)) or found[-1])
  return found


def unhurried(folder):
  """A run whose page may be rendered again at once."""
  return watching.WatchedRun(folder, clock=lambda: 0.0)


def test_the_page_is_sent_and_rendered_again_only_if_the_run_has_changed(folder, rendered):
  with watching.serving(unhurried(folder)) as url:
    status, headers, text = asked(url)
    assert (status, headers["ETag"][0]) == (200, '"') and text == rendered[0]
    for _ in range(2):
      assert asked(url, If_None_Match=headers["ETag"])[::2] == (304, "")
    assert len(rendered) == 1
    add_step(folder, 1)
    status, newer, text = asked(url, If_None_Match=headers["ETag"])
    assert status == 200 and newer["ETag"] != headers["ETag"] and text == rendered[1]
    with working_in(folder):
      assert "Live: " in asked(url, If_None_Match=newer["ETag"])[2]
  assert "fetch(" not in report.render(run_data.load(folder))
  assert [path.name for path in folder.glob("*.html")] == []


def test_a_page_that_takes_long_is_rendered_less_often(folder, rendered):
  now = 0.0

  def clock():
    nonlocal now
    now += 1.0  # so a rendering takes a second.
    return now

  run = watching.WatchedRun(folder, clock=clock)
  first = run.page()
  add_step(folder, 1)
  assert [run.page() for _ in range(8)] == 8 * [first] and len(rendered) == 1
  now += 1.0
  assert run.page() != first and len(rendered) == 2


def test_half_a_line_is_a_problem_only_if_nobody_writes_the_other_half(folder):
  with open(folder / "metrics.jsonl", "a") as file:
    file.write('{"step": 1, "rollout/rew')
  problem = "lines [2] could not be read"
  with working_in(folder):
    assert problem not in watching.WatchedRun(folder).page().content.decode()
  assert problem in watching.WatchedRun(folder).page().content.decode()


@pytest.mark.parametrize(
  "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[::1]:80"]
)
def test_another_name_of_this_machine_is_refused(folder, host, rendered):
  with watching.serving(unhurried(folder)) as url:
    status, _, text = asked(url, Host=host)
    assert status == 403 and text.startswith("only 127.0.0.1")
    assert asked(url, Host="localhost:9000")[0] == 200  # a port that ssh forwards.
  assert len(rendered) == 1


@pytest.mark.parametrize("path", ["/", "{}metrics.jsonl", "{}../config.json", "/..{}%2e%2e/etc"])
def test_only_the_printed_path_is_answered_and_none_names_a_file(folder, path):
  with watching.serving(unhurried(folder)) as url, watching.serving(unhurried(folder)) as other:
    own = urllib.parse.urlsplit(url).path
    status, _, text = asked(url, path.format(own))
    assert status == 404 and text.startswith("the page is at the URL that")
    assert len(own) > 20 and asked(other, own)[0] == 404


def test_nothing_can_be_written_and_other_sites_can_neither_embed_nor_read_it(folder):
  with watching.serving(unhurried(folder)) as url:
    for method in ("POST", "PUT", "DELETE"):
      assert asked(url, method=method)[0] == 501
    status, headers, text = asked(url, method="HEAD")
    assert (status, text) == (200, "") and int(headers["Content-Length"]) > 1000
    assert headers["Content-Security-Policy"] == "frame-ancestors 'none'"
    assert "Access-Control-Allow-Origin" not in headers
    address = urllib.parse.urlsplit(url).hostname
  assert address == "127.0.0.1"


def test_a_folder_that_has_gone_is_said_on_the_page(folder):
  with watching.serving(unhurried(folder)) as url:
    (folder / "metrics.jsonl").unlink()
    (folder / "config.json").unlink()
    assert asked(url)[0] == 503 and "a run folder is needed" in asked(url)[2]


def test_the_terminal_says_where_the_page_is_and_when_the_run_ends(folder):
  lines, working = [], contextlib.ExitStack()
  working.enter_context(working_in(folder))
  looks = iter([working.close, lambda: None, lambda: working.enter_context(working_in(folder))])

  def wait(seconds):
    next(looks, lambda: None)()
    return len(lines) == 3

  watching.watch(folder, say=lines.append, wait=wait)
  working.close()
  assert lines[0].startswith("report: http://127.0.0.1:")
  assert lines[1:] == [
    "no process works in the run folder: the run has ended",
    "the run continues",
  ]


def test_a_run_begins_while_it_is_asked_whether_one_works_there(tmp_path):
  tmp_path.joinpath(folder_lock.LOCK).write_text("")
  asking = open(tmp_path / folder_lock.LOCK)
  fcntl.flock(asking, fcntl.LOCK_SH)  # in the middle of the question.
  threading.Timer(0.03, asking.close).start()
  with folder_lock.claimed(tmp_path):
    assert folder_lock.is_in_use(tmp_path)
  assert not folder_lock.is_in_use(tmp_path)
  assert not folder_lock.is_in_use(tmp_path / "nowhere")


@pytest.mark.parametrize(
  "words, code, message",
  [
    (["nowhere", "--watch"], 1, "a run folder is needed, but nowhere does not exist"),
    (["gs://bucket/run", "--watch"], 1, "RUN=gs://bucket/run: only paths of this machine"),
    ([".", "--watch"], 1, "a run folder is needed, but . has none of config.json"),
    ([".", "--port=8000"], 2, "--port is the port of --watch, which is missing"),
    ([".", "--watch", "--port=70000"], 2, "--port needs a number below 65536, got 70000"),
  ],
)
def test_mistakes_are_one_line(words, code, message, capsys, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert cli.run(["report", *words]) == code
  printed = capsys.readouterr()
  assert printed.err.startswith(f"error: {message}") and printed.err.count("\n") == 1
  assert not printed.out and not any(tmp_path.iterdir())


def test_a_port_in_use_is_one_line(folder, capsys):
  with socket.create_server(("127.0.0.1", 0)) as other:
    port = other.getsockname()[1]
    assert cli.run(["report", str(folder), "--watch", f"--port={port}"]) == 1
  assert (
    capsys.readouterr().err == f"error: cannot listen on 127.0.0.1:{port}: Address already in use\n"
  )


@pytest.mark.long
def test_ctrl_c_ends_it_cleanly(folder):
  command = [sys.executable, "-m", "grpo_jax", "report", str(folder), "--watch"]
  with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as made:
    url = made.stdout.readline().split()[1]
    assert asked(url)[0] == 200
    made.send_signal(signal.SIGINT)
    assert made.wait(20) == 0 and made.stderr.read() == ""


@pytest.mark.long
@pytest.mark.skipif(chromium.found() is None, reason="there is no Chromium on this machine")
def test_a_browser_shows_new_steps_and_stays_where_its_reader_is(tmp_path):
  """The group that was chosen, the place on the page and the hidden curves survive new steps."""
  quiet = console.TrainingScreen(Console(quiet=True))
  folder = fake_run.make_run(tmp_path / "run", steps=30, screen=quiet, sinks=("jsonl",))
  metrics = folder / "metrics.jsonl"
  lines, files = metrics.read_text().splitlines(True), sorted(folder.glob("rollouts/*"))
  aside = {path: path.read_bytes() for path in files[10:]}

  def write(steps):
    for path, content in list(aside.items())[: steps - 10]:
      path.write_bytes(content)
    metrics.write_text("".join(line for line in lines if json.loads(line)["step"] < steps))

  for path in aside:
    path.unlink()
  write(10)
  chosen = "document.querySelector('.chips [aria-pressed=true]').textContent"
  hidden = "document.querySelector('.legend [aria-pressed=false]').textContent"
  top = "document.getElementById('browser').getBoundingClientRect().top"
  step = "document.querySelector('[aria-label=step]').selectedOptions[0].textContent"
  points = "DATA.panels[0].series[0].x.length"
  with watching.serving(watching.WatchedRun(folder)) as url, chromium.tab() as tab:
    tab.resize(1400, 900)
    tab.open(url)
    assert tab.value(step) == "step 9" and tab.value(points) == 10
    with working_in(folder):
      write(11)
      tab.wait(f"{points} === 11")
    assert tab.value(step) == "step 10"  # nothing was chosen: the newest.
    tab.value("document.querySelectorAll('.chips button')[3].click()")
    tab.value("document.querySelector('.legend button').click()")
    tab.value("document.documentElement.style.overflowAnchor = 'none'")  # as in Safari.
    tab.value("document.getElementById('browser').scrollIntoView(); scrollBy(0, 300)")
    read, place = [tab.value(each) for each in (chosen, hidden, step)], tab.value(top)
    tab.value("window.card = document.querySelector('.rollout'); 0")
    lines[-1] = lines[-1].replace("{", '{"rollout/errors/timeout": 3, ', 1)  # a note, at the top.
    write(30)
    tab.wait(f"{points} === 30")
    assert [tab.value(each) for each in (chosen, hidden, step)] == read
    assert abs(tab.value(top) - place) < 2  # pixels.
    assert tab.value("window.card.isConnected")  # so what was selected in it still is.
    assert tab.value("document.querySelectorAll('[aria-label=step] option').length") >= 24
    assert tab.value("document.getElementById('live').textContent").startswith("The run has ended")
    tab.resize(390, 844, dark=True)
    assert tab.value("document.documentElement.scrollWidth") <= 390
