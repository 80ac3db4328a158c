"""Enters public scripts into the ledger as first seen: ``python -m tests.first_seen.enter LABELS MIRROR DRAW``.

LABELS was written by readers who had not seen what the tool says; a JSON list as in ``tests/real_code/labels.json``.
What is said and no label speaks of is printed and nothing is entered, until a reader has judged it: a verdict each
(``{"code", "line", "path", "right", "why"}``, ``right`` null where it is debatable) in the script's ``verdicts``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

import msgspec

from tests.first_seen.ledger import Came, Expected, Judgement, Row, append, is_right
from tests.real_code.corpus import Defect, Labelled, newest
from tests.real_code.judge import Reading, Said, missed, read_all, tells_of


class Verdict(msgspec.Struct, frozen=True):
    """What a reader says of a finding that no label speaks of."""

    code: str
    line: int
    path: str = ""
    right: bool | None = None
    why: str = ""


def main() -> int:
    """Read the scripts; enter them, or print what a reader still has to judge."""
    labels, mirror, draw = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    raw = json.loads(labels.read_text(encoding="utf-8"))
    verdicts = {_case(one): [msgspec.convert(v, Verdict) for v in one.get("verdicts", ())] for one in raw}
    scripts = [msgspec.convert({**one, "verdicts": []}, Labelled) for one in raw]
    with tempfile.TemporaryDirectory() as directory:
        readings = read_all(scripts, mirror, Path(directory))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
    found, unread = [], 0
    for reading in readings:
        if reading.failure:
            print(f"not read: {reading.script.name}: {reading.failure}")
            unread += 1
            continue
        gone = [defect for _, defect in missed([reading])]
        came = []
        for said in reading.said:
            judged, why = _judged(said, reading, verdicts[_case(raw[readings.index(reading)])])
            if judged is None:
                unread += 1
                print(
                    f"judge: {reading.script.name}@{reading.script.commit[:8]} {said.severity} {said.code} "
                    f"{said.path}:{said.line} {said.title}"
                )
            else:
                came.append(Came(said.code, said.severity, said.path, said.line, judged, why))
        expected = tuple(_expected(defect, defect not in gone) for defect in reading.script.defects)
        case = f"{reading.script.repo}@{reading.script.commit[:12]}:{reading.script.path}"
        right = is_right(expected, came)
        found.append(
            Row(
                date=date.today().isoformat(),
                kind="source",
                case=case,
                commit=commit.strip(),
                expected=expected,
                came=tuple(came),
                right=right,
                draw=draw,
            )
        )
    if unread and "--enter" not in sys.argv:
        return 1
    append(found)
    return 0


def _case(one: dict[str, object]) -> tuple[object, object]:
    return one["repo"], one["path"]


def _expected(defect: Defect, found: bool) -> Expected:
    return Expected(defect.codes, defect.lines, defect.confidence, defect.path, found)


def _judged(said: Said, reading: Reading, verdicts: list[Verdict]) -> tuple[Judgement | None, str]:
    for verdict in verdicts:
        same = newest(verdict.code) == said.code and (verdict.path or reading.script.path) == said.path
        if same and abs(verdict.line - said.line) <= 1:
            return ("debatable" if verdict.right is None else "right" if verdict.right else "wrong"), verdict.why
    if any(tells_of(said, defect, reading.script.path) for defect in reading.script.defects):
        return "right", ""
    return (None, "") if said.loud else ("debatable", "advice that no label speaks of was not read")


if __name__ == "__main__":
    sys.exit(main())
