"""CPU time of the calling thread for a call, in blocks: what else the machine does only makes a block dearer."""

from __future__ import annotations

import time
from collections.abc import Callable


def cheapest_us(call: Callable[[], object], *, calls: int, blocks: int) -> float:
    """Microseconds of one call in the cheapest of so many blocks, after one that warms up."""
    _block_us(call, calls)
    return min(_block_us(call, calls) for _ in range(blocks))


def _block_us(call: Callable[[], object], calls: int) -> float:
    began_ns = time.thread_time_ns()
    for _ in range(calls):
        call()
    return (time.thread_time_ns() - began_ns) / calls / 1e3


def tell(what: str, without_us: float, with_us: float, allowed_us: float) -> int:
    """Print both times and what is between them; 1 when that is more than is allowed."""
    cost_us = with_us - without_us
    print(f"  without the {what:6} {without_us:6.1f} µs")
    print(f"  with the {what:6}    {with_us:6.1f} µs  {cost_us:5.1f} µs more  (at most {allowed_us:g})")
    return int(cost_us > allowed_us)
