"""Ranks get different numbers of batches in one training pass.

What it finds
    A training pass whose number of batches differs between the ranks, outside a `join()` context. In the source: a
    loop with a training step or a collective in each turn, over data that each rank takes for itself by arithmetic with
    its rank (`files[rank::world_size]`, `if i % world_size != rank: continue`, `range(rank, len(data), world_size)`,
    `islice(stream, rank, None, world_size)`, `array_split(...)[rank]`, a slice of which the last rank takes the rest),
    where nothing makes the parts equal; or with batches of another size on each rank; or over equal shares that a
    sampler of the script's own packs into batches by what the samples hold. In a run: the lengths.

Why it is bad
    Every backward of a DDP model waits for all ranks. A rank with one batch more waits in its last step for ranks that
    have moved on: the job hangs at the end of the epoch, or pairs gradients with collectives that are not theirs. One
    sample more is a batch more when it begins a new batch: it happens with one size of the data set and not with the
    next.

Example
    part = Subset(dataset, range(rank, len(dataset), world_size))
    loader = DataLoader(part, batch_size=32)

Remedy
    Give every rank the same number of batches: DistributedSampler pads the parts, and DistributedSampler(...,
    drop_last=True) cuts them. `drop_last=True` of the DataLoader does not: it can turn one sample more into one batch
    more. Data that cannot be made even is trained on inside `with model.join():`.

When it is wrong
    Where the data is known to divide evenly by the number of ranks, whatever its size, and in loops bounded by a
    number of steps that start the loader anew when it is exhausted. Loops that the script leaves by itself, endless
    data, and parts that are padded or cut to one length are recognised. A rehearsal refutes a suspicion of the source
    where the samples divide evenly by 2, 4 and 8 ranks.

References
    https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html#torch.nn.parallel.DistributedDataParallel.join
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddpdoctor.check import Check, Reason, RunRecord, Script
from ddpdoctor.finding import Finding, Location, Refuted, Severity
from ddpdoctor.source.events import Event, LoopAround, Part
from ddpdoctor.source.interpreter.attributes import base_names, class_attribute, run_by
from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import (
    ALL_RANKS,
    NONE,
    Const,
    ExternalObject,
    Function,
    Instance,
    SequenceValue,
    Value,
    constant,
    options_of,
)
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.queries.training_loops import by_shards, feedings, is_averaged, through_ddp
from ddpdoctor.source.queries.wrapped_models import averages_by_hand
from ddpdoctor.source.ranks.data_partitions import as_written, may_even_out, part_tags, turn_taken
from ddpdoctor.source.script.module import Module, children_of, descend, last_name
from ddpdoctor.source.torch_model.recorded_calls import differ_by_rank
from ddpdoctor.source.vocabulary import JOINS

CHECK = Check(
    code="DDP103",
    name="uneven-inputs",
    stands_for="uneven-passes",
    severity={"source": Severity.WARNING, "rehearsal": Severity.ERROR, "run": Severity.ERROR},
    needs=frozenset({"loaders", "passes"}),
    subjects=("training-loader",),
    triggers=("DataParallel", "fully_shard", "ccelerat", "Fabric", "auto_model", "reduce", "gather", "barrier"),
)
_EVEN = (
    "Give every rank the same number of batches: DistributedSampler pads the parts, or with drop_last=True cuts them"
)
_FEWEST = (
    "Make as many batches on every rank: put all samples into batches in one order and deal these out "
    "(`batches[rank::ranks]`, cut to a multiple of the ranks), or all-reduce their number with MIN and stop there."
)
_REMEDY = f"{_EVEN}; or run the loop inside `with model.join():`."


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report the first uneven pass of each loader, with the hang that it caused; refute where samples divide evenly."""
    from ddpdoctor.diagnosis.divergence import describe
    from ddpdoctor.diagnosis.divergence_kind import divergence_of
    from ddpdoctor.diagnosis.training.pass_lengths import even_divisions, uneven_passes
    from ddpdoctor.diagnosis.wording import count

    divergence = divergence_of(record, CHECK.stands_for)
    for uneven in uneven_passes(record, one_left=divergence is not None):
        basis = record.job.kind
        of_pass = f"in pass {uneven.ordinal} of this loader"
        lengths: list[Reason] = [
            (f"rank {rank} has {count(own, 'batch', 'batches')} {of_pass}", uneven.location, {"batches": own}, rank)
            for rank, own in uneven.lengths[:8]
        ]
        if uneven.samples:
            text = f"each rank draws {count(uneven.samples, 'sample')}, which its sampler puts into that many batches"
            lengths.append((text, uneven.location, {"samples": uneven.samples}))
        hang = () if divergence is None else describe.facts(divergence, basis)
        divergence, consequence = None, f"; then {describe.title(divergence)}" if divergence is not None else ""
        yield CHECK.finding(
            uneven.sentence + consequence,
            basis=basis,
            remedy=_FEWEST if uneven.samples else _REMEDY if record.wraps else f"{_EVEN}.",
            locations=uneven.location,
            ranks=tuple(rank for rank, _ in uneven.lengths),
            because=lengths,
            evidence=hang,
        )
    for location, samples in even_divisions(record):
        yield Refuted(
            location=location,
            reason=f"the ranks' {count(samples, 'sample', 'samples')} divide evenly by 2, 4 and 8 ranks, and every "
            "rank got the same number",
        )


WORLD_SIZES = (2, 4, 8)
"""Numbers of ranks that a known number of items is divided by, to see whether it matters."""
_BASES = frozenset({"Dataset", "IterableDataset", "Sampler", "object", "Generic", "Protocol"})
# Classes of torch whose objects are as long as one of their arguments: its position and name.
_HOLDING = {"torch.utils.data.Subset": (1, "indices"), "torch.utils.data.TensorDataset": (0, "")}
# Iterators without an end, and a sampler that is as long as it is asked to be.
_ENDLESS = frozenset({"cycle", "repeat", "infinite", "RandomSampler"})
# Collectives that begin or end a job, or make a group: their name says so, and they have other checks.
_ONCE = frozenset({"init_process_group", "destroy_process_group", "init_device_mesh", "new_group"})


def in_source(script: Script) -> Iterator[Finding]:
    """Report training loops over parts of the data that need not be equal, at the loader or the division."""
    projection = whole_projection(script)
    machine = projection.machine
    seen: set[ast.AST] = set()
    wrapped = any(projection.of_kind("wrap"))
    by_hand = not wrapped and averages_by_hand(machine.script)
    for feeding in feedings(projection):
        loader, loop = feeding.loader, feeding.loop
        if loop is None or not feeding.certain or not _is_bare(loop.iterable):
            continue
        if not (wrapped or by_hand or is_averaged(projection, feeding.backward)):
            continue  # No rank waits for another.
        size = loader.argument("batch_size", 1) or NONE
        if differ_by_rank(size) and _is_divided(loader) and _runs_to_its_end(feeding.backward, loop):
            seen.add(loader.node)
            yield CHECK.finding(
                "the size of a batch depends on the rank, and every rank has as many samples: a rank of smaller "
                "batches has more of them, and waits for the others in its last step",
                remedy="Give every rank the same batch_size, or run the loop inside `with model.join():`.",
                locations=loader.location,
                because=("this backward waits for all ranks, once for each batch", feeding.backward),
            )
        own = [loader.argument(name, position) for name, position in (("batch_sampler", 4), ("sampler", 3))]
        verdict = None
        if loader.node not in seen and any(isinstance(one, Instance) for one in own):
            from ddpdoctor.checks.data.packed_batches_source import packed

            verdict = packed(machine, loader, feeding.backward)
        if verdict is not None and _runs_to_its_end(feeding.backward, loop):
            seen.add(loader.node)
            yield from CHECK.suspected([verdict], _FEWEST)
        part = _part_of_loader(machine, loader)
        if part is None or loader.node in seen or not _runs_to_its_end(feeding.backward, loop):
            continue
        batches = _batches(part, loader)
        if (part.items is None or batches is not None) and not _evened_out(machine, part, loader.module, loop.module):
            seen.add(loader.node)
            yield _finding(part, loader.location, feeding.backward, batches, by_hand=by_hand)
    for event in projection.in_course("backward", "collective"):
        if event.kind == "backward" and not (through_ddp(projection, event) or by_shards(event) or by_hand):
            continue
        if event.kind == "collective" and (event.name in _ONCE or "group" in event.named):
            continue
        for loop in event.loops:
            turn = turn_taken(machine.store, loop.module, loop.node, event.node)
            decided = (condition for _, condition in event.undecided if turn is None or condition is not turn.test)
            if event.kind == "collective" and any(decided):
                continue
            part, batches = _part_of(machine, loop.iterable) or _part_of(machine, loop.whole), None
            if turn is not None and part is None:
                known = isinstance(loop.whole, SequenceValue) and not loop.whole.open
                part = None if known else Part(turn, loop.module)
            made = machine.object(loop.iterable) if event.kind == "collective" else None
            if made is not None and made.kind == "loader":
                part = _part_of_loader(machine, made)
                batches = None if part is None else _batches(part, made)
            if part is None or part.node in seen or not _is_bare(loop.iterable):
                continue
            if (part.items is not None and batches is None) or not _runs_to_its_end(event, loop):
                continue
            if not _evened_out(machine, part, loop.module):
                seen.add(part.node)
                place = part if made is None else made
                yield _finding(part, place.location, event, batches, by_hand=by_hand)


def _finding(
    part: Part, place: Location, event: Event, batches: tuple[int, int, int] | None, *, by_hand: bool
) -> Finding:
    """Return the finding at the loader or the division, of the backward or the collective that waits for all ranks.

    ``batches``, for a known number of items: a number of ranks, and the batches of its first and of its last rank.
    ``by_hand``: there is no DDP model to join.
    """
    if part.with_rest:
        division = "the last rank takes the remainder here: a different number of items than the others"
    elif batches is None:
        division = "some ranks get one item more here, unless the number of items is a multiple of the world size"
    else:
        ranks, first, last = batches
        division = f"{part.items:,} items: of {ranks} ranks the first gets {first:,} batches, the last {last:,}"
    model = "sharded" if by_shards(event) else "DDP"
    waits = f"this backward of a {model} model waits for all ranks, once for each batch"
    if event.kind == "collective":
        waits = f"{event.name} waits for all ranks, in each turn"
    elif by_hand:
        waits = "the gradients of this backward are averaged over all ranks, once for each batch"
    joinable = event.kind == "backward" and model == "DDP" and not by_hand
    what, turn = ("training loop", "batch") if event.kind == "backward" else ("loop", "turn")
    remedy = _REMEDY if joinable else f"{_EVEN}."
    if event.kind == "collective" and place == part.location:  # There is no loader.
        remedy = (
            "Give every rank the same number of turns (fill up the list to a multiple of the world size), or move "
            f"{event.name} behind the loop."
        )
    return CHECK.finding(
        f"the data of this {what} is divided by rank in parts that may differ in length: a rank with one {turn} more "
        f"waits for the others in its last {'step' if event.kind == 'backward' else event.name}",
        remedy=remedy,
        locations=place,
        because=((division, part.location), (waits, event.location)),
    )


def _is_divided(loader: Event) -> bool:
    """Return whether a DistributedSampler gives each rank as many samples as the others."""
    sampler = loader.argument("sampler", 3)
    return isinstance(sampler, ExternalObject) and sampler.name.endswith(".DistributedSampler")


def _part_of_loader(machine: Machine, loader: Event) -> Part | None:
    if not loader.complete or loader.ranks != ALL_RANKS or loader.guards:
        return None
    if constant(loader.argument("batch_sampler", 4) or NONE) is not None:
        return None
    sampler = loader.argument("sampler", 3)
    if sampler is not None and constant(sampler) is not None:
        return _part_of(machine, sampler) if isinstance(sampler, Instance) else None
    dataset = loader.argument("dataset", 0)
    return None if dataset is None else _part_of(machine, dataset)


def _part_of(machine: Machine, value: Value) -> Part | None:
    """Return the part that a data set, a sampler or a loop's iterable is; None when it is none, or may be another."""
    if isinstance(value, Instance):
        return _part_of_instance(machine, value)
    made = machine.object(value)
    if made is not None:
        position, name = _HOLDING.get(made.name, (-1, ""))
        held = made.argument(name, position)
        return None if held is None or not made.complete else _part_of(machine, held)
    numbers = part_tags(value)
    return machine.parts[min(numbers)] if len(numbers) == 1 and len(list(options_of(value))) == 1 else None


def _part_of_instance(machine: Machine, value: Instance) -> Part | None:
    module, cls = machine.script.module(value.cls.module), value.cls.node
    if module is None or any(name.rpartition(".")[2] not in _BASES for name in base_names(machine, value.cls)):
        return None
    turns = class_attribute(machine, value.cls, "__iter__")
    items = class_attribute(machine, value.cls, "__getitem__")
    if not isinstance(turns if turns is not None else items, Function) or _may_go_on(module, cls):
        return None
    held = [name for name in machine.store.names(value.number) if name in module.words]
    parts = {
        name: part
        for name in held
        if (stored := machine.store.get(value.number, name)) is not None
        and (part := _part_of(machine, stored) if not isinstance(stored, Instance) else None) is not None
    }
    method = turns if isinstance(turns, Function) else class_attribute(machine, value.cls, "__len__")
    if isinstance(method, Function):
        used = {last_name(node) for node in descend(method.node) if isinstance(node, ast.Attribute)}
        found = next((part for name, part in parts.items() if name in used), None)
        if found is not None and (turns is not None or _returns_length(method.node)):
            return found
    code = run_by(machine, value, turns) if isinstance(turns, Function) else ()
    written = (as_written(machine.store, home, node) for home, node in code)
    return next((part for part in written if part is not None), None)


def _returns_length(method: ast.AST) -> bool:
    """Return whether ``__len__`` gives the length of what is held, as it is."""
    body = getattr(method, "body", [])
    last = body[-1] if isinstance(body, list) and body else None
    return isinstance(last, ast.Return) and isinstance(last.value, ast.Call) and last_name(last.value.func) == "len"


def _may_go_on(module: Module, cls: ast.ClassDef) -> bool:
    """Return whether a class may begin anew when its data ends, or end before."""
    index = module.index
    if any(isinstance(node, (ast.While, ast.Break)) for node in descend(cls)):
        return True
    if any(last_name(call.func) in _ENDLESS for call in index.within(cls, ast.Call)):
        return True
    return any(
        isinstance(outer, (ast.For, ast.While))
        for node in index.within(cls, ast.Return)
        for outer in module.ancestors(node)
    )


def _is_bare(iterable: Value) -> bool:
    """Return whether a loop goes over one thing to its end: ``zip`` ends with the shortest."""
    return not (
        isinstance(iterable, SequenceValue) and iterable.values and isinstance(iterable.values[0], SequenceValue)
    )


def _runs_to_its_end(backward: Event, loop: LoopAround) -> bool:
    """Return whether every rank goes on as long as its own data lasts, and waits for the others in each turn."""
    if backward.ranks != ALL_RANKS or backward.guards or not isinstance(loop.node, (ast.For, ast.AsyncFor)):
        return False
    if any(isinstance(around.node, ast.Call) and last_name(around.node.func) in JOINS for around in backward.contexts):
        return False
    if any(isinstance(around.node, ast.While) for around in backward.loops):
        return False
    return not any(_leaves(statement, outermost=True) for statement in loop.node.body)


def _leaves(node: ast.AST, *, outermost: bool) -> bool:
    if isinstance(node, (ast.FunctionDef, ast.Lambda, ast.ClassDef)):
        return False
    if isinstance(node, ast.Return) or (isinstance(node, ast.Break) and outermost):
        return True
    inner = outermost and not isinstance(node, (ast.For, ast.While))
    return any(_leaves(child, outermost=inner) for child in children_of(node) if not isinstance(child, ast.expr))


def _evened_out(machine: Machine, part: Part, *modules: Module) -> bool:
    asked = {module.path: module for module in (part.module, *modules)}
    return any(may_even_out(machine.store, module, with_rest=part.with_rest) for module in asked.values())


def _batches(part: Part, loader: Event) -> tuple[int, int, int] | None:
    """Return the first of some numbers of ranks with which a known number of items gives unequal batches."""
    size = loader.argument("batch_size", 1) or Const(1)
    if part.items is None or not isinstance(size, Const) or not isinstance(size.value, int) or size.value < 1:
        return None
    cuts = constant(loader.argument("drop_last", 8) or NONE) is True
    for ranks in WORLD_SIZES:
        most, least = -(-part.items // ranks), part.items // ranks
        first, last = (items // size.value if cuts else -(-items // size.value) for items in (most, least))
        if first != last:
            return ranks, first, last
    return None
