"""How the ranks of several nodes meet in the job's store, and that they leave it alone where there is one node."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ddpdoctor.probe.live import install
from ddpdoctor.probe.live.install import KEY, NodeMeeting
from ddpdoctor.record import layout
from tests.jobs_of_tests import kill_marked, marked

SPAWNED = """
import sys, threading, time
import torch, torch.distributed as dist
import torch.multiprocessing as mp


def train(rank, port, folder, gate):
    began, taken = threading.Thread.start, []

    def start(thread):
        taken.append(thread.name)
        began(thread)

    threading.Thread.start = start
    touched = []
    default_store = dist.distributed_c10d._get_default_store

    def noted():
        if threading.current_thread() is not threading.main_thread():
            touched.append(threading.current_thread().name)
        return default_store()

    dist.distributed_c10d._get_default_store = noted
    for world in range(3):
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
        # The store of an earlier world is gone with it, or this one would meet its keys.
        assert not default_store().check(["mine"])
        dist.barrier()
        default_store().set("mine", "1")
        for _ in range(4):
            time.sleep(0.5)
            dist.all_reduce(torch.ones(1))
        dist.barrier()
        dist.destroy_process_group()
        gate.wait()
    with open(f"{folder}/rank-{rank}", "w") as file:
        file.write(" ".join(("ended", *touched, *(name for name in taken if name == "ddpdoctor-nodes"))))


if __name__ == "__main__":
    gate = mp.get_context("spawn").Barrier(2)
    mp.spawn(train, args=(int(sys.argv[1]), sys.argv[2], gate), nprocs=2)
"""


class Told:
    """Takes the events of a rank."""

    def __init__(self, directory: Path) -> None:
        self.run_directory = str(directory)
        self.events: list[tuple[str, dict[str, Any]]] = []

    def event(self, kind: str, /, **fields: Any) -> None:
        self.events.append((kind, fields))


class Stores:
    """Stands for torch: counts who asks for the job's store, and who still holds it."""

    def __init__(self, store: Any) -> None:
        self.distributed = self.distributed_c10d = self
        self.store = store
        self.asked = 0

    def _get_default_store(self) -> Any:
        self.asked += 1
        return self.store


def until(what: Any) -> None:
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def looking(meeting: NodeMeeting, what: Any) -> None:
    def seen() -> bool:
        meeting.look()
        return bool(what())

    until(seen)


def test_worlds_made_anew_at_one_port_by_spawned_ranks_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SPAWNED)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    watch = (sys.executable, "-m", "ddpdoctor", "profile", "--no-tui", "--")
    left_out = ("LOCAL_WORLD_SIZE", "LOCAL_RANK", "RANK", "WORLD_SIZE")
    environment = {name: value for name, value in marked(os.environ, tmp_path).items() if name not in left_out}
    try:
        done = subprocess.run(
            (*watch, sys.executable, "train.py", port, str(tmp_path)),
            cwd=tmp_path,
            env={**environment, "XDG_STATE_HOME": str(tmp_path / "state"), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            timeout=200,
            check=False,
        )
    finally:
        kill_marked(tmp_path)
    ends = [path.read_text() for path in sorted(tmp_path.glob("rank-*"))]
    assert ends == ["ended", "ended"], done.stderr.decode()


def test_a_rank_asks_for_the_store_only_once_its_monitor_has_written_and_keeps_nothing(tmp_path: Path) -> None:
    store = dist.HashStore()
    torch = Stores(store)
    references = sys.getrefcount(store)
    first, second = Told(tmp_path / "node0"), Told(tmp_path / "node1")
    head, agent = (NodeMeeting(told, torch) for told in (first, second))  # type: ignore[arg-type]
    for told in (first, second):
        Path(told.run_directory).mkdir()
    head.begin(0, 2)
    agent.begin(1, 2)
    for _ in range(3):
        head._looks_at_s = agent._looks_at_s = 0.0
        head.look()
        agent.look()
    assert torch.asked == 0
    (tmp_path / "node1" / layout.SEEK_FILE).write_text("3\n")  # It is another rank's turn.
    agent._looks_at_s = 0.0
    agent.look()
    assert torch.asked == 0
    (tmp_path / "node1" / layout.SEEK_FILE).write_text("1\n")
    looking(agent, lambda: torch.asked)
    (tmp_path / "node0" / layout.HEAD_FILE).write_text("where it is\n")
    looking(head, lambda: store.check([KEY]))
    until(lambda: ("head", {"told": "where it is"}) in second.events)
    head.end()
    agent.end()
    assert sys.getrefcount(store) == references


def test_a_rank_that_is_not_asked_reads_once_who_is_and_counts_as_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, opened = Told(tmp_path), []

    def noted(path: str, *arguments: Any, **more: Any) -> Any:
        opened.append(path)
        return open(path, *arguments, **more)

    monkeypatch.setattr(install, "open", noted, raising=False)
    meeting = NodeMeeting(told, Stores(dist.HashStore()))  # type: ignore[arg-type]
    meeting.begin(3, 4)
    (tmp_path / layout.SEEK_FILE).write_text("2\n")
    for _ in range(5):
        meeting._looks_at_s = 0.0
        meeting.look()
    assert len(opened) == 1 and meeting._thread is None
    (tmp_path / "new").write_text("3\n")
    (tmp_path / "new").replace(tmp_path / layout.SEEK_FILE)
    looking(meeting, lambda: meeting._thread is not None)
    meeting.end()


def test_the_end_of_a_world_ends_the_looks_into_its_store(tmp_path: Path) -> None:
    told, torch = Told(tmp_path), Stores(dist.HashStore())
    references = sys.getrefcount(torch.store)
    meeting = NodeMeeting(told, torch)  # type: ignore[arg-type]
    meeting.begin(1, 2)
    (tmp_path / layout.SEEK_FILE).write_text("1\n")
    looking(meeting, lambda: torch.asked)
    thread = meeting._thread
    assert thread is not None and thread.is_alive()
    until(lambda: sys.getrefcount(torch.store) == references)
    meeting.end()
    assert not thread.is_alive()
    asked = torch.asked
    meeting.look()
    assert torch.asked == asked and meeting._thread is None
