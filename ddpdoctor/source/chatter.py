"""What ranks report: lines that every rank prints, and numbers of one rank that stand for the job's."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ddpdoctor.source.job import is_distributed, noted, on_every_rank
from ddpdoctor.source.module import Module
from ddpdoctor.source.projection import Projection
from ddpdoctor.source.script import Script
from ddpdoctor.source.trace import Event
from ddpdoctor.source.values import Built, Unknown, Value, constant, is_varying, options_of, tags_of
from ddpdoctor.source.words import mentions_any

_BARS = ("tqdm.tqdm", "tqdm.auto.tqdm", "tqdm.trange", "tqdm.auto.trange")
_TRACKERS = ("wandb.init", "mlflow.start_run")
_WRITERS = re.compile(r"(tensorboard|tensorboardX)\.(\w+\.)?SummaryWriter$|^comet_ml\.Experiment$")
_RANK_SAID = re.compile(r"rank|gpu|device|worker|proc|host|node|pid|world|file=|stderr", re.IGNORECASE)
_OUTPUT = frozenset({"print", "stdout"})
_REDUCED = ("reduce", "gather", "synchronize_between")
_REDUCERS = ("torchmetrics", "all_avg", "dist_mean")
_EXITS = frozenset({"sys.exit", "exit", "quit", "os._exit"})


def lines_of_every_rank(projection: Projection) -> Iterator[Event]:
    """Prints and progress bars in loops, and trackers, that every rank of a job comes to, in order, each once."""
    script = projection.machine.script
    if not is_distributed(projection):
        return
    found: dict[ast.AST, Event] = {}
    for event in projection.in_course("call", "object"):
        if event.node not in found and on_every_rank(event) and _is_chatter(event):
            found[event.node] = event
    if found and not _print_is_replaced(script):
        yield from found.values()


def _is_chatter(event: Event) -> bool:
    if event.kind == "object":
        return _WRITERS.search(event.name) is not None and not _depends_on_rank(event)
    if event.name in _TRACKERS:
        return "group" not in event.named and "mode" not in event.named and not _depends_on_rank(event)
    if event.name in _BARS:
        return event.complete and "disable" not in event.named and bool(event.loops)
    if event.name != "builtins.print" or not event.loops or not event.positional:
        return False
    text = event.module.excerpt(event.node, 1_000)
    return not _RANK_SAID.search(text) and not _reports_failure(event.module, event.node)


def _depends_on_rank(event: Event) -> bool:
    return not event.complete or any(
        is_varying(value) or (isinstance(value, Unknown) and value.opaque)
        for value in (*event.positional, *event.named.values())
    )


def _reports_failure(module: Module, node: ast.AST) -> bool:
    """Whether a node stands in an ``except``, or in a block that leaves the program."""
    inner = node
    for around in module.ancestors(node):
        if isinstance(around, ast.ExceptHandler):
            return True
        if isinstance(around, ast.If) and any(
            inner in arm and _leaves_program(arm[-1]) for arm in (around.body, around.orelse)
        ):
            return True
        inner = around
        if isinstance(around, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            return False
    return False


def _leaves_program(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Raise):
        return True
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and ast.unparse(call.func) in _EXITS


def _print_is_replaced(script: Script) -> bool:
    for module in script.modules:
        if any(node.name == "print" for node in module.index.of(ast.FunctionDef)):
            return True
        if any(node.id in _OUTPUT and isinstance(node.ctx, ast.Store) for node in module.index.of(ast.Name)):
            return True
        if any(node.attr in _OUTPUT and isinstance(node.ctx, ast.Store) for node in module.index.of(ast.Attribute)):
            return True
    return mentions_any(script, ("redirect_stdout",))


def local_metrics(projection: Projection) -> Iterator[Event]:
    """Reports by rank 0 alone of values that come from its own batches and were not reduced.

    In a job that reduces something, only summaries behind a loop over batches count.
    """
    script = projection.machine.script
    if not is_distributed(projection) or mentions_any(script, _REDUCERS):
        return
    reduces = mentions_any(script, _REDUCED)
    seen: set[ast.AST] = set()
    for event in noted(projection, "builtins.print", "wandb.log", "add_scalar", "log_metric"):
        if event.node in seen or event.ranks != 1 or not event.guards or (reduces and _is_in_pass(event)):
            continue
        said = [value for value in (*event.positional, *event.named.values()) if is_local(value)]
        local = any(_is_in_pass(event) or not is_of_whole_set(projection, value) for value in said)
        if local and not communicates(projection, event):
            seen.add(event.node)
            yield event


def communicates(projection: Projection, event: Event) -> bool:
    """Whether ranks communicate while the arguments of a call are computed, which may then hold all ranks' part."""
    place = event.module.location(event.node)
    return any(
        frame.file == place.file and place.line <= frame.line <= place.end_line
        for collective in projection.in_course("collective")
        for frame in collective.chain
    )


def is_local(value: Value) -> bool:
    """Whether a value comes from a rank's own batches and was not reduced since."""
    return is_varying(value) and any(kind in ("batch", "ddp") for kind, _ in tags_of(value))


def is_of_whole_set(projection: Projection, value: Value) -> bool:
    """Whether a value comes from batches of a loader that gives every rank the whole of one data set.

    Names of another loop's batch are used again, and leave their loader among the origins.
    """
    numbers = {number for kind, number in tags_of(value) if kind == "batch"}
    return any(_gives_all(projection.machine.events.get(number)) for number in numbers)


def _gives_all(loader: Event | None) -> bool:
    if loader is None or not loader.complete:
        return False
    samplers = (loader.argument("sampler", 3), loader.argument("batch_sampler", 4))
    data = loader.argument("dataset", 0)
    whole = all(sampler is None or constant(sampler) is None for sampler in samplers)
    return whole and data is not None and not is_varying(data)


def _is_in_pass(event: Event) -> bool:
    """Whether an event happens in a loop over batches."""
    return any(
        isinstance(option, Built) or any(kind in ("batch", "loader") for kind, _ in tags_of(option))
        for loop in event.loops
        for option in options_of(loop.iterable)
    )
