"""What the hooks of a live run add to a training step: ``python -m tests.benchmarks.probe_cost``.

The hooks run around functions that do nothing, in the order of a usual step: a fetch, a forward that broadcasts
buffers, a backward, an optimizer's step, one explicit collective. Measured is the CPU time of the calling thread, over
100,000 steps in blocks; the cheapest block counts, for a busy machine only adds to it, and blocks are short so that
some fall into its quiet moments. What the hooks keep is taken in at each explicit collective, by the same thread: only
the writing of rows is another's.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.benchmarks.cheapest_block import cheapest_us, tell
from tests.scratch import scratch_directory

STEPS = 500
BLOCKS = 200
ALLOWED_US = 20.0


def measure() -> tuple[float, float]:
    """Cheapest blocks without and with the hooks, in microseconds."""
    import torch
    import torch.distributed as dist

    from ddpdoctor.probe.journal import Journal
    from ddpdoctor.probe.live.inside import Live
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
            dist.all_reduce(value)

        before: list[Any] = []
        after: list[Any] = []
        without_us = cheapest_us(step, calls=STEPS, blocks=BLOCKS)
        journal = Journal(str(directory), {"project_root": str(Path(__file__).parents[2]), "kind": "run"})
        live = Live(journal, ProcessEnd(journal))
        live.after_torch(torch)
        live.world_made(0, 1)
        optimizers = sys.modules["torch.optim.optimizer"]
        before += optimizers._global_optimizer_pre_hooks.values()
        after += optimizers._global_optimizer_post_hooks.values()
        with_us = cheapest_us(step, calls=STEPS, blocks=BLOCKS)
        completed = live.observer.steps.completed
        if completed < STEPS * BLOCKS:
            raise SystemExit(f"the probe counted {completed:,} steps of {STEPS * (BLOCKS + 1):,}")
        dist.destroy_process_group()
    return without_us, with_us


def main() -> int:
    """Print what was measured; 1 when the bound is exceeded."""
    without_us, with_us = measure()
    print(f"one step of empty functions, CPU time of the calling thread, cheapest of {BLOCKS} blocks of {STEPS:,}")
    return tell("hooks", without_us, with_us, ALLOWED_US)


if __name__ == "__main__":
    sys.exit(main())
