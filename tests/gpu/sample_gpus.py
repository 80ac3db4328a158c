"""Samples the GPUs of the library that is on the loader's path: for each line on stdin a line of JSON.

The argument says who is asked: ``sampler``, or ``record`` for the GPUs as part of a record with the one rank that the
line names, RANK PID.
"""

from __future__ import annotations

import sys
import time

import msgspec

from ddpdoctor.monitor.gpus import GpuSampler, NodeGpus
from ddpdoctor.record.model import Job, Rank, RunRecord
from ddpdoctor.record.streams.measured import Gpu

if __name__ == "__main__":
    sampler, node = GpuSampler(sample_every_s=0.02, silent_after_s=1.0), None
    if sys.argv[1] == "sampler":
        sampler.start()
    else:
        node = NodeGpus()
    for line in sys.stdin:
        started_s = time.perf_counter()
        if node is None:
            gpus, note = sampler.gpus(), sampler.note()
        else:
            rank, _, pid = line.partition(" ")
            ranks = (Rank(rank=int(rank), pid=int(pid)),) if pid else ()
            record = node.added_to(RunRecord(job=Job(kind="run"), ranks=ranks))
            gpus, state = record.gpus, record.stream("gpus")
            note = f"{state.state}: {state.reason}" if state.reason else state.state
        answer: dict[str, tuple[Gpu, ...] | str | float] = {
            "gpus": tuple(msgspec.structs.replace(gpu, samples=gpu.samples[-1:]) for gpu in gpus),
            "note": note,
            "seconds": time.perf_counter() - started_s,
        }
        print(msgspec.json.encode(answer).decode(), flush=True)
