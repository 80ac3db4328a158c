"""Makes one list of findings out of what the source and the run say: one cause, one finding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from ddpdoctor.examination import RefutedSuspicion
from ddpdoctor.finding import Confirmed, Fact, Finding, Location, Refuted, Severity, Trouble
from ddpdoctor.findings.locations import meets, of_frame, same_lines

SUSPECTED: frozenset[Trouble] = frozenset(
    {"rank-branch", "data-branch", "lone-forward", "subset-group", "caught-exception", "ddp-on-subset"}
)
"""Divergences that the source shows: a run may call the same one by another name."""
DIVERGENCES: frozenset[Trouble] = frozenset(
    {
        "uneven-passes",
        "rank-branch",
        "data-branch",
        "lone-forward",
        "mismatch",
        "early-exit",
        "subset-group",
        "desync",
        "ddp-on-subset",
        "exception",
    }
)
"""What one divergence may be called once it was seen in a run."""
_BY_TRACE = frozenset({"rank-branch", "data-branch"})
"""Names for partings of which the run shows that, and the source shows why."""

_WHY = {("wrong-rank-kind", "many-writers")}
"""Pairs of troubles: what the source knows to be the reason for what a run saw at the same place."""

_ASKED = {
    "nan": "the rank's own batch",
    "short-batch": "the rank's own batch",
    "slow-rank0": "the rank's own clock",
}
"""What a condition asks that each injected cause turns over, in the words of a suspicion."""


class Refutation(msgspec.Struct, frozen=True):
    """A refuted suspicion and the check that refuted it."""

    code: str
    refuted: Refuted


class Confirmation(msgspec.Struct, frozen=True):
    """What confirms a suspicion, if there is one, and the check that says so."""

    code: str
    confirmed: Confirmed


def unrefuted(
    suspicions: Iterable[Finding], refutations: Sequence[Refutation]
) -> tuple[tuple[Finding, ...], tuple[RefutedSuspicion, ...]]:
    """Part the findings of the source from those that the same check refuted at the same place of a run."""
    kept, cleared = [], []
    for suspicion in suspicions:
        reason = next((one.refuted.reason for one in refutations if _refutes(one, suspicion)), None)
        if reason is None:
            kept.append(suspicion)
        else:
            cleared.append(
                RefutedSuspicion(code=suspicion.code, name=suspicion.name, location=suspicion.location, reason=reason)
            )
    return tuple(kept), tuple(cleared)


def confirmed(suspicions: Iterable[Finding], confirmations: Sequence[Confirmation]) -> tuple[Finding, ...]:
    """Return the findings of the source, with what the same check saw at the same place of a run."""
    return tuple(_with_seen(suspicion, confirmations) for suspicion in suspicions)


def _with_seen(suspicion: Finding, confirmations: Sequence[Confirmation]) -> Finding:
    place = suspicion.location
    facts = tuple(
        one.confirmed.fact
        for one in confirmations
        if one.code == suspicion.code and place is not None and meets(place, one.confirmed.location)
    )
    return msgspec.structs.replace(
        suspicion,
        basis=suspicion.basis | {fact.basis for fact in facts},
        evidence=(*facts, *suspicion.evidence),
    )


def merge(suspicions: Sequence[Finding], seen: Sequence[Finding]) -> tuple[Finding, ...]:
    """Merge findings of the source with those of the run.

    A merged finding keeps title, severity and ranks of the run, and holds the evidence of both. Of a parting the source
    gives the code, as it can tell a rank test from a rank's own data, and the remedy where the run names no rank. The
    result is sorted from worst to
    mildest, then by place.
    """
    run = list(_distinct(seen))
    left: list[Finding] = []
    confirmed: dict[int, list[Finding]] = {}
    for suspicion in _distinct(suspicions):
        index = next((index for index, finding in enumerate(run) if _same_cause(suspicion, finding)), None)
        if index is None:
            left.append(suspicion)
        else:
            confirmed.setdefault(index, []).append(suspicion)
    for index, causes in confirmed.items():
        run[index] = _named_by(causes, run[index])
        # What the same condition keeps from some ranks beside the call that the run stopped at is no second cause.
        beside = [one for one in left if any(_same_condition(one, cause) for cause in causes)]
        left = [one for one in left if one not in beside]
        for suspicion in (*causes, *beside):
            run[index] = _joined(run[index], suspicion)
    return tuple(sorted((*run, *left), key=_rank))


def _same_condition(one: Finding, other: Finding) -> bool:
    """Return whether two partings seen in the source are those of one condition, which is the last of their places."""
    both = {one.trouble, other.trouble} <= SUSPECTED
    return both and bool(one.locations[1:]) and one.locations[-1] == other.locations[-1]


def _named_by(causes: Sequence[Finding], seen: Finding) -> Finding:
    for cause in causes:
        if (cause.trouble, seen.trouble) in _WHY:
            return _renamed(seen, cause)
    parting = {cause.code: cause for cause in reversed(causes) if cause.trouble in SUSPECTED}
    if seen.trouble not in _BY_TRACE or len(parting) != 1:
        return seen
    (cause,) = parting.values()
    if seen.code == cause.code and (len(seen.ranks) == 1 or len(causes) > 1):
        return seen
    # Where the run can name no rank, the source knows which of the two calls a rank test keeps from some.
    first = [place for place in seen.locations if any(meets(place, known) for known in cause.locations[:1])]
    places = (*first, *(place for place in seen.locations if place not in first))
    return msgspec.structs.replace(_renamed(seen, cause), locations=places)


def _renamed(seen: Finding, cause: Finding) -> Finding:
    return msgspec.structs.replace(seen, code=cause.code, name=cause.name, trouble=cause.trouble, remedy=cause.remedy)


def _same_cause(suspicion: Finding, seen: Finding) -> bool:
    if seen.stress and not any(_ASKED[seen.stress] in text for text in _texts(suspicion)):
        return False
    same = suspicion.code == seen.code or (suspicion.trouble, seen.trouble) in _WHY
    places = _all_places(seen)
    # What a run shows of the whole job, at no place, is what the same check suspects at one.
    if same and (not places or _overlap(_all_places(suspicion), places)):
        return True
    if suspicion.trouble not in SUSPECTED or seen.trouble not in DIVERGENCES:
        return False
    chain = (*_all_places(suspicion), *_stack_places(suspicion))
    return _overlap(chain, _all_places(seen)) or _overlap(suspicion.locations[:1], _stack_places(seen))


def _texts(finding: Finding) -> tuple[str, ...]:
    return (finding.title, *(fact.text for fact in finding.evidence))


def _all_places(finding: Finding) -> tuple[Location, ...]:
    return (*finding.locations, *(fact.location for fact in finding.evidence if fact.location is not None))


def _stack_places(finding: Finding) -> tuple[Location, ...]:
    return tuple(of_frame(frame) for fact in finding.evidence for frame in fact.stack)


def _overlap(some: Sequence[Location], others: Sequence[Location]) -> bool:
    return any(meets(one, other) for one in some for other in others)


def _refutes(refutation: Refutation, suspicion: Finding) -> bool:
    if refutation.code != suspicion.code or suspicion.location is None:
        return False
    return meets(suspicion.location, refutation.refuted.location)


def _joined(seen: Finding, suspicion: Finding) -> Finding:
    # What an injected cause breaks may be mild; that it can happen by itself is what the source says.
    worst = suspicion.severity if seen.stress and suspicion.severity.at_least(seen.severity) else seen.severity
    return msgspec.structs.replace(
        seen,
        severity=worst,
        locations=_joined_locations(seen, suspicion),
        basis=seen.basis | suspicion.basis,
        evidence=(*seen.evidence, *(suspicion.evidence or _stated(suspicion))),
    )


def _joined_locations(seen: Finding, suspicion: Finding) -> tuple[Location, ...]:
    """Return the run's places first; a place that the source knows more closely (columns, last line) replaces the
    run's.
    """
    places: list[Location] = []
    for place in seen.locations:
        closer = next((known for known in suspicion.locations if same_lines(known, place)), place)
        if closer not in places:
            places.append(closer)
    places.extend(place for place in suspicion.locations if place not in places)
    return tuple(places)


def _stated(suspicion: Finding) -> tuple[Fact, ...]:
    return (Fact(text=suspicion.title, basis="source", location=suspicion.location),)


def _distinct(findings: Iterable[Finding]) -> Iterator[Finding]:
    said: set[tuple[str, str, tuple[Location, ...], tuple[int, ...]]] = set()
    for finding in findings:
        key = (finding.code, finding.title, finding.locations, finding.ranks)
        if key not in said:
            said.add(key)
            yield finding


def _rank(finding: Finding) -> tuple[int, str, int, int, str]:
    place = finding.location or Location(file="", line=0)
    return (list(Severity).index(finding.severity), place.file, place.line, place.column, finding.code)
