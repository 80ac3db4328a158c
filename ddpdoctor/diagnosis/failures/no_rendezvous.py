"""Ranks that could not meet at the start of a job."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from ddpdoctor.diagnosis.failures.named import failed_initialisations
from ddpdoctor.diagnosis.wording import count, duration_text, location_of, rank_list, verb
from ddpdoctor.finding import Location
from ddpdoctor.record.joining import headline
from ddpdoctor.record.model import RunRecord

LONG_NS = 60_000_000_000
"""The ranks of a job start within seconds of each other; on a busy cluster within a minute."""
_IN_USE = re.compile(r"EADDRINUSE|address already in use|server socket has failed to (listen|bind)", re.IGNORECASE)
_UNREACHABLE = re.compile(
    r"client socket has (failed|timed out)|failed to connect to|RendezvousConnectionError|connection to the C10d store"
    r"|No route to host|Name or service not known|gai error",
    re.IGNORECASE,
)
_UNCONNECTED = re.compile(r"connectFullMesh failed|timed out connecting", re.IGNORECASE)
_MISSING = re.compile(
    r"waiting for clients|clients joined|RendezvousTimeoutError|Timed out initializing", re.IGNORECASE
)
_JOINED = re.compile(r"(\d+)/(\d+) clients joined")


class NoRendezvous(msgspec.Struct, frozen=True, kw_only=True):
    """Why ranks did not meet."""

    sentence: str
    remedy: str
    fact: str
    ranks: tuple[int, ...]
    location: Location | None = None


def failed_rendezvous(record: RunRecord) -> Iterator[NoRendezvous]:
    """Yield the first failure to meet: an address in use, a store out of reach, or ranks that never came."""
    for text, ranks, place in _failures(record):
        found = _named_failure(text)
        if found is not None:
            yield NoRendezvous(sentence=found[0], remedy=found[1], fact=text[:240], ranks=ranks, location=place)
            return
    missing = _never_came(record)
    if missing is not None:
        yield missing


def _failures(record: RunRecord) -> Iterator[tuple[str, tuple[int, ...], Location | None]]:
    for wait, place in failed_initialisations(record):
        yield wait.error.partition("\n")[0], (wait.rank,) if wait.rank >= 0 else (), place
    trained = any(len(track) for track in record.step_tracks)
    raised = [(rank.rank, error) for rank in record.ranks for error in rank.exceptions if not trained]
    early = [(-1, error) for error in record.job.early_exceptions]
    for number, error in sorted((*early, *raised), key=lambda entry: entry[1].time_ns):
        place = location_of(error.frames[0]) if error.frames else None
        yield f"{error.type}: {headline(error)}", (number,) if number >= 0 else (), place


def _named_failure(text: str) -> tuple[str, str] | None:
    if _IN_USE.search(text):
        return (
            "the rendezvous port is in use: the rendezvous failed",
            "Give each job a port of its own: torchrun --standalone or --rdzv-endpoint with port 0, and end leftover "
            "processes of an earlier job.",
        )
    if _UNCONNECTED.search(text):
        return (
            "a rank reached the rendezvous store, but cannot connect to one of the other ranks",
            "Check whether that rank was still alive; if so, check that its address is reachable from all nodes: "
            "GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME) names the network interface between them.",
        )
    if _MISSING.search(text):
        joined = _JOINED.search(text)
        some = f": {joined[1]} of {count(int(joined[2]), 'rank')} arrived" if joined else ""
        return (
            f"not all ranks reached the rendezvous in time{some}",
            "Check that every node runs the same command with its own --node-rank, and that WORLD_SIZE is the number "
            "of ranks started.",
        )
    if _UNREACHABLE.search(text):
        return (
            "a rank cannot reach the rendezvous store",
            "Check that MASTER_ADDR and MASTER_PORT (or --rdzv-endpoint) give an address at which the other nodes "
            "reach the first, and that no firewall blocks it.",
        )
    return None


def _never_came(record: RunRecord) -> NoRendezvous | None:
    """Ranks that wait at the start for others of which nothing has been seen."""
    waits = [wait for wait in record.waits if wait.kind == "init_process_group" and not wait.ended_ns]
    here = {wait.rank for wait in waits if wait.rank >= 0}
    expected = record.job.world_size or record.job.ranks_expected
    if not here or not expected or any(wait.error for wait in waits):
        return None
    waited_ns = record.job.ended_ns - min(wait.started_ns for wait in waits)
    missing = sorted(set(range(expected)) - here)
    alive = {rank.rank for rank in record.ranks if rank.end == "running"}
    if not missing or waited_ns < LONG_NS or not here <= alive:
        return None
    return NoRendezvous(
        sentence=f"{rank_list(here)} {verb(here, 'has', 'have')} waited {duration_text(waited_ns)} in "
        f"init_process_group for {rank_list(missing)}",
        remedy="Check that these ranks were started at all, with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE.",
        fact=f"{len(here)} of {count(expected, 'rank')} reached init_process_group",
        ranks=tuple(missing),
    )
