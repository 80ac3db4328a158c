"""Hand-built findings, records and check results for the tests of this directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ddpdoctor.catalogue.run_checks import CheckResult
from ddpdoctor.examination import Examination, RehearsalSection, SourceSection
from ddpdoctor.examine.one_script import ExamineRequest, conclude
from ddpdoctor.finding import Basis, Fact, Finding, Frame, Location, Severity
from ddpdoctor.record.model import Job, Rank, RunRecord, Wrap
from ddpdoctor.record.streams.training import OptimizerStep
from tests.index_of_checks import STANDS_FOR

SAMPLE = Path(__file__).parent / "sample"
TRAIN = str(SAMPLE / "train.py")
SOURCE = SourceSection(status="read", files=1, seconds=0.012)
COMPLETED = RehearsalSection(status="completed", ranks=2, steps=8, seconds=3.14, device="cpu")
SKIPPED = RehearsalSection(status="skipped", reason="only the source was requested (`--static`)")


def at(line: int, end_line: int = 0, *, column: int = 1, function: str = "", file: str = TRAIN) -> Location:
    """A place in the sample script."""
    return Location(file=file, line=line, column=column, end_line=end_line, function=function)


def finding(
    code: str = "DDP101",
    name: str = "missing-distributed-sampler",
    severity: Severity = Severity.WARNING,
    *locations: Location,
    basis: Basis = "source",
    **fields: Any,
) -> Finding:
    """A finding with a title and a remedy."""
    values: dict[str, Any] = {"title": f"{name} from the {basis}", "remedy": "Do something about it."} | fields
    values.setdefault("trouble", STANDS_FOR.get(code))
    return Finding(code=code, name=name, severity=severity, locations=locations, basis=frozenset({basis}), **values)


def result(found: Finding, **fields: Any) -> CheckResult:
    """What a check says that has one finding."""
    where: dict[str, Any] = {"from_source" if "source" in found.basis else "from_run": (found,)}
    return CheckResult(code=found.code, name=found.name, **where, **fields)


def examination(
    *results: CheckResult,
    static: bool = False,
    fail_on: Severity = Severity.WARNING,
    rehearsal: RehearsalSection | None = None,
    source: SourceSection = SOURCE,
    notes: tuple[str, ...] = (),
) -> Examination:
    """The examination of the sample script to which the checks said ``results``."""
    request = ExamineRequest(target="train.py", static=static, fail_on=fail_on)
    section = rehearsal or (SKIPPED if static else COMPLETED)
    return conclude(request, str(SAMPLE), source, section, results, notes)


def record(*ranks: Rank, steps: int = 2, wraps: bool = True, expected: int = 2, **job: Any) -> RunRecord:
    """The record of a rehearsal; two ranks that finished when none are given."""
    of_job: dict[str, Any] = {
        "kind": "rehearsal",
        "ranks_expected": expected,
        "world_size": 2,
        "ranks_reported": tuple(rank.rank for rank in ranks) or (0, 1),
        "device": "cpu",
        "started_ns": 10**18,
        "ended_ns": 10**18 + 2_500_000_000,
    } | job
    entries = ranks or (Rank(rank=0, end="finished", exit_code=0), Rank(rank=1, end="finished", exit_code=0))
    return RunRecord(
        job=Job(**of_job),
        ranks=entries,
        wraps=tuple(Wrap(rank=rank.rank, wrap=0) for rank in entries) if wraps else (),
        optimizer_steps=tuple(OptimizerStep(rank=rank.rank, optimizer=0) for rank in entries for _ in range(steps)),
    )


def hang() -> Finding:
    """A divergence with the stacks of two ranks."""
    evaluate = Frame(file=TRAIN, line=9, function="evaluate")
    caller = Frame(file=TRAIN, line=22, function="main")
    backward = Frame(file=TRAIN, line=20, function="main")
    torch = Frame(file="/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line=3000)
    return finding(
        "DDP301",
        "rank-divergent-collective",
        Severity.ERROR,
        at(9, function="evaluate"),
        basis="rehearsal",
        title="rank 0 waits in all_reduce at train.py:9 that rank 1 never calls; rank 1 is in all_reduce (DDP backward)"
        " at train.py:20",
        ranks=(0,),
        evidence=(
            Fact(
                text="waits in all_reduce number 12 for 1.0 s",
                basis="rehearsal",
                rank=0,
                location=at(9),
                numbers={"sequence": 12, "waited_s": 1.0},
                stack=(torch, evaluate, caller),
            ),
            Fact(
                text="is in all_reduce number 12, started by backward",
                basis="rehearsal",
                rank=1,
                location=at(20),
                stack=(torch, backward),
            ),
            Fact(text="the ranks agreed on 11 collectives before", basis="rehearsal", numbers={"agreed": 11}),
        ),
        remedy="Call evaluate on every rank, or reduce nothing in it.",
    )


def unsharded() -> Finding:
    """A suspicion from the source whose place spans lines."""
    return finding(
        "DDP101",
        "missing-distributed-sampler",
        Severity.WARNING,
        Location(file=TRAIN, line=14, column=14, end_line=17, end_column=6, function="main"),
        title="this DataLoader feeds a DDP model and has no sampler that shards by rank",
        evidence=(Fact(text="the loader is used in a loop with a backward", basis="source", location=at(19)),),
        remedy="Give it a DistributedSampler and call set_epoch on it in every epoch.",
    )


def unsharded_seen() -> Finding:
    """The same, seen in a rehearsal."""
    return finding(
        "DDP101",
        "missing-distributed-sampler",
        Severity.ERROR,
        at(15, function="main"),
        basis="rehearsal",
        title="ranks 0 and 1 each draw 512 of 512 samples",
        ranks=(0, 1),
        evidence=(Fact(text="the index lists of a whole pass are equal", basis="rehearsal"),),
        remedy="Give the loader a DistributedSampler.",
    )


def dataparallel(line: int = 20) -> Finding:
    """A piece of advice."""
    return finding(
        "DDP209",
        "dataparallel",
        Severity.ADVICE,
        at(line, function="main"),
        title="DataParallel is slower than DistributedDataParallel",
        remedy="Use DistributedDataParallel.",
    )
