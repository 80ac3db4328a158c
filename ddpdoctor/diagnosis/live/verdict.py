"""The verdict on a job that runs: a proof that it hangs or goes wrong, or nothing.

The caller hands in a snapshot of the record again and again: the growing tracks, the sites, signatures and groups that
they refer to, the ranks (how they ended, what their main thread is held by, whether liveness called them stuck) and the
waits in the store. The tracks of the ranks may have been read at slightly different moments.
"""

from __future__ import annotations

from ddpdoctor.diagnosis.divergence.departures import find_departed_rank
from ddpdoctor.diagnosis.divergence.divergence import (
    Divergence,
    from_absentee,
    from_idle,
    from_parting,
    from_standstill,
)
from ddpdoctor.diagnosis.divergence.matching import Matcher
from ddpdoctor.diagnosis.divergence.waiting import blocked_ranks
from ddpdoctor.diagnosis.failures.killed_ranks import may_yet_be_known
from ddpdoctor.diagnosis.live.lasting_waits import LastingWait, lasting_wait
from ddpdoctor.record.model import RunRecord

CONFIRM_NS = 300_000_000
"""How long an absentee or a standstill must look the same before it is believed: one rank's track may be older than
another's, so the rank that seems to be missing may have come meanwhile."""


class VerdictMemory:
    """What the live verdict remembers between two looks at one job."""

    def __init__(self) -> None:
        self.matcher = Matcher()
        """How far the tracks have been compared."""
        self.wait: LastingWait | None = None
        """What ranks wait for now, where that is no standstill."""
        self.confirm_ns = CONFIRM_NS
        """How long what the ranks wait for has to look the same."""
        self._suspicion: tuple[object, ...] | None = None
        self._since_ns = 0
        self._waits: tuple[object, ...] = ()
        self._waits_since_ns = 0
        self.confirmed_since_ns = 0
        """Since when that has looked the same which the newest verdict rests on; 0 where it had not to."""

    def confirmed(self, suspicion: tuple[object, ...], now_ns: int, waits: tuple[object, ...] = ()) -> bool:
        """Remember a suspicion; tell whether it has looked the same for long enough.

        With ranks on other nodes the ``waits`` that it rests on have to stay the same, not the suspicion: that a rank
        does nothing was seen for seconds where it runs, and is reported later.
        """
        if suspicion != self._suspicion:
            self._suspicion, self._since_ns = suspicion, now_ns
        self.confirmed_since_ns = self._since_ns
        if waits and self.confirm_ns > CONFIRM_NS and now_ns - self._waits_since_ns >= self.confirm_ns:
            self.confirmed_since_ns = self._waits_since_ns
            return True
        return now_ns - self._since_ns >= self.confirm_ns

    def note_waits(self, waits: tuple[object, ...], now_ns: int) -> None:
        """Remember who waits where for whom."""
        if waits != self._waits:
            self._waits, self._waits_since_ns = waits, now_ns

    def forget(self) -> None:
        """Drop the suspicion."""
        self._suspicion = None


def live_verdict(memory: VerdictMemory, record: RunRecord, now_ns: int) -> Divergence | None:
    """Return the proof that the job hangs or computes something else, or None while there is none.

    A mismatch or a desync is a proof when it was seen for 0.3 s, and at once in a rehearsal whose ranks are all there
    or in a live run where a rank says already that it waits; an absentee once another rank waits for it, and a
    standstill once its ranks have waited for a second, both when seen for 0.3 s. ``now_ns`` is when the record was
    made.
    """
    memory.confirmed_since_ns = 0
    parting = memory.matcher.advance(record)
    blocked = blocked_ranks(record, memory.matcher)
    memory.wait = lasting_wait(record, blocked)
    held = sorted(rank for rank, entry in blocked.items() if entry.missing)
    waits = tuple((rank, blocked[rank].row, blocked[rank].since_ns, blocked[rank].missing) for rank in held)
    memory.note_waits(waits, now_ns)
    if parting is not None:
        parted = from_parting(record, memory.matcher, parting, blocked)
        # What the ranks say of where they are may come a beat later than the calls that part them; and of three ranks
        # the one that comes last says which of the other two is wrong.
        if record.job.kind == "run":
            known = any(turn.waiting for turn in parted.turns)
        else:
            known = all(turn.action != "elsewhere" for turn in parted.turns)
        return parted if known or memory.confirmed((parted.form, parted.group, parted.sequence), now_ns) else None
    absentee = find_departed_rank(record, memory.matcher, blocked)
    found = None
    if absentee is not None and may_yet_be_known(record, absentee):
        return None
    if absentee is not None:
        waiters = {rank: entry for rank, entry in blocked.items() if absentee.rank in entry.missing}
        found = from_absentee(record, memory.matcher, absentee, blocked) if waiters else None
    else:
        found = from_standstill(record, memory.matcher, blocked, now_ns) or from_idle(record)
    if found is None:
        memory.forget()
        return None
    suspicion = (found.form, found.culprit, found.group, found.sequence, waits)
    rests_on = () if found.form == "absentee" else waits
    return found if memory.confirmed(suspicion, now_ns, rests_on) else None
