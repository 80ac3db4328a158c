"""A screen elsewhere on a slow link, one whose user gives up, and one that loses the head or is refused by it."""

from __future__ import annotations

import os
import signal
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

from ddpdoctor.cli.live import screen, watching
from ddpdoctor.errors import ExitCode, RecordError
from ddpdoctor.monitor.nodes import attached, screens
from ddpdoctor.monitor.nodes.attached import AttachedRun, HeadLeft
from ddpdoctor.monitor.nodes.head import Head
from ddpdoctor.monitor.nodes.meeting import write_attach_file
from ddpdoctor.monitor.nodes.messages import Shown, pack_answer
from ddpdoctor.monitor.snapshot import Snapshot
from ddpdoctor.record import layout
from tests.nodes.test_attach import asked, looking, showing, shown
from tests.nodes.test_head import listening, until
from tests.tui import runs

BYTES_PER_S = 20_000


@contextmanager
def narrow(port: int, back: float = BYTES_PER_S, there: float = 1e9) -> Iterator[int]:
    """A port that leads to another one, and brings so many bytes a second there and back."""
    over = threading.Event()

    def carry(one: socket.socket, other: socket.socket, bytes_per_s: float) -> None:
        with suppress(OSError):
            while not over.is_set() and (content := one.recv(1_024)):
                other.sendall(content)
                over.wait(len(content) / bytes_per_s)
        with suppress(OSError):
            other.shutdown(socket.SHUT_WR)

    def accept() -> None:
        with suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.socket()
                sockets.extend((near, far))
                # The system's buffers are not the link.
                far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
                far.connect(("127.0.0.1", port))
                for ends in ((near, far, there), (far, near, back)):
                    threads.append(threading.Thread(target=carry, args=ends, daemon=True))
                    threads[-1].start()

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        sockets: list[socket.socket] = []
        threads = [threading.Thread(target=accept, daemon=True)]
        threads[0].start()
        try:
            yield listener.getsockname()[1]
        finally:
            over.set()
            listener.shutdown(socket.SHUT_RDWR)
            for end in sockets:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join(60)
            for end in sockets:
                end.close()


@contextmanager
def looking_through(head: Head, bytes_per_s: float = BYTES_PER_S) -> Iterator[AttachedRun]:
    with narrow(head.meeting.port, bytes_per_s) as port:
        meeting = msgspec.structs.replace(head.keys.screens, addresses=("127.0.0.1",), port=port)
        with looking(meeting) as run:
            yield run


def test_over_a_slow_link_the_key_is_known_to_be_right_before_the_first_snapshot_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attached, "PATIENCE_S", 1.5)
    big = runs.many_ranks(1_024)
    with listening() as head:
        head.screens.offer(big)
        with looking_through(head) as run:
            assert len(run.snapshot().ranks) == len(big.ranks)


def test_the_last_snapshot_comes_over_a_slow_link_although_the_head_closes_at_once() -> None:
    big = msgspec.structs.replace(runs.many_ranks(1_024), state="running")
    with listening() as head:
        head.screens.offer(big)
        # It takes 1.5 s of the 10 that a head waits: on a loaded machine the link is slower still.
        with looking_through(head, 2 * BYTES_PER_S) as run:
            run.snapshot()
            head.screens.offer(msgspec.structs.replace(big, state="ended", now_ns=big.now_ns + 1))
            head.close()
            until(lambda: state_of(run) == "ended")


def state_of(run: AttachedRun) -> str:
    with suppress(RecordError):
        return run.snapshot().state
    return ""


def test_a_snapshot_that_is_under_way_is_not_sent_again() -> None:
    held = screens.Screens("node0")
    held.offer(shown(1_000))
    assert held.take(b"a", asked(1), 10.0) is not None, "who asks first is greeted"
    assert [len(answer) for _, answer in held.due(10.0)] == [2]
    assert held.take(b"a", asked(2), 15.0) is None
    assert [len(answer) for _, answer in held.due(17.5)] == [1]
    held.take(b"a", asked(3), 10.0 + screens.UNDER_WAY_S + 1)
    assert [len(answer) for _, answer in held.due(10.0 + screens.UNDER_WAY_S + 1)] == [2]


def test_ctrl_c_ends_a_screen_that_waits_for_an_answer(tmp_path: Path) -> None:
    with showing() as head:
        write_attach_file(tmp_path, head.keys.screens)
    # A suite that was started in the background hands on to its children that interrupts are ignored.
    program = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "import ddpdoctor.monitor.nodes.attached as attached; attached.PATIENCE_S = 600.0; "
        "from ddpdoctor.cli.main import main; sys.exit(main())"
    )
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        where = ("--attach", f"127.0.0.1:{silent.getsockname()[1]}", "--key", str(tmp_path / layout.ATTACH_FILE))
        environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
        command = (sys.executable, "-c", program, "profile", "--no-tui", *where)
        with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) as looks:
            try:
                silent.accept()[0].close()  # It tries whether anybody listens …
                with silent.accept()[0]:  # … and begins to talk.
                    # Python loses an interrupt that comes in the callback of a weak reference, as an import has.
                    for _ in range(60):
                        looks.send_signal(signal.SIGINT)
                        if _ends_within(looks, 1.0):
                            break
                assert looks.returncode == ExitCode.INTERRUPTED
            finally:
                looks.kill()


def _ends_within(process: subprocess.Popen[bytes], seconds: float) -> bool:
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    return process.returncode is not None


class Kept:
    """Takes what is reported."""

    def __init__(self) -> None:
        self.reported: list[Snapshot] = []

    def write(self, snapshot: Snapshot) -> None:
        self.reported.append(snapshot)


def test_a_head_that_is_lost_on_the_screen_is_no_clean_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(attached, "SILENT_AFTER_S", 0.5)
    monkeypatch.setattr(screens.Screens, "last_messages", lambda self: iter(()))
    wanted: Any = Kept()
    with showing() as head:
        write_attach_file(tmp_path, head.keys.screens)

        def show(source: AttachedRun) -> str:
            head.close()
            until(lambda: not state_of(source))
            return "left"

        monkeypatch.setattr(screen, "show", show)
        code = watching.look_on(str(tmp_path / layout.ATTACH_FILE), None, wanted, on_screen=True)
    assert code == ExitCode.INCONCLUSIVE
    assert "reporting what was last shown: no message from " in capfd.readouterr().err
    assert len(wanted.reported) == 1


def test_who_is_refused_later_keeps_what_was_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    with showing() as head, looking(head.keys.screens) as run:
        assert run.snapshot().now_ns == 1_000
        refusal = pack_answer(Shown(number=1, host="node0", refused="16 screens are attached already"))
        monkeypatch.setattr(screens.Screens, "take", lambda *arguments: refusal)
        with pytest.raises(HeadLeft, match="no longer serves this screen: 16 screens are attached already"):
            until(lambda: run.snapshot().now_ns < 0)
        assert run.last_snapshot().now_ns == 1_000
        assert run.trouble


def test_a_head_with_kept_keys_listens_where_the_user_says() -> None:
    with listening() as first:
        keys = first.keys
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    second = Head("127.0.0.1", port, keys)
    try:
        assert second.meeting.port == port != keys.meeting.port
        assert second.meeting.server_key == keys.meeting.server_key
    finally:
        second.close()
    began_s = time.monotonic()
    third = Head(keys=keys)
    third.close()
    assert third.meeting.port == keys.meeting.port
    assert time.monotonic() - began_s < screens.UNDER_WAY_S
