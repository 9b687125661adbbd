"""Compares the tensors of one server with those before a load; see `checksums`."""

import logging
from collections.abc import Callable

from grpo_jax.engines import checksums
from grpo_jax.engines.base import WrongWeights
from grpo_jax.engines.checksums import Changes, Checksums, Known
from grpo_jax.engines.sglang_client import Client
from grpo_jax.engines.sglang_messages import Garbled
from grpo_jax.http.failures import Refused

_log = logging.getLogger(__name__)

_UNUSED = "the tensors of %s are not compared after a load: %s"


class TensorCheck:
  """Compares the checksums of a server, as far as it gives any.

  Attributes:
    known: Checksums of the newest version that the server had; None: there are none.
  """

  def __init__(self, dtype: str):
    """Makes it.

    Args:
      dtype: Dtype of the files that the server loads.
    """
    self.known: Known | None = None
    self._dtype = dtype
    self._started_with: Checksums | None = None
    self._client: Client | None = None  # of a server with checksums that can be compared.
    self._name = ""

  def forget(self) -> None:
    """Forgets the server, since another process takes its place."""
    self.known = self._started_with = self._client = None

  async def prepare(self, client: Client, *, name: str, is_ours: bool) -> None:
    """Asks for the checksums of what the server was started with; logs why if they say nothing.

    A server that was found running may have weights of a run that is continued, so what comes may
    be the same.

    Args:
      client: Client of the server.
      name: Name of the server, for messages.
      is_ours: Whether the run has started it, rather than found it running.

    Raises:
      Unanswered: The server does not answer.
    """
    try:
      why = checksums.refusal(await client.server_info(), self._dtype)
    except Refused as error:
      why = str(error)
    if why is not None:
      _log.info(_UNUSED, name, why)
      return
    self._client, self._name = client, name
    self._started_with = await self._asked() if is_ours else None

  async def compare(
    self, version: int, changes: Changes | None, reference: Callable[[], Known | None]
  ) -> None:
    """Compares what the server has after a load with what it, or another server, had.

    Args:
      version: Version that was loaded.
      changes: Tensors in which it differs from the version before; None: not known.
      reference: Function that returns the newest checksums of a server with the same options.

    Raises:
      Unanswered: The server does not answer.
      WrongWeights: Tensors have not arrived.
    """
    found = await self._asked()
    if found is None:
      return
    known = Known(version, found)
    for before in filter(None, (self.known, reference())):
      started_with = self._started_with
      why = checksums.fault(before, known, changes=changes, started_with=started_with)
      if why is not None:
        raise WrongWeights(f"{self._name} does not have version {version} of the weights: {why}")
    self.known = known

  async def _asked(self) -> Checksums | None:
    """Returns the checksums of the server; None if it gives none, which is logged once."""
    if self._client is None:
      return None
    try:
      return await self._client.checksums()
    except (Refused, Garbled) as error:
      self._client = None
      _log.info(_UNUSED, self._name, error)
      return None
