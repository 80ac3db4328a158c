"""Whether the ranks met where their launcher told them to."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from ddpdoctor.diagnosis.failures import failed_initialisations, named_failures
from ddpdoctor.diagnosis.wording import site_location
from ddpdoctor.finding import Location
from ddpdoctor.findings.locations import named_ranks
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.collectives import Wait
from ddpdoctor.record.streams.setup import Setting

_TOLD_BY_LAUNCHER = frozenset({"MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"})
_IN_USE = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)
_HERE = frozenset({"localhost", "127.0.0.1", "::1"})
_PORT = re.compile(r"port: ?(\d+)|:(\d{2,5})\b")


class Misled(msgspec.Struct, frozen=True, kw_only=True):
    """A place of meeting that is not the launcher's, or that was taken."""

    sentence: str
    location: Location | None
    ranks: tuple[int, ...]
    followed: str
    """What came of it, as a sentence without a full stop."""
    remedy: str


def misled_ranks(record: RunRecord) -> Iterator[Misled]:
    """Yield what leads the ranks away from their launcher's place of meeting, and ports that were in use."""
    settings: dict[tuple[str, int], list[Setting]] = {}
    for setting in record.settings:
        told = setting.name in _TOLD_BY_LAUNCHER and setting.launched and not setting.joined
        if told and setting.previous and not _same(setting.previous, setting.value):
            settings.setdefault((setting.name, setting.site), []).append(setting)
    followed = _what_followed(record)
    for (name, site), found in settings.items():
        first = found[0]
        yield Misled(
            sentence=f"{name} is set to {first.value!r} over the launcher's {first.previous!r}",
            location=site_location(record.site(site)),
            ranks=_ranks(found),
            followed=followed,
            remedy=f'Remove the line, or write os.environ.setdefault("{name}", ...), which keeps what is there.',
        )
    elsewhere: dict[tuple[str, int], list[Wait]] = {}
    for wait in record.waits:
        if wait.meets_elsewhere:
            elsewhere.setdefault((wait.meets_elsewhere, wait.site), []).append(wait)
    for (method, site), waits in elsewhere.items():
        yield Misled(
            sentence=f"the launcher's ranks have their rendezvous at {method}, an address of the script",
            location=site_location(record.site(site)),
            ranks=_ranks(waits),
            followed=followed,
            remedy="Omit init_method: the launcher's MASTER_ADDR and MASTER_PORT are then used.",
        )
    yield from _taken(record)
    yield from _too_many(record)
    yield from _ports_in_use(record)


def _same(one: str, other: str) -> bool:
    """Return whether two values lead to one place: this machine has several names for itself."""
    return one == other or {one, other} <= _HERE


def _taken(record: RunRecord) -> Iterator[Misled]:
    """Numbers under which several ranks of a launcher join."""
    places: dict[int, list[Wait]] = {}
    for wait in record.waits:
        if wait.rank_taken >= 0:
            places.setdefault(wait.site, []).append(wait)
    for site, waits in places.items():
        numbers = sorted({wait.rank_taken for wait in waits})
        taken = f"each of {named_ranks(numbers)}" if len(numbers) > 1 else named_ranks(numbers)
        yield Misled(
            sentence=f"several ranks join the group as {taken}, whatever rank the launcher gave them",
            location=site_location(record.site(site)),
            ranks=_ranks(waits),
            followed="no other rank joins as the remaining ones: init_process_group waits until its timeout",
            remedy='Omit rank and world_size, or take them from the environment: int(os.environ["RANK"]).',
        )


def _too_many(record: RunRecord) -> Iterator[Misled]:
    """Groups for more ranks than a launcher starts, in the job as in its rehearsal."""
    started = record.job.ranks_of_job or record.job.ranks_expected
    places: dict[tuple[int, int], list[Wait]] = {}
    for wait in record.waits:
        # Without a launcher the script knows its other nodes, and their ranks are started there.
        if wait.ranks_asked > started and _is_launched(record):
            places.setdefault((wait.ranks_asked, wait.site), []).append(wait)
    for (asked, site), waits in places.items():
        missing = f"rank {started}" if asked == started + 1 else f"ranks {started} to {asked - 1}"
        yield Misled(
            sentence=(
                f"the group is created for {asked} ranks and the launcher starts {started}: {missing} never arrive"
            ),
            location=site_location(record.site(site)),
            ranks=_ranks(waits),
            followed="init_process_group would wait for them until its timeout; here it was created for those present",
            remedy="Omit world_size, or take it from the launcher's environment.",
        )


def _is_launched(record: RunRecord) -> bool:
    return any(part.startswith("--nproc-per-node") for part in record.job.command)


def _what_followed(record: RunRecord) -> str:
    waits = [wait for wait in record.waits if wait.kind == "init_process_group"]
    if any(wait.led_from for wait in waits):
        return (
            "no rank of a launcher opens a store itself: init_process_group would wait there until its timeout; "
            "the rehearsal redirected the ranks to the launcher's store"
        )
    if any(wait.error for wait in waits):
        return "init_process_group failed"
    if waits and not any(wait.ended_ns for wait in waits):
        return "init_process_group never returned: nothing listens there"
    return "init_process_group returned here; with another launcher, or on another machine, nothing listens there"


def _ports_in_use(record: RunRecord) -> Iterator[Misled]:
    places: dict[Location | None, tuple[str, tuple[int, ...]]] = {}
    for wait, place in failed_initialisations(record):
        if _IN_USE.search(wait.error):
            places.setdefault(place, (wait.error, _ranks([wait])))
    for failure in named_failures(record, "port-in-use"):
        places.setdefault(failure.location, (failure.message, failure.ranks))
    for place, (message, ranks) in places.items():
        found = _PORT.search(message)
        port = f"port {found[1] or found[2]}" if found else "the rendezvous port"
        yield Misled(
            sentence=f"{port} is in use: the rendezvous fails",
            location=place,
            ranks=ranks,
            followed=f"the initialisation failed: {message[:160]}",
            remedy=(
                "Take a free port for each job: leave the choice to torchrun, or bind to port 0 and pass on the "
                "port that the system assigns."
            ),
        )


def _ranks(found: list[Setting] | list[Wait]) -> tuple[int, ...]:
    return tuple(sorted({entry.rank for entry in found if entry.rank >= 0}))
