"""A hang of a job of 1,024 ranks: named right, and in seconds of computation however many ranks there are."""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path

import msgspec

from ddpdoctor.diagnosis.live_verdict import VerdictMemory, live_verdict
from ddpdoctor.finding import Finding
from ddpdoctor.monitor.live_run import NODES_CONFIRM_NS
from ddpdoctor.profile.watch import LiveChecks
from ddpdoctor.record.model import STREAMS, Job, RunRecord, StreamState, Wrap
from ddpdoctor.record.streams.collectives import Group
from tests.nodes import simulated_hang
from tests.nodes.simulated_hang import HUNG_NODE, RANKS_OF_A_NODE

RANKS = 1_024
FAULT = "hang of a node"
STEP_NS = 200_000_000
ENDED_NS = 1_700_000_000_000_000_000
SECOND_NS = 1_000_000_000


@cache
def record(stuck: bool, after_s: float) -> RunRecord:
    """So long after the last step."""
    ranks, struck, now_ns = range(RANKS), 300, ENDED_NS + int(after_s * SECOND_NS)
    everyone = tuple(ranks)
    return RunRecord(
        job=Job(kind="run", world_size=RANKS, ended_ns=now_ns, started_ns=ENDED_NS - 60 * SECOND_NS, backend="nccl"),
        sites=(simulated_hang.SITE,),
        signatures=(simulated_hang.BUCKET,),
        groups=(Group(ranks=everyone, backend="nccl", timeout_ns=600 * SECOND_NS),),
        streams={name: StreamState("complete") for name in STREAMS},
        ranks=tuple(
            simulated_hang.process(rank, f"node{rank // RANKS_OF_A_NODE}", FAULT, struck, stuck=stuck) for rank in ranks
        ),
        wraps=tuple(Wrap(rank=rank, wrap=0, site=0, module_class="Net", ranks=everyone) for rank in ranks),
        collectives=tuple(simulated_hang.track(rank, FAULT, struck, ENDED_NS, STEP_NS) for rank in ranks),
        heartbeats=tuple(simulated_hang.heartbeat(rank, FAULT, struck, ENDED_NS, now_ns) for rank in ranks),
        stacks=tuple(simulated_hang.stack(rank, FAULT, now_ns - SECOND_NS) for rank in ranks),
    )


def findings(root: Path) -> tuple[Finding, ...]:
    return LiveChecks(str(root)).findings(record(True, 6.5), stands=True)


def test_all_ranks_of_the_node_that_stands_are_named_and_the_machine(tmp_path: Path) -> None:
    first, last = HUNG_NODE * RANKS_OF_A_NODE, (HUNG_NODE + 1) * RANKS_OF_A_NODE - 1
    (finding,) = findings(tmp_path)
    assert finding.title.startswith(f"ranks {first}-{last} on node{HUNG_NODE} are stuck at train.py:52 while ranks 0-")


def test_it_takes_seconds_of_computation(tmp_path: Path) -> None:
    began_s = time.thread_time()
    memory = VerdictMemory()
    for _ in range(3):
        live_verdict(memory, msgspec.structs.replace(record(True, 6.5)), ENDED_NS + int(6.5 * SECOND_NS))
    findings(tmp_path)
    # A second; where each rank was looked for among all, for each rank, it was a quarter of an hour.
    assert time.thread_time() - began_s < 30


def test_on_several_nodes_it_is_what_ranks_wait_for_that_has_to_look_the_same_for_seconds() -> None:
    memory = VerdictMemory()
    memory.confirm_ns = NODES_CONFIRM_NS
    assert live_verdict(memory, record(False, 2.0), ENDED_NS + 2 * SECOND_NS) is None
    found = live_verdict(memory, record(True, 6.5), ENDED_NS + int(6.5 * SECOND_NS))
    assert found is not None and found.form == "stuck"
    memory = VerdictMemory()
    memory.confirm_ns = NODES_CONFIRM_NS
    assert live_verdict(memory, record(True, 6.5), ENDED_NS + int(6.5 * SECOND_NS)) is None
