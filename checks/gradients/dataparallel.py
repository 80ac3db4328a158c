"""nn.DataParallel is used instead of DistributedDataParallel.

What it finds
    A model wrapped in torch.nn.DataParallel in a script that never wraps one in DistributedDataParallel. Also one that
    is, or is part of, a model in DistributedDataParallel: each rank copies it to all GPUs.

Why it is bad
    DataParallel drives all GPUs from one Python process: threads share one interpreter lock, the model is copied to
    every GPU in each forward, and outputs and gradients are gathered on the first GPU, which runs out of memory first.
    It stops at one node. DistributedDataParallel is faster even on one node, and torch maintains only it.

Example
    model = torch.nn.DataParallel(model)

Remedy
    Start one process per GPU with torchrun, call init_process_group, wrap the model in DistributedDataParallel with
    device_ids=[local_rank] and give the loader a DistributedSampler.

When it is wrong
    In notebooks and scripts that have to stay one process. Scripts that use DataParallel only where they run without
    ranks are recognised by their use of DistributedDataParallel.

References
    https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html
    https://docs.pytorch.org/docs/stable/notes/cuda.html#use-nn-parallel-distributeddataparallel-instead-of-multiprocessing-or-nn-dataparallel
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddpdoctor.check import Check, Script
from ddpdoctor.finding import Finding, Location, Severity
from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.values import NONE, options_of
from ddpdoctor.source.projection import Projection, project
from ddpdoctor.source.script.module import Module
from ddpdoctor.source.torch_model.buffers import parts_of_module
from ddpdoctor.source.vocabulary import DATA_PARALLEL

CHECK = Check(
    code="DDP209",
    name="dataparallel",
    severity={"source": Severity.WARNING},
    subjects=("data-parallel",),
    triggers=("DataParallel",),
)


def in_source(script: Script) -> Iterator[Finding]:
    """Report wraps in DataParallel where DDP is not used as well."""
    trains = any(project(script).of_kind("backward"))
    for location in data_parallel_uses(script):
        yield CHECK.finding(
            "nn.DataParallel drives every GPU from one process, copies the model in each forward and gathers on the "
            "first GPU",
            remedy="Start one process per GPU with torchrun, call init_process_group, and wrap the model in "
            "DistributedDataParallel.",
            locations=location,
            severity=None if trains else Severity.ADVICE,
        )
    for inner, wrap in inside_of_wraps(project(script)):
        yield CHECK.finding(
            "each rank of the job drives every GPU by this nn.DataParallel, which is part of a model in DDP",
            remedy="Leave nn.DataParallel out: each process of DDP has a GPU of its own.",
            locations=inner.location,
            because=("the model that holds it is wrapped here", wrap.location),
        )


def inside_of_wraps(projection: Projection) -> Iterator[tuple[Event, Event]]:
    """Objects of ``nn.DataParallel`` in the models that DDP wraps; what may be one, where no condition asks for DDP."""
    machine, seen = projection.machine, set[ast.AST]()
    for wrap in projection.in_course("wrap"):
        for part in parts_of_module(machine, wrap.argument("module", 0) or NONE):
            options = list(options_of(part))
            made = [one for one in map(machine.object, options) if one is not None and one.kind == "data-parallel"]
            if made and made[0].node not in seen and (len(made) == len(options) or not wrap.undecided):
                seen.add(made[0].node)
                yield made[0], wrap


# What is better: a script that calls one of them has its DataParallel for another way to be started.
_BETTER = ("DistributedDataParallel", "FullyShardedDataParallel", "fully_shard", "deepspeed.initialize")


def data_parallel_uses(script: Script) -> Iterator[Location]:
    """Calls of ``nn.DataParallel`` in the entry script, and those in imported modules that the script comes to."""
    calls = [(module, call, name) for module in script.modules for call, name in module.calls()]
    if any(name.endswith(_BETTER) for _, _, name in calls):
        return
    uses = [(module, call) for module, call, name in calls if name == DATA_PARALLEL and not _dead(module, call)]
    if not uses:
        return
    reached = {event.node for event in project(script).events if event.kind == "data-parallel"}
    for module, call in uses:
        if module is script.entry or call in reached:
            yield module.location(call)


def _dead(module: Module, node: ast.AST) -> bool:
    """Return whether a node stands under ``if False:`` or ``if TYPE_CHECKING:``."""
    inner = node
    for around in module.ancestors(node):
        if isinstance(around, ast.If) and inner in around.body:
            test = around.test
            if isinstance(test, ast.Constant) and not test.value:
                return True
            if isinstance(test, ast.Name) and test.id == "TYPE_CHECKING":
                return True
        inner = around
    return False
