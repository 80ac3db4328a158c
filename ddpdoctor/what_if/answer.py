"""Puts together what is predicted of a run: the table, best first, the best combination, and how it scales."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from statistics import fmean, median

import msgspec

from ddpdoctor.diagnosis.performance.stragglers import is_in_both
from ddpdoctor.diagnosis.sync_points import BUFFERS
from ddpdoctor.diagnosis.wording import bytes_text, count, milliseconds_text, rank_list, site_location
from ddpdoctor.errors import DdpDoctorError, NoGround
from ddpdoctor.finding import Finding, Gain, Location
from ddpdoctor.record.model import RunRecord
from ddpdoctor.what_if.observed import PHASES, Observed, observe, own_ns
from ddpdoctor.what_if.scenario import (
    Change,
    Curve,
    Interval,
    Model,
    Outcome,
    Point,
    WhatIf,
    host_sync_ns,
    rebuilt,
    without_straggler,
)
from ddpdoctor.what_if.settings import DEFAULT_CAP_MB, FIRST_BUCKET_BYTES, Scaling, Settings, parse

# The changes that are worth asking about in a run, what each costs, and the line that it concerns.

CAPS_MB = (1.0, 2.0, 5.0, 10.0, 25.0, 50.0, 100.0, 200.0)
"""The caps of the sweep; those that make the same buckets are asked for once."""
WORKERS = (1, 2, 4, 8)
ACCUMULATIONS = (2, 4, 8)
SPEEDS = (2.0, 10.0)
NO_SPLIT = "the split of latency and bandwidth is assumed (a small all-reduce in each step tells it)"
_BOUND = "a bound: the most that any of these can bring"
NO_CORE = "the ranks compute on all their cores, so that what is sent beside backward slows it down"
_CLEAR_WAIT = 0.01
"""Share of the step from which on waiting for data is worth a change."""


class Remedy(msgspec.Struct, frozen=True, kw_only=True):
    """A change in the user's words."""

    settings: Settings = Settings()
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
    singles = [Settings(straggler="none")] if late_ranks(observed) else []
    if waits > _CLEAR_WAIT * observed.step_ns and observed.record.loaders:
        singles += [Settings(workers=number) for number in WORKERS]
    singles += [Settings(bucket_cap_mb=cap) for cap in CAPS_MB if observed.gradients.sizes_bytes]
    if observed.synchronised > 1 and observed.micro_batches > 1:
        singles.append(Settings(accumulation=round(observed.micro_batches)))
    singles += [Settings(accumulation=round(observed.micro_batches * times)) for times in ACCUMULATIONS]
    if not all(bool(wrap.options.get("gradient_as_bucket_view")) for wrap in observed.record.wraps):
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
    names = settings.named()
    fixed = _without_value(observed)
    made = {name: part(observed, settings) for name, part in _PARTS.items() if name in names}
    parts = [(made | fixed)[name] for name in names if name in made or name in fixed]
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
    """Ranks that a prediction without stragglers makes faster, by 2% of the step or more."""
    return tuple(
        times.rank
        for times, evened in zip(observed.ranks, without_straggler(observed.ranks), strict=True)
        if sum(own_ns(times)) - sum(own_ns(evened)) > 0.02 * observed.step_ns * len(times.forward)
    )


def _straggler(observed: Observed, settings: Settings) -> Remedy:
    late = late_ranks(observed)
    return Remedy(
        title=f"{rank_list(late)} no slower than the others" if late else "no straggler",
        do=_what_is_late(observed, late) if late else "",
        note="the median rank represents all",
    )


def _what_is_late(observed: Observed, late: Sequence[int]) -> str:
    """Return in which phase late ranks lose most, with both times."""

    def mean_ns(phase: str, *, of_late: bool) -> float:
        return median(fmean(getattr(times, phase)) for times in observed.ranks if (times.rank in late) is of_late)

    own, elsewhere = ({phase: mean_ns(phase, of_late=side) for phase in PHASES} for side in (True, False))
    excess = {phase: own[phase] - elsewhere[phase] for phase in PHASES}
    longest = max(PHASES, key=lambda name: excess[name])
    parts = ("forward", "backward") if is_in_both(excess) else (longest,)
    name = {"data_wait": "wait for data", "other": "rest of the loop"}.get(parts[0], " and ".join(parts))
    took, usual = (milliseconds_text(sum(side[part] for part in parts)) for side in (own, elsewhere))
    takes = "they take" if len(parts) > 1 else "it takes"
    return f"look into the {name}: {takes} {took} of a step there, and {usual} on the other ranks"


def _room_for_workers(observed: Observed, workers: int) -> str:
    cores = observed.cores_per_rank
    if not cores:
        return "as long as there are cores and disk for them"
    more = "these" if workers > cores else "more"
    return f"each rank has {count(cores, 'core')}; {more} workers help only where they wait for a disk or a network"


def _workers(observed: Observed, settings: Settings) -> Remedy:
    loader = next((entry for entry in observed.record.loaders if entry.rank == observed.ranks[0].rank), None)
    return Remedy(
        title=f"num_workers={settings.workers}",
        memory=f"{count(settings.workers or 0, 'process', 'processes')} per rank, plus the batches that they prefetch",
        do=f"DataLoader(..., num_workers={settings.workers}, persistent_workers=True)",
        location=_site(observed, -1 if loader is None else loader.site),
        note=_room_for_workers(observed, settings.workers or 0),
    )


def _bucket_cap(observed: Observed, settings: Settings) -> Remedy:
    largest = min(observed.gradients.total_bytes, int((settings.bucket_cap_mb or 0) * (1 << 20)))
    return Remedy(
        memory=f"a bucket of {bytes_text(largest)}",
        do=f"DistributedDataParallel(..., bucket_cap_mb={settings.bucket_cap_mb:g})",
        location=_wrap_line(observed),
        note="; ".join([NO_SPLIT] * (not observed.fit.splits) + [NO_CORE] * observed.is_crowded),
    )


def _accumulation(observed: Observed, settings: Settings) -> Remedy:
    same = settings.accumulation == round(observed.micro_batches)
    forwards = observed.record.forwards
    return Remedy(
        title=f"accumulation={settings.accumulation}: micro-batches under no_sync",
        semantics=""
        if same
        else (
            f"{(settings.accumulation or 1) / observed.micro_batches:.3g} times as large a batch: adjust learning "
            "rate and schedule"
        ),
        do="`with model.no_sync():` around forward and backward of all micro-batches but the last",
        location=_site(observed, next((f.site for f in forwards if f.gradients and f.training), -1)),
        note="explicit collectives and the rest of the loop are taken to run for each micro-batch",
    )


def _unused(observed: Observed, settings: Settings) -> Remedy:
    static = bool(settings.static_graph)
    return Remedy(
        semantics="the graph must be the same in every step" if static else "each step must use all parameters",
        do=f"DistributedDataParallel(..., {'static_graph=True' if static else 'find_unused_parameters=False'})",
        location=_wrap_line(observed),
        note="at least: the search through the graph is saved as well, and was not measured",
    )


def _collectives(observed: Observed, settings: Settings) -> Remedy:
    own = sorted((m for m in observed.meetings if m.kind != BUFFERS), key=lambda m: -m.transfer_ns)
    names = ", ".join(meeting.kind for meeting in own[:3])
    dropped = settings.collectives == "dropped"
    return Remedy(
        title=f"{names} {'dropped' if dropped else 'as one call of each kind'}",
        semantics="what they compute is not there any more" if dropped else "",
        do="call it when something is logged, not in every step" if dropped else "put the values in one tensor",
        location=_site(observed, own[0].site) if own else None,
    )


def _link(observed: Observed, settings: Settings) -> Remedy:
    speed = settings.link_speed
    return Remedy(
        title=f"links {speed:g} times as fast" if speed else "",
        do="other hardware, or the link that is there already (see slow-link, DDP408)",
        note="latency stays",
    )


def _without_value(observed: Observed) -> dict[str, Remedy]:
    """Return the changes that are made or not made, by the names of their settings."""
    total_bytes, wrapped_at = observed.gradients.total_bytes, _wrap_line(observed)
    syncs_forward = any("forward_sync_buffers" in wrap.options for wrap in observed.record.wraps)
    reads = sorted(observed.record.host_reads, key=lambda read: -read.wait_ns)
    return {
        "gradient_as_bucket_view": Remedy(
            memory=f"saves {bytes_text(total_bytes)}",
            semantics="gradients may not be detached in place",
            do="DistributedDataParallel(..., gradient_as_bucket_view=True)",
            location=wrapped_at,
            note="what copying gradients costs is bounded, not measured",
        ),
        "broadcast_buffers": Remedy(
            title="buffers not broadcast",
            semantics="buffers (BatchNorm's running statistics) may differ between ranks",
            do=f"DistributedDataParallel(..., {'forward_sync' if syncs_forward else 'broadcast'}_buffers=False)",
            location=wrapped_at,
        ),
        "hook": Remedy(
            title="gradients sent as bfloat16",
            memory=f"{bytes_text(round(total_bytes / 2))} while they are sent",
            semantics="gradients are rounded to 8 bits of mantissa before they are added up",
            do="model.register_comm_hook(None, default_hooks.bf16_compress_hook)",
            location=wrapped_at,
            note="what the casts cost is bounded, not measured",
        ),
        "communication": Remedy(
            title="all communication of gradients hidden",
            do="send less or less often, over faster links, or let backward hide it",
            location=wrapped_at,
            note=_BOUND,
        ),
        "data": Remedy(
            title="no waiting for data",
            do="more workers, a faster disk, less work for each sample",
            note=_BOUND,
        ),
        "host_syncs": Remedy(
            title="no results read back in the loop",
            do="keep them on the GPU (loss.detach()) and read them when they are logged",
            location=_site(observed, reads[0].site) if reads else None,
            note="at most: the GPU may have been busy meanwhile",
        ),
    }


def _site(observed: Observed, site: int) -> Location | None:
    return site_location(observed.record.site(site)) if site >= 0 else None


def _wrap_line(observed: Observed) -> Location | None:
    wraps = [wrap for wrap in observed.record.wraps if wrap.site >= 0]
    return _site(observed, wraps[-1].site) if wraps else None


_PARTS = {
    "straggler": _straggler,
    "workers": _workers,
    "bucket_cap_mb": _bucket_cap,
    "accumulation": _accumulation,
    "static_graph": _unused,
    "find_unused_parameters": _unused,
    "collectives": _collectives,
    "link_speed": _link,
    "link_gbit_per_s": _link,
}


# How a job scales: throughput and efficiency by number of ranks, and what limits it at each.

DOUBLINGS = 4
"""The curve goes to so many times twice the ranks of the run."""
_CLEAR = 0.02


def curves(model: Model) -> Iterator[Curve]:
    """Yield weak and strong scaling, from one rank on, on as many nodes as the run reports."""
    for kind in ("weak", "strong"):
        points = [point for ranks in _numbers(model) if (point := _point(model, ranks, kind)) is not None]
        yield Curve(kind=kind, points=tuple(points), serial=_serial(model) if kind == "strong" else "")


def _numbers(model: Model) -> list[int]:
    """Return the numbers of ranks: doubled from those of the run, on one node no further than four times as many."""
    seen = len(model.observed.ranks)
    doublings = DOUBLINGS if model.observed.nodes > 1 else 2
    less = [seen >> shift for shift in range(1, seen.bit_length()) if not seen % (1 << shift)]
    return sorted({1, *less, *(seen << shift for shift in range(doublings + 1))})


def _point(model: Model, ranks: int, kind: Scaling) -> Point | None:
    observed = model.observed
    per_node = max(1, len(observed.ranks) // observed.nodes)
    nodes = max(1, -(-ranks // per_node)) if observed.nodes > 1 else 1
    one = Settings(ranks=1, nodes=1, scaling=kind, straggler="none")
    try:
        outcome = model.outcome(one if ranks == 1 else Settings(ranks=ranks, nodes=nodes, scaling=kind))
        alone = model.outcome(one)
    except DdpDoctorError:
        return None
    step, samples = outcome.step_ns, outcome.samples
    ideal = alone.speedup.value * ranks or 1.0
    return Point(
        ranks=ranks,
        nodes=nodes,
        step_ns=step,
        samples_per_s=step.per_second(samples) if samples and step.low else None,
        efficiency=Interval(
            *(value / ideal for value in (outcome.speedup.value, outcome.speedup.low, outcome.speedup.high))
        ),
        limit=_limit(model, outcome, ranks),
    )


def _limit(model: Model, outcome: Outcome, ranks: int) -> str:
    """Return what takes most of the step beside computing."""
    step_ns = outcome.best.mean_ns
    made = outcome.scenario
    sent_ns = sum(made.bucket_ns) * made.synchronised
    latency_ns = outcome.best.transfer_ns
    parts = {"data": outcome.best.data_ns, "slowest rank": fmean(outcome.best.waiting_ns)}
    if sent_ns or made.before_ns or made.after_ns:
        link = model.observed.fit.best
        of_latency = link.latency_ns * len(made.bucket_ns) * made.synchronised / sent_ns if sent_ns else 1.0
        parts["latency" if of_latency > 0.5 else "bandwidth"] = latency_ns
    name, cost_ns = max(parts.items(), key=lambda entry: entry[1])
    return name if cost_ns > _CLEAR * step_ns else "computation"


def _serial(model: Model) -> str:
    """Return what of a rank's own step does not shrink with its batch, and the most that follows from it."""
    ranks = model.observed.ranks
    fixed = fmean(fmean(times.optimizer) + fmean(times.other) for times in ranks)
    shrinking = fmean(fmean(times.data_wait) + fmean(times.forward) + fmean(times.backward) for times in ranks)
    share = fixed / (fixed + shrinking) if fixed + shrinking else 0.0
    if share < 0.001:
        return "nothing of a rank's own step stays when its batch shrinks, as far as the run shows"
    stays = f"{share:.1%} of a rank's own step (optimizer and the rest of the loop) stays when its batch shrinks"
    if share > 0.95:
        return f"{stays}: more ranks hardly make one batch faster"
    most = f"{1 / share:,.0f}" if share < 0.1 else f"{1 / share:.1f}"
    return f"{stays}: one batch is trained at most {most} times as fast as by one rank, however many there are (Amdahl)"


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
        samples_per_s=observed.samples / observed.step_ns * 1e9 if observed.samples else None,
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
        best = _best(model, changes)
        others = [(_value(change), change.speedup.value) for change in changes if change is not best]
        if "bucket_cap_mb" in best.settings:
            others += _as_default(model)
        found.append(msgspec.structs.replace(best, others=tuple(others)))
    return sorted(found, key=lambda change: -change.speedup.value)


def _best(model: Model, changes: Sequence[Change]) -> Change:
    """Return the value of a setting that is shown: one that brings something whatever the run leaves open, if there is
    one; of two that do the same, which rounding tells, the first one.

    Of caps the one that does well by the best guess and by the worst: with a latency of 3 ms, which one bucket does not
    tell, ten buckets made the job 1.17 times as fast where five made it 1.33 times.
    """
    if "workers" in changes[0].settings:
        return _fewest_workers(changes, model.observed.cores_per_rank)

    def worth(change: Change) -> float:
        is_cap = "bucket_cap_mb" in change.settings
        return change.speedup.value * (model.outcome(Settings(**change.settings)).least if is_cap else 1.0)

    return max(changes, key=lambda change: (change.recommended, round(worth(change), 2)))


def _fewest_workers(changes: Sequence[Change], cores: int) -> Change:
    """Return the smallest number that is as good as any, of those that there are cores for."""
    fitting = [change for change in changes if not cores or change.settings["workers"] <= cores] or changes[:1]
    best = max(change.speedup.value for change in fitting)
    return next(change for change in fitting if change.speedup.value >= best * AS_GOOD)


def _value(change: Change) -> str:
    (value,) = change.settings.values()
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def _as_default(model: Model) -> list[tuple[str, float]]:
    """DDP's default cap beside 25 as the user's own word, where its small first bucket makes a difference."""
    gradients = model.observed.gradients
    default = rebuilt(gradients, DEFAULT_CAP_MB, first_bytes=FIRST_BUCKET_BYTES)
    if default in (gradients.layout_bytes, rebuilt(gradients, DEFAULT_CAP_MB)):
        return []
    outcome = model.outcome(Settings(bucket_cap_mb=DEFAULT_CAP_MB, first_bucket=True))
    return [("left out, with a first bucket of 1 MiB", outcome.speedup.value)]


def _greedily(model: Model, changes: Sequence[Change]) -> list[Change]:
    """Return the best change, then the one that brings most beside it, and so on; of what a user can do."""
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
    if change.settings.get("collectives") == "dropped" or not change.recommended:
        return False
    if "accumulation" in names and change.settings["accumulation"] != round(observed.micro_batches):
        return False
    return names <= _NEUTRAL


def _change(model: Model, each: Remedy) -> Change:
    outcome = model.outcome(each.settings)
    step = outcome.step_ns
    samples = outcome.samples
    brings = outcome.speedup.value > LEAST_GAIN
    told = outcome.least >= 1.0 or not any(doubt in each.note for doubt in (NO_SPLIT, NO_CORE))
    return Change(
        settings=each.settings.named(),
        title=each.title,
        step_ns=step,
        samples_per_s=step.per_second(samples) if samples else None,
        speedup=outcome.speedup,
        memory=each.memory,
        semantics=each.semantics,
        do=each.do,
        location=each.location,
        note=each.note if told or not brings else f"no recommendation, as it may be slower: {each.note}",
        recommended=brings and told,
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


# What mending each finding of a run alone is predicted to bring.

AGAIN = 2.0
"""A gain is worked out again once the run has so many times as many steps: it costs some tens of milliseconds."""

MOST_RANKS = 128
"""Of more ranks a gain takes seconds, in which the monitor looks at nothing; ``ddpdoctor what-if`` takes its time."""


class Gains:
    """The gains of one run's findings, each remembered for a while."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, Gain | None]] = {}

    def added_to(self, findings: Sequence[Finding], record: RunRecord) -> tuple[Finding, ...]:
        """Return the findings, each with its gain where the run tells it; only a run's times stand for the job's."""
        if record.job.kind != "run" or len(record.step_tracks) > MOST_RANKS:
            return tuple(findings)
        steps = max((track.step[-1] for track in record.step_tracks if len(track)), default=0)
        model: list[Model] = []

        def gain_of(finding: Finding) -> Gain | None:
            known = self._known.get(finding.fingerprint)
            if known is not None and steps < AGAIN * known[0]:
                return known[1]
            gain = None
            # Whatever is wrong with the figures: the finding itself is reported.
            with suppress(Exception):
                if not model:
                    model.append(Model(observe(record)))
                gain = _gain(model[0], finding)
            self._known[finding.fingerprint] = steps, gain
            return gain

        return tuple(
            msgspec.structs.replace(finding, gain=gain_of(finding)) if finding.what_if else finding
            for finding in findings
        )


def _gain(model: Model, finding: Finding) -> Gain | None:
    """None where mending it brings no more than noise. A setting without a value is asked for as in the table."""
    (family, *others) = finding.what_if
    if others or "=" in family:
        speedup = model.outcome(parse(finding.what_if)).speedup
    else:
        speedup = _best(
            model, [_change(model, each) for each in remedies(model.observed) if each.family == family]
        ).speedup
    return None if speedup.value < 1.005 else Gain(speedup=speedup.value, low=speedup.low, high=speedup.high)
