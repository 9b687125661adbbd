"""What rewards from a model need: its conversation, batches of calls, and an HTTP client."""
