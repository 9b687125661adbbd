"""Hides torch from a process: transformers imports it if it is installed, which takes seconds.

A run does not need torch; only some tests compare with it. Put this folder on PYTHONPATH.
"""

import sys

sys.modules["torch"] = None  # An import fails, and find_spec finds nothing.
