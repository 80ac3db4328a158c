"""What a step would pay for hooks that tell subscribers: ``python -m tests.benchmarks.dispatch_cost``.

A watched job and a rehearsal both replace the fetch of a batch, DDP's forward, backward and the optimizer's step. One
layer for both would call a list of subscribers at the eight stamps of a step, with what the call was given, and hand
what each has returned before the call to the same subscriber after it. Here both ways note the same eight stamps,
around functions that do nothing: by replacements that note them themselves, as ``probe/live/hooks.py`` does, and by
ones that call one subscriber. Blocks of both alternate, and the cheapest of each counts. What the difference is to the
hooks as they are comes from ``probe_cost``, in the same run. Both ways stamp the steps of a real training, too.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from threading import get_ident
from typing import Any

from tests.benchmarks.cheapest_block import cheapest_us
from tests.benchmarks.probe_cost import measure as measure_hooks
from tests.benchmarks.step_cost import interval

STEPS = 500
BLOCKS = 20
ROUNDS = 10
REAL_STEPS = 40
REAL_ROUNDS = 200
PHASES = 4
"""Fetch, forward, backward, optimizer: each with a stamp before it and one after it."""

Stamps = deque[tuple[object, ...]]


class Subscriber:
    """Notes both stamps of a phase, as a subscriber of one common layer would."""

    def __init__(self, phase: int, stamps: Stamps) -> None:
        self._phase, self._keep = phase, stamps.append
        self._thread = get_ident()

    def before(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> bool:
        """Note the beginning, and tell whether this thread is watched."""
        if self._thread != get_ident():
            return False
        try:
            self._keep((self._phase, arguments, time.monotonic_ns()))
        except Exception:
            return False
        return True

    def after(self, noted: bool, result: object) -> None:
        """Note the end."""
        if noted:
            self._keep((self._phase, result, time.monotonic_ns()))


def with_own_stamps(function: Callable[..., Any], phase: int, stamps: Stamps) -> Callable[..., Any]:
    """Replace a function by one that notes both stamps itself."""
    keep, now_ns, thread = stamps.append, time.monotonic_ns, get_ident()

    def stamped(*arguments: Any, **options: Any) -> Any:
        watched = thread == get_ident()
        if watched:
            try:
                keep((phase, arguments, now_ns()))
            except Exception:
                watched = False
        result = None
        try:
            result = function(*arguments, **options)
            return result
        finally:
            if watched:
                keep((phase, result, now_ns()))

    return stamped


def with_subscribers(function: Callable[..., Any], subscribers: Sequence[Subscriber]) -> Callable[..., Any]:
    """Replace a function by one that calls its subscribers."""

    def dispatched(*arguments: Any, **options: Any) -> Any:
        noted = [one.before(arguments, options) for one in subscribers]
        result = None
        try:
            result = function(*arguments, **options)
            return result
        finally:
            for one, before in zip(subscribers, noted):  # noqa: B905 - as the probe has it, for Python 3.9
                one.after(before, result)

    return dispatched


def empty_phases() -> list[Callable[..., Any]]:
    """Four functions that do nothing."""

    def nothing(*arguments: Any, **options: Any) -> None:
        return None

    return [nothing] * PHASES


def real_phases() -> list[Callable[..., Any]]:
    """The four phases of a training of a small model, which drive what is ours out of the processor's caches."""
    import torch

    torch.set_num_threads(1)
    nn = torch.nn
    model = nn.Sequential(*(part for _ in range(3) for part in (nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU())))
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    data = torch.utils.data.TensorDataset(torch.randn(1024, 64))
    batches = (batch for _ in count() for (batch,) in torch.utils.data.DataLoader(data, 16))
    newest: list[Any] = []

    def fetch(_: object) -> None:
        newest[:] = [next(batches)]

    def forward(_: object) -> None:
        newest.append(model(newest[0]).square().mean())

    def backward(_: object) -> None:
        newest[-1].backward()

    def optimize(_: object) -> None:
        optimizer.step()
        optimizer.zero_grad()

    return [fetch, forward, backward, optimize]


def steps_of(phases: Sequence[Callable[..., Any]]) -> list[Callable[[], None]]:
    """Steps of these phases: bare ones, with stamps of their own, and with a subscriber."""
    stamps: Stamps = deque(maxlen=100)

    def step_of(functions: Sequence[Callable[..., Any]]) -> Callable[[], None]:
        fetch, forward, backward, optimize = functions
        value = object()

        def step() -> None:
            fetch(value)
            forward(value)
            backward(value)
            optimize(value)

        return step

    numbered = list(enumerate(phases))
    return [
        step_of(phases),
        step_of([with_own_stamps(function, phase, stamps) for phase, function in numbered]),
        step_of([with_subscribers(function, [Subscriber(phase, stamps)]) for phase, function in numbered]),
    ]


def in_a_loop_of_their_own() -> tuple[float, float]:
    """Microseconds that the stamps add to an empty step: by the replacements themselves, and by subscribers."""
    ways = steps_of(empty_phases())
    taken = [[cheapest_us(way, calls=STEPS, blocks=BLOCKS) for way in ways] for _ in range(ROUNDS)]
    bare_us, own_us, subscribers_us = (min(column) for column in zip(*taken, strict=True))
    return own_us - bare_us, subscribers_us - bare_us


def in_place() -> list[tuple[float, float, float]]:
    """The same in a real step, in microseconds: each the median of rounds and the ends of its 95 % interval."""
    ways = steps_of(real_phases())
    rounds = []
    for number in range(REAL_ROUNDS):
        order = ways if number % 2 else ways[::-1]
        taken = [cheapest_us(way, calls=REAL_STEPS, blocks=2) for way in order]
        rounds.append(taken if number % 2 else taken[::-1])
    return [interval([taken[way] - taken[0] for taken in rounds]) for way in (1, 2)]


def main() -> int:
    """Print what was measured."""
    own_us, subscribers_us = in_a_loop_of_their_own()
    real = in_place()  # Before `measure_hooks`, which leaves its hooks behind.
    (without_us, with_us), _ = measure_hooks()
    hooks_us = with_us - without_us
    print(f"eight stamps of a step, CPU time of the calling thread, cheapest of {ROUNDS * BLOCKS} blocks of {STEPS:,}")
    print(f"  noted by the replacement itself  {own_us:5.2f} µs")
    print(f"  noted by a subscriber            {subscribers_us:5.2f} µs, {subscribers_us / own_us:.2f} times as much")
    print(
        f"  all hooks of a watched job       {hooks_us:5.2f} µs, {(subscribers_us - own_us) / hooks_us:.0%} more then"
    )
    print(f"in a real step, median of {REAL_ROUNDS} rounds and its 95 % interval")
    for name, (median, low, high) in zip(("replacement itself", "subscriber"), real, strict=True):
        print(f"  noted by the {name:19} {median:5.2f} µs  ({low:.2f} to {high:.2f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
