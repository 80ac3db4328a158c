"""Makes flight-recorder dumps of large NCCL jobs with one planted fault, in the form in which torch 2.8 writes them."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

Fault = Literal["stuck", "skipped", "size", "kind", "no-dump"]
FAULTS: tuple[Fault, ...] = ("stuck", "skipped", "size", "kind", "no-dump")
SCRIPT = "/home/user/job/train.py"
LIBRARY = "/opt/conda/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
STEP = (
    ("all_reduce", [4_194_304], 40),
    ("all_reduce", [8_388_608], 40),
    ("all_reduce", [1_048_576], 40),
    ("all_reduce", [1], 44),
    ("_all_gather_base", [128], 47),
)
"""The collectives of a step: kind, size, and line."""
START_NS = 1_795_000_000_000_000_000


def entry(
    record: int, sequence: int, kind: str, size: list[int], line: int, at_ns: int, *, over: bool
) -> dict[str, Any]:
    """One entry, as the recorder of a rank holds it."""
    return {
        "frames": [
            {"name": kind, "filename": LIBRARY, "line": 2_501},
            {"name": "wrapper", "filename": LIBRARY.replace("distributed_c10d", "c10d_logger"), "line": 83},
            {"name": "train", "filename": SCRIPT, "line": line},
            {"name": "main", "filename": SCRIPT, "line": 90},
            {"name": "<module>", "filename": SCRIPT, "line": 95},
        ],
        "record_id": record,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": sequence,
        "p2p_seq_id": 0,
        "op_id": sequence,
        "profiling_name": f"nccl:{kind}",
        "time_created_ns": at_ns,
        "input_sizes": [size],
        "input_dtypes": ["Float"],
        "output_sizes": [size],
        "output_dtypes": ["Float"],
        "state": "completed" if over else "scheduled",
        "time_discovered_started_ns": at_ns + 1_000_000 if over else None,
        "time_discovered_completed_ns": at_ns + 90_000_000 if over else None,
        "retired": over,
        "timeout_ms": 600_000,
        "is_p2p": False,
    }


def dump_of(rank: int, world: int, entries: int, fault: Fault, culprit: int, noise: random.Random) -> dict[str, Any]:
    """The dump of one rank: a ring of so many entries that has wrapped, with the fault 40 entries before its end."""
    first = 10_000
    last = first + entries
    at = last - 40
    is_culprit = rank == culprit
    rows = []
    for sequence in range(first, at + 1):
        kind, size, line = STEP[sequence % len(STEP)]
        if is_culprit and sequence == at:
            if fault in ("stuck", "no-dump"):
                continue
            if fault == "skipped":
                # It went past this one: what it calls here is what the others call next.
                kind, size, line = STEP[(sequence + 1) % len(STEP)]
            elif fault == "size":
                size = [size[0] + 7]
            else:
                kind, line = "broadcast", 52
        rows.append((sequence, kind, size, line))
    waits = not (is_culprit and fault in ("stuck", "no-dump"))
    return {
        "version": "2.9",
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": json.dumps(list(range(world)))}},
        "pg_status": {"0": {"last_enqueued_collective": at, "last_completed_collective": at - 1}},
        "entries": [
            entry(
                sequence, sequence, kind, size, line,
                START_NS + sequence * 100_000_000 + rank * 1_000 + noise.randrange(1_000_000),
                over=not (waits and sequence == at),
            )
            for sequence, kind, size, line in rows
        ],
    }  # fmt: skip


def write_dumps(
    directory: Path,
    world: int,
    entries: int,
    fault: Fault,
    culprit: int,
    encode: Callable[[dict[str, Any]], bytes] = lambda dump: pickle.dumps(dump, protocol=2),
) -> None:
    """Write the dumps of a job into a directory, as ``dump_rank_7``."""
    noise = random.Random(world * 31 + culprit)
    for rank in range(world):
        if not (fault == "no-dump" and rank == culprit):
            dump = dump_of(rank, world, entries, fault, culprit, noise)
            (directory / f"dump_rank_{rank}").write_bytes(encode(dump))
