"""Samples the GPUs of this node once a second, beside the job and beside the monitor.

A driver call can hang for minutes when a GPU is in trouble, so everything is asked by a thread of its own that no one
waits for.
"""

from __future__ import annotations

import threading
import time
from collections import deque

import msgspec

from ddpdoctor.monitor.gpus.nvml import Driver, NoGpus
from ddpdoctor.record.streams.measured import Gpu, GpuSample

SAMPLE_EVERY_S = 1.0
KEPT_SAMPLES = 900
"""A quarter of an hour."""
PROCESSES_EVERY_SAMPLES = 5
SILENT_AFTER_S = 5.0
"""A driver that has not answered for so long is said to be silent."""


class GpuSampler:
    """Keeps the newest samples of every GPU of this node; any method may be called at any time and returns at once."""

    def __init__(self, sample_every_s: float = SAMPLE_EVERY_S, silent_after_s: float = SILENT_AFTER_S) -> None:
        self._sample_every_s = sample_every_s
        self._silent_after_s = silent_after_s
        self._lock = threading.Lock()
        self._described: tuple[Gpu, ...] = ()
        self._samples: tuple[deque[GpuSample], ...] = ()
        self._note = ""
        self._asking_since_s: float | None = None
        self._ended = threading.Event()

    def start(self) -> None:
        """Begin to sample; the thread ends with ``close`` or with the process."""
        threading.Thread(target=self._run, name="ddpdoctor-gpus", daemon=True).start()

    def gpus(self) -> tuple[Gpu, ...]:
        """Return the GPUs with their samples, without the ranks that use them; empty where there are none."""
        with self._lock:
            return tuple(
                msgspec.structs.replace(gpu, samples=tuple(samples))
                for gpu, samples in zip(self._described, self._samples, strict=True)
            )

    def note(self) -> str:
        """Why there are no figures, or no new ones, as a sentence without a full stop; empty when all is well."""
        with self._lock:
            since_s = self._asking_since_s
            if self._note or since_s is None:
                return self._note
        silent_s = time.monotonic() - since_s
        if silent_s < self._silent_after_s:
            return ""
        return f"the NVIDIA driver has not answered for {silent_s:.0f} s"

    def close(self) -> None:
        """Stop sampling; does not wait for a driver that hangs."""
        self._ended.set()

    def _run(self) -> None:
        try:
            self._sample()
        except NoGpus as reason:
            self._stop_asking(str(reason))
        except Exception as error:
            self._stop_asking(f"sampling the GPUs failed: {error}")

    def _stop_asking(self, note: str) -> None:
        with self._lock:
            self._note, self._asking_since_s = note, None

    def _sample(self) -> None:
        with self._lock:
            self._asking_since_s = time.monotonic()
        driver = Driver()
        described = tuple(driver.describe(device) for device in driver.devices)
        with self._lock:
            self._described = described
            self._samples = tuple(deque(maxlen=KEPT_SAMPLES) for _ in described)
            if driver.unreachable:
                indices = ", ".join(map(str, driver.unreachable))
                self._note = f"the NVIDIA driver also counts GPU {indices}, but cannot reach it"
        processes: tuple[tuple[tuple[int, int], ...], ...] = ((),) * len(described)
        rounds = 0
        while not self._ended.is_set():
            with self._lock:
                self._asking_since_s = time.monotonic()
            driver.collect_events()
            with_processes = rounds % PROCESSES_EVERY_SAMPLES == 0
            taken = [driver.look(device, with_processes=with_processes) for device in driver.devices]
            if with_processes:
                processes = tuple(sample.processes for sample in taken)
            with self._lock:
                self._asking_since_s = None
                for samples, sample, known in zip(self._samples, taken, processes, strict=True):
                    samples.append(msgspec.structs.replace(sample, processes=known))
            rounds += 1
            self._ended.wait(self._sample_every_s)
