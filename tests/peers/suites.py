"""How a suite of another library is run, plain and watched, and what became of each of its tests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path

import msgspec

INSIDE = Path(__file__).with_name("inside")
Outcomes = Mapping[str, str]
"""What became of each test: of one that several ranks report, of each rank."""


class Suite(msgspec.Struct, frozen=True, kw_only=True):
    """Tests of a library, as they are run by a command."""

    name: str
    command: tuple[str, ...]
    """Arguments of Python; names of tests may follow."""
    module: str = ""
    """What must be installed."""
    repository: str = ""
    """OWNER/NAME of a repository that the suite comes from; it is run in its folder."""
    folders: tuple[str, ...] = ()
    """Those of its folders that are needed; none means all."""
    paths: tuple[str, ...] = ()
    """Folders of the repository from which modules are imported."""
    replaced: tuple[tuple[str, str, str], ...] = ()
    """A file of the repository, a text in it and what stands there instead, in both ways."""
    variables: tuple[tuple[str, str], ...] = ()
    takes_names: bool = False
    """Tests can be chosen by arguments."""
    most_s: int = 150
    """The longest that it may take in one way: some of accelerate's own hang on a loaded machine."""
    repetitions: int = 1
    """Times that it is run in each way; the outcomes of all must be the same."""

    def why_not(self, mirror: Path | None) -> str:
        """What is lacking to run it; empty where nothing is."""
        if self.module and find_spec(self.module) is None:
            return f"{self.module} is not installed"
        if self.repository and (mirror is None or not git_directory(mirror, self.repository).is_dir()):
            return f"no copy of {self.repository} was given"
        return ""


def git_directory(mirror: Path, repository: str) -> Path:
    """Where a folder of snapshots holds a repository."""
    return mirror / repository.replace("/", "+") / "repo"


def lay_out(mirror: Path, suite: Suite, target: Path) -> None:
    """Write the files of a suite's repository to ``target``."""
    command = ["git", "--git-dir", str(git_directory(mirror, suite.repository)), "archive", "HEAD", *suite.folders]
    archive = subprocess.run(command, capture_output=True, check=True, timeout=60).stdout
    with tarfile.open(fileobj=BytesIO(archive)) as files:
        files.extractall(target, filter="data")
    for name, before, after in suite.replaced:
        file = target / name
        text = file.read_text()
        if before not in text:
            raise LookupError(f"{suite.repository}/{name} has no {before!r} any more")
        file.write_text(text.replace(before, after))


def watched(command: Sequence[str]) -> list[str]:
    """The same command of Python under the doctor."""
    return ["-m", "ddpdoctor", "profile", "--no-tui", "--", sys.executable, *command]


def run_python(
    command: Sequence[str], *, watches: bool, folder: Path, scratch: Path, variables: Mapping[str, str], most_s: int
) -> tuple[str, str]:
    """Run a command of Python in a folder; return how it ended, and the end of what it printed."""
    line = watched(command) if watches else list(command)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PEERS_SCRATCH": str(scratch),
        "XDG_STATE_HOME": str(scratch / "state"),
        **variables,
    }
    with (scratch / "printed").open("wb") as printed:
        child = subprocess.Popen(
            [sys.executable, *line],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = str(child.wait(most_s))
        except subprocess.TimeoutExpired:
            code = f"did not end within {most_s} s"
        finally:
            _end_all(child, variables["PEERS_OUTCOMES"])
    return code, (scratch / "printed").read_text(errors="replace")[-4_000:]


def _end_all(child: subprocess.Popen[bytes], outcomes: str) -> None:
    """End what a command has started, also the ranks, whose launcher gives each a session of its own."""
    mark = f"PEERS_OUTCOMES={outcomes}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)
    child.wait()


def run_suite(
    suite: Suite, *, watches: bool, scratch: Path, mirror: Path | None, names: Sequence[str] = ()
) -> Outcomes:
    """Run a suite, or those of its tests that have these names; return what became of each, and its exit code."""
    scratch.mkdir(parents=True)
    folder = scratch / "folder"
    folder.mkdir()
    if suite.repository and mirror is not None:
        lay_out(mirror, suite, folder)
    written = scratch / "outcomes"
    written.touch()
    modules = [str(folder / path) for path in suite.paths] + [str(INSIDE), str(INSIDE / "stubs")]
    modules.append(str(Path(__file__).parents[2]))
    variables = {**dict(suite.variables), "PEERS_OUTCOMES": str(written), "PYTHONPATH": os.pathsep.join(modules)}
    code, printed = run_python(
        (*suite.command, *names),
        watches=watches,
        folder=folder,
        scratch=scratch,
        variables=variables,
        most_s=suite.most_s,
    )
    found: defaultdict[str, set[str]] = defaultdict(set)
    for line in written.read_text().splitlines():
        test, where, outcome = json.loads(line)
        found[test].add(f"{where} {outcome}".strip())
    outcomes = {test: ", ".join(sorted(each)) for test, each in found.items()}
    if not outcomes:
        print(printed, file=sys.stderr)
    return {**outcomes, "(exit code)": code}


class Compared(msgspec.Struct, frozen=True):
    """What became of a suite in both ways."""

    suite: str
    lacks: str
    """Why it was not run; empty where it was."""
    plain: dict[str, str]
    watched: dict[str, str]
    unsteady: dict[str, str]
    """Tests that differed and, run again by themselves in both ways, did not: what became of them at first."""

    @property
    def differing(self) -> list[str]:
        """Tests with another outcome under the doctor."""
        both = sorted({*self.plain, *self.watched})
        return [test for test in both if self.plain.get(test) != self.watched.get(test)]


def compare(suite: Suite, scratch: Path, mirror: Path | None, names: Sequence[str] = ()) -> Compared:
    """Run a suite plain and watched; what differs is run twice more, by itself where the suite allows that."""
    lacks = suite.why_not(mirror)
    if lacks:
        return Compared(suite.name, lacks, {}, {}, {})
    base = scratch / suite.name.replace(" ", "-").replace("/", "-")

    def both(label: str, chosen: Sequence[str]) -> list[dict[str, str]]:
        return [
            dict(run_suite(suite, watches=way, scratch=base / f"{label}-{way}", mirror=mirror, names=chosen))
            for way in (False, True)
        ]

    plain, seen = both("first", names)
    for number in range(1, suite.repetitions):
        for first, again in zip((plain, seen), both(f"repetition-{number}", names), strict=True):
            first.update({f"{test}, repetition {number + 1}": outcome for test, outcome in again.items()})
    if suite.repetitions > 1:  # What a run of its own does not repeat says nothing.
        return Compared(suite.name, "", plain, seen, {})
    compared = Compared(suite.name, "", plain, seen, {})
    for attempt in range(2):
        differing = compared.differing
        if not differing:
            break
        tests = [test for test in differing if test != "(exit code)"]
        more = both(f"again-{attempt}", tests if suite.takes_names and tests else names)
        for test in differing:
            if test in more[0] and more[0][test] == more[1].get(test):
                compared.unsteady[test] = f"plain {plain.get(test)}, watched {seen.get(test)}"
                plain[test] = seen[test] = more[0][test]
    return compared


def in_two_lanes(compare_one: Callable[[Suite], Compared], suites: Sequence[Suite]) -> list[Compared]:
    """Compare the suites on two cores: the first, which takes longest, beside all others."""
    done: dict[str, Compared] = {}

    def lane(of: Sequence[Suite]) -> None:
        for suite in of:
            done[suite.name] = compare_one(suite)

    beside = threading.Thread(target=lane, args=(suites[:1],))
    beside.start()
    lane(suites[1:])
    beside.join()
    return [done[suite.name] for suite in suites]
