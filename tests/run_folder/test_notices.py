"""One voice: what the package and its libraries log has one look; only the main process prints."""

import ast
import io
import logging
import re
import subprocess
import sys
import warnings

import pytest
from grpo_kernels import implementations
from grpo_kernels.attention import choice as attention_choice
from grpo_kernels.implementations import Chip
from rich.console import Console

from grpo_jax.run_folder import console, notices, screen
from tests import side_by_side
from tests.test_architecture import FILES, PACKAGE, ROOT, SATELLITES, is_standalone

OURS = logging.getLogger("grpo_jax.data.sources")
# Programs of their own, whose output is what they print.
PRINTING = (
  *("main.py", "notebook.py", "report/__init__.py", "models/tiny.py", "commands/"),
  "packages/grpo_plan/command.py",
  "processes/watchdog.py",  # last words, while the main thread hangs or aborts.
)


def a_screen(*, terminal=False, width=80):
  color = "standard" if terminal else None
  made = Console(
    file=io.StringIO(), force_terminal=terminal, width=width, color_system=color, highlight=False
  )
  return console.TrainingScreen(made), made.file


@pytest.fixture
def shown():
  """What the program prints when everything goes to a file of 80 columns."""
  made, file = a_screen()
  with notices.for_program(), notices.on_screen(made):
    yield file


def test_notices_warnings_and_errors_have_one_look(shown):
  OURS.info("run folder: %s", "runs/first")
  OURS.warning("mesh.fsdp=%d does not divide 33", 2)
  OURS.error("saving failed")
  OURS.debug("nobody reads this")
  assert shown.getvalue().splitlines() == [
    "run folder: runs/first",
    "warning: mesh.fsdp=2 does not divide 33",
    "error: saving failed",
  ]


def test_what_a_terminal_obeys_is_shown_and_not_obeyed(shown):
  for log in (OURS.info, OURS.warning):
    log("the model wrote %s", "[bold]\x1b[2J\r\u202e")
  said = "the model wrote [bold]\\x1b[2J\\r\\u202e"
  assert shown.getvalue().splitlines() == [said, f"warning: {said}"]


def test_the_choice_of_a_kernel_is_shown(shown):
  implementations.log_once.cache_clear()
  for _ in range(2):
    attention_choice.pick(None, Chip("cpu", "cpu"), dtype="float32", width=64)
  assert shown.getvalue() == "attention on cpu: xla_blocked\n"


@pytest.mark.filterwarnings("always")
def test_libraries_are_shown_in_the_same_look_by_name(shown):
  logging.getLogger("jax._src.xla_bridge").warning("no GPU found")
  logging.getLogger("somebody").warning("100%% of %s", "it")
  logging.getLogger("somebody").info("a detail")
  logging.warning("from the root logger")
  warnings.warn_explicit("old", DeprecationWarning, "/x/site-packages/flax/core/a.py", 7)
  assert shown.getvalue().splitlines() == [
    "warning: jax: no GPU found",
    "warning: somebody: 100% of it",
    "warning: root: from the root logger",
    "warning: flax: old (DeprecationWarning, a.py:7)",
  ]


def test_a_record_of_absl_is_named_by_the_package_that_logged_it(shown):
  record = logging.LogRecord(
    "absl", logging.WARNING, "/v/site-packages/orbax/checkpoint/x.py", 3, "slow disk", (), None
  )
  logging.getLogger("absl").handle(record)
  logging.getLogger("absl").info("[process=0] a phase of a save")
  assert shown.getvalue() == "warning: orbax: slow disk\n"


@pytest.mark.parametrize("is_imported_before", [False, True])
def test_a_library_that_sets_up_its_own_handler_is_routed_all_the_same(is_imported_before):
  library = logging.getLogger("transformers")
  made, file = a_screen()
  handler = logging.StreamHandler(sys.stderr)

  def import_it():
    library.addHandler(handler)
    library.propagate = False

  if is_imported_before:
    import_it()
  try:
    with notices.for_program(), notices.on_screen(made):
      if not is_imported_before:
        import_it()
      logging.getLogger("transformers.tokenization").warning("a long sequence")
      assert handler not in library.handlers
  finally:
    library.removeHandler(handler)
    library.propagate = True
  assert file.getvalue() == "warning: transformers: a long sequence\n"
  assert type(library) is logging.Logger


def test_a_traceback_is_shown_only_where_it_is_asked_for(shown):
  try:
    raise KeyError("x")
  except KeyError:
    OURS.warning("without")
    OURS.error("with", exc_info=True)
  text = shown.getvalue()
  assert text.startswith("warning: without\nerror: with\nTraceback") and "KeyError: 'x'" in text


def test_a_long_warning_is_folded_on_a_terminal_and_only_its_label_is_coloured():
  made, file = a_screen(terminal=True, width=40)
  with notices.on_screen(made):
    OURS.warning("the disk of the checkpoints is almost full: %s", "/a/b")
  lines = file.getvalue().splitlines()
  assert lines[0].startswith("\x1b[35mwarning: \x1b[0mthe disk")
  plain = [re.sub("\x1b.*?m", "", line) for line in lines]
  assert len(plain) == 2 and all(len(line) <= 40 for line in plain)
  assert plain[1].startswith(screen.CONTINUED)


def test_nothing_in_a_notice_is_markup():
  made, file = a_screen(terminal=True)
  with notices.on_screen(made):
    OURS.warning("[bold]x[/bold] :smile:")
  assert "[bold]x[/bold] :smile:" in file.getvalue()


def test_a_warning_does_not_tear_a_progress_bar():
  made, file = a_screen(terminal=True)
  with notices.on_screen(made), made.progress("sampling", 3) as advance:
    advance()
    made._progress.refresh()
    OURS.warning("a worker died")
    advance()
  before, _, _ = file.getvalue().partition("\x1b[35mwarning: \x1b[0ma worker died\n")
  assert "sampling" in before and before.endswith("\r\x1b[2K"), "the bar is erased first"


def test_no_color_and_pipes_get_no_escapes(monkeypatch):
  monkeypatch.setenv("NO_COLOR", "1")
  file = io.StringIO()
  made = console.TrainingScreen(Console(file=file, force_terminal=True, width=80, highlight=False))
  values = {"rollout/reward_mean": 0.5, "rollout/truncated_share": 0.9}
  with notices.on_screen(made):
    OURS.warning("x")
    made.step(0, 2, values)
  assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", file.getvalue())


@pytest.mark.long
def test_a_user_of_the_library_gets_no_handler_and_silent_notices():
  code = (
    "import logging\n"
    "from grpo_jax.run_folder import notices, checkpointing\n"
    "from grpo_jax import interrupts, registry\n"
    "log = logging.getLogger('grpo_jax')\n"
    "assert not log.handlers and log.level == logging.NOTSET and log.propagate\n"
    "logging.getLogger('grpo_jax.data').info('a notice')\n"
    "logging.getLogger('grpo_jax.data').warning('a warning')\n"
  )
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
  assert (done.returncode, done.stdout) == (0, "")
  assert done.stderr.endswith("a warning\n") and "a notice" not in done.stderr


def test_a_notice_is_shown_once_where_the_root_logger_prints(capsys):
  """As in notebooks: a handler for standard error was set up before the run."""
  root = logging.getLogger()
  handler = logging.StreamHandler(sys.stderr)
  root.addHandler(handler)
  try:
    with notices.on_screen(screen.Screen()):
      logging.getLogger("grpo_jax.run").info("once")
  finally:
    root.removeHandler(handler)
  shown = capsys.readouterr()
  assert (shown.out, shown.err) == ("once\n", "") and logging.getLogger("grpo_jax").propagate


def test_a_handler_of_the_user_is_the_only_one(noticed):
  made, file = a_screen()
  with notices.on_screen(made):  # the fixture has a handler of its own.
    OURS.info("hello")
  assert (noticed, file.getvalue()) == (["hello"], "")


def test_everything_is_as_before_when_the_program_has_ended():
  root, ours = logging.getLogger(), logging.getLogger("grpo_jax")
  mine = logging.StreamHandler(sys.stderr)
  root.addHandler(mine)
  before = (set(root.handlers), ours.handlers[:], ours.level, warnings.showwarning)
  levels = [logging.getLogger(name).level for name in notices.LEVELS]
  try:
    with notices.for_program():
      assert mine not in root.handlers and ours.isEnabledFor(logging.INFO)
    assert before == (set(root.handlers), ours.handlers, ours.level, warnings.showwarning)
    assert levels == [logging.getLogger(name).level for name in notices.LEVELS]
  finally:
    root.removeHandler(mine)


@pytest.mark.filterwarnings("always")
def test_other_processes_say_nothing(monkeypatch):
  side_by_side.pretend(monkeypatch, 1)
  made, file = a_screen(terminal=True)
  with notices.for_program(), notices.on_screen(made):
    OURS.info("run folder: x")
    OURS.error("failed")
    logging.getLogger("jax").warning("no GPU")
    warnings.warn("old", stacklevel=1)
    made.step(0, 2, {"rollout/reward_mean": 0.5})
    with made.progress("sampling", 3) as advance:
      advance()
  assert file.getvalue() == ""


# --- what can be read ---

# The 16 colours of xterm, VS Code, Windows Terminal and Solarized for what is used here.
PALETTES = {
  "xterm": {"red": "cd0000", "magenta": "cd00cd"},
  "vs code": {"red": "cd3131", "magenta": "bc3fbc"},
  "windows terminal": {"red": "c50f1f", "magenta": "881798"},
  "solarized": {"red": "dc322f", "magenta": "d33682"},
}
BACKGROUNDS = {"light": "ffffff", "dark": "000000"}


def luminance(color):
  parts = [int(color[i : i + 2], 16) / 255 for i in (0, 2, 4)]
  linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
  return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
  """The ratio of WCAG 2.1: 1 to 21; 3 is enough for large text and marks."""
  low, high = sorted((luminance(one), luminance(other)))
  return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("palette", PALETTES)
@pytest.mark.parametrize("background", BACKGROUNDS)
def test_colours_can_be_read_on_light_and_dark(palette, background):
  for style in (screen.NOTABLE, screen.FAILED):
    color = PALETTES[palette][style.split()[-1]]
    assert contrast(color, BACKGROUNDS[background]) >= 2.5, style
  assert contrast("cdcd00", BACKGROUNDS["light"]) < 2, "yellow, which was used before"


def test_a_run_uses_these_colours_only():
  made, file = a_screen(terminal=True)
  values = {"rollout/reward_mean": 0.5, "rollout/reward_std": 0.1, "rollout/truncated_share": 0.9}
  with notices.on_screen(made), made.progress("sampling", 3) as advance:
    OURS.warning("x")
    OURS.error("x")
    made.step(0, 2, values)
    advance()
    made._progress.refresh()
  codes = {
    code for found in re.findall(r"\x1b\[([0-9;]*)m", file.getvalue()) for code in found.split(";")
  }
  assert codes <= {"", "0", "1", "2", "31", "35"}, "bold, dim, red, magenta"
  assert {"1", "31", "35"} <= codes


# --- the class of faults ---


def complaints_of(name, tree):
  for node in ast.walk(tree):
    if isinstance(node, ast.ImportFrom | ast.Import):
      names = {alias.name for alias in node.names}
      if {"absl", "absl.logging"} & (
        {getattr(node, "module", None)} | names
      ) and "logging" in names:
        yield node.lineno, "absl.logging"
    if not isinstance(node, ast.Call):
      continue
    called = ast.unparse(node.func)
    if called == "print" and not name.startswith(PRINTING):
      yield node.lineno, called
    if re.fullmatch(r"logging\.(debug|info|warning|error|exception)", called):
      yield node.lineno, called
    # A metric that is in no table is a mistake of a developer: Python's own warnings are for it.
    if called == "warnings.warn" and name != "run_folder/loggers.py":
      yield node.lineno, called


@pytest.mark.long
def test_modules_report_by_their_logger_only():
  wrong = [
    f"{name}:{line}: {called}"
    for path in [*FILES, *SATELLITES]
    if not is_standalone(path)
    for name in [path.relative_to(PACKAGE if path in FILES else ROOT).as_posix()]
    for line, called in complaints_of(name, ast.parse(path.read_text()))
  ]
  assert wrong == []
