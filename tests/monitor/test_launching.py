"""What a job is left with when it is started by ``profile``: its streams, its signals, its exit code, its life."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from ddpdoctor.cli.live.hang_command import Outlets
from ddpdoctor.cli.live.watching import LOOK_EVERY_S, _Watcher
from ddpdoctor.errors import UsageError
from ddpdoctor.launch.environment import observed
from ddpdoctor.launch.job import AGAIN_AFTER_S, LaunchedJob
from ddpdoctor.launch.kept_runs import find_run, write_plan
from ddpdoctor.probe.environment import plan_of
from ddpdoctor.record import layout
from tests.jobs_of_tests import kill_marked, marked

MAIN = (sys.executable, "-m", "ddpdoctor", "profile")
Started = list["subprocess.Popen[bytes]"]
_UNTIL_GO = (
    "import pathlib, time\n"
    "pathlib.Path('ready').touch()\n"
    "while not pathlib.Path('go').exists(): time.sleep(0.02)\n"
    "print('trained'); pathlib.Path('done').touch()"
)


@pytest.fixture
def started() -> Iterator[Started]:
    processes: Started = []
    yield processes
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _start(started: Started, directory: Path, *words: str, options: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [*MAIN, *options, *words],
        cwd=directory,
        env={**os.environ, "XDG_STATE_HOME": str(directory / "state")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    started.append(process)
    return process


def _python(code: str) -> tuple[str, ...]:
    return "--", sys.executable, "-u", "-c", code


def _wait_for(path: Path) -> None:
    _wait_until(path.exists)


def _wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _gone(pid: int) -> bool:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


def test_the_job_keeps_its_streams_and_its_exit_code(tmp_path: Path, started: Started) -> None:
    code = "import sys; print('out', sys.stdin.read()); sys.stderr.buffer.write(b'err \\xff'); sys.exit(7)"
    process = _start(started, tmp_path, *_python(code))
    out, err = process.communicate(b"typed", timeout=60)
    assert (out, process.returncode) == (b"out typed\n", 7)
    assert b"err \xff" in err


def test_a_signal_that_ends_the_job_gives_128_and_its_number(tmp_path: Path, started: Started) -> None:
    process = _start(started, tmp_path, *_python("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"))
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGSEGV


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_reaches_the_job_which_ends_as_it_likes(
    number: signal.Signals, tmp_path: Path, started: Started
) -> None:
    code = (
        "import signal, sys, pathlib, time\n"
        f"signal.signal({int(number)}, lambda *_: (print('tidied up'), sys.exit(3)))\n"
        "pathlib.Path('ready').touch()\n"
        "time.sleep(600)"
    )
    process = _start(started, tmp_path, *_python(code))
    _wait_for(tmp_path / "ready")
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert (out, process.returncode) == (b"tidied up\n", 3)


def test_the_second_signal_kills_a_job_that_does_not_listen(tmp_path: Path, started: Started) -> None:
    code = (
        "import os, signal, pathlib, subprocess, sys, time\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "pathlib.Path('child').write_text(str(child.pid))\n"
        "pathlib.Path('child').rename('ready')\n"
        "time.sleep(600)"
    )
    process = _start(started, tmp_path, *_python(code))
    _wait_for(tmp_path / "ready")
    process.send_signal(signal.SIGINT)
    # Of two signals of one kind that come before the first is heard, the second is lost.
    assert process.stderr is not None
    assert any(b"SIGINT forwarded to the job" in line for line in process.stderr)
    # Schedulers and `timeout` send it twice at once: that takes away no time in which a checkpoint is saved.
    process.send_signal(signal.SIGINT)
    time.sleep(AGAIN_AFTER_S + 0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL
    assert _gone(int((tmp_path / "ready").read_text()))


_UPLOADS = """
import os, pathlib, signal, subprocess, sys, time
UPLOADER = '''
import pathlib, time
pathlib.Path("ready").touch()
while not pathlib.Path("go").exists(): time.sleep(0.02)
pathlib.Path("uploaded").touch()
'''
def save(*_):
    null = subprocess.DEVNULL
    subprocess.Popen([sys.executable, "-c", UPLOADER], start_new_session=True, stdout=null, stderr=null)
    while not pathlib.Path("ready").exists(): time.sleep(0.02)
    os._exit(0)
signal.signal(signal.SIGTERM, save)
pathlib.Path("trains").touch()
time.sleep(600)
"""


def test_what_a_rank_leaves_on_purpose_goes_on_and_is_told(tmp_path: Path, started: Started) -> None:
    (tmp_path / "train.py").write_text(_UPLOADS)
    process = _start(started, tmp_path, "--nproc", "1", "train.py", options=("--no-tui",))
    _wait_for(tmp_path / "trains")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    told = re.search(r"of the job, these are still running: (\d+) \(", err.decode())
    assert told is not None, err.decode()
    assert psutil.pid_exists(int(told[1]))
    (tmp_path / "go").touch()
    _wait_for(tmp_path / "uploaded")


_LAUNCHER = """
import os, pathlib, subprocess, sys, time
RANK = '''
import os, pathlib, signal, subprocess, time
signal.signal(signal.SIGTERM, lambda *_: pathlib.Path("told").touch())
upload = subprocess.Popen(["sleep", "600"], start_new_session=True)
pathlib.Path("upload").write_text(str(upload.pid))
subprocess.Popen(["sleep", "600"])
pathlib.Path("rank").write_text(str(os.getpid()))
while True: time.sleep(0.1)
'''
subprocess.Popen([sys.executable, "-c", RANK], env={**os.environ, "RANK": "0"}, start_new_session=True)
subprocess.Popen(["sleep", "600"])
while not pathlib.Path("rank").exists(): time.sleep(0.02)
pathlib.Path("ready").touch()
time.sleep(600)
"""


@pytest.fixture
def left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LaunchedJob]:
    """A job whose launcher dies of the first SIGTERM, and whose rank does not listen to it."""
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    run.mkdir()
    write_plan(run, {"version": layout.VERSION, "kind": "run"})
    environment = {**marked(os.environ, tmp_path), **observed(run, os.environ)}
    job = LaunchedJob([sys.executable, "-c", _LAUNCHER], environment, run)
    try:
        _wait_for(tmp_path / "ready")
        yield job
    finally:
        kill_marked(tmp_path)


def test_ranks_that_outlive_their_launcher_are_told_to_end_and_then_killed_and_nothing_else_is(
    left: LaunchedJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddpdoctor.launch.job.RANKS_GET_S", 4.0)
    rank, upload = (int((tmp_path / name).read_text()) for name in ("rank", "upload"))
    said: list[str] = []
    alive = []

    def wait() -> None:
        alive.append((psutil.pid_exists(rank), (tmp_path / "told").exists()))
        time.sleep(0.1)

    left.forward(signal.SIGTERM)
    _wait_until(lambda: left.exit_code() is not None)
    left.end_leftovers(wait, said.append)
    assert sorted({seen for seen in alive if seen[0]}) == [(True, False), (True, True)]
    assert _gone(rank) and psutil.pid_exists(upload)
    assert "ranks of the job have not: " + str(rank) in said[0] and f"{upload} (sleep 600)" in said[1]
    assert said[1].count("sleep 600") == 3


def test_ranks_that_outlive_a_launcher_which_was_killed_are_named_and_left_alone(
    left: LaunchedJob, tmp_path: Path
) -> None:
    rank = int((tmp_path / "rank").read_text())
    said: list[str] = []
    os.kill(left.pid, signal.SIGKILL)
    _wait_until(lambda: left.exit_code() is not None)
    left.end_leftovers(lambda: time.sleep(0.1), said.append)
    (line,) = said
    assert line.startswith("the launcher has ended, but ranks of the job have not: ") and f"{rank} (" in line
    assert psutil.pid_exists(rank) and not (tmp_path / "told").exists()


def test_the_second_signal_leaves_alone_what_a_rank_has_started_in_a_session_of_its_own(
    left: LaunchedJob, tmp_path: Path
) -> None:
    rank, upload = (int((tmp_path / name).read_text()) for name in ("rank", "upload"))
    left.kill()
    assert _gone(rank)
    assert [process.pid for process in left.living()] == [upload]


@pytest.mark.parametrize("launched", ["alone", "by a shell"])
def test_a_signal_to_save_reaches_the_uppermost_process_that_handles_it(
    launched: str, tmp_path: Path, started: Started
) -> None:
    code = (
        "import os, signal, pathlib, time\n"
        "signal.signal(signal.SIGUSR1, lambda *_: pathlib.Path(f'saved-{os.getpid()}').touch())\n"
        "worker = os.fork()\n"
        "if worker == 0:\n"
        "    time.sleep(600)\n"
        "pathlib.Path('ready').touch()\n"
        "while not pathlib.Path(f'saved-{os.getpid()}').exists(): time.sleep(0.02)\n"
        "print(len(list(pathlib.Path('.').glob('saved-*'))), 'saved')\n"
        "os.kill(worker, 9)"
    )
    (tmp_path / "train.py").write_text(code)
    # The shell would die of the signal, as torchrun does.
    shell = ("--", "sh", "-c", f"{sys.executable} -u train.py; exit 5")
    process = _start(started, tmp_path, *(_python(code) if launched == "alone" else shell))
    _wait_for(tmp_path / "ready")
    process.send_signal(signal.SIGUSR1)
    out, err = process.communicate(timeout=60)
    assert (out, process.returncode) == (b"1 saved\n", 0 if launched == "alone" else 5)
    assert b"SIGUSR1 was forwarded to 1 process of the job" in err


def test_a_signal_that_nobody_handles_ends_neither_the_job_nor_the_watching(tmp_path: Path, started: Started) -> None:
    process = _start(started, tmp_path, *_python(_UNTIL_GO))
    _wait_for(tmp_path / "ready")
    stopping = {signal.SIGKILL, signal.SIGSTOP, signal.SIGTSTP}
    ending = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}
    broken = {signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGSYS}
    for number in signal.valid_signals() - stopping - ending - broken - {signal.SIGTRAP}:
        process.send_signal(number)
    assert process.stderr is not None
    told = [process.stderr.readline() for _ in range(2)]
    assert {line.split()[1] for line in told} == {b"SIGUSR1", b"SIGUSR2"}
    assert all(b"was not forwarded: no process of the job handles it" in line for line in told)
    (tmp_path / "go").touch()
    out, err = process.communicate(timeout=60)
    assert (out, process.returncode) == (b"trained\n", 0)
    assert b"Recorded in" in err


def test_a_doctor_that_is_stopped_and_goes_on_watches_on(tmp_path: Path, started: Started) -> None:
    process = _start(started, tmp_path, *_python(_UNTIL_GO))
    _wait_for(tmp_path / "ready")
    for _ in range(10):
        process.send_signal(signal.SIGSTOP)
        _wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
        time.sleep(LOOK_EVERY_S + 0.05)  # The wait for a signal has to be over when it goes on.
        process.send_signal(signal.SIGCONT)
        _wait_until(lambda: psutil.Process(process.pid).status() != psutil.STATUS_STOPPED)
        time.sleep(random.uniform(0.01, 0.2))  # At any moment of a look.
    (tmp_path / "go").touch()
    out, err = process.communicate(timeout=60)
    assert (out, process.returncode) == (b"trained\n", 0), err.decode()
    assert b"Recorded in" in err and b"goes to the job" not in err


def test_the_job_goes_on_when_the_doctor_is_killed(tmp_path: Path, started: Started) -> None:
    process = _start(started, tmp_path, *_python(_UNTIL_GO))
    _wait_for(tmp_path / "ready")
    process.kill()
    process.wait(timeout=60)
    (tmp_path / "go").touch()
    _wait_for(tmp_path / "done")
    assert process.communicate(timeout=60)[0] == b"trained\n"


def test_a_look_that_fails_is_said_once_and_costs_no_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Failing:
        def snapshot(self) -> None:
            raise StopIteration

        def final_snapshot(self) -> str:
            return "the last page"

        def record(self) -> str:
            return "the record"

        def close(self) -> None:
            pass

    class Wanted:
        def write(self, snapshot: str, *, beside_a_job: bool) -> None:
            written.append(snapshot)

        def write_trace(self, record: str) -> None:
            written.append(record)

    written: list[str] = []
    monkeypatch.setattr("ddpdoctor.profile.watch.live_source", lambda directory, job, **options: Failing())
    job: Any = None
    watcher = _Watcher(tmp_path, job, Outlets(None, None), None)
    wanted: Any = Wanted()
    watcher.look()
    watcher.look()
    watcher.report(wanted)
    assert written == ["the last page", "the record"]
    assert capsys.readouterr().err.count("observation failed (StopIteration: ); the job is unaffected") == 1


def test_the_run_is_written_down_before_the_job_starts(tmp_path: Path, started: Started) -> None:
    code = f"import os, pathlib; print(pathlib.Path(os.environ['DDPDOCTOR_RUN'], '{layout.JOB_FILE}').read_text())"
    process = _start(started, tmp_path, *_python(code))
    out, err = process.communicate(timeout=60)
    plan = json.loads(out)
    assert (plan["kind"], plan["supervisor_pid"]) == ("run", process.pid), err
    (directory,) = (tmp_path / "state" / "ddpdoctor" / "runs").iterdir()
    assert directory.stat().st_mode & 0o777 == 0o700


def test_the_variables_for_another_launcher_leave_no_directory_behind_where_no_job_is_started(
    tmp_path: Path, started: Started
) -> None:
    told = [_start(started, tmp_path, "--env").communicate(timeout=60)[0].decode() for _ in range(2)]
    named = [text.splitlines()[0].removeprefix("export DDPDOCTOR_RUN=") for text in told]
    assert named[0] != named[1]
    runs = tmp_path / "state" / "ddpdoctor" / "runs"
    assert list(runs.iterdir()) == []
    plan_of(named[0])
    (made,) = runs.iterdir()
    assert (str(made), made.stat().st_mode & 0o777) == (named[0], 0o700)


def test_a_file_is_no_record_of_a_run(tmp_path: Path, started: Started) -> None:
    (tmp_path / "train.py").touch()
    words = (sys.executable, "-m", "ddpdoctor", "report", "train.py")
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert "train.py is a file, but the record of a run is a directory" in done.stderr
    assert "`ddpdoctor profile train.py` creates one." in done.stderr


def test_there_is_nothing_to_attach_to_when_no_process_names_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "process_iter", lambda: iter(()))
    with pytest.raises(UsageError, match="none of your watched jobs runs on this machine"):
        find_run(None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("train.py",), "train.py does not exist"),
        ((".",), ". is a directory"),
        (("--", "torchrnu", "train.py"), "torchrnu: no such program on the PATH"),
        (("torchrun", "train.py"), "Write `ddpdoctor profile -- torchrun train.py`."),
        (("--no-tiu", "train.py"), "No such option"),
        (("--run-dir", "nowhere"), "there is no run directory"),
        (("--run-dir", "."), "is not a run directory: it has no job.json"),
        (("--run-dir", "newer"), "was recorded by a newer ddpdoctor (format 99;"),
        (("--run-dir", "damaged"), "is damaged"),
        (("--run-dir", "over"), "the run in over is over"),
        (("--run-dir", "away"), "the run in away was started on node7, and cannot be watched from here"),
        (("--run-dir", "over", "--", "true"), "over already holds a run"),
        (("--nproc", "4", "--", "true"), "--nproc does not apply to the command after `--`"),
        (("--env", "train.py"), "--env does not start a job"),
    ],
)
def test_what_cannot_be_watched_is_said_in_one_sentence(
    words: tuple[str, ...], message: str, tmp_path: Path, started: Started
) -> None:
    away = '{"version": 1, "clock": {"counts_from": "another boot", "offset_ns": 5, "host": "node7"}}'
    plans = {"newer": '{"version": 99}', "damaged": '{"version": ', "over": '{"version": 1}', "away": away}
    for name, content in plans.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / layout.JOB_FILE).write_text(content)
    _, err = _start(started, tmp_path, *words).communicate(timeout=60)
    assert message in err.decode()
    assert b"Traceback" not in err
    assert started[0].returncode == 2
