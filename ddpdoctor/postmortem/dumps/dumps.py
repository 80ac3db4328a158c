"""Reads dumps of torch's flight recorder, pickles and JSON of every version since torch 2.4, as hostile input.

The unpickler refuses every global, a dump has a bound in bytes, in containers, in memory and in what it holds once
nothing is shared any more, and it is converted to plain data of known types before anything looks at it. Most ranks of
a job hold the same entries at other times: a dump that equals an earlier one but for its time stamps is not unpickled
at all (1 ms against 20 ms for 2,000 entries).
"""

from __future__ import annotations

import io
import pickle
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import msgspec

from ddpdoctor.files.untrusted import quoted

LARGEST_BYTES = 64 << 20
"""A dump of 2,000 entries with 30 frames each has 5 MB; rings of 20,000 are the largest in use."""
MOST_ENTRIES = 200_000
DEEPEST = 64
_CONTAINERS = (b"}", b"]", b")")
_FEWEST_BYTES_EACH = 6
"""Bytes of a dump for each container in it, at least: a pickle of nothing but empty lists needs 1."""
_FEWEST_BYTES_EACH_IN_JSON = 32
"""The same of a dump in JSON, where an entry of 9 containers has 500 bytes at least."""
_MOST_MEMORY = 1 << 29
"""Bytes that an unpickler may take: ten of a pickle can ask for gigabytes (a place in its memo)."""
_MOST_VALUES = 20_000_000
"""Of a pickle, counted as often as they are referred to; 2,000 entries with 30 frames each have 300,000."""
_TIME = b"\x8a\x08"
"""Opcode and length of an integer of 8 bytes, as time stamps are; nothing else in a dump is that large."""
_TIME_BYTES = 8
_THREADS = (re.compile(rb"X[\x0a-\x14]\x00\x00\x00\d{10,20}"), re.compile(rb"\x8c[\x0a-\x14]\d{10,20}"))
"""Ids of threads, which are text."""
MOST_KNOWN = 64
"""Different contents that are kept to compare with."""


class DumpFrame(msgspec.Struct, frozen=True):
    """A Python frame."""

    filename: str = ""
    line: int = 0
    name: str = ""


class Entry(msgspec.Struct, kw_only=True):
    """One operation of the recorder."""

    record_id: int = 0
    pg_id: int | str = 0
    process_group: tuple[str, ...] = ()
    collective_seq_id: int | None = None
    seq_id: int | None = None
    """Of versions before 2.0 of the format."""
    p2p_seq_id: int = 0
    profiling_name: str = ""
    time_created_ns: int = 0
    input_sizes: list[list[int]] = []
    input_dtypes: list[str] = []
    state: str = ""
    time_discovered_completed_ns: int | None = None
    retired: bool = False
    timeout_ms: int = 0
    is_p2p: bool = False
    frames: list[DumpFrame] = []

    @property
    def is_over(self) -> bool:
        """It had completed, or torch had given it up, when the dump was made."""
        return self.retired or self.has_completed

    @property
    def has_completed(self) -> bool:
        """It had completed when the dump was made."""
        return self.state == "completed" or bool(self.time_discovered_completed_ns)


class GroupConfig(msgspec.Struct):
    """What a dump says of a process group."""

    name: str = ""
    ranks: str | list[int] = ""


class Dump(msgspec.Struct, kw_only=True):
    """One dump."""

    version: str = ""
    rank: int | None = None
    pg_config: dict[str, GroupConfig] = {}
    entries: list[Entry] = []


class DumpError(Exception):
    """A dump that cannot be used; the argument is a clause that says why."""


class Dumps:
    """Reads the dumps of one job and remembers what it has read."""

    def __init__(self) -> None:
        self._known: list[tuple[bytes, Dump]] = []

    def read(self, content: bytes) -> Dump:
        """Return the dump, the same one where it was read before but for its times; raises DumpError."""
        if len(content) > LARGEST_BYTES:
            raise DumpError(f"it has more than {LARGEST_BYTES >> 20} MiB, too large for a flight-recorder dump")
        if content[:1] != b"\x80":
            return _checked(_of_json(content))
        bare = timeless(content)
        for known, dump in self._known:
            if bare == known:
                return dump
        dump = _checked(_of_pickle(content))
        if len(self._known) < MOST_KNOWN:
            self._known.append((bare, dump))
        return dump


def timeless(content: bytes) -> bytes:
    """Return a pickle without its time stamps and thread ids: equal for ranks that did the same."""
    first, *rest = content.split(_TIME)
    if rest and min(map(len, rest)) < _TIME_BYTES:
        rest = _mended(rest)
    bare = b"".join([first, *[piece[_TIME_BYTES:] for piece in rest]])
    for pattern in _THREADS:
        bare = pattern.sub(b"", bare)
    return bare


def _mended(pieces: list[bytes]) -> list[bytes]:
    """Join what was split inside of a time stamp, whose own bytes may look like the mark before one."""
    mended: list[bytes] = []
    done = 0
    for index in [index for index, piece in enumerate(pieces) if len(piece) < _TIME_BYTES]:
        if index < done:
            continue  # it was the rest of a stamp itself
        whole, following = pieces[index], index + 1
        while len(whole) < _TIME_BYTES and following < len(pieces):
            whole += _TIME + pieces[following]
            following += 1
        mended += (*pieces[done:index], whole)
        done = following
    return mended + pieces[done:]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"{module}.{name} does not belong in a flight record")

    def persistent_load(self, pid: object) -> NoReturn:
        raise pickle.UnpicklingError("a reference to another file does not belong in a flight record")


def _of_pickle(content: bytes) -> Dump:
    containers = sum(content.count(opcode) for opcode in _CONTAINERS)
    if containers > 10_000 and containers * _FEWEST_BYTES_EACH > len(content):
        raise DumpError("it holds more lists than data, as only a pickle bomb does")
    try:
        with _little_memory():
            loaded = _Unpickler(io.BytesIO(content)).load()
        if _values_in(loaded) > _MOST_VALUES:
            raise DumpError("it unfolds to more than a dump holds, as only a pickle bomb does")
    except (RecursionError, DumpError) as error:
        raise error if isinstance(error, DumpError) else DumpError("it is nested too deeply") from error
    except Exception as error:  # whatever an unpickler makes of bytes that are none
        raise DumpError(f"it is damaged ({_first_line(error)})") from error
    try:
        return msgspec.convert({"entries": loaded} if isinstance(loaded, list) else loaded, Dump, strict=False)
    except (msgspec.ValidationError, RecursionError) as error:
        raise DumpError(f"it is not a flight record ({_first_line(error)})") from error


@contextmanager
def _little_memory() -> Iterator[None]:
    """Let this process take so much more memory than it has, and no more."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            most = int(file.read().split()[0]) * resource.getpagesize() + _MOST_MEMORY
        if before[0] == resource.RLIM_INFINITY or most < before[0]:
            resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _values_in(loaded: object) -> int:
    """Return how many values there are if each is counted as often as it is referred to; more than fit for a cycle."""
    counts: dict[int, int] = {}
    stack = [loaded]
    while stack:
        value = stack[-1]
        if not isinstance(value, (list, tuple, dict)) or counts.get(id(value), 0):
            stack.pop()
            continue
        inner = [*value, *value.values()] if isinstance(value, dict) else value
        inner = [one for one in inner if isinstance(one, (list, tuple, dict))]
        if id(value) not in counts:
            counts[id(value)] = 0
            stack += {id(one): one for one in inner if id(one) not in counts}.values()
        else:
            number = 1 + len(value) + sum(counts[id(one)] or _MOST_VALUES for one in inner)
            counts[id(value)] = min(number, _MOST_VALUES + 1)
            stack.pop()
    return counts.get(id(loaded), 1)


def _of_json(content: bytes) -> Dump:
    containers = content.count(b"{") + content.count(b"[")
    if containers > 10_000 and containers * _FEWEST_BYTES_EACH_IN_JSON > len(content):
        raise DumpError("it holds more lists than data, as only a bomb does")
    depth = _depth(content)
    if depth > DEEPEST:
        raise DumpError("it is nested too deeply")
    try:
        return msgspec.json.decode(content, type=Dump, strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DumpError(f"it is not a flight record ({_first_line(error)})") from error


def _depth(content: bytes) -> int:
    """Return how many opening brackets stand in a row at the most, which is what a bomb of nested lists is made of."""
    return max((len(match[0]) for match in re.finditer(rb"[\[{]{8,}", content)), default=0)


def _checked(dump: Dump) -> Dump:
    if len(dump.entries) > MOST_ENTRIES:
        raise DumpError(f"it has more than {MOST_ENTRIES:,} entries")
    return dump


def ranks_of(config: GroupConfig) -> tuple[int, ...]:
    """Return the ranks of a group, sorted; empty where the dump does not say."""
    if isinstance(config.ranks, list):
        return tuple(sorted(set(config.ranks)))
    return tuple(sorted({int(number) for number in re.findall(r"\d{1,7}", config.ranks[:1_000_000])}))


def _first_line(error: BaseException) -> str:
    text = quoted(str(error).strip().partition("\n")[0])
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
