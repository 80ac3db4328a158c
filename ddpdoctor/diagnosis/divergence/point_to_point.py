"""Whom a rank waits for that stands in a send or a receive."""

from __future__ import annotations

import msgspec

from ddpdoctor.record.model import CollectiveTrack, RunRecord, Signature, Site

_COUNTERPARTS = {"send": "recv", "recv": "send"}
_KINDS = frozenset({"send", "recv", "isend", "irecv"})
STANDS_MS = 500
"""A thread is held by the call that it is in once its stack has stood for so long."""


class OpenCall(msgspec.Struct, frozen=True, kw_only=True):
    """A send or receive that a living rank is held by: torch's flight recorder knows none of gloo's."""

    rank: int
    peer: int
    """-1 where any may be it."""
    group: int
    signature: Signature
    site: Site
    step: int
    entered_at_ns: int


def open_calls(record: RunRecord) -> dict[int, OpenCall]:
    """By rank the send or receive that it stands in."""
    found = {}
    alive = {rank.rank for rank in record.ranks if rank.end == "running"}
    standing = {pulse.rank for pulse in record.pulses if pulse.unchanged_ms >= STANDS_MS and pulse.collective in _KINDS}
    for track in record.call_tracks:
        row = len(track) - 1
        if track.rank not in alive & standing or row < 0 or track.left_at_ns[row] or len(track.peer) != len(track):
            continue
        kind, peer = track.kinds[track.kind[row]], track.peer[row]
        if kind in _KINDS and track.group[row] >= 0:
            found[track.rank] = OpenCall(
                rank=track.rank,
                peer=peer,
                group=track.group[row],
                signature=Signature(kind=kind, root=peer if peer >= 0 else None, size_bytes=track.size_bytes[row]),
                site=record.site(track.site[row]),
                step=track.step[row],
                entered_at_ns=track.entered_at_ns[row],
            )
    return found


def missing_peer(record: RunRecord, track: CollectiveTrack, row: int) -> tuple[int, ...] | None:
    """The peer that has not made the matching call yet, nobody when it has; None where it cannot be known.

    The n-th send from one rank to another in a group matches the n-th receive there; a receive from any source, on
    either side, may match anything.
    """
    signature, group = record.signatures[track.signature[row]], track.group[row]
    counterpart, peer = _COUNTERPARTS.get(signature.kind), signature.root
    other = None if peer is None else record.track(peer)
    if counterpart is None or peer is None or other is None:
        return None
    answers = _peers(record, other, group, counterpart, len(other))
    if None in answers:
        return None
    earlier = _peers(record, track, group, signature.kind, row).count(peer)
    return () if answers.count(track.rank) > earlier else (peer,)


def _peers(record: RunRecord, track: CollectiveTrack, group: int, kind: str, stop: int) -> list[int | None]:
    """Peers of the calls of one kind that a rank made in a group before the row ``stop``."""
    found = []
    for index, made_in in zip(track.signature[:stop], track.group[:stop], strict=True):
        signature = record.signatures[index]
        if made_in == group and signature.kind == kind:
            found.append(signature.root)
    return found
