"""Measures the links between ranks: a barrier, and all-reduces by size. Run by torch's launcher, by its path.

Usage: link_sweep.py FILE. Rank 0 writes FILE, a JSON object; times are seconds, medians over the repetitions.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import sys
import time
from typing import Any, Callable

SIZES_BYTES = (8, 1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
REPETITIONS = 30
MOST_S = 1.5
"""For the repetitions of one size; a large one over a slow link is repeated three times at least."""
WARM_UP = 3
FEWEST = 3


def main() -> None:
    """Measure the links, and write the result."""
    import torch
    import torch.distributed as dist

    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = "cpu"
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        device = "cuda"
    dist.init_process_group("nccl" if on_gpu else "gloo")
    finish = torch.cuda.synchronize if on_gpu else _nothing
    agreed = torch.zeros(1, dtype=torch.int64, device=device)

    def median_s(call: Callable[[], object]) -> float:
        """Return the median time of a call; the ranks repeat it as often as rank 0 finds affordable."""
        started_s = time.perf_counter()
        for _ in range(WARM_UP):
            call()
        finish()
        once_s = (time.perf_counter() - started_s) / WARM_UP
        agreed[0] = max(FEWEST, min(REPETITIONS, int(MOST_S / max(once_s, 1e-9))))
        dist.broadcast(agreed, 0)
        took_s = []
        for _ in range(int(agreed.item())):
            started_s = time.perf_counter()
            call()
            finish()
            took_s.append(time.perf_counter() - started_s)
        return statistics.median(took_s)

    measured: dict[str, Any] = {
        "ranks": dist.get_world_size(),
        "backend": dist.get_backend(),
        "barrier_s": median_s(dist.barrier),
        "all_reduce": [],
    }
    for size_bytes in SIZES_BYTES:
        tensor = torch.zeros(size_bytes // 4, dtype=torch.float32, device=device)
        measured["all_reduce"].append(
            {"bytes": size_bytes, "seconds": median_s(functools.partial(dist.all_reduce, tensor))}
        )
    if dist.get_rank() == 0:
        with open(sys.argv[1], "w", encoding="utf-8") as file:
            json.dump(measured, file)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # torch 2.13 with gloo sometimes aborts when the interpreter ends.


def _nothing() -> None:
    """Do nothing: on a CPU a collective is over when it returns."""


if __name__ == "__main__":
    main()
