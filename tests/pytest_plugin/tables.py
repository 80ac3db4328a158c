"""The fault table and the healthy bodies through the plugin: what has to be said of each, and whether it was."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec

from tests.faults.cases import FAULTS, Fault
from tests.pytest_plugin.session import Session, processes_of, run_pytest

NOT_OF_TESTS = ("a spawned worker raises", "mp.spawn with no worker", "port in use")
"""They start ranks of their own, or need torchrun's number of the run."""
ALSO = {"missing collective on rank 1": "DDP302"}
"""What the ranks alone show of it: that a rank test parts them is known from the source."""
SHOWN_BY_THE_SOURCE = ("continue on a bad batch",)
"""The line that a rehearsal shows beside what the ranks do comes from the source."""
LIMIT_S = 60.0


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """One case."""

    name: str
    wrong: str
    """What was said wrongly, or not said; empty when all was right."""
    first_line: str
    seconds: float


def run_faults(directory: Path, names: tuple[str, ...] = ()) -> tuple[list[Judged], list[str]]:
    """Run scripts of the fault table as bodies; what was said of each, and the processes that were left."""
    chosen = {name: fault for name, fault in FAULTS.items() if name not in NOT_OF_TESTS and name in (names or FAULTS)}
    cases = {}
    for number, (name, fault) in enumerate(chosen.items()):
        script = f"fault_{number}.py"
        (directory / script).write_text(fault.script)
        limit_s = fault.time_limit_s if fault.basis == "bounded" else LIMIT_S
        cases[name] = {"script": script, "ranks": fault.ranks, "timeout": limit_s}
    (directory / "cases.json").write_text(json.dumps(cases))
    session = _run(directory, "fault_bodies.py")
    scripts: Mapping[str, str] = {name: str(case["script"]) for name, case in cases.items()}
    judged = [_judged(name, fault, directory / scripts[name], session) for name, fault in chosen.items()]
    return judged, processes_of(f"OF_TABLE={directory}")


def run_healthy(directory: Path, *options: str) -> tuple[Session, list[str]]:
    """Run the healthy bodies; how the session ended, and the processes that were left."""
    session = _run(directory, "healthy_bodies.py", *options)
    return session, processes_of(f"OF_TABLE={directory}")


def _run(directory: Path, bodies: str, *options: str) -> Session:
    shutil.copy(Path(__file__).with_name(bodies), directory / f"test_{bodies}")
    root = str(Path(__file__).parents[2])
    environment = {"OF_TABLE": str(directory), "PYTHONPATH": os.pathsep.join((root, os.environ.get("PYTHONPATH", "")))}
    return run_pytest(directory, *options, environment=environment, seconds=3_000)


def _judged(name: str, fault: Fault, script: Path, session: Session) -> Judged:
    test = f"test_body[{name}]"
    text = session.messages.get(test, "")
    return Judged(
        name=name,
        wrong=_wrong(name, fault, script, session.outcomes.get(test, "not run"), text),
        first_line=text.partition("\n")[0],
        seconds=session.seconds.get(test, 0.0),
    )


def _wrong(name: str, fault: Fault, script: Path, outcome: str, text: str) -> str:
    if outcome != "failed":
        return f"the test {outcome}"
    if not fault.code:
        return "" if "had not finished after" in text else "no word of the time limit"
    if f"({fault.code}" not in text and f"({ALSO.get(name)}" not in text:
        return f"no {fault.code}"
    if fault.says and fault.says.replace("train.py", script.name) not in " ".join(text.split()):
        return f"does not say: {fault.says}"
    words = (f"rank {fault.culprit} is named because", f"rank {fault.culprit} failed: ", f", rank {fault.culprit}\n")
    named = any(word in text for word in words)
    if fault.culprit is not None and not fault.either and not named:
        return f"rank {fault.culprit} is not named"
    lines = fault.script.splitlines()
    marked = [number for number, line in enumerate(lines, 1) if line.rstrip().endswith("# here")]
    missing = [number for number in marked if f"{script.name}:{number}" not in text]
    if name in SHOWN_BY_THE_SOURCE:
        return ""
    return f"line {missing[0]} is not shown" if missing else ""
