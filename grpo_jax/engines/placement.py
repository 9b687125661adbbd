"""Which request goes to which server next. Pure.

A group stays with one server, whose cache then holds its prompt once. A new group goes to the
server with the least to do; a server with nothing of its own left takes from the fullest, since
an idle server costs more than a prompt that is computed twice.
"""

import collections
import dataclasses
from collections.abc import Hashable, Iterable
from typing import Any

REMEMBERED = 65536  # groups whose server is known; later turns of a conversation come back to it.


@dataclasses.dataclass(slots=True)
class _Place:
  """A server as placement sees it."""

  waiting: collections.deque[tuple[Hashable, Any]]  # (group, request) that will go there.
  under_way: int = 0
  is_open: bool = True

  @property
  def load(self) -> int:
    return len(self.waiting) + self.under_way


class Placement:
  """Queues of requests, one a server; at most `limit` requests are under way at each."""

  def __init__(self, servers: Iterable[Hashable], *, limit: int):
    """Makes empty queues.

    Args:
      servers: Their names.
      limit: Requests under way at one server.
    """
    self._places = {server: _Place(collections.deque()) for server in servers}
    self._limit = limit
    self._homes: collections.OrderedDict[Hashable, Hashable] = collections.OrderedDict()
    self._homeless: collections.deque[tuple[Hashable, Any]] = collections.deque()

  def add(self, group: Hashable, request: Any) -> None:
    """Queues a request at the server of its group, or at the one with the least to do."""
    home = self._home(group)
    if home is None:
      self._homeless.append((group, request))
    else:
      self._places[home].waiting.append((group, request))

  def next(self) -> tuple[Hashable, Any] | None:
    """Takes the next request that can go to a server; None if there is none, or no room.

    Returns:
      The server, and the request, which is under way there until `done`.
    """
    for server, place in self._by_load():
      if place.under_way < self._limit and place.waiting:
        place.under_way += 1
        return server, place.waiting.popleft()[1]
    for server, place in self._by_load():
      fullest = max(self._places.values(), key=lambda p: len(p.waiting), default=None)
      if place.under_way < self._limit and fullest is not None and fullest.waiting:
        place.under_way += 1
        return server, fullest.waiting.pop()[1]  # of the last group, which has not begun there.
    return None

  def done(self, server: Hashable) -> None:
    """Says that a request is no longer under way at a server, however it ended."""
    self._places[server].under_way -= 1

  def close(self, server: Hashable) -> None:
    """Takes a server out: what waits for it goes elsewhere, or waits until one opens."""
    place = self._places[server]
    place.is_open = False
    moved, place.waiting = place.waiting, collections.deque()
    self._homes = collections.OrderedDict(
      (group, home) for group, home in self._homes.items() if home != server
    )
    for group, request in moved:
      self.add(group, request)

  def open(self, server: Hashable) -> None:
    """Takes a server in again; what waited for any server is spread anew."""
    self._places[server].is_open = True
    waiting, self._homeless = self._homeless, collections.deque()
    for group, request in waiting:
      self.add(group, request)

  def drop(self, is_unwanted: Any) -> None:
    """Forgets the waiting requests that `is_unwanted(request)`."""
    for place in self._places.values():
      place.waiting = collections.deque(x for x in place.waiting if not is_unwanted(x[1]))
    self._homeless = collections.deque(x for x in self._homeless if not is_unwanted(x[1]))

  @property
  def under_way(self) -> int:
    return sum(place.under_way for place in self._places.values())

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
