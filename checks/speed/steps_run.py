"""What costs time in a run: late batches, reads of results, slow links, many small collectives, slow or idle GPUs."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from statistics import median

import msgspec

from ddpdoctor.check import Reason, Verdict, Via
from ddpdoctor.diagnosis.performance.gpus import gpu_uses
from ddpdoctor.diagnosis.performance.stragglers import enough_steps, holds, standing, typical
from ddpdoctor.diagnosis.performance.summarise import summarise
from ddpdoctor.diagnosis.performance.summary import RunSummary, Traffic, threshold
from ddpdoctor.diagnosis.performance.traffic import link_of
from ddpdoctor.diagnosis.steps import RankSteps, measured_steps
from ddpdoctor.diagnosis.sync_points import GRADIENTS
from ddpdoctor.diagnosis.training.pass_lengths import training_loader
from ddpdoctor.diagnosis.wording import bytes_text, count, milliseconds_text, place, rank_list, site_location
from ddpdoctor.finding import Location, Severity, grouped
from ddpdoctor.record.model import RunRecord, Site
from ddpdoctor.record.streams.measured import HARMFUL, POWER_LIMIT, CallTrack, Gpu, GpuSample, HostRead
from ddpdoctor.record.streams.training import Loader

MUCH_MORE = 1.25
"""Times the typical share from which on the mean of the whole run is worth a word."""
NEARLY_ALL = 0.8
"""Share of the waiting in the first batches of passes from which on the workers keep up with the others, and of the
steps in which a line runs that runs in every step."""


def data_wait(record: RunRecord) -> Iterator[Verdict]:
    """Yield the wait for data if it takes more of the step than it may, on half of the ranks or more.

    One rank whose data come late is a straggler and keeps the others waiting elsewhere. Raises TooLittleEvidence where
    too few steps were measured.
    """
    limit = threshold(record, "input-bound")
    if not holds(record, lambda part: _middle(part)[0] > limit):
        return
    summary = typical(record, lambda part: _middle(part)[0])
    share, wait_ns, step_ns = _middle(summary)
    worst = max(summary.ranks, key=lambda rank: rank.phases.data_wait_ns)
    worst_ns, loader = worst.phases.data_wait_ns, training_loader(record)
    first_ns = _first_of_pass_ns(record, worst.rank, loader)
    numbers = {"wait_ns": wait_ns, "worst_wait_ns": worst_ns, "step_ns": step_ns}
    longest = f"rank {worst.rank} waits longest, {milliseconds_text(worst_ns)} a step"
    because: list[Reason] = [(longest, None, numbers, worst.rank)]
    # The line that makes the samples, where the ranks make them themselves.
    line = None if loader is None or loader.workers else standing(record, record.rank_numbers(), "data_wait")
    if line is not None:
        text = f"the ranks stood at {line.place} in {line.looks} of {line.of} looks during that time{line.others}"
        because.append((text, line.location, {"looks": line.looks, "looks_in_phase": line.of}))
    mean_share = _middle(enough_steps(record))[0]
    if first_ns:
        text = f"it is the first batch of each epoch that waits, {milliseconds_text(first_ns)} on rank {worst.rank}"
        because.append((f"{text}, and the others hardly do", None, {"first_wait_ns": first_ns}, worst.rank))
    elif mean_share >= MUCH_MORE * share:
        text = "these are the figures of the quarter of the steps in the middle; with single long waits it is "
        because.append((f"{text}{mean_share:.0%} of all steps together", None, {"mean_share": mean_share}))
    yield Verdict(
        sentence=f"training waits for data for {share:.0%} of the step ({milliseconds_text(wait_ns)} of "
        f"{milliseconds_text(step_ns)})",
        remedy=_remedy(loader, is_of_first=first_ns > 0),
        what_if=("data=ready",) if loader is None or first_ns else ("workers",),
        locations=None if loader is None else site_location(record.site(loader.site)),
        because=tuple(because),
    )


def _remedy(loader: Loader | None, *, is_of_first: bool) -> str:
    """Return what to do about waits for data; ``is_of_first``: for the first batch of each pass."""
    if loader is None:
        return "Prepare the batches in worker processes, ahead of the step that needs them."
    if not loader.workers:
        return "Give the loader worker processes: num_workers (cores over ranks) and persistent_workers=True."
    if is_of_first and loader.persistent:
        return "Its workers are kept already: let the data set open what it needs before the first sample is asked."
    if is_of_first:
        again = "its workers start anew for every epoch, and keep up after that"
        return f"Give the loader persistent_workers=True: {again}."
    kept = "" if loader.persistent else ", or keep the workers between epochs with persistent_workers=True"
    return (
        f"The {loader.workers} workers of each rank do not keep up: give it more, make the samples cheaper (smaller "
        f"files, less decoding){kept}."
    )


def _first_of_pass_ns(record: RunRecord, rank: int, loader: Loader | None) -> float:
    """Return the mean of the long waits of a rank, where they come once a pass and the other batches hardly wait."""
    track = next((track for track in record.step_tracks if track.rank == rank), None)
    if track is None or loader is None or not loader.length or len(track.step) < 2 * loader.length:
        return 0.0
    waits = dict(zip(track.step, track.data_wait_ns, strict=True))
    most = max(1, len(waits) // loader.length)
    longest = sorted(waits, key=lambda step: waits[step], reverse=True)[:most]
    at = {step % loader.length for step in longest}
    held = sum(waits[step] for step in longest)
    return held / most if len(at) == 1 and held > NEARLY_ALL * sum(waits.values()) else 0.0


def _middle(summary: RunSummary) -> tuple[float, float, float]:
    """Share, wait and step of the rank in the middle; of two the one that waits less."""
    waits = sorted(
        (rank.phases.data_wait_ns / rank.phases.step_ns, rank.phases.data_wait_ns, rank.phases.step_ns)
        for rank in summary.ranks
    )
    return waits[(len(waits) - 1) // 2] if waits else (0.0, 0.0, 0.0)


# Lines that read a result back from the GPU in every step, as a live run has sampled them.

EVERY_STEP = 0.9
"""Share of the sampled steps in which a line has to read."""
FEWEST_STEPS = 10
"""Sampled steps that it takes to judge."""
WAIT_SHARE = 0.01
"""Share of the step below which the wait costs nothing worth a word."""
_SPELLED = {"__bool__": "the truth value of a tensor", "__float__": "float(tensor)", "__int__": "int(tensor)"}


def sampled_reads(record: RunRecord) -> Iterator[Verdict]:
    """Yield the lines that read in nearly every sampled step, by file; of a line the rank that waits longest counts."""
    phases = summarise(record).phases
    least_ns = 0.0 if phases is None else WAIT_SHARE * phases.step_ns
    by_line: dict[tuple[Location, str], list[tuple[float, int]]] = {}
    for position, read in enumerate(record.host_reads):
        location = site_location(record.site(read.site))
        wait_ns = read.wait_ns / read.steps if read.steps else 0.0
        often = read.steps >= FEWEST_STEPS and read.steps_with >= EVERY_STEP * read.steps
        if location is not None and often and wait_ns >= least_ns:
            by_line.setdefault((location, read.method), []).append((wait_ns, position))
    for lines in grouped(by_line, lambda line: line[0].file).values():
        lines.sort(key=lambda line: line[0].line)
        longest = {line: max(by_line[line]) for line in lines}
        worst = max(lines, key=lambda line: longest[line][0])
        places = f" (one of {len(lines)} places)" if len(lines) > 1 else ""
        waits = f"{milliseconds_text(longest[worst][0])} each{places}"
        yield Verdict(
            sentence=f"{_spelled(worst[1])} waits for the GPU in every step, {waits}",
            what_if=("host_syncs=dropped",),
            locations=tuple(dict.fromkeys(location for location, _ in lines)),
            ranks=tuple(sorted({record.host_reads[at].rank for line in lines for _, at in by_line[line]})),
            because=tuple(_read_fact(record.host_reads[longest[line][1]], *line) for line in lines[:8]),
        )


def _read_fact(read: HostRead, location: Location, method: str) -> Reason:
    wait_ns = read.wait_ns / read.steps
    return (
        f"{_spelled(method)} in {read.steps_with} of {read.steps} sampled steps, {read.calls / read.steps:.1f} times "
        f"per step, waiting {milliseconds_text(wait_ns)} of it",
        location,
        {"steps_with": read.steps_with, "steps": read.steps, "wait_ns": wait_ns},
    )


def _spelled(method: str) -> str:
    """Return a read as users spell it."""
    return _SPELLED.get(method, f".{method}()")


# Process groups whose gradients move far slower than the link between their GPUs should carry them.

LEAST_BYTES = 10_000_000
"""Gradients of a step below this are moved in a time that latency decides."""
EXPECTED_SHARE = 0.5
"""Of the standard: NCCL reaches 30 to 80% of it."""


def slow_links(record: RunRecord) -> Iterator[Verdict]:
    """Yield the groups whose bandwidth on the bus is too small a share of their link's all along.

    Raises TooLittleEvidence where too few steps were measured.
    """
    limit = threshold(record, "slow-link")
    summary = enough_steps(record)
    links = {link.kind for group in record.groups if (link := link_of(record, group.ranks)) is not None}
    for entry in summary.traffic:
        if entry.kind != GRADIENTS or not _is_slow(entry, limit):
            continue
        if not holds(record, partial(_shows, entry.group, limit)):
            continue
        bandwidth, carried = entry.bus_bandwidth_bytes_per_s, entry.limit_bytes_per_s
        assert bandwidth and carried and entry.ns_per_step
        share = bandwidth / carried
        name = next(iter(links)) if len(links) == 1 else "link"
        yield Verdict(
            sentence=f"gradients of {entry.group} move at {bytes_text(round(bandwidth))}/s on the bus, {share:.0%} of "
            f"what {name} carries ({bytes_text(round(carried))}/s)",
            remedy="Look at `nvidia-smi topo -m` and `nvidia-smi nvlink --status`, and at what NCCL_DEBUG=INFO "
            "reports.",
            what_if=(f"link_gbit_per_s={EXPECTED_SHARE * carried * 8 / 1e9:g}",),
            because=(
                f"{bytes_text(round(entry.bytes_per_step))} a step take {milliseconds_text(entry.ns_per_step)}; a "
                f"ring over this link takes {milliseconds_text(entry.ns_per_step * share)} at full speed",
                None,
                {
                    "bus_bandwidth_bytes_per_s": bandwidth,
                    "limit_bytes_per_s": carried,
                    "bytes_per_step": entry.bytes_per_step,
                },
            ),
        )


def _is_slow(entry: Traffic, limit: float) -> bool:
    if entry.bus_bandwidth_bytes_per_s is None or entry.limit_bytes_per_s is None or not entry.ns_per_step:
        return False
    return entry.bytes_per_step >= LEAST_BYTES and entry.bus_bandwidth_bytes_per_s < limit * entry.limit_bytes_per_s


def _shows(group: str, limit: float, summary: RunSummary) -> bool:
    return any(entry.kind == GRADIENTS and entry.group == group and _is_slow(entry, limit) for entry in summary.traffic)


# Meshes whose shards are gathered between nodes, though those who hold replicas of one shard share a node.


def shards_across_nodes(record: RunRecord) -> Iterator[Verdict]:
    """Yield the groups that share shards across nodes, although a node that holds replicas has room for one of them."""
    node = {rank.rank: rank.node for rank in record.ranks}
    smallest = min(Counter(node.values()).values(), default=0)
    for module in sorted(record.sharded_modules, key=lambda one: (-one.module, one.rank)):
        for replicas in sorted({ranks for ranks, _ in module.replicas}):
            if len(replicas) < 2 or len({node[rank] for rank in replicas}) > 1:
                continue
            for shards, (calls, moved) in sorted(_gathered(record, module.rank).items()):
                across = sorted({node[rank] for rank in shards})
                if len(set(shards) & set(replicas)) != 1 or len(across) < 2 or len(shards) > smallest:
                    continue
                made = next((one.site for one in record.waits if one.ranks == shards), module.site)
                location, nodes = site_location(record.site(made)), rank_list(across).replace("rank", "node")
                forward = site_location(record.site(module.site))
                yield Verdict(
                    sentence=f"the shards of {module.module_class} are gathered between nodes, and the ranks of each "
                    "node hold replicas of one another",
                    locations=location,
                    because=(
                        (
                            f"{rank_list(shards)}, which share shards, are on {nodes}: "
                            f"rank {module.rank} gathers and reduces them {count(calls, 'time')}, "
                            f"and hands in {bytes_text(moved)}",
                            forward,
                            {"calls": calls, "bytes": moved},
                        ),
                        (
                            f"{rank_list(replicas)}, which hold replicas of one shard, are "
                            f"{'both' if len(replicas) == 2 else 'all'} on node {node[replicas[0]]}",
                            location,
                        ),
                    ),
                )
                return


def _gathered(record: RunRecord, rank: int) -> dict[tuple[int, ...], tuple[int, int]]:
    """Return how often a rank gathers or reduces shards in each group, and how many bytes it has handed in there."""
    track, found = record.track(rank), dict[tuple[int, ...], tuple[int, int]]()
    for group, number in zip(track.group, track.signature, strict=True) if track is not None else ():
        signature, ranks = record.signatures[number], record.groups[group].ranks
        if signature.origin.startswith("fsdp-") and signature.kind != "all_reduce":
            calls, moved = found.get(ranks, (0, 0))
            found[ranks] = calls + 1, moved + signature.size_bytes
    return found


# Lines that run many small collectives a step, in a rehearsal or a live run.

FEWEST_CALLS = 8
"""Of one line in a step, from which on they are many."""
SMALL_BYTES = 1 << 20
"""In a call: what more than that takes is the transfer and not the latency."""
FEWEST_LINE_STEPS = 3
_KINDS = frozenset({"all_reduce", "reduce", "broadcast"})


class _Line(msgspec.Struct, kw_only=True):
    """What a rank ran from one call chain."""

    kind: str
    of: int
    """Steps of which it is known."""
    calls: int = 0
    size_bytes: int = 0
    blocked_ns: int = 0
    steps: set[int] = msgspec.field(default_factory=set)
    turns: set[tuple[int, str]] = msgspec.field(default_factory=set)
    """Step and subject: what each turn of a loop around it was about, where it has one."""

    @property
    def calls_per_step(self) -> float:
        return self.calls / len(self.steps)

    @property
    def is_of_every_step(self) -> bool:
        return self.of >= FEWEST_LINE_STEPS and len(self.steps) >= NEARLY_ALL * (self.of - 1)


def rehearsed_lines(record: RunRecord) -> Iterator[Verdict]:
    """Yield what the training steps of a rehearsal run from one line, on the rank that runs the fewest."""
    per_rank = [_rehearsed(record, rank) for rank in record.rank_numbers()]
    for site in per_rank[0] if per_rank else ():
        if all(site in lines and lines[site].is_of_every_step for lines in per_rank):
            line = min((lines[site] for lines in per_rank), key=lambda found: found.calls_per_step)
            # What an operation of torch runs inside has no loop of the script around it.
            looped = len(line.turns) >= FEWEST_CALLS * len(line.steps) / 2
            yield from _judged(record.site(site), line, looped=looped)


def _rehearsed(record: RunRecord, rank: int) -> dict[int, _Line]:
    """Return what a rank ran after its backwards, by the call chain."""
    times_ns = sorted(entry.time_ns for entry in record.backwards if entry.rank == rank)
    track, lines = record.track(rank), dict[int, _Line]()
    rows = () if track is None else zip(track.site, track.signature, track.started_ns, strict=True)
    for site, number, started_ns in rows:
        signature, step = record.signatures[number], bisect_right(times_ns, started_ns)
        if signature.kind not in _KINDS or signature.origin != "user" or not step or site < 0:
            continue
        line = lines.setdefault(site, _Line(kind=signature.kind, of=len(times_ns)))
        line.calls += 1
        line.size_bytes += signature.size_bytes
        line.steps.add(step)
        if signature.subject:
            line.turns.add((step, signature.subject))
    return lines


def live_lines(record: RunRecord) -> Iterator[Verdict]:
    """Yield what nearly every measured step of a live run runs from one line, with what it costs.

    That is what it took on the rank that it took least, which waited least for the others. Raises TooLittleEvidence
    where too few steps were measured.
    """
    summary = enough_steps(record)
    if summary.phases is None:
        return
    tracks = {track.rank: track for track in record.call_tracks}
    per_rank = [_live(tracks[steps.rank], steps) for steps in measured_steps(record) if steps.rank in tracks]
    for site, line in per_rank[0].items() if per_rank else ():
        if all(site in lines and lines[site].is_of_every_step for lines in per_rank):
            blocked_ns = min(lines[site].blocked_ns / len(lines[site].steps) for lines in per_rank)
            of_step = blocked_ns / summary.phases.step_ns
            limit = threshold(record, "many-small-collectives")
            yield from _judged(record.site(site), line, blocked_ns=blocked_ns, of_step=of_step, limit=limit)


def _live(track: CallTrack, steps: RankSteps) -> dict[int, _Line]:
    counted, lines = set(steps.step), dict[int, _Line]()
    # The ring holds the newest calls only, and of the oldest step maybe a part.
    known = sorted(counted.intersection(track.step))[1:]
    for row in range(len(track)):
        kind, site, step = track.kinds[track.kind[row]], track.site[row], track.step[row]
        if kind in _KINDS and site >= 0 and known and step >= known[0] and step in counted and track.left_at_ns[row]:
            line = lines.setdefault(site, _Line(kind=kind, of=len(known)))
            line.calls += 1
            line.size_bytes += track.size_bytes[row]
            line.blocked_ns += track.left_at_ns[row] - track.entered_at_ns[row]
            line.steps.add(step)
    return lines


def _judged(
    site: Site, line: _Line, *, looped: bool = True, blocked_ns: float = 0.0, of_step: float = 0.0, limit: float = 1.0
) -> Iterator[Verdict]:
    location, each = site_location(site), line.size_bytes // line.calls
    calls = round(line.calls_per_step)
    carried = f"{bytes_text(each)} each"
    if calls < FEWEST_CALLS or each >= SMALL_BYTES:
        yield Verdict(wrong=False, sentence=f"it runs {count(calls, 'time')} a step, {carried}", locations=location)
    elif looped:
        cost = f", which take {milliseconds_text(blocked_ns)} of the step ({of_step:.0%})" if blocked_ns else ""
        numbers = {
            "calls": line.calls,
            "steps": len(line.steps),
            "bytes_per_call": each,
            "blocked_ns_per_step": blocked_ns,
        }
        yield Verdict(
            sentence=f"every training step runs {calls} small collectives one after the other at "
            f"{place(site.innermost)}, {carried}{cost}",
            locations=location,
            severity=Severity.WARNING if of_step >= limit else None,
            because=(
                f"each rank ran {line.kind} {line.calls:,} times in {count(len(line.steps), 'step')}",
                Via(location, site.frames),
                numbers,
            ),
        )


# GPUs that run slower than they could while they are at work, and those that mostly stand still.

WINDOW_NS = 120_000_000_000
MINIMUM_SAMPLES = 10
"""Looks at a GPU at work, one a second, before anything is said."""
AT_WORK_PERCENT = 50.0
HARMFUL_SHARE = 0.25
"""Share of the looks in which the hardware protects itself."""
HARMFUL_CLOCK = 0.95
"""A clock that is hardly lower than the highest costs nothing."""
LOWERED_LIMIT = 0.8
"""A power limit below this share of the default was set by someone …"""
LOWERED_CLOCK = 0.8
"""… and matters where the clock falls below this share of the highest."""


def throttled_gpus(record: RunRecord) -> Iterator[Verdict]:
    """Yield the GPUs of ranks that are slowed down, by the samples of the last two minutes in which they were at work.

    Those with one cause together. A power limit alone is none: every GPU that multiplies large matrices reaches it.
    """
    at_work = [(gpu, looks) for gpu in record.gpus if gpu.ranks and len(looks := _at_work(gpu)) >= MINIMUM_SAMPLES]
    lowest = threshold(record, "gpu-throttled")
    clocks = [_clock(looks) for _, looks in at_work]
    causes: dict[tuple[str, bool], list[tuple[Gpu, str]]] = {}
    for position, (gpu, looks) in enumerate(at_work):
        others = (at for at, (other, _) in enumerate(at_work) if at != position and other.name == gpu.name)
        peers = [clocks[at] for at in others]
        slow = _slow(gpu, looks, clocks[position], median(peers) if peers else None, lowest)
        if slow is not None:
            cause, harmful, figures = slow
            causes.setdefault((cause, harmful), []).append((gpu, figures))
    for (cause, harmful), group in causes.items():
        ranks = tuple(sorted({rank for gpu, _ in group for rank in gpu.ranks}))
        subject = f"the GPU of {rank_list(ranks)}" if len(group) == 1 else f"each GPU of {rank_list(ranks)}"
        yield Verdict(
            sentence=f"{subject} {cause}",
            remedy="Look at the cooling and power of the machine, or exclude the GPU."
            if harmful
            else "Raise the limit with `nvidia-smi -pl`, if the limit is not needed.",
            what_if=("straggler=none",),
            ranks=ranks,
            because=tuple((figures, None) for _, figures in group[:4]),
            severity=None if harmful else Severity.ADVICE,
        )


def _slow(
    gpu: Gpu, looks: Sequence[GpuSample], clock: float, peers_clock: float | None, lowest: float
) -> tuple[str, bool, str] | None:
    """Return the cause, whether it does harm, and figures; ``lowest`` is the share of the peers' clock that is enough.

    It does no harm where someone only lowered the power limit.
    """
    highest = float(gpu.maximum_sm_clock_mhz or 0)
    at_most = f"at most {highest:,.0f} MHz"
    harmful = [reason for look in looks for reason in look.throttle_reasons if reason in HARMFUL]
    struck = [look for look in looks if not HARMFUL.isdisjoint(look.throttle_reasons)]
    if len(struck) >= HARMFUL_SHARE * len(looks) and _clock(struck) < HARMFUL_CLOCK * highest:
        return _cause(max(set(harmful), key=harmful.count)), True, _figures(gpu, struck, at_most)
    if peers_clock is not None and clock < lowest * peers_clock:
        peers = f"the GPUs of the other ranks: {peers_clock:,.0f} MHz"
        return _usual_cause(gpu, looks), True, _figures(gpu, looks, peers)
    capped = sum(POWER_LIMIT in look.throttle_reasons for look in looks) > len(looks) / 2
    if capped and _is_lowered(gpu) and clock < LOWERED_CLOCK * highest:
        return _usual_cause(gpu, looks), False, _figures(gpu, looks, at_most)
    return None


def _figures(gpu: Gpu, looks: Sequence[GpuSample], expected: str) -> str:
    parts = [f"GPU {gpu.index}: {_clock(looks):,.0f} MHz at work ({expected})"]
    temperatures = [look.temperature_c for look in looks if look.temperature_c is not None]
    if temperatures:
        parts.append(f"{max(temperatures):.0f} °C")
    powers = [look.power_w for look in looks if look.power_w is not None]
    if powers:
        limit = "" if gpu.power_limit_w is None else f" of {gpu.power_limit_w:.0f} W"
        parts.append(f"{median(powers):.0f} W{limit}")
    return ", ".join(parts)


def _usual_cause(gpu: Gpu, looks: Sequence[GpuSample]) -> str:
    """Return what the driver mostly gives as reason."""
    reasons = [reason for look in looks for reason in look.throttle_reasons]
    if not reasons:
        return "runs at a low clock rate"
    reason = max(dict.fromkeys(reasons), key=reasons.count)
    if reason == POWER_LIMIT and _is_lowered(gpu):
        return (
            f"is held at a power limit of {gpu.power_limit_w:.0f} W, where {gpu.default_power_limit_w:.0f} W is usual"
        )
    return _cause(reason)


def _cause(reason: str) -> str:
    return f"is {reason}" if not reason.startswith(("power", "clocks")) else f"is slowed down ({reason})"


def _is_lowered(gpu: Gpu) -> bool:
    limit_w, default_w = gpu.power_limit_w, gpu.default_power_limit_w
    return limit_w is not None and default_w is not None and limit_w < LOWERED_LIMIT * default_w


def _at_work(gpu: Gpu) -> list[GpuSample]:
    """Return the samples of the window in which it computed and told its clock."""
    since_ns = gpu.samples[-1].taken_at_ns - WINDOW_NS if gpu.samples else 0
    return [
        sample
        for sample in gpu.samples
        if sample.taken_at_ns > since_ns
        and sample.sm_clock_mhz is not None
        and (sample.utilisation_percent is None or sample.utilisation_percent >= AT_WORK_PERCENT)
    ]


def _clock(looks: Sequence[GpuSample]) -> float:
    return float(median(look.sm_clock_mhz or 0 for look in looks))


# GPUs that compute too little for reasons that no other finding of a run speaks of.

FEWEST_LOOKS = 20
"""Looks, one a second, before anything is said."""
UNEXPLAINED_SHARE = 0.6
"""Of the time in which a GPU may compute nothing: so much at least neither data nor exposed communication explain."""


def idle_gpus(record: RunRecord) -> Iterator[Verdict]:
    """Yield the GPUs that compute for less of the training than they should, all as one.

    Data wait (input-bound) and exposed communication have findings of their own and are no reason here.
    """
    lowest = threshold(record, "idle-gpu")
    least = UNEXPLAINED_SHARE * (1 - lowest)
    idle = [
        use
        for use in gpu_uses(record)
        if use.samples >= FEWEST_LOOKS
        and use.computing_percent < 100 * lowest
        and 1 - use.computing_percent / 100 - use.data_wait_share - use.exposed_share >= least
    ]
    if not idle:
        return
    idle.sort(key=lambda use: use.computing_percent)
    ranks = sorted({rank for use in idle for rank in use.ranks})
    worst, best = idle[0].computing_percent, idle[-1].computing_percent
    figure = f"{worst:.0f}%" if round(worst) == round(best) else f"{worst:.0f} to {best:.0f}%"
    compute = "GPU of {} computes" if len(idle) == 1 else "GPUs of {} compute"
    facts = []
    for use in idle[:4]:
        busy = f"the driver reads {use.utilisation_percent:.0f}%"
        if use.utilisation_percent - use.computing_percent >= 1:
            busy += f", of which {use.utilisation_percent - use.computing_percent:.0f}% is communication kernels alone"
        facts.append(
            f"GPU {use.index} ({rank_list(use.ranks)}): {busy}; of a step of {use.step_ns / 1e6:.1f} ms,"
            f" {use.data_wait_share:.0%} waits for data, {use.exposed_share:.0%} is exposed communication,"
            f" {use.explicit_share:.0%} explicit collectives"
        )
    yield Verdict(
        sentence=f"the {compute.format(rank_list(ranks))} for {figure} of the training",
        remedy="Make larger batches or use torch.compile, and take .item(), printing and other CPU work out of the"
        " loop.",
        ranks=tuple(ranks),
        because=tuple((text, None) for text in facts),
    )
