"""The gate's tables, on real ranks: faults, healthy variants, broken commits, and how equal budgets are.

``python -m tests.gate`` prints all of them; ``--only WORDS`` (part of a name) and ``--table NAME`` make it shorter,
``--runs N`` says how often each healthy variant is gated (10) and the budget of one script is taken (20 at most). It
exits with 1 when a fault was not red for its own reason within the time limit, something was left running, a healthy
variant was not green, or a budget differed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil

from ddpdoctor.errors import ExitCode
from ddpdoctor.examination import Examination
from ddpdoctor.examine.one_script import ExamineRequest
from ddpdoctor.examine.run_gate import GateRequest, Mode, run_gate, target_of
from ddpdoctor.gate.baseline import Entry, Rehearsed, read_baseline, write_entries
from ddpdoctor.launch.request import Launch, LaunchLine
from tests.benchmarks.faults import in_directory
from tests.faults.cases import FAULTS
from tests.faults.healthy import HEALTHY
from tests.faults.judge import wrong_verdict
from tests.gate.scripts import BROKEN, MORE_HEALTHY
from tests.gate.scripts import HEALTHY as SCRIPT
from tests.scratch import scratch_directory

FILE = "ddpdoctor-baseline.json"
TIME_LIMIT_S = 180.0
ALL_HEALTHY = {**HEALTHY, **MORE_HEALTHY}
SMALL_S = 20.0
"""What the gate of a small script may take."""


def main(arguments: list[str] | None = None) -> int:
    """Print the tables; 1 when a target was missed."""
    tables: dict[str, Callable[[argparse.Namespace], bool]] = {
        "broken": _broken_table,
        "faults": _fault_table,
        "healthy": _healthy_table,
        "budgets": _budget_table,
    }
    parser = argparse.ArgumentParser(description="The gate on real ranks.")
    parser.add_argument("--table", choices=tables, action="append")
    parser.add_argument("--only", default="")
    parser.add_argument("--runs", type=int, default=10)
    chosen = parser.parse_args(arguments)
    missed = False
    with scratch_directory() as state:
        os.environ["XDG_STATE_HOME"] = str(state)
        for name in chosen.table or tables:
            print(f"== {name}", flush=True)
            missed |= tables[name](chosen)
    return int(missed)


def gated(mode: Mode = "compare", *, nproc: int = 2, own_limit_s: float | None = None) -> tuple[Examination, float]:
    """Run the gate of ``train.py`` in the working directory; how long it took, in s."""
    began = time.monotonic()
    (found,) = run_gate(
        GateRequest(
            targets=(target_of(LaunchLine(target="train.py", arguments=(), launch=Launch())),),
            how=ExamineRequest(target="", nproc=nproc, time_limit_s=own_limit_s),
            baseline=Path(FILE),
            shown_baseline=FILE,
            mode=mode,
            time_limit_s=TIME_LIMIT_S,
        )
    )
    if found.exit_code == ExitCode.INTERRUPTED:
        raise KeyboardInterrupt
    return found, time.monotonic() - began


def _fault_table(chosen: argparse.Namespace) -> bool:
    right, total, slowest = 0, 0, 0.0
    for name, fault in FAULTS.items():
        if chosen.only not in name:
            continue
        with in_directory() as folder:
            (folder / "train.py").write_text(fault.script)
            write_entries(folder / FILE, {"train.py": _empty(fault.ranks)})
            found, seconds = gated(nproc=fault.ranks, own_limit_s=fault.time_limit_s)
            wrong = wrong_verdict(fault, _without_own(found))
            if found.exit_code not in ((1,) if fault.code else (3,)):
                wrong = wrong or f"exit code {found.exit_code:d}"
            wrong = wrong or _left_running(folder)
        total, right, slowest = total + 1, right + (not wrong), max(slowest, seconds)
        print(f"{name:44} {fault.code or '-':7} {seconds:6.1f} s  {wrong or 'red for its own reason'}", flush=True)
    print(f"faults: {right} of {total} red for their own reason; slowest {slowest:.1f} s (limit {TIME_LIMIT_S:g} s)")
    return right < total or slowest > TIME_LIMIT_S


def _healthy_table(chosen: argparse.Namespace) -> bool:
    green, total = 0, 0
    for name, script in ALL_HEALTHY.items():
        if chosen.only not in name:
            continue
        with in_directory() as folder:
            (folder / "train.py").write_text(script)
            said = [_not_green(gated("update")[0])]
            said += (
                [_not_green(gated()[0]) for _ in range(chosen.runs)] if not said[0] else ["no baseline"] * chosen.runs
            )
            left = _left_running(folder)
        good = sum(not one for one in said[1:])
        green, total = green + good, total + chosen.runs
        print(f"{name:60} {good:3} of {chosen.runs}  {next(filter(None, [*said, left]), '')}", flush=True)
    print(f"healthy: green {green} of {total} times, {len(ALL_HEALTHY)} variants")
    return green < total


def _broken_table(chosen: argparse.Namespace) -> bool:
    missed = False
    with in_directory() as folder:
        (folder / "train.py").write_text(SCRIPT)
        gated("update")
        healthy, seconds = gated()
        missed |= healthy.exit_code != 0 or seconds > SMALL_S
        print(f"{'healthy':24} {'':7} {seconds:6.1f} s  {healthy.verdict} (at most {SMALL_S:g} s)", flush=True)
        for name, (script, code, words) in BROKEN.items():
            if chosen.only not in name:
                continue
            (folder / "train.py").write_text(script)
            found, seconds = gated()
            said = [one.title for one in found.findings if one.code == code and words in one.title]
            missed |= found.exit_code != 1 or not said
            told = said[0] if said else f"MISSED: {found.verdict}, {[one.title for one in found.findings]}"
            print(f"{name:24} {code:7} {seconds:6.1f} s  {told[:150]}", flush=True)
    return missed


def _budget_table(chosen: argparse.Namespace) -> bool:
    budgets: set[bytes] = set()
    files: set[bytes] = set()
    runs = 2 * chosen.runs
    with in_directory() as folder:
        (folder / "train.py").write_text(SCRIPT)
        for _ in range(runs):
            gated("update")
            entries = read_baseline(folder / FILE) or {}
            budgets.add(msgspec.json.encode(entries["train.py"].budget))
            files.add((folder / FILE).read_bytes())
    print(f"budgets: {len(budgets)} different, and {len(files)} different baseline files, in {runs} runs")
    return len(budgets) != 1 or len(files) != 1


def _empty(ranks: int) -> Entry:
    rehearsed = Rehearsed(ranks=ranks, layout=f"1x{ranks}", device="cpu", batches=4, batch_size="")
    return Entry(rehearsed=rehearsed)


def _without_own(found: Examination) -> Examination:
    return msgspec.structs.replace(
        found, findings=tuple(one for one in found.findings if not one.code.startswith("DDP9"))
    )


def _not_green(found: Examination) -> str:
    if found.exit_code == 0:
        return ""
    told = "; ".join(f"{one.code} {one.title}" for one in found.findings)
    return told or f"exit code {found.exit_code:d}: {found.rehearsal.reason}"


def _left_running(folder: Path) -> str:
    left = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and Path(process.cwd()).is_relative_to(folder.resolve()):
                left.append(f"{process.pid} {process.name()}")
        except (psutil.Error, OSError):
            continue
    return f"left running: {', '.join(left)}" if left else ""


if __name__ == "__main__":
    sys.exit(main())
