"""A job of two ranks on two nodes of this machine, watched at both, for all rows of a table to attack.

The second node is an honest one: as long as its rank's steps grow in what the head serves to Prometheus, its updates
are answered. What the training came to is compared with the same job without any monitor.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from ddpdoctor.monitor.nodes.meeting import HeadKeys, kept_keys
from tests.jobs_of_tests import kill_marked, marked

SCRIPT = """
import hashlib, os, pathlib, sys, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

most, pause_s = int(sys.argv[1]), float(sys.argv[2])
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(7)
model = DDP(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
steps = 0
while steps < most:
    optimizer.zero_grad()
    time.sleep(pause_s)
    model(torch.randn(16, 64)).sum().backward()
    optimizer.step()
    steps += 1
    if steps % 10 == 0:
        goes_on = torch.tensor([0 if pathlib.Path("stop").exists() else 1])
        dist.all_reduce(goes_on, dist.ReduceOp.MIN)
        pathlib.Path(f"steps{rank}.new").write_text(str(steps))
        os.replace(f"steps{rank}.new", f"steps{rank}")  # never seen empty
        if not goes_on:
            break
weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
pathlib.Path(f"end{rank}").write_text(f"{steps} {hashlib.sha256(weights).hexdigest()}")
dist.destroy_process_group()
"""
MOST_MB = 64
SCRAPE_WITHIN_S = 2.0
ANSWERED_WITHIN_S = 5.0
_PAUSE_S = 0.03


class Outcome(NamedTuple):
    """What an attack did to what was attacked."""

    grown_mb: float
    scrape_s: float
    answered_s: float
    """Until the other node's steps had grown in what the head serves."""
    steps: int
    """Made by the training meanwhile."""
    descriptors: int
    """Of the head at the most, more than before."""

    @property
    def wrong(self) -> str:
        """What is not as it has to be; empty where all is."""
        found = []
        if self.grown_mb > MOST_MB:
            found.append(f"{self.grown_mb:.0f} MB more")
        if self.scrape_s > SCRAPE_WITHIN_S:
            found.append(f"a scrape took {self.scrape_s:.1f} s")
        if self.answered_s > ANSWERED_WITHIN_S:
            found.append(f"the other node was answered after {self.answered_s:.1f} s")
        if self.steps <= 0:
            found.append("the training stood")
        return ", ".join(found)


class Job:
    """The watched job: where its head listens, and how all goes."""

    def __init__(self, directory: Path, metrics: int, port: int, pid: int, keys: HeadKeys) -> None:
        self.directory, self.metrics, self.port, self.pid, self.keys = directory, metrics, port, pid, keys

    def said(self, node: int = 0) -> str:
        """What a monitor has printed."""
        return (self.directory / f"said{node}").read_text(errors="replace")

    def scrape(self, patience_s: float = 30.0) -> str:
        """What the head serves."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics}/metrics", timeout=patience_s) as response:
            return str(response.read().decode())

    def steps(self, rank: int = 0) -> int:
        """Made by a rank, as it says itself."""
        path = self.directory / f"steps{rank}"
        return int(path.read_text() or 0) if path.exists() else 0

    def shown_steps(self) -> float:
        """Made by the rank of the other node, as the head serves it; -1 where it does not."""
        found = re.search(r'^ddpdoctor_rank_steps_total\{[^}]*rank="1"[^}]*\} (\S+)', self._scraped(), re.MULTILINE)
        return float(found[1]) if found else -1.0

    def memory_mb(self) -> float:
        """Of the head."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(re.findall(r"^VmRSS:\s*(\d+)", status, re.MULTILINE)[0]) / 1_000

    def descriptors(self) -> int:
        """Of the head."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def attacked(self, attack: Callable[[Job], Iterator[None]]) -> Outcome:
        """Attack it, and look at it while the attack holds."""
        before_mb, before, before_steps = self.memory_mb(), self.descriptors(), self.steps()
        most_mb, most, over = before_mb, before, threading.Event()

        def look() -> None:
            nonlocal most_mb, most
            while not over.wait(0.05):
                most_mb, most = max(most_mb, self.memory_mb()), max(most, self.descriptors())

        looking = threading.Thread(target=look, daemon=True)
        looking.start()
        with contextmanager(attack)(self):
            shown, began_s = self.shown_steps(), time.monotonic()
            try:
                self.scrape(3 * SCRAPE_WITHIN_S)
            except OSError:
                pass
            scrape_s = time.monotonic() - began_s
            while self.shown_steps() <= shown and time.monotonic() - began_s < 4 * ANSWERED_WITHIN_S:
                time.sleep(0.1)
            answered_s = time.monotonic() - began_s
            while self.steps() <= before_steps and time.monotonic() - began_s < 4 * ANSWERED_WITHIN_S:
                time.sleep(0.1)
        over.set()
        looking.join()
        return Outcome(most_mb - before_mb, scrape_s, answered_s, self.steps() - before_steps, most - before)

    def _scraped(self) -> str:
        try:
            return self.scrape(SCRAPE_WITHIN_S)
        except OSError:
            return ""


class Ended(NamedTuple):
    """How the whole job came out."""

    codes: tuple[int, ...]
    weights: tuple[str, ...]
    bare_weights: tuple[str, ...]
    said: str = ""
    """The last words of the monitors."""

    @property
    def wrong(self) -> str:
        """What is not as it is without a monitor."""
        if any(self.codes):
            return f"exit codes {self.codes}\n{self.said}"
        return "" if self.weights == self.bare_weights else f"other weights: {self.weights}, not {self.bare_weights}"


def free_port() -> int:
    """A port that no one listens on."""
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        return int(own.getsockname()[1])


@contextmanager
def watched(directory: Path, ends: list[Ended]) -> Iterator[Job]:
    """The job; how it came out is added to ``ends`` when it is over."""
    (directory / "train.py").write_text(SCRIPT)
    port, metrics, master = free_port(), free_port(), free_port()
    running = []
    try:
        for node in (0, 1):
            more = ("--metrics", str(metrics)) if node == 0 else ()
            watch = (
                sys.executable,
                "-m",
                "ddpdoctor",
                "profile",
                "--no-tui",
                "--head",
                f"127.0.0.1:{port}",
                *more,
                "--",
            )
            running.append(
                _started(directory, (*watch, *_launch(node, master), "train.py", "1000000", str(_PAUSE_S)), node)
            )
        job = Job(directory, metrics, port, running[0].pid, _keys(directory))
        until(lambda: job.shown_steps() > 0)
        yield job
        (directory / "stop").touch()
        codes = tuple(process.wait(timeout=120) for process in running)
        weights = tuple((directory / f"end{rank}").read_text() for rank in (0, 1))
        (directory / "stop").unlink()
        bare = [
            _started(directory, (*_launch(node, master), "train.py", weights[0].split()[0], "0"), node + 2)
            for node in (0, 1)
        ]
        for process in bare:
            process.wait(timeout=300)
        bare_weights = tuple((directory / f"end{rank}").read_text() for rank in (0, 1))
        ends.append(Ended(codes, weights, bare_weights, "\n".join(job.said(node)[-2_000:] for node in (0, 1))))
    finally:
        kill_marked(directory)
        for process in running:
            process.wait(timeout=60)


def until(what: Callable[[], bool], patience_s: float = 120.0) -> None:
    """Wait for something; AssertionError where it does not come."""
    deadline = time.monotonic() + patience_s
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _launch(node: int, master: int) -> tuple[str, ...]:
    nodes = ("--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "1")
    meet = ("--master-addr", "127.0.0.1", "--master-port", str(master))
    return (sys.executable, "-m", "torch.distributed.run", *nodes, *meet)


def _started(directory: Path, words: tuple[str, ...], node: int) -> subprocess.Popen[bytes]:
    with (directory / f"said{node}").open("wb") as said:
        return subprocess.Popen(
            words,
            cwd=directory,
            env={
                **marked(os.environ, directory),
                "XDG_STATE_HOME": str(directory / f"state{node}"),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join(sys.path),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
            start_new_session=True,
        )


def _keys(directory: Path) -> HeadKeys:
    found: list[HeadKeys] = []

    def is_there() -> bool:
        runs = (directory / "state0" / "ddpdoctor" / "runs").glob("*/")
        found.extend(keys for run in runs if (keys := kept_keys(run)) is not None)
        return bool(found)

    until(is_there)
    return found[0]
