"""What may be changed on paper: the settings of a prediction, and how users write them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any, Literal

import msgspec

from ddpdoctor.errors import UsageError

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
        return ", ".join(f"{name}={_shown(value)}" for name, value in self.named().items())

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
            raise UsageError(f"--set {word}: the value is missing", f"Write `--set {name}={_EXAMPLES[name]}`.")
        if name in found:
            raise UsageError(f"--set {name} is given twice")
        try:
            found[name] = _READERS[name](value.strip().lower())
        except ValueError as error:
            raise UsageError(
                f"--set {word}: {error if str(error) else 'that is not possible'}",
                f"Write `--set {name}={_EXAMPLES[name]}`.",
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


def _whole(least: int, most: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError as error:
            raise ValueError("expected a whole number") from error
        if not least <= value <= most:
            raise ValueError(f"expected a whole number from {least:,} to {most:,}")
        return value

    return read


def _number(least: float, most: float) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError as error:
            raise ValueError("expected a number") from error
        if not least <= value <= most:
            raise ValueError(f"expected a number from {least:g} to {most:g}")
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


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


_READERS: dict[str, Callable[[str], Any]] = {
    "straggler": _word("none"),
    "workers": _whole(1, 1_024),
    "bucket_cap_mb": _number(0.001, 1e6),
    "first_bucket": _flag,
    "accumulation": _whole(1, 10_000),
    "gradient_as_bucket_view": _flag,
    "broadcast_buffers": _flag,
    "static_graph": _flag,
    "find_unused_parameters": _flag,
    "hook": _word("bf16_compress"),
    "communication": _word("hidden"),
    "data": _word("ready"),
    "collectives": _word("batched", "dropped"),
    "host_syncs": _word("dropped"),
    "link_gbit_per_s": _number(1e-3, 1e6),
    "link_speed": _number(1e-3, 1e3),
    "ranks": _whole(1, MOST_RANKS),
    "nodes": _whole(1, MOST_RANKS),
    "internode_gbit_per_s": _number(1e-3, 1e6),
    "internode_latency_us": _number(0, 1e6),
    "scaling": _word("weak", "strong"),
}
_ALIASES = {
    "num_workers": "workers",
    "no_sync": "accumulation",
    "forward_sync_buffers": "broadcast_buffers",
    "find_unused": "find_unused_parameters",
    "comm_hook": "hook",
}
_EXAMPLES = {
    "straggler": "none",
    "workers": "4",
    "bucket_cap_mb": "100",
    "first_bucket": "true",
    "accumulation": "4",
    "gradient_as_bucket_view": "true",
    "broadcast_buffers": "false",
    "static_graph": "true",
    "find_unused_parameters": "false",
    "hook": "bf16_compress",
    "communication": "hidden",
    "data": "ready",
    "collectives": "dropped",
    "host_syncs": "dropped",
    "link_gbit_per_s": "100",
    "link_speed": "2",
    "ranks": "64",
    "nodes": "8",
    "internode_gbit_per_s": "100",
    "internode_latency_us": "20",
    "scaling": "strong",
}
