"""What ranks have to tell once they stand, at the moments at which those of a real job told it (torch 2.13, 2 nodes).

Of the first node that is lines in the files of its ranks, of the others streams of the records that agents send.
"""

from __future__ import annotations

import json
from array import array
from pathlib import Path

from ddpdoctor.finding import Frame
from ddpdoctor.record import layout
from ddpdoctor.record.model import Rank, Site
from ddpdoctor.record.streams.collectives import CollectiveTrack, Signature
from ddpdoctor.record.streams.measured import RankHeartbeat
from ddpdoctor.record.streams.setup import StackDump

RANKS_OF_A_NODE = 8
HUNG_RANK = 2_003
HUNG_NODE = 100
HANGS = ("hang of a rank", "hang of a node")
QUIET_AFTER_NS = 1_250_000_000
"""After the end of the last step the agents say that no step comes, and what the ranks told of their recorders."""
STUCK_AFTER_NS = 5_600_000_000
"""Then their ranks were seen to do nothing."""
STRUCK_FILE = "struck"
"""Beside the head's keys: ordinal of the first step that is not made."""
ENTRIES = 500
"""That a rank tells of its flight recorder at once."""
A_STEP = 3
"""Collectives of each step."""
BUCKET = Signature(
    kind="all_reduce",
    numels=(5_000_000,),
    shapes=((5_000_000,),),
    dtype="float32",
    reduce_op="SUM",
    size_bytes=20_000_000,
    origin="ddp-backward",
)
BACKWARD = Frame(file="/home/user/train.py", line=57, function="train")
STANDS_AT = Frame(file="/home/user/train.py", line=52, function="train")
ENGINE = Frame(file="/usr/lib/python3/site-packages/torch/autograd/graph.py", line=979, function="_engine_run_backward")
SCRIPT = Frame(file="/home/user/train.py", line=90, function="<module>")
SITE = Site(frames=(BACKWARD, SCRIPT))


def stands(rank: int, fault: str) -> bool:
    """Whether it is one of those that the others wait for."""
    is_rank = fault == "hang of a rank" and rank == HUNG_RANK
    return is_rank or (fault == "hang of a node" and rank // RANKS_OF_A_NODE == HUNG_NODE)


def struck_at(directory: Path) -> int:
    """The first step that is not made any more; 0 while all goes well."""
    try:
        return int((directory / STRUCK_FILE).read_text() or 0)
    except FileNotFoundError:
        return 0


def frames(rank: int, fault: str) -> tuple[Frame, ...]:
    """Where its main thread is, innermost first."""
    return (STANDS_AT, SCRIPT) if stands(rank, fault) else (ENGINE, BACKWARD, SCRIPT)


def stack(rank: int, fault: str, time_ns: int) -> StackDump:
    """What it wrote of its main thread."""
    return StackDump(
        rank=rank, thread="MainThread", main=True, daemon=False, frames=frames(rank, fault), time_ns=time_ns
    )


def entries(rank: int, fault: str, struck: int) -> range:
    """Numbers of the collectives that its recorder still has; the last one is open where the rank waits."""
    stop = A_STEP * (struck - 1) + (0 if stands(rank, fault) else 1)
    return range(max(0, stop - ENTRIES), stop)


def started_ns(number: int, struck: int, ended_ns: int, step_ns: int) -> int:
    """When a rank entered a collective, where the last step ended then."""
    step, place = divmod(number, A_STEP)
    return ended_ns + (step - struck + 1) * step_ns + step_ns // 2 + place * 1_000_000


def track(rank: int, fault: str, struck: int, ended_ns: int, step_ns: int) -> CollectiveTrack:
    """What its recorder tells."""
    numbers = entries(rank, fault, struck)
    started = array("q", [started_ns(number, struck, ended_ns, step_ns) for number in numbers])
    completed = array("q", [time_ns + 5_000_000 for time_ns in started])
    if not stands(rank, fault):
        completed[-1] = 0
    nothing = array("q", bytes(8 * len(numbers)))
    steps = array("q", [number // A_STEP + 1 for number in numbers])
    return CollectiveTrack(
        rank=rank,
        group=nothing,
        sequence=array("q", numbers),
        signature=nothing,
        site=nothing,
        step=steps,
        forward_site=array("q", [-1] * len(numbers)),
        started_ns=started,
        completed_ns=completed,
    )


def heartbeat(rank: int, fault: str, struck: int, ended_ns: int, now_ns: int) -> RankHeartbeat:
    """What its heart says."""
    waits = not stands(rank, fault)
    return RankHeartbeat(
        rank=rank,
        beat_at_ns=now_ns,
        phase="backward" if waits else "other",
        phase_since_ns=ended_ns + 100_000_000,
        step=struck,
        collective="reduction" if waits else "",
        enqueued=A_STEP * (struck - 1) + waits,
        completed=A_STEP * (struck - 1),
        site=0,
        unchanged_ms=max(0, now_ns - ended_ns - 150_000_000) // 1_000_000,
    )


def process(rank: int, host: str, fault: str, struck: int, *, stuck: bool) -> Rank:
    """Its process, as a monitor sees it."""
    waits = bool(struck) and not stands(rank, fault)
    return Rank(
        rank=rank,
        local_rank=rank % RANKS_OF_A_NODE,
        node=rank // RANKS_OF_A_NODE,
        host=host,
        pid=1_000 + rank,
        end="running",
        waiting_in=len(entries(rank, fault, struck)) - 1 if waits else None,
        stuck=stuck,
    )


def lines(rank: int, fault: str, struck: int, ended_ns: int, step_ns: int, now_ns: int) -> str:
    """The events that a rank writes when it is asked."""
    rows = [
        [number, 0, number, 0, 1, started_ns(number, struck, ended_ns, step_ns), int(number < A_STEP * (struck - 1))]
        for number in entries(rank, fault, struck)
    ]

    def as_lists(shown: tuple[Frame, ...]) -> list[list[object]]:
        return [[frame.file, frame.line, frame.function] for frame in shown]

    events: list[dict[str, object]] = [
        {"event": "site", "number": 1, "frames": as_lists(SITE.frames)},
        {
            "event": "signature",
            "number": 0,
            "kind": BUCKET.kind,
            "shapes": BUCKET.shapes,
            "numels": BUCKET.numels,
            "dtype": BUCKET.dtype,
            "reduce_op": BUCKET.reduce_op,
            "root": None,
            "size_bytes": BUCKET.size_bytes,
            "origin": BUCKET.origin,
        },
        {
            "event": "stack",
            "thread": "MainThread",
            "main": True,
            "daemon": False,
            "frames": as_lists(frames(rank, fault)),
        },
        {"event": "flight", "recorder": 0, "reason": "asked", "continues": True, "rows": rows, "completed": []},
    ]
    return "".join(json.dumps({**event, "time_ns": now_ns}) + "\n" for event in events)


def heartbeat_values(rank: int, fault: str, struck: int, ended_ns: int, now_ns: int, answered: int) -> dict[str, int]:
    """The same as ``heartbeat``, as a rank writes it."""
    told = heartbeat(rank, fault, struck, ended_ns, now_ns)
    return dict.fromkeys(layout.HEARTBEAT_FIELDS, 0) | {
        "beat_at_ns": now_ns,
        "phase": layout.PHASES.index(told.phase),
        "phase_since_ns": told.phase_since_ns,
        "step": struck,
        "kind": layout.CALL_KINDS.index("reduction") if told.collective else -1,
        "sequence": -1,
        "enqueued": told.enqueued,
        "completed": told.completed,
        "site": 1,
        "unchanged_ms": told.unchanged_ms,
        "stack_hash": 1,
        "answered": answered,
        "blocked": int(bool(told.collective)),
    }
