"""Notices of processes other than the main one: their file, and what the main one shows."""

import logging

import pytest

from grpo_jax.run_folder import notices, process_log
from tests import side_by_side

W, E = logging.WARNING, logging.ERROR


@pytest.fixture
def process_1(monkeypatch):
  """Makes this process 1 of 2."""
  process_log.take()  # of earlier tests.
  process_log._pending.clear()
  side_by_side.pretend(monkeypatch, 1)
  yield
  process_log.take()
  process_log._pending.clear()


def test_another_process_writes_to_its_file_and_prints_nothing(process_1, tmp_path, capsys):
  log = logging.getLogger("grpo_jax.environments.function")
  with notices.for_program():
    log.warning("before there is a folder")
    with process_log.in_folder(tmp_path):
      log.info("devices: %d", 4)
      try:
        raise OSError("no such grader")
      except OSError:
        log.exception("a grader failed")
    log.info("after the run")
  assert capsys.readouterr().out == ""
  head, *lines = (tmp_path / "processes" / "001.log").read_text().splitlines()
  assert head.startswith("--- process 1 of 2 on ")
  said = [line[20:] for line in lines[:3]]
  assert said == ["warning: before there is a folder", "devices: 4", "error: a grader failed"]
  assert lines[3].startswith("Traceback") and lines[-1] == "OSError: no such grader"
  passed = process_log.take()
  assert [(level, text.splitlines()[0]) for level, text in passed] == [
    (W, "before there is a folder"),
    (E, "a grader failed"),
  ]
  assert process_log.take() == []


def test_a_run_that_continues_adds_to_the_file(process_1, tmp_path):
  for text in ("one", "two"):
    with process_log.in_folder(tmp_path):
      process_log.add(W, text)
  lines = (tmp_path / "processes" / "001.log").read_text().splitlines()
  assert [line[20:] for line in lines if not line.startswith("---")] == [
    "warning: one",
    "warning: two",
  ]


def test_the_main_process_of_several_has_no_file(process_1, tmp_path, monkeypatch):
  side_by_side.pretend(monkeypatch, 0)
  with process_log.in_folder(tmp_path):
    process_log.add(W, "the disk is almost full")
  assert not process_log._pending and not list(tmp_path.iterdir())


def test_a_single_process_has_no_file_and_keeps_nothing(tmp_path):
  with process_log.in_folder(tmp_path):
    process_log.add(W, "the disk is almost full")
  assert process_log.take() == [] and not list(tmp_path.iterdir())


def test_a_flood_is_counted(process_1):
  for number in range(50):
    process_log.add(W, f"row {number} is broken")
  passed = process_log.take()
  assert len(passed) == 21
  assert passed[-1] == (W, "30 more notices are only in processes/")


HOSTS = [f"h{number}" for number in range(64)]


def test_the_same_notice_of_many_processes_is_one_line():
  merged = process_log.Merged()
  assert merged.lines(HOSTS, [[], *[[(W, "the grader is slow")]] * 63]) == [
    (W, "63 processes of 64, such as 1 (h1): the grader is slow")
  ]
  assert merged.lines(HOSTS, [[], *[[(W, "the grader is slow")]] * 63]) == []


def test_who_said_it_is_named():
  said = [[], [(W, "a")], [(W, "a"), (E, "b")], [(W, "a")]]
  assert process_log.Merged().lines(HOSTS[:4], said) == [
    (W, "processes 1, 2 and 3 of 4: a"),
    (E, "process 2 of 4 (h2): b"),
  ]


def test_what_the_main_process_says_itself_is_not_repeated():
  merged = process_log.Merged()
  assert merged.lines(HOSTS[:2], [[(W, "a")], [(W, "a")]]) == []
  assert merged.lines(HOSTS[:2], [[], [(W, "a")]]) == []


def test_many_notices_are_cut_and_errors_come_first():
  said = [[], [(W, f"w{number}") for number in range(8)] + [(E, "broken")]]
  lines = process_log.Merged().lines(HOSTS[:2], said)
  assert len(lines) == 6
  assert lines[0] == (E, "process 1 of 2 (h1): broken")
  assert lines[-1] == (W, "4 more notices of other processes are in processes/*.log")
