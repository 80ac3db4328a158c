"""Communication that no computation hides, without the waiting for ranks that come late."""

from __future__ import annotations

from collections.abc import Callable, Set
from statistics import fmean
from typing import Literal

import msgspec

from ddpdoctor.check import TooLittleEvidence
from ddpdoctor.diagnosis.performance.stragglers import enough_steps, holds, straggler, typical
from ddpdoctor.diagnosis.performance.summary import RunSummary, Traffic, threshold
from ddpdoctor.diagnosis.performance.traffic import wasted_broadcasts
from ddpdoctor.diagnosis.steps import once_per_record
from ddpdoctor.diagnosis.sync_points import BUFFERS, GRADIENTS
from ddpdoctor.record.model import RunRecord

UNEVEN_MARGIN = 2.0
"""By what the waiting of ranks that take turns in being late has to exceed the threshold: a busy machine shows some."""
IN_TURNS = 0.5
"""Of the mean wait, what the rank that waits least waits where ranks take turns: who hardly waits is late himself."""
WELL_HIDDEN = 0.5
"""Share of the communication window from which on the overlap is no matter."""
BARRIERS = frozenset({"barrier", "monitored_barrier"})
Kind = Literal["transfer", "uneven", "explicit"]


class Exposure(msgspec.Struct, frozen=True, kw_only=True):
    """Communication of one kind that the steps wait for."""

    kind: Kind
    """Gradients on their way; waiting for ranks that take turns in being late; collectives outside of backward."""
    share: float
    """Of the step, in the quarter of the run in the middle, as are the other figures."""
    exposed_ns: float
    step_ns: float
    backward_compute_ns: float
    traffic: tuple[Traffic, ...]
    """What is sent, the most first."""


@once_per_record()
def exposures(record: RunRecord) -> tuple[Exposure, ...]:
    """Return the kinds of communication that take more of the step than they may.

    Waiting for a straggler is attributed to it and to no kind of communication, and broadcasts of buffers that nothing
    changes are reported as such. Raises TooLittleEvidence where too few steps were measured, or where ranks that the
    record does not see may have been waited for.
    """
    if unseen := enough_steps(record).unseen:
        raise TooLittleEvidence(
            f"{unseen} of {record.job.world_size} ranks are not visible here and may have been the late ones"
        )
    limit = threshold(record, "exposed-communication")
    apart = BARRIERS | ({BUFFERS} if any(wasted_broadcasts(record)) else set())
    found = []
    if holds(record, lambda part: transfer_share(part) > limit):
        found.append(_exposure("transfer", record, transfer_share))
    elif (
        holds(record, lambda part: _in_turns(part) and _waiting_share(part) > limit * UNEVEN_MARGIN)
        and straggler(record) is None
    ):
        found.append(_exposure("uneven", record, _waiting_share))
    if holds(record, lambda part: _explicit_share(part, apart) > limit):
        found.append(_exposure("explicit", record, lambda part: _explicit_share(part, apart), apart))
    return tuple(found)


def transfer_share(summary: RunSummary) -> float:
    """Share of the step that gradients are on their way and nothing else happens; 0 where it is not known."""
    phases = summary.phases
    return (phases.exposed_transfer_ns or 0.0) / phases.step_ns if phases is not None else 0.0


def _waiting_share(summary: RunSummary) -> float:
    phases = summary.phases
    return (phases.exposed_waiting_ns or 0.0) / phases.step_ns if phases is not None else 0.0


def _in_turns(summary: RunSummary) -> bool:
    """Return whether all ranks wait for others, and not all of them for the same."""
    waits_ns = [rank.waiting_ns for rank in summary.ranks if rank.waiting_ns is not None]
    return bool(waits_ns) and min(waits_ns) >= IN_TURNS * fmean(waits_ns)


def _explicit_share(summary: RunSummary, apart: Set[str]) -> float:
    """Share of the step in explicit collectives; some kinds, and the waiting for others, are left out."""
    if summary.phases is None:
        return 0.0
    # A rank is in one of several groups that do the same.
    longest: dict[str, float] = {}
    for entry in _explicit(summary, apart):
        transfer_ns = (entry.ns_per_step or 0.0) - (entry.waiting_ns_per_step or 0.0)
        longest[entry.kind] = max(longest.get(entry.kind, 0.0), transfer_ns)
    return sum(longest.values()) / summary.phases.step_ns


def _explicit(summary: RunSummary, apart: Set[str]) -> list[Traffic]:
    return [entry for entry in summary.traffic if entry.kind != GRADIENTS and entry.kind not in apart]


def _exposure(
    kind: Kind, record: RunRecord, share_of: Callable[[RunSummary], float], apart: Set[str] = BARRIERS
) -> Exposure:
    summary = typical(record, share_of)
    assert summary.phases is not None
    share = share_of(summary)
    sent = _explicit(summary, apart) if kind == "explicit" else [e for e in summary.traffic if e.kind == GRADIENTS]
    return Exposure(
        kind=kind,
        share=share,
        exposed_ns=share * summary.phases.step_ns,
        step_ns=summary.phases.step_ns,
        backward_compute_ns=summary.phases.backward_compute_ns,
        traffic=tuple(sorted(sent, key=lambda entry: -(entry.ns_per_step or 0.0))),
    )


def unhidden(record: RunRecord) -> tuple[Exposure, float] | None:
    """Exposed gradients that the computation of backward is long enough to hide, and what share of them it hides.

    Only where the reason is not that the ranks come at different times. Raises TooLittleEvidence where too few steps
    were measured.
    """
    exposure = next((entry for entry in exposures(record) if entry.kind == "transfer"), None)
    summary = enough_steps(record)
    if exposure is None or not exposure.traffic or not holds(record, _could_be_hidden):
        return None
    return exposure, summary.overlap_ratio or 0.0


def _could_be_hidden(summary: RunSummary) -> bool:
    sent = next((entry for entry in summary.traffic if entry.kind == GRADIENTS), None)
    if summary.phases is None or sent is None or sent.ns_per_step is None or summary.overlap_ratio is None:
        return False
    longer = summary.phases.backward_compute_ns >= sent.ns_per_step
    return longer and summary.overlap_ratio < WELL_HIDDEN and _waiting_share(summary) < transfer_share(summary)
