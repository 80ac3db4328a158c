"""What the checks of the family of path races say: the races of each line, and the lines that are proved innocent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePath

import msgspec

from ddpdoctor.diagnosis.files.path_races import OWN, Race, races
from ddpdoctor.diagnosis.wording import count, place, rank_list, site_location
from ddpdoctor.finding import Location, Severity, Trouble
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.data import Access

_SHOWN = 3
_DONE = {"write": "wrote", "read": "read", "check": "asked for", "make": "made", "remove": "removed", "move": "moved"}
_DOES = {"make": "make", "remove": "delete", "move": "rename"}


class PathVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the accesses that come from one line."""

    races: bool
    """False: every rank's access is ordered after the other's act, or no two ranks reach one path."""
    sentence: str
    locations: tuple[Location, ...]
    ranks: tuple[int, ...] = ()
    facts: tuple[tuple[int, str, Location | None], ...] = ()
    """Rank, sentence and line."""
    severity: Severity | None = None
    """None: as bad as the check says."""


def judge_paths(record: RunRecord, trouble: Trouble | None) -> Iterator[PathVerdict]:
    """Yield the races for which a check speaks, once for each pair of lines, then the lines without one."""
    groups: dict[tuple[int, int], list[Race]] = {}
    for race in races(record):
        if race.trouble == trouble:
            groups.setdefault((race.first.site, race.second.site), []).append(race)
    racing: set[Location] = set()
    for found in groups.values():
        verdict = _verdict(record, trouble, found)
        racing |= set(verdict.locations)
        yield verdict
    for location, reason in _innocent(record, trouble):
        if location not in racing:
            yield PathVerdict(races=False, sentence=reason, locations=(location,))


def _verdict(record: RunRecord, trouble: Trouble | None, found: Sequence[Race]) -> PathVerdict:
    race = found[0]
    first, second = race.first, race.second
    name = PurePath(race.path).name + (f" and {len(found) - 1:,} more paths" if len(found) > 1 else "")
    ranks = tuple(sorted({rank for entry in found for rank in entry.ranks}))
    lines = (second, first) if trouble == "early-read" else (first, second)
    places = (site_location(record.site(access.site)) for access in lines)
    died = f", and rank {second.rank} dies of {race.died.type}" if race.died is not None else ""
    return PathVerdict(
        races=True,
        sentence=_sentence(trouble, first, second, ranks, name) + died,
        locations=tuple(dict.fromkeys(place for place in places if place is not None)),
        ranks=ranks,
        facts=tuple(_fact(record, access, race.path) for access in _by_time(first, second)),
        severity=Severity.ERROR if race.died is not None else None,
    )


def _sentence(trouble: Trouble | None, first: Access, second: Access, ranks: tuple[int, ...], name: str) -> str:
    if trouble == "download-race":
        how = f"prepare {name}" if first.through in OWN else f"fetch {name} (through {first.through})"
        return f"{rank_list(ranks)} {how} at the same time, with no barrier that lets one rank go first"
    if trouble == "early-read":
        return f"rank {second.rank} reads {name}, which rank {first.rank} writes, with no barrier between the two"
    if second.action == "check":
        return f"rank {second.rank} waits until {name} exists and reads it, while rank {first.rank} writes it in place"
    if first.action == second.action:
        return f"{rank_list(ranks)} {_DOES[first.action]} {name} at the same time"
    return (
        f"rank {second.rank} deletes {name}, which rank {first.rank} has just created, with no barrier between the two"
    )


def _fact(record: RunRecord, access: Access, path: str) -> tuple[int, str, Location | None]:
    site = record.site(access.site)
    there = "" if access.action in ("write", "check") else " (it was there)" if access.found else " (it was not there)"
    text = f"rank {access.rank} {_DONE[access.action]} {path} at {place(site.innermost)}{there}"
    return access.rank, text, site_location(site)


def _by_time(*accesses: Access) -> list[Access]:
    return sorted(accesses, key=lambda access: access.time_ns)


def _innocent(record: RunRecord, trouble: Trouble | None) -> Iterator[tuple[Location, str]]:
    """Lines at which two ranks certainly do not race, in a run in which every rank reached its end."""
    if record.job.stop_reason or not all(rank.end in ("finished", "ended-by-rehearsal") for rank in record.ranks):
        return
    by_path: dict[str, list[Access]] = {}
    for access in record.accesses:
        by_path.setdefault(access.path, []).append(access)
    racing = {race.path for race in races(record)}
    lines: dict[int, list[str]] = {}
    for path, accesses in by_path.items():
        writers = {access.rank for access in accesses if access.action == "write"}
        writers |= {event.rank for event in record.files if event.path == path and event.action == "save"}
        for access in accesses:
            met = access.action == "read" and len(writers) == 1 and access.rank not in writers
            alone = access.action in _DOES and len({other.rank for other in accesses}) == 1
            if (trouble == "early-read" and met) or (trouble == "path-race" and alone):
                lines.setdefault(access.site, []).append(path)
            alone_writes = access.action == "write" and len(writers) == 1
            if trouble == "download-race" and alone_writes and _read_by_others(accesses):
                lines.setdefault(access.site, []).append(path)
    for site, paths in lines.items():
        location = site_location(record.site(site))
        if location is not None and not racing & set(paths):
            shown = ", ".join(PurePath(path).name for path in sorted(set(paths))[:_SHOWN])
            reason = f"collectives order the accesses of the ranks to {count(len(set(paths)), 'path')} ({shown})"
            if trouble == "path-race":
                reason = f"no path is touched by more than one rank here ({shown})"
            yield location, reason


def _read_by_others(accesses: Sequence[Access]) -> bool:
    writers = {access.rank for access in accesses if access.action == "write"}
    return any(access.action == "read" and access.rank not in writers for access in accesses)
