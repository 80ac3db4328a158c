"""Compares what an autopsy says with what is right."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from ddpdoctor.autopsy.dead_job import AutopsyRequest, autopsy
from ddpdoctor.finding import Finding
from tests.autopsy.cases import JOBS, Expected

LOGS = Path(__file__).parent / "logs"
OF_ONE_VERSION = {
    # torch 2.8 segfaults, as 2.13 does, when DDP is built with TORCH_DISTRIBUTED_DEBUG=DETAIL on gloo.
    ("torch2.8.0", "unused_detail"): Expected(("DDP703",), (0, 1)),
}


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """One log and what was said of it."""

    name: str
    expected: Expected
    cause: Finding | None
    right: bool

    @property
    def wrong_and_certain(self) -> bool:
        """A cause was stated without a doubt that is not the right one."""
        return not self.right and self.cause is not None and not self.cause.doubt


def judge(path: Path, expected: Expected) -> Judged:
    """Hold an autopsy of one log against what is right."""
    examination = autopsy(AutopsyRequest(paths=(str(path),)))
    cause = next((finding for finding in examination.findings if finding.role == "cause"), None)
    if cause is None:
        return Judged(name=path.name, expected=expected, cause=None, right=not expected.codes)
    right = cause.code in expected.codes and (not expected.ranks or not cause.ranks or cause.ranks == expected.ranks)
    return Judged(name=path.name, expected=expected, cause=cause, right=right)


def judge_all(paths: Iterable[Path], expected_of: Callable[[Path], Expected | None]) -> list[Judged]:
    """Judge every log of which it is known what is right."""
    known = [(path, expected_of(path)) for path in sorted(paths)]
    return [judge(path, expected) for path, expected in known if expected is not None]


def expected_of_own(path: Path) -> Expected | None:
    """What a log of our own has to be diagnosed as."""
    version, _, job = path.name.removesuffix(".log.gz").partition("_")
    if (version, job) in OF_ONE_VERSION:
        return OF_ONE_VERSION[version, job]
    return next((one.expected for one in JOBS if one.name == job), None)
