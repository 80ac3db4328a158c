"""Notes in each Python of a job what types and devices its modules and optimizers work on, on the stand-in if it is to.

It is found by its name on ``PYTHONPATH``. ``ON_GPU_TRACE`` is a directory, which gets a file a process; and
``ON_GPU_STAND_IN`` a number of GPUs for the stand-in to show.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def trace(directory: str, stand_in: int) -> None:
    """Follow this process."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook
    from torch.utils._pytree import tree_leaves

    if stand_in:
        from ddpdoctor.probe.journal import Journal
        from ddpdoctor.probe.stand_in.install import StandIn

        StandIn(Journal(directory, {}), torch, stand_in)
    known: set[str] = set()

    def note(kind: str, name: str, *trees: Any) -> None:
        if torch.compiler.is_compiling():
            return
        leaves = [[leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)] for tree in trees]
        types = [sorted({str(leaf.dtype).removeprefix("torch.") for leaf in found}) for found in leaves]
        devices = sorted({leaf.device.type for found in leaves for leaf in found})
        line = json.dumps({"kind": kind, "name": name, "types": types, "devices": devices})
        if line not in known:
            known.add(line)
            with open(os.path.join(directory, f"trace-{os.getpid()}.jsonl"), "a", encoding="utf-8") as file:
                file.write(line + "\n")

    def forward_is_over(module: Any, inputs: Any, outputs: Any) -> None:
        note("forward", type(module).__name__, inputs, outputs)

    def stepped(optimizer: Any, *_: Any) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        note("step", type(optimizer).__name__, parameters, [parameter.grad for parameter in parameters])

    torch.nn.modules.module.register_module_forward_hook(forward_is_over)
    register_optimizer_step_post_hook(stepped)


# A launcher trains nothing.
if "ON_GPU_TRACE" in os.environ and "torch.distributed.run" not in sys.orig_argv:
    trace(os.environ["ON_GPU_TRACE"], int(os.environ.get("ON_GPU_STAND_IN") or 0))
