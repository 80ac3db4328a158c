"""The changes that are worth asking about in a run, what each costs, and the line that it concerns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from ddpdoctor.diagnosis.sync_points import BUFFERS
from ddpdoctor.diagnosis.wording import bytes_text, count, rank_list, site_location
from ddpdoctor.finding import Location
from ddpdoctor.what_if.observed import Observed
from ddpdoctor.what_if.scenario import host_sync_ns, without_straggler
from ddpdoctor.what_if.settings import Settings

CAPS_MB = (1.0, 2.0, 5.0, 10.0, 25.0, 50.0, 100.0, 200.0)
"""The caps of the sweep; those that make the same buckets are asked for once."""
WORKERS = (1, 2, 4, 8)
ACCUMULATIONS = (2, 4, 8)
SPEEDS = (2.0, 10.0)
_CLEAR_WAIT = 0.01
"""Share of the step from which on waiting for data is worth a change."""


class Remedy(msgspec.Struct, frozen=True, kw_only=True):
    """A change in the user's words."""

    settings: Settings
    title: str = ""
    memory: str = ""
    semantics: str = ""
    do: str = ""
    location: Location | None = None
    note: str = ""
    family: str = ""
    """Of several values of one setting the best is shown."""


def remedies(observed: Observed) -> Iterator[Remedy]:
    """Yield the changes that may bring something in this run."""
    waits = max(sum(times.data_wait) / len(times.data_wait) for times in observed.ranks)
    singles = [Settings(straggler="none")] if _is_uneven(observed) else []
    if waits > _CLEAR_WAIT * observed.step_ns and observed.record.loaders:
        singles += [Settings(workers=number) for number in WORKERS]
    singles += [Settings(bucket_cap_mb=cap) for cap in CAPS_MB if observed.gradients.sizes_bytes]
    if observed.synchronised > 1 and observed.micro_batches > 1:
        singles.append(Settings(accumulation=round(observed.micro_batches)))
    singles += [Settings(accumulation=round(observed.micro_batches * times)) for times in ACCUMULATIONS]
    if not _all_wraps(observed, "gradient_as_bucket_view"):
        singles.append(Settings(gradient_as_bucket_view=True))
    if any(meeting.kind == BUFFERS for meeting in observed.meetings):
        singles.append(Settings(broadcast_buffers=False))
    if observed.gradients.unused_map_bytes:
        singles += [Settings(find_unused_parameters=False), Settings(static_graph=True)]
    if observed.gradients.float32_share and not any(wrap.communication_hook for wrap in observed.record.wraps):
        singles.append(Settings(hook="bf16_compress"))
    own = [meeting for meeting in observed.meetings if meeting.kind != BUFFERS]
    if any(meeting.calls > 1 for meeting in own):
        singles.append(Settings(collectives="batched"))
    if own:
        singles.append(Settings(collectives="dropped"))
    if any(host_sync_ns(observed)):
        singles.append(Settings(host_syncs="dropped"))
    singles += [Settings(link_speed=speed) for speed in SPEEDS]
    for settings in singles:
        yield remedy(observed, settings)


def remedy(observed: Observed, settings: Settings) -> Remedy:
    """Return a change, or several, in the user's words."""
    parts = [_part(observed, name, settings) for name in settings.named() if name in _PARTS]
    names = settings.named()
    return Remedy(
        settings=settings,
        title=parts[0].title if len(names) == 1 and parts and parts[0].title else settings.text(),
        memory="; ".join(part.memory for part in parts if part.memory),
        semantics="; ".join(part.semantics for part in parts if part.semantics),
        do="; ".join(part.do for part in parts if part.do),
        location=next((part.location for part in parts if part.location is not None), None),
        note="; ".join(part.note for part in parts if part.note),
        family=next(iter(names)) if len(names) == 1 else "",
    )


def late_ranks(observed: Observed) -> tuple[int, ...]:
    """Ranks that a prediction without stragglers makes faster, by 2 % of the step or more."""
    return tuple(
        times.rank
        for times, evened in zip(observed.ranks, without_straggler(observed.ranks), strict=True)
        if _total(times.forward, times.backward, times.data_wait, times.optimizer, times.other)
        - _total(evened.forward, evened.backward, evened.data_wait, evened.optimizer, evened.other)
        > 0.02 * observed.step_ns * len(times.forward)
    )


def _is_uneven(observed: Observed) -> bool:
    return bool(late_ranks(observed))


def _total(*columns: Sequence[float]) -> float:
    return sum(map(sum, columns))


def _part(observed: Observed, name: str, settings: Settings) -> Remedy:
    return _PARTS[name](observed, settings)


def _straggler(observed: Observed, settings: Settings) -> Remedy:
    late = late_ranks(observed)
    return Remedy(
        settings=settings,
        title=f"{rank_list(late)} no slower than the others" if late else "no straggler",
        do="find what makes it late: `ddpdoctor report` shows the phase",
        note="the median rank represents all",
    )


def _workers(observed: Observed, settings: Settings) -> Remedy:
    loader = next((entry for entry in observed.record.loaders if entry.rank == observed.ranks[0].rank), None)
    return Remedy(
        settings=settings,
        title=f"num_workers={settings.workers}",
        memory=f"{count(settings.workers or 0, 'process', 'processes')} per rank, plus the batches that they prefetch",
        do=f"DataLoader(..., num_workers={settings.workers}, persistent_workers=True)",
        location=_site(observed, -1 if loader is None else loader.site),
        note="as long as there are cores and disk for them",
    )


def _bucket_cap(observed: Observed, settings: Settings) -> Remedy:
    largest = min(observed.gradients.total_bytes, int((settings.bucket_cap_mb or 0) * (1 << 20)))
    return Remedy(
        settings=settings,
        memory=f"a bucket of {bytes_text(largest)}",
        do=f"DistributedDataParallel(..., bucket_cap_mb={settings.bucket_cap_mb:g})",
        location=_wrap_line(observed),
        note="" if observed.fit.splits else "the split of latency and bandwidth is assumed",
    )


def _accumulation(observed: Observed, settings: Settings) -> Remedy:
    same = settings.accumulation == round(observed.micro_batches)
    forwards = observed.record.forwards
    return Remedy(
        settings=settings,
        title=f"accumulation={settings.accumulation}: micro-batches under no_sync",
        semantics=""
        if same
        else (
            f"{(settings.accumulation or 1) / observed.micro_batches:.3g} times as large a batch: adjust learning "
            "rate and schedule"
        ),
        do="`with model.no_sync():` around forward and backward of all micro-batches but the last",
        location=_site(observed, next((f.site for f in forwards if f.gradients and f.training), -1)),
        note="explicit collectives and code between the phases are taken to run for each micro-batch",
    )


def _bucket_view(observed: Observed, settings: Settings) -> Remedy:
    return Remedy(
        settings=settings,
        memory=f"saves {bytes_text(observed.gradients.total_bytes)}",
        semantics="gradients may not be detached in place",
        do="DistributedDataParallel(..., gradient_as_bucket_view=True)",
        location=_wrap_line(observed),
        note="what copying gradients costs is bounded, not measured",
    )


def _buffers(observed: Observed, settings: Settings) -> Remedy:
    new = any("forward_sync_buffers" in wrap.options for wrap in observed.record.wraps)
    return Remedy(
        settings=settings,
        title="buffers not broadcast",
        semantics="buffers (BatchNorm's running statistics) may differ between ranks",
        do=f"DistributedDataParallel(..., {'forward_sync_buffers' if new else 'broadcast_buffers'}=False)",
        location=_wrap_line(observed),
    )


def _unused(observed: Observed, settings: Settings) -> Remedy:
    static = bool(settings.static_graph)
    return Remedy(
        settings=settings,
        semantics="the graph must be the same in every step" if static else "each step must use all parameters",
        do=f"DistributedDataParallel(..., {'static_graph=True' if static else 'find_unused_parameters=False'})",
        location=_wrap_line(observed),
        note="at least: the search through the graph is saved as well, and was not measured",
    )


def _hook(observed: Observed, settings: Settings) -> Remedy:
    return Remedy(
        settings=settings,
        title="gradients sent as bfloat16",
        memory=f"{bytes_text(round(observed.gradients.total_bytes / 2))} while they are sent",
        semantics="gradients are rounded to 8 bits of mantissa before they are added up",
        do="model.register_comm_hook(None, default_hooks.bf16_compress_hook)",
        location=_wrap_line(observed),
        note="what the casts cost is bounded, not measured",
    )


def _communication(observed: Observed, settings: Settings) -> Remedy:
    return Remedy(
        settings=settings,
        title="all communication of gradients hidden",
        do="send less or less often, over faster links, or let backward hide it",
        location=_wrap_line(observed),
        note="a bound: the most that any of these can bring",
    )


def _data(observed: Observed, settings: Settings) -> Remedy:
    return Remedy(
        settings=settings,
        title="no waiting for data",
        do="more workers, a faster disk, less work for each sample",
        note="a bound: the most that any of these can bring",
    )


def _collectives(observed: Observed, settings: Settings) -> Remedy:
    own = sorted((m for m in observed.meetings if m.kind != BUFFERS), key=lambda m: -m.transfer_ns)
    names = ", ".join(meeting.kind for meeting in own[:3])
    dropped = settings.collectives == "dropped"
    return Remedy(
        settings=settings,
        title=f"{names} {'dropped' if dropped else 'as one call of each kind'}",
        semantics="what they compute is not there any more" if dropped else "",
        do="call it when something is logged, not in every step" if dropped else "put the values in one tensor",
        location=_site(observed, own[0].site) if own else None,
    )


def _host_syncs(observed: Observed, settings: Settings) -> Remedy:
    reads = sorted(observed.record.host_reads, key=lambda read: -read.wait_ns)
    return Remedy(
        settings=settings,
        title="no results read back in the loop",
        do="keep them on the GPU (loss.detach()) and read them when they are logged",
        location=_site(observed, reads[0].site) if reads else None,
        note="at most: the GPU may have been busy meanwhile",
    )


def _link(observed: Observed, settings: Settings) -> Remedy:
    speed = settings.link_speed
    return Remedy(
        settings=settings,
        title=f"links {speed:g} times as fast" if speed else "",
        do="other hardware, or the link that is there already (see slow-link, DDP408)",
        note="latency stays",
    )


def _site(observed: Observed, site: int) -> Location | None:
    return site_location(observed.record.site(site)) if site >= 0 else None


def _wrap_line(observed: Observed) -> Location | None:
    wraps = [wrap for wrap in observed.record.wraps if wrap.site >= 0]
    return _site(observed, wraps[-1].site) if wraps else None


def _all_wraps(observed: Observed, option: str) -> bool:
    return all(bool(wrap.options.get(option)) for wrap in observed.record.wraps)


_PARTS = {
    "straggler": _straggler,
    "workers": _workers,
    "bucket_cap_mb": _bucket_cap,
    "accumulation": _accumulation,
    "gradient_as_bucket_view": _bucket_view,
    "broadcast_buffers": _buffers,
    "static_graph": _unused,
    "find_unused_parameters": _unused,
    "hook": _hook,
    "communication": _communication,
    "data": _data,
    "collectives": _collectives,
    "host_syncs": _host_syncs,
    "link_speed": _link,
    "link_gbit_per_s": _link,
}
