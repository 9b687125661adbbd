"""SGLang servers in virtual time: a loop that never waits, and servers that sample tick by tick.

The fleet, the dispatcher and the state of each server are those of the engine; only the requests
to a server, and its process, are simulated. A token's logprob says what computed it: -(v + 1) if
version v sampled it from a context of version v, and less by 1000 if a part of its context was
computed by another version.
"""

import asyncio
import collections
import dataclasses
import selectors
import types

from grpo_jax.engines import fleet, server
from grpo_jax.engines.sglang_client import Client
from grpo_jax.http.failures import Refused, Unanswered

MIXED = -1000.0
TICK_S = 0.1


class _Selector:
  """Moves the clock on instead of waiting."""

  def __init__(self):
    self._own = selectors.DefaultSelector()
    self.now = 0.0

  def select(self, timeout=None):
    assert timeout is not None, "everything waits for something that never comes"
    self.now += max(timeout, 0.0)
    return self._own.select(0)

  def __getattr__(self, name):
    return getattr(self._own, name)


class VirtualLoop(asyncio.SelectorEventLoop):
  """An event loop in which no time passes but that of its timers."""

  def __init__(self):
    self._virtual = _Selector()
    super().__init__(self._virtual)

  def time(self):
    return self._virtual.now


def run(main, patch):
  """Runs a coroutine in virtual time; `patch` is pytest's monkeypatch."""
  loop = VirtualLoop()

  async def at_once(function, *arguments, **options):
    return function(*arguments, **options)

  clock = types.SimpleNamespace(monotonic=loop.time)
  for module in (fleet, server):
    patch.setattr(module, "time", clock)
  patch.setattr(asyncio, "to_thread", at_once)
  try:
    return loop.run_until_complete(main)
  finally:
    loop.close()


@dataclasses.dataclass(eq=False)
class _Request:
  """A completion at a server."""

  name: str
  prompt: tuple[int, ...]
  seed: int
  count: int
  adapter: str | None
  answer: asyncio.Future
  versions: list[int] = dataclasses.field(default_factory=list)
  logprobs: list[float] = dataclasses.field(default_factory=list)
  cached: set[int] = dataclasses.field(default_factory=set)  # versions that computed its context.


class Simulated:
  """One server: its process, its requests, and what it was asked.

  Attributes:
    state: "up", "hung" or "dead".
    needs: oldest version with which a request may be sent to it.
    refuses_flush: how often it still refuses to clear its cache.
    flaws: what should never have happened.
  """

  def __init__(self, chance, *, slots=4):
    self.chance, self.slots = chance, slots
    self.refuses_flush = 0
    self.flaws = []
    self.restart()

  def restart(self, *, needs=-1):
    """Begins again as a new process, with weights that no version of the run has."""
    self.state, self.weights, self.reported = "up", -1, "-1"
    self.needs = needs
    self.is_paused = False
    self.busy = asyncio.Lock()  # it obeys one command after the other.
    self.running, self.waiting = [], collections.deque()
    self.cache = collections.defaultdict(set)  # (adapter, prompt) → versions.
    self.adapters = {}
    self.revived = asyncio.Event()
    self.revived.set()

  def kill(self):
    if self.state == "dead":
      return
    self.state = "dead"
    self.revived.set()
    for request in (*self.running, *self.waiting):
      if not request.answer.done():
        request.answer.set_exception(Unanswered("the connection was reset"))
    self.running, self.waiting = [], collections.deque()

  def hang(self):
    if self.state == "up":
      self.state = "hung"
      self.revived.clear()

  def wake(self):
    if self.state == "hung":
      self.state = "up"
      self.revived.set()

  async def reached(self):
    """Returns once the server reads a request."""
    process = self.cache  # of another process it is another one.
    await asyncio.sleep(self.chance.uniform(0.0, 0.02))
    await self.revived.wait()
    if self.state == "dead" or self.cache is not process:
      raise Unanswered("nobody answers")

  def tick(self):
    """Samples a token of each running request."""
    if self.state != "up" or self.busy.locked():
      return
    self.running = [r for r in self.running if not r.answer.done()]
    self.waiting = collections.deque(r for r in self.waiting if not r.answer.done())
    if self.is_paused:
      return
    while self.waiting and len(self.running) < self.slots:
      self.running.append(self.waiting.popleft())
    for request in self.running:
      self._sample(request)

  def _sample(self, request):
    version = self.weights if request.adapter is None else self.adapters[request.adapter]
    if not request.cached:  # the prompt from the prefix cache or computed, its own tokens computed.
      stored = self.cache[request.adapter, request.prompt]
      if not stored:
        stored.add(version)
      request.cached = {*stored, *([version] if request.versions else [])}
    pure = request.cached == {version}
    request.versions.append(version)
    request.logprobs.append(-(version + 1) + (0.0 if pure else MIXED))
    request.cached.add(version)
    if len(request.versions) == request.count:
      request.answer.set_result(self._answer(request))

  def _answer(self, request):
    spans = []
    for at, version in enumerate(request.versions):
      said = self.reported if request.adapter else version
      if spans and spans[-1]["version"] == str(said):
        spans[-1]["end"] = at + 1
      else:
        spans.append({"version": str(said), "start": at, "end": at + 1})
    tokens = [(request.seed + i) % 50 for i in range(request.count)]
    reported = [[x, i, None] for x, i in zip(request.logprobs, tokens, strict=True)]
    return {
      "meta_info": {
        "id": request.name,
        "finish_reason": {"type": "length", "length": request.count},
        "completion_tokens": request.count,
        "weight_versions": spans,
        "output_token_logprobs": reported,
      }
    }

  def add(self, body):
    """Takes a request; returns the future of its answer."""
    if self.weights < self.needs:
      self.flaws.append(f"asked with weights {self.weights}, not yet given {self.needs}")
    adapter = body.get("lora_path")
    if adapter is not None and adapter not in self.adapters:
      raise Refused(f"answered 400: {adapter} has never been loaded", status=400)
    params = body["sampling_params"]
    request = _Request(
      name=body["rid"],
      prompt=tuple(body["input_ids"]),
      seed=params["sampling_seed"],
      count=params["max_new_tokens"],
      adapter=adapter,
      answer=asyncio.get_running_loop().create_future(),
    )
    self.waiting.append(request)
    return request

  def retract(self):
    for request in reversed(self.running):
      request.cached = set()
      self.waiting.appendleft(request)
    self.running = []

  def abort_all(self):
    for request in (*self.running, *self.waiting):
      if not request.answer.done():
        meta = {"finish_reason": {"type": "abort", "message": "Aborted"}}
        request.answer.set_result({"meta_info": meta})


class SimulatedClient(Client):
  """Asks a simulated server, within the time-outs of the engine."""

  def __init__(self, simulated, timeouts):
    self.simulated, self.timeouts = simulated, timeouts
    self.address = "http://simulated"

  async def _ask(self, work, timeout_s):
    try:
      async with asyncio.timeout(timeout_s):
        await self.simulated.reached()
        result = work()
        if asyncio.iscoroutine(result):
          result = await result
        await self.simulated.reached()  # an answer gets lost like a question.
        return result
    except TimeoutError as error:
      raise Unanswered(f"no complete answer within {timeout_s:g} s") from error

  async def _control(self, work, *, is_command=False):
    """Asks for something; a server that hung obeys also if nobody waits any longer."""
    its = self.simulated

    async def obey():
      if not is_command:
        return work()
      async with its.busy:
        result = work()
        return await result if asyncio.iscoroutine(result) else result

    task = asyncio.ensure_future(self._ask(obey, 1e9))
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    try:
      async with asyncio.timeout(self.timeouts.control_s):
        return await asyncio.shield(task)
    except TimeoutError as error:
      raise Unanswered("no complete answer") from error

  async def generate(self, body, *, read, limit):
    made = []

    async def answer():
      made.append(self.simulated.add(body))
      return await made[0].answer

    try:
      return read(await self._ask(answer, self.timeouts.generate_s))
    finally:
      for request in made:
        request.answer.cancel()  # the client is gone.

  async def score(self, body, *, read, limit):
    def scored():
      its = self.simulated
      version = its.adapters[body["lora_path"]] if "lora_path" in body else its.weights
      ids = body["input_ids"]
      entries = [[None if at == 0 else -(version + 1.0), i, None] for at, i in enumerate(ids)]
      return {"meta_info": {"input_token_logprobs": entries, "weight_version": str(its.reported)}}

    async def once_it_runs():
      while self.simulated.is_paused:
        await asyncio.sleep(TICK_S)
      return scored()

    return read(await self._ask(once_it_runs, self.timeouts.control_s))

  def shown(self, said):
    return str(said)

  async def health(self):
    async def once_it_runs():
      while self.simulated.is_paused:
        await asyncio.sleep(TICK_S)

    await self._ask(once_it_runs, self.timeouts.health_s)

  async def model_info(self):
    return await self._control(lambda: {"weight_version": str(self.simulated.reported)})

  async def server_info(self):
    info = {"enable_lora": True, "max_lora_rank": 8}
    return await self._control(lambda: info)

  async def can_update(self):
    return await self._control(lambda: True)

  async def pause(self):
    def pause():
      self.simulated.is_paused = True
      self.simulated.retract()

    await self._control(pause, is_command=True)

  async def resume(self):
    def resume():
      self.simulated.is_paused = False

    await self._control(resume, is_command=True)

  async def abort_all(self):
    await self._control(self.simulated.abort_all, is_command=True)

  async def load(self, folder, version):
    async def load():
      await asyncio.sleep(self.simulated.chance.uniform(0.0, 0.3))
      its = self.simulated
      if not its.is_paused:
        its.flaws.append("it samples while its weights change")
      its.weights, its.reported = int(folder.rpartition("-")[2]), version
      if its.refuses_flush:
        its.refuses_flush -= 1
        raise Refused("answered 400: the cache was not flushed because", status=400)
      if its.running:
        its.flaws.append("a request uses the cache that is cleared")
      its.cache.clear()

    await self._control(load, is_command=True)

  async def adapters(self):
    return await self._control(lambda: dict.fromkeys(self.simulated.adapters, "folder"))

  async def load_adapter(self, name, folder):
    async def load():
      await asyncio.sleep(self.simulated.chance.uniform(0.0, 0.3))
      self.simulated.adapters[name] = int(folder.rpartition("-")[2])

    await self._control(load, is_command=True)

  async def unload_adapter(self, name):
    def unload():
      its = self.simulated
      using = [r for r in (*its.running, *its.waiting) if r.adapter == name]
      if any(not r.answer.done() for r in using):
        its.flaws.append(f"{name} was unloaded while it was used")
      if its.adapters.pop(name, None) is None:
        raise Refused("answered 400: it is not loaded", status=400)

    await self._control(unload)


class SimulatedProcess:
  """The process of a server that the run starts."""

  def __init__(self, simulated):
    self.simulated, self.address = simulated, "http://simulated"

  @property
  def is_running(self):
    return self.simulated.state != "dead"

  def kill(self):
    self.simulated.kill()

  terminate = kill

  def wait(self, timeout_s):
    return True

  def exit_text(self):
    return "killed by SIGKILL"

  def last_lines(self):
    return "its last line"
