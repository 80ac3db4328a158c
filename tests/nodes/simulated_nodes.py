"""Nodes that are not there: what their agents would send a head, sent in real time, each over a connection of its own.

``python -m tests.nodes.simulated_nodes KEYS NODES FAULT BEGAN_NS`` sends for all nodes but the first until its stdin is
closed; ``KEYS`` is the head's ``head.key``. The rows of a step are made here for the first node, too.
"""

from __future__ import annotations

import select
import socket
import sys
import time
from array import array
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import zmq

from ddpdoctor.monitor.nodes.connection import connected
from ddpdoctor.monitor.nodes.meeting import HeadKeys, endpoint
from ddpdoctor.monitor.nodes.messages import (
    MOST_BYTES,
    PROTOCOL,
    SENT,
    JobFacts,
    Rows,
    Update,
    pack,
    pack_field,
    pack_rows,
    unpack_answer,
)
from ddpdoctor.record import layout
from ddpdoctor.record.model import STREAMS, Group, Job, Rank, RunRecord, StreamState
from ddpdoctor.record.streams.machine import Node
from ddpdoctor.record.streams.measured import Pulse, StepTrack

RANKS_OF_A_NODE = 8
STEP_NS = 200_000_000
LATE_NS = 60_000_000
SLOW_TRANSFER_NS = 120_000_000
TRANSFER_NS = 4_000_000
STRAGGLER = 2_003
SLOW_NODE = 100
FAULTS = ("healthy", "straggler", "slow node", "slow link")
CLOCK_STEP_NS = 1_000_000
"""Each node's clock is that much further from the head's than that of the node before."""
CLOCK_ERROR_NS = 150_000


def late_ns(rank: int, fault: str) -> int:
    """How much longer a rank's forward takes than that of the others."""
    is_late = (fault == "straggler" and rank == STRAGGLER) or (
        fault == "slow node" and rank // RANKS_OF_A_NODE == SLOW_NODE
    )
    return LATE_NS if is_late else 0


def length_ns(fault: str) -> int:
    """How long a step takes."""
    late = LATE_NS if fault in ("straggler", "slow node") else 0
    return STEP_NS + late + (SLOW_TRANSFER_NS if fault == "slow link" else 0)


def step_row(number: int, late: int, noise: int, fault: str, began_ns: int) -> Mapping[str, int]:
    """What a rank writes of its step, from 1 on, where it is so late and ``noise`` is from 0 to 3."""
    took_ns = length_ns(fault)
    started_ns = began_ns + (number - 1) * took_ns
    longest_ns = LATE_NS if fault in ("straggler", "slow node") else 0
    ready_ns = started_ns + STEP_NS * 7 // 10 + late + noise * 300_000 * (number % 3)
    transfer_ns = SLOW_TRANSFER_NS if fault == "slow link" else TRANSFER_NS
    reduced_ns = started_ns + STEP_NS * 7 // 10 + longest_ns + 3_000_000 + transfer_ns
    return dict.fromkeys(layout.STEP_FIELDS, -1) | {
        "step": number,
        "started_at_ns": started_ns,
        "ended_at_ns": started_ns + took_ns,
        "data_wait_ns": STEP_NS // 50,
        "forward_ns": STEP_NS // 4 + late,
        "backward_ns": reduced_ns - started_ns - STEP_NS // 50 - STEP_NS // 4 - late,
        "explicit_ns": 0,
        "optimizer_ns": STEP_NS // 20,
        "exposed_ns": reduced_ns - ready_ns,
        "window_ns": reduced_ns - ready_ns + STEP_NS // 5,
        "ready_at_ns": ready_ns,
        "reduced_at_ns": reduced_ns,
        "reduced_bytes": 100_000_000,
        "buckets": 5,
        "explicit_calls": 0,
        "explicit_bytes": 0,
        "samples": 32,
        "batches": 1,
        "micro_batches": 1,
        "synchronised": 1,
    }


class SimulatedNode:
    """One node beside the first, and its agent's connection."""

    def __init__(self, number: int, nodes: int, fault: str, began_ns: int, own: zmq.Socket[bytes]) -> None:
        self._host = f"node{number}"
        self._ranks = tuple(range(number * RANKS_OF_A_NODE, (number + 1) * RANKS_OF_A_NODE))
        self._world_size = nodes * RANKS_OF_A_NODE
        self._fault, self._began_ns, self._own = fault, began_ns, own
        self._ahead_ns = number * CLOCK_STEP_NS
        self._number, self._step, self._asked = 0, 0, False

    def send(self, now_ns: int) -> None:
        """Send what is new, as an agent does, where the last update was answered."""
        while self._own.poll(0):
            self._asked = False
            if unpack_answer(self._own.recv()).send_all:
                raise SystemExit(f"{self._host}: the head has lost what it was sent")
        if self._asked:
            return
        step = (now_ns - self._began_ns) // length_ns(self._fault)
        self._number += 1
        local_ns = now_ns + self._ahead_ns
        pulses = tuple(
            Pulse(rank=rank, beat_at_ns=local_ns, phase="forward", phase_since_ns=local_ns - 10**7, step=step + 1)
            for rank in self._ranks
        )
        record = RunRecord(job=Job(kind="run"), pulses=pulses)
        fields = {"pulses": pack_field(record, "pulses")}
        if self._number == 1:
            fields = self._whole(record)
        steps = tuple(self._rows(rank, self._step + 1, step) for rank in self._ranks) if step > self._step else ()
        self._own.send(
            pack(
                Update(
                    protocol=PROTOCOL,
                    session=self._host,
                    number=self._number,
                    host=self._host,
                    sent_at_ns=local_ns,
                    clock=(local_ns, -self._ahead_ns - CLOCK_ERROR_NS, -self._ahead_ns + CLOCK_ERROR_NS),
                    job=JobFacts(
                        world_size=self._world_size,
                        ranks_reported=self._ranks,
                        torch_version="2.13.0",
                        backend="nccl",
                        started_ns=self._began_ns,
                    ),
                    fields=fields,
                    steps=steps,
                )
            )
        )
        self._step, self._asked = step, True

    def _rows(self, rank: int, first: int, last: int) -> Rows:
        rows = _packed(first, last, late_ns(rank, self._fault), rank % 4, self._fault, self._began_ns + self._ahead_ns)
        return msgspec.structs.replace(rows, rank=rank, anew=first == 1)

    def _whole(self, record: RunRecord) -> dict[str, bytes]:
        ranks = tuple(
            Rank(rank=rank, local_rank=rank % 8, node=rank // 8, host=self._host, pid=1_000 + rank, end="running")
            for rank in self._ranks
        )
        whole = msgspec.structs.replace(
            record,
            ranks=ranks,
            groups=(Group(ranks=tuple(range(self._world_size)), backend="nccl", timeout_ns=600 * 10**9),),
            streams={name: StreamState("complete") for name in STREAMS},
            nodes=(Node(host=self._host, ranks=self._ranks, interfaces=("lo", "eth0")),),
        )
        return {name: pack_field(whole, name) for name in SENT}


@lru_cache(maxsize=64)
def _columns(first: int, last: int, late: int, noise: int, fault: str) -> StepTrack:
    rows = [step_row(number, late, noise, fault, 0) for number in range(first, last + 1)]
    return StepTrack(
        rank=0, dropped=0, **{name: array("q", [row[name] for row in rows]) for name in layout.STEP_FIELDS}
    )


@lru_cache(maxsize=4_096)
def _packed(first: int, last: int, late: int, noise: int, fault: str, began_ns: int) -> Rows:
    track = _columns(first, last, late, noise, fault)
    moved: dict[str, Any] = {
        name: array("q", [value + began_ns for value in getattr(track, name)])
        for name in ("started_at_ns", "ended_at_ns", "ready_at_ns", "reduced_at_ns")
    }
    return pack_rows(msgspec.structs.replace(track, **moved), anew=False)


def main() -> None:
    """Send until nobody wants it any more."""
    keys = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=HeadKeys)
    nodes, fault, began_ns = int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    context = zmq.Context()
    context.max_sockets = 4 * nodes
    where = endpoint("127.0.0.1", keys.meeting.port)
    simulated = [
        SimulatedNode(
            number, nodes, fault, began_ns, connected(context, keys.meeting, where, MOST_BYTES, immediate=False)
        )
        for number in range(1, nodes)
    ]
    print(f"{socket.gethostname()}: ready", flush=True)
    while True:
        began_s = time.monotonic()
        for number, node in enumerate(simulated, 1):
            node.send(time.time_ns())
            # Agents send at moments of their own.
            left_s = began_s + number / len(simulated) - time.monotonic()
            if left_s > 0 and select.select([sys.stdin], [], [], left_s)[0]:
                return
        if select.select([sys.stdin], [], [], 0)[0]:
            return


if __name__ == "__main__":
    main()
