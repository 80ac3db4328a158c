"""What goes over the links, and what they can carry."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Sequence
from typing import Literal

import msgspec

from ddpdoctor.diagnosis.performance.summary import Traffic
from ddpdoctor.diagnosis.steps import RankSteps, common_rows, taken
from ddpdoctor.diagnosis.sync_points import GRADIENTS, Meetings
from ddpdoctor.diagnosis.wording import rank_list
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.measured import Gpu

_PAIRS_ONLY = ("PCIE", "NVL")
"""Names of GPUs whose NVLinks, where they have any, are bridges between two or four cards."""


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """The slowest link of a ring through the GPUs of a group."""

    kind: Literal["NVLink", "PCIe"]
    bytes_per_s: float
    """In one direction, by its standard; a well-tuned ring reaches 70 to 90 % of it."""


def link_of(record: RunRecord, ranks: Collection[int]) -> Link | None:
    """Return the link of a group of ranks.

    None where it is not known: ranks without a GPU of their own that this node's driver knows, as on several nodes, and
    backends that do not send from GPU to GPU.
    """
    backends = {group.backend for group in record.groups if group.ranks == tuple(sorted(ranks))} or {record.job.backend}
    gpus = [gpu for gpu in record.gpus if not set(gpu.ranks).isdisjoint(ranks)]
    known = {rank for gpu in gpus for rank in gpu.ranks}
    if len(gpus) < 2 or len(gpus) != len(set(ranks)) or not known.issuperset(ranks):
        return None
    if not all("nccl" in backend for backend in backends):
        return None
    nvlinks = [gpu.nvlink_bytes_per_s for gpu in gpus if gpu.nvlink_bytes_per_s is not None]
    if len(nvlinks) == len(gpus) and (len(gpus) == 2 or not _in_pairs(gpus)):
        return Link(kind="NVLink", bytes_per_s=min(nvlinks))
    lanes = [gpu.pcie_bytes_per_s for gpu in gpus if gpu.pcie_bytes_per_s is not None]
    return Link(kind="PCIe", bytes_per_s=min(lanes)) if len(lanes) == len(gpus) else None


def _in_pairs(gpus: Sequence[Gpu]) -> bool:
    return any(word in gpu.name.upper() for gpu in gpus for word in _PAIRS_ONLY)


LEAST_EXPOSED = 0.5
"""Share of the communication window that must be exposed for a bandwidth to be made of it."""
_ALL_REDUCES = frozenset({GRADIENTS, "all_reduce"})
_ONE_WAY = frozenset({"broadcast", "buffers", "reduce"})
_BLOCKING = frozenset({"gloo", "mpi", "cpu:gloo"})
"""Backends whose collectives return when they are done; with the others they are only enqueued."""


def gradient_traffic(record: RunRecord, ranks: Sequence[RankSteps], meetings: Sequence[Meetings]) -> Iterator[Traffic]:
    """Yield what DDP reduces in backward, for each set of ranks that average gradients with each other."""
    tracks = {track.rank: track for track in record.step_tracks}
    by_rank = {steps.rank: steps for steps in ranks}
    for meeting in meetings:
        members = [by_rank[rank] for rank in meeting.ranks]
        track, steps = tracks[meeting.ranks[0]], members[0]
        fastest = _fastest(members)
        sent = [
            (size_bytes, *fastest[step])
            for size_bytes, step in zip(meeting.size_bytes, meeting.step, strict=True)
            if size_bytes and step in fastest
        ]
        sent_bytes, window_ns, exposed_ns = (sum(column) for column in zip(*sent, strict=True)) if sent else (0, 0, 0)
        # What backward hid lasted as long as backward: that part of the window says nothing of the link. Neither does
        # one in which ranks that no one sees may have been waited for.
        known = exposed_ns >= LEAST_EXPOSED * window_ns and meeting.ranks == meeting.members
        yield Traffic(
            group=_group_name(meeting.members, record.job.world_size or len(ranks)),
            backend=_backend(record, meeting.members),
            kind=GRADIENTS,
            calls_per_step=sum(track.buckets[row] for row in steps.row) / len(steps),
            bytes_per_step=sum(track.reduced_bytes[row] for row in steps.row) / len(steps),
            ns_per_step=window_ns / len(sent) if sent else None,
            bus_bandwidth_bytes_per_s=_on_the_bus(GRADIENTS, len(members), sent_bytes, window_ns) if known else None,
            limit_bytes_per_s=_limit(record, meeting.members),
            overlap_ratio=hidden_share(members),
        )


def explicit_traffic(record: RunRecord, world_size: int, meetings: Sequence[Meetings]) -> Iterator[Traffic]:
    """Yield each kind of explicit collective of each process group."""
    for meeting in meetings:
        assert meeting.group is not None
        backend = record.groups[meeting.group].backend
        waiting = meeting.waiting_ns
        for kind in dict.fromkeys(meeting.kinds):
            at = [index for index, own in enumerate(meeting.kinds) if own == kind]
            blocked_ns = sum(column[index] for column in meeting.held_ns for index in at) / len(meeting.ranks)
            waited_ns = sum(column[index] for column in waiting for index in at) / len(meeting.ranks)
            # The last that came waited for no one.
            fastest_ns = sum(min(column[index] for column in meeting.held_ns) for index in at)
            sent_bytes = sum(meeting.size_bytes[index] for index in at)
            yield Traffic(
                group=_group_name(meeting.members, world_size),
                backend=backend,
                kind=kind,
                calls_per_step=len(at) / meeting.steps,
                bytes_per_step=sent_bytes / meeting.steps,
                ns_per_step=blocked_ns / meeting.steps,
                waiting_ns_per_step=waited_ns / meeting.steps,
                bus_bandwidth_bytes_per_s=_on_the_bus(kind, len(meeting.ranks), sent_bytes, fastest_ns)
                if backend in _BLOCKING and meeting.ranks == meeting.members
                else None,
                limit_bytes_per_s=_limit(record, meeting.members),
            )


def hidden_share(ranks: Sequence[RankSteps]) -> float | None:
    """Share of the communication windows of some ranks that computation hid, over their sampled steps.

    None where a rank has none. Windows are added up before they are divided: a rank that waits long for another has a
    long one.
    """
    exposed_ns = window_ns = 0
    for steps in ranks:
        exposed, windows = steps.exposed_ns, steps.window_ns
        if min(exposed, default=-1) < 0 or min(windows) <= 0:
            both = zip(exposed, windows, strict=True)
            sampled = [(own_ns, whole_ns) for own_ns, whole_ns in both if own_ns >= 0 and whole_ns > 0]
            if not sampled:
                return None
            exposed, windows = (array("q", column) for column in zip(*sampled, strict=True))
        exposed_ns += sum(exposed)
        window_ns += sum(windows)
    return max(0.0, 1.0 - exposed_ns / window_ns) if window_ns else None


def _fastest(members: Sequence[RankSteps]) -> dict[int, tuple[int, int]]:
    """By step the shortest window of any rank, which holds no waiting for another, and what of it was exposed."""
    places = common_rows(members)
    both = list(zip(members, places, strict=True))
    windows = zip(*(taken(steps.window_ns, own) for steps, own in both), strict=True)
    exposed = zip(*(taken(steps.exposed_ns, own) for steps, own in both), strict=True)
    found: dict[int, tuple[int, int]] = {}
    for step, windows_ns, exposed_ns in zip(taken(members[0].step, places[0]), windows, exposed, strict=True):
        if min(windows_ns) > 0:
            found[step] = min(zip(windows_ns, exposed_ns, strict=True))
    return found


def _on_the_bus(kind: str, ranks: int, sent_bytes: int, duration_ns: int) -> float | None:
    """Return a lower bound of the bus bandwidth in bytes per second, as NCCL's tests define it; None where it is not
    known.

    In a ring each link carries 2 (N - 1) / N of what is all-reduced, and all of what is sent one way.
    """
    if duration_ns <= 0 or not sent_bytes or ranks < 2:
        return None
    if kind in _ALL_REDUCES:
        return 2.0 * (ranks - 1) / ranks * sent_bytes / duration_ns * 1e9
    return sent_bytes / duration_ns * 1e9 if kind in _ONE_WAY else None


def _limit(record: RunRecord, ranks: tuple[int, ...]) -> float | None:
    link = link_of(record, ranks)
    return None if link is None else link.bytes_per_s


def _group_name(ranks: tuple[int, ...], world_size: int) -> str:
    return f"all {world_size} ranks" if len(ranks) == world_size else rank_list(ranks)


def _backend(record: RunRecord, ranks: tuple[int, ...]) -> str:
    fitting = (group.backend for group in record.groups if group.ranks == ranks)
    return next(fitting, record.job.backend)
