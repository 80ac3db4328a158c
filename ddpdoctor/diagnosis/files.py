"""Paths at which the ranks come into each other's way: one race, and one code, for each path."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import PurePath
from typing import Literal

import msgspec

from ddpdoctor.check import Reason, Verdict, Via
from ddpdoctor.diagnosis.divergence.divergence import root_exception
from ddpdoctor.diagnosis.failures import named_failures
from ddpdoctor.diagnosis.steps import once_per_record
from ddpdoctor.diagnosis.wording import count, location_of, place, rank_list, site_location
from ddpdoctor.files import regex
from ddpdoctor.finding import Location, Severity, Trouble, grouped
from ddpdoctor.record.model import RankException, RunRecord, shared_fields
from ddpdoctor.record.streams.collectives import CollectiveTrack, Wait
from ddpdoctor.record.streams.setup import StateNames
from ddpdoctor.record.streams.training import Access, FileEvent

# How the ranks load checkpoints: onto which GPU, and into names that fit.


def judge_map_locations(record: RunRecord) -> Iterator[Verdict]:
    """Yield the lines at which several ranks load one checkpoint onto the GPU from which it was saved.

    Refuted where every load was given a place, or where the checkpoint that was there before the job holds CPU tensors
    only: what the ranks of a rehearsal save themselves says nothing of a job on GPUs.
    """
    own = {event.path for event in record.files if event.action in ("save", "create", "write", "rename")}
    said: set[Location] = set()
    for site, loads in grouped(record.checkpoint_loads, lambda load: load.site).items():
        location = site_location(record.site(site))
        if location is None:
            continue
        if all(load.mapped for load in loads):
            yield Verdict(wrong=False, sentence="every load here has map_location", locations=location)
            continue
        for path in dict.fromkeys(load.path for load in loads):
            found = [load for load in loads if load.path == path and not load.mapped]
            ranks = tuple(sorted({load.rank for load in found}))
            places = {place for load in found for place in load.saved_on}
            if len(ranks) > 1 and len(places) == 1 and next(iter(places)).startswith("cuda"):
                said.add(location)
                yield Verdict(
                    sentence=f"{rank_list(ranks)} load {PurePath(path).name} onto the GPU from which it was saved",
                    locations=location,
                    ranks=ranks,
                    because=(f"its tensors were saved from {places.pop()}, and map_location is not given", location),
                )
            elif places == {"cpu"} and path not in own and len({load.path for load in loads}) == 1:
                reason = f"{PurePath(path).name} holds CPU tensors only"
                yield Verdict(wrong=False, sentence=reason, locations=location)
    for failure in named_failures(record, "missing-device"):
        if failure.location is not None and failure.location not in said:
            yield Verdict(
                sentence=f"{rank_list(failure.ranks)} load a checkpoint onto the GPU from which it was saved",
                locations=failure.location,
                ranks=failure.ranks,
                because=((failure.message, failure.location),),
            )


def judge_prefixes(record: RunRecord) -> Iterator[Verdict]:
    """Yield the lines at which a state dict's names differ from the module's by the wrapper's prefix.

    A load that raised and was caught, or that was followed by one that fitted, was put right by the script.
    """
    for site, states in grouped(record.state_names, lambda state: state.site).items():
        location = site_location(record.site(site))
        wrong = [state for state in states if max(state.too_long, state.too_short) and not _put_right(record, state)]
        if location is None:
            continue
        if not wrong:
            if all(not state.names for state in states):
                yield Verdict(wrong=False, sentence="the names match the module", locations=location)
            continue
        first = wrong[0]
        saved, loaded = ("the DDP wrapper", "a bare model") if first.too_long else ("a bare model", "the DDP wrapper")
        fitting = first.too_long or first.too_short
        what = "the load fails" if first.raised else f"strict=False skips {fitting:,} of {first.names:,} names"
        yield Verdict(
            sentence=f"{loaded} ({first.module_class}) loads what was saved from {saved}: the names differ by the "
            f'prefix "module.", and {what}',
            locations=location,
            ranks=tuple(sorted({state.rank for state in wrong})),
            because=((f"{fitting:,} of {first.names:,} names match once the prefix is fixed", location),),
        )
    yield from _foreign_names(record)


_PREFIXED = regex(r"""['"]module\.([\w.]+)['"]""")


def _foreign_names(record: RunRecord) -> Iterator[Verdict]:
    """Yield the exceptions that ended ranks over a name of the DDP object, where those of the bare module were known.

    A load of a state dict that fails so is told by its names.
    """
    names = {tensor.name for wrap in record.wraps for tensor in (*wrap.parameters, *wrap.buffers)}
    ended = ((rank.rank, rank.exceptions[-1]) for rank in record.ranks if rank.end == "raised" and rank.exceptions)
    lines: dict[Location, dict[int, str]] = {}
    for rank, raised in ended:
        known = next((name for name in _PREFIXED.findall(raised.message) if name in names), "")
        location = location_of(raised.frames[0]) if raised.frames else None
        if known and location and not any(state.raised and state.rank == rank for state in record.state_names):
            lines.setdefault(location, {})[rank] = known
    for location, found in lines.items():
        name = next(iter(found.values()))
        yield Verdict(
            sentence=f"`module.{name}` is the DDP object's name for what the bare module calls `{name}`: one of them "
            "gave the names, and the other is asked for them, which fails",
            locations=location,
            ranks=tuple(found),
            severity=Severity.ERROR,
            because=((f"it ended {rank_list(found)}, and the wrapped module has `{name}`", location),),
            remedy="Give the bare module at both places: ddp_model.module.",
        )


def _put_right(record: RunRecord, state: StateNames) -> bool:
    rank = record.of_rank(state.rank)
    if state.raised and (rank is None or rank.end != "raised"):
        return True
    later = (other for other in record.state_names if other.time_ns > state.time_ns and not other.names)
    return any((one.rank, one.module_class) == (state.rank, state.module_class) for one in later)


# Which moments of one rank certainly come before which moments of another: the order that collectives make.

_FROM_ROOT = frozenset({"broadcast", "scatter"})
_TO_ROOT = frozenset({"reduce", "gather"})
_RECEIVES = frozenset({"recv", "recv_any_source"})
_MEETINGS = ("init_process_group", "new_group")


class Handover(msgspec.Struct, frozen=True, kw_only=True):
    """One rank saw what another had done, without a collective: it waited for a file."""

    from_rank: int
    from_ns: int
    to_rank: int
    to_ns: int


class Order:
    """Answers for one record; what one moment is followed by is worked out once."""

    def __init__(self, record: RunRecord, handovers: tuple[Handover, ...] = ()) -> None:
        self._record = record
        self._handovers = handovers
        self._tracks: Mapping[int, CollectiveTrack] = {track.rank: track for track in record.collectives}
        self._meetings: dict[tuple[str, int], dict[int, Wait]] = {}
        counts: dict[tuple[int, str], int] = {}
        for wait in record.waits:
            if wait.kind in _MEETINGS and not wait.error and not wait.ranks:
                ordinal = counts.get((wait.rank, wait.kind), 0)
                counts[wait.rank, wait.kind] = ordinal + 1
                self._meetings.setdefault((wait.kind, ordinal), {})[wait.rank] = wait
        self._known: dict[tuple[int, int, int], dict[int, int]] = {}

    @cached_property
    def _rows(self) -> dict[tuple[int, int], list[int]]:
        """(rank, group) -> rows of its track, ascending."""
        found: dict[tuple[int, int], list[int]] = {}
        for track in self._record.collectives:
            for row, group in enumerate(track.group):
                found.setdefault((track.rank, group), []).append(row)
        return found

    def follows(self, rank: int, time_ns: int, other: int, other_ns: int) -> bool:
        """Return whether the moment of ``other`` certainly comes after that of ``rank``."""
        reached = self._reached(rank, time_ns).get(other)
        return reached is not None and reached <= other_ns

    def unordered(self, rank: int, time_ns: int, other: int, other_ns: int) -> bool:
        """Return whether nothing orders two moments of two ranks."""
        return not self.follows(rank, time_ns, other, other_ns) and not self.follows(other, other_ns, rank, time_ns)

    def _reached(self, rank: int, time_ns: int) -> dict[int, int]:
        """Return the earliest time at which each rank has come past the moment, by what the ranks did together."""
        track = self._tracks.get(rank)
        row = bisect_left(track.started_ns, time_ns) if track is not None else 0
        later = sum(handover.from_ns >= time_ns for handover in self._handovers if handover.from_rank == rank)
        begun = sum(wait.started_ns >= time_ns for wait in self._record.waits if wait.rank == rank)
        key = (rank, row, later * (len(self._record.waits) + 1) + begun)
        if key not in self._known:
            self._known[key] = self._spread({rank: time_ns})
        return self._known[key]

    def _spread(self, reached: dict[int, int]) -> dict[int, int]:
        changed = True
        while changed:
            before = dict(reached)
            for rank, time_ns in before.items():
                self._over_collectives(rank, time_ns, reached)
                for meeting in self._meetings.values():
                    own = meeting.get(rank)
                    if own is not None and own.started_ns >= time_ns:
                        for other, wait in meeting.items():
                            if wait.ended_ns:
                                _earlier(reached, other, wait.ended_ns)
                for handover in self._handovers:
                    if handover.from_rank == rank and handover.from_ns >= time_ns:
                        _earlier(reached, handover.to_rank, handover.to_ns)
            changed = reached != before
        return reached

    def _over_collectives(self, rank: int, time_ns: int, reached: dict[int, int]) -> None:
        track = self._tracks.get(rank)
        if track is None:
            return
        for (owner, group), rows in self._rows.items():
            if owner != rank:
                continue
            left = set(self._record.groups[group].ranks) - {rank}
            position = bisect_left([track.started_ns[row] for row in rows], time_ns)
            for row in rows[position:]:
                if not left:
                    break
                left -= self._carried(track, row, group, left, reached)

    def _carried(
        self, track: CollectiveTrack, row: int, group: int, left: set[int], reached: dict[int, int]
    ) -> set[int]:
        """Return the ranks that come past a collective only after this rank has reached it."""
        signature = self._record.signatures[track.signature[row]]
        if signature.kind == "send":
            return self._received(track.started_ns[row], group, left, reached)
        if signature.kind in _RECEIVES or (signature.kind in _FROM_ROOT and signature.root != track.rank):
            return set()
        carried = {other for other in left if signature.kind not in _TO_ROOT or other == signature.root}
        found: set[int] = set()
        for other in carried:
            rows, position = self._rows.get((other, group), []), track.sequence[row]
            theirs = self._tracks.get(other)
            if theirs is not None and position < len(rows):
                _earlier(reached, other, theirs.started_ns[rows[position]])
            found.add(other)
        return found

    def _received(self, sent_ns: int, group: int, left: set[int], reached: dict[int, int]) -> set[int]:
        """Return the ranks that may have received what was sent: whom it was for is not recorded."""
        found = set()
        for other in left:
            for row in self._rows.get((other, group), ()):
                track = self._tracks[other]
                kind = self._record.signatures[track.signature[row]].kind
                if kind in _RECEIVES and not 0 < track.completed_ns[row] < sent_ns:
                    _earlier(reached, other, max(track.started_ns[row], sent_ns))
                    found.add(other)
                    break
        return found


def _earlier(reached: dict[int, int], rank: int, time_ns: int) -> None:
    reached[rank] = min(reached.get(rank, time_ns), time_ns)


PathTrouble = Literal["download-race", "early-read", "path-race"]
_CACHES = ("torchinductor", "/triton", "__pycache__")
OWN = ("", "save", "rename")
"""What stands between the user and a write that fetches nothing: a plain ``open``, torch's writer, another name."""
_NAMED = re.compile(r"'([^']+)'")


class Race(msgspec.Struct, frozen=True, kw_only=True):
    """Two ranks that reach one path with nothing between them."""

    trouble: PathTrouble
    path: str
    first: Access
    """What the rank did whose act the other one meets: writes, makes, removes."""
    second: Access
    ranks: tuple[int, ...]
    died: RankException | None = None
    """The exception that the race ended a rank with."""


@once_per_record()
def races(record: RunRecord) -> tuple[Race, ...]:
    """Return every race of a run, at most one for a path, in the order of the paths' first accesses."""
    if len(record.rank_numbers()) < 2:
        return ()
    counted = (one for one in _all_accesses(record) if one.path and not any(part in one.path for part in _CACHES))
    by_path = grouped(sorted(counted, key=lambda access: access.time_ns), lambda access: access.path)
    order = Order(record, tuple(_handovers(by_path)))
    locks = (access for access in record.accesses if access.action == "lock" and access.through == "flock")
    locked = {(access.rank, access.time_ns) for access in locks}
    found = []
    for path, accesses in by_path.items():
        is_lock = len({access.rank for access in accesses if access.action == "lock"}) > 1
        if len({access.rank for access in accesses}) < 2 or is_lock:
            continue
        race = _Path(record, order, locked, path, accesses).race()
        # What happens to a log or a hidden directory matters to nobody, unless a rank dies of it.
        if race is not None and (race.died is not None or not is_incidental(path)):
            found.append(race)
    return tuple(found)


def _all_accesses(record: RunRecord) -> Iterator[Access]:
    """Yield the accesses, with the writes of C++ writers, which only the no-touch rule sees."""
    yield from (access for access in record.accesses if access.rank >= 0)
    for event in record.files:
        if event.rank >= 0 and event.action in ("save", "rename"):
            yield Access(**shared_fields(event, Access) | {"action": "write", "through": event.action})


def _handovers(by_path: dict[str, list[Access]]) -> Iterator[Handover]:
    """A rank that asked for a path until it was there has waited for the rank that made it."""
    for accesses in by_path.values():
        made = [access for access in accesses if access.action in ("write", "make") and not access.found]
        for check in accesses:
            if check.action != "check" or not check.found:
                continue
            waited = any(
                other.action == "check" and (other.rank, other.site) == (check.rank, check.site) and not other.found
                for other in accesses
                if other.time_ns < check.time_ns
            )
            for maker in made:
                if waited and maker.rank != check.rank and maker.time_ns < check.time_ns:
                    yield Handover(from_rank=maker.rank, from_ns=maker.time_ns, to_rank=check.rank, to_ns=check.time_ns)


class _Path(msgspec.Struct, frozen=True):
    """The accesses of the ranks to one path."""

    record: RunRecord
    order: Order
    locked: set[tuple[int, int]]
    path: str
    accesses: list[Access]

    def race(self) -> Race | None:
        """Return the race at this path, the most specific one first."""
        return self._prepared() or self._read_early() or self._in_the_way()

    def _prepared(self) -> Race | None:
        """Every rank prepares the same data before training: fetches it, or writes what is read, unless it is there."""
        steps = [forward.time_ns for forward in self.record.forwards if forward.training and forward.gradients]
        training_ns = min(steps, default=0)
        writes = [write for write in self._with("write") if not 0 < training_ns < write.time_ns]
        for write in writes:
            asked = {check.site for check in self._with("check") if check.rank == write.rank}
            is_cache = bool(self._with("read")) and (bool(asked) or write.through != "save")
            for other in writes if is_cache or write.through not in OWN else ():
                if other.site == write.site and self._clash(write, other):
                    return self._found("download-race", write, other)
            for read in self._with("read"):
                same = any(check.rank == read.rank and check.site in asked for check in self._with("check"))
                if same and self._clash(write, read):
                    return self._found("download-race", write, read)
        return None

    def _read_early(self) -> Race | None:
        """A rank reads what another writes, and did not write itself."""
        writers = {write.rank for write in self._with("write")}
        for write in self._with("write"):
            for read in self._with("read"):
                if read.rank not in writers and self._clash(write, read):
                    return self._found("early-read", write, read)
        return None

    def _in_the_way(self) -> Race | None:
        """A rank fails with what another did to the path, or takes away what another has made."""
        changes = self._with("make", "remove", "move")
        for other in changes:
            died = self._death(other)
            for change in changes if died is not None else ():
                # One that failed at a directory which was there before the ranks has met no other rank.
                did = change.found == (change.action != "make")
                if did and change.action == other.action and self._clash(change, other):
                    return self._found("path-race", change, other, died)
        for removal in self._with("remove"):
            for made in self._with("make", "write") if removal.found else ():
                if made.time_ns < removal.time_ns and not made.found and self._clash(made, removal):
                    return self._found("path-race", made, removal)
        return self._waited_for()

    def _waited_for(self) -> Race | None:
        """A rank asks until a file is there that another writes in place, and reads what there is of it."""
        for write in self._with("write"):
            checks = [check for check in self._with("check") if check.rank != write.rank and write.through != "rename"]
            for check in checks if not write.found else ():
                asked = any(not own.found and own.site == check.site and own.rank == check.rank for own in checks)
                if not check.found or not asked or check.time_ns < write.time_ns:
                    continue
                for read in self._with("read"):
                    unlocked = not (self._holds_lock(write) and self._holds_lock(read))
                    if read.rank == check.rank and read.time_ns > check.time_ns and unlocked:
                        return self._found("path-race", write, check)
        return None

    def _with(self, *actions: str) -> list[Access]:
        return [access for access in self.accesses if access.action in actions]

    def _clash(self, one: Access, other: Access) -> bool:
        if one.rank == other.rank or (self._holds_lock(one) and self._holds_lock(other)):
            return False
        return self.order.unordered(one.rank, one.time_ns, other.rank, other.time_ns)

    def _holds_lock(self, access: Access) -> bool:
        return any(rank == access.rank and time_ns <= access.time_ns for rank, time_ns in self.locked)

    def _death(self, access: Access) -> RankException | None:
        """Return the operating system's exception over this path that ended the rank, if it came of this access."""
        rank = self.record.of_rank(access.rank)
        raised = root_exception(rank) if rank is not None else None
        if raised is None or raised.type not in ("FileExistsError", "FileNotFoundError"):
            return None
        named = _NAMED.findall(raised.message)
        same = any(PurePath(self.path).parts[-len(PurePath(name).parts) :] == PurePath(name).parts for name in named)
        return raised if same else None

    def _found(self, trouble: PathTrouble, first: Access, second: Access, died: RankException | None = None) -> Race:
        ranks = {first.rank, second.rank}
        if trouble == "download-race":
            ranks |= {access.rank for access in self.accesses if access.site in (first.site, second.site)}
        return Race(
            trouble=trouble,
            path=self.path,
            first=first,
            second=second,
            ranks=tuple(sorted(ranks)),
            died=died or self._death(second),
        )


_LOG_SUFFIXES = frozenset({".log", ".out", ".err", ".lock", ".pid", ".pyc", ".tmp"})


def is_incidental(path: str) -> bool:
    """Return whether a path is that of a log, a lock, a cache or a temporary file, by its name."""
    parts = PurePath(path).parts
    name = parts[-1] if parts else ""
    hidden = any(part.startswith(".") for part in parts) or "__pycache__" in parts
    is_log = "tfevents" in name or "log" in PurePath(name).stem.lower().replace("-", "_").split("_")
    return hidden or is_log or path.startswith(("/dev/", "/proc/")) or PurePath(name).suffix in _LOG_SUFFIXES


# What the checks of the family of path races say: the races of each line, and the lines that are proved innocent.

_SHOWN = 3
_DONE = {"write": "wrote", "read": "read", "check": "asked for", "make": "made", "remove": "removed", "move": "moved"}
_DOES = {"make": "make", "remove": "delete", "move": "rename"}


def judge_paths(record: RunRecord, trouble: Trouble | None) -> Iterator[Verdict]:
    """Yield the races for which a check speaks, once for each pair of lines, then the lines without one."""
    own = [race for race in races(record) if race.trouble == trouble]
    racing: set[Location] = set()
    for found in grouped(own, lambda race: (race.first.site, race.second.site)).values():
        verdict = _verdict(record, trouble, found)
        racing |= set(verdict.places)
        yield verdict
    for location, reason in _innocent(record, trouble):
        if location not in racing:
            yield Verdict(wrong=False, sentence=reason, locations=location)


def _verdict(record: RunRecord, trouble: Trouble | None, found: Sequence[Race]) -> Verdict:
    race = found[0]
    first, second = race.first, race.second
    name = PurePath(race.path).name + (f" and {len(found) - 1:,} more paths" if len(found) > 1 else "")
    ranks = tuple(sorted({rank for entry in found for rank in entry.ranks}))
    lines = (second, first) if trouble == "early-read" else (first, second)
    places = (site_location(record.site(access.site)) for access in lines)
    died = f", and rank {second.rank} dies of {race.died.type}" if race.died is not None else ""
    return Verdict(
        sentence=_sentence(trouble, first, second, ranks, name) + died,
        locations=tuple(dict.fromkeys(places)),
        ranks=ranks,
        because=tuple(
            _fact(record, access, race.path) for access in sorted((first, second), key=lambda access: access.time_ns)
        ),
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


def _fact(record: RunRecord, access: Access, path: str) -> Reason:
    site = record.site(access.site)
    there = "" if access.action in ("write", "check") else " (it was there)" if access.found else " (it was not there)"
    text = f"rank {access.rank} {_DONE[access.action]} {path} at {place(site.innermost)}{there}"
    return text, site_location(site), {}, access.rank


def _innocent(record: RunRecord, trouble: Trouble | None) -> Iterator[tuple[Location, str]]:
    """Lines at which two ranks certainly do not race, in a run in which every rank reached its end."""
    if record.job.stop_reason or not all(rank.end in ("finished", "ended-by-rehearsal") for rank in record.ranks):
        return
    racing = {race.path for race in races(record)}
    lines: dict[int, list[str]] = {}
    for path, accesses in grouped(record.accesses, lambda access: access.path).items():
        writers = {access.rank for access in accesses if access.action == "write"}
        writers |= {event.rank for event in record.files if event.path == path and event.action == "save"}
        for access in accesses:
            met = access.action == "read" and len(writers) == 1 and access.rank not in writers
            alone = access.action in _DOES and len({other.rank for other in accesses}) == 1
            read = any(other.action == "read" and other.rank not in writers for other in accesses)
            fed = access.action == "write" and len(writers) == 1 and read
            if {"early-read": met, "path-race": alone, "download-race": fed}.get(trouble or "", False):
                lines.setdefault(access.site, []).append(path)
    for site, paths in lines.items():
        location = site_location(record.site(site))
        if location is not None and not racing & set(paths):
            shown = ", ".join(PurePath(path).name for path in sorted(set(paths))[:_SHOWN])
            reason = f"collectives order the accesses of the ranks to {count(len(set(paths)), 'path')} ({shown})"
            if trouble == "path-race":
                reason = f"no path is touched by more than one rank here ({shown})"
            yield location, reason


# Which ranks wrote which file from which line.

_WRITES = frozenset({"create", "write", "save"})
_EVIDENCE_SHOWN = 4


def judge_writers(record: RunRecord) -> Iterator[Verdict]:
    """Yield a verdict for each line at which files were written; nothing for a lone writer in a run that was cut short.

    In processes that never met as the ranks of one job the missing job is the fault, and their files are no news.
    Logs, lock files, caches and temporary files count only when they are saved with torch; other writes count only
    where the ranks made them between the same two collectives, for ranks that write in turn do no harm. Data that every
    rank prepares has a check of its own.
    """
    by_line: dict[tuple[str, int], list[FileEvent]] = {}
    if record.job.world_size < 2:
        return
    left_out = {race.path for race in races(record) if race.trouble == "download-race"}
    left_out |= {access.path for access in record.accesses if access.action == "lock" and access.through == "flock"}
    for event in record.files:
        line = record.site(event.site).innermost
        if event.action in _WRITES and line is not None and event.path not in left_out:
            by_line.setdefault((line.file, line.line), []).append(event)
    whole = record.job.stop_reason == "" and len(record.rank_numbers()) > 1
    # A rank that raised or was killed might have written what only the other ranks did.
    whole = whole and all(rank.end in ("finished", "ended-by-rehearsal") for rank in record.ranks)
    for events in by_line.values():
        by_path = grouped(events, lambda event: event.path)
        shared = {path: found for path, found in by_path.items() if _shared(record, path, found)}
        if shared:
            yield _describe(record, shared)
        elif whole and all(len({event.rank for event in found}) == 1 for found in by_path.values()):
            location = location_of(record.site(events[0].site).innermost)
            assert location is not None
            writers = rank_list(event.rank for event in events)
            reason = f"no path was written by more than one rank here; {writers} wrote {count(len(by_path), 'path')}"
            yield Verdict(wrong=False, sentence=reason, locations=location)


def _shared(record: RunRecord, path: str, events: list[FileEvent]) -> bool:
    ranks = {event.rank for event in events}
    if len(ranks) < 2:
        return False
    if len({event.rank for event in events if event.action == "save"}) > 1:
        return True
    if is_incidental(path):
        return False
    phases: dict[int, set[int]] = {}
    for event in events:
        track = record.track(event.rank)
        collectives = 0 if track is None else bisect_left(track.started_ns, event.time_ns)
        phases.setdefault(collectives, set()).add(event.rank)
    return any(len(together) > 1 for together in phases.values())


def _describe(record: RunRecord, shared: dict[str, list[FileEvent]]) -> Verdict:
    first = next(iter(shared.values()))
    site = record.site(first[0].site)
    location = location_of(site.innermost)
    assert location is not None
    ranks = sorted({event.rank for events in shared.values() for event in events})
    path = PurePath(next(iter(shared)))
    more = f" and {count(len(shared) - 1, 'more file')}" if len(shared) > 1 else ""
    done = "save" if any(event.action == "save" for event in first) else "write"
    return Verdict(
        sentence=f"{rank_list(ranks)} {done} the same file {path.name}{more} at {place(site.innermost)}",
        locations=location,
        ranks=tuple(ranks),
        because=tuple(
            (_who_wrote(name, events), location if number else Via(location, site.frames))
            for number, (name, events) in enumerate(sorted(shared.items())[:_EVIDENCE_SHOWN])
        ),
    )


def _who_wrote(path: str, events: list[FileEvent]) -> str:
    """``ranks 0 and 1 wrote runs/last.pt 4 times each``, with the end of the path only."""
    action = events[0].action
    times = dict.fromkeys(sorted({event.rank for event in events}), 0)
    for event in events:
        times[event.rank] += event.action == action
    most = max(times.values())
    how_often = "" if most <= 1 else f" up to {most} times" if len(set(times.values())) > 1 else f" {most} times each"
    return f"{rank_list(times)} wrote {PurePath(*PurePath(path).parts[-2:])}{how_often}"
