"""The runs that the nodes of one job recorded, each on its own disk, put together afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from ddpdoctor.diagnosis.clocks import bounds_of_steps
from ddpdoctor.diagnosis.wording import rank_list
from ddpdoctor.errors import UsageError
from ddpdoctor.files.untrusted import read_untrusted
from ddpdoctor.launch.runs.kept_runs import live_processes
from ddpdoctor.monitor.snapshot import Snapshot
from ddpdoctor.profile.recorded_run import recorded
from ddpdoctor.profile.watch import RunSource
from ddpdoctor.record import layout
from ddpdoctor.record.joining import Clock, NodePart
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.reader import read_plan

_NUMBERS_OF_JOBS = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID")
_NO_NUMBER = ("", "none")


def recorded_together(directories: Sequence[Path]) -> tuple[Snapshot, RunRecord]:
    """Return what there is to say of all ranks, and their record; the run with the lowest rank is the first.

    Raises UsageError for runs that are no nodes of one job, or that continue, and RecordError for what cannot be read.
    """
    found = []
    for directory in directories:
        if live_processes(directory):
            raise UsageError(f"the run in {directory} is still going on", "Wait until it ends.")
        snapshot, record = recorded(directory)
        if not record.ranks:
            raise UsageError(f"{directory} holds no rank", "Omit it.")
        found.append((directory, snapshot, record))
    found.sort(key=lambda entry: entry[2].rank_numbers())
    first, _, first_record = found[0]
    for directory, _, record in found[1:]:
        _refuse_others(first, first_record, directory, record)
    for (one, _, record), (other, _, next_record) in pairwise(found):
        if twice := set(record.rank_numbers()) & set(next_record.rank_numbers()):
            raise UsageError(
                f"{one} and {other} both have {rank_list(twice)}", "Give runs of different nodes of one job."
            )
    codes = [snapshot.exit_code for _, snapshot, _ in found if snapshot.exit_code]
    parts = [
        NodePart(name=str(directory), record=record, clock=_clock(directory, first_record, record))
        for directory, _, record in found[1:]
    ]
    source = RunSource(
        first,
        read_plan(first),
        None,
        is_over=True,
        keeps_history=False,
        others=parts,
        exit_code=codes[0] if codes else found[0][1].exit_code,
    )
    try:
        shown = found[0][1]
        if len(shown.ranks) == first_record.job.world_size:
            # Its monitor saw all of them while the job ran, and what a standstill was is not to be seen any more.
            return shown, source.record()
        return source.final_snapshot(), source.record()
    finally:
        source.close()


def _refuse_others(first: Path, record: RunRecord, other: Path, other_record: RunRecord) -> None:
    sizes = (record.job.world_size, other_record.job.world_size)
    began, other_began = (
        min((wait.started_ns for wait in one.waits), default=one.job.started_ns) for one in (record, other_record)
    )
    ended, other_ended = record.job.ended_ns, other_record.job.ended_ns
    if sizes[0] != sizes[1]:
        raise UsageError(
            f"{first} belongs to a job of {sizes[0]} ranks, {other} to one of {sizes[1]}",
            "Give runs of different nodes of one job.",
        )
    met, other_met = _meeting_place(record), _meeting_place(other_record)
    if _are_of_two_jobs(record, other_record):
        raise UsageError(
            f"{first} and {other} belong to two jobs: one has its rendezvous at {met}, the other at {other_met}",
            "Give runs of different nodes of one job.",
        )
    if (began > other_ended or other_began > ended) and not (other / layout.CLOCK_FILE).exists():
        raise UsageError(
            f"{first} and {other} were recorded at different times", "Give runs of different nodes of one job."
        )


def _meeting_place(record: RunRecord) -> str:
    return f"{_variable(record, 'MASTER_ADDR')}:{_variable(record, 'MASTER_PORT')}"


def _are_of_two_jobs(record: RunRecord, other: RunRecord) -> bool:
    """Return whether the launchers say so, or, where they gave the job no number, the places where the ranks met.

    A machine may be called by several names and numbers, so that only two plain names tell two machines apart.
    """
    for name in _NUMBERS_OF_JOBS:
        one, another = _variable(record, name), _variable(other, name)
        if one not in _NO_NUMBER and another not in _NO_NUMBER:
            return one != another
    ports = _variable(record, "MASTER_PORT"), _variable(other, "MASTER_PORT")
    names = _host_name(_variable(record, "MASTER_ADDR")), _host_name(_variable(other, "MASTER_ADDR"))
    return (all(ports) and ports[0] != ports[1]) or (all(names) and names[0] != names[1])


def _variable(record: RunRecord, name: str) -> str:
    """Return a variable of a record's ranks; empty where it is not known."""
    return next((node.environment[name] for node in record.nodes if node.environment.get(name)), "")


def _host_name(address: str) -> str:
    """Return the first part of a machine's name; empty for a number, and for what every machine calls itself."""
    label = address.lower().partition(".")[0]
    return "" if label.isdigit() or ":" in address or label.endswith("localhost") else label


def _clock(directory: Path, first: RunRecord, record: RunRecord) -> Clock:
    """Return how a node's clock differed, as its monitor noted; or about, by the steps that all nodes made."""
    try:
        return msgspec.json.decode(read_untrusted(directory / layout.CLOCK_FILE, 1 << 16, directory), type=Clock)
    except (OSError, ValueError, RecursionError):
        bounds = list(bounds_of_steps(first, record))
    if not bounds:
        return Clock()
    low_ns, high_ns = max(bound.low_ns for bound in bounds), min(bound.high_ns for bound in bounds)
    return Clock(offset_ns=(low_ns + high_ns) // 2)
