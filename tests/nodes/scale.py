"""4,096 ranks on 512 nodes and a real head: ``python -m tests.nodes.scale [--nodes 512] [--seconds 40] [FAULT…]``.

The first node is a run directory that simulated ranks write in real time, and the head is the monitor of it; what the
agents of the other nodes send comes from ``tests.nodes.simulated_nodes``. Of each fault it prints the share of a core
and the memory of the head, what a look takes, and what it says after how many seconds, of a hang after it struck. At
the end the screen of a job of that size is timed. It exits with 1 where the head takes more than a core or 2 GB, says
something else than what is wrong, or a hang too late. What other work on the machine kept the head waiting for a core
meanwhile is printed beside, and does not count; that the simulated nodes are kept waiting, too, does.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddpdoctor.profile.watch import live_source
from ddpdoctor.record import layout
from tests.benchmarks.simulated_ranks import BEATS_PER_S, SimulatedRank
from tests.nodes import simulated_hang
from tests.nodes.simulated_hang import HANGS, HUNG_NODE, HUNG_RANK, RANKS_OF_A_NODE, STANDS_AT
from tests.nodes.simulated_nodes import FAULTS, SLOW_NODE, STRAGGLER, length_ns, step_row
from tests.scratch import scratch_directory

_STANDS = f"at {Path(STANDS_AT.file).name}:{STANDS_AT.line}"
SAID = {
    "healthy": "",
    "hang of a rank": f"rank {HUNG_RANK} on node{HUNG_RANK // RANKS_OF_A_NODE} stands {_STANDS}",
    "hang of a node": f"ranks {HUNG_NODE * RANKS_OF_A_NODE}-{HUNG_NODE * RANKS_OF_A_NODE + RANKS_OF_A_NODE - 1} on "
    f"node{HUNG_NODE} stand {_STANDS}",
    "straggler": f"rank {STRAGGLER} on node{STRAGGLER // RANKS_OF_A_NODE} keeps",
    "slow node": f"ranks {SLOW_NODE * RANKS_OF_A_NODE}-{SLOW_NODE * RANKS_OF_A_NODE + RANKS_OF_A_NODE - 1} on "
    f"node{SLOW_NODE} keep",
    "slow link": "backward waits for gradient transfer",
}
"""How the verdict begins."""
HANG_WITHIN_S = 10.0
WATCHED_BEFORE_S = 15.0
"""A job is watched for so long before it comes to a hang."""
MOST_CORES = 1.0
MOST_MB = 2_000
LOOKED_EVERY_S = 0.25


class OwnRank(SimulatedRank):
    """A rank of the first node, in the steps of all nodes."""

    def prepare(self, fault: str, began_ns: int) -> None:
        """Begin with the first step of the job."""
        self._fault, self._began_ns = fault, began_ns
        self._started_ns, self._step_ns = began_ns, length_ns(fault)
        self._struck = 0
        self._ended_ns = self._answered = 0

    def strike(self, struck: int) -> None:
        """Make no step from this one on."""
        self._struck = struck
        self._ended_ns = self._began_ns + (struck - 1) * self._step_ns

    def make_steps(self, until_ns: int) -> None:
        """Write the steps that are over by then."""
        super().make_steps(min(until_ns, self._ended_ns) if self._struck else until_ns)

    def beat(self, now_ns: int) -> None:
        """Say where it is, and what it is asked for."""
        if not self._struck or now_ns < self._ended_ns:
            super().beat(now_ns)
            return
        asked = self._steps.requested()
        if asked != self._answered:
            first = not self._answered
            self._answered = asked
            with self._events.open("a") as file:
                rank, fault, step_ns = self._rank, self._fault, self._step_ns
                told = simulated_hang.lines(rank, fault, self._struck, self._ended_ns, step_ns, now_ns)
                file.write(told if first else "")
        values = simulated_hang.heartbeat_values(
            self._rank, self._fault, self._struck, self._ended_ns, now_ns, self._answered
        )
        self._calls.flush()
        self._steps.flush()
        self._steps.write_head(tuple(values[name] for name in layout.HEARTBEAT_FIELDS))
        self._calls.write_head()

    def _make_step(self) -> None:
        self.made += 1
        row = step_row(self.made, 0, self._rank % 4, self._fault, self._began_ns)
        self._steps.put(tuple(row[name] for name in layout.STEP_FIELDS))


def write_ranks(directory: Path, nodes: int, fault: str, began_ns: int) -> None:
    """Write what the first node's ranks do, until stdin is closed."""
    import select

    sleepers = [subprocess.Popen(("sleep", "infinity")) for _ in range(RANKS_OF_A_NODE)]
    try:
        ranks = [
            OwnRank(directory, rank, nodes * RANKS_OF_A_NODE, sleeper.pid, length_ns(fault), began_ns)
            for rank, sleeper in enumerate(sleepers)
        ]
        for rank, sleeper in zip(ranks, sleepers, strict=True):
            rank.prepare(fault, began_ns)
            host = {"event": "host", "time_ns": began_ns, "name": "node0", "interfaces": ["lo"], "environment": {}}
            with (directory / layout.EVENTS_FILE.format(sleeper.pid)).open("a") as file:
                file.write(json.dumps(host) + "\n")
        while True:
            now_ns = time.time_ns()
            struck = simulated_hang.struck_at(directory)
            for rank in ranks:
                rank.strike(struck)
                rank.make_steps(now_ns)
                rank.beat(now_ns)
            if select.select([sys.stdin], [], [], 1 / BEATS_PER_S)[0]:
                return
    finally:
        for sleeper in sleepers:
            sleeper.kill()


def kept_waiting_s() -> float:
    """For how long this thread could have run, and had no core."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def watch(directory: Path, nodes: int, fault: str, seconds: float) -> Mapping[str, Any]:
    """Be the head, with the other nodes once it listens; what was measured."""
    began_ns = int((directory / "began").read_text())
    source = live_source(directory, head_at=("127.0.0.1", int((directory / "port").read_text())))
    others, false_alarm = None, ""
    looks, named_s, text, state, began_s = [], -1.0, "", "", 0.0
    struck_s = 0.0
    """When the hang began, by the monotonic clock."""
    kept_s = waited_s = computed_s = 0.0
    """Of the time until the hang was named: without a core, and with one."""
    try:
        deadline = time.monotonic() + 120
        while not (directory / layout.HEAD_KEY_FILE).exists() and time.monotonic() < deadline:
            source.snapshot()
            time.sleep(0.2)
        words = (sys.executable, "-m", "tests.nodes.simulated_nodes", str(directory / layout.HEAD_KEY_FILE))
        others = subprocess.Popen((*words, str(nodes), fault, str(began_ns)), stdin=subprocess.PIPE)
        while len(source.snapshot().ranks) < nodes * RANKS_OF_A_NODE:
            if time.monotonic() > deadline:
                raise SystemExit(f"{len(source.snapshot().ranks)} ranks are seen: {source.snapshot().notes}")
            time.sleep(LOOKED_EVERY_S)
        began_s, began_cpu_s = time.monotonic(), time.process_time()
        while time.monotonic() - began_s < seconds:
            if fault in HANGS and not struck_s and time.monotonic() - began_s > WATCHED_BEFORE_S:
                struck = (time.time_ns() - began_ns) // length_ns(fault) + 5
                struck_s = time.monotonic() + (began_ns + (struck - 1) * length_ns(fault) - time.time_ns()) / 1e9
                (directory / simulated_hang.STRUCK_FILE).write_text(str(struck))
                kept_s = kept_waiting_s()
            before_s = time.thread_time()
            snapshot = source.snapshot()
            looks.append(time.thread_time() - before_s)
            if struck_s and named_s < 0:
                computed_s += looks[-1]
            text, state = snapshot.verdict.text, snapshot.verdict.state
            # Of ranks that stand it is said for a minute that they may go on.
            told = snapshot.stall is not None if fault in HANGS else state == ("healthy" if not SAID[fault] else "slow")
            right = text.startswith(SAID[fault]) and told
            if right and named_s < 0 and struck_s:
                waited_s = kept_waiting_s() - kept_s
            named_s = (time.monotonic() - (struck_s or began_s) if named_s < 0 else named_s) if right else -1.0
            if (state == "broken" or snapshot.stall is not None) and not struck_s:
                false_alarm = text
            time.sleep(LOOKED_EVERY_S)
        cores = (time.process_time() - began_cpu_s) / (time.monotonic() - began_s)
        notes = snapshot.notes
    finally:
        if others is not None and others.stdin is not None:
            others.stdin.close()
            others.wait()
        source.close()
    work = sorted(look for look in looks if look > 0.001)
    return {
        "cores": cores,
        "mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "look_s": work[len(work) // 2] if work else 0.0,
        "longest_look_s": max(looks),
        "named_s": named_s,
        "waited_s": waited_s,
        "computed_s": computed_s,
        "text": f"{state.upper()}: {text}",
        "false_alarm": false_alarm,
        "notes": notes,
    }


def measured(nodes: int, fault: str, seconds: float) -> Mapping[str, Any]:
    """Start the ranks and the head of one job."""
    with scratch_directory() as directory:
        import socket

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            (directory / "port").write_text(str(probe.getsockname()[1]))
        (directory / "job.json").write_text('{"version": 1, "kind": "run"}')
        began_ns = time.time_ns() - 60 * length_ns(fault)
        (directory / "began").write_text(str(began_ns))
        here = (sys.executable, "-m", "tests.nodes.scale", "--directory", str(directory), "--nodes", str(nodes))
        with subprocess.Popen((*here, "--role", "ranks", fault), stdin=subprocess.PIPE) as writer:
            try:
                words = (*here, "--role", "head", "--seconds", str(seconds), fault)
                done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
            finally:
                assert writer.stdin is not None
                writer.stdin.close()
    result: Mapping[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> int:
    """Print what was measured; 1 where a bound is missed."""
    parser = argparse.ArgumentParser(prog="python -m tests.nodes.scale")
    parser.add_argument("--nodes", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--role", choices=("ranks", "head"), help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("faults", nargs="*", default=list(FAULTS), metavar="FAULT")
    options = parser.parse_args()
    if options.role == "ranks":
        write_ranks(options.directory, options.nodes, options.faults[0], int((options.directory / "began").read_text()))
        return 0
    if options.role == "head":
        print(json.dumps(watch(options.directory, options.nodes, options.faults[0], options.seconds)))
        return 0
    missed = False
    for fault in options.faults:
        found = measured(options.nodes, fault, options.seconds)
        late = fault in HANGS and found["named_s"] - found["waited_s"] > HANG_WITHIN_S
        wrong = found["named_s"] < 0 or bool(found["false_alarm"])
        missed |= found["cores"] > MOST_CORES or found["mb"] > MOST_MB or late or wrong
        ranks = options.nodes * RANKS_OF_A_NODE
        print(
            f"{fault:<14} {ranks:,} ranks: {found['cores']:.2f} cores, {found['mb']:,.0f} MB, "
            f"a look {found['look_s']:.2f} s (at most {found['longest_look_s']:.2f}); "
            f"{'WRONG' if wrong else 'LATE' if late else 'after'} {found['named_s']:.1f} s: {found['text']}",
            flush=True,
        )
        if fault in HANGS:
            kept, computed = found["waited_s"], found["computed_s"]
            print(
                f"               since it struck the head had no core for {kept:.1f} s, and looked for {computed:.1f}"
            )
        if found["false_alarm"]:
            print(f"               said before: {found['false_alarm']}")
        for note in found["notes"]:
            print(f"               {note}")
    return (
        int(missed) | subprocess.run((sys.executable, "-m", "tests.benchmarks.many_ranks_cost"), check=False).returncode
    )


if __name__ == "__main__":
    sys.exit(main())
