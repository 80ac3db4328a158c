"""Makes one list of findings out of what the source and the run say: one cause, one finding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import msgspec

from ddpdoctor.equivalence_section import OWN_GRADIENTS
from ddpdoctor.examination import RefutedSuspicion
from ddpdoctor.finding import (
    NAMED_BECAUSE,
    Confirmed,
    Fact,
    Finding,
    Frame,
    Location,
    Refuted,
    Severity,
    Trouble,
    meets,
    of_frame,
    same_lines,
)

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
        "shared-group",
        "desync",
        "ddp-on-subset",
        "exception",
        "caught-exception",
        "hang",
    }
)
"""What one divergence may be called once it was seen in a run."""
_OF_THE_RUN = frozenset({"exception", "caught-exception", "uneven-passes"})
"""Divergences that the run explains itself: by what a rank raised, or by two lengths."""
_BY_RANK = SUSPECTED - {"data-branch", "caught-exception"}
"""Divergences that happen whenever the line is reached; those left out wait for a batch or a failure."""

_WHY = {("wrong-rank-kind", "many-writers")}
"""Pairs of troubles: what the source knows to be the reason for what a run saw at the same place."""

_SHOWN_BY_EFFECTS = frozenset(
    {
        "forward-bypasses-ddp",
        "diverged-replicas",
        "module-changed-after-wrap",
        "misplaced-no-sync",
        "unlike-one-process",
    }
)
"""Checks of which the run sees what comes of it: a backward that averages nothing, parameters that differ, a wrap that
does not know some, gradients that are a multiple. The source shows the line that does it.
"""
_COMES_OF = {("module-changed-after-wrap", "unused-parameters")}
"""Checks of the source and of the run: the parameters of a module that was replaced get no gradient any more."""
_ASKED = {
    "nan": "the rank's own batch",
    "short-batch": "the rank's own batch",
    "slow-rank0": "the rank's own clock",
}
"""What a condition asks that each injected cause turns over, in the words of a suspicion."""


Seen = TypeVar("Seen", Refuted, Confirmed)


def unrefuted(
    suspicions: Iterable[Finding], refutations: Sequence[tuple[str, Refuted]]
) -> tuple[tuple[Finding, ...], tuple[RefutedSuspicion, ...]]:
    """Part the findings of the source from those that the same check refuted at the same place of a run.

    ``refutations`` have the code of the check that says so.
    """
    kept, cleared = [], []
    for suspicion in suspicions:
        reason = next((one.reason for one in _about(suspicion, refutations)), None)
        if reason is None:
            kept.append(suspicion)
        else:
            cleared.append(
                RefutedSuspicion(code=suspicion.code, name=suspicion.name, location=suspicion.location, reason=reason)
            )
    return tuple(kept), tuple(cleared)


def confirmed(suspicions: Iterable[Finding], confirmations: Sequence[tuple[str, Confirmed]]) -> Iterator[Finding]:
    """Yield the findings of the source, with what the same check, by its code, saw at the same place of a run."""
    for suspicion in suspicions:
        facts = tuple(one.fact for one in _about(suspicion, confirmations))
        yield msgspec.structs.replace(
            suspicion,
            basis=suspicion.basis | {fact.basis for fact in facts},
            evidence=(*facts, *suspicion.evidence),
        )


def _about(suspicion: Finding, seen: Sequence[tuple[str, Seen]]) -> Iterator[Seen]:
    place, at = suspicion.location, _lines(suspicion.disproved_at)
    for code, one in seen:
        if code == suspicion.code and place is not None and meets(place, one.location):
            chain = one.chain if isinstance(one, Refuted) else ()
            if not chain or _lines(chain) == at:
                yield one


def _lines(chain: Sequence[Frame]) -> list[tuple[str, int]]:
    return [(frame.file, frame.line) for frame in chain]


def merge(suspicions: Sequence[Finding], seen: Sequence[Finding]) -> tuple[Finding, ...]:
    """Merge findings of the source with those of the run; worst first, then by place.

    Where the source explains the divergence of the run, its code, title, places and remedy lead, and the run adds the
    proof and the ranks; any other merged finding is told as the run saw it. The evidence of both is kept.
    """
    run = [one for one in _distinct(seen) if not _is_told_with_reason(one, seen)]
    left: list[Finding] = []
    confirmed: dict[int, list[Finding]] = {}
    for suspicion in _distinct(suspicions):
        index = next((index for index, finding in enumerate(run) if _same_cause(suspicion, finding)), None)
        if index is None:
            left.append(suspicion)
        else:
            confirmed.setdefault(index, []).append(suspicion)
    for index, causes in confirmed.items():
        lead = _explanation(causes, run[index])
        if lead is None and run[index].trouble in DIVERGENCES and _are_rivals(causes):
            left += causes  # Which of them it was is not known, and each can do it again.
            continue
        if lead is None:
            for cause in causes:
                if (cause.trouble, run[index].trouble) in _WHY:
                    run[index] = _renamed(run[index], cause)
                # One place that the source knows is the user's, where the run sees a framework's call alone; within a
                # function the run's is the nearer.
                closer = len(causes) == 1 and cause.code == run[index].code and not _in_one_function(cause, run[index])
                run[index] = _joined(run[index], cause, closer)
            continue
        # What the same condition keeps from some ranks beside the call that the run stopped at, and what is mended by
        # the same move, is no second cause. Everything else would hang the job once this one is mended.
        echoes = [one for one in (*causes, *left) if one != lead and _is_echo(one, lead, run[index])]
        left = [one for one in (*left, *(one for one in causes if one != lead)) if one not in echoes]
        run[index] = _led(run[index], lead)
        for echo in echoes:
            run[index] = _joined(run[index], echo)
            if _leaves(echo) and not _leaves(lead):  # The call moves; that ranks leave before another is mended apart.
                run[index] = msgspec.structs.replace(run[index], remedy=f"{run[index].remedy} {echo.remedy}")
    return tuple(sorted((*run, *left), key=_rank))


def _is_told_with_reason(one: Finding, seen: Sequence[Finding]) -> bool:
    """Return whether gradients that are not averaged are told by a check that knows why, of the same backward."""
    if not one.title.startswith(OWN_GRADIENTS):
        return False
    if any(other.name == "unused-parameters" and other.severity is Severity.ERROR for other in seen):
        return True  # DDP waits for what never comes, and averages nothing.
    others = (other for other in seen if other.name in _SHOWN_BY_EFFECTS and other.name != one.name)
    return any(_overlap(_all_places(other), one.locations) for other in others)


def _are_rivals(causes: Sequence[Finding]) -> bool:
    """Return whether several conditions of a rank's own could each have done it."""
    own = [cause for cause in causes if cause.trouble in ("data-branch", "caught-exception")]
    return len({cause.location for cause in own}) > 1


def _in_one_function(one: Finding, other: Finding) -> bool:
    at, there = one.location, other.location
    return at is not None and there is not None and (at.file, at.function) == (there.file, there.function)


def _explanation(causes: Sequence[Finding], seen: Finding) -> Finding | None:
    """Return the suspicion that says why the run went wrong; None where the run knows better.

    A condition of a rank's own (its batch, a failure) explains a divergence only where it is the one candidate.
    """
    same = [cause for cause in causes if cause.code == seen.code or (cause.name, seen.name) in _COMES_OF]
    if len({one.title for one in same}) == 1 and same[0].name in _SHOWN_BY_EFFECTS and not seen.stress:
        return same[0]
    if seen.trouble not in DIVERGENCES or seen.trouble in _OF_THE_RUN or seen.stress:
        return None  # What only an injected cause brings about stays a condition: "if one rank's loss is NaN: …".
    places = (*seen.locations, *_all_places(seen), *_stack_places(seen))
    ordered: list[tuple[int, int, Finding]] = []
    for number, cause in enumerate(causes):
        calls = cause.locations[:1] if cause.trouble in _BY_RANK else cause.locations
        met = [at for at, place in enumerate(places) if any(meets(place, call) for call in calls)]
        if cause.trouble in SUSPECTED and met:
            ordered.append((met[0], number, cause))
    by_rank = [entry for entry in ordered if entry[2].trouble in _BY_RANK]
    if by_rank:
        return min(by_rank, key=lambda entry: entry[:2])[2]
    return ordered[0][2] if len(ordered) == 1 and len(causes) == 1 else None


def _is_echo(one: Finding, lead: Finding, seen: Finding) -> bool:
    """Return whether one move mends both: the same check's calls under one condition, or a call and its caller."""
    if one.trouble not in SUSPECTED:
        return lead.name in _SHOWN_BY_EFFECTS and (one.code, one.title) == (lead.code, lead.title)
    stacks = (_stack_places(seen, fact) for fact in seen.evidence)
    if any(_overlap(one.locations[:1], stack) and _overlap(lead.locations[:1], stack) for stack in stacks):
        return True
    same_condition = one.code == lead.code and bool(one.locations[1:]) and one.locations[-1] == lead.locations[-1]
    return same_condition or one.locations[:1] == lead.locations[:1]


def _led(seen: Finding, cause: Finding) -> Finding:
    """Return the finding of the source with the proof and the ranks of the run."""
    proof = Fact(text=seen.title, basis=next(iter(seen.basis)), location=seen.location)
    known = tuple(place for place in seen.locations if not any(meets(place, own) for own in cause.locations))
    both, blamed = _joined(seen, cause), _ranks_to_blame(seen, cause)
    # What the source only suspected, the run says as a fact; but by what a rank decides, only the source says.
    proved = seen.code == cause.code and not cause.severity.at_least(seen.severity) and cause.trouble != "data-branch"
    kept = (fact for fact in both.evidence if NAMED_BECAUSE not in fact.text or fact.rank in blamed)
    return msgspec.structs.replace(
        _renamed(both, cause),
        title=seen.title if proved else cause.title,
        ranks=blamed,
        locations=(*cause.locations, *known),
        evidence=(*(() if proved or seen.title == cause.title else (proof,)), *kept),
    )


def _ranks_to_blame(seen: Finding, cause: Finding) -> tuple[int, ...]:
    """Return the ranks that left before the call, or that make it alone; the run's where it cannot be known."""
    if cause.trouble not in _BY_RANK:
        return seen.ranks
    call = cause.locations[:1]
    known = {fact.rank for fact in seen.evidence if fact.rank is not None}
    there = {
        fact.rank
        for fact in seen.evidence
        if fact.rank is not None and _overlap(call, (*_stack_places(seen, fact), *filter(None, (fact.location,))))
    }
    blamed = known - there if _leaves(cause) else there
    return tuple(sorted(blamed)) if blamed and blamed != known else seen.ranks


def _leaves(cause: Finding) -> bool:
    """Return whether ranks leave before a call: its places are the call, where they leave, and what decides."""
    return cause.trouble in _BY_RANK and len(cause.locations) > 2


def _renamed(seen: Finding, cause: Finding) -> Finding:
    trouble = cause.trouble or seen.trouble
    return msgspec.structs.replace(seen, code=cause.code, name=cause.name, trouble=trouble, remedy=cause.remedy)


def _same_cause(suspicion: Finding, seen: Finding) -> bool:
    told = (suspicion.title, *(fact.text for fact in suspicion.evidence))
    if seen.stress and not any(_ASKED[seen.stress] in text for text in told):
        return False
    same = suspicion.code == seen.code or (suspicion.trouble, seen.trouble) in _WHY
    same = same or (suspicion.name, seen.name) in _COMES_OF
    places = _all_places(seen)
    # What a run shows of the whole job, at no place, is what the same check suspects at one.
    if same and (not places or _overlap(_all_places(suspicion), places)):
        return True
    if suspicion.trouble not in SUSPECTED or seen.trouble not in DIVERGENCES:
        return False
    chain = (*_all_places(suspicion), *_stack_places(suspicion))
    return _overlap(chain, _all_places(seen)) or _overlap(suspicion.locations[:1], _stack_places(seen))


def _all_places(finding: Finding) -> tuple[Location, ...]:
    return (*finding.locations, *(fact.location for fact in finding.evidence if fact.location is not None))


def _stack_places(finding: Finding, only: Fact | None = None) -> tuple[Location, ...]:
    facts = finding.evidence if only is None else (only,)
    return tuple(of_frame(frame) for fact in facts for frame in fact.stack)


def _overlap(some: Sequence[Location], others: Sequence[Location]) -> bool:
    return any(meets(one, other) for one in some for other in others)


def _joined(seen: Finding, suspicion: Finding, closer: bool = False) -> Finding:
    # What an injected cause breaks may be mild; that it can happen by itself is what the source says.
    worst = suspicion.severity if seen.stress and suspicion.severity.at_least(seen.severity) else seen.severity
    stated = Fact(text=suspicion.title, basis="source", location=suspicion.location)
    return msgspec.structs.replace(
        seen,
        severity=worst,
        locations=_joined_locations(seen, suspicion, closer),
        basis=seen.basis | suspicion.basis,
        evidence=(*seen.evidence, *(one for one in suspicion.evidence or (stated,) if one not in seen.evidence)),
    )


def _joined_locations(seen: Finding, suspicion: Finding, source_first: bool) -> tuple[Location, ...]:
    """Return the places of both, the run's first unless the source's are closer; of one place what the source knows
    (columns, last line).
    """
    places: list[Location] = list(suspicion.locations) if source_first else []
    for place in seen.locations:
        closer = next((known for known in suspicion.locations if same_lines(known, place)), place)
        if closer not in places:
            places.append(closer)
    places.extend(place for place in suspicion.locations if place not in places)
    return tuple(places)


def _distinct(findings: Iterable[Finding]) -> Iterator[Finding]:
    said: set[tuple[str, str, tuple[Location, ...], tuple[int, ...]]] = set()
    for finding in findings:
        key = (finding.code, finding.title, finding.locations, finding.ranks)
        if key not in said:
            said.add(key)
            yield finding


def _rank(finding: Finding) -> tuple[int, str, int, int, str]:
    place = finding.location or Location(file="", line=0)
    return (finding.severity.order, place.file, place.line, place.column, finding.code)
