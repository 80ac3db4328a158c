"""Which evidence of a death is missing, and how to have it the next time."""

from __future__ import annotations

from ddpdoctor.diagnosis.logs.causes import first_cause
from ddpdoctor.diagnosis.wording import rank_list
from ddpdoctor.record.model import RunRecord

DUMPS = (
    "flight-recorder dumps, which show who did not reach which collective: TORCH_FR_BUFFER_SIZE=2000 "
    "TORCH_NCCL_DUMP_ON_TIMEOUT=1 TORCH_FR_DUMP_TEMP_FILE=/shared/dump_rank_ (before torch 2.8: "
    "TORCH_NCCL_TRACE_BUFFER_SIZE=2000 TORCH_NCCL_DEBUG_INFO_TEMP_FILE=/shared/dump_rank_)"
)
EVERY_DUMP = "copy them from every node before its disk is cleared; a rank that had ended by then wrote none"
OUTPUT = "`torchrun --log-dir DIR --tee 3` writes one file per rank and labels each line"
PROFILE = "`ddpdoctor profile -- COMMAND` records all of this while the job runs"


def missing_evidence(record: RunRecord, *, dumps: int, explained: bool) -> tuple[str, ...]:
    """Return what would have shown more, the best first; nothing where the first cause is plain.

    ``explained``: the dumps show where the ranks diverge.
    """
    cause = first_cause(record)
    found: list[str] = []
    if explained:
        silent = [rank.rank for rank in record.ranks if record.track(rank.rank) is None]
        return (f"the dumps of {rank_list(silent)}: {EVERY_DUMP}",) if silent else ()
    if cause is None:
        found.append("a sign of how the job ended: the output of its launcher, or of the scheduler, to its last line")
    waits = cause is not None and cause.first.kind in ("timed-out", "stuck", "lost-peer")
    if (cause is None or waits) and not dumps:
        found.append(DUMPS)
    if cause is not None and cause.absent and not _spoke(record, cause.absent):
        found.append(f"the output of {rank_list(cause.absent)}: {OUTPUT}")
    elif cause is not None and not cause.ranks and cause.first.frames:
        found.append(f"which rank wrote what: {OUTPUT}")
    if cause is not None and cause.first.kind == "signalled" and not cause.first.frames:
        found.append("the stack of the rank that was killed: PYTHONFAULTHANDLER=1 prints it, except for SIGKILL")
    if cause is not None and cause.first.kind == "nccl" and cause.first.type != "NCCL WARN":
        found.append("NCCL's own messages: NCCL_DEBUG=WARN")
    if cause is not None and any(name.startswith("#") for name in cause.first.unused):
        found.append("the names of these parameters: TORCH_DISTRIBUTED_DEBUG=INFO")
    return (*found, PROFILE) if found else ()


def _spoke(record: RunRecord, ranks: tuple[int, ...]) -> bool:
    """Return whether something that one of the ranks wrote was seen."""
    return bool(set(ranks) & set(record.logs.ranks)) or any(one.rank in ranks for one in record.logs.incidents)
