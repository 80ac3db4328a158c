"""Passes the verdict of a gate: what is new, what grew, what is no longer reached. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

from ddpdoctor.errors import ExitCode
from ddpdoctor.examination import Change, Difference, Examination, Figure, GateSection, TimeComparison
from ddpdoctor.finding import Finding, Location, grouped, plain, shown_path, with_fingerprints
from ddpdoctor.findings import DIVERGENCES
from ddpdoctor.gate import budget_growth, reach, step_time_growth
from ddpdoctor.gate.baseline import Entry, KnownFinding, Rehearsed
from ddpdoctor.gate.budget import METRICS, PER_STEP, Budget, Metric, Place, Share, budget_of
from ddpdoctor.gate.reach import lost, reach_of

if TYPE_CHECKING:
    from ddpdoctor.record.model import RunRecord

# Compares two budgets, figure by figure and line by line. Pure.

LABELS: dict[Metric, tuple[str, Literal["", "bytes"]]] = {
    "collectives": ("collectives a step", ""),
    "bytes_sent": ("bytes sent a step", "bytes"),
    "synchronised_backwards": ("synchronised backwards a step", ""),
    "buffer_broadcasts": ("buffer broadcasts a step", ""),
    "host_synchronisations": ("host synchronisations a step", ""),
    "batches_per_pass": ("batches of a rank a pass", ""),
    "samples_per_pass": ("samples of a rank a pass", ""),
    "model_state_bytes": ("model state", "bytes"),
}
DDP_OWN = ("gradients (", "buffers (")
"""What DDP does by itself, as ``budget.signature_text`` calls it."""
SMALLEST = 1e-9
"""A difference below this is one of the division."""

Key = tuple[str, tuple[str, str, str]]


def compared(before: Budget | None, now: Budget, root: str, allowed_growth: float) -> tuple[Figure, ...]:
    """Compare every metric; one that neither budget has is left out.

    ``allowed_growth`` is a share of the value before: 0.05 lets a figure grow by 5%. Only steps that both budgets
    have are compared.
    """
    figures = [_figure(metric, before, now, root, allowed_growth) for metric in METRICS]
    return tuple(_put_down_to_the_model([figure for figure in figures if figure is not None]))


def _put_down_to_the_model(figures: Sequence[Figure]) -> Iterator[Figure]:
    """Of a model that changed, name the line that wraps it for what DDP sends, not the line that made DDP send it."""
    by_metric = {figure.metric: figure for figure in figures}
    model, synchronised = by_metric.get("model_state_bytes"), by_metric.get("synchronised_backwards")
    wrap = next((one for one in model.differences if one.location is not None), None) if model is not None else None
    if wrap is None or wrap.what.startswith("state of") or (synchronised and synchronised.change != "same"):
        yield from figures
        return
    for figure in figures:
        moved = [
            msgspec.structs.replace(one, what=f"{one.what} of {wrap.what}", location=wrap.location, shown=wrap.shown)
            if one.what.startswith(DDP_OWN)
            else one
            for one in figure.differences
        ]
        yield msgspec.structs.replace(figure, differences=tuple(moved))


def _figure(metric: Metric, before: Budget | None, now: Budget, root: str, allowed_growth: float) -> Figure | None:
    common = _common(before.windows, now.windows) if before is not None else now.windows
    per_step = metric in PER_STEP
    new = _amounts(now, metric, common if per_step else None)
    old = _amounts(before, metric, common if per_step else None) if before is not None else {}
    if not new and not old:
        return None
    total, total_before = sum(new.values()), sum(old.values())
    label, unit = LABELS[metric]
    differences: tuple[Difference, ...] = ()
    change: Change = "new"
    if before is not None:
        change = _change(total_before, total, allowed_growth)
        if change != "same":
            differences = tuple(_differences(metric, before, now, old, new, root))
    return Figure(
        metric=metric,
        label=label,
        unit=unit,
        before=total_before if before is not None else None,
        now=total,
        change=change,
        differences=differences,
    )


def _change(before: float, now: float, allowed_growth: float) -> Change:
    if abs(now - before) <= SMALLEST:
        return "same"
    if now < before:
        return "shrunk"
    return "within" if now <= before * (1 + allowed_growth) + SMALLEST else "grown"


def _common(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    """Return how many steps of each pass both have; those of ``other`` alone when that is none."""
    common = tuple(min(pair) for pair in zip(one, other, strict=False))
    return common if any(common) else tuple(other)


def _amounts(budget: Budget, metric: Metric, windows: tuple[int, ...] | None) -> dict[Key, float]:
    """Return what each line needs: a step of ``windows``, or once."""
    found: dict[Key, float] = {}
    for share in budget.shares:
        if share.metric == metric and not _varies(share):
            amount = float(share.amounts[0][0]) if windows is None else _per_step(share.amounts, windows)
            if amount:
                key = (share.what, share.place.identity)
                found[key] = found.get(key, 0.0) + amount
    return found


def _per_step(amounts: Sequence[Sequence[int]], windows: Sequence[int]) -> float:
    """The mean of the steps. The very first is left out where there are others: DDP settles its buckets after it."""
    compared = [list(row[:size]) for row, size in zip(amounts, windows, strict=False)]
    if sum(map(len, compared)) > 1 and compared[0]:
        del compared[0][0]
    steps = [amount for row in compared for amount in row]
    return sum(steps) / len(steps) if steps else 0.0


def _varies(share: Share) -> bool:
    """Return whether the size of what a line sends depends on the data: then it differs between runs, too."""
    if share.metric != "bytes_sent" or "(" in share.what:
        return False
    sent = [amount for row in share.amounts for amount in row if amount]
    return len(set(sent)) > 2


def _differences(
    metric: Metric, before: Budget, now: Budget, old: dict[Key, float], new: dict[Key, float], root: str
) -> Iterator[Difference]:
    places = {_key(share): share.place for share in (*before.shares, *now.shares) if share.metric == metric}
    here = {_key(share) for share in now.shares if share.metric == metric}
    changed = {key: (old.get(key, 0.0), new.get(key, 0.0)) for key in {**old, **new}}
    changed = {key: pair for key, pair in changed.items() if abs(pair[1] - pair[0]) > SMALLEST}
    for key in _moved(changed):
        del changed[key]
    for gone, new_key in _edited(changed):
        changed[new_key] = (changed.pop(gone)[0], changed[new_key][1])
    for key, (was, became) in sorted(changed.items(), key=lambda item: (item[1][0] - item[1][1], item[0])):
        place = places[key]
        location = None
        if key in here and place.line:
            file = f"{root.rstrip('/')}/{place.file}"
            location = Location(file=file, line=place.line, function=place.function)
        yield Difference(what=key[0], location=location, shown=_shown(place), before=was, now=became)


def _moved(changed: dict[Key, tuple[float, float]]) -> list[Key]:
    """Lines that do the same as before in another function or file: they brought nothing."""
    gone = {key for key, (_, became) in changed.items() if not became}
    moved: list[Key] = []
    for key, (was, became) in changed.items():
        if was:
            continue
        twin = next((one for one in gone if one[0] == key[0] and one[1][2] == key[1][2]), None)
        if twin is not None and abs(changed[twin][0] - became) <= SMALLEST:
            gone.discard(twin)
            moved += [key, twin]
    return moved


def _edited(changed: dict[Key, tuple[float, float]]) -> list[tuple[Key, Key]]:
    """Lines that were written anew: of one function and doing the same, where there is one such before and one now."""

    def by_function(keys: Iterable[Key]) -> dict[tuple[str, str, str], list[Key]]:
        return grouped(keys, lambda key: (key[0], *key[1][:2]))

    gone = by_function(key for key, (was, became) in changed.items() if was and not became)
    came = by_function(key for key, (was, became) in changed.items() if not was)
    return [(gone[kind][0], keys[0]) for kind, keys in came.items() if len(keys) == 1 == len(gone.get(kind, ()))]


def _key(share: Share) -> Key:
    return share.what, share.place.identity


def _shown(place: Place) -> str:
    return f"{place.file}:{place.line}" if place.line else "no line of the script"


NEVER_KNOWN = DIVERGENCES | {"hang"}
"""What a rehearsal proves to hang or to compute something else is red, whatever a baseline says."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What a target is compared with, and how."""

    against: str
    """The baseline file, or ``the revision REV``."""
    before: Entry | None
    """None where nothing is compared: a baseline is being written, or the revision could not be rehearsed."""
    allowed_growth: float = 0.0
    ignored: frozenset[str] = frozenset()
    """Codes of this gate's own findings that the user does not want."""
    update: str = ""
    """The command that agrees on what is found now; empty where a revision is compared, and there is none."""
    again: str = ""
    """The command that examines and compares again."""
    times: TimeComparison | None = None
    notes: tuple[str, ...] = ()


def entry_of(examination: Examination, record: RunRecord) -> Entry:
    """Return what a baseline keeps of a rehearsal."""
    job = record.job
    return Entry(
        rehearsed=Rehearsed(
            ranks=job.world_size,
            layout=job.layout,
            device=job.device,
            batches=job.batches,
            batch_size=job.batch_size,
        ),
        torch=job.torch_version.partition("+")[0],
        findings=tuple(sorted(_known(finding, examination.root) for finding in examination.findings)),
        budget=budget_of(record, examination.root),
        reach=reach_of(record, examination.root),
        equivalence=examination.equivalence.status if examination.equivalence is not None else msgspec.UNSET,
    )


def may_be_agreed_on(examination: Examination) -> bool:
    """Return whether a baseline may be written of this: the rehearsal reached its end, and nothing hung or parted."""
    return examination.rehearsal.status == "completed" and not any(map(_is_never_known, examination.findings))


def judged(examination: Examination, now: Entry | None, wanted: Wanted) -> Examination:
    """Leave out what was known before, add what grew and what is no longer reached, and pass the verdict.

    ``now`` is None where nothing was rehearsed. Only rehearsals that reached their end are compared.
    """
    before = wanted.before
    known = {finding.fingerprint for finding in before.findings} if before is not None else set()
    standing = [finding for finding in examination.findings if _stands(finding, known)]
    seen = {finding.fingerprint for finding in examination.findings}
    completed = now is not None and examination.rehearsal.status == "completed"
    doubt = ""
    figures: tuple[Figure, ...] = ()
    own: list[Finding] = []
    if completed and now is not None:
        has_budget = before is not None and bool(before.budget.shares)
        incomparable = doubt = _incomparable(before, now, wanted) if has_budget else ""
        untold = examination.equivalence is not None and examination.equivalence.status == "inconclusive"
        if not doubt and untold and before is not None and before.equivalence in ("equal", "differs"):
            doubt = "whether the ranks train what one process would was known before, and is not now"
        usable = before if has_budget and not incomparable else None
        figures = compared(usable.budget if usable else None, now.budget, examination.root, wanted.allowed_growth)
        own = [*budget_growth.findings(figures, wanted.against, wanted.update)]
        if usable is not None and usable.reach is not None and now.reach is not None:
            lines = lost(usable.reach, now.reach, examination.root)
            own += reach.findings(lines, wanted.against, examination.root, wanted.update)
        if wanted.times is not None and wanted.times.slower:
            own.append(step_time_growth.finding(wanted.times, wanted.against))
    own = [finding for finding in own if finding.code not in wanted.ignored]
    # What grew is often the effect of what another check has found, which leads where it weighs as much.
    found = (*standing, *with_fingerprints(own, examination.root))
    findings = tuple(sorted(found, key=lambda finding: finding.severity.order))
    gone = tuple(one.shown for one in before.findings if one.fingerprint not in seen) if before and completed else ()
    section = GateSection(
        against=wanted.against,
        figures=tuple(figures),
        known=len(examination.findings) - len(standing),
        gone=gone,
        allowed_growth=wanted.allowed_growth,
        steps=sum(now.budget.windows) if now is not None else 0,
        times=wanted.times,
        doubt=doubt,
        reproduce=wanted.again,
        accept=wanted.update if findings and may_be_agreed_on(examination) else "",
        notes=(*wanted.notes, *_notes(before, now, figures, gone, wanted.update)),
    )
    return with_verdict(msgspec.structs.replace(examination, findings=findings, gate=section), doubt)


def with_verdict(examination: Examination, doubt: str = "") -> Examination:
    """Return the examination with the verdict that its findings and its completeness lead to."""
    complete = examination.complete and not doubt
    if any(finding.severity.at_least(examination.fail_on) for finding in examination.findings):
        return msgspec.structs.replace(examination, verdict="findings", exit_code=ExitCode.FINDINGS, complete=complete)
    if complete:
        return msgspec.structs.replace(examination, verdict="clean", exit_code=ExitCode.CLEAN)
    return msgspec.structs.replace(examination, verdict="inconclusive", exit_code=ExitCode.INCONCLUSIVE, complete=False)


def pruned(before: Entry, now: Entry, figures: Iterable[Figure]) -> Entry:
    """Return the entry without what is no longer there; nothing new is taken in."""
    seen = {finding.fingerprint for finding in now.findings}
    kept = tuple(finding for finding in before.findings if finding.fingerprint in seen)
    grew = any(figure.change in ("grown", "within") for figure in figures)
    return msgspec.structs.replace(before, findings=kept, budget=before.budget if grew else now.budget)


def _known(finding: Finding, root: str) -> KnownFinding:
    place = finding.location
    where = f"{shown_path(place.file, root)}: " if place is not None else ""
    return KnownFinding(fingerprint=finding.fingerprint, code=finding.code, shown=plain(f"{where}{finding.name}"))


def _stands(finding: Finding, known: set[str]) -> bool:
    return finding.fingerprint not in known or _is_never_known(finding)


def _is_never_known(finding: Finding) -> bool:
    return finding.trouble in NEVER_KNOWN and "rehearsal" in finding.basis


def _incomparable(before: Entry | None, now: Entry, wanted: Wanted) -> str:
    if before is None or before.rehearsed == now.rehearsed:
        return ""
    old, new = msgspec.structs.asdict(before.rehearsed), msgspec.structs.asdict(now.rehearsed)
    differ = [f"{name.replace('_', ' ')} {old[name] or 'kept'}" for name in old if old[name] != new[name]]
    here = [f"{new[name] or 'kept'}" for name in old if old[name] != new[name]]
    return (
        f"{wanted.against} was written by a rehearsal with {', '.join(differ)}, and this one has {', '.join(here)}: "
        "rehearse the same way" + (f", or rewrite it: `{wanted.update}`" if wanted.update else "")
    )


def _notes(
    before: Entry | None, now: Entry | None, figures: Iterable[Figure], gone: tuple[str, ...], update: str
) -> list[str]:
    notes = []
    shrunk = [figure.label for figure in figures if figure.change == "shrunk"]
    if shrunk or gone:
        what = [f"less than before: {', '.join(shrunk)}"] if shrunk else []
        what += [f"no longer found: {', '.join(gone)}"] if gone else []
        notes.append("; ".join(what) + (f". `{update}` locks this in" if update else ""))
    if before is not None and now is not None and before.torch != now.torch:
        notes.append(
            f"before it was torch {before.torch}, now it is {now.torch}, which may bucket gradients differently"
        )
    return notes
