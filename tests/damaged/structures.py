"""Damage that knows what a file is: rings, the history, dumps and archives, with every checksum right."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import pickle
import sqlite3
import struct
import tarfile
import zipfile
import zlib
from pathlib import Path
from random import Random
from typing import Any

from ddpdoctor.monitor import history
from ddpdoctor.record import layout
from tests.damaged.damages import COMMANDS, HUGE, Damage, in_place, mutate_json, void

KINDS = {kind.magic: kind for kind in (layout.STEPS, layout.CALLS, layout.COLLECTIVES)}


def _numbers(values: list[int]) -> bytes:
    packed = struct.pack(f"<{len(values)}q", *(max(-(1 << 63), min(value, (1 << 63) - 1)) for value in values))
    return packed + zlib.crc32(packed).to_bytes(4, "little")


def _ring_rows(random: Random, content: bytes) -> bytes:
    """Numbers that no probe writes, in rows and the heartbeat whose checksums fit."""
    kind = KINDS.get(content[:8])
    if kind is None:
        return content
    size = 8 * (1 + len(kind.fields)) + 4
    raw = bytearray(content)
    for _ in range(random.choice((1, 5, 60))):
        slot = random.randrange(min(kind.rows, 200))
        start = layout.HEAD_BYTES + slot * size
        row = list(struct.unpack_from(f"<{1 + len(kind.fields)}q", raw, start)) if start + size <= len(raw) else []
        if row:
            place = random.randrange(len(row))
            row[place] = slot + kind.rows * random.randrange(1 << 40) if place == 0 else random.choice(HUGE)
            raw[start : start + size] = _numbers(row)
    beat = list(struct.unpack_from(f"<{len(kind.heartbeat_fields)}q", raw, layout.HEARTBEAT_OFFSET))
    if beat and random.random() < 0.5:
        beat[random.randrange(len(beat))] = random.choice(HUGE)
        packed = _numbers(beat)
        raw[layout.HEARTBEAT_OFFSET : layout.HEARTBEAT_OFFSET + len(packed)] = packed
    return bytes(raw)


def _ring_head(random: Random, content: bytes) -> bytes:
    if len(content) < layout.NEXT_OFFSET + 8:
        return content
    fields = list(layout.IDENTITY.unpack_from(content))
    (written,) = layout.NEXT.unpack_from(content, layout.NEXT_OFFSET)
    place = random.randrange(len(fields) + 1)
    if place == len(fields):
        written = random.choice((0, 1 << 40, (1 << 64) - 1))
    elif place:
        most = 64 if place == 5 else 32
        fields[place] = random.choice((0, 1, (1 << 31) - 1, (1 << most) - 1))
    else:
        fields[0] = random.choice((b"DDPDCALL", b"DDPDSTEP", b"ELF"))
    head = layout.IDENTITY.pack(*fields).ljust(layout.NEXT_OFFSET, b"\0") + layout.NEXT.pack(written)
    return head + content[len(head) :]


OF_RINGS = (
    Damage("numbers in rows", in_place(_ring_rows)),
    Damage("more numbers in rows", in_place(_ring_rows)),
    Damage("numbers in the head", in_place(_ring_head)),
)

_VIEW = "with recursive c(x) as (select 1 union all select x + 1 from c) select x as at_ns, x as content from c"


def _sql(*statements: str) -> Damage:
    def do(random: Random, path: Path) -> None:
        with sqlite3.connect(path) as connection:
            for statement in statements:
                connection.execute(statement)
        connection.close()

    return Damage(f"SQL: {statements[-1][:40]}", do)


def _snapshots(random: Random, path: Path) -> None:
    connection = sqlite3.connect(path)
    for at_ns, content in connection.execute("select at_ns, content from snapshots").fetchall():
        changed = mutate_json(random, zlib.decompress(content))
        connection.execute("update snapshots set content = ? where at_ns = ?", (zlib.compress(changed, 1), at_ns))
    connection.commit()
    connection.close()


def _bomb_in_history(random: Random, path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("update snapshots set content = ?", (zlib.compress(bytes(1 << 31), 9),))
    connection.commit()
    connection.close()


def _beside(name: str, content: bytes | None) -> Damage:
    def do(random: Random, path: Path) -> None:
        import os

        other = path.with_name(name)
        other.unlink(missing_ok=True)
        if content is None:
            os.mkfifo(other)
        else:
            other.write_bytes(content)

    return Damage(f"{name} {'a pipe' if content is None else 'noise'} beside it", do)


OF_HISTORY = (
    Damage("snapshots changed", _snapshots),
    Damage("snapshots changed again", _snapshots),
    Damage("snapshots changed once more", _snapshots),
    Damage("a snapshot that unpacks to 2 GB", _bomb_in_history),
    _sql("drop table snapshots"),
    _sql("pragma user_version = 99"),
    _sql("update snapshots set content = 'text'"),
    _sql("update snapshots set content = zeroblob(60000000)"),
    _sql("drop table snapshots", f"create view snapshots as {_VIEW}"),
    _sql("drop table snapshots", "create table snapshots (at_ns text, content text)",
         "insert into snapshots values ('x', null)"),
    _beside(history.FILE + "-journal", None),
    _beside(history.FILE + "-journal", b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7" + bytes(2_000)),
    _beside(history.FILE + "-wal", None),
)  # fmt: skip


class _Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return (open, ("owned", "w"))


def _laughs() -> bytes:
    """A list of lists of lists …, each ten times the same one."""
    told: list[Any] = [{"record_id": 1, "frames": []}]
    for _ in range(9):
        told = [told] * 10
    frames: list[Any] = [{"name": "f", "filename": "f.py", "line": 1}] * 60_000
    return pickle.dumps({"version": "2.10", "entries": [{"record_id": 1, "frames": frames}] * 60_000, "more": told}, 2)


def _of_entries(random: Random, content: bytes) -> bytes:
    loaded = pickle.loads(content) if content[:1] == b"\x80" else json.loads(content)
    changed = json.loads(mutate_json(random, json.dumps(loaded, default=str).encode()))
    return pickle.dumps(changed, 2) if content[:1] == b"\x80" else json.dumps(changed).encode()


def _as_pickle(name: str, content: bytes) -> Damage:
    return Damage(name, lambda random, path: void(path.write_bytes(content)))


OF_DUMPS = (
    Damage("entries changed", in_place(_of_entries)),
    Damage("entries changed again", in_place(_of_entries)),
    _as_pickle("a pickle that runs code", pickle.dumps({"entries": [_Runs()]})),
    _as_pickle("a pickle of laughs", _laughs()),
    _as_pickle("a pickle with a far memo", b"\x80\x02}r" + struct.pack("<I", 0x0FFFFFFF) + b"."),
    _as_pickle("a pickle of 2 GB that are not there", b"\x80\x04\x8e" + struct.pack("<Q", 1 << 31) + b"x"),
    _as_pickle("a bytearray of 2 GB", b"\x80\x05\x96" + struct.pack("<Q", 1 << 31) + b"x"),
    _as_pickle("a pickle 50,000 deep", b"\x80\x02" + b"(" * 50_000 + b"l" * 50_000 + b"."),
    _as_pickle(
        "10,000,000 entries", b"\x80\x02}X\x07\0\0\0entries](" + b"}" + b"q\x01" + b"h\x01" * 10_000_000 + b"es."
    ),
    _as_pickle("JSON of 6,000,000 entries", b'{"version":"2.10","entries":[' + b"{}," * 6_000_000 + b"{}]}"),
)


def _gz(content: bytes) -> bytes:
    return gzip.compress(content, 9, mtime=0)


def _zip(*entries: tuple[str, bytes]) -> bytes:
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries:
            archive.writestr(name, content)
    return raw.getvalue()


def _tar(*members: tuple[str, bytes, bytes], mode: str = "w") -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode=mode) as archive:  # type: ignore[call-overload]
        for name, kind, link in members:
            member = tarfile.TarInfo(name)
            member.type = kind
            member.linkname = link.decode()
            archive.addfile(member, io.BytesIO())
    return raw.getvalue()


def _overlapping(content: bytes) -> bytes:
    """A thousand entries of the directory that all are the same compressed megabytes."""
    archive = bytearray(_zip(("a.log", content)))
    start = archive.rindex(b"PK\x01\x02")
    end = archive.rindex(b"PK\x05\x06")
    one = bytes(archive[start:end])
    closing = bytearray(archive[end:])
    struct.pack_into("<HHI", closing, 8, 1_000, 1_000, 1_000 * len(one))
    return bytes(archive[:start]) + one * 1_000 + bytes(closing)


def _many_entries() -> bytes:
    """An archive whose directory alone has 200,000 entries."""
    archive = bytearray(_zip(("a.log", b"x")))
    start, end = archive.rindex(b"PK\x01\x02"), archive.rindex(b"PK\x05\x06")
    one, closing = bytes(archive[start:end]), bytearray(archive[end:])
    struct.pack_into("<HHI", closing, 8, 0xFFFF, 0xFFFF, 200_000 * len(one))
    return bytes(archive[:start]) + one * 200_000 + bytes(closing)


def archives() -> dict[str, bytes]:
    """Bombs and oddities, each by the name of its file."""
    nothing = bytes(1 << 28)
    bomb = _gz(nothing)
    error = b"RuntimeError: x\n" * (1 << 20)
    outside = (("/etc/passwd", tarfile.REGTYPE, b""), ("../../x", tarfile.REGTYPE, b""),
               ("l", tarfile.SYMTYPE, b"/etc/passwd"), ("d", tarfile.CHRTYPE, b""))  # fmt: skip
    return {
        "zeros.log.gz": bomb,
        "nested.log.gz": _gz(bomb),
        "lines.log.gz": _gz(error * 16),
        "members.log.gz": _gz(b"") * 100_000,
        "joined.log.gz": _gz(b"a line\n") * 20_000,
        "cut.log.gz": bomb[: len(bomb) // 2],
        "garbage.log.gz": _gz(b"a line\n") + b"garbage",
        "zeros.log.zip": _zip(("a.log", nothing)),
        "nested.zip": _zip(("a.zip", _zip(("b.zip", _zip(("c.log", nothing)))))),
        "overlapping.zip": _overlapping(nothing),
        "entries.zip": _many_entries(),
        "names.zip": _zip(("../../../x" + COMMANDS, b"RuntimeError: a\n"), ("/etc/passwd", b"x")),
        "empty.zip": _zip(),
        "cut.zip": _zip(("a.log", error))[:2_000],
        "zeros.log.xz": lzma.compress(bytes(1 << 24)),
        "zeros.log.bz2": __import__("bz2").compress(bytes(1 << 24)),
        "zeros.log.zst": b"\x28\xb5\x2f\xfd\x84\0\0\0\x01" + b"\x02\0\x08\0" * 900 + b"\x03\0\x08\0",
        "names.tar": _tar(*outside),
        "names.tar.gz": _tar(*outside, mode="w:gz"),
        "dump_0.gz": _gz(pickle.dumps({"entries": [{"record_id": n} for n in range(200_000)]})),
        "dump_1.gz": _gz(b"\x80\x02" + b"]" * (1 << 27)),
        "spaces.log.gz": _gz(b" " * (1 << 28)),
        "wide.log": b"\xff\xfe" + ("RuntimeError: a\n" * 1_000).encode("utf-16-le"),
        "returns.log": b"RuntimeError: a\r" * 1_000_000,
        "objects.log": (json.dumps({"message": "RuntimeError: x", "exc_info": "y\n" * 10_000}) + "\n").encode() * 300,
        "tracebacks.log": b"Traceback (most recent call last):\n" * 300_000,
    }
