"""Runs a job, watched or rehearsed, and tells what is wrong with what is said of its values that are not finite."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec

from ddpdoctor.checks.gradients import nonfinite_training
from ddpdoctor.diagnosis.training.nonfinite import Origin, origin
from ddpdoctor.finding import Finding
from ddpdoctor.launch.environment import observed
from ddpdoctor.record.assembly.assemble import Assembly
from ddpdoctor.record.model import Job, RunRecord
from tests.nan.cases import RANKS, Injection

MOST_S = 200
_CAUSES = {"forward": ("forward",), "backward": ("backward",), "data": ("data",), "optimizer": ("optimizer",)}


class Said(msgspec.Struct, frozen=True):
    """What was said of one job."""

    origin: Origin | None
    text: str
    """Title and evidence; empty where nothing was said."""
    faults: tuple[str, ...] = ()
    output: str = ""


def watched(script: str, folder: Path) -> Said:
    """Run a script on three ranks under observation."""
    (folder / "train.py").write_text(script)
    run = folder / "run"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", "train.py"]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment | observed(run, environment),
        capture_output=True,
        text=True,
        timeout=MOST_S,
    )
    assembly = Assembly(run)
    assembly.poll()
    assembly.poll()
    record = assembly.record(Job(kind="run", world_size=RANKS))
    return _said(record, (*assembly.faults, *(() if done.returncode == 0 else ("the job failed",))), done.stderr)


def _said(record: RunRecord, faults: tuple[str, ...], output: str) -> Said:
    found = [one for one in nonfinite_training.in_run(record) if isinstance(one, Finding)]
    text = " ".join(part for one in found for part in (one.title, *(fact.text for fact in one.evidence)))
    return Said(origin(record), text, faults, output)


def complaints(expected: Injection | None, said: Said) -> list[str]:
    """What is wrong with what was said, in sentences; empty when all is well."""
    wrong = list(said.faults)
    found = said.origin
    if expected is None:
        return wrong + ([f"false alarm: {said.text}"] if said.text else [])
    if found is None:
        return [*wrong, "nothing is said"]
    if found.cause not in _CAUSES[expected.kind]:
        wrong.append(f"the cause is said to be {found.cause}")
    if found.ranks != (expected.rank,):
        wrong.append(f"ranks {found.ranks} are named")
    if found.first.step != expected.step:
        wrong.append(f"step {found.first.step} is named")
    wrong += [f"{word!r} is not said" for word in expected.words if word not in said.text]
    return [f"{each}: {said.text}" for each in wrong]
