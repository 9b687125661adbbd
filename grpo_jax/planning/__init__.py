"""What a run would need on a machine that is not present: memory, traffic and time, by compilation."""
