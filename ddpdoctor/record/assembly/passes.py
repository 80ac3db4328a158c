"""Makes the streams of loaders and of passes over them of what the ranks wrote about them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from ddpdoctor.files.untrusted import read_untrusted
from ddpdoctor.record import events
from ddpdoctor.record.events import Row
from ddpdoctor.record.model import shared_fields
from ddpdoctor.record.streams.data import Loader, Pass, SampleProbe

_MOST_INDEX_BYTES = 1 << 26
"""Of all passes together, 8 an index: a number of Python has 32."""


class PassRows:
    """Takes in the events of one run."""

    def __init__(
        self,
        directory: Path,
        rank_of: Callable[[int], int | None],
        converted: Callable[[int, Row, type[Any]], Any],
    ) -> None:
        """``rank_of``: the rank that a process is or works for."""
        self._directory = directory
        self._rank_of = rank_of
        self._converted = converted
        self.rows: dict[tuple[int, int], Pass] = {}
        """By process and number there."""
        self._index_bytes_left = _MOST_INDEX_BYTES
        self._samples: list[tuple[tuple[int, str, int | None], SampleProbe]] = []

    def with_samples(self, loaders: Iterable[Loader]) -> tuple[Loader, ...]:
        """Loaders with the samples of their data set, which is known by type and length."""
        # A damaged directory may hold 10,000 loaders of one rank: their samples are gathered once, not for each.
        known: dict[tuple[int, str, int | None], dict[int, SampleProbe]] = {}
        for data_set, probe in self._samples:
            known.setdefault(data_set, {}).setdefault(probe.index, probe)
        samples = {of: tuple(probes.values()) for of, probes in known.items()}
        return tuple(
            msgspec.structs.replace(
                loader, samples=samples.get((loader.rank, loader.dataset_type, loader.dataset_length), ())
            )
            for loader in loaders
        )

    def on_sample(self, pid: int, event: events.DatasetSample) -> None:
        """Take in a sample of a data set."""
        rank = self._rank_of(pid)
        if rank is not None:
            probe = SampleProbe(index=event.index, leaves=event.leaves)
            self._samples.append(((rank, event.dataset_type, event.dataset_length), probe))

    def on_begun(self, pid: int, event: Row) -> None:
        """Take in that a pass has begun."""
        self.rows[pid, event.fields["number"]] = self._converted(pid, event, Pass)

    def on_ended(self, pid: int, event: events.PassEnded) -> None:
        """Take in that a pass is over."""
        told = shared_fields(event, Pass) | {"ended_ns": event.time_ns, "indices": self._indices(event.indices)}
        self.rows[pid, event.number] = msgspec.structs.replace(self.rows[pid, event.number], **told)

    def on_trained(self, pid: int, event: events.PassTrained) -> None:
        """Take in a backward that came after the end of its pass."""
        key = (pid, event.number)
        self.rows[key] = msgspec.structs.replace(self.rows[key], backwards=event.backwards)

    def on_progress(self, pid: int, event: events.PassProgress) -> None:
        """Take in how far a pass has come."""
        key = (pid, event.number)
        if self.rows[key].end == "open":
            self.rows[key] = msgspec.structs.replace(
                self.rows[key],
                yielded=event.yielded,
                backwards=event.backwards,
                averaged=event.averaged,
                looped=event.looped,
            )

    def _indices(self, name: str) -> tuple[int, ...]:
        if not name.startswith("indices-") or "/" in name:
            return ()
        column = array("q")
        try:
            content = read_untrusted(self._directory / name, self._index_bytes_left, self._directory)
            column.frombytes(content)
        except (OSError, ValueError):
            return ()
        self._index_bytes_left -= len(content)
        return tuple(column)
