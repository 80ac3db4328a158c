"""What mending each finding of a run alone is predicted to bring."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import msgspec

from ddpdoctor.finding import Finding, Gain
from ddpdoctor.record.model import RunRecord
from ddpdoctor.what_if.observed import observe
from ddpdoctor.what_if.predict import Model
from ddpdoctor.what_if.settings import parse

AGAIN = 2.0
"""A gain is worked out again once the run has so many times as many steps: it costs some tens of milliseconds."""

MOST_RANKS = 128
"""Of more ranks a gain takes seconds, in which the monitor looks at nothing; ``ddpdoctor what-if`` takes its time."""


class Gains:
    """The gains of one run's findings, each remembered for a while."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, Gain | None]] = {}

    def added_to(self, findings: Sequence[Finding], record: RunRecord) -> tuple[Finding, ...]:
        """Return the findings, each with its gain where the run tells it; only a run has times that stand for the
        job's.
        """
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
    """None where mending it brings no more than noise."""
    speedup = model.outcome(parse(finding.what_if)).speedup
    if speedup.value < 1.005:
        return None
    return Gain(speedup=speedup.value, low=speedup.low, high=speedup.high)
