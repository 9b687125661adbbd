"""Strangers where processes meet: at the port of process 0, and in its place."""

import concurrent.futures
import contextlib
import errno
import json
import socket
import struct
import threading
import time

import pytest

from grpo_jax.interrupts import Stopped
from grpo_jax.processes import connections, rendezvous
from grpo_jax.processes.connections import JoinError, Place, WrongStartError
from tests import several

KEY = connections.Key("a secret of this run", "job 7, restart 1")
HOST = socket.gethostname()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
  """Everything that does not wait for a person is faster."""
  for name, seconds in {"POLL_S": 0.02, "PROVE_S": 1.0, "GRACE_S": 0.3}.items():
    monkeypatch.setattr(rendezvous, name, seconds)


def place(index, port, processes=2):
  return Place("127.0.0.1", port, processes, index)


def outcome(place, key=KEY, *, join_s=20.0, stop=False):
  """Returns the hosts that a process gets, or its error."""
  try:
    return rendezvous.meet(place, key, join_s=join_s, stop=stop).hosts
  except (JoinError, WrongStartError, Stopped) as error:
    return error


def both(port, keys=(KEY, KEY), **options):
  """Returns the outcomes of processes 0 and 1."""
  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    return list(pool.map(lambda i: outcome(place(i, port), keys[i], **options), (0, 1)))


def connected(port):
  """Returns a connection to process 0, which may have to start first."""
  deadline = time.monotonic() + 5
  while True:
    with contextlib.suppress(ConnectionRefusedError):
      connection = socket.create_connection(("127.0.0.1", port), timeout=5)
      return connection
    assert time.monotonic() < deadline
    time.sleep(0.01)


def lines(connection):
  return connection.makefile("rb")


def introduced(connection, key=KEY, *, start="", role="introduction", content=None):
  """Introduces process 1 of 2, or something wrong, and returns what process 0 answers."""
  own = connections.random_number()
  connection.sendall(connections.greeting(own))
  received = lines(connection)
  number = connections.greeted(received.readline().rstrip())
  assert number is not None and received.readline()
  body = content or b'{"index": 1, "processes": 2, "host": "h", "version": "0"}'
  connection.sendall(connections.MessageSigner(key, (own, number)).signed(role, body))
  return received.readline()


def sent(data, *, pause_s=0.0, piece=1 << 20):
  """Returns a stranger that sends bytes, in pieces, as long as process 0 reads them."""

  def stranger(connection):
    for at in range(0, len(data), piece):
      connection.sendall(data[at : at + piece])
      time.sleep(pause_s)
    while connection.recv(1000):
      pass

  return stranger


def reflects(connection):
  """Sends back all that process 0 sends, as if it were this side's."""
  connection.sendall(connections.greeting(connections.random_number()))
  while data := connection.recv(1000):
    connection.sendall(data)


def relays_between_two_connections(connection):
  """Gives process 0 its own number and proof back on a second connection."""
  with connected(connection.getpeername()[1]) as other:
    connection.sendall(connections.greeting(connections.random_number()))
    received = lines(connection)
    greeting, proof = received.readline(), received.readline()
    other.sendall(greeting + proof)
    while other.recv(1000):
      pass


def resets(connection):
  connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def half_closes(connection):
  connection.shutdown(socket.SHUT_WR)
  connection.recv(1000)


def wrongly(*arguments, **options):
  return lambda connection: introduced(connection, *arguments, **options)


OLD = b'{"run": "grpo_jax", "index": 1, "processes": 2, "host": "h", "pid": 1}\n'
GREETING = connections.greeting(b"0" * 64)
OF_PROCESS_1 = '{"index": 1, "processes": 2, "host": "%s", "version": "0"}'
STRANGERS = {
  "closes": lambda connection: None,
  "resets": resets,
  "half closes": half_closes,
  "slow": sent(GREETING, pause_s=0.2, piece=1),
  "HTTP": sent(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"),
  "TLS": sent(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x07" * 500),
  "zeros": sent(bytes(1 << 22)),
  "long line": sent(b"a" * (1 << 22)),
  "earlier version": sent(OLD),
  "deep JSON": sent(b"[" * 4000 + b"\n"),
  "no dictionary": sent(b"[]\n{}\n1\n"),
  "not UTF-8": sent(b"\xff\xfe\xed\xa0\x80\n"),
  "later version": sent(GREETING.replace(b"grpo_jax 2", b"grpo_jax 3")),
  "short number": sent(b"grpo_jax 2 00\n"),
  "many greetings": sent(GREETING * 1000),
  "greeting alone": sent(GREETING),
  "greeting and an introduction": sent(GREETING + OF_PROCESS_1.encode() + b"\n"),
  "greeting and half a proof": sent(GREETING + b"0" * 32),
  "reflects": reflects,
  "relays": relays_between_two_connections,
  "no secret": wrongly(connections.Key("", KEY.start)),
  "another secret": wrongly(connections.Key("another secret of some run", KEY.start)),
  "an earlier start": wrongly(connections.Key(KEY.secret, "job 7, restart 0")),
  "another role": wrongly(role="arrived"),
  **{
    f"fields: {content[:40]}": wrongly(content=content.encode())
    for content in (
      "[]",
      "1",
      "{}",
      "[" * 3000,
      '{"index": 1}',
      '{"index": true, "processes": 2, "host": "h", "version": "0"}',
      '{"index": "1", "processes": 2, "host": "h", "version": "0"}',
      '{"index": -1, "processes": 2, "host": "h", "version": "0"}',
      '{"index": 2, "processes": 2, "host": "h", "version": "0"}',
      '{"index": [1], "processes": 2, "host": "h", "version": "0"}',
      '{"index": 1, "processes": NaN, "host": "h", "version": "0"}',
      '{"index": 1, "processes": %s, "host": "h", "version": "0"}' % ("9" * 3000),
      '{"index": 1, "processes": 2, "host": 3, "version": "0"}',
      OF_PROCESS_1 % "\\u001b[2J",
      OF_PROCESS_1 % "\\u202e",
      OF_PROCESS_1 % "",
      OF_PROCESS_1 % ("h" * 256),
      '{"index": 1, "processes": 2, "host": "h", "version": "\\n"}',
    )
  },
}


@pytest.mark.long
def test_strangers_neither_delay_nor_replace_a_process_of_the_run(caplog):
  port = several.free_port()
  with contextlib.ExitStack() as stack:
    pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(len(STRANGERS) + 1))
    first = pool.submit(outcome, place(0, port))
    for _ in range(50):  # silent ones.
      stack.enter_context(connected(port))

    def visit(stranger):
      with connected(port) as connection, contextlib.suppress(OSError):
        stranger(connection)

    visits = {name: pool.submit(visit, stranger) for name, stranger in STRANGERS.items()}
    quick = {name for name in visits if name not in ("slow", "greeting and half a proof")}
    concurrent.futures.wait([visits[name] for name in quick], timeout=5)
    assert not first.done()
    began = time.monotonic()
    assert outcome(place(1, port)) == [HOST] * 2 == first.result(5)
    assert time.monotonic() - began < 3.0
  failed = {name: str(visit.exception()) for name, visit in visits.items() if visit.exception()}
  assert not failed and len(caplog.records) == 1
  assert "was turned away" in caplog.text and "\x1b" not in caplog.text


def test_a_crowd_is_bounded_and_the_oldest_silent_strangers_make_room(monkeypatch):
  monkeypatch.setattr(rendezvous, "PROVE_S", 60.0)
  port = several.free_port()
  stop = threading.Event()

  def crowd():
    open_at_once = []
    with contextlib.suppress(OSError):  # process 0 is done.
      while not stop.is_set():
        open_at_once.append(socket.create_connection(("127.0.0.1", port), timeout=5))
        if len(open_at_once) > 300:
          open_at_once.pop(0).close()
    for connection in open_at_once:
      connection.close()

  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    first = pool.submit(outcome, place(0, port))
    with connected(port) as greeted:
      greeted.sendall(GREETING)
      assert lines(greeted).readline()
      silent = [connected(port) for _ in range(rendezvous.STRANGERS + 10)]
      assert silent[0].recv(1) == b"", "the oldest one is closed"
      greeted.settimeout(0.1)
      with pytest.raises(TimeoutError):
        greeted.recv(1 << 16) and greeted.recv(1)
    for _ in range(2):
      pool.submit(crowd)
    second = outcome(place(1, port))
    stop.set()
    assert second == first.result(5) == [HOST] * 2
  for connection in silent:
    connection.close()


def test_a_stranger_is_bounded_in_bytes_and_in_time(monkeypatch):
  monkeypatch.setattr(rendezvous, "PROVE_S", 60.0)
  port, stop = several.free_port(), []
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    pool.submit(outcome, place(0, port), stop=stop)
    try:
      with connected(port) as silent, connected(port) as greeting, connected(port) as endless:
        greeting.sendall(GREETING)
        began = time.monotonic()
        with pytest.raises(OSError, match="reset|Broken pipe"):
          for _ in range(1000):
            endless.sendall(bytes(1 << 16))
        assert time.monotonic() - began < 10
        monkeypatch.setattr(rendezvous, "PROVE_S", 0.1)
        assert silent.recv(1) == b"" and len(lines(greeting).readlines()) == 2
    finally:
      stop.append(True)


def test_a_process_that_loses_its_connection_as_it_arrives_comes_again(monkeypatch):
  send, failures = rendezvous._Peer.send, [ConnectionResetError()] * 2

  def fails_at_first(self, role, value):
    if role == "arrived" and failures:
      raise failures.pop()
    send(self, role, value)

  monkeypatch.setattr(rendezvous._Peer, "send", fails_at_first)
  assert both(several.free_port()) == [[HOST] * 2] * 2 and not failures


@pytest.mark.long
def test_a_recorded_introduction_is_worth_nothing_on_another_connection():
  with socket.create_server(("127.0.0.1", 0)) as recorder:
    port = recorder.getsockname()[1]
    thread = threading.Thread(target=outcome, args=(place(1, port),), kwargs={"join_s": 0.3})
    thread.start()
    connection, _ = recorder.accept()
    with connection:
      received = lines(connection)
      greeting = received.readline()
      number, own = connections.greeted(greeting.rstrip()), connections.random_number()
      assert number is not None
      session = connections.MessageSigner(KEY, (number, own))
      connection.sendall(connections.greeting(own) + session.signed("process 0", b"{}"))
      introduction = received.readline()
    assert session.content("introduction", introduction.rstrip()) is not None
    thread.join()
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    first = pool.submit(outcome, place(0, port), join_s=0.5)
    with connected(port) as again:
      again.sendall(greeting)
      received = lines(again)
      assert received.readline() and received.readline()
      again.sendall(introduction)
      assert received.readline() == b""
    assert "process 1 of 2 did not come" in str(first.result(5))


@pytest.mark.long
def test_processes_with_other_keys_are_turned_away_and_both_sides_say_why(caplog):
  for other in (connections.Key(), connections.Key("another secret of some run", KEY.start)):
    first, second = both(several.free_port(), (KEY, other), join_s=0.4)
    assert isinstance(first, JoinError) and isinstance(second, JoinError)
    assert "process 1 of 2 did not come" in str(first) and "was turned away" in str(first)
    assert "has the secret of GRPO_JAX_RUN_SECRET" in str(first)
    assert "not of this start of the run, or has another secret" in str(second)
    assert other.described in str(second) and KEY.secret not in caplog.text + repr(KEY)


def test_processes_without_a_secret_meet_if_they_are_of_one_start():
  mine, other = connections.Key("", "7.0."), connections.Key("", "7.0.1")
  assert both(several.free_port(), (mine, mine)) == [[HOST] * 2] * 2
  first, second = both(several.free_port(), (mine, other), join_s=0.3)
  assert isinstance(first, JoinError) and isinstance(second, JoinError)


def test_versions_of_the_package_and_of_the_protocol_must_be_equal(monkeypatch):
  port = several.free_port()
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    first = pool.submit(outcome, place(0, port))
    content = b'{"index": 1, "processes": 2, "host": "b", "version": "0.0.1"}'
    with connected(port) as connection:
      introduced(connection, content=content)
      error = first.result(5)
  assert isinstance(error, WrongStartError) and error.exit_code == 2
  assert "the version of grpo_jax is" in str(error) and "0.0.1 in process 1 (b)" in str(error)
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    first = pool.submit(outcome, place(0, port), join_s=0.3)
    with connected(port) as connection:
      connection.sendall(OLD)
      refusal = json.loads(lines(connection).readline())
    assert "uses another version of grpo_jax" in str(first.result(5))
  assert refusal == {"error": "process 0 has another version of grpo_jax", "exit_code": 2}


# --- in place of process 0 ---


ARRIVED = ("arrived", '{"left_s": 1.0}')


def with_the_key(*messages):
  """Returns a process 0 that has the key, and sends messages, each a role and text."""

  def stranger(connection):
    received = lines(connection)
    number, own = connections.greeted(received.readline().rstrip()), connections.random_number()
    assert number is not None
    session = connections.MessageSigner(KEY, (number, own))
    connection.sendall(connections.greeting(own) + session.signed("process 0", b"{}"))
    if received.readline():
      connection.sendall(b"".join(session.signed(role, text.encode()) for role, text in messages))
      received.readline()

  return stranger


def endless(connection):
  while True:
    connection.sendall(b"a" * 100_000)


def with_another_key(connection):
  own = connections.random_number()
  session = connections.MessageSigner(connections.Key("of some other run"), (b"0" * 64, own))
  connection.sendall(connections.greeting(own) + session.signed("process 0", b"{}"))
  lines(connection).readlines()


IMPOSTORS = {
  "silent": lambda connection: connection.recv(1000) and connection.recv(1000),
  "closes": lambda connection: None,
  "resets": resets,
  "garbage": sent(b"SSH-2.0\r\n"),
  "HTTP": sent(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
  "TLS": sent(b"\x15\x03\x01\x00\x02\x02\x46"),
  "endless": endless,
  "slow": sent(GREETING * 100, pause_s=0.1, piece=1),
  "[]": sent(b"[]\n"),
  "{}": sent(b"{}\n"),
  "an error": sent(b'{"error": "\\u001b[2J"}\n'),
  "hosts": sent(b'{"hosts": 3}\n'),
  "earlier version": sent(b'{"hosts": ["a", "b"]}\n'),
  "refusal": sent(rendezvous._REFUSAL),
  "greeting alone": sent(GREETING),
  "echo": reflects,
  "another key": with_another_key,
  "not arrived": with_the_key(("answer", "{}")),
  **{
    f"left_s {each}": with_the_key(("arrived", '{"left_s": ' + each + "}"))
    for each in ("NaN", "-1", "1e999", '"1"', "{}")
  },
}
WRONG_ANSWERS = (
  *("{}", "[]", "3", "[" * 5000, '{"error": "e"}', '{"error": 3, "exit_code": 1}'),
  '{"error": "e", "exit_code": 0}',
  '{"error": "\\u001b[2J", "exit_code": 1}',
  '{"error": "%s", "exit_code": 1}' % ("e" * 5000),
  *('{"hosts": 3}', '{"hosts": 3, "address": ""}', '{"hosts": ["a"], "address": ""}'),
  '{"hosts": ["a", "\\n"], "address": ""}',
  '{"hosts": ["a", "b"], "address": "$(id)"}',
  '{"hosts": ["a", "b"]}',
  '{"stopped": 3}',
)


@contextlib.contextmanager
def impostor(stranger):
  """Lets something else than process 0 answer at a port, again and again; yields the port."""
  with socket.create_server(("127.0.0.1", 0)) as server:

    def serve():
      with contextlib.suppress(OSError):
        while True:
          connection, _ = server.accept()
          threading.Thread(target=converse, args=(connection,), daemon=True).start()

    def converse(connection):
      with connection, contextlib.suppress(OSError):
        stranger(connection)

    threading.Thread(target=serve, daemon=True).start()
    yield server.getsockname()[1]
    server.shutdown(socket.SHUT_RDWR)


def outcomes(impostors, **options):
  """Returns what process 1 makes of each impostor."""

  def one(stranger):
    with impostor(stranger) as port:
      return port, outcome(place(1, port), **options)

  with concurrent.futures.ThreadPoolExecutor(len(impostors)) as pool:
    return dict(zip(impostors, pool.map(one, impostors.values()), strict=True))


def test_what_is_not_process_0_ends_in_one_line_with_its_address(caplog):
  began = time.monotonic()
  found = outcomes(IMPOSTORS, join_s=0.3)
  assert time.monotonic() - began < 10
  for name, (port, error) in found.items():
    text = f"did not reach process 0 at 127.0.0.1:{port} within 0.3 s (distributed.join_s): what"
    assert isinstance(error, JoinError) and text in str(error), (name, error)
    assert str(error).isprintable()
  assert len(caplog.records) == len(IMPOSTORS), "each says once, at once, what is wrong"


def test_wrong_answers_of_a_process_0_that_has_the_key_end_in_one_line():
  wrong = {text[:60]: with_the_key(ARRIVED, ("answer", text)) for text in WRONG_ANSWERS}
  for name, (port, error) in outcomes(wrong).items():
    text = f"process 0 at 127.0.0.1:{port} sent an answer that is not one"
    assert isinstance(error, JoinError) and text in str(error), (name, error)


@pytest.mark.long
def test_the_wait_for_an_answer_has_a_deadline_and_looks_at_signals():
  with impostor(with_the_key(("arrived", '{"left_s": 0.2}'))) as port:
    error = outcome(place(1, port))
  assert isinstance(error, JoinError) and "joined it: no answer in time" in str(error)
  for stranger in (IMPOSTORS["silent"], with_the_key(ARRIVED)):
    stop = []  # false until it has an element.
    with impostor(stranger) as port, concurrent.futures.ThreadPoolExecutor(1) as pool:
      second = pool.submit(outcome, place(1, port), stop=stop)
      time.sleep(0.1)
      assert not second.done()
      stop.append(True)
      assert isinstance(second.result(2), Stopped)


def test_process_0_may_come_after_something_else_has_had_its_port():
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    with impostor(sent(b"SSH-2.0\r\n")) as port:
      second = pool.submit(outcome, place(1, port))
      time.sleep(0.1)
      assert not second.done()
    assert outcome(place(0, port)) == [HOST] * 2 == second.result(5)


def test_a_signal_is_looked_at_while_strangers_talk():
  port, stop = several.free_port(), []
  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    first = pool.submit(outcome, place(0, port, 3), stop=stop)
    with connected(port) as slow, connected(port) as silent:
      slow.sendall(GREETING[:5])
      second = pool.submit(outcome, place(1, port, 3))
      time.sleep(0.1)
      stop.append(True)
      assert isinstance(first.result(2), Stopped) and silent.recv(1) == b""
      assert isinstance(second.result(2), Stopped)


# --- addresses ---


def listening_at(host, monkeypatch, addresses=None, **options):
  """Returns the addresses at which process 0 listens if a name has these addresses."""
  place = Place(host, several.free_port(), 2, 0, **options)
  with monkeypatch.context() as patched:
    if addresses is not None:
      found = [(0, 0, 0, "", (address, 0)) for address in addresses]
      patched.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    opened = connections.listeners(place, time.monotonic() + 0.3, lambda: None)
  try:
    return {each.getsockname()[0] for each in opened}
  finally:
    for each in opened:
      each.close()


def test_process_0_listens_at_the_coordinators_address_only(monkeypatch, caplog):
  assert listening_at("127.0.0.1", monkeypatch) == {"127.0.0.1"}
  assert listening_at("127.0.0.5", monkeypatch) == {"127.0.0.5"}
  assert "127.0.0.1" in listening_at("localhost", monkeypatch) <= {"127.0.0.1", "::1"}
  own_and_other = ["192.0.2.77", "127.0.0.3"]  # RFC 5737: nobody has the first one.
  assert listening_at("node1", monkeypatch, own_and_other) == {"127.0.0.3"}
  assert listening_at("node1", monkeypatch, ["127.0.1.1"], is_one_host=True) == {"127.0.1.1"}
  monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", "127.0.0.9:1")
  monkeypatch.setattr(connections, "parsed", lambda address, _: (address[:-2], several.free_port()))
  assert listening_at("192.0.2.77", monkeypatch) == {"127.0.0.9"} and not caplog.records


def test_the_name_of_a_host_that_it_knows_as_loopback_reaches_others_and_is_logged(
  monkeypatch, caplog
):
  found = listening_at("node1", monkeypatch, ["127.0.1.1"])
  assert "0.0.0.0" in found <= {"0.0.0.0", "::"}
  assert "node1 is 127.0.1.1 on this host, where other hosts cannot reach it" in caplog.text


def test_an_address_of_another_host_is_refused_at_once_and_a_name_when_it_stays_wrong(
  monkeypatch, caplog
):
  monkeypatch.setattr(connections, "RETRY_S", 0.05)
  with pytest.raises(
    JoinError, match=r"192.0.2.77 is not an address of this host\. .*BIND_ADDRESS"
  ):
    listening_at("192.0.2.77", monkeypatch)
  assert not caplog.records
  with pytest.raises(JoinError, match="node1 is not an address of this host"):
    listening_at("node1", monkeypatch, ["192.0.2.77"])
  assert len(caplog.records) == 1 and "trying again" in caplog.text
  for broken in ("a..b", "a" * 70):
    with pytest.raises(JoinError, match="is not the name of a host"):
      listening_at(broken, monkeypatch)
    error = outcome(Place(broken, 1, 2, 1), join_s=0.1)
    assert isinstance(error, JoinError) and "is not the name of a host" in str(error)


def test_a_name_that_appears_later_is_found(monkeypatch):
  real, failures = socket.getaddrinfo, [socket.gaierror(errno.ENOENT, "not yet")] * 2

  def later(host, *arguments, **options):
    if failures:
      raise failures.pop()
    return real("127.0.0.1", *arguments, **options)

  monkeypatch.setattr(connections, "RETRY_S", 0.01)
  monkeypatch.setattr(socket, "getaddrinfo", later)
  place = Place("node1", several.free_port(), 2, 0, is_one_host=True)
  for each in connections.listeners(place, time.monotonic() + 5, lambda: None):
    assert each.getsockname()[0] == "127.0.0.1"
    each.close()


def test_jax_listens_where_the_others_have_arrived():
  assert connections.for_service({"127.0.0.1"}) == ("127.0.0.1", "127.0.0.1")
  assert connections.for_service({"::1", "127.0.0.1"}) == ("127.0.0.1", "127.0.0.1")
  assert connections.for_service({"10.0.0.1"}) == ("10.0.0.1", "10.0.0.1")
  assert connections.for_service({"127.0.1.1", "10.0.0.1"}) == ("10.0.0.1", "10.0.0.1")
  assert connections.for_service({"127.0.1.1", "10.0.0.1", "10.1.0.1"})[1] == ""
