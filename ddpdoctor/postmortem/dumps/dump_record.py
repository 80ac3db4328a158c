"""Makes collective tracks of a record out of the ranks' flight-recorder dumps.

Ranks whose dumps were equal but for their times share the columns of the first of them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec

from ddpdoctor.finding import Frame, in_user_code
from ddpdoctor.postmortem.dumps.dumps import Dump, DumpFrame, Entry, ranks_of
from ddpdoctor.probe.live.flight_recorder import KINDS, described
from ddpdoctor.probe.user_code import origin_of
from ddpdoctor.record.model import Rank, RunRecord, Site, StreamState
from ddpdoctor.record.streams.collectives import CollectiveTrack, Group, Signature

DEFAULT_GROUP = "default_pg"
"""How torch describes the group of all ranks."""
POINT_TO_POINT = frozenset({"send", "recv"})
OF_ALL_MEMBERS = frozenset(
    {
        "all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor", "all_to_all",
        "all_to_all_single", "barrier",
    }
)  # fmt: skip
"""Collectives that end on no rank before every rank has begun them."""
FRAMES_KEPT = 16
WAITED_NS = 10_000_000_000
"""A dump does not say when it was made: at least so long after its last entry, as it was made for a timeout."""
_Columns = dict[str, "array[int]"]


class _Built(msgspec.Struct):
    """What one content of a dump became."""

    columns: _Columns
    open_row: int | None
    """The first entry that is not over: what the rank waits in."""
    lost: int
    """Entries that the ring had overwritten."""
    last_ns: int
    unproven: frozenset[int] = frozenset()
    """Rows that are retired without a sign that they completed: torch retires what has timed out as well."""


class DumpBook:
    """The dumps of one job under construction."""

    def __init__(self) -> None:
        self._signatures: dict[Signature, int] = {}
        self._sites: dict[Site, int] = {}
        self._site_of: dict[tuple[DumpFrame, ...], int] = {}
        self._groups: dict[tuple[object, ...], int] = {}
        self._members: list[set[int]] = []
        """Ranks of each group, where the dumps do not say: those that have entries of it."""
        self._known: list[Group] = []
        self._defaults: set[int] = set()
        """Groups that hold all ranks of the job."""
        self._described: dict[tuple[object, ...], int] = {}
        self._built: dict[int, _Built] = {}
        """By the identity of the dump."""
        self._keep: list[Dump] = []
        """Dumps whose identity is a key: they must live as long."""
        self._of_rank: dict[int, _Built] = {}
        self.without: set[int] = set()
        """Ranks that the job has, and whose dumps cannot be used."""
        self.lost: dict[int, int] = {}
        """By rank, how many entries its ring had overwritten."""

    def add(self, rank: int, dump: Dump) -> None:
        """Take in the dump of a rank; a second one takes the place of the first where it is newer."""
        built = self._built.get(id(dump))
        if built is None:
            built = self._build(dump)
            self._built[id(dump)] = built
            # Only the columns are kept: a thousand dumps with their entries would not fit into memory.
            dump.entries = []
            self._keep.append(dump)
        before = self._of_rank.get(rank)
        if before is not None and before.last_ns >= built.last_ns:
            return
        self._of_rank[rank] = built
        self.lost[rank] = built.lost
        for number in set(built.columns["group"]):
            self._members[number].add(rank)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that have a dump."""
        return tuple(sorted(self._of_rank))

    def into(self, record: RunRecord, written_ns: int) -> RunRecord:
        """Add what the dumps tell to the record of the logs."""
        numbers = self._of_rank.keys() | self.without | {rank.rank for rank in record.ranks}
        world = max(record.job.world_size, *(rank + 1 for rank in numbers))
        world = max([world, *(rank + 1 for group in self._known for rank in group.ranks)])
        groups = tuple(
            group
            if group.ranks
            else msgspec.structs.replace(
                group, ranks=tuple(range(world) if number in self._defaults else sorted(self._members[number]))
            )
            for number, group in enumerate(self._known)
        )
        self._reopen(groups)
        waited_for = self._waited_for(groups)
        known = {rank.rank: rank for rank in record.ranks}
        ranks = tuple(self._rank(number, known.get(number), waited_for) for number in range(world))
        last = max((built.last_ns for built in self._of_rank.values()), default=0)
        truncated = StreamState("truncated", "a flight recorder holds the newest entries only")
        return msgspec.structs.replace(
            record,
            job=msgspec.structs.replace(
                record.job, world_size=world, ranks_expected=world, ended_ns=max(written_ns, last + WAITED_NS)
            ),
            ranks=ranks,
            groups=groups,
            sites=tuple(self._sites),
            signatures=tuple(self._signatures),
            collectives=tuple(
                CollectiveTrack(rank=rank, **self._of_rank[rank].columns) for rank in sorted(self._of_rank)
            ),
            streams={**record.streams, "collectives": truncated, "ranks": StreamState("complete")},
        )

    def _reopen(self, groups: Sequence[Group]) -> None:
        """Take for unfinished what cannot have finished: collectives of all members that one of them has not begun."""
        last: dict[int, dict[int, int]] = {}
        for rank, built in self._of_rank.items():
            for group, sequence in zip(built.columns["group"], built.columns["sequence"], strict=True):
                of_group = last.setdefault(group, {})
                of_group[rank] = max(sequence, of_group.get(rank, -1))
        least = {
            number: min((of_group.get(rank, -1) for rank in groups[number].ranks if rank in self._of_rank), default=-1)
            for number, of_group in last.items()
        }
        of_all = {number for signature, number in self._signatures.items() if signature.kind in OF_ALL_MEMBERS}
        for rank, built in self._of_rank.items():
            columns = built.columns
            rows = [
                row
                for row in built.unproven
                if columns["signature"][row] in of_all and columns["sequence"][row] > least[columns["group"][row]]
            ]
            if rows:
                completed = columns["completed_ns"][:]
                for row in rows:
                    completed[row] = 0
                self._of_rank[rank] = msgspec.structs.replace(
                    built, columns={**columns, "completed_ns": completed}, open_row=completed.index(0)
                )

    def _rank(self, number: int, known: Rank | None, waited_for: frozenset[int]) -> Rank:
        """A rank was there when its dump was made; one without a dump did not come as far as is known."""
        built = self._of_rank.get(number)
        rank = known or Rank(rank=number, end="running" if built is not None else "unknown")
        if rank.end not in ("running", "unknown"):
            return rank
        waits = None if built is None else built.open_row
        stuck = waits is None and number in waited_for
        return msgspec.structs.replace(rank, end="running", waiting_in=waits, stuck=stuck)

    def _waited_for(self, groups: Sequence[Group]) -> frozenset[int]:
        """Members of groups in which some rank waits."""
        waiting = {
            built.columns["group"][built.open_row] for built in self._of_rank.values() if built.open_row is not None
        }
        return frozenset(rank for number in waiting for rank in groups[number].ranks)

    def _build(self, dump: Dump) -> _Built:
        entries = sorted(dump.entries, key=lambda entry: entry.record_id)
        rows = _one_of_each(entries)
        numbers = self._groups_of(dump, entries)
        names = ("group", "sequence", "signature", "site", "started_ns", "completed_ns")
        columns: _Columns = {name: array("q") for name in names}
        for entry, over in rows:
            kind, peer = _kind_of(entry)
            group = numbers[_group_key(entry), kind in POINT_TO_POINT or entry.is_p2p]
            sequence = entry.p2p_seq_id if entry.is_p2p else entry.collective_seq_id or entry.seq_id or 0
            columns["group"].append(group)
            columns["sequence"].append(max(0, sequence - 1))
            columns["signature"].append(self._signature(entry, kind, peer, self._known[group].ranks))
            columns["site"].append(self._site(entry))
            columns["started_ns"].append(entry.time_created_ns)
            ended_ns = entry.time_discovered_completed_ns or entry.time_created_ns or 1
            columns["completed_ns"].append(ended_ns if over else 0)
        count = len(rows)
        columns["step"] = array("q", bytes(8 * count))
        columns["forward_site"] = array("q", [-1]) * count
        completed = columns["completed_ns"]
        return _Built(
            columns=columns,
            open_row=completed.index(0) if 0 in completed else None,
            lost=entries[0].record_id if entries else 0,
            last_ns=max(columns["started_ns"], default=0),
            unproven=frozenset(row for row, (entry, over) in enumerate(rows) if over and not entry.has_completed),
        )

    def _groups_of(self, dump: Dump, entries: Sequence[Entry]) -> dict[tuple[tuple[str, ...], bool], int]:
        """Return the number of each group of a dump, point-to-point apart: it counts for itself."""
        found: dict[tuple[tuple[str, ...], bool], int] = {}
        ordinals: dict[tuple[int, ...], int] = {}
        configured = {name: ranks_of(config) for name, config in dump.pg_config.items()}
        keys = {_group_key(entry): entry for entry in entries}
        for key, entry in sorted(keys.items(), key=lambda item: _number(item[0][0])):
            ranks = configured.get(key[0], ())
            ordinal = ordinals.get(ranks, 0)
            ordinals[ranks] = ordinal + 1
            backend = entry.profiling_name.partition(":")[0]
            for apart in (False, True):
                # Without its ranks a group is known by its name, which torch counts up alike on every rank.
                identity = (ranks, ordinal, apart) if ranks else (key, apart)
                number = self._groups.get(identity)
                if number is None:
                    number = self._groups[identity] = len(self._known)
                    timeout_ns = entry.timeout_ms * 1_000_000
                    self._known.append(Group(ranks=ranks, ordinal=ordinal, backend=backend, timeout_ns=timeout_ns))
                    self._members.append(set())
                    if DEFAULT_GROUP in key:
                        self._defaults.add(number)
                found[key, apart] = number
        return found

    def _signature(self, entry: Entry, kind: str, peer: int | None, members: Sequence[int]) -> int:
        frames = tuple(entry.frames)
        key = (kind, peer, tuple(map(tuple, entry.input_sizes)), tuple(entry.input_dtypes), frames)
        known = self._described.get(key)
        if known is None:
            origin = origin_of((frame.filename, frame.name) for frame in frames) if frames else "user"
            shapes = [tuple(shape) for shape in entry.input_sizes]
            fields = described(kind, shapes, next(iter(entry.input_dtypes), ""), origin)
            root = members[peer] if peer is not None and peer < len(members) else peer
            signature = msgspec.convert({**fields, "root": root}, Signature)
            known = self._described[key] = self._signatures.setdefault(signature, len(self._signatures))
        return known

    def _site(self, entry: Entry) -> int:
        frames = tuple(entry.frames)
        known = self._site_of.get(frames)
        if known is None:
            own = [Frame(frame.filename, frame.line, frame.name) for frame in frames if in_user_code(frame.filename)]
            site = Site(tuple(own[:FRAMES_KEPT]))
            known = self._site_of[frames] = self._sites.setdefault(site, len(self._sites)) if own else -1
        return known


def _one_of_each(entries: Sequence[Entry]) -> list[tuple[Entry, bool]]:
    """Return the entries with whether each is over; the parts of a coalesced operation are one, over with its last."""
    rows: list[tuple[Entry, bool]] = []
    places: dict[tuple[object, ...], int] = {}
    for entry in entries:
        sequence = entry.p2p_seq_id if entry.is_p2p else entry.collective_seq_id
        key = (_group_key(entry), entry.is_p2p, sequence)
        place = places.get(key)
        if place is None or sequence is None or (entry.is_p2p and "coalesced" not in entry.profiling_name):
            places[key] = len(rows)
            rows.append((entry, entry.is_over))
            continue
        first, over = rows[place]
        if not entry.profiling_name.endswith("coalesced"):
            first.input_sizes = [*first.input_sizes, *entry.input_sizes]
        rows[place] = (first, over or entry.is_over)
    return rows


def _group_key(entry: Entry) -> tuple[str, ...]:
    names = tuple(map(str, entry.process_group))
    return names or (str(entry.pg_id),)


def _kind_of(entry: Entry) -> tuple[str, int | None]:
    """Return the kind as users spell it, and the peer of a send or a receive by its number in the group."""
    name = entry.profiling_name.rpartition(":")[2]
    kind, _, peers = name.partition(" ")
    kind = KINDS.get(kind, kind)
    if kind in POINT_TO_POINT and peers:
        # As in ``send 0->1`` and ``recv 1<-0``: the other one stands last.
        digits = peers.replace("<-", "->").rpartition("->")[2]
        return kind, int(digits) if digits.isdecimal() else None
    return kind, None


def _number(name: str) -> tuple[int, str]:
    return (int(name), "") if name.isdecimal() else (1 << 60, name)
