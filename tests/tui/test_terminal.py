"""The screen in a real terminal: left clean however it ends, and true to a real job."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.jobs_of_tests import kill_marked, marked
from tests.tui.terminals import LIMIT_S, terminal

LEFT = b"\x1b[?1049l"
"""Back from the screen of its own that a full-screen program has."""
CURSOR = b"\x1b[?25h"
COLOURS = re.compile(rb"\x1b\[(?:[0-9;]*;)?(?:3[0-7]|4[0-7]|38|48|9[0-7]|10[0-7])(?:;[0-9;]*)?m")


def test_the_demo_says_what_it_is_what_is_wrong_and_what_to_do_and_leaves_the_terminal_clean(tmp_path: Path) -> None:
    with terminal(tmp_path, "profile", "--demo") as screen:
        screen.until("DEMO")
        screen.until("Rank 5 makes the 7 other ranks wait")
        screen.until("See to the cooling of GPU 5")
        screen.send("q")
        assert screen.ended() == 0
        assert screen.written.rindex(LEFT) > screen.written.rindex(b"Rank 5")
        assert CURSOR in screen.written[screen.written.rindex(LEFT) :]


def test_no_color_means_none_and_a_plain_locale_ascii(tmp_path: Path) -> None:
    with terminal(tmp_path, "profile", "--demo", environment={"NO_COLOR": "1", "LANG": "C", "LC_ALL": "C"}) as screen:
        screen.until("Vital signs")
        for key, title in (("2", "Ranks (8)"), ("3", "Gradient buckets"), ("4", "GPUs of this node")):
            screen.send(key)
            screen.until(title)
        screen.send("q")
        assert screen.ended() == 0
        assert not COLOURS.search(screen.written)
        assert screen.written.isascii()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_the_terminal_clean(number: signal.Signals, tmp_path: Path) -> None:
    with terminal(tmp_path, "profile", "--demo") as screen:
        screen.until("Vital signs")
        screen.process.send_signal(number)
        assert screen.ended() == 0
        assert LEFT in screen.written


def test_a_lost_terminal_ends_the_screen(tmp_path: Path) -> None:
    with terminal(tmp_path, "profile", "--demo") as screen:
        screen.until("Vital signs")
        screen.hang_up()
        assert screen.process.wait(LIMIT_S) == 0


def test_it_is_suspended_and_comes_back_and_takes_a_new_size(tmp_path: Path) -> None:
    with terminal(tmp_path, "profile", "--demo") as screen:
        screen.until("3 Communication")
        screen.send(" ")
        screen.until("held")
        screen.send("\x1a")
        process = psutil.Process(screen.process.pid)
        screen.until_true(lambda: process.status() == psutil.STATUS_STOPPED, "the stop")
        screen.until_true(lambda: LEFT in screen.written, "what the terminal is left with")
        since = len(screen.written)
        screen.process.send_signal(signal.SIGCONT)
        for unchanged in ("2 Ranks", "Vital signs", "Where a step goes", "Findings", "q quit"):
            screen.until(unchanged, since)
        since = len(screen.written)
        screen.resize(60, 20)
        screen.until("3 Comm  4 GPUs", since)
        screen.send("q")
        assert screen.ended() == 0


def test_a_stop_from_outside_leaves_it_one_reader_and_an_end(tmp_path: Path) -> None:
    with terminal(tmp_path, "profile", "--demo") as screen:
        screen.until("Vital signs")
        process = psutil.Process(screen.process.pid)
        threads = process.num_threads()
        for _ in range(3):
            screen.process.send_signal(signal.SIGSTOP)
            screen.until_true(lambda: process.status() == psutil.STATUS_STOPPED, "the stop")
            modes = termios.tcgetattr(screen.master)
            cooked = modes[:3] + [modes[3] | termios.ICANON | termios.ECHO] + modes[4:]
            termios.tcsetattr(screen.master, termios.TCSANOW, cooked)  # As the shell does, which takes it meanwhile.
            since = len(screen.written)
            screen.process.send_signal(signal.SIGCONT)
            for unchanged in ("2 Ranks", "Where a step goes", "q quit"):
                screen.until(unchanged, since)
        assert process.num_threads() == threads
        screen.send("q")
        assert screen.ended() == 0


def test_the_demo_needs_a_terminal(tmp_path: Path) -> None:
    done = subprocess.run(
        (sys.executable, "-m", "ddpdoctor", "profile", "--demo"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 2
    assert "--demo needs a terminal" in done.stderr


JOB = """
import os, sys, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def evaluate():
    dist.broadcast(torch.zeros(3), src=0)

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(64, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
while True:
    time.sleep(0.02)
    model(torch.randn(16, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 1 and os.path.exists(sys.argv[1]):
        evaluate()
"""


@contextmanager
def _job(directory: Path) -> Iterator[list[psutil.Process]]:
    """A job on two ranks that is observed and that nobody watches; its processes."""
    (directory / "train.py").write_text(JOB)
    process = subprocess.Popen(
        (
            sys.executable,
            "-m",
            "ddpdoctor",
            "profile",
            "--no-tui",
            "--run-dir",
            "run",
            "--nproc",
            "2",
            "train.py",
            "hang",
        ),
        cwd=directory,
        env=marked(os.environ, directory),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    processes: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + LIMIT_S
        while len(processes) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.1)
            processes = psutil.Process(process.pid).children(recursive=True)
        yield processes
    finally:
        kill_marked(directory)
        process.wait()


def _steps(text: str) -> list[int]:
    return [int(number.replace(",", "")) for number in re.findall(r"step ([\d,]+)", text)]


def test_an_attached_screen_follows_a_job_names_who_hangs_it_and_leaves_it_alone(tmp_path: Path) -> None:
    with _job(tmp_path) as processes, terminal(tmp_path, "profile", "--run-dir", "run") as screen:
        screen.until_true(lambda: len(set(_steps(screen.text()))) >= 3, "steps that move")
        screen.send("2\r")
        screen.until("Stack, innermost first")
        screen.send("t")  # Where it finds the rank is not certain: on a busy machine seldom in its sleep.
        screen.until_true(lambda: re.search(r"taken \d+ s ago", screen.text()) is not None, "the stack")
        (tmp_path / "hang").touch()
        screen.until("STALLED")
        screen.until("the culprit")
        stalled = screen.text()[screen.text().rindex("STALLED") - 200 :]
        assert "Rank 1" in stalled and "train.py:6" in stalled and "broadcast" in stalled
        screen.send("k")
        screen.until("the job was not started here")
        screen.send("q")
        assert screen.ended() == 0
        assert all(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in processes)


def test_a_job_on_the_screen_is_ended_when_that_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("import time\nprint('said by the job', flush=True)\ntime.sleep(1000)\n")
    with terminal(tmp_path, "profile", "--run-dir", "run", "--", sys.executable, "job.py") as screen:
        screen.until("job.py")
        said = tmp_path / "run" / "launcher.out"
        screen.until_true(lambda: said.exists() and b"said by" in said.read_bytes(), "the job's output")
        assert "said by the job" not in screen.text()
        (job,) = [
            each for each in psutil.Process(screen.process.pid).children(recursive=True) if "job.py" in each.cmdline()
        ]
        screen.send("q")
        screen.until("The job was started here")
        screen.send("n")
        screen.send("q")
        screen.send("y")
        assert screen.ended() != 0
        assert not job.is_running() or job.status() == psutil.STATUS_ZOMBIE
        assert "launcher.out" in screen.text()


def test_a_job_on_the_screen_outlives_a_lost_terminal_and_is_still_watched(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("import os, time\nwhile not os.path.exists('end'):\n    time.sleep(0.1)\n")
    words = ("profile", "--run-dir", "run", "-o", "report.txt", "--", sys.executable, "job.py")
    with terminal(tmp_path, *words) as screen:
        screen.until("job.py")
        children = psutil.Process(screen.process.pid).children()  # another one keeps the output
        (job,) = (child for child in children if "job.py" in child.cmdline())
        screen.hang_up()
        time.sleep(1)
        assert job.is_running() and screen.process.poll() is None
        (tmp_path / "end").touch()
        assert screen.process.wait(LIMIT_S) == 0
        assert "job.py" in (tmp_path / "report.txt").read_text()


def test_a_signal_to_save_reaches_a_job_on_the_screen_which_stays(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(
        "import pathlib, signal, time\n"
        "signal.signal(signal.SIGUSR1, lambda *_: pathlib.Path('saved').touch())\n"
        "while not pathlib.Path('end').exists(): time.sleep(0.1)\n"
    )
    with terminal(tmp_path, "profile", "--run-dir", "run", "--", sys.executable, "job.py") as screen:
        screen.until("job.py")
        for number in (signal.SIGALRM, signal.SIGUSR2, signal.SIGUSR1):
            screen.process.send_signal(number)
        screen.until_true((tmp_path / "saved").exists, "the signal")
        screen.send("q")
        screen.until("leave the screen")
        screen.send("l")
        screen.until("the job continues")
        (tmp_path / "end").touch()
        assert screen.ended() == 0


def test_a_job_goes_on_in_plain_lines_when_only_the_screen_is_left(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("import os, time\nwhile not os.path.exists('end'):\n    time.sleep(0.1)\n")
    with terminal(tmp_path, "profile", "--run-dir", "run", "--", sys.executable, "job.py") as screen:
        screen.until("job.py")
        screen.send("q")
        screen.until("leave the screen")
        screen.send("l")
        screen.until("the job continues")
        (tmp_path / "end").touch()
        assert screen.ended() == 0
