"""Whom a rank waits for that stands in a send or a receive."""

from __future__ import annotations

from ddpdoctor.record.model import CollectiveTrack, RunRecord

_COUNTERPARTS = {"send": "recv", "recv": "send"}


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
