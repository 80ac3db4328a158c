"""The runs that the nodes of one job recorded, each on its own disk, put together afterwards."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from ddpdoctor.diagnosis.clocks import bounds_of_steps
from ddpdoctor.diagnosis.wording import rank_list
from ddpdoctor.errors import UsageError
from ddpdoctor.launch.runs.kept_runs import live_processes
from ddpdoctor.monitor.snapshot import Snapshot
from ddpdoctor.profile.watch import RunSource, recorded
from ddpdoctor.record import layout
from ddpdoctor.record.joining import Clock, NodePart
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.plan import read_plan


def recorded_together(directories: Sequence[Path]) -> tuple[Snapshot, RunRecord]:
    """Return what there is to say of all ranks, and their record; the run with the lowest rank is the first.

    Raises UsageError for runs that are no nodes of one job, or that go on, and RecordError for what cannot be read.
    """
    found = []
    for directory in directories:
        if live_processes(directory):
            raise UsageError(f"the run in {directory} goes on", "Wait for its end.")
        snapshot, record = recorded(directory)
        if not record.ranks:
            raise UsageError(f"{directory} holds no rank of a job", "Leave it out.")
        found.append((directory, snapshot, record))
    found.sort(key=lambda entry: entry[2].rank_numbers())
    first, _, first_record = found[0]
    for directory, _, record in found[1:]:
        _refuse_others(first, first_record, directory, record)
    for (one, _, record), (other, _, next_record) in pairwise(found):
        if twice := set(record.rank_numbers()) & set(next_record.rank_numbers()):
            raise UsageError(
                f"{one} and {other} both have {rank_list(twice)}", "Name runs of different nodes of one job."
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
            f"{first} is of a job of {sizes[0]} ranks, and {other} of one of {sizes[1]}",
            "Name runs of different nodes of one job.",
        )
    met, other_met = _meeting_place(record), _meeting_place(other_record)
    if met and other_met and _differ(met, other_met):
        raise UsageError(
            f"{first} and {other} are of two jobs: the ranks of one met at {':'.join(met)}, those of the other at "
            f"{':'.join(other_met)}",
            "Name runs of different nodes of one job.",
        )
    if (began > other_ended or other_began > ended) and not (other / layout.CLOCK_FILE).exists():
        raise UsageError(
            f"{first} and {other} were recorded at different times", "Name runs of different nodes of one job."
        )


def _meeting_place(record: RunRecord) -> tuple[str, str] | None:
    """MASTER_ADDR and MASTER_PORT of a record's ranks; None where they are not known."""
    for node in record.nodes:
        address, port = node.environment.get("MASTER_ADDR", ""), node.environment.get("MASTER_PORT", "")
        if address and port:
            return address, port
    return None


def _differ(place: tuple[str, str], other: tuple[str, str]) -> bool:
    """Tell whether ranks cannot have met at both; a machine may be called by its name here, and by a number there."""
    kinds = [_address_kind(address) for address, _ in (place, other)]
    return place[1] != other[1] or (place[0] != other[0] and kinds[0] == kinds[1] != "own")


def _address_kind(address: str) -> str:
    try:
        number = ipaddress.ip_address(address)
    except ValueError:
        return "own" if address == "localhost" else "name"
    return "own" if number.is_loopback else f"number {number.version}"


def _clock(directory: Path, first: RunRecord, record: RunRecord) -> Clock:
    """How a node's clock differed, as its monitor noted; or about, by the steps that all nodes made."""
    try:
        return msgspec.json.decode((directory / layout.CLOCK_FILE).read_bytes(), type=Clock)
    except (OSError, msgspec.DecodeError):
        bounds = list(bounds_of_steps(first, record))
    if not bounds:
        return Clock()
    low_ns, high_ns = max(bound.low_ns for bound in bounds), min(bound.high_ns for bound in bounds)
    return Clock(offset_ns=(low_ns + high_ns) // 2)
