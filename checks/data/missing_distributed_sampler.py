"""A DataLoader gives every rank the same samples.

What it finds
    A map-style DataLoader that feeds the training forward of a DDP model, or of one that DeepSpeed's engine trains, and
    whose sampler does not divide the data set between the ranks; or a reader of the project itself that goes through
    the data by a position which does not depend on the rank. In a run the whole index lists of the ranks are
    compared, and the data behind equal indices. An IterableDataset of the project is told of where nothing in it
    depends on the rank, or where it gives all items of the rank to each of several workers of its loader. In a run the
    inputs of the forwards are compared, between ranks and between workers.

Why it is bad
    Every rank trains on the whole data set: an epoch costs as many times the work as there are ranks, and the averaged
    gradient is that of nearly the same samples. Nothing fails, so it is noticed late or never. Workers hold a copy of
    the data set each: what asks for no worker comes once from each of them, batch after batch.

Example
    loader = DataLoader(dataset, batch_size=32, shuffle=True)
    model = DistributedDataParallel(model)

Remedy
    loader = DataLoader(dataset, batch_size=32, sampler=DistributedSampler(dataset)), and sampler.set_epoch(epoch)
    before each epoch.

When it is wrong
    Where ranks are meant to see the same data (tensor parallelism). An iterable data set that shards itself, a data set
    that was split by rank, random batches seeded by rank, and items that are drawn whatever their index (of one seed on
    all ranks: identical-random-seed) are recognised.

References
    https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from ddpdoctor.check import Check, Reason, Script
from ddpdoctor.checks.data.missing_set_epoch import (
    DEAL_OUT,
    OF_TORCH,
    TORCHS_ORDERS,
    batches_remedy,
    samples_remedy,
    set_epoch_of,
)
from ddpdoctor.files import regex
from ddpdoctor.finding import Finding, Location, Severity
from ddpdoctor.fix import Edit, Fix, fix_of, imported, instead, with_keyword
from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.values import ALL_RANKS, NONE, ExternalObject, Instance, constant, tags_of
from ddpdoctor.source.projection import Projection, whole_projection
from ddpdoctor.source.queries.training_loops import (
    Feeding,
    by_engine,
    by_shards,
    divided_by_rank,
    division,
    feedings,
    is_drawn,
    is_map_style,
    loop_of_epochs,
)
from ddpdoctor.source.script.module import Module, argument_of, descend, last_name, origins_of
from ddpdoctor.source.vocabulary import DISTRIBUTED_SAMPLER

CHECK = Check(
    code="DDP101",
    name="missing-distributed-sampler",
    severity={"source": Severity.WARNING, "rehearsal": Severity.ERROR, "run": Severity.ERROR},
    needs=frozenset({"loaders", "passes", "forwards"}),
    subjects=("training", "training-loader"),
    triggers=("DataLoader", "DistributedDataParallel", "ccelerat", "Fabric", "auto_model"),
)
_DIVIDING = DISTRIBUTED_SAMPLER.rpartition(".")[2]
_BY_DDP = ("a DDP model", "DistributedDataParallel")
_BY_ENGINE = ("a model that DeepSpeed trains", "its engine")
_BY_SHARDS = ("a model that is sharded over the ranks", "it")


def in_source(script: Script) -> Iterator[Finding]:
    """Report loaders that feed a backward of a DDP model and give every rank the whole data set."""
    projection = whole_projection(script)
    for feeding in feedings(projection):
        parts = [division(projection.machine, loader) for loader in feeding.alternatives]
        if not feeding.certain or any(part != "whole" for part in parts):
            continue
        if _is_without_ranks(projection, feeding.loader):
            continue
        loader, backward = feeding.loader, feeding.backward
        from ddpdoctor.checks.data.drawn_items_source import draws_its_items

        if is_drawn(projection.machine, loader) or draws_its_items(projection.machine, loader):
            continue
        batches = loader.argument("batch_sampler", 4)
        own_batches = batches is not None and constant(batches) is not None
        made = batches.name if isinstance(batches, ExternalObject) else ""
        model, through = _BY_ENGINE if by_engine(backward) else _BY_SHARDS if by_shards(backward) else _BY_DDP
        yield CHECK.finding(
            f"this DataLoader feeds the training of {model}, and no sampler divides its data set between the ranks",
            remedy=batches_remedy(made if made in OF_TORCH else "the batch sampler")
            if own_batches
            else _remedy_of_samples(loader),
            locations=loader.location,
            because=_reaches(backward, through),
        )
    if _has_streams(script):
        yield from _of_streams(projection)
    yield from alike_readers(projection)


def _is_without_ranks(projection: Projection, loader: Event) -> bool:
    """Return whether a condition chooses between this loader and one that divides the same data between the ranks."""
    return any(
        other.module is loader.module
        and loader.module.in_other_arms(loader.node, other.node)
        and _data_of(other.node) == _data_of(loader.node)
        and division(projection.machine, other) == "sharded"
        for other in projection.of_kind("loader")
    )


def _data_of(call: ast.AST) -> str:
    """Return the data set of a loader as it is written: a job with ranks comes there otherwise than one without."""
    given = argument_of(call, "dataset", 0)
    return "" if given is None else ast.dump(given)


def _has_streams(script: Script) -> bool:
    return any("IterableDataset" in module.words for module in script.modules)


def _of_streams(projection: Projection) -> Iterator[Finding]:
    """Report streams that give every rank the same items, or each worker all items of its rank."""
    from ddpdoctor.checks.data.workers_source import repeated_streams, workers_of

    for feeding, by_worker in alike_streams(projection):
        loader = feeding.loader
        why = (
            "this IterableDataset is divided between the workers of each rank, not between the ranks"
            if by_worker
            else "nothing in this IterableDataset depends on the rank"
        )
        yield CHECK.finding(
            f"every rank trains on the same items: {why}",
            remedy=DEAL_OUT
            if by_worker or workers_of(projection, loader) > 1
            else "Let __iter__ give each rank its own items, and as many as the others, as "
            "itertools.islice(items, rank, None, world_size) does.",
            locations=loader.location,
            because=_reaches(feeding.backward, "DistributedDataParallel"),
        )
    for repeated in repeated_streams(projection):
        stream = repeated.stream.node
        yield CHECK.finding(
            f"each rank trains on every sample {repeated.workers} times: the {repeated.workers} workers of this "
            "DataLoader all go through the same items",
            remedy=DEAL_OUT,
            locations=repeated.feeding.loader.location,
            because=(
                (f"nothing in {stream.name} asks which worker it is in", repeated.module.head_location(stream)),
                _reaches(repeated.feeding.backward, "DistributedDataParallel"),
            ),
        )


def _sampler_of(loader: Event) -> str:
    """Return the class of a loader's sampler, ``sampler`` where that is not known; empty when it has none."""
    sampler = loader.argument("sampler", 3) or NONE
    if isinstance(sampler, Instance):
        return sampler.cls.node.name
    made = sampler.name.rpartition(".")[2] if isinstance(sampler, ExternalObject) else "sampler"
    return "" if constant(sampler) is None else made


def _remedy_of_samples(loader: Event) -> str:
    sampler = _sampler_of(loader)
    shuffle = loader.argument("shuffle", 2)
    asked = constant(shuffle) if shuffle is not None else None
    order = "" if asked is None else f"shuffle={asked}" if isinstance(asked, bool) else "shuffle=…"
    return samples_remedy(sampler, f"`{sampler}`" if sampler else order, divides=sampler == _DIVIDING)


def _reaches(backward: Event, through: str) -> Reason:
    return f"its batches reach this backward through {through}", backward.location


def fixes(script: Script, finding: Finding) -> Iterator[Fix]:
    """Offer a sampler that divides the data set, or one worker for a stream that several of them repeat."""
    projection = whole_projection(script)
    if _has_streams(script):
        from ddpdoctor.checks.data.workers_source import one_worker, repeated_streams

        for repeated in repeated_streams(projection):
            if repeated.feeding.loader.location == finding.location:
                yield from one_worker(repeated, finding)
    for feeding in feedings(projection):
        dataset = feeding.loader.argument("dataset", 0)
        if isinstance(dataset, Instance) and not is_map_style(projection.machine, dataset):
            continue  # A loader takes no sampler for a stream.
        replaceable = _sampler_of(feeding.loader) in TORCHS_ORDERS | {_DIVIDING}
        if feeding.loader.location == finding.location and replaceable:
            yield from divide(feeding, finding)


in_run = CHECK.judged_by("checks.data.sharding_run", "judge_sharding")


# The suggestion to divide a data set between the ranks.


def divide(feeding: Feeding, finding: Finding) -> Iterator[Fix]:
    """Give the loader a ``DistributedSampler`` in place of its own order, and set its epoch.

    It is never safe: the batches of a step become others, and an epoch is as many times shorter as there are ranks.
    """
    module, call = feeding.loader.module, feeding.loader.node
    if not isinstance(call, ast.Call) or len(call.args) > 2:
        return
    dataset = argument_of(call, "dataset", 0)
    name = imported(module, DISTRIBUTED_SAMPLER)
    if dataset is None or not isinstance(dataset, (ast.Name, ast.Attribute)) or name is None:
        return
    shuffles = constant(feeding.loader.argument("shuffle", 2) or NONE) is True or "sampler" in feeding.loader.named
    sampler = f"{name[0]}({module.segment(dataset)}{'' if shuffles else ', shuffle=False'})"
    edit = _with_sampler(module, call, sampler)
    epochs = loop_of_epochs(feeding)
    told = set_epoch_of(module, call, epochs, ".sampler") if shuffles and epochs is not None else None
    description = f"give the loader sampler={sampler}" + (", and set its epoch" if told else "")
    yield from fix_of(finding, description, edit, *name[1], *((told,) if told else ()))


def _with_sampler(module: Module, call: ast.Call, sampler: str) -> Edit | None:
    """Write the sampler over ``shuffle`` or the sampler that is there, or behind the other arguments."""
    words = {word.arg: word for word in call.keywords}
    if "batch_sampler" in words or None in words or {"sampler", "shuffle"} <= words.keys():
        return None
    old = words.get("sampler") or words.get("shuffle")
    if old is None:
        return with_keyword(module, call, "sampler", sampler)
    return instead(module, old, f"sampler={sampler}")


# Batches of a reader that the project wrote, which goes through the data by a position of its own on every rank.

# In a name: the reader may divide the data between the ranks.
_OF_RANKS = regex(r"rank|world|num_proc|(?<!pre)process(?!ing|or)|replica|gpu", re.IGNORECASE)
# In a name: the order may be another one on each rank.
_DRAWS = regex(r"rand|shuffle|perm|seed|choice", re.IGNORECASE)
_READING = frozenset({"open", "reader", "iter_batches", "read_csv", "readlines", "scandir"})
# Methods that are given a device, which differs between ranks by right.
_PLACING = frozenset({"to", "cuda"})


def alike_readers(projection: Projection) -> Iterator[Finding]:
    """Readers that feed the training of a DDP model and in which nothing depends on the rank, each once.

    A position in ``self`` is read in a slice and moved on by the same method, so that the batches of all ranks are
    alike unless the rank is in the start, the stride or the data.
    """
    trained = {
        number
        for backward in projection.in_course("backward")
        if backward.receiver is not None
        for kind, number in tags_of(backward.receiver)
        if kind == "ddp"
    }
    seen: set[ast.AST] = set()
    for forward in projection.in_course("ddp-forward"):
        wrapped = forward.receiver.number if isinstance(forward.receiver, ExternalObject) else 0
        if wrapped not in trained or not forward.gradients or forward.ranks != ALL_RANKS:
            continue
        for call in _origins(projection, forward):
            found = _reader(projection, forward, call)
            if found is None or found[0] in seen:
                continue
            made, name, position = found
            seen.add(made)
            yield CHECK.finding(
                f"every rank trains on the same batches: {name} reads on from one position, whatever the rank",
                remedy="Let each rank begin at a position of its own, its rank times the size of a batch, and move on "
                "by the world size times that.",
                locations=forward.module.location(made),
                because=(
                    (
                        "this reads at the position and moves it on, and nothing in the class depends on the rank",
                        position,
                    ),
                    ("its batches reach this forward of the DDP model", forward.location),
                ),
            )


def _origins(projection: Projection, forward: Event) -> Sequence[ast.Call]:
    """Return the calls of methods that the arguments of a forward come from; none where ranks take parts of them."""
    body = forward.module.body_around(forward.node)
    if not isinstance(forward.node, ast.Call):
        return ()
    sources: list[ast.AST] = [*forward.node.args, *(entry.value for entry in forward.node.keywords)]
    names: set[str] = set()
    calls: list[ast.Call] = []
    assigned = forward.module.index.within(body, ast.Assign)
    while sources:
        for node in descend(sources.pop()):
            if isinstance(node, ast.Subscript) and _speaks_of_ranks(projection, node.slice):
                return ()
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if node.func.attr not in _PLACING and any(_speaks_of_ranks(projection, one) for one in node.args):
                    return ()
                calls.append(node)
            if isinstance(node, ast.Name) and node.id not in names:
                names.add(node.id)
                sources += [one.value for one in assigned if any(_binds(target, node.id) for target in one.targets)]
    return calls


def _binds(target: ast.expr, name: str) -> bool:
    parts = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
    return any(isinstance(part, ast.Name) and part.id == name for part in parts)


def _reader(projection: Projection, forward: Event, call: ast.Call) -> tuple[ast.Call, str, Location] | None:
    """Return where the reader is made whose method is called, if its class was read and nothing in it depends on the
    rank; with its class, and the method that reads at the position and moves it on.
    """
    if not isinstance(call.func, ast.Attribute) or not isinstance(call.func.value, (ast.Name, ast.Attribute)):
        return None
    text, module = ast.unparse(call.func.value), forward.module
    made = [
        one.value for one in module.index.of(ast.Assign) if any(ast.unparse(target) == text for target in one.targets)
    ]
    if len(made) != 1 or not isinstance(made[0], ast.Call) or _speaks_of_ranks(projection, made[0]):
        return None
    if _is_set_by_rank(projection, module, text):
        return None
    found = [
        (around, cls)
        for around in projection.machine.script.modules
        for cls in around.index.of(ast.ClassDef)
        if cls.name == last_name(made[0].func)
    ]
    if len(found) != 1 or found[0][1].bases or not _is_alike(projection, found[0][1]):
        return None
    around, cls = found[0]
    for method in cls.body:
        if isinstance(method, ast.FunctionDef) and method.name == call.func.attr and _advances(method):
            return made[0], cls.name, around.head_location(method)
    return None


def _is_set_by_rank(projection: Projection, module: Module, reader: str) -> bool:
    """Return whether a statement about a reader names ranks: it may put it at another position on each."""
    mention = re.compile(rf"\b{re.escape(reader)}\b")
    statements = (*module.index.of(ast.Assign), *module.index.of(ast.AugAssign), *module.index.of(ast.Expr))
    loops = (node.iter for node in module.index.of(ast.For))
    root = reader.partition(".")[0]
    near = (  # A script of 50,000 lines took 0.8 s to write each of them out.
        node
        for node in (*statements, *loops)
        if any(isinstance(inner, ast.Name) and inner.id == root for inner in descend(node))
    )
    mentioned = (node for node in near if mention.search(ast.unparse(node)))
    return any(_speaks_of_ranks(projection, node) for node in mentioned)


def alike_streams(projection: Projection) -> Iterator[tuple[Feeding, bool]]:
    """Loaders over a stream that hands every rank the same items, once each; whether it divides them by worker."""
    from ddpdoctor.checks.data.workers_source import divides_by_worker_alone, is_stream

    machine = projection.machine
    for feeding in feedings(projection):
        dataset = feeding.loader.argument("dataset", 0)
        if not feeding.certain or len(feeding.alternatives) != 1 or not isinstance(dataset, Instance):
            continue
        loader, cls = feeding.loader, dataset.cls
        if loader.ordinal in machine.prepared or not loader.complete or loader.ranks != ALL_RANKS:
            continue
        if not is_stream(machine, cls) or divided_by_rank(machine, dataset):
            continue
        by_worker = divides_by_worker_alone(projection, dataset)
        if by_worker or (_goes_over_data(cls.node) and _is_alike(projection, cls.node)):
            yield feeding, by_worker


def _goes_over_data(cls: ast.ClassDef) -> bool:
    """Return whether a loop in a class goes over a file or over what its objects hold, and is no mere count."""
    counts = ("range", "count", "repeat")
    for method in (one for one in cls.body if isinstance(one, ast.FunctionDef)):
        gone = (node for node in descend(method) if isinstance(node, (ast.For, ast.comprehension, ast.YieldFrom)))
        for iterable in (node.value if isinstance(node, ast.YieldFrom) else node.iter for node in gone):
            if isinstance(iterable, ast.Call) and last_name(iterable.func) in counts:
                continue
            made = (node for node in origins_of(iterable, method) if isinstance(node, ast.Call))
            if any(last_name(node.func) in _READING for node in made) or any(
                isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
                for node in descend(iterable)
            ):
                return True
    return False


def _is_alike(projection: Projection, cls: ast.ClassDef) -> bool:
    """Return whether neither a class nor a function of the project that it calls speaks of ranks or draws numbers."""
    called = {last_name(node.func) for node in descend(cls) if isinstance(node, ast.Call)}
    functions = (
        function
        for module in projection.machine.script.modules
        for function in module.index.of(ast.FunctionDef)
        if function.name in called and not function.name.startswith("__")
    )
    return not any(_speaks_of_ranks(projection, node) or _speaks(node, _DRAWS) for node in (cls, *functions))


def _advances(method: ast.FunctionDef) -> bool:
    """Return whether a method reads a slice that begins at an attribute of its object, and moves that attribute on."""
    nodes = descend(method)
    moved = {
        ast.unparse(target)
        for node in nodes
        if isinstance(node, (ast.Assign, ast.AugAssign))
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Attribute)
    }
    local = {
        ast.unparse(node.targets[0])
        for node in nodes
        if isinstance(node, ast.Assign) and ast.unparse(node.value) in moved
    }
    return any(
        isinstance(node, ast.Slice) and node.lower is not None and ast.unparse(node.lower) in moved | local
        for node in nodes
    )


def _speaks(node: ast.AST, pattern: re.Pattern[str]) -> bool:
    return any(pattern.search(word) for inner in descend(node) for word in _words(inner))


def _speaks_of_ranks(projection: Projection, node: ast.AST) -> bool:
    """Return whether code names ranks, by how its names are spelt or by what the walk found in them."""
    store = projection.machine.store
    learnt = store.rank_names | store.size_names
    return _speaks(node, _OF_RANKS) or any(word in learnt for inner in descend(node) for word in _words(inner))


def _words(node: ast.AST) -> Iterator[str]:
    if isinstance(node, (ast.Name, ast.Attribute)):
        yield last_name(node)
    elif isinstance(node, (ast.arg, ast.keyword)):
        yield node.arg or ""
