"""Settings of the whole suite.

The suite judges a commit: the same commit must get the same answer, so generated examples are the same in every run.
New ones are searched for with ``python -m pytest --hypothesis-profile search``.

Jobs that tests start have a temporary directory that goes when the tests are over: launchers and killed ranks leave
theirs full of logs and sockets.
"""

from __future__ import annotations

import fcntl
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# A tenth of all the time goes where nothing that was compiled is kept: hundreds of processes read this tree.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.register_profile("search", max_examples=20_000, deadline=None)
settings.load_profile("repeatable")

FAST = ("catalogue", "checks", "config", "diagnosis", "findings", "fix", "record", "report", "source")
"""The pure rooms: together under a minute of one core."""


LONG_NAMES = Path(__file__).parent / "long.txt"
LONG = dict(line.partition(" ")[::2] for line in LONG_NAMES.read_text(encoding="utf-8").splitlines())
"""Tests of more than 4 s of CPU time, or that took more than 11 s at a load of 15: 400 of 5,900, which took six
sevenths of the time of all. Of each kind of real job one is left to the default run. A number behind a name is that of
the rows that CI runs, 0 for none: of 21 examples of one mechanism it runs 8; the command of the table and ``-m full``
run all."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the pure rooms as ``fast``, those that are listed as ``long``, and more rows of them ``full``.

    Where rows have a mark of their own, the others stay in the default run.
    """
    tests = Path(__file__).parent
    names = {item: item.nodeid.partition("[")[0].removeprefix("tests/") for item in items}
    by_row = {names[item] for item in items if item.get_closest_marker("long") is not None}
    rows: Counter[str] = Counter()
    for item, name in names.items():
        if name in LONG and name not in by_row:
            item.add_marker(pytest.mark.long)
        if LONG.get(name) and item.get_closest_marker("long") is not None:
            rows[name] += 1
            if rows[name] > int(LONG[name]):
                item.add_marker(pytest.mark.full)
        if item.path.relative_to(tests).parts[0] in FAST and item.get_closest_marker("full") is None:
            item.add_marker(pytest.mark.fast)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each file to one worker: what its tests share, a run of real ranks or the site, is made once.

    The files stay in the order of their names, of which the last are short, so that all workers end together.
    """
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False
    return LoadFileScheduling(config, log)


@pytest.fixture(scope="session", autouse=True)
def _temporary_directory_of_jobs() -> Iterator[None]:
    # What pytest keeps stays where it is: Python asks the environment for the directory once.
    tempfile.gettempdir()
    with (
        tempfile.TemporaryDirectory(prefix="tests-", ignore_cleanup_errors=True) as directory,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("TMPDIR", directory)
        yield


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Let a test that is marked ``alone`` have the machine: what it judges is how long something took.

    Of three workers on two cores each takes from the others: a healthy job showed a straggler of 18 %. The wait is
    outside of what a test's own time limit counts.
    """
    kind = fcntl.LOCK_EX if item.get_closest_marker("alone") is not None else fcntl.LOCK_SH
    with open(__file__, "rb") as turn, LONG_NAMES.open("rb") as machine:
        fcntl.flock(turn, fcntl.LOCK_EX)  # who waits for all others to end keeps new ones from beginning
        fcntl.flock(machine, kind)
        fcntl.flock(turn, fcntl.LOCK_UN)
        try:
            return (yield)
        finally:
            fcntl.flock(machine, fcntl.LOCK_UN)  # a child that was forked may hold the file
