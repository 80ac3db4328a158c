"""Tells whether a job went on after something that it printed: lines of the kind that it wrote before, or its end.

An exception that was caught and printed looks like one that ended a process; what comes after it does not.
"""

from __future__ import annotations

import re

import msgspec

from ddpdoctor.postmortem.prefixes import Habit, split

_FINISHED = re.compile(
    r"\b(?:training|train|run|fit|fine-?tuning|trainer)\b[^.:]{0,30}\b(?:complete[d]?|finished|done)\b"
    r"|worker group (?:successfully )?finished|`Trainer\.fit` stopped",
    re.IGNORECASE,
)
"""How trainers (Hugging Face, Lightning, MMEngine, scripts of their own) and torchrun say that they came to the end."""
_FAILED = re.compile(r"error|exception|fail|abort|traceback|exit code [1-9]", re.IGNORECASE)
_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}")
_KERNEL = re.compile(r"\[ *\d+\.\d{6}\] ")
_COLUMNS = re.compile(r"\t| {2,}")
_WORDS = re.compile(r"[^\W\d_]{2,}")
_BAR = re.compile(r"\d+%\|.*?(?P<done>\d+)/(?P<of>\d+) \[")
_COUNTED = re.compile(
    # torch's examples, Hugging Face and Megatron: "Train Epoch: 1 [640/60000", "'epoch': 0.2", "iteration  100/".
    r"(?<![a-z])(?:epoch|step|iter(?:ation)?)s?(?:\(\w+\)| is)?[\W_]{0,16}?(\d+(?:\.\d+)?)(?:\W{1,16}?(\d+)/)?",
    re.IGNORECASE,
)
_MEASURED = re.compile(r"\d\.\d")
"""Who counts retries measures nothing."""
_RISES = 3
"""So many counts of one rank, each above the one before: a job that gets on, though it wrote no such line earlier."""
_MOST_KINDS = 2_000
_MOST_NOTED = 200
"""Pieces of a log whose kinds of lines are noted."""
_MOST_FOLLOWED = 2_000
"""Lines soon after failures of which the kinds are noted."""
_FINISH = 1_000
"""Lines of progress that a statement of the job's end counts for."""


class Later(msgspec.Struct, frozen=True):
    """A line of progress near the end of a log."""

    line: int
    rank: int | None
    counts: int


class Progress:
    """What one log looks like while its job gets on."""

    def __init__(self, habit: Habit, year: int) -> None:
        self._habit, self._year = habit, year
        self._kinds: set[tuple[str, ...]] = set()
        self._once: set[tuple[str, ...]] = set()
        self._followed = 0
        self._columns = 0
        """Of the table whose rows are being read; 0 outside of one."""
        self._noted = 0

    def note(self, text: bytes) -> None:
        """Note the kinds of lines in a piece of the log that has no failure."""
        if self._noted < _MOST_NOTED and len(self._kinds) < _MOST_KINDS:
            self._noted += 1
            for line in text.decode("utf-8", "replace").splitlines():
                kind = _kind_of(split(line, self._habit, self._year).text)
                if kind:
                    self._kinds.add(kind)

    def note_if_again(self, line: bytes) -> None:
        """Note the kind of a line that stands soon after a failure, when there are two of it: one may be about that."""
        self._followed += 1
        if self._followed > _MOST_FOLLOWED:
            return
        text = split(line.decode("utf-8", "replace"), self._habit, self._year).text
        columns = len(_COLUMNS.split(text.strip()))
        # Rows below a heading are of the failure: the processes that had most of the memory.
        heads = columns > 1 and not any(character.isdigit() for character in text)
        if heads or columns != self._columns:
            self._columns = columns if heads else 0
        kind = _kind_of(text) if not self._columns else ()
        if kind and kind in self._once:
            self._kinds.add(kind)
        self._once.add(kind)

    def at_the_end(self, tail: bytes, first_line: int) -> tuple[Later, ...]:
        """Return the lines of progress in the last piece of the log, whose first line has that number."""
        found = []
        reached: dict[str, int] = {}
        rising: dict[tuple[int | None, tuple[str, ...]], list[tuple[tuple[float, ...], int]]] = {}
        for number, line in enumerate(tail.decode("utf-8", "replace").split("\n"), first_line):
            prefixed = split(line, self._habit, self._year)
            text = prefixed.text
            bar = _BAR.search(text)
            # A bar is drawn once more when its process ends.
            before = reached.get(bar["of"]) if bar else None
            if bar:
                reached[bar["of"]] = max(int(bar["done"]), before or 0)
            if _FAILED.search(text) or prefixed.level in ("E", "F", "W"):
                continue
            kind = _kind_of(text)
            if _FINISHED.search(text):
                found.append(Later(number, prefixed.rank, _FINISH))
            elif int(bar["done"]) > before if bar and before is not None else kind in self._kinds:
                found.append(Later(number, prefixed.rank, 1))
            elif kind and _MEASURED.search(text) and (counted := _counts_in(text)):
                before_it = rising.setdefault((prefixed.rank, kind), [])
                if not before_it or counted > before_it[-1][0]:
                    before_it.append((counted, number))
        for (rank, _), counts in rising.items():
            found += [Later(number, rank, 1) for _, number in counts if len(counts) >= _RISES]
        return tuple(found)


def went_on(later: tuple[Later, ...], line: int, rank: int | None) -> int:
    """Return how many lines of progress follow a line that a rank wrote; of any process where it is not known which."""
    return sum(
        one.counts for one in later if one.line > line and (rank is None or one.rank == rank or one.counts == _FINISH)
    )


def _counts_in(text: str) -> tuple[float, ...]:
    return tuple(float(one or 0) for pair in _COUNTED.findall(text) for one in pair)


def _kind_of(text: str) -> tuple[str, ...]:
    """Return the words by which lines of progress are alike; empty for a line that has no figure."""
    if " NCCL INFO " in text or "NVRM: " in text or _KERNEL.match(text) or _ADDRESS.search(text):
        # NCCL traces an error through its files in the lines that it writes while it works; a stack is no progress, and
        # what the kernel writes is none of the job.
        return ()
    if _BAR.search(text):
        return ("%",)
    if not any(character.isdigit() for character in text) or _FAILED.search(text):
        return ()
    return tuple(word.lower() for word in _WORDS.findall(text[:200])[:2])
