"""One part in its own process: ``python -m tests.on_gpu.one_part MODULE FOLDER ROWS [--pretend]``."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from tests.on_gpu.claims import Bench

if __name__ == "__main__":
    part = importlib.import_module(sys.argv[1])
    name = sys.argv[1].rpartition(".")[2]
    part.measure(Bench(name, part.CLAIMS, Path(sys.argv[2]), Path(sys.argv[3]), pretends="--pretend" in sys.argv))
