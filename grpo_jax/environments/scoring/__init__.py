"""What rewards from a model share: the conversation, batches of calls, and an HTTP client."""
