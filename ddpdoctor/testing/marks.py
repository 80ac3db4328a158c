"""Reads the mark ``ddp`` of a test; stdlib and pytest only."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Literal, get_args

import pytest

Device = Literal["cpu", "stand-in", "cuda"]
MOST_RANKS = 64


@dataclass(frozen=True)
class DdpMark:
    """What a test asks for."""

    nproc: int = 2
    timeout: float = 60.0
    """Seconds, of the body and of what its modules import, and not of starting the ranks."""
    device: Device = "cpu"
    init: bool = True
    """The default process group is there when the body begins."""


def mark_of(item: pytest.Item) -> DdpMark:
    """Return what the nearest mark of a test says; fails the test where it says nonsense."""
    mark = item.get_closest_marker("ddp")
    assert mark is not None
    try:
        given = inspect.signature(DdpMark).bind(*mark.args, **mark.kwargs)
    except TypeError as error:
        pytest.fail(f"the mark `ddp` takes nproc, timeout, device and init: {error}", pytrace=False)
    asked = DdpMark(*given.args, **given.kwargs)
    if type(asked.nproc) is not int or not 1 <= asked.nproc <= MOST_RANKS:
        pytest.fail(f"the mark `ddp` needs 1 to {MOST_RANKS} ranks, not {asked.nproc!r}", pytrace=False)
    if not isinstance(asked.timeout, (int, float)) or not 0 < asked.timeout < math.inf:
        pytest.fail(f"the mark `ddp` needs a timeout in seconds, not {asked.timeout!r}", pytrace=False)
    if asked.device not in get_args(Device):
        known = ", ".join(get_args(Device))
        pytest.fail(f"the mark `ddp` knows the devices {known}, not {asked.device!r}", pytrace=False)
    return asked
