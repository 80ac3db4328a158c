"""SARIF 2.1.0 as GitHub's code scanning reads it.

The paths of the ranks to a divergence are ``codeFlows``: one thread flow a rank, outermost call first.

https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html
https://docs.github.com/en/code-security/code-scanning/integrating-with-code-scanning/sarif-support-for-code-scanning
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from ddpdoctor import __version__
from ddpdoctor.check import LoadedCheck
from ddpdoctor.examination import Examination
from ddpdoctor.files import regex
from ddpdoctor.finding import Fact, Finding, Location, Severity, shown_path
from ddpdoctor.report.explanation import sections, summary
from ddpdoctor.report.finding_fields import region_of, stated
from ddpdoctor.report.formats.concise import leaves_doubt, why_incomplete
from ddpdoctor.report.formats.json import indented
from ddpdoctor.report.streams import one_line, visible

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
LONGEST_DESCRIPTION = 1024
"""Characters that GitHub takes of a rule's description."""

_URL = regex(r"https://[!-~]+")
_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.ADVICE: "note"}
_PROBLEMS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.ADVICE: "recommendation"}


def render(examination: Examination, checks: Sequence[LoadedCheck]) -> str:
    """Render the log of one run; ``checks`` are at least those that have findings."""
    found = {finding.code for finding in examination.findings}
    rules = sorted((check for check in checks if check.check.code in found), key=lambda check: check.check.code)
    index = {check.check.code: number for number, check in enumerate(rules)}
    run = {
        "tool": {
            "driver": {
                "name": "ddpdoctor",
                "semanticVersion": __version__,
                "rules": [_rule(check) for check in rules],
            }
        },
        "columnKind": "unicodeCodePoints",
        "invocations": [_invocation(examination)],
        "results": [_result(finding, examination, index) for finding in examination.findings],
    }
    log = {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}
    return indented(log)


def _rule(check: LoadedCheck) -> dict[str, Any]:
    constants, documentation = check.check, check.documentation
    worst = min(constants.severity.values(), key=lambda severity: severity.order)
    parts = sections(documentation)
    why = " ".join(parts.get("Why it is bad", "").split())
    reference = next(filter(_URL.match, parts.get("References", "").split()), None)
    return {
        "id": constants.code,
        "name": "".join(word.capitalize() for word in constants.name.split("-")),
        "shortDescription": {"text": _cut(summary(documentation))},
        "fullDescription": {"text": _cut(f"{summary(documentation)}. {why}".strip())},
        **({"helpUri": reference} if reference else {}),
        "help": {"text": visible(documentation.strip()) + "\n"},
        "defaultConfiguration": {"level": _LEVELS[worst]},
        "properties": {
            "tags": ["pytorch", "distributed", constants.name],
            "precision": "high",
            "problem.severity": _PROBLEMS[worst],
        },
    }


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_DESCRIPTION else text[: LONGEST_DESCRIPTION - 3] + "..."


def _invocation(examination: Examination) -> dict[str, Any]:
    notes = [*examination.source.notes, *examination.rehearsal.all_notes, *examination.notes]
    messages = [{"level": "note", "message": {"text": one_line(note)}} for note in notes]
    if leaves_doubt(examination):
        text = one_line(f"inconclusive: {why_incomplete(examination)}")
        messages.append({"level": "warning", "message": {"text": text}})
    return {
        "executionSuccessful": not leaves_doubt(examination),
        "exitCode": int(examination.exit_code),
        "toolExecutionNotifications": messages,
    }


def _result(finding: Finding, examination: Examination, index: dict[str, int]) -> dict[str, Any]:
    root = examination.root
    place = finding.location or Location(file=os.path.join(root, examination.target), line=1)
    result: dict[str, Any] = {
        "ruleId": finding.code,
        "level": _LEVELS[finding.severity],
        "message": {"text": f"{stated(finding)}. {one_line(finding.remedy)}"},
        "locations": [_location(place, root)],
        "partialFingerprints": {"primaryLocationLineHash": f"{finding.fingerprint}:1"},
    }
    if finding.code in index:
        result["ruleIndex"] = index[finding.code]
    related = [
        _location(location, root) | {"id": number} for number, location in enumerate(finding.locations[1:], start=1)
    ]
    flows = _thread_flows(finding, root)
    return (
        result
        | ({"relatedLocations": related} if related else {})
        | ({"codeFlows": [{"message": {"text": "the ranks' paths"}, "threadFlows": flows}]} if flows else {})
    )


def _thread_flows(finding: Finding, root: str) -> list[dict[str, Any]]:
    """Return what each rank did, then what decided; nothing for findings that rest on no path."""
    paths = [fact for fact in finding.evidence if fact.stack]
    if not paths:
        return []
    flows = [_path(fact, number, root) for number, fact in enumerate(paths)]
    deciding = [
        {"location": _location(fact.location, root, fact.text)}
        for fact in finding.evidence
        if fact.location is not None and not fact.stack
    ]
    if deciding:
        flows.append({"id": "decided by", "message": {"text": "what decided"}, "locations": deciding})
    return flows


def _path(fact: Fact, number: int, root: str) -> dict[str, Any]:
    name = f"rank {fact.rank}" if fact.rank is not None else f"path {number + 1}"
    text = one_line(fact.text)
    frames = list(reversed(fact.stack))
    said = [*(one_line(frame.function or "called from here") for frame in frames[:-1]), text]
    places = [Location(file=frame.file, line=frame.line) for frame in frames]
    steps = [
        {"location": _location(place, root, words), "nestingLevel": depth}
        for depth, (place, words) in enumerate(zip(places, said, strict=True))
    ]
    return {"id": name, "message": {"text": f"{name}: {text}"}, "locations": steps}


def _location(location: Location, root: str, text: str = "") -> dict[str, Any]:
    region = region_of(location)
    placed = {
        "physicalLocation": {
            "artifactLocation": _artifact(location.file, root),
            "region": {
                "startLine": region.line,
                "startColumn": region.column,
                "endLine": region.end_line,
                "endColumn": region.end_column,
            },
        }
    }
    return placed | ({"message": {"text": one_line(text)}} if text else {})


def _artifact(file: str, root: str) -> dict[str, str]:
    path = shown_path(file, root)
    try:
        encoded = quote(os.fsencode(path))
    except UnicodeEncodeError:
        encoded = quote(path.encode("utf-8", "backslashreplace"))
    return {"uri": f"file://{encoded}"} if os.path.isabs(path) else {"uri": encoded, "uriBaseId": "%SRCROOT%"}
