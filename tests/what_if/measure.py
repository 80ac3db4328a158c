"""Runs jobs and changed jobs on real ranks, and puts what was predicted from the ones beside what the others did."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean

import msgspec

from ddpdoctor.diagnosis.steps import between
from ddpdoctor.launch.environment import observed
from ddpdoctor.probe.free_port import free_port
from ddpdoctor.record.model import RunRecord
from ddpdoctor.what_if.observed import FEWEST_STEPS, observe
from ddpdoctor.what_if.scenario import Model
from ddpdoctor.what_if.settings import parse
from tests.jobs_of_tests import kill_marked, marked
from tests.truth.measure import record_in
from tests.what_if.training import WARM_UP

MOST_CHAPTERS = 64
"""A record tells of so many wraps of a rank, and each chapter has one."""
SCRIPT = Path(__file__).with_name("training.py")


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """A chapter as it was run on real ranks."""

    spec: str
    step_ms: float
    record: RunRecord
    """Its own steps, wrap and loader."""


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """A run, a change, and the changed run."""

    job: str
    ranks: int
    change: str
    base_ms: float
    predicted_ms: float
    low_ms: float
    high_ms: float
    true_ms: float
    predicted_speedup: float
    true_speedup: float

    @property
    def error(self) -> float:
        """Of the predicted step time, as a share of the true one."""
        return self.predicted_ms / self.true_ms - 1.0

    @property
    def covered(self) -> bool:
        """The truth lies in the interval."""
        return self.low_ms <= self.true_ms <= self.high_ms


def run_chapters(directory: Path, ranks: int, steps: int, specs: Sequence[str], rounds: int = 2) -> dict[str, Done]:
    """Train chapters in one observed job, ahead of them one for the warm-up of the process.

    All are trained ``rounds`` times; of each the round counts in which the machine disturbed it least.
    """
    found: dict[str, Done] = {}
    for done in run_rounds(directory, ranks, steps, specs, rounds):
        if done.spec not in found or done.step_ms < found[done.spec].step_ms:
            found[done.spec] = done
    return found


def run_rounds(directory: Path, ranks: int, steps: int, specs: Sequence[str], rounds: int) -> list[Done]:
    """Train chapters in one observed job, one after the other and all of them so often, ahead of them one for the
    warm-up; in the order in which they were trained.
    """
    assert 1 + rounds * len(specs) <= MOST_CHAPTERS
    assert steps - WARM_UP >= FEWEST_STEPS
    run, output = directory / f"run-{ranks}", directory / f"told-{ranks}"
    run.mkdir(mode=0o700)
    trained = (specs[0], *(list(specs) * rounds))
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    command += [f"--master-port={free_port()}", str(SCRIPT), str(output), str(steps), *trained]
    environment = {**marked(os.environ, directory), **observed(run, os.environ), "OMP_NUM_THREADS": "1"}
    try:
        told = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=3_000)
    finally:
        kill_marked(directory)
    if not all(Path(f"{output}.{rank}").exists() for rank in range(ranks)):
        raise RuntimeError(f"the chapters were not trained to their end:\n{told.stderr[-4_000:]}")
    true = [json.loads(Path(f"{output}.{rank}").read_text(encoding="utf-8")) for rank in range(ranks)]
    record = record_in(run)
    return [
        Done(
            spec=spec,
            step_ms=1e3 * fmean(own[at]["step_s"] for own in true),
            record=of_chapter(record, at, 1 + at * steps + WARM_UP, 1 + (at + 1) * steps),
        )
        for at, spec in enumerate(trained)
        if at
    ]


def of_chapter(record: RunRecord, number: int, first: int, stop: int) -> RunRecord:
    """What a record holds of one chapter, as if nothing else had been run."""
    return msgspec.structs.replace(
        between(record, first, stop),
        wraps=tuple(wrap for wrap in record.wraps if wrap.wrap == number),
        bucket_layouts=tuple(layout for layout in record.bucket_layouts if layout.wrap == number),
        loaders=tuple(loader for loader in record.loaders if loader.loader == number),
        passes=tuple(entry for entry in record.passes if entry.loader == number),
    )


def pairs_of(base: Done, ranks: int, changed: Iterable[tuple[str, Done]]) -> list[Pair]:
    """Predict each change from the base, and put the changed run beside it."""
    model = Model(observe(base.record))
    found = []
    for change, done in changed:
        outcome = model.outcome(parse(change.split(",")))
        work = outcome.speedup.value * outcome.step_ns.value / model.observed.step_ns
        found.append(
            Pair(
                job=base.spec,
                ranks=ranks,
                change=change,
                base_ms=base.step_ms,
                predicted_ms=outcome.step_ns.value / 1e6,
                low_ms=outcome.step_ns.low / 1e6,
                high_ms=outcome.step_ns.high / 1e6,
                true_ms=done.step_ms,
                predicted_speedup=outcome.speedup.value,
                true_speedup=work * base.step_ms / done.step_ms,
            )
        )
    return found
