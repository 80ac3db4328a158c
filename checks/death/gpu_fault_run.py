"""Faults of GPUs that their driver reported while a job ran: lost GPUs, critical events (Xid), uncorrected memory."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ddpdoctor.diagnosis import failures
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.measured import Gpu, GpuSample

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
    meaning = "" if xid is None else failures.xid(xid).meaning
    facts = [] if xid is None else [f"the driver reported Xid {xid}" + (f": {meaning}" if meaning else "")]
    new_errors = (last.ecc_errors or 0) - (first.ecc_errors or 0) if first.ecc_errors is not None else 0
    if new_errors > 0:
        facts.append(f"{new_errors:,} uncorrected memory {'errors' if new_errors > 1 else 'error'} during the run")
    if last.lost:
        return GpuFault(gpu=gpu, what="is lost: the driver can no longer reach it", facts=tuple(facts), hardware=True)
    if xid is not None:
        hardware = failures.xid(xid).blame == "machine"
        return GpuFault(gpu=gpu, what=f"failed with Xid {xid}", facts=tuple(facts), hardware=hardware)
    if new_errors > 0:
        return GpuFault(gpu=gpu, what="has uncorrected memory errors", facts=tuple(facts), hardware=True)
    return None
