"""Scripts that behave badly while they are rehearsed."""

from __future__ import annotations

from pathlib import Path
from random import Random

from tests.bad_inputs.case import ERROR, FINDINGS, INCONCLUSIVE, Case

_TRAINS = """\
import atexit, ctypes, os, shutil, signal, sys, threading
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(2, 1))
for _ in range(3):
    model(torch.ones(4, 2)).sum().backward()
"""
_ENDS = (
    "class Bad(Exception):\n    def __str__(self): raise ValueError\n    __repr__ = __str__\nraise Bad\n",
    "class Bad(Exception):\n    def __str__(self): sys.exit(7)\nraise Bad\n",
    "raise RuntimeError('x' * 1_000_000)\n",
    "raise RuntimeError('\\udc80\\0\\x1b[31m\\n\\n')\n",
    "atexit.register(lambda: sys.exit(3))\nsys.exit('\\udc80')\n",
    "atexit.register(lambda: 1 / 0)\nraise SystemExit([])\n",
    "os._exit(77)\n",
    "os.close(1); os.close(2); sys.exit(5)\n",
    "sys.stdout = sys.stderr = None\nraise KeyError\n",
    "print('x' * 10_000_000, file=sys.stderr); sys.exit(1)\n",
    "sys.stderr.buffer.write(bytes(range(256)) * 100); sys.exit(1)\n",
    "os.kill(os.getpid(), signal.SIGSEGV)\n",
    "os.kill(os.getppid(), signal.SIGKILL)\n",
    "sys.excepthook = None\nraise ValueError\n",
    "sys.modules.clear()\nraise ValueError\n",
    "os.environ.clear()\nsys.exit(2)\n",
    "sys.setrecursionlimit(60)\ndef f(): f()\nf()\n",
    "threading.Thread(target=lambda: sys.exit(4)).start()\nraise ValueError\n",
    "def f(n): raise ValueError(n) from (f(n - 1) if n else None)\nf(200)\n",
    "raise ExceptionGroup('g', [ValueError(i) for i in range(1000)])\n",
)


def bad_rehearsal(random: Random, folder: Path) -> Case:
    """A script that ends badly on its ranks, after some training, or before it."""
    lines = _TRAINS.splitlines(keepends=True)
    kept = random.choice([len(lines), len(lines), 4])
    (folder / "train.py").write_text("".join(lines[:kept]) + random.choice(_ENDS))
    return Case(("check", "--time-limit", "15", "train.py"), frozenset({FINDINGS, ERROR, INCONCLUSIVE}), rehearses=True)
