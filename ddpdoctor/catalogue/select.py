"""Which checks run and which of their findings the project wants to hear: options, settings, and comments."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from ddpdoctor.catalogue.registry import Catalogue, CatalogueEntry, choose, codes_meant, gone_notes, load, suggestion
from ddpdoctor.catalogue.run_checks import CheckResult
from ddpdoctor.config import Settings
from ddpdoctor.files import regex
from ddpdoctor.finding import Finding, Location

if TYPE_CHECKING:
    from ddpdoctor.source.script.script import Script

# ``# ddpdoctor: ignore[DDP101, missing-set-epoch]`` on a line suppresses what these checks find there: on the first
# line of the place that a report names, on its last line, or alone on the line above. ``# ddpdoctor:
# file-ignore[DDP601]`` alone on a line suppresses what they find in the file. The checks are named by codes or names.

_MARK = regex(r"#\s*ddpdoctor\s*:\s*(?P<kind>file-ignore|ignore)\b(?:\s*\[(?P<words>[^\][#]*)\])?", re.IGNORECASE)


class Suppression(msgspec.Struct, frozen=True, kw_only=True):
    """One comment."""

    location: Location
    """Of the comment's text."""
    kind: Literal["ignore", "file-ignore"]
    words: tuple[str, ...]
    """As written; empty when it names no check."""
    lines: tuple[int, ...] = ()
    """The lines that it speaks of; empty for a whole file."""


class Used(msgspec.Struct, frozen=True):
    """A word of a comment that suppressed a finding."""

    location: Location
    word: str


class Suppressed(msgspec.Struct, frozen=True, kw_only=True):
    """Findings divided by the comments."""

    kept: tuple[Finding, ...]
    suppressed: tuple[Finding, ...] = ()
    used: frozenset[Used] = frozenset()


def suppressions_in(file: str, text: str) -> tuple[Suppression, ...]:
    """Read the comments of a file; a file without any costs one search."""
    if "ddpdoctor" not in text:
        return ()
    return tuple(_read(file, text))


def suppress(
    findings: Sequence[Finding], comments: Mapping[str, Sequence[Suppression]], codes: Mapping[str, str]
) -> Suppressed:
    """Take out the findings that a comment in their file (a key of ``comments``) suppresses.

    ``codes`` has the code of a check by its code in upper case and by its name in lower case.
    """
    kept: list[Finding] = []
    taken: list[Finding] = []
    used: set[Used] = set()
    said: dict[str, _SaidOfFile] = {}
    for finding in findings:
        place = finding.location
        speaking: list[Used] = []
        if place is not None and place.file in comments:
            if place.file not in said:
                said[place.file] = _said_of(comments[place.file], codes)
            speaking = list(_speaking(finding, place, said[place.file]))
        (taken if speaking else kept).append(finding)
        used.update(speaking)
    return Suppressed(kept=tuple(kept), suppressed=tuple(taken), used=frozenset(used))


def code_of(word: str, codes: Mapping[str, str]) -> str:
    """Return the code that a word of a comment means; empty when there is no such check."""
    return codes.get(word.upper()) or codes.get(word.lower(), "")


_SaidOfFile = dict[tuple[str, int], list[Used]]
"""The words by the code that they mean and the line that they speak of; line 0 is the whole file."""


def _said_of(comments: Iterable[Suppression], codes: Mapping[str, str]) -> _SaidOfFile:
    said: _SaidOfFile = {}
    for comment in comments:
        for word in comment.words:
            for line in comment.lines or (0,):
                said.setdefault((code_of(word, codes), line), []).append(Used(comment.location, word))
    return said


def _speaking(finding: Finding, place: Location, said: _SaidOfFile) -> Iterator[Used]:
    for line in {0, place.line, max(place.line, place.end_line)}:
        yield from said.get((finding.code, line), ())


def _read(file: str, text: str) -> Iterator[Suppression]:
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    code_below = _code_below(lines)
    for line, column, comment in _comments(text, lines):
        for match in _MARK.finditer(comment):
            alone = not lines[line - 1][: column - 1].strip()
            start = column + match.start()
            kind: Literal["ignore", "file-ignore"] = "file-ignore" if "file" in match["kind"].lower() else "ignore"
            yield Suppression(
                location=Location(
                    file=file, line=line, column=start, end_line=line, end_column=start + len(match.group().rstrip())
                ),
                kind=kind,
                words=tuple(word.strip() for word in (match["words"] or "").split(",") if word.strip()),
                lines=() if kind == "file-ignore" else ((line, code_below[line]) if alone else (line,)),
            )


def _comments(text: str, lines: Sequence[str]) -> Iterator[tuple[int, int, str]]:
    """Line, 1-based column and text of the comments; those before a place that is no Python for this interpreter."""
    try:
        for token in tokenize.generate_tokens(io.StringIO("\n".join(lines)).readline):
            if token.type == tokenize.COMMENT and "ddpdoctor" in token.string.lower():
                yield token.start[0], token.start[1] + 1, token.string
    except (tokenize.TokenError, SyntaxError):
        return


def _code_below(lines: Sequence[str]) -> list[int]:
    """For each line, from 0 on, the first line below it that is no comment itself."""
    below = [len(lines) + 1] * (len(lines) + 1)
    for line in range(len(lines) - 1, 0, -1):
        below[line] = below[line + 1] if lines[line].lstrip().startswith("#") else line + 1
    return below


UNUSED_SUPPRESSION = "DDP001"
_MOST_HINTS = 50
"""For so many unknown words the nearest check is looked for, which takes a millisecond each."""
_LONGEST_WORD = 100
_MOST_UNUSED = 100
"""Comments and words of one file that suppress nothing and are reported; 100,000 took minutes and no one reads them."""


class Comments(msgspec.Struct, frozen=True, kw_only=True):
    """The suppressing comments of the files that were read, and what has to be known to judge them."""

    by_file: Mapping[str, tuple[Suppression, ...]] = {}
    """The files are absolute paths."""
    codes: Mapping[str, str] = {}
    """The code of a check by its code in upper case and by its name in lower case."""
    judged: Mapping[str, frozenset[str]] = {}
    """By file the codes of the checks that looked at all there is to see in it; others may yet need a comment."""
    hints: Mapping[str, str] = {}
    """For words that mean no check, which may have been meant: the end of a sentence."""


NO_COMMENTS = Comments()


def chosen_checks(
    catalogue: Catalogue, select: Sequence[str], ignore: Sequence[str], settings: Settings
) -> tuple[CatalogueEntry, ...]:
    """Choose the checks to run: ``select`` and ``ignore`` are the command line's and win over the settings.

    With ``select`` on the command line the settings' ``ignore`` does not count either. Raises UsageError for words of
    the command line and ConfigurationError for words of the settings that mean no check.
    """
    for key, words in (("select", settings.select), ("ignore", settings.ignore), *_per_file(settings)):
        codes_meant(catalogue, words, key, settings.file)
    if select:
        return choose(catalogue, select, ignore)
    return choose(catalogue, settings.select, ignore or settings.ignore)


def words_gone(catalogue: Catalogue, select: Sequence[str], ignore: Sequence[str], settings: Settings) -> Iterator[str]:
    """Yield what became of checks that the command line or the settings name and that there no longer are."""
    in_settings = (*settings.select, *settings.ignore, *(word for _, words in _per_file(settings) for word in words))
    yield from gone_notes(catalogue, dict.fromkeys((*select, *ignore, *in_settings)))


def pre_launch(entries: Iterable[CatalogueEntry]) -> tuple[CatalogueEntry, ...]:
    """Return the checks that a source or a rehearsal can say something about."""
    return tuple(entry for entry in entries if not entry.after_launch)


def wants_unused_suppressions(select: Sequence[str], ignore: Sequence[str], settings: Settings) -> bool:
    """Return whether comments that suppress nothing are to be reported."""
    ignored = ignore or (() if select else settings.ignore)
    selected = select or settings.select
    return (not selected or any(map(_means_unused, selected))) and not any(map(_means_unused, ignored))


def unignored(results: Sequence[CheckResult], settings: Settings, catalogue: Catalogue) -> tuple[CheckResult, ...]:
    """Take out the findings in files in which the settings ignore their check."""
    if not settings.per_file_ignores:
        return tuple(results)
    ignored: dict[str, set[str]] = {}

    def wanted(finding: Finding) -> bool:
        if finding.location is None:
            return True
        file = finding.location.file
        if file not in ignored:
            words = settings.ignored_in(Path(file))
            ignored[file] = codes_meant(catalogue, words, "per-file-ignores", settings.file)
        return finding.code not in ignored[file]

    return tuple(
        msgspec.structs.replace(
            result,
            from_source=tuple(filter(wanted, result.from_source)),
            from_run=tuple(filter(wanted, result.from_run)),
        )
        for result in results
    )


def comments_of(script: Script) -> dict[str, tuple[Suppression, ...]]:
    """Return the suppressing comments of a script's modules by file."""
    if not any("ddpdoctor" in module.text for module in script.modules):
        return {}
    found = {str(module.path): suppressions_in(str(module.path), module.text) for module in script.modules}
    return {file: comments for file, comments in found.items() if comments}


def judging(
    by_file: Mapping[str, tuple[Suppression, ...]], judged: Mapping[str, frozenset[str]], catalogue: Catalogue
) -> Comments:
    """Complete the comments with what is known of the checks."""
    if not by_file:
        return NO_COMMENTS
    codes = {entry.code: entry.code for entry in catalogue.entries}
    codes |= {entry.name: entry.code for entry in catalogue.entries}
    codes |= {word: went.into for code, went in catalogue.gone.items() if went.into for word in (code, went.name)}
    words = dict.fromkeys(word for comments in by_file.values() for comment in comments for word in comment.words)
    unknown = (word for word in words if len(word) <= _LONGEST_WORD and not code_of(word, codes))
    hints = {word: _hint(catalogue, word) for word in islice(unknown, _MOST_HINTS)}
    return Comments(by_file=by_file, codes=codes, judged=judged, hints=hints)


def judged_codes(
    entries: Sequence[CatalogueEntry], results: Sequence[CheckResult], *, static: bool, cut_short: bool
) -> frozenset[str]:
    """Codes of the checks that looked at all there is: what they did not find is not there.

    Without a run, or with one that was cut short, only checks of the source alone have.
    """
    whole = {result.code for result in results if not result.gap and not result.crashed}
    if static or cut_short:
        whole &= {entry.code for entry in entries if entry.in_source and entry.code in whole and not load(entry).in_run}
    return frozenset(whole)


def unused_suppressions(comments: Comments, used: frozenset[Used]) -> Iterator[Finding]:
    """Report comments that name no check, a check that does not exist, or one that found nothing there.

    Of a file that has thousands, as only a program writes them, the first ``_MOST_UNUSED`` are reported.
    """
    for file in comments.by_file:
        found = _unused_in(file, comments, used)
        yield from islice(found, _MOST_UNUSED)
        if (left := sum(1 for _ in found)) and (places := comments.by_file[file]):
            from ddpdoctor.catalogue.unused_suppression import unused

            yield unused(places[-1].location, f"{left} more in this file", "only the first are listed")


def _unused_in(file: str, comments: Comments, used: frozenset[Used]) -> Iterator[Finding]:
    from ddpdoctor.catalogue.unused_suppression import unused

    judged = comments.judged.get(file)
    for comment in comments.by_file[file] if judged is not None else ():
        if not comment.words:
            yield unused(
                comment.location,
                "this comment",
                f"it does not name a check; write for example {comment.kind}[DDP101]",
            )
        for word in comment.words:
            code = code_of(word, comments.codes)
            if not code and word.upper() != UNUSED_SUPPRESSION:
                hint = comments.hints.get(word, "")
                yield unused(comment.location, word, f"there is no check of this name{hint}")
            elif code in (judged or ()) and Used(comment.location, word) not in used:
                where = "in this file" if comment.kind == "file-ignore" else "here"
                yield unused(comment.location, word, f"the check finds nothing {where}")


def _hint(catalogue: Catalogue, word: str) -> str:
    if catalogue.went(word) is not None:
        return "; " + next(gone_notes(catalogue, (word,)))
    question, found, _ = suggestion(catalogue, word).partition("? ")
    return f"; {question[0].lower()}{question[1:]}?" if found else ""


def _per_file(settings: Settings) -> Iterator[tuple[str, tuple[str, ...]]]:
    for pattern, words in settings.per_file_ignores:
        yield f'per-file-ignores."{pattern}"', words


def _means_unused(word: str) -> bool:
    return bool(word) and (UNUSED_SUPPRESSION.startswith(word.upper()) or word.lower() == "unused-suppression")
