"""What a step of a rehearsed job needs, in numbers that are the same in every run: its budget.

Every number is put down to a line of the user's, so that a difference can be too. Of each line the rank counts that
needs most. What is not counted: work outside of the training steps, and the time that anything takes.
"""

from __future__ import annotations

import bisect
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise, zip_longest
from typing import Literal, get_args

import msgspec

from ddpdoctor.check import Outcome, OutcomeState
from ddpdoctor.errors import ExitCode
from ddpdoctor.examination import Examination, Figure, Verdict
from ddpdoctor.files.untrusted import line_of
from ddpdoctor.finding import grouped, plain, shown_path
from ddpdoctor.record.model import RunRecord, Wrap
from ddpdoctor.record.streams.collectives import Signature

# Amounts of the budget in words.

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def amount(figure: Figure, value: float) -> str:
    """Return a value of a figure, with its unit; to the byte where before and now are the same in a larger one."""
    if figure.unit != "bytes":
        return f"{value:,.2f}".rstrip("0").rstrip(".")
    before = figure.now if figure.before is None else figure.before
    hides = before != figure.now and _in_bytes(before) == _in_bytes(figure.now)
    return _in_bytes(value, () if hides else _UNITS)


def _in_bytes(value: float, units: tuple[tuple[int, str], ...] = _UNITS) -> str:
    for size, unit in units:
        if value >= size:
            return f"{value / size:,.2f} {unit}"
    return f"{value:,.1f}".removesuffix(".0") + " B"


def share(figure: Figure) -> str:
    """Return the change in percent, such as ``+50%``; empty where there is none to tell."""
    if figure.before is None or figure.change == "same":
        return ""
    if not figure.before:
        return "new"
    told = percent((figure.now - figure.before) / figure.before, signed=True)
    return f"less than {told[0]}0.1%" if told[1:] == "0%" else told


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
    return tuple(
        tuple(max(amounts) for amounts in zip_longest(*of_a_pass, fillvalue=0))
        for of_a_pass in zip_longest(*rows, fillvalue=())
    )


# The steps of a rehearsal that can be compared between runs, whatever the machine's speed.

# Puts the examinations of several targets together, for reports that are one document. Pure.

_WORST_FIRST = (
    *(OutcomeState.FINDINGS, OutcomeState.BOUND_HIT, OutcomeState.NOT_EVALUATED, OutcomeState.PASSED),
    OutcomeState.NOTHING_TO_LOOK_AT,
)
_CODES = (ExitCode.INTERRUPTED, ExitCode.FINDINGS, ExitCode.ERROR, ExitCode.INCONCLUSIVE, ExitCode.CLEAN)
"""What decides the exit code first: an interruption, then what is certainly wrong."""


def together(examinations: Sequence[Examination]) -> Examination:
    """One examination with all findings; the parts are kept in it, and the worst of each thing is what it says."""
    if len(examinations) == 1:
        return examinations[0]
    code = min((one.exit_code for one in examinations), key=_CODES.index)
    verdicts = [one.verdict for one in examinations]
    verdict: Verdict = (
        "findings" if "findings" in verdicts else "inconclusive" if "inconclusive" in verdicts else "clean"
    )
    worst = min(examinations, key=lambda one: _CODES.index(one.exit_code))
    findings = [finding for one in examinations for finding in one.findings]
    return msgspec.structs.replace(
        worst,
        target=", ".join(one.target for one in examinations),
        verdict=verdict,
        exit_code=code,
        complete=all(one.complete for one in examinations),
        findings=tuple(sorted(findings, key=lambda finding: finding.severity.order)),
        outcomes=_outcomes(examinations),
        refuted=tuple(refuted for one in examinations for refuted in one.refuted),
        notes=tuple(dict.fromkeys(note for one in examinations for note in one.notes)),
        parts=tuple(examinations),
    )


def _outcomes(examinations: Sequence[Examination]) -> tuple[Outcome, ...]:
    """Of each check the worst outcome."""
    worst: dict[str, Outcome] = {}
    for one in examinations:
        for outcome in one.outcomes:
            known = worst.get(outcome.code)
            if known is None or _WORST_FIRST.index(outcome.state) < _WORST_FIRST.index(known.state):
                worst[outcome.code] = outcome
    return tuple(worst[code] for code in sorted(worst))


class Window(msgspec.Struct, frozen=True):
    """The time between two optimizer steps of a rank, in ns since the epoch."""

    training_pass: int
    """n-th pass over a loader with training in it, from 0."""
    begin_ns: int
    end_ns: int


def windows_of(record: RunRecord, rank: int) -> tuple[Window, ...]:
    """Return the windows of one rank in the order of time; none when it made fewer than two steps in a pass.

    Passes of one step each, as with a single batch an epoch, are compared as if they were one pass: then what lies
    between two epochs is a part of the step.
    """
    steps = _step_times(record, rank)
    passes = _pass_of_each(record, rank, steps)
    if all(one != other for one, other in pairwise(passes)):
        passes = [0] * len(steps)
    return tuple(
        Window(own, *between)
        for (own, other), between in zip(pairwise(passes), pairwise(steps), strict=True)
        if own == other
    )


def position(windows: Sequence[Window], time_ns: int) -> int | None:
    """Return the index of the window that a moment lies in; None when it lies in none."""
    index = bisect.bisect_right([window.begin_ns for window in windows], time_ns) - 1
    return index if index >= 0 and time_ns <= windows[index].end_ns else None


def sizes(windows: Sequence[Window]) -> tuple[int, ...]:
    """Return how many windows each training pass has."""
    return tuple(Counter(window.training_pass for window in windows).values())


def by_pass(windows: Sequence[Window], amounts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Divide one number a window into one row a pass."""
    rows = grouped(zip(windows, amounts, strict=True), lambda row: row[0].training_pass)
    return tuple(tuple(amount for _, amount in row) for row in rows.values())


def _step_times(record: RunRecord, rank: int) -> list[int]:
    """Times of the steps of the rank's busiest optimizer: of a generator and its critic that take turns, one's."""
    steps = grouped((step for step in record.optimizer_steps if step.rank == rank), lambda step: step.optimizer)
    busiest = min(steps, key=lambda optimizer: (-len(steps[optimizer]), optimizer), default=None)
    return [] if busiest is None else sorted(step.time_ns for step in steps[busiest])


def _pass_of_each(record: RunRecord, rank: int, steps: Sequence[int]) -> list[int]:
    """Return the number of the training pass that each step belongs to."""
    forwards = sorted(
        (forward.time_ns, (forward.pass_loader, forward.pass_ordinal))
        for forward in record.forwards
        if forward.rank == rank and forward.gradients
    )
    if forwards:
        # By the batch that was trained on: loaders that fetch ahead end their pass before its last step.
        times = [time_ns for time_ns, _ in forwards]
        labels = [forwards[max(0, bisect.bisect_right(times, step) - 1)][1] for step in steps]
        numbers = {label: number for number, label in enumerate(dict.fromkeys(labels))}
        return [numbers[label] for label in labels]
    ends = sorted(entry.ended_ns for entry in record.passes if entry.rank == rank and entry.backwards)
    return [bisect.bisect_left(ends, step) for step in steps]
