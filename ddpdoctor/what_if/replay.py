"""Replays the steps of a job on paper: ranks compute, meet, and send buckets in order over one stream."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import msgspec


class RankTimes(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank does by itself in each replayed step, in nanoseconds; columns of equal length."""

    rank: int
    data_wait: tuple[float, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    """Computation of backward, of all micro-batches."""
    lead: tuple[float, ...]
    """Of a synchronised backward: from the first bucket of the run being full to the last."""
    optimizer: tuple[float, ...]
    other: tuple[float, ...]


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """A job as it is replayed."""

    ranks: tuple[RankTimes, ...]
    micro_batches: float
    synchronised: int
    """Backwards of a step that reduce gradients."""
    bucket_ns: tuple[float, ...]
    """How long each bucket is on its way once all ranks have launched it."""
    bucket_shares: tuple[float, ...]
    """When each bucket is full: see ``buckets.ready_shares``."""
    one_bucket_seen: bool
    """The shares are of the whole backward, and not of the lead."""
    before_ns: float = 0.0
    """Collectives in which all ranks meet ahead of forward, in a step."""
    after_ns: float = 0.0
    """The same after backward."""
    supply_ns: tuple[float, ...] = ()
    """Of each rank the time in which its loaders make the batches of a step beside the training; empty where the data
    wait of the run stands for itself."""
    samples: float = 0.0
    """Of all ranks in a step; 0 where they are not known."""


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it; means per step in nanoseconds."""

    step_ns: tuple[float, ...]
    """Of each step the mean over the ranks."""
    mean_ns: float
    exposed_ns: float
    """Communication of gradients that nothing hid, waiting included."""
    waiting_ns: tuple[float, ...]
    """Of each rank: for others, at gradients and collectives."""
    transfer_ns: float
    """Gradients on their way with nothing to hide them, and collectives; waiting apart."""
    data_ns: float
    """Waiting for loaders."""


def replay(scenario: Scenario) -> Replay:
    """Replay all steps one after the other; a rank that is late in one step begins the next late."""
    ranks = range(len(scenario.ranks))
    steps = len(scenario.ranks[0].forward)
    micro, synchronised = scenario.micro_batches, scenario.synchronised
    clock = [0.0 for _ in ranks]
    supply = [0.0 for _ in ranks]
    waiting = [0.0 for _ in ranks]
    exposed = data = transfer = 0.0
    durations: list[float] = []
    buckets = list(zip(scenario.bucket_ns, scenario.bucket_shares, strict=True))
    for step in range(steps):
        began = sum(clock)
        for at, times in enumerate(scenario.ranks):
            if scenario.supply_ns:
                # Two batches of each worker are ahead of the training, so that a hiccup of either side is evened out.
                supply[at] = max(supply[at], clock[at] - 2 * scenario.supply_ns[at]) + scenario.supply_ns[at]
                waits = max(0.0, supply[at] - clock[at] - times.data_wait[step]) + times.data_wait[step]
            else:
                waits = times.data_wait[step]
            data += waits
            clock[at] += waits
        if scenario.before_ns:
            transfer += _meet(clock, waiting, scenario.before_ns)
        one_backward = [times.backward[step] / micro for times in scenario.ranks]
        leads = (
            one_backward
            if scenario.one_bucket_seen
            else [min(times.lead[step], one) for times, one in zip(scenario.ranks, one_backward, strict=True)]
        )
        for at, times in enumerate(scenario.ranks):
            clock[at] += times.forward[step] + (micro - synchronised) * one_backward[at]
        for _ in range(synchronised):
            ready = [clock[at] + one_backward[at] for at in ranks]
            done = 0.0
            for bucket_ns, share in buckets:
                launched = max(
                    [ready[at] - min(leads[at] * share, one_backward[at]) for at in ranks] if share else ready
                )
                done = max(done, launched) + bucket_ns
            last = max(ready)
            for at in ranks:
                exposed += max(0.0, done - ready[at])
                waiting[at] += min(last, max(done, ready[at])) - ready[at]
                clock[at] = max(done, ready[at])
            transfer += max(0.0, done - last) * len(clock)
        for at, times in enumerate(scenario.ranks):
            clock[at] += times.optimizer[step]
        if scenario.after_ns:
            transfer += _meet(clock, waiting, scenario.after_ns)
        for at, times in enumerate(scenario.ranks):
            clock[at] += times.other[step]
        durations.append((sum(clock) - began) / len(clock))
    of_all = steps * len(clock)
    return Replay(
        step_ns=tuple(durations),
        mean_ns=fmean(durations),
        exposed_ns=exposed / of_all,
        waiting_ns=tuple(own / steps for own in waiting),
        transfer_ns=transfer / of_all,
        data_ns=data / of_all,
    )


def _meet(clock: list[float], waiting: list[float], took_ns: float) -> float:
    """All ranks wait for the last one, and leave together; what the transfer took of all of them."""
    last = max(clock)
    for at, now in enumerate(clock):
        waiting[at] += last - now
        clock[at] = last + took_ns
    return took_ns * len(clock)


def own_ns(times: RankTimes) -> list[float]:
    """Return what a rank takes in each step with no one to wait for."""
    columns: Sequence[Sequence[float]] = (
        times.data_wait,
        times.forward,
        times.backward,
        times.optimizer,
        times.other,
    )
    return [sum(values) for values in zip(*columns, strict=True)]
