"""What one examination of a script yields: the data that every report renders."""

from __future__ import annotations

from typing import Literal

import msgspec

from ddpdoctor.check import Outcome
from ddpdoctor.equivalence_section import EquivalenceSection
from ddpdoctor.errors import ExitCode
from ddpdoctor.finding import Finding, Location, Severity, Trouble

Change = Literal["same", "grown", "within", "shrunk", "new"]
"""``within``: grown, and by no more than is allowed; ``new``: there is nothing to compare with."""


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """What one line contributes to a figure that changed."""

    what: str
    """What is done there, such as ``all_reduce``."""
    location: Location | None
    """Where it stands now; None when it is gone, or no line of the user's did it."""
    shown: str
    """The same as a text, ``train.py:40``; of a line that is gone where it stood."""
    before: float
    now: float


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One metric of the budget, now and before."""

    metric: str
    label: str
    """In words: ``collectives a step``."""
    unit: Literal["", "bytes"] = ""
    before: float | None
    """None when there is nothing to compare with."""
    now: float
    change: Change
    differences: tuple[Difference, ...] = ()
    """The lines that changed, what brought most first."""


class TimeComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Step times of pairs of rehearsals, one of each revision."""

    pairs: int
    steps: int
    """Steps of each side that were timed."""
    before_ms: float
    """Median of a step."""
    now_ms: float
    change: float
    """0.05 is 5% slower."""
    low: float
    """The 95% interval of ``change`` …"""
    high: float
    allowed: float
    slower: bool
    """The whole interval lies above what is allowed."""
    note: str = ""
    """Why there is no interval, or what it lacks."""


class GateSection(msgspec.Struct, frozen=True, kw_only=True):
    """A gate's comparison of one target."""

    against: str
    """The baseline file, or ``the revision REV``."""
    written: bool = False
    """The baseline was written, or made smaller."""
    known: int = 0
    """Findings that the baseline holds and that are still there."""
    gone: tuple[str, ...] = ()
    """Findings of the baseline that are there no more, as sentences."""
    allowed_growth: float = 0.0
    steps: int = 0
    """Steps that the figures rest on."""
    doubt: str = ""
    """Why it could not be compared, as a clause; the verdict is inconclusive then."""
    figures: tuple[Figure, ...] = ()
    times: TimeComparison | None = None
    reproduce: str = ""
    """The command, to be pasted, that gates this target again."""
    accept: str = ""
    """The one that writes the baseline anew; empty where there is none."""
    notes: tuple[str, ...] = ()


Verdict = Literal["clean", "findings", "inconclusive"]
Confidence = Literal["certain", "probable", "none"]
Advice = Literal["retry", "fix-the-script", "replace-the-node", "unknown"]


class SourceSection(msgspec.Struct, frozen=True, kw_only=True):
    """What became of reading the source."""

    status: Literal["read", "failed"]
    """``failed`` when a script that was to be examined could not be read; the notes say why."""
    files: int
    seconds: float
    notes: tuple[str, ...] = ()
    """What could not be read, in sentences."""


class Unreached(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """Lines of the training that no rank of the rehearsal ran."""

    file: str
    """Absolute path."""
    first_line: int
    last_line: int
    function: str = ""
    """The function around them; empty at module level."""
    calls: tuple[str, ...] = ()
    """Functions of the same file that they call; where they call none, the first other one."""
    waits_for: str = ""
    """The condition on a count of steps, or on what else training changes, that no step has met; empty for none."""


class RehearsalSection(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the rehearsal."""

    status: Literal["completed", "stopped", "failed", "skipped"]
    reason: str = ""
    """A sentence when it was not completed."""
    hint: str = ""
    """What the user can do about it."""
    output: str = ""
    """The script's own last words, when it failed."""
    told_by: frozenset[Trouble] = frozenset()
    """Troubles of which a finding of the run says what the reason says, and more."""
    ranks: int = 0
    ranks_of_job: int = 0
    """How many the launch command starts; 0 when there was none, or it does not say."""
    steps: int = 0
    seconds: float = 0.0
    device: str = ""
    batch_size: int | None = None
    """Samples that the loaders' batches were cut to; None when they were kept."""
    passes_cut: bool = False
    """Some pass over a loader was ended before its last batch."""
    overlay: bool = False
    """What the ranks wrote went to an overlay, and was thrown away."""
    unreached: tuple[Unreached, ...] = ()
    """By file and line."""
    not_held_back: tuple[str, ...] = ()
    """What the script did beyond this job, as predicates: ``started another program (nvidia-smi)``."""
    pretended: tuple[str, ...] = ()
    """What this machine lacks and the rehearsal served in its place: ``MNIST of torchvision (random images)``."""
    notes: tuple[str, ...] = ()

    @property
    def all_notes(self) -> tuple[str, ...]:
        """The notes, with what was not held back as a sentence before them: for reports that have no first line."""
        pretended = (f"pretended: {what}" for what in self.pretended)
        return (*(f"not isolated: the script {done}" for done in self.not_held_back), *pretended, *self.notes)


class Culprit(msgspec.Struct, frozen=True, kw_only=True):
    """Who the first cause of a death is about, as far as it is known."""

    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()


class FirstCause(msgspec.Struct, frozen=True, kw_only=True):
    """The first cause of a death in one line."""

    code: str
    name: str
    title: str


class AutopsySection(msgspec.Struct, frozen=True, kw_only=True):
    """What an autopsy has read, and what it lacks."""

    logs: int = 0
    lines: int = 0
    dumps: int = 0
    error_files: int = 0
    processes: int = 0
    """Living ranks that were looked at."""
    runs: int = 0
    """Runs that ddpdoctor had recorded."""
    ranks: tuple[int, ...] = ()
    """Ranks of which something is known."""
    attempts: int = 1
    """How often the launcher started the ranks."""
    certain: bool = False
    """The first cause is known, without a doubt."""
    first_cause: FirstCause | None = None
    culprit: Culprit = Culprit()
    echoes: tuple[str, ...] = ()
    """The titles of what followed from the first cause."""
    confidence: Confidence = "none"
    advice: Advice = "unknown"
    """What a launcher may do."""
    missing: tuple[str, ...] = ()
    """Evidence that is missing, and how to get it next time, in sentences."""
    seconds: float = 0.0


class RefutedSuspicion(msgspec.Struct, frozen=True, kw_only=True):
    """What the source made suspicious and the run cleared."""

    code: str
    name: str
    location: Location | None
    reason: str
    """What the run showed: a sentence."""


class Examination(msgspec.Struct, frozen=True, kw_only=True):
    """The merged diagnosis of one script, or of the sources of several."""

    target: str
    """As the user named it."""
    root: str
    """Absolute directory that paths are shown relative to."""
    verdict: Verdict
    exit_code: ExitCode
    complete: bool
    """Everything that was asked for was examined."""
    recognised: bool = True
    """Something of a distributed training was found; False where nothing that was read has any."""
    fail_on: Severity
    source: SourceSection
    rehearsal: RehearsalSection
    findings: tuple[Finding, ...]
    """Worst first."""
    outcomes: tuple[Outcome, ...]
    equivalence: EquivalenceSection | None = None
    """Of a rehearsal that was compared with one process."""
    refuted: tuple[RefutedSuspicion, ...] = ()
    """Suspicions of the source that are no findings because the run proved that they are not so."""
    notes: tuple[str, ...] = ()
    """Broken third-party checks and the like."""
    autopsy: AutopsySection | None = None
    """Of an autopsy; then nothing was read of the source and nothing rehearsed."""
    gate: GateSection | None = None
    """Of a gate: the comparison with a baseline or another revision."""
    parts: tuple[Examination, ...] = ()
    """Of a gate of several targets: each of them; the rest is put together from them."""
    scripts: tuple[str, ...] = ()
    """When directories or several scripts were asked for, those that were examined; otherwise empty."""


def not_rehearsed() -> RehearsalSection:
    """Return the section of an examination that was asked for the source only."""
    return RehearsalSection(status="skipped", reason="only the source was requested (`--static`)")
