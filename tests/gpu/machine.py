"""A machine with GPUs of our own making: a management library on the loader's path, and a process that samples it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from ddpdoctor.record.streams.measured import Gpu, GpuSample

SOURCE = Path(__file__).with_name("nvml.c")
ROOT = Path(__file__).parents[2]
PATIENCE_S = 30.0

HEALTHY: dict[str, str] = {
    "count": "2",
    "gpu.name": "NVIDIA H100 80GB HBM3",
    "gpu0.uuid": "GPU-aaaa",
    "gpu1.uuid": "GPU-bbbb",
    "gpu.memory_total": "85899345920",
    "gpu.memory_used": "42949672960",
    "gpu.utilisation": "97",
    "gpu.temperature": "61",
    "gpu.slowdown_temperature": "89",
    "gpu.power": "512500",
    "gpu.power_limit": "700000",
    "gpu.default_power_limit": "700000",
    "gpu.sm_clock": "1980",
    "gpu.maximum_sm_clock": "1980",
    "gpu.reasons": "0",
    "gpu.compute_capability": "90",
    "gpu.ecc": "0",
    "gpu.pcie": "5",
    "gpu.lanes": "16",
    "gpu.nvlinks": "18",
    "gpu.nvlink_version": "4",
    "gpu.nvlink_speed": "26562",
    "gpu0.process": "4001 1000000",
    "gpu1.process": "4002 2000000",
}


class Look(msgspec.Struct, frozen=True):
    """What the sampler says at one moment; each GPU has its newest sample only."""

    gpus: tuple[Gpu, ...]
    note: str
    seconds: float

    def newest(self, position: int) -> GpuSample:
        return self.gpus[position].samples[-1]


def build_library(directory: Path, *options: str) -> Path:
    """Compile the library into ``directory``, which then is put on the loader's path."""
    library = directory / "libnvidia-ml.so.1"
    command = (
        "cc",
        "-shared",
        "-fPIC",
        "-O1",
        "-Wl,-soname,libnvidia-ml.so.1",
        *options,
        "-o",
        str(library),
        str(SOURCE),
    )
    subprocess.run(command, check=True, capture_output=True)
    return directory


class Machine:
    """Asks the sampling process, and changes what the GPUs do."""

    def __init__(self, process: subprocess.Popen[str], state: Path) -> None:
        self._process = process
        self._state = state

    def becomes(self, values: Mapping[str, str]) -> None:
        """Change what the library answers from now on."""
        draft = self._state.with_suffix(".draft")
        draft.write_text("".join(f"{name} {value}\n" for name, value in values.items()))
        draft.replace(self._state)

    def look(self, words: str = "") -> Look:
        """What is said now, to a line of words."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(words, file=self._process.stdin, flush=True)
        return msgspec.json.decode(self._process.stdout.readline(), type=Look)

    def wait_until(self, holds: Callable[[Look], bool], words: str = "") -> Look:
        """The first look of which something holds."""
        deadline = time.monotonic() + PATIENCE_S
        while not holds(look := self.look(words)):
            assert time.monotonic() < deadline, look
            time.sleep(0.01)
        return look

    def sampled(self) -> Look:
        """The first look with a sample of every GPU."""
        return self.wait_until(lambda look: bool(look.gpus) and all(gpu.samples for gpu in look.gpus))


@contextmanager
def machine(
    library: Path | None, directory: Path, values: Mapping[str, str], ask: str = "sampler"
) -> Iterator[Machine]:
    """A process that samples the GPUs of a library with these values, or of a machine without one."""
    state = directory / "gpus"
    environment = os.environ | {
        "LD_LIBRARY_PATH": str(directory / "none" if library is None else library),
        "FAKE_NVML": str(state),
        "PYTHONPATH": str(ROOT),
    }
    with subprocess.Popen(
        (sys.executable, "-m", "tests.gpu.sample_gpus", ask),
        env=environment,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        asked = Machine(process, state)
        asked.becomes(values)
        try:
            yield asked
        finally:
            process.kill()
