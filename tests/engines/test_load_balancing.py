"""Placement loses and doubles nothing, keeps groups together, and leaves no server idle."""

import random

import pytest

from grpo_jax.engines.load_balancing import LoadBalancer


def taken(placement):
  """Takes all that can go now, as (server, request)."""
  found = []
  while (one := placement.next()) is not None:
    found.append(one)
  return found


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_lost_or_doubled_whatever_happens(seed):
  """A random life: requests come, servers open and close, some requests fail and come again."""
  chance = random.Random(seed)
  servers, limit = range(chance.randint(1, 4)), chance.randint(1, 5)
  placement = LoadBalancer(servers, limit=limit)
  opened = set(servers)
  expected, finished, under_way = set(), [], []

  def take():
    while (one := placement.next()) is not None:
      server, request = one
      assert server in opened
      under_way.append(one)
      assert sum(s == server for s, _ in under_way) <= limit

  for number in range(400):
    event = chance.random()
    if event < 0.4:
      placement.add(chance.randint(0, 30), number)
      expected.add(number)
    elif event < 0.8 and under_way:
      server, request = under_way.pop(chance.randrange(len(under_way)))
      placement.done(server)
      if chance.random() < 0.3:
        placement.add(chance.randint(0, 30), request)  # its server failed: it comes again.
      else:
        finished.append(request)
    elif event < 0.9:
      server = chance.choice(servers)
      placement.close(server)
      opened.discard(server)
    else:
      server = chance.choice(servers)
      placement.open(server)
      opened.add(server)
    take()
    assert placement.in_flight == len(under_way)

  for server in servers:
    placement.open(server)
    opened.add(server)
  take()
  while under_way:
    server, request = under_way.pop()
    placement.done(server)
    finished.append(request)
    take()
  assert sorted(finished) == sorted(expected)


def test_new_groups_go_to_the_server_with_the_least_to_do():
  placement = LoadBalancer("ab", limit=10)
  for request in range(4):
    placement.add("long", request)
  for group in range(4):
    placement.add(group, f"g{group}")
  where = {request: server for server, request in taken(placement)}
  home = where[0]
  assert [where[r] for r in range(4)] == [home] * 4
  assert [where[f"g{g}"] for g in range(4)] == [next(iter({"a", "b"} - {home}))] * 4


def test_a_group_comes_back_to_its_server():
  placement = LoadBalancer("abc", limit=10)
  for group in range(3):
    placement.add(group, group)
  homes = {request: server for server, request in taken(placement)}
  assert len(set(homes.values())) == 3
  for server in homes.values():
    placement.done(server)
  for turn in range(1, 4):
    for group in (2, 0, 1):
      placement.add(group, group)
    again = {request: server for server, request in taken(placement)}
    assert again == homes, f"turn {turn}"
    for server in again.values():
      placement.done(server)


def test_an_idle_server_takes_what_waits_for_another():
  placement = LoadBalancer("ab", limit=2)
  for request in range(6):
    placement.add("one group", request)
  first = taken(placement)
  assert [server for server, _ in first].count("a") == 2
  assert [server for server, _ in first].count("b") == 2
  assert {request for _, request in first if _ == first[0][0]} >= {0, 1}  # in order at home.
  assert {request for server, request in first if server != first[0][0]} == {4, 5}  # the last.


def test_no_server_has_more_under_way_than_the_limit():
  placement = LoadBalancer("ab", limit=3)
  for request in range(20):
    placement.add(request, request)
  found = taken(placement)
  assert len(found) == 6 and placement.next() is None
  placement.done(found[0][0])
  assert placement.next()[0] == found[0][0]


def test_what_waits_for_a_closed_server_goes_elsewhere():
  placement = LoadBalancer("ab", limit=1)
  placement.add("x", "x0")
  (first,) = taken(placement)
  other = "b" if first[0] == "a" else "a"
  placement.add("y", "y0")
  (second,) = taken(placement)
  assert second[0] == other
  placement.add("y", "y1")
  placement.close(other)
  placement.done(first[0])
  assert taken(placement) == [(first[0], "y1")]


def test_with_all_servers_closed_requests_wait_until_one_opens():
  placement = LoadBalancer("ab", limit=4)
  placement.close("a")
  placement.close("b")
  for request in range(3):
    placement.add(request, request)
  assert placement.next() is None
  placement.open("b")
  assert taken(placement) == [("b", 0), ("b", 1), ("b", 2)]


def test_dropped_requests_are_never_sent():
  placement = LoadBalancer("ab", limit=1)
  for request in range(6):
    placement.add(request, request)
  first = {request for _, request in taken(placement)}
  placement.drop(lambda request: request % 2)
  placement.close("a")
  placement.done("a")
  placement.done("b")
  left = set()
  while (one := placement.next()) is not None:
    left.add(one[1])
    placement.done(one[0])
  assert left == {r for r in range(6) if r % 2 == 0} - first
