"""The jobs of the truth table: one script, what is wrong with it or with the link, and what has to be said of it."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.nodes.machines import Machine, machines, watched

SCRIPT = """
import os, signal, sys, threading, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

fault, steps = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo")
rank = dist.get_rank()
wide = {"comm-bound": 1024, "narrow": 256}.get(fault, 64)
model = DDP(torch.nn.Sequential(*(torch.nn.Linear(wide, wide) for _ in range(4))))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 16 * steps

    def __getitem__(self, index):
        if fault == "input-bound" and rank >= 2:
            time.sleep(0.005)
        return torch.ones(wide)


for step, inputs in enumerate(torch.utils.data.DataLoader(Samples(), batch_size=16)):
    optimizer.zero_grad()
    loss = model(inputs).square().mean()
    time.sleep(0.002 if fault == "comm-bound" else 0.1)
    if rank == dist.get_world_size() - 1 and fault == "straggler":
        time.sleep(0.04)
    if rank == 3 and step == steps // 2 and fault == "hang":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    if rank == 3 and step == steps // 2 and fault == "killed":
        time.sleep(3)
        os.kill(os.getpid(), signal.SIGKILL)
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
"""
CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

static long ahead(void) {
    const char *text = getenv("CLOCK_AHEAD_S");
    return text ? atol(text) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(clock, now);
    if (!code && clock == CLOCK_REALTIME) now->tv_sec += ahead();
    return code;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (now) *now = exact.tv_sec;
    return exact.tv_sec;
}
"""
"""A wall clock that is ahead, to be loaded before all else. libfaketime makes Python's sleeps fail (0.9.10: EINVAL)."""
HAS_COMPILER = shutil.which("cc") is not None
PATIENCE_S = 240.0
COMMUNICATION = ("DDP401", "DDP408")


class Case(NamedTuple):
    """A fault, and what the head has to say of it."""

    fault: str
    steps: int
    state: str
    codes: tuple[str, ...]
    begins: str = ""
    """How the verdict begins; empty where that does not matter."""
    delay_ms: float = 0.0
    rate: str = ""
    never: tuple[str, ...] = ("DDP403",)
    """Codes that neither monitor may report."""
    agent_may: tuple[str, ...] = ()
    """Codes that the other node may give as its own verdict."""


CASES: Mapping[str, Case] = {
    "straggler": Case("straggler", 150, "slow", ("DDP403",), "rank 3 on node1 keeps", never=(), agent_may=("DDP403",)),
    "slow link": Case("healthy", 60, "slow", COMMUNICATION, delay_ms=20.0),
    "narrow link": Case("narrow", 60, "slow", COMMUNICATION, rate="50mbit"),
    "hang": Case("hang", 60, "broken", ("DDP305",), "rank 3 on node1 is stuck at", agent_may=("DDP305",)),
    "killed": Case("killed", 60, "broken", ("DDP703",), "the process of rank 3 on node1", agent_may=("DDP703",)),
    "comm-bound": Case("comm-bound", 300, "slow", COMMUNICATION),
    "input-bound": Case(
        "input-bound", 100, "slow", ("DDP403", "DDP404"), "ranks 2 and 3 on node1", never=(), agent_may=("DDP404",)
    ),
    "healthy": Case("healthy", 150, "healthy", ("",)),
}


class Outcome(NamedTuple):
    """What both monitors said."""

    head: Mapping[str, Any]
    agent: Mapping[str, Any]
    seconds: float


def run(case: Case, directory: Path, *, ahead_s: int = 0) -> Outcome:
    """Run a case on two machines, the clock of the second one so far ahead."""
    (directory / "train.py").write_text(SCRIPT)
    began_s = time.monotonic()
    with machines(directory, delay_ms=case.delay_ms) as (first, second):
        if case.rate:
            for machine in (first, second):
                machine.narrow(case.rate)
        fake = clock_ahead(directory, ahead_s) if ahead_s else {}
        started = [
            machine.start(
                [*watched(machine, first, number, directory / "train.py"), case.fault, str(case.steps)],
                fake if number else {},
            )
            for number, machine in enumerate((first, second))
        ]
        if case.fault == "hang":
            until(lambda: "STALLED" in first.text())
            for process in started:
                process.send_signal(signal.SIGINT)  # The wrappers around the monitor have become it.
        for process in started:
            process.wait(timeout=PATIENCE_S)
        return Outcome(report(first), report(second), time.monotonic() - began_s)


def clock_ahead(directory: Path, ahead_s: int) -> dict[str, str]:
    """The environment of a machine whose wall clock is ahead; CalledProcessError where no C compiler works."""
    source, library = directory / "clock.c", directory / "clock.so"
    source.write_text(CLOCK)
    subprocess.run(("cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"), check=True, capture_output=True)
    return {"LD_PRELOAD": str(library), "CLOCK_AHEAD_S": str(ahead_s)}


def report(machine: Machine) -> Any:
    """What the monitor of a machine reported."""
    return json.loads((machine.home / "report.json").read_text())


def until(what: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
    """Wait for something; AssertionError where it does not come."""
    deadline = time.monotonic() + patience_s
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def wrong(case: Case, outcome: Outcome) -> list[str]:
    """What of an outcome is not as it has to be."""
    found, verdict = [], outcome.head["verdict"]
    if verdict["state"] != case.state or verdict["code"] not in case.codes:
        found.append(f"the head says {verdict['state']} {verdict['code']}: {verdict['text']}")
    elif not verdict["text"].startswith(case.begins):
        found.append(f"the head names {verdict['text']!r}")
    own = outcome.agent["verdict"]
    if own["state"] != "unknown" and own["code"] not in case.agent_may:
        found.append(f"the other node says {own['state']} {own['code']}: {own['text']}")
    for name, told in (("head", outcome.head), ("other node", outcome.agent)):
        false = [finding["title"] for finding in told["findings"] if finding["code"] in case.never]
        found += [f"the {name} reports {title!r}" for title in false]
    if len(outcome.head["ranks"]) != 4:
        found.append(f"the head has {len(outcome.head['ranks'])} ranks")
    return found
