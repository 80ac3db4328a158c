"""What may be changed on paper: the settings of a prediction, and how users write them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import Any, Literal

import msgspec

from ddpdoctor.errors import UsageError
from ddpdoctor.record.model import Wrap
from ddpdoctor.record.streams.measured import BucketLayout

# How DDP puts gradients into buckets, and when the gradients of each bucket are ready.

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
        trained = wrap.reduced
        sizes += [entry.size_bytes for entry in reversed(trained)]
        buckets += layout.sizes_bytes
        total += sum(entry.size_bytes for entry in trained)
        halved += sum(one.size_bytes for one in trained if one.dtype.removeprefix("torch.") in ("float32", "float64"))
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


Scaling = Literal["weak", "strong"]
MOST_RANKS = 65_536


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Changes to a job; a field that is None stays as it was in the run."""

    straggler: Literal["none"] | None = None
    """No rank is slower than the one in the middle."""
    workers: int | None = None
    """Worker processes of each training loader."""
    bucket_cap_mb: float | None = None
    first_bucket: bool | None = None
    """Beside ``bucket_cap_mb``: the first bucket is of 1 MiB, as under DDP's default cap."""
    accumulation: int | None = None
    """Micro-batches to an optimizer step, all but the last under ``no_sync``."""
    gradient_as_bucket_view: bool | None = None
    broadcast_buffers: bool | None = None
    static_graph: bool | None = None
    find_unused_parameters: bool | None = None
    hook: Literal["bf16_compress"] | None = None
    communication: Literal["hidden"] | None = None
    """Gradients cost nothing but the waiting for each other: the most that faster transfers may bring."""
    data: Literal["ready"] | None = None
    """Each batch is there when it is asked for: the most that anything done to the loaders may bring."""
    collectives: Literal["batched", "dropped"] | None = None
    """The explicit collectives of the user's code: those of a kind as one, or none."""
    host_syncs: Literal["dropped"] | None = None
    link_gbit_per_s: float | None = None
    """What the slowest link between the ranks carries in one direction."""
    link_speed: float | None = None
    """The bandwidth of the links, as a multiple of the run's."""
    ranks: int | None = None
    nodes: int | None = None
    internode_gbit_per_s: float | None = None
    internode_latency_us: float | None = None
    scaling: Scaling | None = None
    """With other ``ranks``: the same batch on each rank (weak), or the same global batch (strong)."""

    def named(self) -> dict[str, Any]:
        """Return the settings that are set, by name."""
        return {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}

    def text(self) -> str:
        """As users write them: ``bucket_cap_mb=100``; several with commas between."""
        return ", ".join(f"{name}={shown(value)}" for name, value in self.named().items())

    def also(self, other: Settings) -> Settings:
        """These settings and another's, which win."""
        return msgspec.structs.replace(self, **other.named())


def parse(words: Iterable[str]) -> Settings:
    """Read ``name=value`` words; raises UsageError for one that means nothing or cannot be."""
    found: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        name = name.strip().replace("-", "_")
        name = _ALIASES.get(name, name)
        if name not in _READERS:
            close = get_close_matches(name, _READERS, n=1)
            meant = f"; did you mean {close[0]}?" if close else ""
            raise UsageError(f"--set {word}: there is no setting {name!r}{meant}", f"There are: {', '.join(_READERS)}.")
        if not equals or not value.strip():
            raise UsageError(f"--set {word}: the value is missing", f"Write `--set {name}={_READERS[name][1]}`.")
        if name in found:
            raise UsageError(f"--set {name} is given twice")
        try:
            found[name] = _READERS[name][0](value.strip().lower())
        except ValueError as error:
            raise UsageError(
                f"--set {word}: {error if str(error) else 'that is not possible'}",
                f"Write `--set {name}={_READERS[name][1]}`.",
            ) from error
    settings = Settings(**found)
    if settings.nodes is not None and settings.ranks is not None and settings.ranks % settings.nodes:
        raise UsageError(
            f"{settings.ranks} ranks cannot be divided evenly among {settings.nodes} nodes", "Every node has as many."
        )
    if settings.scaling is not None and settings.ranks is None:
        raise UsageError("--set scaling means nothing without --set ranks")
    if settings.link_gbit_per_s is not None and settings.link_speed is not None:
        raise UsageError("either --set link_gbit_per_s or --set link_speed, not both")
    return settings


def _number(least: float, most: float, kind: type[int] | type[float] = float) -> Callable[[str], float]:
    what, form = ("a whole number", ",") if kind is int else ("a number", "g")

    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError as error:
            raise ValueError(f"expected {what}") from error
        if not least <= value <= most:
            raise ValueError(f"expected {what} from {least:{form}} to {most:{form}}")
        return value

    return read


def _flag(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError("expected true or false")
    return text == "true"


def _word(*words: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in words:
            raise ValueError(f"expected {' or '.join(words)}")
        return text

    return read


def shown(value: Any) -> str:
    """Return a value as users write it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


_READERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "straggler": (_word("none"), "none"),
    "workers": (_number(1, 1_024, int), "4"),
    "bucket_cap_mb": (_number(0.001, 1e6), "100"),
    "first_bucket": (_flag, "true"),
    "accumulation": (_number(1, 10_000, int), "4"),
    "gradient_as_bucket_view": (_flag, "true"),
    "broadcast_buffers": (_flag, "false"),
    "static_graph": (_flag, "true"),
    "find_unused_parameters": (_flag, "false"),
    "hook": (_word("bf16_compress"), "bf16_compress"),
    "communication": (_word("hidden"), "hidden"),
    "data": (_word("ready"), "ready"),
    "collectives": (_word("batched", "dropped"), "dropped"),
    "host_syncs": (_word("dropped"), "dropped"),
    "link_gbit_per_s": (_number(1e-3, 1e6), "100"),
    "link_speed": (_number(1e-3, 1e3), "2"),
    "ranks": (_number(1, MOST_RANKS, int), "64"),
    "nodes": (_number(1, MOST_RANKS, int), "8"),
    "internode_gbit_per_s": (_number(1e-3, 1e6), "100"),
    "internode_latency_us": (_number(0, 1e6), "20"),
    "scaling": (_word("weak", "strong"), "strong"),
}
"""How each is read, with an example."""
_ALIASES = {
    "num_workers": "workers",
    "no_sync": "accumulation",
    "forward_sync_buffers": "broadcast_buffers",
    "find_unused": "find_unused_parameters",
    "comm_hook": "hook",
}
