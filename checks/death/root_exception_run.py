"""The exception that ended a job alike on all of its ranks."""

from __future__ import annotations

from ddpdoctor.diagnosis.divergence.divergence import find_divergence, root_exception, was_interrupted
from ddpdoctor.diagnosis.divergence.unused_parameters import UNFINISHED, unused_parameters
from ddpdoctor.diagnosis.failures import failed_rendezvous, trouble_of
from ddpdoctor.record.joining import headline
from ddpdoctor.record.model import RankException, RunRecord

MESSAGE_CHARACTERS = 200


def common_exception(record: RunRecord) -> tuple[tuple[int, ...], RankException, str] | None:
    """Return the ranks, the first exception and its message, where all ranks that failed raised the same at one line.

    None in a rehearsal, whose own section tells it unless a last batch that was cut brought it about, where the ranks
    part, and for messages that a check of their own speaks for.
    """
    raised = [(rank.rank, root_exception(rank)) for rank in record.ranks]
    known = [(rank, error) for rank, error in raised if error is not None and not error.communication]
    told_elsewhere = record.job.kind == "rehearsal" and not (record.job.stress == "short-batch" and record.job.stressed)
    if told_elsewhere or not known or was_interrupted(record) or find_divergence(record) is not None:
        return None
    first = min((error for _, error in known), key=lambda error: error.time_ns)
    alike = [rank for rank, error in known if (error.type, error.frames[:1]) == (first.type, first.frames[:1])]
    has_check = trouble_of(first) or (UNFINISHED in first.message and any(unused_parameters(record)))
    if len(alike) < len(known) or has_check or any(failed_rendezvous(record)):
        return None
    message = headline(first)
    shortened = message if len(message) <= MESSAGE_CHARACTERS else f"{message[: MESSAGE_CHARACTERS - 1]}…"
    return tuple(sorted(alike)), first, shortened
