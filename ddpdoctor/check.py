"""What a check is. The registry that finds checks is ``ddpdoctor.catalogue.registry``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from importlib import import_module
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

import msgspec

from ddpdoctor.finding import Basis, Fact, Finding, FoundInRun, Frame, Location, Refuted, Severity, Trouble

if TYPE_CHECKING:
    from ddpdoctor.record.model import Restart as Restart
    from ddpdoctor.record.model import RunRecord as RunRecord
    from ddpdoctor.source.script.script import Script as Script
else:  # The names of what checks look at: for an annotation no check imports the record or the reader of sources.
    Restart = RunRecord = Script = object


Subject: TypeAlias = Literal[
    "job", "collectives", "wrap", "model", "training", "loss", "training-loader", "sampler", "data-parallel", "device"
]
"""What of a script a check may look at; ``source.queries.subjects`` finds them."""


class Reached(Protocol):
    """A place with the calls that lead to it, such as an event of the source."""

    @property
    def location(self) -> Location | None:
        """Where it is."""

    @property
    def chain(self) -> tuple[Frame, ...]:
        """The lines of the calls, innermost first."""


Place: TypeAlias = Location | Reached | None
Numbers: TypeAlias = Mapping[str, int | float]
Reason: TypeAlias = tuple[str, Place] | tuple[str, Place, Numbers] | tuple[str, Place, Numbers, int]
"""A sentence, its place, the numbers in it, and the rank that it is about, as ``Fact`` has them."""
Reasons: TypeAlias = Reason | Iterable[Reason]
"""One of them or several."""


class Via(msgspec.Struct, frozen=True):
    """A place that is ``Reached`` by calls."""

    location: Location | None
    chain: tuple[Frame, ...]


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What a run or the source shows of some lines: what is wrong there, or why nothing is."""

    wrong: bool | None = True
    """None: it cannot be known."""
    sentence: str
    locations: Location | tuple[Location | None, ...] | None = None
    ranks: tuple[int, ...] = ()
    because: Reason | tuple[Reason, ...] = ()
    remedy: str = ""
    """Empty for the one that the check has for all."""
    severity: Severity | None = None
    """None: as bad as the check says."""
    what_if: tuple[str, ...] = ()
    """As ``Check.finding`` takes it."""

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """All that it is known by."""
        return _reasons(self.because)

    @property
    def places(self) -> tuple[Location, ...]:
        """The lines that are known."""
        return _known(self.locations)


def _known(places: Location | Iterable[Location | None] | None) -> tuple[Location, ...]:
    return tuple(place for place in ((places,) if isinstance(places, Location) else places or ()) if place is not None)


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """The constants of one check; its module holds them as ``CHECK`` beside ``in_source`` and ``in_run``."""

    code: str
    """Unique, as in ``DDP101``."""
    name: str
    """The pattern found, in kebab case; never the remedy."""
    severity: Mapping[Basis, Severity]
    """How bad a finding is by the basis it rests on."""
    stands_for: Trouble | None = None
    """What diagnosis and reports call that which the check speaks for; None where they need not know it."""
    triggers: tuple[str, ...] = ()
    """Words of which a script has at least one wherever ``in_source`` can find something: without all of them the check
    is not even imported. Any part of a word of the code counts, and upper and lower case differ; so they have to hold
    under any import and any alias: the last name of what is called (``DistributedSampler``, ``all_reduce``), never a
    dotted name (``torch.save``), which an import may split. One short word that covers several (``DataParallel``) is
    better than a list."""
    subjects: tuple[Subject, ...] = ()
    """What of a script ``in_source`` looks at: without all of them it has nothing to look at, and where something was
    not understood that may hide them, it has not passed."""
    needs: frozenset[str] = frozenset()
    """Streams of the ``RunRecord`` that ``in_run`` cannot do without."""
    needs_live: frozenset[str] | None = None
    """The same of a live run, where the check looks at other streams there."""
    nodes: int = 1
    """Nodes that a run must have before it can show what the check looks for."""
    advice_in_run: bool = False
    """What it only advises about in the source shows in a run, too, although it warns of other things."""

    def needs_of(self, kind: Basis) -> frozenset[str]:
        """Return the streams that ``in_run`` cannot do without in a record of this kind."""
        return self.needs if kind != "run" or self.needs_live is None else self.needs_live

    def finding(
        self,
        title: str,
        *,
        remedy: str,
        basis: Basis = "source",
        locations: Location | Iterable[Location | None] | None = None,
        ranks: tuple[int, ...] = (),
        evidence: Iterable[Fact] = (),
        because: Reasons = (),
        severity: Severity | None = None,
        what_if: tuple[str, ...] = (),
        role: Literal["", "cause", "echo"] = "",
        doubt: str = "",
    ) -> Finding:
        """Build a finding of this check; ``severity`` overrides the one of the basis.

        ``because`` holds facts of the same basis, before those of ``evidence``; ``what_if`` says how it is mended on
        paper, in settings as ``ddpdoctor what-if --set`` takes them.
        """
        return Finding(
            code=self.code,
            name=self.name,
            trouble=self.stands_for,
            severity=severity or self.severity[basis],
            title=title,
            ranks=ranks,
            locations=_known(locations),
            basis=frozenset({basis}),
            evidence=(*(_fact(basis, *reason) for reason in _reasons(because)), *evidence),
            remedy=remedy,
            what_if=what_if,
            role=role,
            doubt=doubt,
        )

    def judged(self, basis: Basis, verdicts: Iterable[Verdict], remedy: str = "") -> Iterator[Finding | Refuted]:
        """Yield a finding for what is wrong, and a refutation for each place at which nothing is."""
        for verdict in verdicts:
            if verdict.wrong is None:
                raise BoundHit(verdict.sentence)
            if verdict.wrong:
                yield self._finding_of(basis, verdict, remedy)
            else:
                yield from (Refuted(location=place, reason=verdict.sentence) for place in verdict.places)

    def suspected(self, verdicts: Iterable[Verdict], remedy: str = "") -> Iterator[Finding]:
        """Yield a finding for each verdict of the source, which refutes nothing."""
        return (self._finding_of("source", verdict, remedy) for verdict in verdicts)

    def _finding_of(self, basis: Basis, verdict: Verdict, remedy: str) -> Finding:
        return self.finding(
            verdict.sentence,
            basis=basis,
            remedy=verdict.remedy or remedy,
            locations=verdict.places,
            ranks=verdict.ranks,
            because=verdict.reasons,
            severity=verdict.severity,
            what_if=verdict.what_if,
        )

    def judged_by(
        self, module: str, name: str, remedy: str = "", *arguments: object
    ) -> Callable[[RunRecord], Iterator[Finding | Refuted]]:
        """Return the ``in_run`` of a check of which a function of a record, and ``arguments``, passes the verdicts.

        Its module, named below ``ddpdoctor``, is imported when a run is judged: a source needs nothing of it.
        """

        def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
            verdicts = getattr(import_module(f"ddpdoctor.{module}"), name)
            yield from self.judged(record.job.kind, verdicts(record, *arguments), remedy)

        return in_run

    def reported_by(self, module: str, name: str, *arguments: object) -> Callable[[RunRecord], Iterator[Finding]]:
        """Return the ``in_run`` or ``in_log`` that is a function of the check, a record and ``arguments``.

        Its module is imported as late as that of ``judged_by``.
        """
        return lambda record: getattr(import_module(f"ddpdoctor.{module}"), name)(self, record, *arguments)


def _reasons(because: Reasons) -> tuple[Reason, ...]:
    several = tuple(because)
    return (several,) if several and isinstance(several[0], str) else several  # type: ignore[return-value]


def _fact(basis: Basis, text: str, place: Place, numbers: Numbers | None = None, rank: int | None = None) -> Fact:
    location, stack = (place, ()) if place is None or isinstance(place, Location) else (place.location, place.chain)
    return Fact(text=text, basis=basis, numbers=numbers or {}, rank=rank, location=location, stack=stack)


AVERAGING = frozenset(
    {
        "wraps",
        "wrap_changes",
        "forwards",
        "backwards",
        "missing_gradients",
        "optimizer_steps",
        "gradient_digests",
        "gradients_taken",
        "written_averages",
    }
)
"""What shows whether gradients were averaged over the ranks."""


class LoadedCheck(msgspec.Struct, frozen=True, kw_only=True):
    """A check with its functions and its documentation, ready to be run."""

    check: Check
    documentation: str
    """The module's docstring."""
    in_source: Callable[[Script], Iterator[Finding]] | None = None
    in_run: Callable[[RunRecord], Iterator[FoundInRun]] | None = None
    in_log: Callable[[RunRecord], Iterator[FoundInRun]] | None = None
    """Of a record that was read from what a dead job left. A check with a severity in a log and no such function
    reports the causes that it stands for, with the remedy that ``diagnosis.logs.remedies`` has for them."""
    in_restart: Callable[[Restart], Iterator[FoundInRun]] | None = None
    """Of a rehearsal and that of the job's second start."""


class Gone(msgspec.Struct, frozen=True, kw_only=True):
    """A check that there was; its code is given to no other."""

    name: str
    since: str
    """The version without it."""
    into: str = ""
    """The code of the check that reports it now; empty where none does."""


NEEDS_A_RUN = "needs a rehearsal"
"""The reason of a check of runs alone where only the source was asked for."""
ASKED_FOR: Mapping[str, str] = {"equivalence": "the ranks were not compared with one process"}
"""Streams that a record has only where someone asks, and where it can be told: without them nothing is missing."""
CUT_SHORT = "the rehearsal was cut short"
"""Begins the reason of a check that needs more of the run than there was."""


class OutcomeState(str, Enum):
    """What became of a check."""

    FINDINGS = "findings"
    PASSED = "passed"
    """What it looks at was found and followed."""
    NOTHING_TO_LOOK_AT = "nothing-to-look-at"
    """The script has nothing of what it looks at."""
    NOT_EVALUATED = "not-evaluated"
    """Evidence that it needs is missing, or code was not followed; the reason says which."""
    BOUND_HIT = "bound-hit"
    """The analysis reached its bound before it knew."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one check in one examination."""

    code: str
    name: str
    state: OutcomeState
    reason: str = ""
    """Why it was not evaluated or where the bound was hit; empty otherwise."""
    by_nature: bool = False
    """It was not evaluated because only a run can show what it looks for, and none was asked for."""
    unstated: bool = False
    """It was not evaluated because a fact of the job that it needs was not given."""


class BoundHit(Exception):
    """Raised by a check whose analysis reached its bound before it knew; what it yielded until then stands.

    The argument is a sentence that names the function or the place where the bound was hit.
    """


class TooLittleEvidence(Exception):
    """Raised by a check of a run in which too little happened to judge it; it is then not evaluated.

    The argument is a clause that says how much was seen and how much it takes.
    """


class NotStated(Exception):
    """Raised by a check of a run that needs to know of the job what no run of it here tells and nobody has said.

    It is then not evaluated, and the examination is complete all the same: what it asks for was never given. The
    argument is a clause that says what is not known and how to say it.
    """
