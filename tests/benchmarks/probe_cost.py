"""What the hooks of a live run add to a training step: ``python -m tests.benchmarks.probe_cost``.

The hooks run around functions that do nothing, in the order of a usual step: a fetch, a forward that broadcasts
buffers, a backward, an optimizer's step. Measured is the CPU time of the calling thread, over 100,000 steps in blocks;
the cheapest block counts, for a busy machine only adds to it, and blocks are short so that some fall into its quiet
moments. What the hooks keep is taken in by the same thread, as often as by the heartbeat's in steps of 5 ms: only
the making and writing of rows is another's. A second measurement has an explicit collective in each step, at which the
training thread takes in all that waits and writes the beginning of the call's row.
"""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path
from typing import Any

from tests.benchmarks.cheapest_block import cheapest_us, tell
from tests.scratch import scratch_directory

STEPS = 500
BLOCKS = 200
ALLOWED_US = 16.0
ALLOWED_CALL_US = 15.0
TAKEN_IN_EVERY = 40
"""Steps of 5 ms in the fifth of a second between two heartbeats."""


def measure() -> tuple[tuple[float, float], tuple[float, float]]:
    """Cheapest blocks in microseconds: of steps and of steps with a collective, each without and with the hooks."""
    import torch
    import torch.distributed as dist

    from ddpdoctor.probe.journal import Journal
    from ddpdoctor.probe.live.install import Live
    from ddpdoctor.probe.process import ProcessEnd

    iterator_class = torch.utils.data.dataloader._BaseDataLoaderIter
    ddp_class = torch.nn.parallel.DistributedDataParallel
    batch = [torch.ones(8, 4)]

    class Iterator(iterator_class):  # type: ignore[misc, valid-type]
        """Hands out one batch for ever."""

        _num_workers, _num_yielded = 0, 5

        def __init__(self) -> None:
            pass

    def nothing(*arguments: Any, **options: Any) -> None:
        return None

    iterator_class.__next__ = lambda iterator: batch
    ddp_class.forward = lambda ddp, *arguments: ddp._sync_buffers()
    ddp_class._sync_buffers = nothing
    torch.autograd.backward = nothing
    dist.distributed_c10d.all_reduce = dist.all_reduce = nothing

    with scratch_directory() as directory:
        dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=0, world_size=1)
        model = ddp_class(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        iterator, value = Iterator(), torch.ones(100)

        def step() -> None:
            next(iterator)
            ddp_class.forward(model)
            torch.autograd.backward(value)
            for hook in before:
                hook(optimizer, (), {})
            for hook in after:
                hook(optimizer, (), {})
            if next(numbers) % TAKEN_IN_EVERY == 0:
                take_in()

        def step_with_collective() -> None:
            step()
            dist.all_reduce(value)

        numbers = count()
        take_in: Any = nothing
        before: list[Any] = []
        after: list[Any] = []
        steps = step, step_with_collective
        without_us = [cheapest_us(one, calls=STEPS, blocks=BLOCKS) for one in steps]
        journal = Journal(str(directory), {"project_root": str(Path(__file__).parents[2]), "kind": "run"})
        live = Live(journal, ProcessEnd(journal))
        live.after_torch(torch)
        live.world_made(0, 1)
        optimizers = sys.modules["torch.optim.optimizer"]
        before += optimizers._global_optimizer_pre_hooks.values()
        after += optimizers._global_optimizer_post_hooks.values()
        take_in = live.observer.moments.take_in
        with_us = [cheapest_us(one, calls=STEPS, blocks=BLOCKS) for one in steps]
        completed = live.observer.steps.completed
        if completed < len(steps) * STEPS * BLOCKS:
            raise SystemExit(f"the probe counted {completed:,} steps of {len(steps) * STEPS * (BLOCKS + 1):,}")
        dist.destroy_process_group()
    return (without_us[0], with_us[0]), (without_us[1], with_us[1])


def main() -> int:
    """Print what was measured; 1 when the bound is exceeded."""
    alone, with_call = measure()
    print(f"one step of empty functions, CPU time of the calling thread, cheapest of {BLOCKS} blocks of {STEPS:,}")
    failed = tell("hooks", *alone, ALLOWED_US)
    call_us = (with_call[1] - with_call[0]) - (alone[1] - alone[0])
    print(f"  an explicit collective in it {call_us:5.1f} µs more  (at most {ALLOWED_CALL_US:g})")
    return int(failed or call_us > ALLOWED_CALL_US)


if __name__ == "__main__":
    sys.exit(main())
