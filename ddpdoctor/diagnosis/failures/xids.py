"""What the driver's events on a GPU (Xid) mean, whose fault they are, and what to do about each."""

from __future__ import annotations

from typing import Literal

import msgspec

Blame = Literal["program", "machine", "nobody"]
_KERNEL = "Run the program with CUDA_LAUNCH_BLOCKING=1, or under compute-sanitizer, to find the kernel."
_RESET = "Drain the node and reset the GPU (`nvidia-smi --gpu-reset`); replace it if the event comes again."


class Xid(msgspec.Struct, frozen=True):
    """One event."""

    meaning: str
    blame: Blame
    remedy: str


XIDS = {
    13: Xid("a kernel raised an exception", "program", _KERNEL),
    31: Xid("a kernel read or wrote memory that does not belong to it", "program", _KERNEL),
    43: Xid("the GPU stopped the program", "program", _KERNEL),
    45: Xid("the driver cleaned up after a process that had ended", "nobody", "Look for what ended the process."),
    48: Xid("an uncorrectable memory error", "machine", _RESET),
    62: Xid("its controller halted", "machine", _RESET),
    63: Xid(
        "a broken row of memory is replaced at the next reset",
        "machine",
        "Drain the node and reset the GPU (`nvidia-smi --gpu-reset`), which replaces the row.",
    ),
    64: Xid(
        "a broken row of memory could not be replaced", "machine", "Take the machine out of service: replace the GPU."
    ),
    74: Xid(
        "an error of an NVLink",
        "machine",
        "Take the machine out of service; look at `nvidia-smi nvlink -e` and the fabric manager, and reset the GPUs.",
    ),
    79: Xid(
        "it fell off the bus",
        "machine",
        "Take the machine out of service and power it off and on; look at its power, temperature and PCIe slot.",
    ),
    92: Xid("many corrected memory errors", "nobody", "Nothing failed yet; watch the GPU."),
    94: Xid("an uncorrectable memory error that hit one program", "machine", _RESET),
    95: Xid("an uncorrectable memory error that hit all programs", "machine", _RESET),
    119: Xid(
        "its system processor does not answer",
        "machine",
        "Drain the node and reset the GPU or reboot; if it comes again, update driver and firmware.",
    ),
    120: Xid(
        "its system processor failed",
        "machine",
        "Drain the node and reset the GPU or reboot; if it comes again, update driver and firmware.",
    ),
    140: Xid("an uncorrectable memory error", "machine", _RESET),
}
"""By number, as in NVIDIA's list of Xid errors."""
UNKNOWN = Xid(
    "", "machine", "Look the number up in NVIDIA's list of Xid errors, and start the job on another machine meanwhile."
)


def number_of(event: str) -> int:
    """Return the number in ``Xid 79``; 0 for any other text."""
    _, found, number = event.partition("Xid ")
    return int(number) if found and number.isdecimal() else 0


def xid(number: int) -> Xid:
    """Return what is known of an event."""
    return XIDS.get(number, UNKNOWN)
