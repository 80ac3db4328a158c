"""The documentation of checks as a list, as text, and as JSON."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Sequence
from typing import Any

from ddpdoctor.check import LoadedCheck
from ddpdoctor.finding import Severity, grouped

SECTIONS = ("What it finds", "Why it is bad", "Example", "Remedy", "When it is wrong", "References")
"""The sections of a check's docstring, in their order, below its one-sentence summary."""
VERBATIM = ("Example", "References")
"""Sections whose lines are kept as they are."""
WIDTH = 80
"""Columns of the text."""


def as_list(checks: Sequence[LoadedCheck]) -> str:
    """Return one line a check: code, name, worst severity, and what it sees."""
    width = max((len(check.check.name) for check in checks), default=0)
    lines = [
        f"{check.check.code}  {check.check.name:<{width}}  {_worst(check):<7}  {', '.join(sees(check))}"
        for check in checks
    ]
    return "".join(line + "\n" for line in lines)


def as_text(checks: Sequence[LoadedCheck]) -> str:
    """Return the whole documentation of each check under a headline."""
    return "\n\n".join(map(_page, checks))


def as_json(checks: Sequence[LoadedCheck]) -> str:
    """Return a list of objects, one a check."""
    from ddpdoctor.report.formats.json import indented

    return indented([_object(check) for check in checks])


def sees(check: LoadedCheck) -> tuple[str, ...]:
    """Return what the check looks at: the source, a run, or both."""
    return tuple(
        word for word, function in (("source", check.in_source), ("run", check.in_run)) if function is not None
    )


def summary(documentation: str) -> str:
    """Return the first sentence of a docstring, on one line, without its full stop."""
    return " ".join(inspect.cleandoc(documentation).partition("\n\n")[0].split()).rstrip(".")


def sections(documentation: str) -> dict[str, str]:
    """Return the sections of a docstring by their headings, each dedented; a heading that is missing is left out."""
    found: dict[str, list[str]] = {}
    current: list[str] | None = None
    for line in inspect.cleandoc(documentation).splitlines():
        heading = line.strip().rstrip(":")
        if heading in SECTIONS and not line.startswith(" "):
            current = found.setdefault(heading, [])
        elif current is not None:
            current.append(line)
    return {heading: inspect.cleandoc("\n" + "\n".join(lines)) for heading, lines in found.items()}


def _page(check: LoadedCheck) -> str:
    lines = [f"{check.check.name} ({check.check.code}), {_severities(check)}", ""]
    lines += textwrap.wrap(summary(check.documentation) + ".", WIDTH)
    for heading, text in sections(check.documentation).items():
        lines += ["", heading]
        body = text.splitlines() if heading in VERBATIM else _filled(text)
        lines += [f"    {line}".rstrip() for line in body]
    return "\n".join(lines) + "\n"


def _filled(text: str) -> list[str]:
    """Fill paragraphs of prose anew; a paragraph with an indented line is a listing and stays as it is."""
    lines: list[str] = []
    for paragraph in text.split("\n\n"):
        given = paragraph.splitlines()
        listing = any(line.startswith(" ") for line in given)
        lines += [*([""] if lines else []), *(given if listing else textwrap.wrap(paragraph, WIDTH - 4))]
    return lines


def _severities(check: LoadedCheck) -> str:
    """Say how bad it is by what it was seen in, as in ``warning in the source, error in the rehearsal or run``."""
    severities = check.check.severity
    bases = grouped(severities, lambda basis: severities[basis].value)
    told = (" or ".join(filter(None, (", ".join(words[:-1]), words[-1]))) for words in bases.values())
    return ", ".join(f"{severity} in the {words}" for severity, words in zip(bases, told, strict=True))


def _worst(check: LoadedCheck) -> str:
    return next(severity.value for severity in Severity if severity in check.check.severity.values())


def _object(check: LoadedCheck) -> dict[str, Any]:
    return {
        "code": check.check.code,
        "name": check.check.name,
        "severity": {basis: severity.value for basis, severity in check.check.severity.items()},
        "sees": list(sees(check)),
        "needs": sorted(check.check.needs),
        "summary": summary(check.documentation),
        "sections": sections(check.documentation),
        "documentation": inspect.cleandoc(check.documentation),
    }
