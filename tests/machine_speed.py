"""How fast the machine is at the moment: bounds of CPU seconds are those of a machine that parses as fast as ours."""

from __future__ import annotations

import os
import subprocess
import sys

# Of six runs on the idle machine on which the bounds were set the least is 2.01 s. At other hours the same machine was
# 1.6 times as slow at everything: reading 50,000 collectives took 6.5 s in the place of 4.0 s.
USUAL_PARSING_S = 2.0
_PARSING = r"""
import ast
import gc

gc.disable()
for _ in range(2):
    ast.parse("if rank == 1: dist.barrier()\n" * 50_000)
"""


def is_within(cpu_s: float, bound_s: float) -> bool:
    """Return whether what took some CPU time would have stayed in a bound on a machine of the usual speed."""
    return cpu_s <= bound_s or cpu_s <= bound_s * parsing_s() / USUAL_PARSING_S


def parsing_s() -> float:
    """Return the CPU time in which Python itself parses 100,000 lines, here and now, in a process of its own."""
    process = subprocess.Popen([sys.executable, "-c", _PARSING])
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return used.ru_utime + used.ru_stime
