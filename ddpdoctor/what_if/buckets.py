"""How DDP puts gradients into buckets, and when the gradients of each bucket are ready."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ddpdoctor.record.model import TensorInfo, Wrap
from ddpdoctor.record.streams.measured import BucketLayout

MEBIBYTE = 1 << 20
DEFAULT_CAP_MB = 25.0
FIRST_BUCKET_BYTES = MEBIBYTE
"""DDP's default cap comes with a first bucket of 1 MiB, so that it leaves early; a cap that the user names does not
(torch 2.13, ``dist._DEFAULT_FIRST_BUCKET_BYTES``)."""

UNUSED_MAP_BYTES = 4
"""For each parameter: the map is of 32-bit integers."""


class Gradients(msgspec.Struct, frozen=True, kw_only=True):
    """The gradients of all wraps of a rank, in the order in which they get ready."""

    sizes_bytes: tuple[int, ...]
    """Of each parameter; empty where the record does not hold them."""
    layout_bytes: tuple[int, ...]
    """Of the buckets that DDP has made."""
    unused_map_bytes: int = 0
    """Of what is reduced behind the buckets where DDP looks for unused parameters: which of them were used."""
    float32_share: float
    """Share of the bytes that a cast to bfloat16 halves."""

    @property
    def total_bytes(self) -> int:
        """All gradients together."""
        return sum(self.layout_bytes)


def gradients_of(wraps: Sequence[Wrap], layouts: Sequence[BucketLayout]) -> Gradients | None:
    """Return the gradients of one rank's wraps; None where DDP has reported no bucket.

    Later wraps get their gradients first, as the last one in forward is the first in backward.
    """
    newest = {layout.wrap: layout for layout in layouts}
    sizes: list[int] = []
    buckets: list[int] = []
    halved = total = unused = 0
    for wrap in sorted(wraps, key=lambda wrap: -wrap.wrap):
        layout = newest.get(wrap.wrap)
        if layout is None:
            continue
        trained = [entry for entry in wrap.parameters if entry.requires_grad and entry.name not in wrap.ignored]
        sizes += [entry.size_bytes for entry in reversed(trained)]
        buckets += layout.sizes_bytes
        total += sum(entry.size_bytes for entry in trained)
        halved += sum(entry.size_bytes for entry in trained if _is_float32(entry))
        if wrap.options.get("find_unused_parameters") and not wrap.options.get("static_graph"):
            unused += UNUSED_MAP_BYTES * len(trained)
    if not buckets:
        return None
    # A module whose parameters were not all recorded cannot be put into other buckets.
    known = abs(total - sum(buckets)) <= 0.01 * sum(buckets)
    return Gradients(
        sizes_bytes=tuple(sizes) if known else (),
        layout_bytes=tuple(buckets),
        unused_map_bytes=unused,
        float32_share=halved / total if total else 0.0,
    )


def layout_with(sizes_bytes: Sequence[int], cap_mb: float, *, first_bytes: int = 0) -> tuple[int, ...]:
    """Return the buckets that DDP makes of gradients in this order: one is full once it has reached the cap."""
    cap_bytes = cap_mb * MEBIBYTE
    limit = first_bytes or cap_bytes
    buckets: list[int] = []
    filled = 0
    for size_bytes in sizes_bytes:
        filled += size_bytes
        if filled >= limit:
            buckets.append(filled)
            filled, limit = 0, cap_bytes
    return (*buckets, filled) if filled else tuple(buckets)


def ready_shares(layout_bytes: Sequence[int], seen_bytes: Sequence[int], bend: float = 0.0) -> tuple[float, ...]:
    """Return when each bucket of a layout is full, as a share of the lead of the first bucket of the layout that was
    seen.

    0 is the end of backward, 1 the moment at which the first bucket of the run was full; between them gradients are
    taken to get ready as evenly as their bytes. With ``bend`` above 0 they come later than that, below 0 earlier: the
    run tells when the first and the last bucket were full, and not what was between. Where the run had one bucket, 1 is
    the beginning of backward.
    """
    total = sum(layout_bytes)
    first = seen_bytes[0] if len(seen_bytes) > 1 else 0
    span = sum(seen_bytes) - first or 1
    shares, filled = [], 0
    for size_bytes in layout_bytes:
        filled += size_bytes
        left = max(0.0, (total - filled) * sum(seen_bytes) / (total or 1) / span)
        # Within the span the curve is bent; ahead of it, it continues straight.
        shares.append(left ** (1.0 + bend) if 0.0 < left < 1.0 else left)
    return tuple(shares)


def _is_float32(entry: TensorInfo) -> bool:
    return entry.dtype.removeprefix("torch.") in ("float32", "float64")
