"""The GPUs of this node as part of a run's record: sampled, and with the ranks that use them."""

from __future__ import annotations

import socket
from collections.abc import Mapping

import msgspec

from ddpdoctor.monitor.gpus.gpu import GpuSampler
from ddpdoctor.monitor.gpus.rank_gpus import RankProcess, environment_of, with_ranks
from ddpdoctor.record.model import Rank, RunRecord, StreamState

_NO_GPUS_WITHOUT = "no GPU was sampled"


class NodeGpus:
    """Samples from its making until it is closed."""

    def __init__(self) -> None:
        self._sampler = GpuSampler()
        self._environments: dict[int, Mapping[str, str]] = {}
        self._host = socket.gethostname()
        self._sampler.start()

    def added_to(self, record: RunRecord) -> RunRecord:
        """Return the record with the newest samples; returns at once, whatever the driver does."""
        gpus = self._sampler.gpus()
        if not gpus:
            state = StreamState("absent", self._sampler.note() or _NO_GPUS_WITHOUT)
            return msgspec.structs.replace(record, streams={**record.streams, "gpus": state})
        here = [self._process(rank) for rank in record.ranks if rank.host in ("", self._host)]
        return msgspec.structs.replace(
            record, gpus=with_ranks(gpus, here), streams={**record.streams, "gpus": StreamState("complete")}
        )

    def note(self) -> str:
        """Return why there are no figures, or no new ones; empty when all is well."""
        return self._sampler.note()

    def close(self) -> None:
        """Stop sampling."""
        self._sampler.close()

    def _process(self, rank: Rank) -> RankProcess:
        environment = self._environment(rank.pid)
        return RankProcess(
            rank=rank.rank,
            pid=rank.pid,
            local_rank=rank.local_rank,
            visible=environment.get("CUDA_VISIBLE_DEVICES"),
            order=environment.get("CUDA_DEVICE_ORDER", ""),
        )

    def _environment(self, pid: int) -> Mapping[str, str]:
        """Environment of a process, read once: a rank that has ended still counts on its GPU."""
        if pid not in self._environments:
            found = environment_of(pid) if pid else None
            if found is None:
                return {}
            self._environments[pid] = found
        return self._environments[pid]
