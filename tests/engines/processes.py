"""Waiting for processes, in tests."""

import time

import psutil


def eventually(condition, *, timeout_s=60.0, every_s=0.02):
  """Returns the first true value of `condition()`; fails if there is none in time."""
  deadline = time.monotonic() + timeout_s
  while not (value := condition()):
    assert time.monotonic() < deadline, "it did not happen in time"
    time.sleep(every_s)
  return value


def is_gone(pid):
  """Whether a process has ended, reaped by its parent or not."""
  try:
    return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
  except psutil.NoSuchProcess:
    return True
