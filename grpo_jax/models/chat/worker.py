"""A process that renders one chat template again and again. Run as a file, never imported.

    python -I worker.py MEMORY_BYTES CPU_SECONDS

Standard input has the template, then conversations; standard output has an answer to each: JSON,
preceded by its length in 4 bytes. Templates are compiled as in transformers (its
`render_jinja_template`), in jinja's sandbox for immutable values. Limits that the sandbox lacks are
set here: a limit of memory, and a timer that ends the process after its processor time.
"""

import datetime
import json
import os
import resource
import signal
import struct
import sys
from typing import Any, BinaryIO

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

_LONGEST_MESSAGE = 500  # characters of an error message.
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of a message's thoughts.


def main(memory_bytes: str, cpu_s: str) -> None:
  """Serves requests until standard input ends.

  Args:
    memory_bytes: Limit of the address space, in bytes.
    cpu_s: Processor time of one request, in seconds; more ends the process.
  """
  requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
  _close_off(int(memory_bytes))
  template: jinja2.Template | None = None
  while header := requests.read(4):
    # SIGPROF's default action ends the process, whatever it is doing.
    signal.setitimer(signal.ITIMER_PROF, float(cpu_s))
    body = requests.read(*struct.unpack("<I", header))
    try:
      request = json.loads(body.decode("utf-8", "surrogatepass"))
      body = None
      if template is None:
        template = _environment().from_string(request["template"])
        _send(answers, {"ready": True})
      else:
        _send(answers, _render(template, **request))
    except MemoryError:
      request = body = None  # frees memory for the answer.
      _send(answers, {"limit": f"needs more than {int(memory_bytes) >> 20} MiB of memory"})
    except RecursionError:
      _send(answers, {"limit": "calls itself too deeply"})
    except jinja2.TemplateSyntaxError as error:
      _send(answers, {"invalid": _short(f"line {error.lineno}: {error.message}")})
    except Exception as error:
      _send(answers, {"refused": _short(f"{_place(error)}{type(error).__name__}: {error}")})
    signal.setitimer(signal.ITIMER_PROF, 0)


def _render(
  template: jinja2.Template, *, messages: list[Any], variables: dict[str, Any], limit: int
) -> dict[str, Any]:
  """Returns the text, cut to `limit` characters, and how many characters there were at least."""
  pieces: list[str] = []
  count = 0
  for piece in template.generate(**variables, messages=[_with_reasoning(m) for m in messages]):
    pieces.append(piece[: limit - count + 1])
    count += len(piece)
    if count > limit:
      break
  return {"text": "".join(pieces)[:limit], "characters": count}


def _with_reasoning(message: Any) -> Any:
  """Adds a message's thoughts under the names that templates know, like transformers."""
  if not isinstance(message, dict):
    return message
  message = {name: value for name, value in message.items() if value is not None}
  thoughts = next((message[name] for name in _REASONING if name in message), None)
  if thoughts is None:
    return message
  return {"thinking": thoughts, **message, "reasoning_content": thoughts}


class _Generation(jinja2.ext.Extension):
  """{% generation %} … {% endgeneration %} marks the assistant's text; rendered as its body."""

  tags = {"generation"}

  def parse(self, parser: Any) -> Any:
    line = next(parser.stream).lineno
    body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
    return jinja2.nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

  def _said(self, caller: Any) -> str:
    return caller()


class _Dict:
  """A template's `dict`: creates one, and has no other attributes."""

  def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)

  def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict.fromkeys(*args, **kwargs)


class _Namespace(jinja2.utils.Namespace):
  """A template's `namespace`, without names that begin with an underscore."""

  def __init__(*args: Any, **kwargs: Any):
    self, *rest = args
    attributes = dict(*rest, **kwargs)
    for name in attributes:
      _check_attribute(name)
    jinja2.utils.Namespace.__init__(self, attributes)

  def __setitem__(self, name: str, value: Any) -> None:
    _check_attribute(name)
    super().__setitem__(name, value)


def _check_attribute(name: Any) -> None:
  if isinstance(name, str) and name.startswith("_"):
    raise jinja2.exceptions.SecurityError(f"a namespace may not have the attribute {name!r}")


def _environment() -> jinja2.Environment:
  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
  )
  environment.filters["tojson"] = _to_json
  environment.globals.update(
    raise_exception=_raise,
    strftime_now=lambda form: datetime.datetime.now().strftime(form),
    dict=_Dict(),
    namespace=_Namespace,
  )
  return environment


def _to_json(
  value: Any,
  ensure_ascii: bool = False,
  indent: Any = None,
  separators: Any = None,
  sort_keys: bool = False,
) -> str:
  return json.dumps(
    value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
  )


def _raise(message: str) -> None:
  raise jinja2.TemplateError(message)


def _place(error: Exception) -> str:
  """Returns "line N: " of the template, if the error has a line."""
  lines, trace = [], error.__traceback__
  while trace is not None:
    if trace.tb_frame.f_code.co_filename == "<template>":
      lines.append(trace.tb_lineno)
    trace = trace.tb_next
  return f"line {lines[-1]}: " if lines else ""


def _short(message: str) -> str:
  message = " ".join(message.split())
  return message if len(message) <= _LONGEST_MESSAGE else f"{message[:_LONGEST_MESSAGE]}…"


def _close_off(memory_bytes: int) -> None:
  """Limits what the process may use, and redirects its standard streams to the null device."""
  nowhere = os.open(os.devnull, os.O_RDWR)
  for stream in (0, 1, 2):
    os.dup2(nowhere, stream)
  limits = {
    resource.RLIMIT_AS: memory_bytes,
    resource.RLIMIT_CORE: 0,
    resource.RLIMIT_FSIZE: 0,
    resource.RLIMIT_NOFILE: 32,
    resource.RLIMIT_NPROC: 0,
  }
  for kind, value in limits.items():
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def _send(answers: BinaryIO, answer: dict[str, Any]) -> None:
  body = json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogatepass")
  answers.write(struct.pack("<I", len(body)))
  answers.write(body)
  answers.flush()


if __name__ == "__main__":
  main(*sys.argv[1:])
