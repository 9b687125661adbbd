"""Limits of the operating system for this process."""

import resource


def allow_open_files(most: int = 65536) -> None:
  """Raises the limit of open files to what the system allows, at most to `most`.

  Every attempt of a conversation has an environment with an event loop, which holds three; the
  usual limit of 1024 is that of about 340 attempts.
  """
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  wanted = most if hard == resource.RLIM_INFINITY else min(most, hard)
  if soft != resource.RLIM_INFINITY and soft < wanted:
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
