"""The parts of `scripts/gpu_day.py`, and the modules that run and document them.

schedule   the parts, their order, limits and sizes
running    one process for each part, its limit, the device for one of them alone, the result file
child      what such a process executes
work       packed rows of random tokens, their operations, the rates of a device
models     models of random weights
summary    the table of a result, and its place in docs/gpu.md (pure but for that page)
bundle     a folder that holds all that a machine without a network needs

The other modules are the parts themselves: each has a function `measure`. What they time, they time
with the functions of scripts/benchmark.
"""
