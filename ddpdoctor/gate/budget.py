"""What a step of a rehearsed job needs, in numbers that are the same in every run: its budget.

Every number is put down to a line of the user's, so that a difference can be too. Of each line the rank counts that
needs most. What is not counted: work outside of the training steps, and the time that anything takes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, get_args

import msgspec

from ddpdoctor.files.source_text import line_of
from ddpdoctor.findings.locations import plain, shown_path
from ddpdoctor.gate.windows import Window, by_pass, position, sizes, windows_of
from ddpdoctor.gate_section import Figure
from ddpdoctor.record.model import RunRecord, Wrap
from ddpdoctor.record.streams.collectives import Signature

# Amounts of the budget in words.

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def amount(figure: Figure, value: float) -> str:
    """Return a value of a figure, with its unit."""
    if figure.unit != "bytes":
        return f"{value:,.2f}".rstrip("0").rstrip(".")
    for size, unit in _UNITS:
        if value >= size:
            return f"{value / size:,.2f} {unit}"
    return f"{value:,.1f}".removesuffix(".0") + " B"


def share(figure: Figure) -> str:
    """Return the change in percent, such as ``+50%``; empty where there is none to tell."""
    if figure.before is None or figure.change == "same":
        return ""
    if not figure.before:
        return "new"
    return percent((figure.now - figure.before) / figure.before, signed=True)


def percent(share: float, *, signed: bool = False) -> str:
    """Return a share as ``63%``, below 10% with one digit."""
    return format(100 * share, f"{'+' if signed else ''}.{0 if abs(share) >= 0.0995 else 1}f").removesuffix(".0") + "%"


Metric = Literal[
    "collectives",
    "bytes_sent",
    "synchronised_backwards",
    "buffer_broadcasts",
    "host_synchronisations",
    "batches_per_pass",
    "samples_per_pass",
    "model_state_bytes",
]
METRICS: tuple[Metric, ...] = get_args(Metric)
PER_STEP: frozenset[Metric] = frozenset(METRICS[:5])
"""Counted between optimizer steps; the others are properties of the job."""
LONGEST_CODE = 200
"""Characters of a line's text that are kept to know it again."""


class Place(msgspec.Struct, frozen=True, order=True):
    """A line of the user's; ``line`` is where it stood, the rest is what it is known by again."""

    file: str
    """Relative to the working directory; the bare name of a file outside of it."""
    function: str
    code: str
    """The line's text without white space."""
    line: int

    @property
    def identity(self) -> tuple[str, str, str]:
        """What stays when lines move."""
        return self.file, self.function, self.code


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """How much of one metric one line needs."""

    metric: Metric
    what: str
    """What it does there: ``all_reduce``, ``gradients (all_reduce)``, ``.item()``, the data set's or model's class."""
    place: Place
    amounts: tuple[tuple[int, ...], ...]
    """Of a metric per step one number a window, by training pass; of others one number."""


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """All shares, in a fixed order."""

    windows: tuple[int, ...] = ()
    """How many steps were compared in each training pass."""
    shares: tuple[Share, ...] = ()


def budget_of(record: RunRecord, root: str) -> Budget:
    """Add up what each line needs. Paths are written relative to ``root``.

    The budget is empty for a record without two optimizer steps on every rank.
    """
    ranks = record.rank_numbers()
    windows = {rank: windows_of(record, rank) for rank in ranks}
    fewest = min((sizes(rows) for rows in windows.values()), default=())
    found: dict[tuple[Metric, str, Place], list[tuple[tuple[int, ...], ...]]] = {}
    place_of = _Places(record, root)
    for rank in ranks:
        for (metric, what, place), amounts in _per_step(record, rank, windows[rank], place_of).items():
            found.setdefault((metric, what, place), []).append(by_pass(windows[rank], amounts))
        for metric, what, place, amount in _fixed(record, rank, place_of):
            found.setdefault((metric, what, place), []).append(((amount,),))
    shares = [
        Share(metric=metric, what=what, place=place, amounts=_most(rows))
        for (metric, what, place), rows in found.items()
    ]
    order = {metric: number for number, metric in enumerate(METRICS)}
    return Budget(
        windows=fewest, shares=tuple(sorted(shares, key=lambda one: (order[one.metric], one.place, one.what)))
    )


class _Places:
    """Lines of a record's call chains."""

    def __init__(self, record: RunRecord, root: str) -> None:
        self._record = record
        self._root = root
        self._known: dict[int, Place] = {}

    def __call__(self, site: int) -> Place:
        """Return the user's line of a site; an empty place where no line of the user's is known."""
        if site not in self._known:
            self._known[site] = self._read(site)
        return self._known[site]

    def _read(self, site: int) -> Place:
        frame = self._record.site(site).innermost
        if frame is None:
            return Place("", "", "", 0)
        path = shown_path(frame.file, self._root)
        code = "".join(line_of(frame.file, frame.line).split())[:LONGEST_CODE]
        function = "" if frame.function == "<module>" else frame.function
        return Place(plain(os.path.basename(path) if os.path.isabs(path) else path), function, plain(code), frame.line)


PlaceOf = Callable[[int], Place]
Counted = dict[tuple[Metric, str, Place], list[int]]


def _per_step(record: RunRecord, rank: int, windows: tuple[Window, ...], place_of: PlaceOf) -> Counted:
    counted: Counted = {}
    if not windows:
        return counted
    for metric, what, site, time_ns, amount in _events(record, rank):
        index = position(windows, time_ns)
        if index is not None:
            row = counted.setdefault((metric, what, place_of(site)), [0] * len(windows))
            row[index] += amount
    return counted


def _events(record: RunRecord, rank: int) -> Iterator[tuple[Metric, str, int, int, int]]:
    """Yield metric, what, site, time and amount of everything that a rank did."""
    track = record.track(rank)
    for index in range(len(track) if track is not None else 0):
        assert track is not None
        signature = record.signatures[track.signature[index]]
        what, site, time_ns = signature_text(signature), track.site[index], track.started_ns[index]
        yield "collectives", what, site, time_ns, 1
        yield "bytes_sent", what, site, time_ns, signature.size_bytes
        if signature.origin == "ddp-forward":
            yield "buffer_broadcasts", what, site, time_ns, 1
    for backward in record.backwards:
        if backward.rank == rank and backward.synchronised:
            yield "synchronised_backwards", "backward", backward.site, backward.time_ns, len(backward.synchronised)
    for read in record.tensor_reads:
        if read.rank == rank:
            yield "host_synchronisations", f".{read.method}()", read.site, read.time_ns, 1


def signature_text(signature: Signature) -> str:
    """Say what a collective is: its kind, and whose it is when DDP makes it."""
    whose = {"ddp-backward": "gradients", "ddp-forward": "buffers", "ddp-construct": "new wrap", "join": "join"}
    name = whose.get(signature.origin, "")
    return f"{name} ({signature.kind})" if name else signature.kind


def _fixed(record: RunRecord, rank: int, place_of: PlaceOf) -> Iterator[tuple[Metric, str, Place, int]]:
    loaders = {loader.loader: loader for loader in record.loaders if loader.rank == rank}
    trained: dict[tuple[str, Place], tuple[int, int]] = {}
    for entry in record.passes:
        loader = loaders.get(entry.loader)
        if entry.rank == rank and entry.backwards and loader is not None:
            key = (loader.dataset_type or "data", place_of(loader.site))
            batches, samples = trained.get(key, (0, 0))
            trained[key] = max(batches, entry.true_length or 0), max(samples, entry.index_count or 0)
    for (what, place), (batches, samples) in trained.items():
        if batches:
            yield "batches_per_pass", what, place, batches
        if samples:
            yield "samples_per_pass", what, place, samples
    wraps = [wrap for wrap in record.wraps if wrap.rank == rank]
    stepped = {number for step in record.optimizer_steps if step.rank == rank for number in step.wraps}
    models = [wrap for wrap in wraps if wrap.wrap in stepped] or wraps
    by_model: dict[tuple[str, Place], int] = {}
    for wrap in models:
        key = (wrap.module_class or "the model", place_of(wrap.site))
        by_model[key] = by_model.get(key, 0) + _model_bytes(wrap)
    kept = sum(size.state_bytes for size in record.optimizer_sizes if size.rank == rank)
    for (what, place), amount in by_model.items():
        yield "model_state_bytes", what, place, amount
    if kept:
        types = sorted({size.type for size in record.optimizer_sizes if size.rank == rank and size.state_bytes})
        first = next((step.site for step in record.optimizer_steps if step.rank == rank), -1)
        yield "model_state_bytes", f"state of {', '.join(types)}", place_of(first), kept


def _model_bytes(wrap: Wrap) -> int:
    """Weights, gradients, DDP's buckets and buffers of one wrapped model."""
    weights = sum(tensor.size_bytes for tensor in wrap.parameters)
    gradients = sum(tensor.size_bytes for tensor in wrap.parameters if tensor.requires_grad)
    copies = 2 if wrap.options.get("gradient_as_bucket_view") is False else 1
    return weights + copies * gradients + sum(tensor.size_bytes for tensor in wrap.buffers)


def _most(rows: Iterable[tuple[tuple[int, ...], ...]]) -> tuple[tuple[int, ...], ...]:
    """Return the largest number of any rank in each window; ranks may have made different numbers of steps."""
    result: list[list[int]] = []
    for row in rows:
        for number, amounts in enumerate(row):
            if number == len(result):
                result.append([])
            for index, amount in enumerate(amounts):
                if index == len(result[number]):
                    result[number].append(amount)
                else:
                    result[number][index] = max(result[number][index], amount)
    return tuple(map(tuple, result))
