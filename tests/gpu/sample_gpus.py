"""Samples the GPUs of the library that is on the loader's path: for each line on stdin a line of JSON."""

from __future__ import annotations

import sys
import time

import msgspec

from ddpdoctor.monitor.gpu import GpuSampler
from ddpdoctor.record.measured import Gpu

if __name__ == "__main__":
    sampler = GpuSampler(sample_every_s=0.02, silent_after_s=1.0)
    sampler.start()
    for _ in sys.stdin:
        started_s = time.perf_counter()
        gpus, note = sampler.gpus(), sampler.note()
        answer: dict[str, tuple[Gpu, ...] | str | float] = {
            "gpus": tuple(msgspec.structs.replace(gpu, samples=gpu.samples[-1:]) for gpu in gpus),
            "note": note,
            "seconds": time.perf_counter() - started_s,
        }
        print(msgspec.json.encode(answer).decode(), flush=True)
