"""Addresses and keys of servers, as options name them."""

import os
import urllib.parse

from grpo_jax.http import redaction


def address(url: str, route: str = "") -> str:
  """Returns the address of a server's route.

  Args:
    url: Address of the server.
    route: Path that is appended to the address; "": the address is complete.

  Raises:
    ValueError: The address is invalid, or holds a password.
  """
  parts = urllib.parse.urlsplit(url)
  if parts.scheme not in ("http", "https") or not parts.hostname:
    raise ValueError(f"url must be http://… or https://…, got {url!r}")
  if parts.username or parts.password:
    raise ValueError("url holds a user name or password: name a variable in api_key_env instead")
  path = parts.path.rstrip("/") if route else parts.path
  return urllib.parse.urlunsplit(parts._replace(path=path + route))


def key(variable: str | None) -> str | None:
  """Returns the key in an environment variable; None if no variable is named.

  Raises:
    ValueError: The variable is not set, or its value cannot be a key.
  """
  if variable is None:
    return None
  value = os.environ.get(variable, "").strip()
  if not value:
    raise ValueError(f"api_key_env names {variable}, which is not set in the environment")
  return redaction.check_secret(value, f"api_key_env: the environment variable {variable}")
