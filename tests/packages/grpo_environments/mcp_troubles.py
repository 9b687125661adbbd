"""An MCP server without the package `mcp`, which can misbehave in every way: for tests.

python mcp_troubles.py [mute | dies | garbage]
"""

import json
import os
import signal
import subprocess
import sys
import time

TOOLS = ("pid", "die", "hang", "garbage", "mute", "error", "parts", "child", "pattern")
SCHEMA = {"type": "object", "properties": {}}
# Whether this expression matches "aaa…!" takes a time that doubles with each letter.
SLOW = {"type": "object", "properties": {"x": {"pattern": "^(a+)+$"}}}


def result_of(name):
  """Returns what a call of a tool gives; some do not return."""
  if name == "die":
    print("no more", file=sys.stderr)
    os._exit(3)
  if name == "hang":  # it reads nothing any more, and does not end when it is asked to.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(1000)
  if name == "garbage":
    os.write(1, b'garbage\n{}\n[1,\n\xff\xfe\n{"jsonrpc": "2.0", "id": 10000, "result": 1}\n')
  if name == "child":  # a process that leaves the group of the server.
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    return {"content": [{"type": "text", "text": str(child.pid)}]}
  if name == "parts":
    picture = {"type": "image", "data": "eA==", "mimeType": "image/png"}
    return {"content": [{"type": "text", "text": "a"}, picture]}
  if name == "pattern":
    text = [{"type": "text", "text": "matched"}]
    return {"content": text, "structuredContent": {"x": "a" * 40 + "!"}}
  text = str(os.getpid()) if name == "pid" else name
  return {"content": [{"type": "text", "text": text}], "isError": name == "error"}


def answer(request):
  """Returns the answer to a request; None: there is none."""
  method, params = request["method"], request.get("params", {})
  if method == "initialize":
    version = params["protocolVersion"]
    info = {"name": "troubles", "version": "1"}
    return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
  if method == "tools/list":  # in pages of five.
    first = int(params.get("cursor") or 0)
    tools = [{"name": name, "inputSchema": SCHEMA} for name in TOOLS[first : first + 5]]
    for tool in tools:
      tool |= {"outputSchema": SLOW} if tool["name"] == "pattern" else {}
    return {"tools": tools, **({"nextCursor": "5"} if not first else {})}
  if method == "tools/call":
    return None if params["name"] == "mute" else result_of(params["name"])
  return {}


def main(how=""):
  if how == "dies":
    print("no licence", file=sys.stderr)
    sys.exit(3)
  for line in sys.stdin:
    request = json.loads(line)
    if how == "garbage":
      print("garbage", flush=True)
    if how or "id" not in request:
      continue
    found = answer(request)
    if found is not None:
      print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": found}), flush=True)


if __name__ == "__main__":
  main(*sys.argv[1:])
