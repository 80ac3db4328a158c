"""What goes over the links, and what they can carry."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import median_low
from typing import Literal

import msgspec

from ddpdoctor.check import Verdict
from ddpdoctor.diagnosis.divergence.unused_parameters import folded
from ddpdoctor.diagnosis.performance.summary import Traffic
from ddpdoctor.diagnosis.steps import RankSteps, common_rows, taken
from ddpdoctor.diagnosis.sync_points import GRADIENTS, Meetings
from ddpdoctor.diagnosis.wording import bytes_text, place, rank_list, site_location
from ddpdoctor.finding import Frame, Location, Severity, grouped
from ddpdoctor.record.model import RunRecord, TensorInfo, Wrap

# Buffers that DDP broadcasts in every training forward although that changes nothing.

_OF_FRAMEWORKS = (
    "Disable it in the framework that wraps the model (ddp_broadcast_buffers=False for the Trainer, "
    "broadcast_buffers=False for DDPStrategy and DistributedDataParallelKwargs)"
)
FORWARDS_NEEDED = 2
"""Synchronised training forwards that must have been seen on every rank."""


def wasted_broadcasts(record: RunRecord, warning_bytes: int = 0) -> Iterator[Verdict]:
    """Yield the wraps with buffers that were equal on all ranks before each broadcast.

    Buffers that change in the same way everywhere count only when the ranks' inputs differ and nothing but training
    came between two forwards: on equal inputs, or after a validation that broadcasts them, equal running statistics
    prove nothing. Less than ``warning_bytes`` in a step is advice. It is left out beside buffers whose broadcast is
    needed, because the ranks' values differ, or may differ for all that is known.
    """
    for number in sorted({wrap.wrap for wrap in record.wraps}):
        wraps = {wrap.rank: wrap for wrap in record.wraps if wrap.wrap == number}
        if len(wraps) < 2 or sorted(wraps) != list(record.rank_numbers()):
            continue
        if all(broadcasts_buffers(wrap) for wrap in wraps.values()) and _broadcasts(record, wraps):
            waste = _waste(record, number, wraps, warning_bytes)
            if waste is not None:
                yield waste


def broadcasts_buffers(wrap: Wrap) -> bool:
    """Return whether DDP hands on the buffers of its first rank before each training forward."""
    return bool(wrap.options.get("broadcast_buffers", True)) and wrap.options.get("forward_sync_buffers") is not False


def _broadcasts(record: RunRecord, wraps: Mapping[int, Wrap]) -> int:
    """Broadcasts of buffers in a usual training step of the first rank; 1 where that was not recorded.

    The broadcasts of 32-bit indices when DDP rebuilds its buckets are not of buffers.
    """
    rank = min(wraps)
    track = record.track(rank)
    if track is None or record.stream("collectives").state != "complete":
        return 1
    types = {buffer.dtype for buffer in wraps[rank].buffers}
    counted = [
        entry.kind == "broadcast" and entry.origin == "ddp-forward" and (entry.dtype != "int32" or entry.dtype in types)
        for entry in record.signatures
    ]
    by_step = Counter(step for signature, step in zip(track.signature, track.step, strict=False) if counted[signature])
    return median_low(by_step.values()) if by_step else 0


def _waste(record: RunRecord, number: int, wraps: Mapping[int, Wrap], warning_bytes: int) -> Verdict | None:
    states: dict[int, dict[int, Mapping[str, str]]] = {}
    for entry in record.buffers:
        if entry.wrap == number:
            states.setdefault(entry.forward, {})[entry.rank] = entry.digests
    common = [by_rank for _, by_rank in sorted(states.items()) if len(by_rank) == len(wraps)]
    if len(common) < FORWARDS_NEEDED:
        return None
    inputs_differ = _inputs_differ(record, number) and _trained_twice_in_a_row(record, number, min(wraps))
    buffers = wraps[min(wraps)].buffers
    wasted, needed = list[TensorInfo](), list[TensorInfo]()
    for buffer in buffers:
        values = [{digests.get(buffer.name, "") for digests in by_rank.values()} for by_rank in common]
        if any("" in found for found in values):
            continue
        equal = all(len(found) == 1 for found in values)
        constant = len(set.union(*values)) == 1
        (wasted if equal and (constant or inputs_differ or _counts(buffer)) else needed).append(buffer)
    size = sum(buffer.size_bytes for buffer in wasted)
    if not size or (needed and size < warning_bytes):
        return None
    names = folded(buffer.name for buffer in wasted)
    model = wraps[min(wraps)].module_class or "the model"
    location = site_location(record.site(wraps[min(wraps)].site))
    return Verdict(
        sentence=f"{bytes_text(size)} of buffers of {model} are broadcast in every step and are already the same on "
        f"all ranks: {', '.join(names)}",
        remedy=_remedy(record.job.torch_version, location, bool(needed), by_user=wraps[min(wraps)].by_user),
        locations=location,
        because=(
            f"{', '.join(names)}: digests on {len(wraps)} ranks were equal before each of {len(common)} "
            "synchronised forwards",
            location,
            {
                "bytes_per_step": size,
                "broadcasts_per_step": _broadcasts(record, wraps),
                "buffers": len(wasted),
                "forwards": len(common),
            },
        ),
        severity=None if size >= warning_bytes else Severity.ADVICE,
        what_if=("broadcast_buffers=false",),
    )


def _counts(buffer: TensorInfo) -> bool:
    """Return whether a buffer is a counter as BatchNorm's ``num_batches_tracked``, which advances alike everywhere."""
    return not buffer.shape and "int" in buffer.dtype


def _trained_twice_in_a_row(record: RunRecord, number: int, rank: int) -> bool:
    """Return whether a rank's training forwards ever followed each other: an evaluation between them broadcasts too."""
    own = [forward for forward in record.forwards if (forward.wrap, forward.rank) == (number, rank)]
    return any(one.gradients and one.training and other.gradients and other.training for one, other in pairwise(own))


def _inputs_differ(record: RunRecord, number: int) -> bool:
    of_wrap = [one for one in record.forwards if one.wrap == number and one.synchronised and one.training]
    by_rank = grouped((one for one in of_wrap if one.input_digest), lambda one: one.rank)
    steps = list(zip(*by_rank.values(), strict=False)) if len(by_rank) > 1 else []
    return bool(steps) and all(len({one.input_digest for one in step}) > 1 for step in steps)


def _remedy(torch_version: str, location: Location | None, needed: bool, *, by_user: bool) -> str:
    parts = torch_version.split("+")[0].split(".")[:2]
    is_newer = [int("".join(filter(str.isdigit, part)) or 0) for part in parts] >= [2, 13]
    option = "forward_sync_buffers=False" if is_newer else "broadcast_buffers=False"
    where = "" if location is None else f" at {place(Frame(location.file, location.line))}"
    text = f"Pass {option} to DistributedDataParallel{where}" if by_user else _OF_FRAMEWORKS
    if needed:
        return (
            f"{text} if the buffers that differ between ranks may stay different (SyncBatchNorm makes running "
            "statistics agree), or turn constant buffers into plain attributes."
        )
    return f"{text}: the buffers keep their values, and the broadcast is saved."


_PAIRS_ONLY = ("PCIE", "NVL")
"""Names of GPUs whose NVLinks, where they have any, are bridges between two or four cards."""


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """The slowest link of a ring through the GPUs of a group."""

    kind: Literal["NVLink", "PCIe"]
    bytes_per_s: float
    """In one direction, by its standard; a well-tuned ring reaches 70 to 90% of it."""


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
    in_pairs = any(word in gpu.name.upper() for gpu in gpus for word in _PAIRS_ONLY)
    if len(nvlinks) == len(gpus) and (len(gpus) == 2 or not in_pairs):
        return Link(kind="NVLink", bytes_per_s=min(nvlinks))
    lanes = [gpu.pcie_bytes_per_s for gpu in gpus if gpu.pcie_bytes_per_s is not None]
    return Link(kind="PCIe", bytes_per_s=min(lanes)) if len(lanes) == len(gpus) else None


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
            backend=next((one.backend for one in record.groups if one.ranks == meeting.members), record.job.backend),
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
        backend, name = record.groups[meeting.group].backend, record.groups[meeting.group].name
        waiting = meeting.waiting_ns
        for kind in dict.fromkeys(meeting.kinds):
            at = [index for index, own in enumerate(meeting.kinds) if own == kind]
            blocked_ns = sum(column[index] for column in meeting.held_ns for index in at) / len(meeting.ranks)
            waited_ns = sum(column[index] for column in waiting for index in at) / len(meeting.ranks)
            # The last that came waited for no one.
            fastest_ns = sum(min(column[index] for column in meeting.held_ns) for index in at)
            sent_bytes = sum(meeting.size_bytes[index] for index in at)
            yield Traffic(
                group=_group_name(meeting.members, world_size, name),
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


def _group_name(ranks: tuple[int, ...], world_size: int, name: str = "") -> str:
    """Return who is in a group, behind the name of its dimension in a device mesh if it is one's."""
    members = f"all {world_size} ranks" if len(ranks) == world_size else rank_list(ranks)
    return f"{name} of {members}" if name else members
