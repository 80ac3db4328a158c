"""What can follow from what: the edges of the chain from a first cause to its last echo, as data.

An edge holds whoever reports the two ends: torchrun, DeepSpeed, srun, mpirun, a container or the shell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddpdoctor.record.streams.devices import Incident, LogEvidence

ONE_MOMENT_NS = 1_000_000_000
"""Clocks of two nodes, and the time that is read off a line near a traceback, are trusted to a second."""
_SIGNALLED = {6: "aborted", 9: "killed", 15: "terminated"}
_BY_ITSELF = frozenset({"raised", "mismatch", "gpu", "cuda", "killed-by-kernel", "worker-lost", "crashed", "killed"})
_LOST = frozenset({"lost-peer", "lost-by-nccl"})
_ABORTING = _LOST | frozenset({"timed-out", "mismatch", "nccl", "gpu", "cuda", "stuck", "no-rendezvous", "raised"})
FOLLOWS: Mapping[str, frozenset[str]] = {
    # The watchdog, or C++ that no one catches, ends its own process.
    "aborted": _ABORTING,
    "nccl-passed-on": _BY_ITSELF | _LOST | {"nccl", "no-rendezvous"},
    "lost-peer": _BY_ITSELF | {"timed-out", "stuck", "left", "aborted", "nccl"},
    # A rank waits for one that never connected, or whose connection had been lost.
    "timed-out": frozenset({"no-rendezvous", "lost-by-nccl"}),
    "stuck": _BY_ITSELF | {"timed-out", "lost-by-nccl", "nccl", "no-rendezvous"},
}
"""By the name of an event, from which others it can follow. What a process suffers by itself follows from nothing."""
ADDS_NOTHING = frozenset({"aborted", "nccl-passed-on"})
"""Events whose words say nothing that their causes do not say."""
_SAME_PROCESS = frozenset({"aborted"})
"""Those that follow only in the same process."""


def name_of(one: Incident) -> str:
    """Return the name of an event in the chain."""
    if one.kind == "signalled":
        return _SIGNALLED.get(one.signal or 0, "crashed")
    if one.kind == "nccl" and one.passed_on:
        return "nccl-passed-on"
    if one.kind == "lost-peer" and one.type == "NCCL WARN":
        return "lost-by-nccl"
    return one.kind


def may_follow(effect: Incident, cause: Incident, evidence: LogEvidence) -> bool:
    """Return whether one incident can be a consequence of another, by what they are and by when they were."""
    name = name_of(effect)
    causes = FOLLOWS.get("lost-peer" if name == "lost-by-nccl" else name, frozenset())
    if name_of(cause) not in causes:
        return False
    if name in _SAME_PROCESS:
        # Its reason is printed before or with it, and launchers report it at last.
        return effect.rank is None or cause.rank is None or effect.rank == cause.rank
    return not surely_before(effect, cause, evidence)


def explained(groups: Sequence[Sequence[Incident]], evidence: LogEvidence) -> tuple[int, ...]:
    """Return the places of the groups whose first incident can follow from that of another group."""
    return tuple(
        place
        for place, group in enumerate(groups)
        if any(other is not group and may_follow(group[0], other[0], evidence) for other in groups)
    )


def surely_before(one: Incident, other: Incident, evidence: LogEvidence) -> bool:
    """Return whether an incident came before another, by its place in the one log or by the clock."""
    if evidence.ordered:
        return one.position < other.position
    return bool(one.time_ns and other.time_ns) and one.time_ns + ONE_MOMENT_NS < other.time_ns
