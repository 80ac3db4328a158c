"""How the data is divided: subsets, the ranks given to samplers, and the order of what data sets hold."""

from __future__ import annotations

import hashlib
import time
from array import array
from types import FrameType
from typing import Any, Optional

from ...call_listeners import on_call
from ...journal import Journal
from ...observed import WHOLE_UP_TO_BYTES, tensor_digest

MOST_INDICES = 2_000_000
MOST_ROWS = 200_000
MOST_S = 0.5
ATTRIBUTES_NOTED = 8
_SITE, _PART = "_ddpdoctor_site", "_ddpdoctor_part"


class Division:
    """Listeners at the constructors of ``Subset`` and ``DistributedSampler``."""

    def __init__(self, journal: Journal, torch: Any) -> None:
        self._journal = journal
        self._torch = torch
        self._parts = 0

    def install(self) -> None:
        """Listen to the classes; subclasses that call the constructor follow."""
        journal, data = self._journal, self._torch.utils.data
        on_call(journal, data.Subset, "__init__", after=self._note_part, harms=("parts",))
        on_call(journal, data.distributed.DistributedSampler, "__init__", after=self._note_sampler, harms=("parts",))

    def _note_sampler(self, frame: FrameType, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        if self._journal.may_be_rank:
            object.__setattr__(arguments[0], _SITE, self._journal.site(frame))

    def _note_part(self, frame: FrameType, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        if not self._journal.may_be_rank:
            return
        subset, site = arguments[0], self._journal.site(frame)
        number, self._parts = self._parts, self._parts + 1
        object.__setattr__(subset, _PART, number)
        try:
            if len(subset.indices) > MOST_INDICES:
                return
            indices, dataset = [int(index) for index in subset.indices], subset.dataset
            while isinstance(dataset, self._torch.utils.data.Subset):
                indices = [int(dataset.indices[index]) for index in indices]
                dataset = dataset.dataset
            length = len(dataset)
        except (TypeError, ValueError, NotImplementedError):
            return  # its keys are no numbers, or it has no length: nothing to compare
        self._journal.event(
            "part",
            part=number,
            site=site,
            base_type=type(dataset).__qualname__,
            base_length=length,
            count=len(indices),
            index_sum=sum(indices),
            digest=hashlib.blake2b(array("q", sorted(indices)).tobytes(), digest_size=8).hexdigest(),
        )

    def note_holdings(self, dataset: Any) -> None:
        """Write digests of what a data set holds for each of its samples, in their order and in any order."""
        self._journal.guarded(self._note_holdings, dataset, harms=("holdings",))

    def _note_holdings(self, dataset: Any) -> None:
        if not hasattr(dataset, "__dict__"):
            return
        try:
            started, length = time.monotonic(), len(dataset)
        except (TypeError, NotImplementedError):
            return
        for name, value in list(vars(dataset).items())[:ATTRIBUTES_NOTED]:
            digests = _row_digests(value, length, started + MOST_S, self._torch)
            if digests is not None:
                self._journal.event(
                    "holding",
                    dataset_type=type(dataset).__qualname__,
                    dataset_length=length,
                    attribute=name,
                    ordered_digest=digests[0],
                    unordered_digest=digests[1],
                )


def described(sampler: Any, dataset: Any) -> dict[str, Any]:
    """Return where a loader's sharding sampler was made, and which noted subset the data set is."""
    return {"sampler_site": getattr(sampler, _SITE, -1), "part": getattr(dataset, _PART, -1)}


def _row_digests(rows: Any, length: int, deadline_s: float, torch: Any) -> Optional[tuple[str, str]]:
    """Return digests of rows with and without their order; None when it is no plain list of one row a sample."""
    # Containers of other kinds may look rows up by a label, or open a file.
    if not 1 < length <= MOST_ROWS or type(rows).__name__ not in ("list", "tuple", "ndarray", "Tensor"):
        return None
    if getattr(rows, "is_cuda", False) or getattr(rows, "ndim", 1) == 0 or len(rows) != length:
        return None
    ordered, total = hashlib.blake2b(digest_size=8), 0
    for number in range(length):
        content = _content(rows[number], torch)
        if content is None or (number % 256 == 0 and time.monotonic() > deadline_s):
            return None
        digest = hashlib.blake2b(content, digest_size=8).digest()
        ordered.update(digest)
        total += int.from_bytes(digest, "big")
    return ordered.hexdigest(), f"{total & (1 << 64) - 1:016x}"


def _content(row: Any, torch: Any) -> Optional[bytes]:
    if isinstance(row, torch.Tensor):
        return tensor_digest(row, WHOLE_UP_TO_BYTES).encode() or None
    if isinstance(row, (str, bytes, int, float)):
        return repr(row).encode()
    if isinstance(row, (tuple, list)) and len(row) <= 8:
        parts = [_content(item, torch) for item in row]
        return None if None in parts else b"\0".join(part for part in parts if part is not None)
    return row.tobytes() if hasattr(row, "tobytes") else None
