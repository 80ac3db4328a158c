"""Faults of GPUs that their driver reported while a job ran: lost GPUs, critical events (Xid), uncorrected memory."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.measured import Gpu, GpuSample

_OF_THE_PROGRAM = {
    13: "a kernel raised an exception",
    31: "a kernel read or wrote memory that does not belong to it",
    43: "the GPU stopped the program",
}
_OF_THE_GPU = {
    48: "an uncorrectable memory error",
    62: "its controller halted",
    64: "a broken row of memory could not be replaced",
    74: "an error of an NVLink",
    79: "it fell off the bus",
    94: "an uncorrectable memory error that hit one program",
    95: "an uncorrectable memory error that hit all programs",
    119: "its system processor does not answer",
    120: "its system processor failed",
}
_HARMLESS = frozenset({45, 63, 92})
"""The clearing away after another fault, a row that was replaced, and many corrected errors."""


class GpuFault(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU and what is wrong with it."""

    gpu: Gpu
    what: str
    """A clause with the verb, for the subject ``the GPU``."""
    facts: tuple[str, ...]
    hardware: bool
    """The GPU or its machine is at fault; otherwise a kernel of the program is."""


def gpu_faults(record: RunRecord) -> Iterator[GpuFault]:
    """Yield the faults of the GPUs that ranks use, one for each GPU."""
    for gpu in record.gpus:
        if gpu.ranks and gpu.samples and (fault := _fault(gpu, gpu.samples[0], gpu.samples[-1])) is not None:
            yield fault


def _fault(gpu: Gpu, first: GpuSample, last: GpuSample) -> GpuFault | None:
    xid = last.xid if last.xid not in _HARMLESS else None
    facts = [] if xid is None else [f"the driver reported Xid {xid}" + (f": {_meaning(xid)}" if _meaning(xid) else "")]
    new_errors = (last.ecc_errors or 0) - (first.ecc_errors or 0) if first.ecc_errors is not None else 0
    if new_errors > 0:
        facts.append(f"{new_errors:,} uncorrected memory {'errors' if new_errors > 1 else 'error'} during the run")
    if last.lost:
        return GpuFault(gpu=gpu, what="is lost: the driver can no longer reach it", facts=tuple(facts), hardware=True)
    if xid is not None:
        return GpuFault(gpu=gpu, what=f"failed with Xid {xid}", facts=tuple(facts), hardware=xid not in _OF_THE_PROGRAM)
    if new_errors > 0:
        return GpuFault(gpu=gpu, what="has uncorrected memory errors", facts=tuple(facts), hardware=True)
    return None


def _meaning(xid: int) -> str:
    return _OF_THE_GPU.get(xid) or _OF_THE_PROGRAM.get(xid, "")
