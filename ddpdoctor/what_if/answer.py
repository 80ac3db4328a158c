"""Puts together what is predicted of a run: the table, best first, the best combination, and how it scales."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ddpdoctor.diagnosis.wording import milliseconds_text
from ddpdoctor.record.model import RunRecord
from ddpdoctor.what_if.buckets import DEFAULT_CAP_MB
from ddpdoctor.what_if.observed import NoGround, Observed, observe
from ddpdoctor.what_if.predict import Model
from ddpdoctor.what_if.prediction import Change, Interval, WhatIf
from ddpdoctor.what_if.remedies import Remedy, remedies, remedy
from ddpdoctor.what_if.scaling_curve import curves
from ddpdoctor.what_if.scenario import default_layout, rebuilt
from ddpdoctor.what_if.settings import Settings

AS_GOOD = 0.98
"""2 workers that make the job 2.71 times as fast are as good as 8 that make it 2.73, and cost less."""
LEAST_GAIN = 1.01
"""A change joins a combination when it makes the job so much faster."""
MOST_COMBINED = 4
_NEUTRAL = frozenset({"workers", "bucket_cap_mb", "straggler", "accumulation", "collectives"})


def what_if(record: RunRecord, asked: Settings | None = None, name: str = "", directory: str = "") -> WhatIf:
    """Predict the changes that are worth asking about, or only what is ``asked`` for.

    Raises NoGround where the run does not hold what a prediction stands on, and UsageError for settings that cannot be.
    """
    observed = observe(record)
    model = Model(observed)
    left_out: list[str] = []
    if asked is not None:
        changes = [_change(model, remedy(observed, asked))]
        combination: list[Change] = []
    else:
        changes = _table(model, left_out)
        combination = _greedily(model, changes)
    unchanged = model.unchanged
    return WhatIf(
        name=name,
        directory=directory,
        ranks=len(observed.ranks),
        nodes=observed.nodes,
        steps=observed.steps,
        step_ns=observed.step_ns,
        samples_per_s=_per_s(observed.samples, observed.step_ns),
        replayed_ns=unchanged.mean_ns,
        error=model.error,
        exposed_ns=unchanged.exposed_ns,
        waiting_ns=unchanged.waiting_ns,
        links=observed.fit.ground,
        changes=tuple(changes),
        combination=tuple(combination),
        left_out=tuple(left_out),
        curves=tuple(curves(model)) if asked is None else (),
        notes=tuple(_notes(observed, model)),
    )


def _table(model: Model, left_out: list[str]) -> list[Change]:
    """Return the changes that are worth asking about, best first; of several values of one setting the best, with the
    others.

    Values that make the same buckets are asked for once.
    """
    families: dict[str, list[Change]] = {}
    layouts: set[tuple[int, ...]] = {model.observed.gradients.layout_bytes}
    for each in remedies(model.observed):
        cap_mb = each.settings.bucket_cap_mb
        if cap_mb is not None:
            layout = rebuilt(model.observed.gradients, cap_mb)
            if layout in layouts:
                continue
            layouts.add(layout)
        try:
            families.setdefault(each.family, []).append(_change(model, each))
        except NoGround as gap:
            left_out.append(f"{each.title}: {gap.message}")
    found = []
    for changes in families.values():
        # Rounded, so that of two that do the same the first one, which costs less, is taken.
        best = max(changes, key=lambda change: round(change.speedup.value, 2))
        if "workers" in best.settings:
            best = next(change for change in changes if change.speedup.value >= best.speedup.value * AS_GOOD)
        others = [(_value(change), change.speedup.value) for change in changes if change is not best]
        if "bucket_cap_mb" in best.settings:
            others += _as_default(model)
        found.append(msgspec.structs.replace(best, others=tuple(others)))
    return sorted(found, key=lambda change: -change.speedup.value)


def _value(change: Change) -> str:
    (value,) = change.settings.values()
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def _as_default(model: Model) -> list[tuple[str, float]]:
    """DDP's default cap beside 25 as the user's own word, where its small first bucket makes a difference."""
    gradients = model.observed.gradients
    if default_layout(gradients) in (gradients.layout_bytes, rebuilt(gradients, DEFAULT_CAP_MB)):
        return []
    outcome = model.outcome(Settings(bucket_cap_mb=DEFAULT_CAP_MB, first_bucket=True))
    return [("left out, with a first bucket of 1 MiB", outcome.speedup.value)]


def _greedily(model: Model, changes: Sequence[Change]) -> list[Change]:
    """Return the best change, then the one that brings most beside it, and so on; of what a user can do to the
    script.
    """
    usable = [change for change in changes if _may_join(model.observed, change)]
    together, found = Settings(), list[Change]()
    reached = 1.0
    while usable and len(found) < MOST_COMBINED:
        tried = []
        for change in usable:
            settings = together.also(Settings(**change.settings))
            try:
                tried.append((model.outcome(settings).speedup.value, settings, change))
            except NoGround:
                continue
        if not tried:
            break
        gain, settings, change = max(tried, key=lambda entry: entry[0])
        if gain < reached * LEAST_GAIN:
            break
        found.append(_change(model, remedy(model.observed, settings)))
        together, reached = settings, gain
        usable = [other for other in usable if not set(other.settings) & set(change.settings)]
    return found if len(found) > 1 else []


def _may_join(observed: Observed, change: Change) -> bool:
    """Only what leaves the training as it is: no larger batch, no rounding, nothing dropped, no other hardware."""
    names = set(change.settings)
    if change.settings.get("collectives") == "dropped" or change.speedup.value <= LEAST_GAIN:
        return False
    if "accumulation" in names and change.settings["accumulation"] != round(observed.micro_batches):
        return False
    return names <= _NEUTRAL


def _change(model: Model, each: Remedy) -> Change:
    outcome = model.outcome(each.settings)
    step = outcome.step_ns
    samples = outcome.samples
    return Change(
        settings=each.settings.named(),
        title=each.title,
        step_ns=step,
        samples_per_s=Interval(
            samples / step.value * 1e9, samples / step.high * 1e9, samples / max(1.0, step.low) * 1e9
        )
        if samples
        else None,
        speedup=outcome.speedup,
        memory=each.memory,
        semantics=each.semantics,
        do=each.do,
        location=each.location,
        note=each.note,
    )


def _notes(observed: Observed, model: Model) -> list[str]:
    notes = []
    if abs(model.error) > 0.05:
        notes.append(
            f"the replay of the run itself is {abs(model.error):.0%} off ({milliseconds_text(model.unchanged.mean_ns)} "
            f"for {milliseconds_text(observed.step_ns)}): the intervals are wider for that"
        )
    if len(observed.gradients.layout_bytes) < 2:
        notes.append(
            "the run had one bucket of gradients, so when they become ready in backward is unknown: in proportion to "
            "their bytes is assumed"
        )
    if any(wrap.communication_hook for wrap in observed.record.wraps):
        notes.append(
            "a communication hook of the script reduces the gradients: its cost is counted as part of the links"
        )
    if observed.on_device and observed.nodes == 1:
        notes.append("on GPUs, the model has not been validated against changed runs yet")
    return notes


def _per_s(samples: float, step_ns: float) -> float | None:
    return samples / step_ns * 1e9 if samples else None
