"""What may have happened to any file: cut, flipped, swapped; or something without content or end in its place."""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec

SECRET = b"what no report of a stranger's files may ever read: 5e3f0c"
OUTSIDE = "outside"
"""The directory beside the case's own, to which links lead; nothing in it is read or written."""
COMMANDS = "\n::error::owned\r\n##vso[task.complete]\x1b[2J\x1b]0;owned\x07"
HUGE = (0, -1, 1 << 31, 1 << 53, (1 << 63) - 1, -(1 << 63), 1 << 63, 10**30)


class Damage(msgspec.Struct, frozen=True):
    """One row's way to damage a file."""

    name: str
    do: Callable[[Random, Path], None]
    is_unreadable: bool = False
    """Nothing of the file is left that could be read."""


def _cut(random: Random, path: Path) -> None:
    content = path.read_bytes()
    places = (1, 7, 8, 36, 40, 63, 100, 1024, 4095, 4096, 4100, 4288, len(content) // 2, len(content) - 1)
    path.write_bytes(content[: random.choice(places)])


def _flip(random: Random, path: Path) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(random.choice((1, 8, 200)) if content else 0):
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    path.write_bytes(content)


def _insert(piece: bytes) -> Callable[[Random, Path], None]:
    def do(random: Random, path: Path) -> None:
        content = path.read_bytes()
        at = random.randrange(len(content) + 1)
        path.write_bytes(content[:at] + piece + content[at:])

    return do


def _write(content: bytes) -> Callable[[Random, Path], None]:
    return lambda random, path: void(path.write_bytes(content))


def _swap(random: Random, path: Path) -> None:
    others = [other for other in path.parent.iterdir() if other.is_file() and other != path]
    if others:
        shutil.copyfile(random.choice(sorted(others)), path)


def _blank(random: Random, path: Path) -> None:
    content = bytearray(path.read_bytes())
    if content:
        low = random.randrange(len(content))
        high = min(len(content), low + random.choice((8, 512, 4096)))
        content[low:high] = bytes(high - low)
    path.write_bytes(content)


def _double(random: Random, path: Path) -> None:
    path.write_bytes(path.read_bytes() * random.choice((2, 3)))


def void(result: object) -> None:
    """Forget a result."""


def gone(path: Path) -> None:
    """Take away what is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _instead(make: Callable[[Path], object]) -> Callable[[Random, Path], None]:
    def do(random: Random, path: Path) -> None:
        gone(path)
        make(path)

    return do


def _socket(path: Path) -> None:
    # The name of a socket has at most 107 bytes.
    before = os.getcwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(before)


def _device(path: Path) -> None:
    try:
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))
    except PermissionError:
        path.symlink_to("/dev/zero")


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(20 << 30)


def _outside(name: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        top = next(one for one in path.parents if (one / OUTSIDE).is_dir())
        path.symlink_to(top / OUTSIDE / name)

    return make


ANY_FILE = (
    Damage("cut", _cut),
    Damage("bits flipped", _flip),
    Damage("a piece of it NUL", _blank),
    Damage("NUL inserted", _insert(b"\0" * 9)),
    Damage("no UTF-8 inserted", _insert(b"\xff\xfe\xc3\x28")),
    Damage("a line feed inserted", _insert(b"\n")),
    Damage("commands inserted", _insert(COMMANDS.encode())),
    Damage("twice itself", _double),
    Damage("another file's content", _swap),
    Damage("empty", _write(b"")),
    Damage("noise", lambda random, path: void(path.write_bytes(random.randbytes(5_000)))),
    Damage("brackets 100,000 deep", _write(b"[" * 100_000)),
    Damage("objects 100,000 deep", _write(b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"\n")),
    Damage("one line of 60 MB", _write(b"x" * 60_000_000)),
    Damage("3,000,000 lines of nothing", _write(b"\n" * 3_000_000)),
    Damage("gone", lambda random, path: gone(path), True),
    Damage("a pipe", _instead(os.mkfifo), True),
    Damage("a socket", _instead(_socket), True),
    Damage("a directory", _instead(lambda path: path.mkdir()), True),
    Damage("a device without end", _instead(_device), True),
    Damage("a link to a device", _instead(lambda path: path.symlink_to("/dev/zero")), True),
    Damage("a link to itself", _instead(lambda path: path.symlink_to(path)), True),
    Damage("a link to nothing", _instead(lambda path: path.symlink_to("nothing")), True),
    Damage("a link out to a secret", _instead(_outside("secret")), True),
    Damage("a link out to a pipe", _instead(_outside("pipe")), True),
    Damage("a link out to a directory", _instead(_outside("folder")), True),
    Damage("20 GB without content", _instead(_sparse), True),
    Damage("without permission", lambda random, path: path.chmod(0), True),
)
GROWING = Damage("growing", lambda random, path: None)


def _mutated(random: Random, value: Any) -> Any:
    """The same JSON with one place in it changed."""
    if isinstance(value, dict) and value and random.random() < 0.85:
        key = random.choice(sorted(value))
        return {**value, key: _mutated(random, value[key])}
    if isinstance(value, list) and value and random.random() < 0.7:
        place = random.randrange(len(value))
        return [*value[:place], _mutated(random, value[place]), *value[place + 1 :]]
    if isinstance(value, int) and not isinstance(value, bool) and random.random() < 0.6:
        return random.choice(HUGE)
    if isinstance(value, str) and random.random() < 0.6:
        return random.choice((value + COMMANDS, "x" * 4_000, "", "\u202e\u2066" + value, "/" + "a/" * 2_000, "\ud800"))
    odd: tuple[Any, ...] = (None, True, -1, 1e308, "", "x", COMMANDS, [], {}, [[]] * 50, {"a": 1}, "x" * 3_000_000)
    return random.choice((*odd, *HUGE))


def mutate_json(random: Random, content: bytes) -> bytes:
    """One to three places of a JSON text changed; NaN, twofold keys and huge numbers now and then."""
    try:
        value = json.loads(content)
    except ValueError:
        return content
    for _ in range(random.choice((1, 1, 2, 3))):
        value = _mutated(random, value)
    text = json.dumps(value)
    if random.random() < 0.1 and text.startswith("{"):
        text = text[:-1] + ', "version": 1, "version": 2}'
    return text.encode()


def mutate_lines(random: Random, content: bytes) -> bytes:
    """Some lines of JSON changed, repeated, dropped or moved."""
    lines = content.split(b"\n")
    for _ in range(random.choice((1, 3, 20))):
        at = random.randrange(len(lines))
        act = random.random()
        if act < 0.7:
            lines[at] = mutate_json(random, lines[at])
        elif act < 0.8:
            lines.insert(random.randrange(len(lines)), lines[at])
        elif act < 0.9 and len(lines) > 1:
            del lines[at]
        else:
            random.shuffle(lines)
    return b"\n".join(lines)


def in_place(change: Callable[[Random, bytes], bytes]) -> Callable[[Random, Path], None]:
    """Make a damage of a change of content."""
    return lambda random, path: void(path.write_bytes(change(random, path.read_bytes())))


OF_JSON = (
    Damage("JSON changed", in_place(mutate_json)),
    Damage("JSON of another kind", _write(b'"text"')),
    Damage("a newer version", in_place(lambda random, content: content.replace(b'"version":1', b'"version":99'))),
    Damage("a value of 60 MB", _write(b'{"kind": "' + b"k" * 60_000_000 + b'"}')),
)
OF_LINES = (
    Damage("events changed", in_place(mutate_lines)),
    Damage("events changed again", in_place(mutate_lines)),
    Damage("2,000,000 small events", _write(b'{"event":"a"}\n' * 2_000_000)),
    Damage("one event of lists", _write(b'{"event":"lines","lines":[' + b"[]," * 8_000_000 + b"[]]}\n")),
    Damage("500,000 sites", _write(b'{"event":"site","time_ns":1,"number":1,"frames":[["a.py",1,"f"]]}\n' * 500_000)),
)
