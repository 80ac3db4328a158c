"""One finding as lines of text: what, where, how it was seen, what to do, and the ranks' stacks beside each other."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from rich.cells import cell_len
from rich.text import Text

from ddpdoctor.files.untrusted import line_of
from ddpdoctor.finding import Basis, Fact, Finding, Frame, Location, Severity, in_user_code, rank_list
from ddpdoctor.report.finding_fields import SEEN, alike, doubt_of, excerpt, place_of, stacks_of, whereabouts
from ddpdoctor.report.layout import GAP, cut, cut_left, paragraph, side_by_side
from ddpdoctor.report.streams import one_line, visible

EXCERPT_LINES = 4
STACK_FRAMES = 6
FACTS = 8
"""How many of the facts, of the frames of a stack, and of the lines of an excerpt are shown; all are in the JSON."""
COLUMNS = 2
NARROWEST_COLUMN = 32

_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow", Severity.ADVICE: "bold cyan"}


def finding_lines(finding: Finding, root: str, width: int, seen: Mapping[Basis, str] = SEEN) -> list[Text]:
    """Lay out one finding; ``seen`` says where what it rests on was seen."""
    stacks = stacks_of(finding)
    lines = _headline(finding, root, width)
    if stacks:
        lines += [Text(), *_stack_columns(stacks, root, width), Text()]
    else:
        lines += _excerpt(finding.location, width)
    lines += _seen(finding, stacks, root, width, seen)
    if finding.unconfirmed:
        words, _, reason = finding.unconfirmed.partition(": ")
        lines += label(words, Text(one_line(reason)), width)
    lines += label("do", Text(one_line(finding.remedy)), width)
    return lines if finding.gain is None else lines + label("gain", Text(finding.gain.text), width)


def folded_advice_lines(findings: Sequence[Finding], root: str, width: int) -> list[Text]:
    """Lay out all advice of one check: the first in full, of the others the places."""
    lines = finding_lines(findings[0], root, width)
    others = []
    for finding in findings[1:]:
        doubt = doubt_of(finding) if doubt_of(finding) != doubt_of(findings[0]) else ""
        if finding.location is not None:
            others.append(place_of(finding.location, root) + (f" ({doubt})" if doubt else ""))
    if others:
        lines += label("also", Text(", ".join(others)), width)
    return lines


def explanation_lines(findings: Sequence[Finding], width: int) -> list[Text]:
    """Name the command that tells more of the checks that found something, the first of them written out."""
    first, *others = dict.fromkeys(finding.code for finding in findings) or [""]
    beside = f" (or {', '.join(others)})" if others else ""
    return paragraph(Text(f"ddpdoctor explain {first}{beside} tells more.", "dim"), width, indent=0) if first else []


def label(word: str, text: Text, width: int) -> list[Text]:
    """Return a paragraph behind a label."""
    return paragraph(text, width, Text.assemble("  ", (word, "bold")), indent=len(word) + 4)


def _headline(finding: Finding, root: str, width: int) -> list[Text]:
    heading = Text.assemble(
        (finding.severity.value, _STYLES[finding.severity]),
        "  ",
        (one_line(finding.name), "bold"),
        (f" ({one_line(finding.code)})", "dim"),
    )
    lines = paragraph(heading, width, indent=0)
    where = whereabouts(finding, root)
    if where:
        lines += paragraph(Text(where, "cyan"), width, fold=False)
    return lines + paragraph(Text(one_line(finding.title)), width)


def _excerpt(location: Location | None, width: int) -> list[Text]:
    lines = excerpt(location, EXCERPT_LINES)
    digits = len(str(lines[-1][0])) if lines else 0
    return [
        Text.assemble("    ", (f"{number:>{digits}} | ", "dim"), cut(line.rstrip(), width - digits - 7))
        for number, line in lines
    ]


def _seen(finding: Finding, stacks: Sequence[Fact], root: str, width: int, seen: Mapping[Basis, str]) -> list[Text]:
    """Return the facts under the basis on which they rest; a basis is named even where columns show all its facts."""
    facts = [fact for fact in finding.evidence if fact not in stacks]
    shown = facts[:FACTS]
    lines: list[Text] = []
    for basis, words in seen.items():
        if basis not in finding.basis:
            continue
        in_columns = {fact.basis for fact in stacks} - {fact.basis for fact in shown}
        where = ", see the columns" if basis in in_columns else ""
        lines.append(Text.assemble("  ", (f"seen {words}", "bold"), where))
        for fact in shown:
            if fact.basis == basis:
                sentence = one_line(fact.text) + _aside(fact, finding, root)
                lines += paragraph(Text(sentence), width, Text("    -"), indent=6)
    if len(facts) > FACTS:
        lines.append(Text(f"    - and {len(facts) - FACTS} more facts, listed in the JSON"))
    return lines


def _aside(fact: Fact, finding: Finding, root: str) -> str:
    """Return where a fact was seen, unless it says so or that is where the finding is; a call chain if it has one."""
    if fact.stack:
        frames = _user_frames(fact.stack)[:STACK_FRAMES]
        chain = [place_of(frame, root) for frame in frames]
        return f" ({' <- '.join(chain)})"
    if fact.location is None:
        return ""
    place = place_of(fact.location, root)
    known = finding.location is not None and place == place_of(finding.location, root)
    return "" if known or place.rpartition("/")[2] in fact.text else f" ({place})"


def _stack_columns(facts: Sequence[Fact], root: str, width: int) -> list[Text]:
    columns = COLUMNS
    column_width = (width - 2 - len(GAP) * (columns - 1)) // columns
    if column_width < NARROWEST_COLUMN:
        columns, column_width = 1, width - 2
    blocks = [_stack(ranks, said, stack, root, column_width) for (said, stack), ranks in alike(facts).items()]
    lines: list[Text] = []
    for start in range(0, len(blocks), columns):
        if start:
            lines.append(Text())
        lines += side_by_side(blocks[start : start + columns], column_width)
    return lines


def _user_frames(stack: Sequence[Frame]) -> list[Frame]:
    """Return the frames in the user's code; all of them where none is."""
    return [frame for frame in stack if in_user_code(frame.file)] or list(stack)


def _stack(ranks: Sequence[int], said: str, stack: Sequence[Frame], root: str, width: int) -> list[Text]:
    lines = [*paragraph(Text(rank_list(ranks), "bold"), width, indent=0), *paragraph(Text(said), width, indent=0)]
    frames = _user_frames(stack)
    for number, frame in enumerate(frames[:STACK_FRAMES]):
        lines.append(_frame(frame, root, width))
        code = visible(line_of(frame.file, frame.line)).strip()
        if number == 0 and code:
            lines.append(Text("    " + cut(code, width - 4), "bold"))
        if number == 0 and frame is not stack[0]:
            lines += _inside(stack[0], width)
    if len(frames) > STACK_FRAMES:
        lines.append(Text(f"  and {len(frames) - STACK_FRAMES} more", "dim"))
    return lines


def _inside(innermost: Frame, width: int) -> list[Text]:
    """Return what the user's line does not show: a loop over a loader waits for a queue, a debugger at its prompt.

    Where the innermost frame is torch's, the fact says what it waits in.
    """
    folders, _, name = one_line(innermost.file).replace(os.sep, "/").rpartition("/")
    if in_user_code(innermost.file) or "torch" in folders.split("/"):
        return []
    place = f" ({name}:{innermost.line})"
    return [Text("    in " + cut(one_line(innermost.function), width - 7 - cell_len(place)) + place, "dim")]


def _frame(frame: Frame, root: str, width: int) -> Text:
    function = f" in {one_line(frame.function)}" if frame.function else ""
    place = place_of(frame, root)
    if cell_len(place + function) > width - 2:
        place = place.rpartition("/")[2]
    room = max(8, width - 2 - cell_len(function))
    place = cut_left(place, room)
    return Text.assemble("  ", (place, "cyan"), cut(function, width - 2 - cell_len(place)))
