"""A job that hangs now: what its flight recorders say, C++ stacks, and ranks that are read without py-spy."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ddpdoctor.autopsy import live_job
from ddpdoctor.autopsy.dead_job import AutopsyRequest
from ddpdoctor.autopsy.live_job import Recording, Seen, live_autopsy, look, record_of, recordings, with_recordings
from ddpdoctor.diagnosis.stacks import native_stacks
from ddpdoctor.errors import UsageError
from ddpdoctor.launch.processes import RunningRank
from ddpdoctor.monitor.processes import stacks
from ddpdoctor.monitor.processes.stacks import Look
from tests.autopsy.hanging import hanging
from tests.autopsy.live_cases import Hang
from tests.autopsy.test_live import BARRIER

DEBUG_SERVER = """
from torch._C._distributed_c10d import _WorkerServer
from torch.distributed.debug._store import tcpstore_client
server = _WorkerServer("::", 0)
tcpstore_client().set(f"rank{rank}", f"http://{socket.gethostname()}:{server.port}")
for _ in range(4):
    dist.all_reduce(value)
if rank == 1:
    dist.all_reduce(value)  # here
else:
    dist.barrier()
"""
"""What torch.distributed.debug does on each rank, without the page on rank 0, which needs more packages."""
CONTROL_PLANE = """
from torch.distributed.elastic.control_plane import _worker_server
server = _worker_server(os.environ["TORCH_WORKER_SERVER_SOCKET"])
server.__enter__()
threading.Event().wait()  # here
"""


def test_what_a_debug_server_says_of_the_group_is_told(tmp_path: Path) -> None:
    with hanging(Hang(name="debug-server", body=DEBUG_SERVER), tmp_path) as launcher:
        examination = live_autopsy(AutopsyRequest(paths=()), (launcher,), ())
        assert subprocess.run(("kill", "-0", str(launcher))).returncode == 0
    assert examination.autopsy is not None and examination.autopsy.dumps == 3, examination.notes
    (cause,) = [finding for finding in examination.findings if finding.role == "cause"]
    assert (cause.code, cause.ranks) == ("DDP301", (1,))
    (limit,) = [fact for fact in cause.evidence if "barrier #" in fact.text]
    assert limit.text.startswith("ranks 0 and 2 have waited") and "the group's timeout is 30 min" in limit.text
    assert 0 < limit.numbers["left_s"] < limit.numbers["timeout_s"] == 1800


def test_the_socket_of_the_control_plane_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_WORKER_SERVER_SOCKET", str(tmp_path / "socket"))
    with hanging(Hang(name="control-plane", body=CONTROL_PLANE, ranks=1, culprit=0), tmp_path) as launcher:
        (seen,) = look((launcher,))
    assert not seen.recording.problem
    record, notes = with_recordings(record_of([seen]), [seen])
    assert not notes
    assert [signature.kind for signature in record.signatures].count("all_reduce") > 0


def test_ports_that_no_store_names_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of the user's must not be spoken to, nor a store that holds nothing of the kind."""
    asked: list[bytes] = []
    with socket.create_server(("", 0)) as own, socket.create_server(("127.0.0.1", 0)) as store:

        def answer() -> None:
            connection, _ = store.accept()
            with connection:
                asked.append(connection.recv(4_096))
                connection.sendall(b"\1")

        thread = threading.Thread(target=answer)
        thread.start()
        settings = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.getsockname()[1])}
        assert recordings([RunningRank(rank=3, pid=os.getpid(), settings=settings)]) == [Recording()]
        thread.join()
        own.settimeout(0)
        with pytest.raises(BlockingIOError):
            own.accept()
    assert b"/debug_server/rank3" in asked[0]


RANK_WITH_A_PIPE = """
import os, sys, time
pipe, dump, content = sys.argv[1:]
os.mkfifo(pipe)
reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
print("ready", flush=True)
while True:
    if os.read(reader, 64):
        with open(content, "rb") as recorded, open(dump, "wb") as written:
            written.write(recorded.read())
    time.sleep(0.05)
"""
"""What NCCL's monitor does with its pipe: NCCL itself needs GPUs."""


@contextmanager
def _rank_with_a_pipe(directory: Path, content: bytes) -> Iterator[RunningRank]:
    (directory / "recorded").write_bytes(content)
    arguments = (directory / "pipe_3.pipe", directory / "dump_3", directory / "recorded")
    process = subprocess.Popen(
        (sys.executable, "-c", RANK_WITH_A_PIPE, *map(str, arguments)), stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        settings = {
            "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(directory / "pipe_"),
            "TORCH_FR_DUMP_TEMP_FILE": str(directory / "dump_"),
        }
        yield RunningRank(rank=3, pid=process.pid, settings=settings)
    finally:
        process.kill()
        process.communicate()


def test_nccl_is_told_by_its_pipe_to_write_a_dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_job, "PIPE_PATIENCE_S", 60.0)
    with _rank_with_a_pipe(tmp_path, b"a dump") as rank:
        assert recordings([rank]) == [Recording(content=b"a dump")]
        # A second look changes nothing of the dump that is there.
        (tmp_path / "recorded").write_bytes(b"another")
        assert recordings([rank]) == [Recording(content=b"a dump")]


def test_a_dump_of_an_earlier_job_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "dump_3").write_bytes(b"of yesterday")
    os.utime(tmp_path / "dump_3", (time.time() - 86_400,) * 2)
    with _rank_with_a_pipe(tmp_path, b"a dump") as rank:
        (recording,) = recordings([rank])
    assert "of an earlier job" in recording.problem
    assert (tmp_path / "dump_3").read_bytes() == b"of yesterday"


@pytest.mark.parametrize("content", [b"\x80\x04garbage", b'{"entries": 7}', b"[" * 100])
def test_what_a_server_says_is_hostile_input(content: bytes) -> None:
    seen = [Seen(RunningRank(rank=0, pid=1, world_size=1), Look(frames=BARRIER), Recording(content=content))]
    record, notes = with_recordings(record_of(seen), seen)
    assert not record.collectives
    assert len(notes) == 1 and "rank 0: its flight recorder cannot be used" in notes[0]


def test_the_cpp_stack_is_told_where_it_is_asked_for(tmp_path: Path) -> None:
    job = Hang(name="native", body="if rank == 1:\n    time.sleep(300)  # here\ndist.barrier()\n", ranks=2)
    with hanging(job, tmp_path) as launcher:
        seen = look((launcher,), native=True)
        assert subprocess.run(("kill", "-0", str(launcher))).returncode == 0
        assert all(Path(f"/proc/{one.rank.pid}/stat").read_text().split()[2] not in "tT" for one in seen)
    if any(one.look.native_problem for one in seen):
        pytest.skip(f"py-spy reads no C++ stacks here: {seen[0].look.native_problem}")
    assert [fact.text for fact in native_stacks(record_of(seen)) if fact.rank == 0] == [
        "rank 0 is in C++ in c10d::Work::wait"
    ]


def test_where_cpp_stacks_cannot_be_read_a_note_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partial = tmp_path / "py-spy"
    frame = {"name": "main", "filename": "/job/train.py", "line": 5}
    stack = json.dumps([{"os_thread_id": os.getpid(), "frames": [frame]}])
    partial.write_text(
        "#!/bin/sh\ncase \"$*\" in *--native*) echo 'Error: not supported on this platform' >&2; exit 1;; esac\n"
        f"echo '{stack}'\n"
    )
    partial.chmod(0o755)
    monkeypatch.setattr(stacks, "find_py_spy", lambda: str(partial))
    monkeypatch.setattr(stacks, "BETWEEN_S", 0.0)
    (found,) = stacks.look_at([os.getpid()], ["/"], native=True)
    assert (found.frames[0].line, found.problem) == (5, "")
    assert "not supported" in found.native_problem


def _python_3_14() -> str | None:
    return os.environ.get("DDPDOCTOR_PYTHON_3_14") or shutil.which("python3.14")


@pytest.mark.skipif(_python_3_14() is None, reason="there is no Python 3.14; DDPDOCTOR_PYTHON_3_14 names one")
def test_a_rank_on_python_3_14_is_read_without_py_spy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import threading\ndef evaluate():\n    print(1, flush=True)\n    threading.Event().wait()\nevaluate()\n"
    )
    monkeypatch.setattr(stacks, "find_py_spy", lambda: None)
    with subprocess.Popen((_python_3_14() or "", str(script)), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "1\n"
        time.sleep(0.5)
        (found,) = stacks.look_at([process.pid], [str(tmp_path)])
        process.send_signal(signal.SIGKILL)
    assert not found.problem
    assert [frame.line for frame in found.frames if frame.file == str(script)] == [4, 5]


def test_older_ranks_without_py_spy_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "find_py_spy", lambda: None)
    monkeypatch.setattr(stacks, "PROGRAM", "import sys; sys.exit(4)")
    with pytest.raises(UsageError) as raised:
        stacks.look_at([os.getpid()], ["/"])
    assert "not installed" in str(raised.value)
    assert "ddpdoctor[live]" in raised.value.hint
