"""Runs programs that nobody has read, and judges them by tests that they cannot see.

Two processes, each in a sandbox of its own:

    trainer ── supervise ──┬── judge      has the tests and the expected answers
                           └── candidate  has the program; is asked for values by the judge

Between them go plain values alone (`wire`): arguments one way, results the other. Whatever the
program overrides, patches, prints or exits with is its own affair; what a result is compared
with, and the comparison, are not in its process. `launch` says what confines a process.

The modules run on the standard library alone: `wire`, `sharing`, `confine`, `candidate`,
`remote`, `asserts` and `judge` are what a sandbox sees, and importing them must stay cheap.
"""
