"""Puts the stand-in in place, once torch is imported and before the user's next line."""

from __future__ import annotations

import sys
from typing import Any

from ...probe.journal import Journal
from . import compiling, cuda_module, optimizers, precision, process_groups, profiling, sync_batch_norm, typed_tensors
from .devices import Devices
from .everywhere import keep_on
from .function_mode import make_mode
from .gaps import Gaps


def install(journal: Journal, torch: Any, device_count: int) -> Devices:
    """Serve CUDA with so many GPUs on this node from the CPU, from now on and in every thread."""
    devices = Devices(
        torch,
        device_count,
        lambda index, how: journal.event(
            "device_use", index=index, how=how, was_set=devices.was_set, current=devices.current, site=journal.here()
        ),
    )
    gaps = Gaps(lambda name: journal.event("stand_in_gap", name=name, site=journal.here()))
    cuda_module.install(torch, devices, gaps)
    process_groups.install(torch, devices)
    sync_batch_norm.install(torch)
    precision.install(torch)
    compiling.install(torch, lambda: journal.event("compiled", site=journal.here()))
    optimizers.install(torch)
    profiling.install(torch)
    typed_tensors.install(torch, devices)
    keep_on(torch, make_mode(torch, devices, _Truths(journal).note), devices)
    return devices


class _Truths:
    """Lines of the user that ask a tensor where it is: what they conclude is about the stand-in."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._seen: set[tuple[str, int]] = set()

    def note(self) -> None:
        """Note the line behind the function mode, once."""
        frame = sys._getframe(3)
        line = (frame.f_code.co_filename, frame.f_lineno)
        if line not in self._seen:
            self._seen.add(line)
            if self._journal.user_code.holds(line[0]):
                self._journal.event("device_read", site=self._journal.site(frame))
