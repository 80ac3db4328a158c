"""Enters re-enacted reports into the ledger as first seen: ``python -m tests.first_seen.enter_puzzles LABELS DRAW``.

LABELS is a JSON list beside the ``scripts`` that it names, and was written before the tool saw one: of each script the
``report`` that it re-enacts, the ``codes`` and ``lines`` of which one has to be said, and ``words``, each a regular
expression that its title or remedy has to match. What else is said above advice is printed until a reader has judged
it, in the script's ``verdicts``, as in ``enter``. What was said first is kept beside LABELS, and is what is entered.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import msgspec

from tests.check_command import check
from tests.first_seen.enter import Verdict
from tests.first_seen.ledger import Came, Expected, Judgement, Row, append, is_right

NO_CHECK = ("none",)
"""The codes of a label whose reader found no check for the cause: what is said where decides."""


class Label(msgspec.Struct, frozen=True):
    """A script, and what has to be said of it."""

    script: str
    report: str
    codes: tuple[str, ...]
    lines: tuple[int, ...]
    words: tuple[str, ...]
    why: str
    verdicts: tuple[Verdict, ...] = ()


def answers(finding: dict[str, Any], label: Label) -> bool:
    """Return whether a finding is the one that ends the search."""
    text = f"{finding['title']} {finding['remedy']}"
    places = [*finding["locations"][:1], *(fact["location"] for fact in finding["evidence"] if fact.get("location"))]
    return (
        (finding["code"] in label.codes or label.codes == NO_CHECK)
        and any(abs(place["line"] - one) <= 1 for place in places for one in label.lines)
        and all(re.search(words, text, re.IGNORECASE) for words in label.words)
    )


def findings_of(script: Path) -> list[dict[str, Any]]:
    """What ``check`` says of a script that stands alone in an empty directory."""
    with tempfile.TemporaryDirectory() as directory:
        project = Path(directory) / "job"
        (project / ".git").mkdir(parents=True)
        shutil.copy(script, project)
        report = check("--equivalence", script.name, cwd=project, XDG_STATE_HOME=directory, TMPDIR=directory)[1]
    return list(report["findings"])


def said_first(labels: Path, scripts: Sequence[str]) -> tuple[str, dict[str, list[dict[str, Any]]]]:
    """What ``check`` said of each script when it saw it first, and at which commit."""
    kept = labels.with_suffix(".said.json")
    if not kept.exists():
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        said = {script: findings_of(labels.parent / "scripts" / "reports" / script) for script in scripts}
        kept.write_text(json.dumps([commit, said]), encoding="utf-8")
    found: tuple[str, dict[str, list[dict[str, Any]]]] = tuple(json.loads(kept.read_text(encoding="utf-8")))
    return found


def main() -> int:
    """Check the scripts; enter them, or print what a reader still has to judge."""
    labels, draw = Path(sys.argv[1]), int(sys.argv[2])
    read = msgspec.json.decode(labels.read_bytes(), type=list[Label])
    commit, all_said = said_first(labels, [label.script for label in read])
    found, unread = [], 0
    for label in read:
        said = all_said[label.script]
        came = []
        for finding in said:
            line = finding["locations"][0]["line"] if finding["locations"] else 0
            of_it = [one for one in label.verdicts if (one.code, one.line) == (finding["code"], line)]
            judged: Judgement = "debatable"
            if answers(finding, label):
                judged = "right"
            elif of_it and of_it[0].right is not None:
                judged = "right" if of_it[0].right else "wrong"
            elif not of_it and finding["severity"] != "advice":
                unread += 1
                print(f"judge: {label.script}:{line} {finding['code']} {finding['title']}: {finding['remedy']}")
            why = of_it[0].why if of_it else ""
            came.append(Came(finding["code"], finding["severity"], label.script, line, judged, why))
        answered = any(answers(finding, label) for finding in said)
        expected = (Expected(label.codes, label.lines, found=answered),)
        print(f"{'found ' if answered else 'missed'} {label.script}")
        found.append(
            Row(
                date=date.today().isoformat(),
                kind="puzzle",
                case=label.report,
                commit=commit,
                expected=expected,
                came=tuple(came),
                right=is_right(expected, came),
                draw=draw,
            )
        )
    if unread:
        return 1
    if "--enter" in sys.argv:
        append(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
