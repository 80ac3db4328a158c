"""A rank whose training runs in a process that it has forked is watched there."""

from __future__ import annotations

import os
import textwrap
import threading
from pathlib import Path
from types import SimpleNamespace

from ddpdoctor.probe.heartbeat import ThreadWatch
from ddpdoctor.probe.journal import Journal
from ddpdoctor.probe.live.heartbeat import HeartbeatThread
from ddpdoctor.probe.live.observer import Observer
from ddpdoctor.record.assembly.assemble import Assembly
from ddpdoctor.record.assembly.completeness import superseded
from ddpdoctor.record.model import Job
from tests.monitor.watched import MOST_S, job

_TRAINS_IN_A_CHILD = """
    import multiprocessing
    def main():
        dist.init_process_group("gloo")
        model = DDP(nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(20):
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
            time.sleep(0.05)
        dist.barrier()
        time.sleep(1)
    child = multiprocessing.get_context("fork").Process(target=main)
    child.start()
    child.join()
    sys.exit(child.exitcode)
"""
_IMPORTS = """
import sys, time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
"""


def test_the_child_is_the_rank_from_its_first_step_to_its_end(tmp_path: Path) -> None:
    body = textwrap.dedent(_TRAINS_IN_A_CHILD)
    with job(tmp_path, body, head=_IMPORTS) as (process, run):
        assert process.wait(MOST_S) == 0, (tmp_path / "output").read_text()
        first = Assembly(run)
        first.poll()
        first.poll()
        assert len(first.book.processes) == 4
        parents = superseded(first.book)
        assembly = Assembly(run, parents)
        assembly.poll()
        assembly.poll()
        record = assembly.record(Job(kind="run", world_size=2))
    assert assembly.book.added_to(Job(kind="run")).ranks_reported == (0, 1)
    assert len(parents) == 2 and first.faults == assembly.faults == []
    assert [rank.end for rank in record.ranks] == ["finished", "finished"]
    assert [track.step[-1] for track in record.step_tracks] == [20, 20]
    assert all(assembly.book.processes[rank.pid].heartbeat_thread for rank in record.ranks)
    assert all(heartbeat.step == 20 for heartbeat in record.heartbeats)


def test_a_fork_while_our_thread_works_leaves_no_lock_held_that_the_child_waits_for(tmp_path: Path) -> None:
    flights = SimpleNamespace(counts=lambda: (-1, -1, 0), dump=lambda reason: True)
    gauges = SimpleNamespace(look=lambda *arguments: None)
    journal = Journal(str(tmp_path), {"kind": "run"})
    heartbeat = HeartbeatThread(Observer(journal), flights, gauges, lambda: None, lambda: None)  # type: ignore[arg-type]
    heartbeat._watch = ThreadWatch(threading.get_ident(), journal.user_code)
    with heartbeat._beating, heartbeat._holding_frames:
        child = os.fork()
        if not child:
            heartbeat.become_forked_child()
            free = heartbeat._beating.acquire(timeout=0) and heartbeat._holding_frames.acquire(timeout=0)
            os._exit(0 if free and heartbeat._watch is None else 1)
    assert os.waitpid(child, 0)[1] == 0
