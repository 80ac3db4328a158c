"""Three ranks on gloo, of which the last one does not come to a broadcast; each writes its dump in two forms."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

recorder: Any = torch._C._distributed_c10d
RANK = int(os.environ["RANK"])


def write() -> None:
    """Write both forms once the others stand, and end."""
    time.sleep(4)
    directory = Path(os.environ["DUMPS"])
    whole = recorder._dump_fr_trace(includeCollectives=True, includeStackTraces=True)
    Path(directory, f"dump_{RANK}").write_bytes(whole)
    Path(directory, f"trace_{RANK}.json").write_bytes(recorder._dump_fr_trace_json(includeCollectives=True))
    # A rank that left would end the others' collectives.
    while len(list(directory.glob("trace_*"))) < 3:
        time.sleep(0.1)
    time.sleep(0.5)
    os._exit(0)


dist.init_process_group("gloo")
pair = dist.new_group([0, 1])
threading.Thread(target=write, daemon=True).start()
for _ in range(5):
    dist.all_reduce(torch.ones(10))
if RANK < 2:
    dist.all_reduce(torch.ones(3), group=pair)
if RANK == 2:
    time.sleep(100)
dist.broadcast(torch.ones(4), 0)
time.sleep(100)
