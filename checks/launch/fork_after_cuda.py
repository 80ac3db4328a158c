"""Forked processes use CUDA, which their parent has initialised.

What it finds
    A DataLoader with worker processes whose data set moves tensors to a GPU in `__getitem__`, or whose collate_fn does;
    and ranks started with Process(target=...) that use CUDA after the process that starts them has. Both in a script
    that keeps the default way of starting processes, which on Linux is fork before Python 3.14. In a run: a forked
    process that failed for this reason, or that called a collective of its parent's process group.

Why it is bad
    CUDA does not survive a fork: the processes fail with "Cannot re-initialize CUDA in forked subprocess". Where it
    does not fail, because the parent has not touched CUDA yet, each worker of each rank holds a context of several
    hundred megabytes on the GPU. A process group does not survive a fork either: a collective in a worker hangs.

Example
    def __getitem__(self, index):
        return self.images[index].cuda()

Remedy
    Return CPU tensors from the data set, pin them (pin_memory=True), and move the batch in the training loop with
    non_blocking=True. Start ranks with torch.multiprocessing.spawn or torchrun.

When it is wrong
    Where processes are started by spawn outside of what was read.

References
    https://docs.pytorch.org/docs/stable/notes/multiprocessing.html#cuda-in-multiprocessing
    https://docs.pytorch.org/docs/stable/data.html#multi-process-data-loading
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddpdoctor.check import Check
from ddpdoctor.checks.launch.device_choice_source import initialises_cuda
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.values import Function, Instance, Value, constant, options_of
from ddpdoctor.source.projection import Projection, whole_projection
from ddpdoctor.source.queries.training_loops import feedings
from ddpdoctor.source.script.module import Module, descend
from ddpdoctor.source.script.script import Script, calls_any, uses_part

CHECK = Check(
    code="DDP511",
    name="fork-after-cuda",
    stands_for="cuda-after-fork",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.WARNING),
    needs=frozenset({"ranks", "forked_uses", "device_uses"}),
    subjects=("job",),
    triggers=("num_workers", "Process"),
)
REMEDY = "Return CPU tensors, with pin_memory=True in the loader, and move the batch in the training loop."


def in_source(script: Script) -> Iterator[Finding]:
    """Report uses of CUDA in code that forked workers of a loader, or forked ranks, run."""
    for loader, module, use, within in forked_cuda(whole_projection(script)):
        yield CHECK.finding(
            "source",
            f"{within} runs in forked worker processes of a DataLoader and uses CUDA there",
            remedy=REMEDY,
            locations=module.location(use),
            because=(("this loader starts the worker processes", loader),),
        )
    for event, parent in forked_ranks(whole_projection(script)):
        yield CHECK.finding(
            "source",
            "this rank is forked from a process that has initialised CUDA, and uses CUDA itself",
            remedy='Start the ranks by spawn: torch.multiprocessing.spawn, or set_start_method("spawn"); or do not '
            "use CUDA before they are started.",
            locations=event.location,
            because=(("the parent initialises CUDA here", parent),),
        )


in_run = CHECK.judged_by("checks.launch.devices_run", "broken_forks", REMEDY)


# Forked processes that use CUDA, which only the process that initialised it can.

# A script that chooses how processes start may not fork at all.
_OTHER_STARTS = ("set_start_method", "get_context", "forkserver", "start_method")


def forked_cuda(projection: Projection) -> Iterator[tuple[Event, Module, ast.AST, str]]:
    """Loaders with worker processes, started by fork, whose data set or collation moves tensors to a GPU.

    Each with the call that does, where it is, and the name of the function that the worker runs.
    """
    script = projection.machine.script
    if uses_part(script, _OTHER_STARTS):
        return
    seen: set[int] = set()
    for feeding in feedings(projection):
        loader = feeding.loader
        workers = loader.argument("num_workers", 5)
        count = constant(workers) if workers is not None else 0
        if loader.ordinal in seen or not loader.complete or type(count) is not int or count == 0:
            continue
        if "multiprocessing_context" in loader.named:
            continue
        for module, function in _run_by_workers(script, loader):
            use = _uses_cuda(module, function)
            if use is not None:
                seen.add(loader.ordinal)
                yield loader, module, use, function.name
                break


def forked_ranks(projection: Projection) -> Iterator[tuple[Event, Event]]:
    """Yield the first use of CUDA in ranks that the script starts by fork, and the one before in their parent."""
    script = projection.machine.script
    if script.spawns_ranks is None or calls_any(script, ("start_processes", "spawn")):
        return
    if uses_part(script, _OTHER_STARTS):
        return
    uses = [event for event in projection.events if initialises_cuda(event)]
    parent = next((event for event in uses if event.in_parent and not event.conditions), None)
    rank = next((event for event in uses if not event.in_parent and not event.conditions), None)
    if parent is not None and rank is not None and parent.ordinal < rank.ordinal:
        yield rank, parent


def _run_by_workers(script: Script, loader: Event) -> Iterator[tuple[Module, ast.FunctionDef]]:
    dataset = loader.argument("dataset", 0)
    for option in options_of(dataset) if dataset is not None else ():
        if isinstance(option, Instance):
            module = script.module(option.cls.module)
            for method in option.cls.node.body:
                if module is not None and isinstance(method, ast.FunctionDef) and method.name == "__getitem__":
                    yield module, method
    collate: Value | None = loader.argument("collate_fn", 6)
    for option in options_of(collate) if collate is not None else ():
        if isinstance(option, Function) and isinstance(option.node, ast.FunctionDef):
            module = script.module(option.module)
            if module is not None:
                yield module, option.node


def _uses_cuda(module: Module, function: ast.FunctionDef) -> ast.AST | None:
    """Return the first call in a function that certainly moves something to a GPU, outside of conditions."""
    for node in descend(function):
        if not isinstance(node, ast.Call):
            continue
        named = any(
            entry.arg == "device" and isinstance(entry.value, ast.Constant) and _is_cuda(entry.value)
            for entry in node.keywords
        )
        method = isinstance(node.func, ast.Attribute) and (
            node.func.attr == "cuda" or (node.func.attr == "to" and bool(node.args) and _is_cuda(node.args[0]))
        )
        if (named or method) and not any(isinstance(around, ast.If) for around in _inside(module, node, function)):
            return node
    return None


def _inside(module: Module, node: ast.AST, function: ast.FunctionDef) -> Iterator[ast.AST]:
    for around in module.ancestors(node):
        if around is function:
            return
        yield around


def _is_cuda(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("cuda")
