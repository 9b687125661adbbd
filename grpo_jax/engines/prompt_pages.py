"""Which pages hold a prompt, in the layers of each window. Pure, on the host.

A layer without a window keeps all pages of a prompt. A layer with one keeps the last of them, as
many as what follows may see, and gives the page of the oldest tokens to the newest ones.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int


@dataclasses.dataclass(frozen=True)
class Pool:
  """The pages of all prompts in the layers of one window.

  Attributes:
    window: Window of the layers; None: they see all tokens.
    table: Largest number of pages of a prompt.
    page: Tokens of a page.
    count: Number of pages.
  """

  window: int | None
  table: int
  page: int = 1
  count: int = 0

  def needed(self, length: int) -> int:
    """Returns the number of pages for a prompt of `length` tokens."""
    return min(-(-length // self.page), self.table)

  def places(self, pages: Sequence[int], positions: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    """Returns the page of each token of a prompt.

    Args:
      pages: Pages of the prompt.
      positions: Positions of the tokens.
    """
    return np.asarray(pages, np.int32)[positions // self.page % len(pages)]

  def stays(
    self, positions: Int[np.ndarray, " n"], last: Int[np.ndarray, " n"]
  ) -> Bool[np.ndarray, " n"]:
    """Returns which tokens are still in their page when later ones have been written.

    Args:
      positions: Positions of the tokens.
      last: Position of the last token that is written to the same prompt.
    """
    return positions // self.page > last // self.page - self.table

  def listed(self, pages: Sequence[int], length: int) -> tuple[list[int], int]:
    """Returns the pages that hold the last tokens of a prompt, in the order of positions.

    Args:
      pages: Pages of the prompt.
      length: Number of tokens that have been written.

    Returns:
      The pages; position of the first token of the first of them.
    """
    end = -(-length // self.page)
    begin = max(end - len(pages), 0)
    return [pages[number % len(pages)] for number in range(begin, end)], begin * self.page


def table_of(window: int | None, table: int, page: int) -> int:
  """Returns how many pages of a prompt layers keep, of `table` pages of `page` tokens.

  What follows a prompt sees window - 1 of its tokens. The last page may hold only one of them.
  """
  return table if window is None else min(table, 1 + max(-(-(window - 2) // page), 0))
