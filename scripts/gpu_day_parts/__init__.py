"""The parts of `scripts/gpu_day.py`, and the modules that run, judge and document them.

schedule    the parts, their order, limits and sizes
running     one process for each part, its limit, the result file
child       what such a process executes
arithmetic  operations, bytes, data sheets, MFU (pure)
traces      the longest kernels of a profile (pure)
verdict     which form of the LM head should be the default (pure)
summary     the numbers of a result, derived from what was measured (pure)
document    docs/gpu.md and README's sentence, from a result
wheels      what to copy to a machine without a network

The other modules are the parts themselves: each has a function `measure`.
"""
