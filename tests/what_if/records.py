"""Records of jobs that were played by hand, with the wrap and the buckets that a prediction needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddpdoctor.finding import Frame
from ddpdoctor.record.model import RunRecord, Site, TensorInfo, Wrap
from ddpdoctor.record.streams.measured import BucketLayout
from ddpdoctor.record.streams.training import Loader, Pass
from tests.diagnosis.measured_job import Durations, MeasuredJob

MEGABYTE = 1_000_000
EVEN: Durations = {"data_wait": 1.0, "forward": 10.0, "backward": 40.0, "optimizer": 2.0, "other": 1.0}


def record_of(
    job: MeasuredJob,
    *,
    layout: Sequence[int] = (10 * MEGABYTE,) * 4,
    parameters: Sequence[int] = (5 * MEGABYTE,) * 8,
    options: Mapping[str, Any] | None = None,
    workers: int = 0,
    **streams: Any,
) -> RunRecord:
    """The record of a job with one wrap, whose buckets and parameters are told first ready first."""
    tensors = tuple(
        TensorInfo(name=f"p{number}", shape=(size // 4,), dtype="float32", size_bytes=size, requires_grad=True)
        for number, size in enumerate(reversed(parameters))
    )
    wraps = tuple(
        Wrap(
            rank=rank,
            wrap=0,
            site=0,
            ranks=job.ranks,
            parameters=tensors,
            options={"bucket_cap_mb": 25, **(options or {})},
        )
        for rank in job.ranks
    )
    filled = {
        "sites": (Site((Frame(file="/job/train.py", line=31, function="<module>"),)),),
        "wraps": wraps,
        "bucket_layouts": tuple(BucketLayout(rank=rank, wrap=0, sizes_bytes=tuple(layout)) for rank in job.ranks),
        "loaders": tuple(Loader(rank=rank, loader=0, site=0, workers=workers) for rank in job.ranks),
        "passes": tuple(Pass(rank=rank, loader=0, ordinal=0, backwards=50) for rank in job.ranks),
    }
    return job.record(**{**filled, **streams})


def bucketed(
    ranks: int, steps: int, *, slower: Mapping[int, Durations] | None = None, durations: Durations = EVEN, **more: Any
) -> MeasuredJob:
    """A job whose four buckets of 10 MB take 12 ms each: the first is full 30 ms ahead of the last.

    They leave at -30, -18, -6 and 6 ms by the last gradient, and the last is there at 18 ms.
    """
    return MeasuredJob(ranks).run(steps, durations, slower, **{"transfer": 18.0, "hidden": 30.0, **more})
