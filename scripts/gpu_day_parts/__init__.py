"""The parts of `scripts/gpu_day.py`, and what runs them, judges them and writes them down.

schedule    which parts there are, in which order, with which limits and sizes
running     one process for each part, its limit, the result file
child       what such a process executes
arithmetic  operations, bytes, data sheets, MFU (pure)
traces      the longest kernels of a profile (pure)
verdict     which form of the LM head should be the default (pure)
summary     the numbers of a result, derived from what was measured (pure)
document    docs/gpu.md and README's sentence, out of a result
wheels      what to carry to a machine without a network

The other modules are the parts themselves: each has a function `measure`.
"""
