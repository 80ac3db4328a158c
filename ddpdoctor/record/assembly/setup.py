"""Makes rows of the record of what ranks did before and beside training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ddpdoctor.record.streams.devices import CheckpointLoad, DeviceChoice, DeviceUse, StateNames
from ddpdoctor.record.streams.files import Access
from ddpdoctor.record.streams.measured import BucketLayout, Gauge, HostRead, MatmulPrecision, OptimizerSize
from ddpdoctor.record.streams.setup import CpuThreads, ForkedUse, Holding, Part, RandomState, Seeding, Setting
from ddpdoctor.record.streams.training import TensorRead, UnusedSearch

SiteOf = Callable[[int, object], int]
"""The record's number of a process's site."""
RankOf = Callable[[int], "int | None"]
"""The rank that a process is or works for."""


_KINDS: tuple[tuple[str, str, type[msgspec.Struct]], ...] = (
    ("seeding", "seedings", Seeding),
    ("random_state", "random_states", RandomState),
    ("part", "parts", Part),
    ("holding", "holdings", Holding),
    ("setting", "settings", Setting),
    ("access", "accesses", Access),
    ("device_use", "device_uses", DeviceUse),
    ("device_choice", "device_choices", DeviceChoice),
    ("checkpoint_loaded", "checkpoint_loads", CheckpointLoad),
    ("state_names", "state_names", StateNames),
    ("forked_use", "forked_uses", ForkedUse),
    ("cpu_threads", "cpu_threads", CpuThreads),
    ("optimizer_size", "optimizer_sizes", OptimizerSize),
    ("bucket_layout", "bucket_layouts", BucketLayout),
    ("gauge", "gauges", Gauge),
    ("matmul_precision", "matmul_precisions", MatmulPrecision),
    ("host_read", "host_reads", HostRead),
    ("tensor_read", "tensor_reads", TensorRead),
    ("unused_search", "unused_searches", UnusedSearch),
)
"""Event, stream, and what its rows are."""


class SetupRows:
    """Takes in the events, and holds the rows by the name of their stream."""

    def __init__(self, rank_of: RankOf, site_of: SiteOf) -> None:
        self._rank_of = rank_of
        self._site_of = site_of
        self._rows: dict[str, dict[object, Any]] = {stream: {} for _, stream, _ in _KINDS}
        self.handlers: Mapping[str, Callable[[int, dict[str, Any]], None]] = {
            event: self._takes(kind, stream) for event, stream, kind in _KINDS
        }

    def rows(self) -> dict[str, tuple[Any, ...]]:
        """Return the rows of every stream; of a gauge of a rank only the newest."""
        return {stream: tuple(found.values()) for stream, found in self._rows.items()}

    def _takes(self, kind: type[msgspec.Struct], stream: str) -> Callable[[int, dict[str, Any]], None]:
        names = kind.__struct_fields__

        def take(pid: int, event: dict[str, Any]) -> None:
            rank = self._rank_of(pid)
            if rank is None:
                return
            fields = {name: event[name] for name in names if name in event} | {"rank": rank}
            if "site" in names:
                fields["site"] = self._site_of(pid, event.get("site"))
            row, rows = msgspec.convert(fields, kind), self._rows[stream]
            rows[(row.rank, row.name) if isinstance(row, Gauge) else len(rows)] = row

        return take
