"""The examination as text for people: what was done, the findings from worst to mildest, and one line of summary."""

from __future__ import annotations

from collections.abc import Iterable

from rich.text import Text

from ddpdoctor.check import CUT_SHORT, NEEDS_A_RUN, OutcomeState
from ddpdoctor.examination import Examination, RehearsalSection, Unreached
from ddpdoctor.finding import Severity, grouped, shown_path
from ddpdoctor.report.layout import note_lines, paragraph, spaced, to_string
from ddpdoctor.report.streams import one_line, visible

PLACES_SHOWN = 4
"""How many places that the rehearsal did not reach are named."""
_DEVICES = {"cpu": "CPU", "cuda": "GPU", "stand-in": "CPU instead of GPU"}
_GATE_VERDICTS = {"clean": "Gate passed: ", "findings": "Gate failed: ", "inconclusive": ""}
_VERDICT_STYLES = {"clean": "bold green", "findings": "bold red", "inconclusive": "bold yellow"}


def render(examination: Examination, width: int, *, colour: bool) -> str:
    """Render the examination for ``width`` columns."""
    if examination.parts:
        return "\n".join(render(part, width, colour=colour) for part in examination.parts)
    if examination.autopsy is not None:
        from ddpdoctor.report import autopsy_text

        return autopsy_text.render(examination, examination.autopsy, width, colour=colour)
    blocks = [
        paragraph(Text(what_was_done(examination)), width, indent=0),
        *(_finding_blocks(examination, width) if examination.findings else ()),
        _rehearsal_block(examination, width),
        note_lines(_notes(examination), width),
    ]
    if examination.gate is not None:
        from ddpdoctor.report import gate_text

        blocks.append(gate_text.lines_of(examination.gate, width))
    return to_string(spaced([*blocks, _summary(examination, width)]), colour=colour)


def what_was_done(examination: Examination) -> str:
    """Say in one line which files were read and what was rehearsed, how long, and on what."""
    source, rehearsal = examination.source, examination.rehearsal
    target = one_line(examination.target)
    read = f"Read {_count(source.files, 'file')}"
    if examination.scripts:
        scripts = _count(len(examination.scripts), "script")
        return f"{read} in {source.seconds:.2f} s: {scripts} and what they import; nothing was rehearsed."
    if rehearsal.status == "skipped":
        return f"{read} in {source.seconds:.2f} s; {target} was not rehearsed."
    if not rehearsal.ranks and not rehearsal.seconds:
        return f"{read} in {source.seconds:.2f} s; {target} could not be rehearsed."
    device = f" ({_DEVICES.get(rehearsal.device, one_line(rehearsal.device))})" if rehearsal.device else ""
    more = rehearsal.ranks_of_job > rehearsal.ranks > 1
    number = f"{rehearsal.ranks} of {rehearsal.ranks_of_job} ranks" if more else _count(rehearsal.ranks, "rank")
    ranks = f" on {number}{device}" if rehearsal.ranks else ""
    steps, seconds = _count(rehearsal.steps, "step"), f"{rehearsal.seconds:.1f} s"
    size = rehearsal.batch_size
    batches = f", batches cut to {_count(size, 'sample')}" if size is not None else ""
    # What it could write elsewhere is not known to be discarded.
    what = "the files it wrote were" if rehearsal.not_held_back else "everything it wrote was"
    kept = f" In an overlay: {what} discarded." if rehearsal.overlay else ""
    beyond = ""
    if rehearsal.not_held_back:
        beyond = f" Not isolated: it {one_line(' and '.join(rehearsal.not_held_back))}."
    if rehearsal.pretended:
        beyond += f" Pretended because missing: {one_line(', '.join(rehearsal.pretended))} (not with --no-pretend)."
    if rehearsal.status == "completed":
        return f"{read}; rehearsed {target}{ranks}{batches}: {steps} in {seconds}.{kept}{beyond}"
    end = "stopped" if rehearsal.status == "stopped" else "failed"
    return f"{read}; rehearsed {target}{ranks}{batches}: {end} after {steps}, {seconds}.{kept}{beyond}"


def _finding_blocks(examination: Examination, width: int) -> Iterable[list[Text]]:
    # What finds nothing, as most runs do, needs none of it.
    from ddpdoctor.report.finding_text import explanation_lines, finding_lines, folded_advice_lines

    advice = [finding for finding in examination.findings if finding.severity is Severity.ADVICE]
    for finding in examination.findings:
        if finding.severity is not Severity.ADVICE:
            yield finding_lines(finding, examination.root, width)
    for group in grouped(advice, lambda finding: finding.code).values():
        yield folded_advice_lines(group, examination.root, width)
    yield explanation_lines(examination.findings, width)


def _rehearsal_block(examination: Examination, width: int) -> list[Text]:
    rehearsal = examination.rehearsal
    if rehearsal.status in ("completed", "skipped"):
        return []
    from_run = [finding for finding in examination.findings if finding.basis & {"rehearsal", "run", "log", "dump"}]
    explained = any(finding.severity is Severity.ERROR for finding in from_run)
    told = any(finding.trouble in rehearsal.told_by for finding in from_run)
    if told or (explained and rehearsal.status == "stopped"):
        return []
    heading = Text.assemble(("rehearsal ", "bold"), (rehearsal.status, "bold yellow"))
    lines = [heading, *paragraph(Text(one_line(rehearsal.reason)), width)]
    return lines + _last_exception(rehearsal, width, with_output=not explained)


def _last_exception(rehearsal: RehearsalSection, width: int, *, with_output: bool) -> list[Text]:
    lines: list[Text] = []
    if with_output and rehearsal.output.strip():
        lines.append(Text("  the end of its output:", "dim"))
        for words in visible(rehearsal.output).splitlines():
            lines += [Text.assemble(("  | ", "dim"), line) for line in paragraph(Text(words), width - 4, indent=0)]
    if rehearsal.hint:
        from ddpdoctor.report.finding_text import label

        lines += label("do", Text(visible(rehearsal.hint)), width)
    return lines


def _notes(examination: Examination) -> list[str]:
    notes = [*examination.source.notes, *examination.rehearsal.notes, *examination.notes]
    # What of the training the rehearsal did not come to.
    places = examination.rehearsal.unreached
    if not places:
        return notes
    shown = "; ".join(_place(place, examination.root) for place in places[:PLACES_SHOWN])
    more = f"; and {_count(len(places) - PLACES_SHOWN, 'more place')}" if len(places) > PLACES_SHOWN else ""
    return [*notes, f"not reached: {shown}{more}. More `--batches`, or `--full`, reach further."]


def _place(place: Unreached, root: str) -> str:
    lines = f"{place.first_line}-{place.last_line}" if place.last_line > place.first_line else str(place.first_line)
    calls = f" ({', '.join(f'{name}()' for name in place.calls[:2])})" if place.calls else ""
    waits = f", which {'waits' if lines.isdigit() else 'wait'} for `{place.waits_for}`" if place.waits_for else ""
    return f"{shown_path(place.file, root)}:{lines}{calls}{waits}"


def _summary(examination: Examination, width: int) -> list[Text]:
    counts = ""
    if examination.findings:
        from ddpdoctor.report.finding_fields import counted

        counts = counted(examination.findings)
    found = f"Found {counts}" if counts else "No finding"
    checks = _what_became_of_the_checks(examination)
    if examination.refuted:
        checks += f"; the rehearsal refuted {_count(len(examination.refuted), 'suspicion')} of the source"
    if examination.gate is not None:
        verdict = _GATE_VERDICTS[examination.verdict]
        beyond = f"{counts} beyond {one_line(examination.gate.against)}" if counts else "nothing new"
        found = f"{verdict}{beyond[0].upper() if not verdict else beyond[0]}{beyond[1:]}"
    if not examination.recognised:
        sentence = f"Inconclusive: no distributed training was recognised in {one_line(examination.target)}."
    elif examination.verdict == "inconclusive":
        sentence = f"Inconclusive: {found[0].lower()}{found[1:]}, and not everything could be examined; {checks}."
    elif examination.findings and examination.verdict == "clean":
        sentence = f"{found}, none at or above --fail-on {examination.fail_on.value}; {checks}."
    elif examination.rehearsal.status in ("stopped", "failed"):
        sentence = f"{found}; the rehearsal ended early: {checks}."
    else:
        sentence = f"{found}; {checks}."
    return paragraph(Text(sentence, _VERDICT_STYLES[examination.verdict]), width, indent=0)


def _what_became_of_the_checks(examination: Examination) -> str:
    """Return how many checks passed, had nothing to look at, and were not evaluated, and why the first of these."""
    outcomes = examination.outcomes
    passed = sum(outcome.state is OutcomeState.PASSED for outcome in outcomes)
    idle = sum(outcome.state is OutcomeState.NOTHING_TO_LOOK_AT for outcome in outcomes)
    blind = [outcome for outcome in outcomes if outcome.state in (OutcomeState.NOT_EVALUATED, OutcomeState.BOUND_HIT)]
    of_run = sum(outcome.by_nature and outcome.reason == NEEDS_A_RUN for outcome in blind)
    unstated = sum(outcome.unstated for outcome in blind)
    others = [outcome for outcome in blind if not outcome.by_nature and not outcome.unstated]
    cut = sum(outcome.reason.startswith(CUT_SHORT) for outcome in others)
    # What waits for a later step was looked at in the source alone.
    reached = " on what the steps reached" if any(gap.waits_for for gap in examination.rehearsal.unreached) else ""
    parts = [f"{_count(passed, 'check')} passed{reached}"] if passed or not blind else []
    parts += [f"{idle} had nothing to look at"] if idle else []
    parts += [f"{cut} not evaluated because the run was cut short"] if cut else []
    parts += [f"{of_run} {'needs' if of_run == 1 else 'need'} a run"] if of_run else []
    parts += [f"{unstated} not evaluated because [tool.ddpdoctor.job] does not set them"] if unstated else []
    rest = [outcome for outcome in others if not outcome.reason.startswith(CUT_SHORT)]
    if rest:
        parts.append(f"{len(rest)} not evaluated: {one_line(rest[0].reason)}")
    if blind and not parts:
        parts.append(f"{len(blind)} not evaluated: {one_line(blind[0].reason)}")
    text = ", ".join(parts) + (" (the HTML and JSON reports list each)" if others else "")
    return text if passed or not blind else f"{_count(len(outcomes), 'check')}: {text}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
