from __future__ import annotations

import os
import subprocess
import sys
import time

import msgspec
import pytest

from ddpdoctor.checks.launch import cpu_oversubscription, small_shared_memory
from ddpdoctor.finding import Finding
from ddpdoctor.monitor.processes.hosts import LOOK_EVERY_NS, Hosts
from ddpdoctor.record.model import Job, RunRecord, StreamState
from ddpdoctor.record.streams.measured import HostUse

S = 1_000_000_000
MIB = 1 << 20
COMPLETE = {name: StreamState("complete") for name in ("ranks", "host_uses")}


def run(*uses: HostUse) -> RunRecord:
    return RunRecord(job=Job(kind="run"), host_uses=uses, streams=COMPLETE)


def pressed(rank: int, waited: float = 0.3, busy: int = 8, watched_s: int = 60) -> HostUse:
    watched_ns = watched_s * S
    return HostUse(
        rank=rank, watched_ns=watched_ns, main_waited_ns=int(waited * watched_ns), cores=8, busy_threads=busy
    )


def test_ranks_that_take_the_cores_from_each_other_are_reported() -> None:
    (finding,) = cpu_oversubscription.in_run(run(pressed(0), pressed(1, waited=0.4), pressed(2, waited=0.0)))
    assert isinstance(finding, Finding)
    assert finding.title == "ranks 0 and 1 wait 35% of the time for a free core"
    assert finding.evidence[0].text == "the job keeps 24 threads busy on 8 cores"


@pytest.mark.parametrize(
    "uses",
    [
        (pressed(0, busy=3), pressed(1, busy=3)),
        (pressed(0, waited=0.1), pressed(1, waited=0.1)),
        (pressed(0, watched_s=10), pressed(1, watched_s=10)),
        (),
    ],
    ids=["others-take-them", "hardly", "too-early", "unknown"],
)
def test_cores_that_others_take_or_that_are_short_for_a_moment_are_no_finding(uses: tuple[HostUse, ...]) -> None:
    assert list(cpu_oversubscription.in_run(run(*uses))) == []


def test_shared_memory_that_is_almost_full_is_reported_where_ranks_use_it() -> None:
    full = HostUse(rank=3, shared_memory_bytes=64 * MIB, shared_memory_free_bytes=5 * MIB, maps_shared_memory=True)
    (finding,) = small_shared_memory.in_run(run(full))
    assert isinstance(finding, Finding)
    assert finding.title == "the shared memory (/dev/shm) of rank 3 is almost full"
    assert finding.evidence[0].text == "5 MiB of 64 MiB were free"
    for other in (
        {"maps_shared_memory": False},
        {"shared_memory_free_bytes": 10 * MIB},
        {"shared_memory_bytes": 64_000 * MIB, "shared_memory_free_bytes": 6_000 * MIB},
        {"shared_memory_bytes": 0, "shared_memory_free_bytes": 0},
    ):
        assert list(small_shared_memory.in_run(run(msgspec.structs.replace(full, **other)))) == []


def test_what_a_process_gets_is_read_from_the_system() -> None:
    spin = "print(flush=True)\nwhile True: pass"
    core = sorted(os.sched_getaffinity(0))[:1]
    command = (sys.executable, "-c", spin)
    both = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
    try:
        for process in both:
            os.sched_setaffinity(process.pid, core)
            assert process.stdout is not None
            process.stdout.readline()
        hosts, now_ns = Hosts(), time.time_ns()
        pids = {0: both[0].pid, 1: both[1].pid, 2: 2**22 + 1}
        uses = hosts.look(pids, now_ns)
        # Both want the one core: each waits for it while the other runs.
        while not all(use.main_waited_ns > 50_000_000 for use in uses):
            time.sleep(0.01)
            now_ns += LOOK_EVERY_NS
            uses = hosts.look(pids, now_ns)
    finally:
        for process in both:
            process.kill()
            process.communicate()
    assert [use.rank for use in uses] == [0, 1]
    assert {use.cores for use in uses} == {1}
    assert all(use.shared_memory_bytes >= use.shared_memory_free_bytes > 0 for use in uses)
    assert hosts.look(pids, now_ns + LOOK_EVERY_NS) == uses
