"""Asks the checks about a watched job: those that the project wants, less what its comments suppress."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from ddpdoctor.catalogue.registry import CatalogueEntry, load, read_catalogue, standing_for
from ddpdoctor.catalogue.run_checks import run_live_checks
from ddpdoctor.catalogue.select import chosen_checks, unignored
from ddpdoctor.config.settings import find_settings
from ddpdoctor.config.suppressions import Suppression, suppress, suppressions_in
from ddpdoctor.diagnosis.divergence import describe
from ddpdoctor.diagnosis.divergence.divergence import Divergence
from ddpdoctor.diagnosis.divergence_kind import classify
from ddpdoctor.diagnosis.hosts import placed
from ddpdoctor.diagnosis.live.lasting_waits import LastingWait
from ddpdoctor.diagnosis.performance.verdict import SEE_ALL
from ddpdoctor.files.source_text import source_of
from ddpdoctor.finding import Fact, Finding, Severity, Trouble
from ddpdoctor.findings.fingerprint import with_fingerprints
from ddpdoctor.findings.merge import merge
from ddpdoctor.monitor.finding_hold import OF_THE_MOMENT
from ddpdoctor.monitor.last_standstill import is_of_the_end
from ddpdoctor.monitor.snapshot import FindingView
from ddpdoctor.record.model import RunRecord
from ddpdoctor.what_if.gains import Gains


class LiveChecks:
    """The checks of one watched job."""

    def __init__(self, root: str, select: Sequence[str] = (), ignore: Sequence[str] = ()) -> None:
        """Read the settings of the project that ``root`` is in.

        Raises ConfigurationError for wrong settings and UsageError for words that mean no check.
        """
        self._root = root
        self._settings = find_settings(Path(root))
        self._catalogue = read_catalogue()
        self._chosen = chosen_checks(self._catalogue, select, ignore, self._settings)
        self._codes = {entry.code: entry.code for entry in self._catalogue.entries}
        self._codes |= {entry.name: entry.code for entry in self._catalogue.entries}
        self._comments: dict[str, tuple[Suppression, ...]] = {}
        self._gains = Gains()

    def findings(self, record: RunRecord, *, stands: bool = False) -> tuple[Finding, ...]:
        """Return what the checks find in a record, from worst to mildest; a check that fails costs its own finding
        only.

        ``stands``: those are not asked that judge by measured steps how fast the job is, which takes seconds with
        thousands of ranks, while a hang has to be reported.
        """
        if self._settings.thresholds:
            job = msgspec.structs.replace(record.job, thresholds=self._settings.thresholds)
            record = msgspec.structs.replace(record, job=job)
        chosen = [entry for entry in self._chosen if not _judges_speed(entry)] if stands else self._chosen
        results = unignored(run_live_checks(chosen, record), self._settings, self._catalogue)
        seen = [finding for result in results for finding in result.from_run]
        for finding in seen:
            if finding.location is not None and finding.location.file not in self._comments:
                self._comments[finding.location.file] = _comments_in(finding.location.file)
        kept = suppress(merge((), seen), self._comments, self._codes).kept
        named = self._gains.added_to(with_fingerprints(kept, self._root), record)
        return tuple(msgspec.structs.replace(finding, title=placed(finding.title, record)) for finding in named)

    def of_divergence(self, divergence: Divergence, record: RunRecord, holding: Sequence[Finding]) -> Finding:
        """Return the finding of a divergence among those that hold; made of it where no check reports it (yet).

        So a standstill that is shown always has a code, ranks and a place.
        """
        trouble = classify(divergence, record)
        told = [finding for finding in holding if finding.trouble == trouble]
        told += [finding for finding in holding if finding.severity is Severity.ERROR and _can_part_ranks(finding)]
        if told:
            return told[0]
        entry = standing_for(self._catalogue, trouble)
        finding = Finding(
            code=entry.code,
            name=entry.name,
            trouble=trouble,
            severity=Severity.ERROR,
            title=placed(describe.title(divergence), record),
            ranks=describe.ranks(divergence),
            locations=describe.locations(divergence),
            basis=frozenset({"run"}),
            evidence=describe.facts(divergence, "run"),
            remedy=_REMEDY,
        )
        return with_fingerprints((finding,), self._root)[0]

    def with_wait(
        self, views: tuple[FindingView, ...], ended_in: tuple[LastingWait, str], record: RunRecord
    ) -> tuple[FindingView, ...]:
        """Return the findings of a job that was ended while ranks waited for one that worked: that wait is among
        them.
        """
        finding = self.of_wait(ended_in, record)
        others = [view for view in views if view.finding.code != finding.code and not is_of_the_end(view.finding)]
        return (FindingView(finding=finding, since_ns=ended_in[0].since_ns), *others)

    def of_wait(self, ended_in: tuple[LastingWait, str], record: RunRecord) -> Finding:
        """Return the finding of a wait in which a job was ended."""
        wait, said = ended_in
        heard = bool(wait.unseen) or any(rank.rank == wait.late for rank in record.ranks)
        trouble: Trouble = "long-wait" if heard else "no-rendezvous"
        entry = standing_for(self._catalogue, trouble)
        finding = Finding(
            code=entry.code,
            name=entry.name,
            trouble=trouble,
            severity=Severity.WARNING if heard else Severity.ERROR,
            title=placed(said, record),
            ranks=wait.unseen or (wait.late,),
            locations=wait.locations,
            basis=frozenset({"run"}),
            evidence=tuple(
                Fact(text=f"the stack of rank {rank} then", basis="run", rank=rank, stack=stack)
                for rank, stack in wait.stacks
            ),
            remedy=_UNSEEN_REMEDY if wait.unseen else _WAIT_REMEDY if heard else _MISSING_REMEDY,
        )
        return with_fingerprints((finding,), self._root)[0]


_WAIT_REMEDY = (
    "Check whether that work should take so long: divide it between the ranks or do it before the job, or give the "
    "group a timeout that covers it. If it never ends, check what its loop waits for."
)
_UNSEEN_REMEDY = f"Check these ranks on the nodes where they run. {SEE_ALL}"
_MISSING_REMEDY = "Check that this rank was started at all, with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE."
_REMEDY = "Compare what the ranks do at these lines: all of them must reach the same collectives."


def _judges_speed(entry: CatalogueEntry) -> bool:
    """Return whether a check judges measured steps, and neither proves that something is wrong nor reports a wait."""
    check = load(entry).check
    is_error = check.severity.get("run") is Severity.ERROR
    return "step_tracks" in check.needs_of("run") and not is_error and check.stands_for not in OF_THE_MOMENT


def _can_part_ranks(finding: Finding) -> bool:
    """Return whether an error is one of those that can make ranks part."""
    return finding.family in ("data", "gradients", "collectives", "death")


def _comments_in(file: str) -> tuple[Suppression, ...]:
    try:
        return suppressions_in(file, source_of(file))
    except (OSError, ValueError):
        return ()
