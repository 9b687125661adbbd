"""Runs untrusted programs, and judges them by tests that they cannot see.

Two processes, each in its own sandbox:

    trainer ── supervise ──┬── judge      has the tests and the expected answers
                           └── candidate  has the program; the judge asks it for values

Only plain values pass between them (`wire`): arguments one way, results the other. A program may
override, patch, print or exit: expected values and comparison are not in its process. `launch`
confines the processes.

The modules need only the standard library. A sandbox sees `wire`, `sharing`, `confine`,
`candidate`, `remote`, `asserts` and `judge`, and importing them must stay cheap.
"""
