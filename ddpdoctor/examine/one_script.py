"""Examines a script: reads its source, rehearses it, runs the checks on both, and merges what they say.

``ddpdoctor.api`` has the functions that are public.

``examine`` raises UsageError for a script that cannot be read, ConfigurationError for a damaged installation, and
KeyboardInterrupt when it is interrupted, after it has ended every process that it started.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from ddpdoctor.catalogue.registry import Catalogue, CatalogueEntry, load, read_catalogue
from ddpdoctor.catalogue.run_checks import CheckResult, outcome_of, run_checks, run_live_checks
from ddpdoctor.catalogue.select import (
    NO_COMMENTS,
    Comments,
    judging,
    suppress,
    unused_suppressions,
)
from ddpdoctor.check import CUT_SHORT, Outcome, OutcomeState
from ddpdoctor.config import NO_SETTINGS, Settings
from ddpdoctor.equivalence_section import EquivalenceSection
from ddpdoctor.errors import ConfigurationError, DdpDoctorError, ExitCode, UnreadableScript, UsageError
from ddpdoctor.examination import Examination, RehearsalSection, SourceSection, Verdict, not_rehearsed
from ddpdoctor.examine.reading import Reading, choice_of, comments_in, reading_of, source_section, together
from ddpdoctor.finding import Fact, Finding, Location, Severity, Trouble, same_file, shown_path, with_fingerprints
from ddpdoctor.findings import DIVERGENCES, SUSPECTED, confirmed, merge, unrefuted
from ddpdoctor.launch.request import STRESSES, Layout, Progress, RehearsalOptions, RehearsalRequest, Stress
from ddpdoctor.source.script.entry_point import is_entry
from ddpdoctor.source.script.script import uses_part

if TYPE_CHECKING:
    from ddpdoctor.examine.equivalence import Against
    from ddpdoctor.record.model import RunRecord
    from ddpdoctor.source.script.script import Script

    Proofs = tuple[tuple[Trouble, RunRecord], ...]

# Says what a rehearsal has to say about suspicions of the source that it did not confirm.


class Reached(msgspec.Struct, frozen=True):
    """The lines that ranks ran, by file."""

    lines: Mapping[str, frozenset[int]] = {}
    """Those that some rank ran."""
    alone: Mapping[str, Mapping[int, tuple[int, ...]]] = {}
    """Those of them that not all ranks ran, with the ranks that did; only where that is certain."""
    is_whole: bool = True
    """They are known from the script's beginning, and not from that of training."""


def reached_lines(record: RunRecord | None) -> Reached | None:
    """Return the lines that the ranks of a run ran; None when that is not known."""
    if record is None or record.stream("lines").state != "complete":
        return None
    ranks = {one.rank for one in record.lines}
    lines: dict[str, frozenset[int]] = {}
    alone: dict[str, dict[int, tuple[int, ...]]] = {}
    for file in {one.file: None for one in record.lines}:
        of_file = [one for one in record.lines if one.file == file]
        lines[file] = frozenset().union(*(one.lines for one in of_file))
        if not any(one.unwatched for one in of_file):
            by_chance = frozenset().union(*(one.by_chance for one in of_file))
            ran = {line: tuple(one.rank for one in of_file if line in one.lines) for line in lines[file] - by_chance}
            alone[file] = {line: those for line, those in ran.items() if len(those) < len(ranks)}
    # What a rank ran just before it was ended is in what it called, and not yet among its lines.
    for frame in (frame for site in record.sites for frame in site.frames):
        lines[frame.file] = lines.get(frame.file, frozenset()) | {frame.line}
    return Reached(lines, alone, is_whole=not any(one.late for one in record.lines))


def with_confirmation(
    findings: Iterable[Finding],
    results: Iterable[CheckResult],
    rehearsal: RehearsalSection,
    reached: Reached | None,
    root: str,
) -> tuple[Finding, ...]:
    """Mark the suspicions that a rehearsal could have confirmed and did not.

    Only checks that looked at the run can have confirmed one, and checks of divergences, which the run may call by
    another name. Advice of a check that otherwise warns is of habits that a run does not show, unless it says so.
    """
    if rehearsal.status == "skipped":
        return tuple(findings)
    looked = {result.code for result in results if result.looked_at_run}
    usual = {result.code: result.source_severity for result in results if result.source_severity is not None}
    nodes_wanted = {result.code: result.nodes_wanted for result in results if result.nodes_wanted}

    def confirmed(finding: Finding) -> Finding:
        by_a_run = finding.code in looked or (bool(looked) and finding.trouble in SUSPECTED)
        if finding.basis != {"source"} or not by_a_run:
            return finding
        if finding.severity is Severity.ADVICE is not usual.get(finding.code, Severity.ADVICE):
            return finding
        sentence = _sentence(finding, rehearsal, reached, root, nodes_wanted.get(finding.code, 0))
        return msgspec.structs.replace(finding, unconfirmed=sentence)

    return tuple(map(confirmed, findings))


def _sentence(
    finding: Finding, rehearsal: RehearsalSection, reached: Reached | None, root: str, nodes_wanted: int
) -> str:
    place, seen = finding.location, reached
    if reached is not None and not reached.is_whole:
        reached = None
    if place is not None and _was_missed(place, rehearsal, reached):
        return f"not rehearsed: no rank reached {shown_path(place.file, root)}:{place.line}"
    if nodes_wanted and (rehearsal.status == "completed" or reached is not None):
        return f"not confirmed: it cannot occur on one node; use `--layout {nodes_wanted}x1`"
    if rehearsal.status == "completed":
        shortened = ", on the first batches of each pass" if rehearsal.passes_cut else ""
        apart = _where_ranks_parted(finding, seen) if finding.trouble in SUSPECTED else None
        if apart is not None:
            from ddpdoctor.diagnosis.wording import rank_list

            where, ranks = apart
            line = f"{shown_path(where.file, root)}:{where.line}{'' if reached is not None else ' in training'}"
            told = f"only {rank_list(ranks)} ran {line}, and nothing came of it in the rehearsal"
            return f"not confirmed: {told}{shortened}"
        return f"not confirmed: it did not occur in the rehearsal{shortened}"
    if reached is None and not rehearsal.steps:
        return "not rehearsed: no training step was made"
    return "not confirmed: the rehearsal ended before it could occur"


def _where_ranks_parted(finding: Finding, reached: Reached | None) -> tuple[Location, tuple[int, ...]] | None:
    """Return the first place of a suspicion that some ranks ran and others did not, with those that did."""
    for place in finding.locations:
        for file, alone in reached.alone.items() if reached is not None else ():
            if place.line in alone and same_file(file, place.file):
                return place, alone[place.line]
    return None


def _was_missed(place: Location, rehearsal: RehearsalSection, reached: Reached | None) -> bool:
    """Return whether no rank reached a place; without all lines only code that is known to be unreached counts."""
    if reached is not None:
        return not _was_reached(place, reached)
    return any(
        same_file(one.file, place.file) and one.first_line <= place.line <= one.last_line for one in rehearsal.unreached
    )


def _was_reached(place: Location, reached: Reached) -> bool:
    lines = range(place.line, max(place.line, place.end_line) + 1)
    return any(ran.intersection(lines) for file, ran in reached.lines.items() if same_file(file, place.file))


# Rehearsals after a clean one: on pretended nodes and with injected causes, and what they add to the diagnosis.
#
# A second rehearsal is worth its time only when the first found nothing that a run can prove, and everything that it
# adds is distinguished from defects that happen by themselves: what breaks under an injected cause is a warning that
# names it.

SECOND_NODE = Layout(2, 1)
"""The smallest job in which a second node shows."""
_CAUSES = {
    "nan": "if one rank's loss is NaN",
    "short-batch": "if the last batch of a pass is short",
    "slow-rank0": "if rank 0 is slow between two steps",
}
_DONE = {
    "nan": "the output of rank 1's model was set to NaN in its third training forward",
    "short-batch": "training passes ended with the small last batch of their loader",
    "slow-rank0": "rank 0's clocks were advanced by the timeout of its group after the second step",
}
_BY_STRESS = DIVERGENCES | {"hang", "long-wait"}
"""What an injected cause may be blamed for: ranks that diverge, not numbers that are no numbers."""
_LEFT = frozenset({"early-exit", "exception"})


class Variant(msgspec.Struct, frozen=True):
    """One more rehearsal: another layout, or an injected cause."""

    layout: Layout | None = None
    stress: Stress = ""

    def __str__(self) -> str:
        return f"as {self.layout}" if self.layout is not None else f"under stress {self.stress}"


def variants(stress: Sequence[Stress], *, thorough: bool, spawns_ranks: bool, nodes: int) -> Iterator[Variant]:
    """Yield the rehearsals after a clean one; a script that starts its own ranks cannot be told of another node."""
    if thorough and nodes == 1 and not spawns_ranks:
        yield Variant(layout=SECOND_NODE)
    for kind in STRESSES:
        if thorough or kind in stress:
            yield Variant(stress=kind)


def is_clean(rehearsal: RehearsalSection, results: Sequence[CheckResult]) -> bool:
    """Return whether a rehearsal got to its end and proved nothing worse than advice, injected causes apart."""
    proved = [finding for result in results for finding in result.from_run if not finding.stress]
    return rehearsal.status == "completed" and not any(one.severity.at_least(Severity.WARNING) for one in proved)


def of_comparison(entries: Sequence[CatalogueEntry]) -> list[CatalogueEntry]:
    """Return the checks that look at the comparison with one process."""
    return [entry for entry in entries if "equivalence" in load(entry).check.needs]


def with_comparison(record: RunRecord, section: EquivalenceSection) -> RunRecord:
    """Return the record with the comparison; one that tells nothing is no evidence."""
    from ddpdoctor.record.model import StreamState

    state = StreamState("complete")
    if section.status == "inconclusive":
        state = StreamState("absent", f"whether one process would train the same is not known: {section.reason}")
    return msgspec.structs.replace(record, equivalence=(section,), streams={**record.streams, "equivalence": state})


def with_run_of(base: Sequence[CheckResult], more: Sequence[CheckResult]) -> tuple[CheckResult, ...]:
    """Return the results with those of checks that looked at a run again, beside what they say of the source."""
    again = {result.code: result for result in more}
    return tuple(_of_both(result, again[result.code]) if result.code in again else result for result in base)


def _of_both(base: CheckResult, run: CheckResult) -> CheckResult:
    of_source = "" if base.by_nature else base.gap
    return msgspec.structs.replace(
        run,
        from_source=base.from_source,
        gap=run.gap or of_source,
        unfollowed=base.unfollowed and not run.gap,
        bound_hit=base.bound_hit or run.bound_hit,
        crashed=base.crashed or run.crashed,
    )


def with_variant(base: Sequence[CheckResult], more: Sequence[CheckResult], variant: Variant) -> tuple[CheckResult, ...]:
    """Return the results with what one more rehearsal adds to them."""
    added = {result.code: tuple(_added(result.from_run, variant)) for result in more}
    extended = []
    for result in base:
        known = {(finding.location, finding.stress) for finding in result.from_run}
        new = tuple(one for one in added.get(result.code, ()) if (one.location, one.stress) not in known)
        extended.append(msgspec.structs.replace(result, from_run=(*result.from_run, *new)) if new else result)
    return tuple(extended)


def with_proof(base: Sequence[CheckResult], more: Sequence[CheckResult], trouble: Trouble) -> tuple[CheckResult, ...]:
    """Return the results with what an earlier rehearsal proved; that a later one leaves it out refutes nothing."""
    proved = {result.code: [one for one in result.from_run if one.trouble == trouble] for result in more}
    return tuple(
        msgspec.structs.replace(result, from_run=(*found, *result.from_run), refuted=())
        if (found := proved.get(result.code))
        else result
        for result in base
    )


def _added(findings: Sequence[Finding], variant: Variant) -> Iterator[Finding]:
    for finding in findings:
        if not variant.stress:
            yield finding
        elif finding.trouble in _BY_STRESS:
            # To stop on a loss that is no number is a decision, and an elastic launcher starts the job again.
            decided = variant.stress == "nan" and finding.trouble in _LEFT
            yield msgspec.structs.replace(
                finding,
                stress=variant.stress,
                severity=Severity.ADVICE if decided else Severity.WARNING,
                title=f"{_CAUSES[variant.stress]}: {finding.title}",
                evidence=(Fact(text=f"stress: {_DONE[variant.stress]}", basis="rehearsal"), *finding.evidence),
            )


def noted(
    rehearsal: RehearsalSection, variant: Variant, again: RehearsalSection, *, stressed: bool, found: bool
) -> RehearsalSection:
    """Return the section of the first rehearsal with what has to be said of one more.

    One that could not show what it was for makes the whole inconclusive. Ranks that all stop alike under an injected
    cause have shown it.
    """
    if variant.stress and not stressed and again.status == "completed":
        note = f"rehearsed again {variant}: it had nothing to act on"
        return msgspec.structs.replace(rehearsal, notes=(*rehearsal.notes, note))
    shown = again.status == "completed" or found or (bool(variant.stress) and again.status == "failed")
    if not shown:
        reason = f"rehearsed again {variant}: {again.reason}"
        return msgspec.structs.replace(
            rehearsal, status=again.status, reason=reason, hint=again.hint, output=again.output
        )
    how = "" if again.status == "completed" else f", ended by: {again.reason}"
    steps = f"{again.steps} step{'' if again.steps == 1 else 's'}"
    note = f"rehearsed again {variant}: {steps} in {again.seconds:.1f} s{how}"
    return msgspec.structs.replace(rehearsal, notes=(*rehearsal.notes, note))


OnProgress = Callable[[Progress], None]
_OF_GPUS = ("cuda", "CUDA", "ccelerat", "ightning", "transformers")
"""What a script speaks of that trains on GPUs wherever there are some."""


class ExamineRequest(RehearsalOptions, frozen=True, kw_only=True):
    """What to examine, how, and what counts as bad."""

    target: str
    """Path of the entry script, as the user gives it, or the dotted name of a module if ``launch`` says so."""
    static: bool = False
    """Read the source only; run nothing."""
    rehearsal_only: bool = False
    """Let the checks look at the rehearsal only; what the source alone makes suspicious is left out."""
    layout: Layout | None = None
    """Nodes that the rehearsal pretends, with their ranks; None for one node with ``nproc`` ranks."""
    stress: tuple[Stress, ...] = ()
    """Causes to inject, each in one more rehearsal after a clean one."""
    resume: Literal["", "after", "torn"] = ""
    """Rehearse a restart, too, from a checkpoint; with ``torn`` also from one whose save was broken off."""
    resume_with: str | None = None
    """The words by which the script is told to resume; None to look for its option."""
    resume_ranks: int = 0
    """Ranks of the restart; 0 for as many as the first start has."""
    thorough: bool = False
    """After a clean rehearsal: one as two nodes, one for each stress, and the comparison with one process."""
    equivalence: bool | None = False
    """Compare the ranks with one process after a rehearsal that was completed; None: after a clean one, if it was
    short enough for that or ``thorough`` is set."""
    against: str = ""
    """The command of another launch that the ranks are compared with in place of one process."""
    select: tuple[str, ...] = ()
    """Codes, prefixes of codes, or names; empty for what the settings say, or all checks."""
    ignore: tuple[str, ...] = ()
    fail_on: Severity = Severity.WARNING
    """Findings this bad or worse make the verdict ``findings``."""
    hint: bool = False
    """Note which findings of the source there is a patch for."""
    settings: Settings = NO_SETTINGS
    """Of the project, as ``find_settings`` reads them; ``fail-on``, ``exclude``, ``entry-points`` do not count here."""


def examine(request: ExamineRequest, on_progress: OnProgress = lambda progress: None) -> Examination:
    """Examine one script and return the merged diagnosis.

    A comparison with one process that was asked for and tells nothing makes it inconclusive.
    """
    refuse_contradictions(request)
    examination = examine_and_record(request, on_progress)[0]
    asked, section = request.equivalence or bool(request.against), examination.equivalence
    untold = section is None or section.status == "inconclusive"
    if asked and untold and examination.verdict == "clean":
        return msgspec.structs.replace(
            examination, verdict="inconclusive", exit_code=ExitCode.INCONCLUSIVE, complete=False
        )
    return examination


def refuse_contradictions(request: ExamineRequest) -> None:
    """Raise UsageError where one option rules out another: what was asked for must not be left out in silence."""
    if request.against and request.equivalence is False:
        raise UsageError("either `--no-equivalence` or `--against`, not both")
    runs = {"--resume": request.resume, "--stress": request.stress, "--against": request.against}
    asked = [option for option, wanted in {**runs, "--equivalence": request.equivalence}.items() if wanted]
    if request.static and asked:
        raise UsageError(f"`{asked[0]}` needs a run, and `--static` only reads the source", "Omit one of them.")


def examine_and_record(
    request: ExamineRequest, on_progress: OnProgress = lambda progress: None
) -> tuple[Examination, RunRecord | None]:
    """Examine one script; the merged diagnosis, and the record of its first rehearsal if there was one."""
    root = Path.cwd()
    choice = choice_of(read_catalogue(), request.settings, request.select, request.ignore)
    against = _other_launch(request, root)
    asked = True if against else request.equivalence
    started_s = time.perf_counter()
    script = _script(request)
    seconds = time.perf_counter() - started_s
    record, rehearsal, proofs, rehearsed = _rehearsed(request, script, root, on_progress)
    results = _results(request, choice.entries, script, record)
    for trouble, earlier in proofs:
        results = with_proof(results, run_live_checks(choice.entries, earlier), trouble)
    section = None
    if record is not None and rehearsed is not None and asked is not False:
        from ddpdoctor.diagnosis.training.equivalence_words import sentence
        from ddpdoctor.examine.equivalence import after_rehearsal

        wanted = True if asked else None if is_clean(rehearsal, results) else False
        section = after_rehearsal(
            rehearsed, rehearsal, record, results, on_progress, against, wanted=wanted, thorough=request.thorough
        )
        if section is not None:
            record = with_comparison(record, section)
            results = with_run_of(results, run_live_checks(of_comparison(choice.entries), record))
            if section.status != "differs":
                rehearsal = msgspec.structs.replace(rehearsal, notes=(*rehearsal.notes, sentence(section)))
    spawns_ranks = _spawns_ranks(request, script)
    nodes = request.layout.nodes if request.layout is not None else 1
    for variant in variants(request.stress, thorough=request.thorough, spawns_ranks=spawns_ranks, nodes=nodes):
        if not is_clean(rehearsal, results):
            break
        again = msgspec.structs.replace(request, layout=variant.layout or request.layout)
        further, again_section, *_ = _rehearsed(again, script, root, on_progress, variant.stress)
        more = _results(request, choice.entries, script, further)
        known, results = results, with_variant(results, more, variant)
        stressed = further is not None and further.job.stressed
        rehearsal = noted(rehearsal, variant, again_section, stressed=stressed, found=results != known)
    if request.resume and rehearsed is not None:
        from ddpdoctor.examine.resume import with_restart

        results, rehearsal = with_restart(
            rehearsed,
            script,
            request.resume_with,
            on_progress,
            results,
            rehearsal,
            torn=request.resume == "torn",
            ranks=request.resume_ranks,
        )
    reading = reading_of(
        script,
        results,
        choice,
        entry=is_entry(script),
        static=request.static,
        cut_short=bool(_cut_short(request, rehearsal)),
        judges_comments=not request.rehearsal_only,
        with_fixes=request.hint,
    )
    reached = reached_lines(record)
    examination = conclude_all(request, (reading,), rehearsal, choice.catalogue, seconds, reached=reached)
    return msgspec.structs.replace(examination, equivalence=section), record


def conclude_all(
    request: ExamineRequest,
    readings: Sequence[Reading],
    rehearsal: RehearsalSection,
    catalogue: Catalogue,
    seconds: float,
    notes: tuple[str, ...] = (),
    reached: Reached | None = None,
) -> Examination:
    """Make one diagnosis of all that was read, in so many seconds, and of the rehearsal of it if there was one."""
    root = str(Path.cwd())
    examination = conclude(
        request,
        root,
        source_section(readings, seconds),
        rehearsal,
        together(readings, root),
        (*catalogue.notes, *notes),
        judging(*comments_in(readings), catalogue),
        reached,
        recognised=any(reading.recognised for reading in readings),
    )
    if not request.hint:
        return examination
    from ddpdoctor.examine.reading import with_hint

    return with_hint(examination, [fix for reading in readings for fix in reading.fixes])


def unreadable(request: ExamineRequest, error: UnreadableScript) -> Examination:
    """Return what a document says of a script that is no Python: nothing was checked, and why; the exit code is 2."""
    source = SourceSection(status="failed", files=0, seconds=0.0, notes=(error.message,))
    return unchecked(request.target, request.fail_on, ExitCode.ERROR, source, not_rehearsed())


def unchecked(
    target: str, fail_on: Severity, exit_code: ExitCode, source: SourceSection, rehearsal: RehearsalSection
) -> Examination:
    """Return an examination in which no check has looked at anything."""
    return Examination(
        target=target,
        root=str(Path.cwd()),
        verdict="inconclusive",
        exit_code=exit_code,
        complete=False,
        fail_on=fail_on,
        source=source,
        rehearsal=rehearsal,
        findings=(),
        outcomes=(),
    )


def conclude(
    request: ExamineRequest,
    root: str,
    source: SourceSection,
    rehearsal: RehearsalSection,
    results: Sequence[CheckResult],
    notes: tuple[str, ...] = (),
    comments: Comments = NO_COMMENTS,
    reached: Reached | None = None,
    *,
    recognised: bool = True,
) -> Examination:
    """Merge what the checks said and pass the verdict. Pure: runs nothing, reads only the lines of the findings.

    What ``comments`` suppress is left out; those that suppress nothing are findings themselves. A finding at or above
    ``fail_on`` makes it ``findings``; otherwise a rehearsal that did not complete, a check that failed, missing
    evidence, code that was not followed, a bound that was hit, or a source in which nothing of a distributed training
    was ``recognised`` makes it ``inconclusive``, which is never ``clean``. ``reached`` holds the lines that were
    rehearsed, where that is known.
    """
    suspicions, refutations = unrefuted(
        [finding for result in results for finding in result.from_source],
        [(result.code, refuted) for result in results for refuted in result.refuted],
    )
    confirmations = [(result.code, one) for result in results for one in result.confirmed]
    suspicions = tuple(confirmed(suspicions, confirmations))
    seen = [finding for result in results for finding in result.from_run]
    sifted = suppress(merge(suspicions, seen), comments.by_file, comments.codes)
    unused = tuple(unused_suppressions(comments, sifted.used))
    kept = merge((*sifted.kept, *unused), ()) if unused else sifted.kept
    if seen:
        from ddpdoctor.examine.rehearsal_result import with_leaving

        kept = with_leaving(kept, {} if reached is None else reached.alone)
    findings = with_fingerprints(with_confirmation(kept, results, rehearsal, reached, root), root)
    gone = {finding.code for finding in sifted.suppressed} - {finding.code for finding in sifted.kept}
    standing = {finding.code for finding in (*suspicions, *seen)} - gone
    cut_short = _cut_short(request, rehearsal)
    outcomes = tuple(outcome_of(result, stands=result.code in standing, cut_short=cut_short) for result in results)
    recognised = recognised or bool(findings) or rehearsal.status == "completed"
    complete = source.status == "read" and not cut_short and not any(map(_incomplete, results, outcomes)) and recognised
    verdict, exit_code = _verdict(findings, request.fail_on, complete)
    crashed = tuple(f"{result.code} {result.name}: {result.gap}" for result in results if result.crashed)
    return Examination(
        target=request.target,
        root=root,
        verdict=verdict,
        exit_code=exit_code,
        complete=complete,
        recognised=recognised,
        fail_on=request.fail_on,
        source=source,
        rehearsal=rehearsal,
        findings=findings,
        refuted=refutations,
        outcomes=outcomes,
        notes=(*notes, *crashed),
    )


def _results(
    request: ExamineRequest, chosen: Sequence[CatalogueEntry], script: Script, record: RunRecord | None
) -> tuple[CheckResult, ...]:
    if not request.rehearsal_only:
        return run_checks(chosen, script, record, static=request.static)
    return run_live_checks(chosen, record) if record is not None else ()


def _script(request: ExamineRequest) -> Script:
    from ddpdoctor.source.script.script import read_module, read_script

    if not request.launch.module:
        return read_script(Path(request.target))
    from ddpdoctor.launch.rehearsal_plan import module_places

    return read_module(request.target, module_places(request.launch, request.python, static=request.static))


def _rehearsal_request(request: ExamineRequest, script: Script, root: Path, stress: Stress) -> RehearsalRequest:
    from ddpdoctor.launch.rehearsal_plan import ranks_to_start, refuse_layout
    from ddpdoctor.record.model import shared_fields
    from ddpdoctor.source.queries.job_kind import rank_options, wants_cuda
    from ddpdoctor.source.queries.rendezvous import required_local_rank, unknown_to_the_launcher

    layout = request.layout or Layout(1, ranks_to_start(request.launch, request.nproc))
    spawns_ranks = _spawns_ranks(request, script)
    if layout.nodes > 1:
        refuse_layout(layout, request.launch, request.target, spawns_ranks=spawns_ranks)
    by_old_launcher = request.launch.starter == "torch.distributed.launch"
    passed = unknown_to_the_launcher(script) if by_old_launcher else ""
    return RehearsalRequest(
        **{**shared_fields(request, RehearsalOptions), "nproc": layout.ranks},
        script=script.path if request.launch.module else root / request.target,
        module=request.target if request.launch.module else "",
        spawns_ranks=spawns_ranks,
        nodes=layout.nodes,
        stress=stress,
        slurm=uses_part(script, ("SLURM_",)),
        local_rank_option=required_local_rank(script) or passed,
        rank_options=rank_options(script),
        demands_cuda=wants_cuda(script, request.arguments),
        may_use_gpus=uses_part(script, _OF_GPUS),
        machine=request.settings.job,
    )


def _other_launch(request: ExamineRequest, root: Path) -> Against | None:
    """Return the launch that is compared with; raises UsageError for a command or a script that cannot be read."""
    if not request.against:
        return None
    from ddpdoctor.examine.equivalence import Against
    from ddpdoctor.launch.command_line import read_launch_line

    try:
        line = read_launch_line(tuple(shlex.split(request.against)), os.environ)
    except ValueError as error:
        raise UsageError(f"`--against {request.against}` is not a command line: {error}") from error
    asked = msgspec.structs.replace(request, target=line.target, arguments=line.arguments, launch=line.launch)
    return Against(request.against, _rehearsal_request(asked, _script(asked), root, ""))


def _rehearsed(
    request: ExamineRequest, script: Script, root: Path, on_progress: OnProgress, stress: Stress = ""
) -> tuple[RunRecord | None, RehearsalSection, Proofs, RehearsalRequest | None]:
    if request.static:
        return None, not_rehearsed(), (), None
    from ddpdoctor.examine.another_try import rehearse_until_shown
    from ddpdoctor.examine.rehearsal_result import could_not_rehearse, judge
    from ddpdoctor.monitor.rehearsal import rehearse

    rehearsal = _rehearsal_request(request, script, root, stress)

    def once(request: RehearsalRequest) -> tuple[RunRecord, RehearsalSection]:
        record = rehearse(request, on_progress)
        return record, judge(record, str(root), script)

    try:
        shown = rehearse_until_shown(rehearsal, once, lambda record: judge(record, str(root), script).hint)
    except (UsageError, ConfigurationError):
        raise
    except DdpDoctorError as error:
        return None, could_not_rehearse(error), (), None
    job = msgspec.structs.replace(shown.record.job, thresholds=request.settings.thresholds)
    return msgspec.structs.replace(shown.record, job=job), shown.section, shown.proofs, shown.request


def _spawns_ranks(request: ExamineRequest, script: Script) -> bool:
    """Return whether the script has to start its ranks itself, as it is launched here."""
    from ddpdoctor.source.queries.job_kind import starts_own_ranks

    by_python = request.launch.starter == "python"
    return not request.launch.has_launcher and starts_own_ranks(script, request.arguments, by_python=by_python)


def _cut_short(request: ExamineRequest, rehearsal: RehearsalSection) -> str:
    if request.static or rehearsal.status == "completed":
        return ""
    return f"{CUT_SHORT}: {rehearsal.reason}" if rehearsal.reason else CUT_SHORT


def _incomplete(result: CheckResult, outcome: Outcome) -> bool:
    """Return whether a check could not look at what was asked for."""
    blind = outcome.state in (OutcomeState.NOT_EVALUATED, OutcomeState.BOUND_HIT)
    return result.crashed or result.bound_hit or (blind and not result.unstated and not result.by_nature)


def _verdict(findings: Sequence[Finding], fail_on: Severity, complete: bool) -> tuple[Verdict, ExitCode]:
    if any(finding.severity.at_least(fail_on) for finding in findings):
        return "findings", ExitCode.FINDINGS
    return ("clean", ExitCode.CLEAN) if complete else ("inconclusive", ExitCode.INCONCLUSIVE)
