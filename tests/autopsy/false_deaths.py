"""Logs in which no one died: of jobs that got over their troubles, and of programs that train nothing.

``quiet/recorded.txt`` is what jobs of our own print, written by ``python -m tests.autopsy.false_deaths PYTHON`` with
any Python that has torch; ``quiet/healthy.txt`` has the forms of other trainers and launchers, ``quiet/unrelated.txt``
those of other programs. A line ``*N TEXT`` stands for so many lines, with ``{i}`` for their number from 1.
"""

from __future__ import annotations

import itertools
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ddpdoctor.autopsy.dead_job import AutopsyRequest, autopsy
from tests.autopsy.cases import NOTHING, TORCHRUN, Recorded
from tests.autopsy.jobs.record import neutral, recorded

QUIET = Path(__file__).parent / "quiet"
_REPEATED = re.compile(r"\*(\d+) (.*)")
_TWO_RANKS = tuple(word.format(ranks=2) for word in TORCHRUN)
_TROUBLES = (
    ("nothing", "plain"), ("nothing", "bar"), ("tensorboard_is_missing", "dictionary"), ("sample_is_broken", "logger"),
    ("download_is_retried", "logger"), ("memory_runs_out_once", "plain"), ("checkpoint_is_missing", "bar"),
    ("exceptions_are_chained", "plain"), ("thread_dies", "logger"), ("task_is_lost", "objects"),
    ("finaliser_raises", "plain"), ("child_is_killed", "plain"), ("stacks_are_dumped", "plain"),
    ("signal_is_handled", "dictionary"), ("interrupt_is_caught", "plain"), ("warnings_are_many", "bar"),
    ("errors_are_logged", "logger"), ("assertion_fails_in_a_test", "dictionary"), ("group_is_refused", "plain"),
    ("port_is_taken", "logger"), ("hub_is_offline", "logger"), ("loader_fails_once", "plain"),
    ("destroys_twice", "plain"), ("dies_in_the_first_attempt", "plain"), ("is_killed_in_the_first_attempt", "logger"),
)  # fmt: skip
"""What our jobs meet, and how they print their progress."""


class Quiet(msgspec.Struct, frozen=True):
    """A log in which no one died."""

    name: str
    text: str


def quiet_logs() -> Iterator[Quiet]:
    """Yield all of them."""
    for path in sorted(QUIET.glob("*.txt")):
        # Progress bars return to the beginning of their line, which reading in universal mode would break.
        text = path.read_bytes().decode()
        for block in re.split(r"^=== ", text, flags=re.MULTILINE)[1:]:
            name, _, content = block.partition("\n")
            yield Quiet(f"{path.stem}: {name}", "\n".join(itertools.chain(*map(_unfolded, content.split("\n")))))


def errors_in(log: Quiet, directory: Path) -> list[str]:
    """Return what an autopsy claims to be an error."""
    path = directory / "job.log"
    path.write_bytes(log.text.encode())
    found = autopsy(AutopsyRequest(paths=(str(path),))).findings
    return [f"{one.code}: {one.title}" for one in found if one.severity == "error"]


def main() -> int:
    """Print the logs of which an error is claimed."""
    logs = list(quiet_logs())
    with tempfile.TemporaryDirectory() as directory:
        claimed = [(log.name, errors) for log in logs if (errors := errors_in(log, Path(directory)))]
    for name, errors in claimed:
        print(f"{name}: {'; '.join(errors)}")
    print(f"of {len(logs)} logs without a death {len(claimed)} have an error (bound 0)")
    return 1 if claimed else 0


def _unfolded(line: str) -> list[str]:
    match = _REPEATED.fullmatch(line)
    return [match[2].replace("{i}", str(number)) for number in range(1, int(match[1]) + 1)] if match else [line]


def _record(python: str) -> None:
    blocks: list[str] = []
    for trouble, style in _TROUBLES:
        restarts = ("--max-restarts", "1") if trouble.endswith("first_attempt") else ()
        job = Recorded(
            name=f"{trouble}, {style}",
            script="healthy.py",
            job=trouble,
            arguments=(style,),
            expected=NOTHING,
            launcher=(*_TWO_RANKS, *restarts),
        )
        blocks.append(f"=== {job.name}\n{neutral(recorded(python, job), python).decode()}")
        (QUIET / "recorded.txt").write_bytes("".join(blocks).encode())
        print(job.name, flush=True)


if __name__ == "__main__":
    _record(sys.argv[1])
