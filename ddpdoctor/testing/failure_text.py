"""Puts the failure of a test into words: one line for the summary, then the verdict, then each rank by itself."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence

from ddpdoctor.testing.marks import DdpMark
from ddpdoctor.testing.run_test import RankEnd, TestEnd


def failure_text(end: TestEnd, outcomes: Sequence[str], mark: DdpMark) -> str:
    """Return the message of the failure."""
    parts = [_first_line(end, outcomes, mark)]
    if end.account:
        parts.append(end.account.rstrip())
    for rank, outcome in zip(end.ranks, outcomes, strict=True):
        if outcome not in ("passed", "running") or len(set(outcomes)) > 1:
            heading = f" rank {rank.rank} of {mark.nproc}: {_how(rank, outcome)} "
            text = (rank.result or {}).get("text", "")
            parts.append("\n".join((heading.center(80, "-"), text)).rstrip())
    return "\n\n".join(parts)


def _first_line(end: TestEnd, outcomes: Sequence[str], mark: DdpMark) -> str:
    """Return the first cause: an exception of the test's own, else what is wrong between the ranks, else how one
    ended.
    """
    paired = list(zip(end.ranks, outcomes, strict=True))
    failed = {rank.rank: _reason(rank) for rank, outcome in paired if outcome == "failed"}
    own = {number: reason for number, reason in failed.items() if not (end.ranks[number].result or {})["echo"]}
    gone = [rank for rank, outcome in paired if outcome == "gone"]
    aside = f" [{end.verdict}]" if end.verdict and not end.stopped else ""
    if own:
        return f"{_ranks(own, mark.nproc)} failed: {next(iter(own.values()))}{aside}"
    if end.stopped == "time-limit":
        where = f": {end.verdict}" if end.verdict else ""
        return f"the ranks had not finished after {mark.timeout:g} s{where}"
    if end.verdict:
        return end.verdict
    if gone:
        return f"rank {gone[0].rank} {_how(gone[0], 'gone')}"
    if failed:
        return f"{_ranks(failed, mark.nproc)} failed: {next(iter(failed.values()))}"
    listed = ", ".join(f"rank {rank.rank} {outcome}" for rank, outcome in paired)
    return f"the ranks do not agree: {listed}"


def _ranks(reasons: Mapping[int, str], nproc: int) -> str:
    """Return the ranks that failed alike; the first alone where others failed otherwise."""
    first = next(iter(reasons))
    alike = [number for number, reason in reasons.items() if reason == reasons[first]]
    if len(alike) < len(reasons):
        return f"rank {first} (and {len(reasons) - 1} more)"
    if len(alike) == nproc:
        return "every rank"
    return f"rank {first}" if len(alike) == 1 else f"ranks {', '.join(map(str, alike))}"


def _reason(rank: RankEnd) -> str:
    return str((rank.result or {})["reason"]).partition("\n")[0]


def _how(rank: RankEnd, outcome: str) -> str:
    if outcome == "gone":
        status = rank.status or 0
        if status < 0:
            try:
                return f"was ended by {signal.Signals(-status).name}"
            except ValueError:
                return f"was ended by signal {-status}"
        return f"left its process with exit code {status}"
    if outcome == "running":
        return "was still running, and was ended"
    reason = str((rank.result or {}).get("reason", ""))
    return f"{outcome} ({reason})" if outcome in ("skipped", "xfailed") and reason else outcome
