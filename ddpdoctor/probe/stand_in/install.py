"""The stand-in, put in place once torch is imported and before the user's next line."""

from __future__ import annotations

import re
import sys
from types import TracebackType
from typing import Any, Optional

from ..journal import Journal
from . import cuda_module, process_groups, sync_batch_norm, typed_tensors
from .devices import NO_SUCH_GPU, Devices
from .everywhere import keep_on
from .function_mode import make_mode
from .gaps import StandInGap
from .small_patches import install_compiling, install_optimizers, install_precision, install_profiling

_NEEDS_A_GPU = re.compile(
    r"not (been )?compiled with cu|support for cuda|ATen_cuda|gloo does not|with gloo|"
    r"_cuda_|libcuda|CUDA driver|CUDA_HOME|from the 'CPU' backend|no kernel|triton|"
    r"(requires?|needs?|only (supports?|works?)|must be|expected).{0,60}\b(CUDA|GPU)|"
    r"not implemented for '(Half|BFloat16|Float8\w*)'|(PREMUL_SUM|NCCL)",
    re.IGNORECASE,
)
"""What torch and CUDA extensions report on a CPU that would have gone well on a GPU."""


class StandIn:
    """CUDA, with so many GPUs on this node, served from the CPU from now on and in every thread."""

    def __init__(self, journal: Journal, torch: Any, device_count: int) -> None:
        self._journal = journal
        self._location_reads: set[tuple[str, int]] = set()
        """Lines that read where a tensor is."""
        devices = self._devices = Devices(
            torch, device_count, self._note_use, known=int(journal.plan.get("nodes", 1)) > 1
        )
        cuda_module.install(torch, devices)
        process_groups.install(torch, devices)
        sync_batch_norm.install(torch)
        install_precision(torch)
        install_compiling(torch)
        install_optimizers(torch)
        install_profiling(torch)
        typed_tensors.install(torch, devices)
        keep_on(torch, make_mode(torch, devices, self._note_location_read), devices)

    def caused(self, error: BaseException) -> str:
        """Return ``stand-in`` when an exception comes of what the CPU is not; empty when it is the script's own.

        A GPU that the node lacks is the script's own fault. What follows from a line that read where a tensor is may be
        ours: on a GPU the value would have been another.
        """
        if not isinstance(error, Exception) or NO_SUCH_GPU in str(error):
            return ""
        seen: Optional[BaseException] = error
        while seen is not None:
            if isinstance(seen, StandInGap):
                return "stand-in"
            seen = seen.__cause__ or seen.__context__
        if _line_of(error.__traceback__) in self._location_reads:
            return "stand-in"
        ours = not isinstance(error, (ImportError, KeyError, OSError))
        return "stand-in" if ours and _NEEDS_A_GPU.search(str(error)) else ""

    def _note_use(self, index: int, how: str) -> None:
        devices, journal = self._devices, self._journal
        journal.event(
            "device_use",
            index=index,
            how=how,
            was_set=devices.was_set,
            forked=journal.forked_from is not None and devices.used_by_parent,
            site=journal.here(),
        )

    def _note_location_read(self) -> None:
        """Note the user's line behind the function mode."""
        frame = sys._getframe(3)
        line = (frame.f_code.co_filename, frame.f_lineno)
        if line not in self._location_reads:
            self._location_reads.add(line)


def _line_of(trace: Optional[TracebackType]) -> tuple[str, int]:
    line = ("", 0)
    while trace is not None:
        line = (trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        trace = trace.tb_next
    return line
