"""Nodes that are not there: what their agents would send a head, sent in real time, each over a connection of its own.

``python -m tests.nodes.simulated_nodes KEYS NODES FAULT BEGAN_NS`` sends for all nodes but the first until its stdin is
closed; ``KEYS`` is the head's ``head.key``. The rows of a step are made here for the first node, too. A hang begins
with the step that a file beside ``KEYS`` names, see ``simulated_hang``.
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

from ddpdoctor.monitor.nodes.meeting import HeadKeys, endpoint
from ddpdoctor.monitor.nodes.messages import (
    MOST_BYTES,
    PROTOCOL,
    SENT,
    JobFacts,
    Rows,
    Update,
    connected,
    pack,
    pack_field,
    pack_rows,
    unpack_answer,
)
from ddpdoctor.record import layout
from ddpdoctor.record.model import STREAMS, Job, RunRecord, StreamState, Wrap
from ddpdoctor.record.streams.collectives import Group
from ddpdoctor.record.streams.measured import Gauge, Gpu, HostUse, RankHeartbeat, StepTrack
from ddpdoctor.record.streams.setup import Node
from tests.nodes import simulated_hang
from tests.nodes.simulated_hang import HANGS, QUIET_AFTER_NS, RANKS_OF_A_NODE, STUCK_AFTER_NS

STEP_NS = 200_000_000
LATE_NS = 60_000_000
SLOW_TRANSFER_NS = 120_000_000
TRANSFER_NS = 4_000_000
STRAGGLER = simulated_hang.HUNG_RANK
SLOW_NODE = simulated_hang.HUNG_NODE
FAULTS = ("healthy", *HANGS, "straggler", "slow node", "slow link")
SENT_EVERY_NS = 1_000_000_000
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
        self._due_ns = began_ns + number * SENT_EVERY_NS // nodes
        self._phase_ns = number % 64 * 4_000_000
        """Agents look at moments of their own."""
        self._told = 0
        """Of what it has to say of a hang."""

    def send(self, now_ns: int, struck: int = 0) -> None:
        """Send what is new, as an agent does, where the last update was answered and it is time."""
        while self._own.poll(0):
            self._asked = False
            if unpack_answer(self._own.recv()).send_all:
                raise SystemExit(f"{self._host}: the head has lost what it was sent")
        step_ns = length_ns(self._fault)
        step = (now_ns - self._began_ns) // step_ns
        ended_ns = self._began_ns + (struck - 1) * step_ns
        hangs = bool(struck) and step >= struck
        stood_ns = now_ns - ended_ns - self._phase_ns if hangs else 0
        news = (stood_ns >= QUIET_AFTER_NS) + (stood_ns >= STUCK_AFTER_NS)
        if self._asked or (now_ns < self._due_ns and news == self._told):
            return
        self._number += 1
        self._due_ns += max(0, (now_ns - self._due_ns) // SENT_EVERY_NS + 1) * SENT_EVERY_NS
        local_ns, local_end_ns = now_ns + self._ahead_ns, ended_ns + self._ahead_ns
        if hangs:
            step = struck - 1
            beats = tuple(
                simulated_hang.heartbeat(rank, self._fault, struck, local_end_ns, local_ns) for rank in self._ranks
            )
        else:
            beats = tuple(
                RankHeartbeat(
                    rank=rank, beat_at_ns=local_ns, phase="forward", phase_since_ns=local_ns - 10**7, step=step + 1
                )
                for rank in self._ranks
            )
        record = RunRecord(job=Job(kind="run"), heartbeats=beats)
        fields = {"heartbeats": pack_field(record, "heartbeats")}
        if self._number == 1:
            fields = self._whole(record)
        collectives = None
        if news > self._told:
            is_first, self._told = not self._told, news
            record = self._standing(record, struck, local_ns, stuck=news > 1)
            fields = {name: pack_field(record, name) for name in ("heartbeats", "ranks", "stacks")}
            if is_first:
                collectives = tuple(self._recorder(rank, struck, local_end_ns) for rank in self._ranks)
        steps = tuple(self._rows(rank, self._step + 1, step) for rank in self._ranks) if step > self._step else ()
        self._own.send(
            pack(
                Update(
                    protocol=PROTOCOL,
                    session=self._host,
                    number=self._number,
                    host=self._host,
                    sent_at_ns=local_ns,
                    is_quiet=news > 0,
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
                    collectives=collectives,
                )
            )
        )
        self._step, self._asked = step, True

    def _rows(self, rank: int, first: int, last: int) -> Rows:
        rows = _packed(first, last, late_ns(rank, self._fault), rank % 4, self._fault, self._began_ns + self._ahead_ns)
        return msgspec.structs.replace(rows, rank=rank, anew=first == 1)

    def _standing(self, record: RunRecord, struck: int, local_ns: int, *, stuck: bool) -> RunRecord:
        ranks, stacks = (
            tuple(simulated_hang.process(rank, self._host, self._fault, struck, stuck=stuck) for rank in self._ranks),
            tuple(simulated_hang.stack(rank, self._fault, local_ns) for rank in self._ranks),
        )
        return msgspec.structs.replace(record, ranks=ranks, stacks=stacks)

    def _recorder(self, rank: int, struck: int, ended_ns: int) -> Rows:
        stands = simulated_hang.stands(rank, self._fault)
        rows = _packed_recorder(stands, self._fault, struck, ended_ns, rank if stands else 0)
        return msgspec.structs.replace(rows, rank=rank)

    def _whole(self, record: RunRecord) -> dict[str, bytes]:
        everyone = tuple(range(self._world_size))
        whole = msgspec.structs.replace(
            record,
            ranks=tuple(simulated_hang.process(rank, self._host, self._fault, 0, stuck=False) for rank in self._ranks),
            sites=(simulated_hang.SITE,),
            signatures=(simulated_hang.BUCKET,),
            groups=(Group(ranks=everyone, backend="nccl", timeout_ns=600 * 10**9),),
            wraps=tuple(Wrap(rank=rank, wrap=0, site=0, module_class="Net", ranks=everyone) for rank in self._ranks),
            gpus=tuple(Gpu(index=rank % 8, name="H100", ranks=(rank,)) for rank in self._ranks),
            gauges=tuple(
                Gauge(rank=rank, name="garbage collection", unit="ns", total=1_000, steps=10) for rank in self._ranks
            ),
            host_uses=tuple(HostUse(rank=rank, cores=16) for rank in self._ranks),
            streams={name: StreamState("complete") for name in STREAMS},
            nodes=(Node(host=self._host, ranks=self._ranks, interfaces=("lo", "eth0")),),
        )
        return {name: pack_field(whole, name) for name in SENT}


@lru_cache(maxsize=64)
def _columns(first: int, last: int, late: int, noise: int, fault: str) -> StepTrack:
    rows = [step_row(number, late, noise, fault, 0) for number in range(first, last + 1)]
    return StepTrack(rank=0, **{name: array("q", [row[name] for row in rows]) for name in layout.STEP_FIELDS})


@lru_cache(maxsize=4_096)
def _packed_recorder(stands: bool, fault: str, struck: int, ended_ns: int, rank: int) -> Rows:
    """That of a rank that stands, or of any that waits."""
    return pack_rows(simulated_hang.track(rank, fault, struck, ended_ns, length_ns(fault)), anew=True)


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
    while not select.select([sys.stdin], [], [], 0.02)[0]:
        struck = simulated_hang.struck_at(Path(sys.argv[1]).parent)
        for node in simulated:
            node.send(time.time_ns(), struck)


if __name__ == "__main__":
    main()
