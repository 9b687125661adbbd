"""OpenAssistant's trees of messages, as the conversations that end with a question. Pure.

The hub has one row for each message ({"message_id", "parent_id", "text", "role", "rank", …}); files
that people download have one row for each tree ({"prompt": {"text", "role", "replies": […]}}).
Either way a row of `MessageTrees` is a message of the user that was answered: the conversation up
to it, and its replies.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from grpo_jax.data.formats import RowError

Message = Mapping[str, Any]

_ROLES = {"prompter": "user", "assistant": "assistant"}


class MessageTrees:
  """Questions that were answered, with the conversation before them, by number."""

  def __init__(self, source: Any):
    """Finds the questions. All rows are read once; their numbers are kept.

    Args:
      source: Rows of messages, or of trees.

    Raises:
      ValueError: There is no question that was answered.
    """
    self.name: str = source.name
    self._source = source
    # Of each question: its row, and the rows of its replies; or a path of numbers in its tree.
    self._questions: list[tuple[int, tuple[int, ...] | None]] = []
    self._parents: dict[int, int] = {}
    self._is_tree = False
    self._index()
    if not self._questions:
      raise ValueError(f"{source.name!r} has no message of a prompter that was answered")

  def _index(self) -> None:
    rows: dict[str, int] = {}
    parents: dict[int, str] = {}
    asked: list[int] = []
    answers: dict[str, list[int]] = {}
    for row in range(len(self._source)):
      try:
        message = self._source[row]
      except RowError:
        self._questions.append((row, ()))  # reading it reports the error.
        continue
      if isinstance(message.get("prompt"), Mapping):
        self._is_tree = True
        self._questions += [(row, path) for path in _asked(message["prompt"])]
        continue
      rows[str(message.get("message_id"))] = row
      if message.get("parent_id") is not None:
        parents[row] = str(message["parent_id"])
      if message.get("role") == "prompter":
        asked.append(row)
      elif message.get("role") == "assistant" and not message.get("deleted"):
        answers.setdefault(str(message.get("parent_id")), []).append(row)
    self._parents = {row: rows[parent] for row, parent in parents.items() if parent in rows}
    self._lost = {row for row, parent in parents.items() if parent not in rows}
    ids = {row: name for name, row in rows.items()}
    replies = ((row, tuple(answers.get(ids.get(row, ""), ()))) for row in asked)
    self._questions += [(row, found) for row, found in replies if found]

  def __len__(self) -> int:
    return len(self._questions)

  def __getitem__(self, number: int) -> dict[str, Any]:
    """Returns a question: `messages` up to it, and its `replies` with `text` and `rank`.

    Raises:
      RowError: A message of the thread is missing or broken.
    """
    row, place = self._questions[number]
    thread, replies = (
      self._tree(row, place or ()) if self._is_tree else self._rows(row, place or ())
    )
    where = self.where(number)
    question = thread[-1]
    kept = ("message_id", "message_tree_id", "lang")
    return {
      **{key: question[key] for key in kept if key in question},
      "messages": [_message(each, where) for each in thread],
      "replies": [{"text": each.get("text"), "rank": each.get("rank")} for each in replies],
    }

  def where(self, number: int) -> str:
    """Returns the place of the row of a question, or of its tree."""
    return self._source.where(self._questions[number][0])

  def _rows(self, row: int, replies: Sequence[int]) -> tuple[list[Message], list[Message]]:
    above = [row]
    while above[-1] in self._parents and len(above) <= len(self._parents):
      above.append(self._parents[above[-1]])
    if above[-1] in self._lost or len(above) > len(self._parents) + 1:
      raise RowError(self._source.where(row), "the messages before this one are not in the data")
    return [self._source[each] for each in reversed(above)], [self._source[r] for r in replies]

  def _tree(self, row: int, path: Sequence[int]) -> tuple[list[Message], list[Message]]:
    node = self._source[row]["prompt"]
    thread = [node]
    for number in path:
      node = node["replies"][number]
      thread.append(node)
    return thread, [reply for reply in node["replies"] if _is_answer(reply)]


def _asked(root: Message) -> Iterator[tuple[int, ...]]:
  """Yields the path to every answered question of a tree: numbers of replies, from the root."""
  waiting: list[tuple[tuple[int, ...], Message]] = [((), root)]
  while waiting:
    path, node = waiting.pop()
    replies = node.get("replies") or ()
    if node.get("role") == "prompter" and any(_is_answer(each) for each in replies):
      yield path
    waiting += [((*path, i), each) for i, each in enumerate(replies)]


def _is_answer(message: Message) -> bool:
  return message.get("role") == "assistant" and not message.get("deleted")


def _message(message: Message, where: str) -> dict[str, Any]:
  role = _ROLES.get(str(message.get("role")))
  if role is None or not isinstance(message.get("text"), str):
    raise RowError(where, f"a message needs a role and text, got {message!r:.100}")
  return {"role": role, "content": message["text"]}
