"""A run that is shown elsewhere, too: who sees it, what is said where nobody can, and what that costs the head."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from ddpdoctor.diagnosis.performance.summary import RunVerdict
from ddpdoctor.errors import RecordError, UsageError
from ddpdoctor.monitor.nodes import attached, screens
from ddpdoctor.monitor.nodes.attached import AttachedRun, HeadLeft, find_key
from ddpdoctor.monitor.nodes.head import Head
from ddpdoctor.monitor.nodes.meeting import Meeting, endpoint, write_attach_file
from ddpdoctor.monitor.nodes.messages import PROTOCOL, Request, connected, pack
from ddpdoctor.monitor.snapshot import RunState, Snapshot
from ddpdoctor.record import layout
from tests.jobs_of_tests import kill_marked, marked
from tests.nodes.test_head import RECORD, forwarding, listening, until
from tests.tui import runs

SCRIPT = """
import os, sys, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = 0
while True:
    optimizer.zero_grad()
    time.sleep(0.03 + 0.03 * dist.get_rank())
    over = torch.tensor([float(os.path.exists(sys.argv[1]))])
    model(torch.randn(16, 64)).sum().backward()
    optimizer.step()
    step += 1
    if step % 20 == 0:
        dist.all_reduce(over)
        if over.item() and step > 100:
            break
dist.destroy_process_group()
"""


def shown(now_ns: int, state: RunState = "running", name: str = "train.py") -> Snapshot:
    return Snapshot(
        now_ns=now_ns,
        name=name,
        state=state,
        started_at_ns=1,
        run_directory="/runs/one",
        launched=True,
        verdict=RunVerdict(state="healthy", text="all is well"),
    )


@contextmanager
def showing(now_ns: int = 1_000) -> Iterator[Head]:
    with listening() as head:
        head.screens.offer(shown(now_ns))
        yield head


@contextmanager
def looking(meeting: Meeting) -> Iterator[AttachedRun]:
    run = AttachedRun(meeting)
    try:
        yield run
    finally:
        run.close()


def test_a_job_of_real_ranks_is_seen_elsewhere_and_its_record_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**marked(os.environ, tmp_path), "XDG_STATE_HOME": str(tmp_path / "state"), "OMP_NUM_THREADS": "1"}
    told = (sys.executable, "-m", "ddpdoctor", "profile", "--no-tui", "--output-format", "json")

    def start(name: str, *words: str, **more: str) -> subprocess.Popen[bytes]:
        with (tmp_path / f"{name}.txt").open("wb") as said:
            return subprocess.Popen(
                (*told, *words, "-o", f"{name}.json"),
                cwd=tmp_path,
                env={**environment, **more},
                stdout=subprocess.DEVNULL,
                stderr=said,
                start_new_session=True,
            )

    def said(name: str) -> str:
        return (tmp_path / f"{name}.txt").read_text()

    def report(name: str) -> Any:
        return json.loads((tmp_path / f"{name}.json").read_text())

    try:
        head = start("head", "--run-dir", "run", "--head", f"127.0.0.1:{port}", "train.py", "over")
        until(lambda: (tmp_path / "run" / layout.ATTACH_FILE).exists(), 240)
        # Another user of another machine: no run directory, and a copy of the key.
        key = (tmp_path / "run" / layout.ATTACH_FILE).rename(tmp_path / "copied.key")
        assert key.stat().st_mode & 0o777 == 0o600
        listed = {path.name for path in (tmp_path / "run").iterdir()}
        where = ("--attach", f"127.0.0.1:{port}", "--key", str(key))
        leaving = start("leaving", *where)
        staying = start("staying", *where, XDG_STATE_HOME=str(tmp_path / "nothing"))
        until(lambda: "steps/s" in said("leaving") and "showing the run at" in said("staying"), 240)
        leaving.terminate()
        assert leaving.wait(60) == 0
        assert (report("leaving")["exit_code"], len(report("leaving")["ranks"])) == (None, 2)
        (tmp_path / "over").touch()
        assert head.wait(240) == 0
        assert staying.wait(60) == 0, said("staying")
        seen, own = report("staying"), report("head")
        assert seen["run_directory"].endswith(f":{own['run_directory']}")
        for left_out in ("run_directory", "notes"):
            del seen[left_out], own[left_out]
        assert seen == own
        assert own["verdict"]["text"].startswith("rank 1 keeps rank 0 waiting")
        assert not (tmp_path / "nothing").exists()
        left = {name for name in listed if not (tmp_path / "run" / name).exists()}
        assert left <= {"history.sqlite-journal"}
        assert start("gone", *where).wait(60) == 2
        assert f"no monitor can be reached at port {port}" in said("gone")
    finally:
        kill_marked(tmp_path)


def test_each_newer_snapshot_comes_and_the_last_one_says_that_the_head_has_left() -> None:
    with showing() as head, looking(head.keys.screens) as run:
        assert (run.snapshot().now_ns, run.snapshot().source, run.snapshot().launched) == (1_000, "attached", False)
        head.screens.offer(shown(2_000))
        until(lambda: run.snapshot().now_ns == 2_000)
        head.screens.offer(shown(3_000))
        head.close()
        with pytest.raises(HeadLeft, match="has ended; the job may continue without it"):
            until(lambda: run.snapshot().now_ns < 0)
        assert run.last_snapshot().now_ns == 3_000


def test_the_end_of_a_job_is_seen_although_the_head_closes_at_once() -> None:
    with showing() as head, looking(head.keys.screens) as run:
        run.snapshot()
        until(lambda: any(screen.request for screen in head.screens._screens.values()))
        run.snapshot()
        head.screens.offer(shown(9_000, "ended"))
        head.close()
        until(lambda: run.snapshot().state == "ended")
        assert run.snapshot().now_ns == 9_000


def test_a_head_that_is_lost_is_told_and_one_in_its_place_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attached, "AGAIN_AFTER_S", 0.3)
    monkeypatch.setattr(screens.Screens, "last_messages", lambda self: iter(()))  # It is killed.
    with showing() as first, looking(first.keys.screens) as run:
        first.close()
        monkeypatch.setattr(attached, "SILENT_AFTER_S", 0.5)
        with pytest.raises(RecordError, match="no message from "):
            until(lambda: run.snapshot().now_ns < 0)
        second = Head(keys=first.keys)
        try:
            second.screens.offer(shown(5_000))

            def is_back() -> bool:
                with suppress(RecordError):
                    return run.snapshot().now_ns == 5_000
                return False

            until(is_back)
        finally:
            second.close()


def test_with_the_key_of_a_screen_nothing_can_be_told_and_with_another_nothing_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attached, "PATIENCE_S", 2.0)
    with showing() as head:
        with forwarding(head.keys.screens):
            until(lambda: head.strange > 0)
        assert not head.nodes
        for wrong in (head.meeting, msgspec.structs.replace(head.keys.screens, client_key="a" * 40)):
            with pytest.raises(UsageError, match="does not answer to the run's key"):
                AttachedRun(wrong)


def test_a_screen_of_another_version_is_told_so_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    with showing() as head:
        monkeypatch.setattr(attached, "PROTOCOL", "6.0+def")
        with pytest.raises(UsageError, match=r"does not serve this screen: it runs ddpdoctor .* and this machine 6\.0"):
            AttachedRun(head.keys.screens)
        assert "runs another version of ddpdoctor" in head.screens.others


def test_no_screen_slows_down_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that never reads, one that dies, many, and two that ask as fast as they can, while a node is heard."""
    big = runs.many_ranks(512)
    context = zmq.Context()
    with listening() as head, forwarding(head.meeting) as agent:
        head.screens.offer(big)
        over = threading.Event()

        def flood(reads: bool) -> None:
            own = connected(context, head.keys.screens, endpoint("127.0.0.1", head.meeting.port), 1 << 26)
            number = 0
            while not over.is_set():
                number += 1
                with suppress(zmq.Again):
                    own.send(pack(Request(protocol=PROTOCOL, number=number, host="rude")), zmq.NOBLOCK)
                while reads and own.poll(0):
                    own.recv_multipart()
            own.close(0)

        rude = [threading.Thread(target=flood, args=(reads,), daemon=True) for reads in (True, False)]
        for thread in rude:
            thread.start()
        try:
            until(lambda: bool(agent.answered_s))
            longest_s = 0.0
            for number in range(1, 31):
                began_s = time.monotonic()
                agent.offer(RECORD, is_quiet=bool(number % 2), ended=False, exit_code=None)
                while agent.answered_s < began_s:
                    time.sleep(0.01)
                longest_s = max(longest_s, time.monotonic() - began_s)
                head.screens.offer(msgspec.structs.replace(big, now_ns=big.now_ns + number))
            # The agent looks every 0.1 s for an answer; on a busy machine a thread waits for its turn.
            assert longest_s < 3.0
            assert len(head.screens._screens) <= screens.MOST_SCREENS
        finally:
            over.set()
            for thread in rude:
                thread.join(30)
    context.destroy(linger=0)


def test_more_screens_than_there_may_be_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screens, "MOST_SCREENS", 1)
    with showing() as head, looking(head.keys.screens) as first:
        first.snapshot()
        with pytest.raises(UsageError, match="1 screens are attached already"):
            AttachedRun(head.keys.screens)


def asked(number: int, has_ns: int = 0) -> list[bytes]:
    return [pack(Request(protocol=PROTOCOL, number=number, host="a", has_ns=has_ns))]


def test_a_snapshot_is_packed_once_for_all_and_seldom_where_that_is_dear(monkeypatch: pytest.MonkeyPatch) -> None:
    held = screens.Screens("node0")
    monkeypatch.setattr(screens, "PACKING_SHARE", 1e-9)
    held.offer(shown(1_000))
    for screen in (b"a", b"b"):
        held.take(screen, asked(1), 10.0)
    first, second = (answer for _, answer in held.due(10.0))
    assert len(first) == len(second) == 2 and first[1] is second[1]
    held.offer(shown(2_000))
    held.take(b"a", asked(2, 1_000), 11.0)
    assert not list(held.due(12.0))
    assert [len(answer) for _, answer in held.due(13.0)] == [1]  # Nothing new, but the head is there.
    held.take(b"a", asked(3, 1_000), 1e15)
    assert [len(answer) for _, answer in held.due(1e15)] == [2]


def test_requests_beyond_what_all_screens_need_are_told_apart() -> None:
    held = screens.Screens("node0")
    assert not any(held.is_flooded(1.0 + number / 20) for number in range(1_000))
    assert sum(held.is_flooded(100.0) for _ in range(1_000)) >= 1_000 - screens.REQUESTS_PER_S
    assert not held.is_flooded(102.0)


def test_a_key_is_found_by_run_by_file_and_by_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with showing() as head:
        kept = tmp_path / "ddpdoctor/runs/run-1"
        kept.mkdir(parents=True)
        (kept / layout.JOB_FILE).write_text("{}")
        write_attach_file(kept, head.keys.screens)
        port = head.meeting.port
        for where in ("run-1", str(kept), str(kept / layout.ATTACH_FILE), f"127.0.0.1:{port}"):
            with looking(find_key(where, None)) as run:
                assert run.snapshot().now_ns == 1_000


def test_a_head_whose_name_leads_nowhere_is_seen_on_its_own_machine(tmp_path: Path) -> None:
    with showing() as head:
        named = msgspec.structs.replace(head.keys.screens, addresses=("no-such-host.invalid",))
        write_attach_file(tmp_path, named)
        with looking(find_key(str(tmp_path / layout.ATTACH_FILE), None)) as run:
            assert run.snapshot().now_ns == 1_000


def test_what_cannot_be_attached_to_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "run").mkdir()
    (tmp_path / "bad.key").write_bytes(b"\xff" * 100)
    told: Any
    for where, key, told in (
        ("no-run", None, "not HOST:PORT, and there is no run or key file"),
        ("node0:0", None, "not HOST:PORT"),
        (str(tmp_path / "run"), None, "does not listen"),
        ("127.0.0.1:9", None, "none of your runs on this machine has a key for port 9"),
        ("127.0.0.1:9", str(tmp_path / "bad.key"), "does not hold the key of a run"),
        ("127.0.0.1:9", str(tmp_path / "none"), "cannot read "),
    ):
        with pytest.raises(UsageError, match=told):
            find_key(where, key)
    with showing() as head:
        gone = msgspec.structs.replace(head.keys.screens, addresses=("no-such-host.invalid",))
    with pytest.raises(UsageError, match=r"no monitor can be reached at port \d+ \(no-such-host.invalid: "):
        AttachedRun(gone)
