"""Steps wait for communication that nothing hides.

What it finds
    In a live run: gradients that are in transfer for more than 10% of the step after backward has finished computing,
    and explicit collectives (buffers, SyncBatchNorm, the user's own) that take as much. The time in which the ranks
    wait for a late one is not counted: that is a straggler (DDP403). Ranks that take turns being late are reported if
    they wait for each other for more than 20% of the step. As advice: a backward that takes longer than all
    communication of gradients and hides less than half of it.

Why it is bad
    Every rank is idle for that time, and it grows with more ranks or a slower network. DDP sends a bucket of gradients
    as soon as it is full, while backward continues with the layers before it; a bucket that is full only when backward
    is over (bucket_cap_mb=500) follows the computation instead of overlapping with it.

Example
    model = DDP(Wide())                 # 400 MB of gradients
    for batch in loader:                # batch size 1: 30 ms of backward
        model(batch).mean().backward()

Remedy
    Send less or less often: larger batches, accumulation under no_sync(), gradients in bfloat16
    (bf16_compress_hook). Where batches differ in length, group them by length, so that ranks have equal work. Where
    backward could hide it: with one or two buckets a smaller bucket_cap_mb; else layers used in the order in which they
    were defined, no find_unused_parameters, and static_graph=True where the graph never changes.

When it is wrong
    If the job is small on purpose; a toy model shows 30% and more. Where most of the parameters belong to the layers
    next to the input (large embeddings), their gradients come last; on CPUs, computation and communication share cores.

References
    https://docs.pytorch.org/docs/stable/notes/ddp.html#internal-design
    https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html
"""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.check import Check, Reason, RunRecord
from ddpdoctor.diagnosis.performance.exposure import Exposure, exposures, unhidden
from ddpdoctor.diagnosis.performance.summary import Traffic
from ddpdoctor.diagnosis.wording import bytes_text, milliseconds_text, site_location
from ddpdoctor.finding import Finding, Location, Refuted, Severity

CHECK = Check(
    code="DDP401",
    name="exposed-communication",
    stands_for="exposed-communication",
    severity={"run": Severity.WARNING},
    needs=frozenset({"step_tracks", "call_tracks"}),
)
_REMEDIES = {
    "transfer": "Send less or less often: larger batches, accumulation under no_sync(), or gradients in bfloat16 "
    "(bf16_compress_hook).",
    "uneven": "Give the ranks equal work in each step: group samples by length, and pad or pack them alike.",
    "explicit": "Run these collectives less often, or several as one: reduce metrics when they are logged.",
}
_OF_SHARDS = "Send less: larger batches, or parameters in bfloat16 by MixedPrecisionPolicy."
_OF_ONE_UNIT = (
    "Call fully_shard on each layer as well as on the model, so that one is gathered while another computes; or send "
    "less: larger batches, or parameters in bfloat16 by MixedPrecisionPolicy."
)
_OF_SMALL_UNITS = (
    "Call fully_shard on groups of layers instead of single ones: units of {size} cost latency at each gather; or make "
    "fewer steps of larger batches."
)
# What one unit gathers in a step: before its forward, and again before its backward where it was resharded.
_GATHERS_OF_ONE_UNIT = 2
# A unit below this is gathered in less time than a call takes to begin on most links (1 MB at 10 GB/s: 100 µs).
_SMALL_UNIT_BYTES = 1_000_000
# Up to which a call costs latency and not bandwidth: a TCP link of 1 GB/s takes 66 µs for them.
_SMALL_BYTES = 65_536
_LINES_NAMED = 3
_FEW_BUCKETS = 2

_MENDED: dict[str, tuple[str, ...]] = {
    "transfer": ("communication=hidden",),
    "uneven": (),
    "explicit": ("collectives=dropped",),
}


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report the kinds of communication that take too much of the step."""
    for exposure in exposures(record):
        yield CHECK.finding(
            _title(exposure),
            basis="run",
            remedy=_remedy(exposure, record),
            what_if=() if _shards(exposure) else _MENDED[exposure.kind],
            locations=_lines(record) if exposure.kind == "explicit" else (),
            because=tuple(map(_fact, exposure.traffic[:4])),
        )
    yield from _unhidden(record)


def _unhidden(record: RunRecord) -> Iterator[Finding]:
    """Advise about communication that backward could have hidden, with its buckets."""
    found = unhidden(record)
    if found is None:
        return
    exposure, hidden = found
    sent = exposure.traffic[0]
    buckets = max(1.0, sent.calls_per_step)
    yield CHECK.finding(
        f"{hidden:.0%} of the communication of gradients is hidden, although backward computes for "
        f"{milliseconds_text(exposure.backward_compute_ns)} a step and {milliseconds_text(exposure.exposed_ns)} of "
        "transfer are exposed",
        basis="run",
        severity=Severity.ADVICE,
        remedy="Pass a smaller bucket_cap_mb to DDP, so that the first bucket is sent while backward computes."
        if buckets <= _FEW_BUCKETS
        else "Define layers in the order of their use, omit find_unused_parameters, and try static_graph=True.",
        what_if=("communication=hidden",),
        because=(
            f"{bytes_text(round(sent.bytes_per_step))} of gradients in {buckets:.3g} buckets of "
            f"{bytes_text(round(sent.bytes_per_step / buckets))} a step",
            None,
            {"bytes_per_step": sent.bytes_per_step, "buckets_per_step": sent.calls_per_step},
        ),
    )


def _remedy(exposure: Exposure, record: RunRecord) -> str:
    """Return the remedy for what was measured: latency is not mended by sending less."""
    calls = sum(entry.calls_per_step for entry in exposure.traffic)
    size = sum(entry.bytes_per_step for entry in exposure.traffic)
    small = bool(calls) and size / calls < _SMALL_BYTES
    if exposure.kind == "transfer" and small:
        return "Make fewer steps of larger batches: so few bytes cost latency, which no compression shortens."
    if exposure.kind == "explicit" and small and calls >= 2 and not _shards(exposure):
        return (
            f"Make one call of the {calls:.3g} of a step: stack the tensors, reduce them together and take them apart; "
            "or reduce only in steps that use the result."
        )
    remedy = _of_shards(exposure) if _shards(exposure) else _REMEDIES[exposure.kind]
    sent = any(wrap.buffers and wrap.options.get("broadcast_buffers") for wrap in record.wraps)
    if exposure.kind == "explicit" and sent and any(entry.kind == "broadcast" for entry in exposure.traffic):
        remedy += " Set broadcast_buffers=False where buffers need no sync."
    return remedy


def _shards(exposure: Exposure) -> bool:
    """Return whether these are the collectives of a sharded model: no one else scatters what is reduced."""
    return exposure.kind == "explicit" and any(entry.kind.startswith("reduce_scatter") for entry in exposure.traffic)


def _of_shards(exposure: Exposure) -> str:
    """Return the remedy by the units that were gathered: one for all, many small ones, or some that just are large."""
    gathers = [entry for entry in exposure.traffic if entry.kind.startswith("all_gather")]
    calls = sum(entry.calls_per_step for entry in gathers)
    if calls <= _GATHERS_OF_ONE_UNIT:
        return _OF_ONE_UNIT
    unit_bytes = sum(entry.bytes_per_step for entry in gathers) / calls
    if unit_bytes < _SMALL_UNIT_BYTES:
        return _OF_SMALL_UNITS.format(size=bytes_text(round(unit_bytes)))
    return _OF_SHARDS


def _lines(record: RunRecord) -> tuple[Location, ...]:
    """Return the lines of the user's collectives, those with the most calls first."""
    calls: dict[Location, int] = {}
    for track in record.call_tracks:
        for site in track.site:
            place = site_location(record.site(site)) if site >= 0 else None
            if place is not None:
                calls[place] = calls.get(place, 0) + 1
    return tuple(sorted(calls, key=lambda place: -calls[place])[:_LINES_NAMED])


def _title(exposure: Exposure) -> str:
    part = f"{exposure.share:.0%} of the step ({milliseconds_text(exposure.exposed_ns)} of "
    part += f"{milliseconds_text(exposure.step_ns)})"
    if exposure.kind == "uneven":
        return f"the ranks wait for each other for {part}, taking turns being late"
    if exposure.kind == "transfer":
        return f"backward waits for gradient transfer for {part}"
    if _shards(exposure):
        return f"gathering parameters and scattering gradients takes {part}"
    names = list(dict.fromkeys(entry.kind for entry in exposure.traffic))
    return f"collectives outside of backward ({', '.join(names[:3])}) take {part}"


def _fact(entry: Traffic) -> Reason:
    calls = f"{entry.calls_per_step:.3g}"
    noun = ("bucket" if entry.kind == "gradients" else "call") + "s" * (calls != "1")
    text = f"{entry.kind} of {entry.group}: {bytes_text(round(entry.bytes_per_step))} in {calls} {noun} a step"
    numbers: dict[str, int | float] = {"bytes_per_step": entry.bytes_per_step, "calls_per_step": entry.calls_per_step}
    if entry.bus_bandwidth_bytes_per_s is not None:
        numbers["bus_bandwidth_bytes_per_s"] = entry.bus_bandwidth_bytes_per_s
        text += f", at least {bytes_text(round(entry.bus_bandwidth_bytes_per_s))}/s on the bus"
    return text, None, numbers
