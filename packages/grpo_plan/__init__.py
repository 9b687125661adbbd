"""The needs of a run on a machine that is not present: memory, traffic, time, by compilation."""
