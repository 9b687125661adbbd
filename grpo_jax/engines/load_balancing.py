"""Decides which request goes to which server next. Pure.

A group stays with one server, whose cache then holds its prompt once. A new group goes to the
least loaded server. A server without requests of its own takes some from the fullest server,
because an idle server costs more than a prompt that is computed twice.
"""

import collections
import dataclasses
from collections.abc import Hashable, Iterable
from typing import Any

REMEMBERED = 65536  # groups whose server is remembered, for later turns of a conversation.


@dataclasses.dataclass(slots=True)
class _Place:
  """A server and its queue."""

  waiting: collections.deque[tuple[Hashable, Any]]  # (group, request) queued for it.
  in_flight: int = 0
  is_open: bool = True

  @property
  def load(self) -> int:
    return len(self.waiting) + self.in_flight


class LoadBalancer:
  """Queues of requests, one per server; at most `limit` requests are in flight at each."""

  def __init__(self, servers: Iterable[Hashable], *, limit: int):
    """Makes empty queues.

    Args:
      servers: Names of the servers.
      limit: Largest number of requests in flight at one server.
    """
    self._places = {server: _Place(collections.deque()) for server in servers}
    self._limit = limit
    self._homes: collections.OrderedDict[Hashable, Hashable] = collections.OrderedDict()
    self._homeless: collections.deque[tuple[Hashable, Any]] = collections.deque()

  def add(self, group: Hashable, request: Any) -> None:
    """Queues a request at the server of its group, or at the least loaded one."""
    home = self._home(group)
    if home is None:
      self._homeless.append((group, request))
    else:
      self._places[home].waiting.append((group, request))

  def next(self) -> tuple[Hashable, Any] | None:
    """Takes the next request that can go to a server; None if there is none, or no room.

    Returns:
      The server, and the request, which is in flight there until `done`.
    """
    for server, place in self._by_load():
      if place.in_flight < self._limit and place.waiting:
        place.in_flight += 1
        return server, place.waiting.popleft()[1]
    for server, place in self._by_load():
      fullest = max(self._places.values(), key=lambda p: len(p.waiting), default=None)
      if place.in_flight < self._limit and fullest is not None and fullest.waiting:
        place.in_flight += 1
        return server, fullest.waiting.pop()[1]  # from the last group, which has not begun there.
    return None

  def done(self, server: Hashable) -> None:
    """Records that a request is no longer in flight at a server, however it ended."""
    self._places[server].in_flight -= 1

  def close(self, server: Hashable) -> None:
    """Removes a server: its waiting requests go elsewhere, or wait until one opens."""
    place = self._places[server]
    place.is_open = False
    moved, place.waiting = place.waiting, collections.deque()
    self._homes = collections.OrderedDict(
      (group, home) for group, home in self._homes.items() if home != server
    )
    for group, request in moved:
      self.add(group, request)

  def open(self, server: Hashable) -> None:
    """Adds a server again; requests that waited for any server are distributed again."""
    self._places[server].is_open = True
    waiting, self._homeless = self._homeless, collections.deque()
    for group, request in waiting:
      self.add(group, request)

  def drop(self, is_unwanted: Any) -> None:
    """Drops the waiting requests for which `is_unwanted(request)` is true."""
    for place in self._places.values():
      place.waiting = collections.deque(x for x in place.waiting if not is_unwanted(x[1]))
    self._homeless = collections.deque(x for x in self._homeless if not is_unwanted(x[1]))

  @property
  def in_flight(self) -> int:
    return sum(place.in_flight for place in self._places.values())

  def _by_load(self) -> list[tuple[Hashable, _Place]]:
    opened = [(server, place) for server, place in self._places.items() if place.is_open]
    return sorted(opened, key=lambda item: item[1].load)

  def _home(self, group: Hashable) -> Hashable | None:
    home = self._homes.get(group)
    if home is None:
      opened = self._by_load()
      if not opened:
        return None
      home = opened[0][0]
      self._homes[group] = home
    self._homes.move_to_end(group)
    while len(self._homes) > REMEMBERED:
      self._homes.popitem(last=False)
    return home
