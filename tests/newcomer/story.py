"""Goes through the tutorial from top to bottom in one project, and compares what is printed with the page.

Numbers are masked on both sides, and lines are joined: where they break depends on the numbers.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from tests.newcomer.printed import ROOT

PAGE = ROOT / "docs" / "tutorial.md"
_BLOCK = re.compile(r"^```(sh|text|python)\n(.*?)^```$", re.M | re.S)
_NUMBER = re.compile(r"\d[\d.,]*")


class Told(NamedTuple):
    """A block of the page, and what of it is missing in what was printed."""

    block: str
    missing: tuple[str, ...]


def _with_a_worker(project: Path) -> None:
    script = project / "train.py"
    text = script.read_text()
    script.write_text(text.replace("sampler=sampler)", "sampler=sampler, num_workers=1, persistent_workers=True)"))


def _on_every_rank(project: Path) -> None:
    script = project / "train.py"
    reported = 'print(f"epoch {epoch}: accuracy {evaluate(model, test_loader):.3f}")'
    head, tail = script.read_text().split(f"        if dist.get_rank() == 0:\n            {reported}\n")
    fixed = next(block for language, block in _BLOCK.findall(PAGE.read_text()) if language == "python")
    script.write_text(head + "".join(f"        {line}\n" for line in fixed.splitlines()) + tail)


BY_HAND: Mapping[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "ddpdoctor compare BEFORE AFTER": (_with_a_worker, ("ddpdoctor profile --no-tui train.py",)),
    "ddpdoctor gate train.py --update": (_on_every_rank, ("ddpdoctor check train.py",)),
}
"""What the page has a reader do ahead of a command, and the commands that it names there."""
AT_THE_END = ("cp examples/rank_divergent_hang.py train.py", "ddpdoctor gate train.py")
"""What its last block shows: the gate of a pull request with the hang."""


def masked(text: str) -> str:
    """The text in one line, without its numbers."""
    return _NUMBER.sub("#", " ".join(text.split()))


def missing(shown: str, printed: str) -> tuple[str, ...]:
    """What a page shows and a command did not print; dots on the page stand for anything."""
    whole = masked(printed)
    return tuple(piece for part in re.split(r"^\s*\.\.\.$", shown, flags=re.M) if (piece := masked(part)) not in whole)


def followed(project: Path, environment: Mapping[str, str], runs: Path) -> Iterator[Told]:
    """Yield each block of the page that shows something, with what of it was not printed."""
    printed = ""
    blocks = _BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    last = max(number for number, (language, _) in enumerate(blocks) if language == "text")
    for number, (language, block) in enumerate(blocks):
        if language == "sh":
            printed = "".join(_run(line, project, environment, runs) for line in block.splitlines())
        elif language == "text":
            if number == last:
                printed = "".join(_run(line, project, environment, runs) for line in AT_THE_END)
            yield Told(block, missing(block, printed))


def _run(line: str, project: Path, environment: Mapping[str, str], runs: Path) -> str:
    if line in BY_HAND:
        edit, before = BY_HAND[line]
        edit(project)
        for command in before:
            _run(command, project, environment, runs)
    if "BEFORE AFTER" in line:
        line = line.replace("BEFORE AFTER", " ".join(run.name for run in sorted(runs.glob("run-*"))[-2:]))
    done = subprocess.run(
        ["bash", "-c", line], cwd=project, env=dict(environment), stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=600,
    )  # fmt: skip
    print(f"{done.returncode:>3}  tutorial.md: {line}", flush=True)
    return done.stdout + done.stderr
