"""How far the clock of one node is from that of another: what cannot have happened before its cause bounds it.

A message is not received before it was sent, and no one leaves a reduction before its last rank has come. Each such
pair of moments, one by each clock, bounds the offset from one side; many of them leave a narrow interval. Nothing is
assumed of how long a message takes, so that a slow link makes the interval wide and never wrong.

Clocks drift: quartz by 20 to 50 millionths, and a clock that NTP steers by up to 500. An older bound is loosened by
that, and where two groups of narrow bounds, far apart in time, need a drift, it is taken for one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from ddpdoctor.diagnosis.sync_points import replica_sets
from ddpdoctor.record.joining import Clock
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.measured import StepTrack

DRIFT = 1e-4
"""By so much two clocks may part in time, at the most, when nothing more is known: twice what quartz does."""
BOUNDS_KEPT = 256
STEPS_COMPARED = 64
STEPS_LOOKED_AT = 1_024
"""Of a rank: what is known of another node is some seconds older, which may be hundreds of steps."""


class Bound(msgspec.Struct, frozen=True):
    """The offset (first node's time less this node's) at one moment, by this node's clock, is in ``[low, high]``."""

    at_ns: int
    low_ns: int
    high_ns: int

    @property
    def width_ns(self) -> int:
        """How much is left open."""
        return self.high_ns - self.low_ns


class ClockBounds:
    """Collects what is known of one node's clock."""

    def __init__(self) -> None:
        self._bounds: list[Bound] = []

    def add(self, bound: Bound) -> None:
        """Take in an exchange of messages; what contradicts itself (a clock was set meanwhile) is left out."""
        if bound.low_ns > bound.high_ns:
            return
        self._bounds.append(bound)
        if len(self._bounds) > BOUNDS_KEPT:
            # The narrowest of each pair of neighbours: so the oldest thin out, and the narrow ones stay.
            old, new = self._bounds[: BOUNDS_KEPT // 2], self._bounds[BOUNDS_KEPT // 2 :]
            pairs = [old[at : at + 2] for at in range(0, len(old), 2)]
            self._bounds = [*(min(pair, key=lambda bound: bound.width_ns) for pair in pairs), *new]

    def clock(self, narrowing: Sequence[Bound] = ()) -> Clock | None:
        """Return the clock by all that is known; ``narrowing`` are bounds by collectives, of which one side may be
        open.

        None where nothing is known. Where bounds contradict each other a clock was set: the newest are believed.
        """
        if not self._bounds:
            return None
        drift = self._drift()
        newest = self._bounds[-1]
        at_ns, low_ns, high_ns = newest.at_ns, newest.low_ns, newest.high_ns
        for bound in (*reversed(self._bounds), *narrowing):
            age_ns = at_ns - bound.at_ns
            loose_ns = int(abs(age_ns) * (DRIFT if not drift else DRIFT / 10))
            moved_ns = int(age_ns * drift)
            low, high = bound.low_ns + moved_ns - loose_ns, bound.high_ns + moved_ns + loose_ns
            if low > high_ns or high < low_ns:
                if bound in narrowing:
                    continue
                break
            low_ns, high_ns = max(low_ns, low), min(high_ns, high)
        return Clock(offset_ns=(low_ns + high_ns) // 2, at_ns=at_ns, drift=drift, error_ns=(high_ns - low_ns + 1) // 2)

    def _drift(self) -> float:
        """Return the least drift that joins the narrowest old bound with the narrowest new one; 0 if none is needed."""
        half = len(self._bounds) // 2
        if half < 8:
            return 0.0
        old = min(self._bounds[:half], key=lambda bound: bound.width_ns)
        new = min(self._bounds[half:], key=lambda bound: bound.width_ns)
        apart_ns = new.at_ns - old.at_ns
        if apart_ns <= 0:
            return 0.0
        least, most = (new.low_ns - old.high_ns) / apart_ns, (new.high_ns - old.low_ns) / apart_ns
        if least <= 0 <= most:
            return 0.0
        drift = (least + most) / 2
        return drift if abs(drift) <= 10 * DRIFT else 0.0


def bounds_of_steps(first: RunRecord, other: RunRecord) -> Iterator[Bound]:
    """Yield what the reductions of gradients that both records saw say of the other's clock, newest first.

    No rank has the sum of gradients before the last gradient of every other rank was ready. On a GPU the CPU knows
    neither of these moments, so that nothing is yielded.
    """
    here, there = ({track.rank: track for track in record.step_tracks} for record in (first, other))
    for members in replica_sets(first):
        # Where no wrap shows more, all ranks meet: those of the other record, too.
        meets_all = here.keys() == set(members)
        ours = [_samples(track) for rank, track in here.items() if meets_all or rank in members]
        theirs = [_samples(track) for rank, track in there.items() if meets_all or rank in members]
        ours, theirs = [one for one in ours if one], [one for one in theirs if one]
        if not ours or not theirs:
            continue
        steps = set.intersection(*map(set, (*ours, *theirs)))
        for step in sorted(steps, reverse=True)[:STEPS_COMPARED]:
            low_ns = max(one[step][0] for one in ours) - min(one[step][1] for one in theirs)
            high_ns = min(one[step][1] for one in ours) - max(one[step][0] for one in theirs)
            yield Bound(max(one[step][1] for one in theirs), low_ns, high_ns)


def _samples(track: StepTrack) -> dict[int, tuple[int, int]]:
    """By step when the rank's last gradient was ready, and when the last bucket was reduced; of its newest ones."""
    start = max(0, len(track) - STEPS_LOOKED_AT)
    columns = (track.step, track.ready_at_ns, track.reduced_at_ns, track.device_forward_ns)
    rows = zip(*(column[start:] for column in columns), strict=True)
    return {
        step: (ready_ns, reduced_ns)
        for step, ready_ns, reduced_ns, device_ns in rows
        if ready_ns > 0 and reduced_ns > 0 and device_ns < 0
    }
