"""Dataloader functions of the tests, named by dotted path in their configs."""

asked_at: list[int | None] = []  # newest step that was known at each call.


def recording(loaders, *, num_prompts, records, memory):
  """Takes from the only loader, and records which steps were known."""
  del memory
  asked_at.append(records[-1]["step"] if records else None)
  (loader,) = loaders.values()
  return loader.take(num_prompts)
