"""One part in its own process: ``python -m tests.on_gpu.one_part MODULE FOLDER ROWS [--pretend]``."""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from tests.on_gpu.claims import Bench


def end_with_parent(parent: int) -> None:
    """End this process and its jobs once the suite is gone that would have ended them in time."""
    while os.getppid() == parent:
        time.sleep(1)
    import psutil

    for job in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            job.kill()
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, args=(os.getppid(),), daemon=True).start()
    part = importlib.import_module(sys.argv[1])
    name = sys.argv[1].rpartition(".")[2]
    part.measure(Bench(name, part.CLAIMS, Path(sys.argv[2]), Path(sys.argv[3]), pretends="--pretend" in sys.argv))
