"""A compilation is noticed while it is under way, and explained once if it takes long."""

import threading

import jax
import jax.numpy as jnp
import pytest

from grpo_jax.compilation import compiling


@pytest.fixture
def now():
  return [100.0]


@pytest.fixture
def watch(now):
  return compiling.CompilationMonitor(clock=lambda: now[0])


@pytest.fixture
def cache_folder():
  """Function that names the folder of compiled programs."""
  before = jax.config.jax_compilation_cache_dir
  yield lambda folder: jax.config.update("jax_compilation_cache_dir", folder and str(folder))
  jax.config.update("jax_compilation_cache_dir", before)


def begin():
  jax.monitoring.record_scalar(compiling.EVENT, 0.0, fun_name="f")


def end():
  jax.monitoring.record_event_duration_secs(compiling.EVENT, 1.0, fun_name="f")


def test_jax_announces_a_compilation_before_it_begins_and_when_it_ended(watch, now):
  notes = []

  def look(event, *_, **__):
    now[0] += 12.0
    if event == compiling.EVENT:
      notes.append(watch.note())

  with watch.listening():
    jax.monitoring.register_scalar_listener(look)
    try:
      jax.jit(lambda x: x * 3 + 1)(jnp.ones(7)).block_until_ready()
    finally:
      jax.monitoring.unregister_scalar_listener(look)
    assert "a program, 12 s" in notes
    assert watch.note() == ""


def test_the_note_is_of_the_longest_compilation_of_all_threads(watch, now):
  with watch.listening():
    begin()
    assert watch.note() == ""  # not yet worth a word.
    now[0] += 10.0
    other = threading.Thread(target=begin)
    other.start()
    other.join()
    now[0] += 2.0
    assert watch.note() == "a program, 12 s"
    end()
    assert watch.note() == "a program, 2 s"
  assert watch.note() == ""


def test_the_bar_counts_what_was_read_from_the_cache_and_what_was_compiled(watch, now):
  def job(name, *, is_kept):
    with watch.naming(name):
      begin()
      now[0] += 12.0
      noted = watch.note()
      if is_kept:
        jax.monitoring.record_event(compiling.HIT)
      end()
    return noted

  with watch.listening():
    begin()
    end()  # of no job, such as an addition: it is not one of the programs.
    assert job("score", is_kept=True) == "score, 12 s"
    assert job("watch", is_kept=True) == "1 cached; watch, 12 s"
    assert job("update", is_kept=False) == "2 cached; update, 12 s"
    assert job("drift", is_kept=False) == "2 cached, 1 compiled; drift, 12 s"


def test_other_events_are_not_compilations(watch, now):
  with watch.listening():
    jax.monitoring.record_scalar("/jax/some/other", 0.0)
    now[0] += 60.0
    assert watch.note() == ""


def explained(watch):
  """Has a program take longer than the patience."""
  begin()
  for timer in list(watch._patience.values()):
    timer.join(10)
  end()


def test_a_long_compilation_is_explained_once(watch, monkeypatch, noticed, tmp_path, cache_folder):
  monkeypatch.setattr(compiling, "PATIENCE_S", 0.0)
  cache_folder(tmp_path)
  with watch.listening():
    explained(watch)
    begin()
    end()
  (line,) = noticed
  assert line.startswith("compiling;") and f"The programs are kept in {tmp_path}: later" in line


def test_where_programs_were_kept_the_wait_is_not_called_a_compilation_before_one_ended(
  watch, monkeypatch, noticed, tmp_path, cache_folder
):
  (tmp_path / "jit_f-cache").write_text("")
  cache_folder(tmp_path)
  monkeypatch.setattr(compiling, "PATIENCE_S", 0.0)
  with watch.listening():
    explained(watch)
  assert noticed.pop().startswith(f"programs are read from {tmp_path}, or compiled; the run waits")
  monkeypatch.setattr(compiling, "PATIENCE_S", 60.0)
  with watch.listening():
    begin()
    end()  # without a hit: it was compiled.
    monkeypatch.setattr(compiling, "PATIENCE_S", 0.0)
    explained(watch)
  assert noticed.pop().startswith("compiling; the run waits")
  cache_folder(None)
  with watch.listening():
    explained(watch)
  assert noticed.pop().endswith("at every start: no programs are kept")


def test_a_short_compilation_is_not_explained(watch, noticed):
  with watch.listening():
    begin()
    timers = list(watch._patience.values())
    end()
    assert [timer.finished.is_set() for timer in timers] == [True]
  assert noticed == []


def test_what_is_read_from_the_cache_does_not_count(watch):
  with watch.listening():
    begin()
    elsewhere = threading.Thread(target=jax.monitoring.record_event, args=(compiling.HIT,))
    elsewhere.start()
    elsewhere.join()
    end()
    begin()
    jax.monitoring.record_event(compiling.HIT)
    end()
    assert len(watch.so_far()) == 2
    done = watch.take()
    assert watch.take() == watch.so_far() == []
  assert [one.is_kept for one in done] == [False, True]
  assert compiling.metrics(done) == {"perf/compilations": 1.0, "perf/compile_s": 1.0}
  assert compiling.late_line("step 3", done[1:]) == ""
  assert compiling.late_line("step 3", done).startswith("step 3 compiled 1 program in 1.0 s")


def test_the_note_names_the_job(watch, now):
  with watch.listening(), watch.naming("update 8 × 1024"):
    begin()
    now[0] += 3.0
    assert watch.note() == "update 8 × 1024, 3 s"
    end()


def test_memory_and_jobs_bound_the_threads(monkeypatch):
  monkeypatch.setattr(compiling.os, "sched_getaffinity", lambda _: range(64), raising=False)
  for free, expected in ((100 << 30, 7), (9 << 30, 4), (1 << 20, 1), (None, 7)):
    monkeypatch.setattr(compiling.host_memory, "available_bytes", lambda free=free: free)
    assert compiling.threads_for(7) == expected
