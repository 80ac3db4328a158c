"""Composes the rows of the table: a thing that was left, what happened to it, and the command that reads it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import msgspec

from tests.damaged.damages import (
    ANY_FILE,
    COMMANDS,
    GROWING,
    OF_JSON,
    OF_LINES,
    OUTSIDE,
    SECRET,
    Damage,
    gone,
    in_place,
    mutate_json,
)
from tests.damaged.structures import OF_DUMPS, OF_HISTORY, OF_RINGS, archives

CLEAN, FINDINGS, ERROR, INCONCLUSIVE = range(4)
_ESSENTIAL = ("job.json", "events-", "steps-", "calls-", "history.sqlite")
_MORE_FILES = {
    "clock.json": b'{"offset_ns": 5, "low_ns": 1, "high_ns": 9}',
    "launcher.out": b"exitcode : -9 (pid: 4999999)\n",
    "probe-4999999.log": b"no torch\n",
    "attach.key": b"x",
    "owner.json": b"{}",
}


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One row."""

    name: str
    arguments: tuple[str, ...]
    allowed: frozenset[int]
    named: tuple[str, ...] = ()
    """An answer with code 2 names one of these."""
    unread: str = ""
    """A file of which nothing can be read: the answer names it, unless it is an error."""
    grows: str = ""
    may_read: bool = False
    """The user names a link, which may lead anywhere."""


def case(number: int, seed: int, originals: Path, scratch: Path) -> Case:
    """Make the row with a number, the same for the same seed, in ``scratch``/work."""
    random = Random(f"{seed}/{number}")
    outside = scratch / OUTSIDE
    for directory in (scratch / "work", scratch / "home", scratch / "tmp", outside, outside / "folder"):
        directory.mkdir(parents=True)
    (outside / "secret").write_bytes(SECRET + b"\nRuntimeError: " + SECRET)
    os.mkfifo(outside / "pipe")
    os.utime(outside / "secret", (1, 1_700_000_000))
    kinds = (_of_run, _of_logs, _of_dumps, _of_archive, _of_baseline, _of_directory, _of_report)
    make: Callable[[Random, Path, Path], Case] = random.choices(kinds, (11, 4, 3, 3, 2, 1, 1))[0]
    return make(random, originals, scratch / "work")


def _of_run(random: Random, originals: Path, work: Path) -> Case:
    original = random.choice(("run", "run", "died"))
    run = work / "run"
    shutil.copytree(originals / original, run)
    if random.random() < 0.5:
        gone(run / "history.sqlite")
    for name, content in _MORE_FILES.items():
        if random.random() < 0.15:
            (run / name).write_bytes(content)
    claimed_twice = random.random() < 0.15
    if claimed_twice:
        shutil.copyfile(next(run.glob("events-*")), run / "events-4999999.jsonl")
        shutil.copyfile(next(run.glob("steps-*")), run / "steps-4999999.ring")
    files = sorted(path.name for path in run.iterdir())
    name = random.choice([*files, *(["job.json"] * 3), *(["history.sqlite"] * 4 if "history.sqlite" in files else ())])
    damage = random.choice(_damages_of(name))
    damage.do(random, run / name)
    arguments = random.choice(
        (
            ("report", "run"),
            ("report", "run"),
            ("report", "run", "--output-format", "json"),
            ("report", "run", "--output-format", "html"),
            ("report", "run", "--export", "trace=../trace.json"),
            ("report", "run", "good"),
            ("what-if", "run"),
            ("compare", "run", "good"),
            ("compare", "good", "run"),
            ("autopsy", "run"),
            ("autopsy", "."),
            ("profile", "--no-tui", "--run-dir", "run"),
            ("profile", "--no-tui", "--attach", "run"),
        )
    )
    if "good" in arguments:
        shutil.copytree(originals / "run", work / "good")
    allowed = {CLEAN, FINDINGS, ERROR, INCONCLUSIVE}
    if arguments[0] == "profile" or (name == "job.json" and damage.is_unreadable and arguments[0] != "autopsy"):
        allowed = {ERROR}
    essential = damage.is_unreadable and name.startswith(_ESSENTIAL) and not name.endswith("-journal")
    unread = name if essential and damage.name != "gone" and arguments[0] != "profile" else ""
    if claimed_twice or (name == "history.sqlite" and arguments[0] in ("what-if", "compare", "autopsy")):
        unread = ""  # These ask the record; and of two processes that claim a rank one is left out.
    return Case(
        name=f"{original}/{name}: {damage.name}",
        arguments=arguments,
        allowed=frozenset(allowed),
        named=("run",),
        unread=unread,
        grows=str(run / name) if damage is GROWING else "",
    )


def _damages_of(name: str) -> Sequence[Damage]:
    if name.endswith(".jsonl"):
        return (*ANY_FILE, *OF_LINES, *OF_LINES, GROWING)
    if name.endswith(".ring"):
        return (*ANY_FILE, *(OF_RINGS * 5), GROWING)
    if name == "history.sqlite":
        return (*ANY_FILE, *OF_HISTORY, *OF_HISTORY)
    return (*ANY_FILE, *(OF_JSON * 3)) if name.endswith(".json") else ANY_FILE


def _of_directory(random: Random, originals: Path, work: Path) -> Case:
    """Something is wrong with the run directory itself, or with how many files there are."""
    run = work / "run"
    shutil.copytree(originals / "run", run)

    def many(pattern: str, number: int) -> Callable[[], None]:
        def make() -> None:
            content = next(run.glob(pattern.replace("#", "*"))).read_bytes()[:9_000]
            for pid in range(5_000_000, 5_000_000 + number):
                (run / pattern.replace("#", str(pid))).write_bytes(content)

        return make

    def renamed(name: str) -> Callable[[], object]:
        return lambda: run.rename(work / name)

    def instead(make: Callable[[], object]) -> Callable[[], None]:
        def do() -> None:
            gone(run)
            make()

        return do

    ways: dict[str, tuple[str, Callable[[], object]]] = {
        "gone": ("run", lambda: gone(run)),
        "a file": ("run", instead(lambda: run.write_bytes(b"x"))),
        "a pipe": ("run", instead(lambda: os.mkfifo(run))),
        "a link to itself": ("run", instead(lambda: run.symlink_to(run))),
        "without permission": ("run", lambda: run.chmod(0)),
        "without job.json": ("run", lambda: gone(run / "job.json")),
        "empty": ("run", instead(run.mkdir)),
        "a name of commands": ("x" + COMMANDS.replace("/", ""), renamed("x" + COMMANDS.replace("/", ""))),
        "a name of 250 characters": ("n" * 250, renamed("n" * 250)),
        "11,000 files of events": ("run", many("events-#.jsonl", 11_000)),
        "2,000 rings of steps": ("run", many("steps-#.ring", 2_000)),
        "5,000 files of output": ("run", lambda: _outputs(run)),
    }
    what = random.choice(sorted(ways))
    name, make = ways[what]
    make()
    given = "./" + name if "/" not in name else name
    arguments = random.choice((("report", given), ("what-if", given), ("compare", given, given), ("autopsy", given)))
    return Case(
        name=f"run directory: {what}", arguments=arguments, allowed=frozenset({0, 1, 2, 3}), named=(name[:5], "run")
    )


def _outputs(run: Path) -> None:
    for number in range(2_500):
        place = run / "output" / f"none_{number}" / "attempt_0" / "0"
        place.mkdir(parents=True)
        (place / "stderr.log").write_bytes(b"x" * 100)
        os.mkfifo(place / "stdout.log")


def _of_logs(random: Random, originals: Path, work: Path) -> Case:
    logs = work / "logs"
    shutil.copytree(originals / "logs", logs)
    path = random.choice(sorted(path for path in logs.rglob("*") if path.is_file()))
    own = OF_JSON * 3 if path.suffix == ".json" else ()
    damage = random.choice((*ANY_FILE, *own))
    damage.do(random, path)
    name = path.relative_to(work).as_posix()
    if random.random() < 0.5:
        return _autopsy(random, name, damage, (name,))
    return _autopsy(random, name, damage, ("logs",))


def _of_dumps(random: Random, originals: Path, work: Path) -> Case:
    dumps = work / "dumps"
    shutil.copytree(originals / "dumps", dumps)
    forms = sorted(dumps.glob(random.choice(("dump_*", "trace_*"))))
    for path in sorted(set(dumps.iterdir()) - set(forms)):
        path.unlink()
    path = random.choice(forms)
    damage = random.choice((*ANY_FILE, *OF_DUMPS, *OF_DUMPS))
    damage.do(random, path)
    name = path.relative_to(work).as_posix()
    return _autopsy(random, name, damage, random.choice(((name,), ("dumps",))))


def _autopsy(random: Random, name: str, damage: Damage, paths: tuple[str, ...]) -> Case:
    output = random.choice(((), (), ("--output-format", "json"), ("--output-format", "markdown")))
    alone = damage.is_unreadable and paths == (name,)
    if damage.name == "20 GB without content":
        unread = ""  # A log may be as long; it is read, and says nothing.
        alone = False
    else:
        unread = "" if damage.name in ("gone", "a directory") and not alone else name if damage.is_unreadable else ""
    return Case(
        name=f"{name}: {damage.name}",
        arguments=("autopsy", *paths, *output),
        allowed=frozenset({INCONCLUSIVE, ERROR} if alone else {FINDINGS, INCONCLUSIVE, CLEAN}),
        named=(name,),
        unread="" if alone and "secret" in damage.name else os.path.basename(unread),
        may_read=paths == (name,),
    )


_ARCHIVES: dict[str, bytes] = {}


def _of_archive(random: Random, originals: Path, work: Path) -> Case:
    if not _ARCHIVES:
        _ARCHIVES.update(archives())
    name = random.choice(sorted(_ARCHIVES))
    (work / name).write_bytes(_ARCHIVES[name])
    damage = random.choice([None, None, *(one for one in ANY_FILE if not one.is_unreadable)])
    if damage is not None:
        damage.do(random, work / name)
    given = random.choice((name, "."))
    return Case(
        name=f"{name}: {damage.name if damage else 'as it is'}",
        arguments=("autopsy", given),
        allowed=frozenset({FINDINGS, INCONCLUSIVE}),
        named=(name,),
    )


def _of_baseline(random: Random, originals: Path, work: Path) -> Case:
    shutil.copyfile(originals / "baseline.json", work / "base.json")
    (work / "train.py").write_text("import os\nprint(os.getpid())\n")
    path = work / "base.json"
    damage = random.choice((*(one for one in ANY_FILE if one.name != "gone"), *(OF_JSON * 4)))
    before = path.read_bytes()
    damage.do(random, path)
    is_same = path.is_file() and not damage.is_unreadable and path.stat().st_size < 1 << 20 and _same(path, before)
    return Case(
        name=f"baseline: {damage.name}",
        arguments=("gate", "--baseline", "base.json", "train.py"),
        allowed=frozenset({ERROR, INCONCLUSIVE, FINDINGS} if is_same else {ERROR}),
        named=("base.json",),
        may_read=True,
    )


def _same(path: Path, before: bytes) -> bool:
    """Whether a baseline holds what it held: blanks, and letters that only people read, are no part of its digest."""
    import json

    try:
        one, other = (json.loads(content) for content in (path.read_bytes(), before))
        for document in (one, other):
            document["tool"]["version"] = ""
    except (ValueError, TypeError, KeyError, RecursionError):
        return False
    return bool(one == other)


def _of_report(random: Random, originals: Path, work: Path) -> Case:
    """What an earlier report is overwritten by, and what is no report stays."""
    shutil.copytree(originals / "run", work / "run")
    path = work / "report.json"
    path.write_bytes(b'{"schema":1,"tool":{"name":"ddpdoctor"}}\n')
    damages = (*ANY_FILE, Damage("JSON changed", in_place(mutate_json)))
    damage = random.choice([one for one in damages if one.name not in ("gone", "empty", "a line feed inserted")])
    damage.do(random, path)
    writable = "device" in damage.name or damage.name == "a link to nothing"
    return Case(
        name=f"report to overwrite: {damage.name}",
        arguments=("report", "run", "--output-format", "json", "-o", "report.json"),
        allowed=frozenset({ERROR} if damage.is_unreadable and not writable else {ERROR, CLEAN}),
        named=("report.json",),
        may_read=True,
    )
