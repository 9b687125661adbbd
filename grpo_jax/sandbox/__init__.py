"""Runs untrusted programs, and judges them by tests that they cannot see.

Two processes, each in its own sandbox:

    trainer ── supervise ──┬── judge      has the tests and the expected answers
                           └── candidate  has the program; is asked for values by the judge

Only plain values pass between them (`wire`): arguments one way, results the other. A program may
override, patch, print or exit as it likes, because the expected values and the comparison are not
in its process. `launch` defines what confines a process.

The modules need only the standard library. A sandbox sees `wire`, `sharing`, `confine`,
`candidate`, `remote`, `asserts` and `judge`, and importing them must stay cheap.
"""
