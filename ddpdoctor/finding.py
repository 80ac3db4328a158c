"""What the doctor says: a finding, its place, its evidence, its severity and its fingerprint."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from enum import Enum
from functools import lru_cache
from itertools import pairwise
from typing import Literal, TypeAlias, TypeVar

import msgspec

from ddpdoctor.files.untrusted import line_of

Entry = TypeVar("Entry")
Key = TypeVar("Key", bound=Hashable)
Basis = Literal["source", "rehearsal", "run", "log", "dump"]
"""How a fact is known: read in the source, seen in a rehearsal, in a live run, in logs, or in dumps."""

WENT_ON = "; the log goes on after it"
"""The end of the title of what nobody died of."""

Trouble = Literal[
    # The ranks part, or wait for what does not come.
    "rank-branch",
    "data-branch",
    "lone-forward",
    "mismatch",
    "desync",
    "uneven-passes",
    "subset-group",
    "shared-group",
    "ddp-on-subset",
    "caught-exception",
    "early-exit",
    "hang",
    "long-wait",
    "timeout",
    # A rank fails or dies by itself.
    "exception",
    "killed",
    "out-of-memory",
    "shared-memory",
    "nccl-error",
    "gpu-fault",
    "no-rendezvous",
    "no-rank-environment",
    "port-in-use",
    "no-backend",
    "local-rank-argument",
    "wrong-rank-kind",
    "cuda-after-fork",
    "cpu-tensor",
    "missing-device",
    "lacking-machine",
    "unused-parameters",
    "ready-twice",
    "wrapper-attribute",
    # Ranks meet at a path.
    "download-race",
    "early-read",
    "path-race",
    "many-writers",
    # Something is not as it was meant, or slow.
    "no-wrap",
    "hot-barrier",
    "exposed-communication",
    "straggler",
    "input-bound",
]
"""What went wrong, as diagnosis and reports know it; ``Check.stands_for`` says which check speaks for it."""
_FAMILIES = {
    "1": "data",
    "2": "gradients",
    "3": "collectives",
    "4": "speed",
    "5": "launch",
    "6": "state",
    "7": "death",
}
"""By the first digit of a built-in check's code."""


class Severity(str, Enum):
    """How bad a finding is; the order of the members is from worst to mildest."""

    ERROR = "error"
    """The job hangs, dies, or computes something other than what was asked."""
    WARNING = "warning"
    """Probably wrong or wasteful, or right by luck."""
    ADVICE = "advice"
    """Works; could be better. Never fails a run by default."""

    @property
    def order(self) -> int:
        """0 for the worst: what findings are sorted by."""
        return list(Severity).index(self)

    def at_least(self, threshold: Severity) -> bool:
        """Tell whether this severity is as bad as ``threshold`` or worse."""
        return self.order <= threshold.order


class Frame(msgspec.Struct, frozen=True, order=True):
    """One line of a call chain in the user's code."""

    file: str
    """Absolute path."""
    line: int
    """1-based."""
    function: str = ""
    """Name of the enclosing function; ``<module>`` at top level."""


class Location(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """A region of a source file; all numbers are 1-based, ``end_column`` is exclusive."""

    file: str
    """Absolute path inside the program; reports print it relative to the working directory."""
    line: int
    column: int = 1
    end_line: int = 0
    """0 when only the line is known."""
    end_column: int = 0
    """0 when only the line is known."""
    function: str = ""
    """Qualified name of the enclosing function, empty at module level."""


class Fact(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of evidence: a sentence, the numbers in it, and where and how it was seen."""

    text: str
    """A whole sentence without a full stop, with numbers and units."""
    basis: Basis
    numbers: Mapping[str, int | float] = {}
    """The numbers of the sentence for machines; the unit is in the key (``bytes_per_step``)."""
    rank: int | None = None
    location: Location | None = None
    stack: tuple[Frame, ...] = ()
    """Innermost frame first."""


NAMED_BECAUSE = "is named because"
"""In the fact that says why the run blames a rank, which does not hold where the source blames another."""
MOST_TIMES = 100.0
"""A gain is reported up to so many times, and what is beyond it as no bound; infinity is no number in JSON."""


class Gain(msgspec.Struct, frozen=True, kw_only=True):
    """What mending one finding alone is predicted to bring."""

    speedup: float
    """How many times as many samples a second."""
    low: float
    high: float
    """Nine in ten times it lies between these; no bound where it is ``MOST_TIMES``."""

    @property
    def text(self) -> str:
        """``1.45 times as fast, if only this is fixed (1.30 to 1.55)``."""
        most = f"to {self.high:.2f}" if self.high < MOST_TIMES else "or more"
        return f"{self.speedup:.2f} times as fast, if only this is fixed ({self.low:.2f} {most})"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One cause, stated once."""

    code: str
    name: str
    trouble: Trouble | None = None
    """What the check stands for, where the rest of the program knows it."""
    severity: Severity
    title: str
    """One sentence, no full stop, with the numbers that matter."""
    ranks: tuple[int, ...] = ()
    """The ranks concerned, ascending; empty when it concerns all of them or none in particular."""
    locations: tuple[Location, ...] = ()
    """The first is the primary one."""
    basis: frozenset[Basis]
    evidence: tuple[Fact, ...] = ()
    remedy: str
    """What to do, in one or two sentences."""
    unconfirmed: str = ""
    """What a rehearsal that did not confirm a suspicion of the source says of it, as in ``not rehearsed: no rank
    reached train.py:88``; empty when it confirmed it or cannot speak of it.
    """
    stress: str = ""
    """The injected cause under which it was seen; empty when it happens by itself."""
    what_if: tuple[str, ...] = ()
    """How a job is predicted in which it is mended: settings as ``ddpdoctor what-if --set`` takes them."""
    gain: Gain | None = None
    """What mending it alone brings; None where nothing is known of that."""
    role: Literal["", "cause", "echo"] = ""
    """In an autopsy: the first cause of the death, or what followed from it."""
    doubt: str = ""
    """In an autopsy: why it is not certain that this is the cause; empty where it is."""
    disproved_at: tuple[Frame, ...] = ()
    """Of a suspicion that some ranks alone come to a call: its call chain. All ranks that meet there disprove it."""
    fingerprint: str = ""
    """Survives line moves; filled in when findings are merged."""

    @property
    def family(self) -> str:
        """The family of the built-in check, such as ``collectives``; empty for any other."""
        return _FAMILIES.get(self.code[3:4], "") if self.code.startswith("DDP") else ""

    @property
    def advice(self) -> str:
        """The remedy, and what it is predicted to bring, where that is known."""
        return self.remedy if self.gain is None else f"{self.remedy} Predicted: {self.gain.text}."

    @property
    def urgency(self) -> tuple[int, bool, float]:
        """What findings of a run are sorted by: the worst first, what is wrong before what is slow, and of that what
        gains most when mended.
        """
        return self.severity.order, self.family == "speed", -(self.gain.speedup if self.gain is not None else 1.0)

    @property
    def location(self) -> Location | None:
        """The primary location, if the finding has a place."""
        return self.locations[0] if self.locations else None


class Refuted(msgspec.Struct, frozen=True, kw_only=True):
    """A run proved that what the same check suspected at this place of the source is not so."""

    location: Location
    reason: str
    chain: tuple[Frame, ...] = ()
    """Not of the whole line, but of a suspicion that is disproved at this call chain."""


class Confirmed(msgspec.Struct, frozen=True, kw_only=True):
    """A run showed what the same check suspected at this place of the source; without the suspicion it says nothing."""

    location: Location
    fact: Fact
    """What the run showed."""


FoundInRun: TypeAlias = "Finding | Refuted | Confirmed"
"""What a check yields of a run."""


# Fingerprints: the same defect keeps its fingerprint when lines move.

_LONGEST_LINE = 10_000
"""Characters of a line that count; one of a megabyte that has thousands of findings took minutes."""


def with_fingerprints(findings: Sequence[Finding], root: str) -> tuple[Finding, ...]:
    """Fill in the fingerprint of every finding, in the order given.

    It is made of the code, the path relative to ``root``, the enclosing function, the line without its white space, and
    the ordinal among the findings that agree in all of these, counted from the top of the file.
    """
    ordered = sorted(enumerate(findings), key=lambda numbered: _position(numbered[1]))
    seen: Counter[str] = Counter()
    fingerprints: dict[int, str] = {}
    for index, finding in ordered:
        identity = _identity(finding, root)
        fingerprints[index] = _digest(f"{identity}\0{seen[identity]}")
        seen[identity] += 1
    return tuple(
        msgspec.structs.replace(finding, fingerprint=fingerprints[index]) for index, finding in enumerate(findings)
    )


def _position(finding: Finding) -> tuple[str, int, int]:
    location = finding.location
    return (location.file, location.line, location.column) if location else ("", 0, 0)


def _identity(finding: Finding, root: str) -> str:
    location = finding.location
    if location is None:
        return f"{finding.code}\0\0\0"
    path = shown_path(location.file, root)
    if os.path.isabs(path):
        path = os.path.basename(path)
    # A run knows a method as "step", the source as "Trainer.step".
    function = location.function.rpartition(".")[2].replace("<module>", "")
    line = "".join(line_of(location.file, location.line)[:_LONGEST_LINE].split())
    return f"{finding.code}\0{path}\0{function}\0{line}"


def _digest(text: str) -> str:
    from hashlib import sha256

    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def meets(one: Location, other: Location) -> bool:
    """Return whether the lines of two locations overlap in the same file."""
    return same_lines(one, other) or same_lines(other, one)


def same_lines(outer: Location, inner: Location) -> bool:
    """Return whether ``inner`` starts inside the lines of ``outer``; symbolic links to one file are the same file."""
    return outer.line <= inner.line <= max(outer.line, outer.end_line) and same_file(outer.file, inner.file)


def same_file(one: str, other: str) -> bool:
    """Return whether two absolute paths name one file: Python resolves links for some modules and not for others."""
    return one == other or _real(one) == _real(other)


def of_frame(frame: Frame) -> Location:
    """Return the place of a frame."""
    return Location(file=frame.file, line=frame.line, function="" if frame.function == "<module>" else frame.function)


def shown_path(file: str, root: str) -> str:
    """Write a path relative to ``root`` with forward slashes; a file outside of ``root`` keeps its absolute path."""
    for path, base in ((file, root), (_real(file), _real(root))):
        if path.startswith(base.rstrip(os.sep) + os.sep):
            return path[len(base.rstrip(os.sep)) + 1 :].replace(os.sep, "/")
    return file.replace(os.sep, "/")


def plain(text: str) -> str:
    """Return a text without halves of characters, which come from file names and which JSON cannot hold."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def rank_list(ranks: Iterable[int], most: int = 8) -> str:
    """Write ``rank 3``, ``ranks 0-2 and 7``, ``ranks 0, 2, …, 254``; past ``most`` pieces how many others there are."""
    numbers = sorted(set(ranks))
    if len(numbers) < 2:
        return f"rank {numbers[0]}" if numbers else "no rank"
    steps = {after - before for before, after in pairwise(numbers)}
    if len(numbers) > max(most, 4) and len(steps) == 1 and steps != {1}:
        return f"ranks {', '.join(map(str, numbers[:3]))}, …, {numbers[-1]}"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words = [word for run in runs for word in ([f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run))]
    if len(words) > most:
        return f"ranks {', '.join(map(str, numbers[:3]))} and {len(numbers) - 3:,} others"
    return f"ranks {' and '.join(filter(None, (', '.join(words[:-1]), words[-1])))}"


def in_user_code(file: str) -> bool:
    """Return whether a file is neither the standard library's, nor an installed package's, nor ours."""
    parts = file.replace("\\", "/").split("/")
    if "site-packages" in parts or "dist-packages" in parts or file.startswith("<"):
        return False
    ours = any(before == "ddpdoctor" and part in _IN_THE_RANKS for before, part in pairwise(parts))
    return not ours and not is_of_python(file)


def is_of_python(file: str) -> bool:
    """Return whether a file is the standard library's."""
    parts = file.replace("\\", "/").split("/")
    within = any(before == "lib" and part.startswith("python3") for before, part in pairwise(parts))
    return within and "site-packages" not in parts and "dist-packages" not in parts


_IN_THE_RANKS = ("probe", "rehearsal")
"""Our own packages in the user's processes: a clone of ours is no installed package."""


@lru_cache(maxsize=4096)
def _real(path: str) -> str:
    try:
        return os.path.realpath(path)
    except ValueError:
        # A name from elsewhere that no file can have.
        return path


def count(number: int, noun: str, plural: str = "") -> str:
    """Write a number of things: ``1 path``, ``1,024 batches``."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def signal_name(number: int | None) -> str:
    """``SIGKILL``; what is known where the number is not."""
    if not number:
        return "a signal"
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def grouped(entries: Iterable[Entry], key: Callable[[Entry], Key]) -> dict[Key, list[Entry]]:
    """Return the entries by a key, in the order in which each came first."""
    found: dict[Key, list[Entry]] = {}
    for entry in entries:
        found.setdefault(key(entry), []).append(entry)
    return found
