"""A proxy before a real server that passes everything on, but for the faults that it is told."""

import collections
import http.client
import http.server
import json
import threading
import urllib.parse


class FaultyProxy:
  """Listens on loopback until it is closed.

  Attributes:
    address: to give to an engine.
    faults: by path, what becomes of the next requests to it, in order: a function of this module,
      called with the handler and the body. Without one the request is passed on.
    rewrite: changes the body of every request that is passed on.
    seen: (path, body) of every request.
  """

  def __init__(self, upstream):
    self.upstream = urllib.parse.urlparse(upstream).netloc
    self.faults = collections.defaultdict(collections.deque)
    self.rewrite = lambda path, body: body
    self.seen = []
    self.released = threading.Event()  # ends the waiting of those that `hang`.
    proxy = self

    class Handler(_Handler):
      owner = proxy

    self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    self._server.daemon_threads = True
    self.address = f"http://127.0.0.1:{self._server.server_address[1]}"
    self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
    self._thread.start()

  def fail(self, path, fault, times=1):
    """Adds faults."""
    self.faults[path].extend([fault] * times)

  def count(self, path):
    return sum(each == path for each, _ in self.seen)

  def __enter__(self):
    return self

  def __exit__(self, *error):
    self.released.set()
    self._server.shutdown()
    self._server.server_close()
    self._thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
  owner: FaultyProxy
  protocol_version = "HTTP/1.1"

  def do_GET(self):
    self.answer(b"")

  def do_POST(self):
    self.answer(self.rfile.read(int(self.headers["Content-Length"])))

  def answer(self, body):
    self.owner.seen.append((self.path, json.loads(body or b"null")))
    try:
      fault = self.owner.faults[self.path].popleft()
    except IndexError:
      fault = passes_on
    try:
      fault(self, body)
    except (ConnectionError, http.client.HTTPException):
      self.close_connection = True  # one of both has gone.

  def say(self, status, content, *, promised=None):
    """Answers; `promised` bytes, if they are not those that come."""
    self.send_response(status)
    self.send_header("Content-Length", str(len(content) if promised is None else promised))
    self.end_headers()
    self.wfile.write(content)

  def upstream(self, body):
    """Returns status and content of the real server's answer."""
    connection = http.client.HTTPConnection(self.owner.upstream, timeout=300)
    try:
      sent = self.owner.rewrite(self.path, json.loads(body)) if body else None
      content = json.dumps(sent).encode() if body else None
      headers = {k: v for k, v in self.headers.items() if k in ("Content-Type", "Authorization")}
      connection.request(self.command, self.path, content, headers)
      with connection.getresponse() as response:
        return response.status, response.read()
    finally:
      connection.close()

  def log_message(self, *arguments):
    pass


def passes_on(handler, body):
  handler.say(*handler.upstream(body))


def says_500(handler, body):
  handler.say(500, b'{"error": {"message": "out of memory"}}')


def says_400(handler, body):
  handler.say(400, b'{"error": {"message": "the prompt is too long"}}')


def lacks_adapter(handler, body):
  name = json.loads(body)["lora_path"]
  said = f"Failed to implicitly load LoRA adapter {name}: No such file or directory"
  handler.say(400, json.dumps({"error": {"message": said}}).encode())


def does_it_and_says_400(handler, body):
  handler.upstream(body)
  handler.say(400, b'{"success": false, "error_message": "it is already loaded"}')


def says_no_json(handler, body):
  handler.say(200, b"<html>Bad gateway</html>")


def says_no_text(handler, body):
  handler.say(200, bytes(range(256)))


def says_endless_brackets(handler, body):
  handler.say(200, b"[" * 100_000)


def says_something_else(handler, body):
  handler.say(200, b'{"ok": true}')


def loses_a_token(handler, body):
  status, content = handler.upstream(body)
  answer = json.loads(content)
  answer["meta_info"]["output_token_logprobs"].pop()
  handler.say(status, json.dumps(answer).encode())


def aborts(handler, body):
  status, content = handler.upstream(body)
  answer = json.loads(content)
  answer["meta_info"]["finish_reason"] = {"type": "abort", "message": "evicted"}
  handler.say(status, json.dumps(answer).encode())


def says_half(handler, body):
  """Computes all and delivers half: the completion is at hand, and must not come twice."""
  status, content = handler.upstream(body)
  handler.say(status, content[: len(content) // 2], promised=len(content))
  handler.close_connection = True


def hangs_up(handler, body):
  handler.close_connection = True


def is_not_http(handler, body):
  handler.wfile.write(b"\x00\x01SSH-2.0\r\n\r\n")
  handler.close_connection = True


def hangs(handler, body):
  handler.owner.released.wait(300)
  handler.close_connection = True


BAD_ANSWERS = (
  says_500,
  says_no_json,
  says_no_text,
  says_endless_brackets,
  says_something_else,
  loses_a_token,
  aborts,
  says_half,
  hangs_up,
  is_not_http,
)
