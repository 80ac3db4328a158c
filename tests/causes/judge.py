"""Runs a case and tells what is said of it that should not be, and what is not said that should."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.causes.cases import Case, Said
from tests.check_command import check

DIVERGENCES = frozenset({"DDP301", "DDP302", "DDP303", "DDP309", "DDP311", "DDP314"})
"""What the source may know to be the reason for a divergence of the run."""
EXPLAINED = DIVERGENCES | {"DDP207", "DDP208", "DDP213", "DDP217"}
"""… and for what the run sees by its effects alone."""


_OF_THE_RUN = frozenset({"DDP103", "DDP311", "DDP706"})
"""What a run knows better: what a rank raised, and handles where the others wait, and how long its passes are."""


def report_of(case: Case, project: Path, *options: str, **environment: str) -> dict[str, Any]:
    """Check a case that was laid out in ``project``; the report."""
    target = case.script.split()
    return check(*options, *target, "--", *case.arguments, cwd=project, **environment)[1]


def complaints(expected: tuple[Said, ...], report: dict[str, Any]) -> list[str]:
    """What is wrong with a report, in sentences; empty when all is well."""
    found = [finding for finding in report["findings"] if finding["severity"] != "advice"]
    said = [(finding["code"], _line(finding)) for finding in found]
    if said != [(one.code, one.line) for one in expected]:
        return [f"said {said}: {[finding['title'] for finding in found]}"]
    wrong = []
    for one, finding in zip(expected, found, strict=True):
        text = " ".join((finding["title"], finding["remedy"], *(fact["text"] for fact in finding["evidence"])))
        wrong += [f"{one.code} does not say {words!r}: {text}" for words in one.words if words not in text]
        if one.ranks and tuple(finding["ranks"]) != one.ranks:
            wrong.append(f"{one.code} names ranks {finding['ranks']}")
    return wrong


def worse_than_static(static: dict[str, Any], checked: dict[str, Any]) -> list[str]:
    """Causes that the source places and mends, and the whole check, which saw what came of one, elsewhere or otherwise.

    What the run refuted is told no worse, nor is what it explains by an exception or by two lengths at the same places.
    """
    refuted = {(one["code"], one["location"]["line"]) for one in checked.get("refuted", ()) if one.get("location")}
    explained = [finding for finding in checked["findings"] if finding["code"] in _OF_THE_RUN]
    return [
        f"{finding['code']} at line {_line(finding)} is not told: {finding['title']}"
        for finding in static["findings"]
        if finding["code"] in EXPLAINED
        and finding["severity"] != "advice"
        and not any(_tells(one, finding) for one in checked["findings"])
        and (finding["code"], _line(finding)) not in refuted
        and not any((_path(finding), _line(finding)) in _places(one) for one in explained)
    ]


def _tells(told: dict[str, Any], finding: dict[str, Any]) -> bool:
    """Whether a finding has the place and, to the letter, the remedy of another: alone, or beside its cause's."""
    here = (_path(finding), _line(finding))
    return told["code"] == finding["code"] and finding["remedy"] in told["remedy"] and here in _places(told)


def _places(finding: dict[str, Any]) -> set[tuple[str, int]]:
    places = [*finding["locations"], *(fact.get("location") for fact in finding["evidence"])]
    return {(place["file"], place["line"]) for place in places if place}


def _line(finding: dict[str, Any]) -> int:
    return int(finding["locations"][0]["line"]) if finding["locations"] else 0


def _path(finding: dict[str, Any]) -> str:
    return str(finding["locations"][0]["file"]) if finding["locations"] else ""
