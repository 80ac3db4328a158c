"""The epoch does not reach what orders or makes the samples, so that every epoch is the same.

What it finds
    A shuffling sampler that shards by rank, or an own one derived from it, used for more than one training pass without
    `set_epoch`, made anew for each pass, or told the epoch on some ranks only. In a run two passes that draw the same
    indices in the same order. Also a data set that is told the epoch while its loader keeps its workers
    (persistent_workers): they hold copies of it that were made before the first epoch.

Why it is bad
    The sampler derives its shuffle from its seed and its epoch number, which stays 0. Every epoch then shows each rank
    the same samples in the same order, in the same batches; ranks never exchange samples.

Example
    sampler = DistributedSampler(dataset)
    for epoch in range(epochs):
        for batch in loader: ...

Remedy
    Call sampler.set_epoch(epoch) at the start of each epoch. Keep the epoch of a data set in memory that workers
    share, as torch.zeros(1).share_memory_() is, or let the workers start anew.

When it is wrong
    If a fixed order is intended, for instance to overfit a few batches; shuffle=False states that.

References
    https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from typing import Literal

import msgspec

from ddpdoctor.check import Check, Script, TooLittleEvidence
from ddpdoctor.finding import Finding, Location, Severity
from ddpdoctor.fix import Edit, Fix, first_in_body, fix_of
from ddpdoctor.source.events import Event, LoopAround
from ddpdoctor.source.interpreter.attributes import class_attribute, family
from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import (
    ALL_RANKS,
    NONE,
    UNIFORM,
    BoundMethod,
    Const,
    External,
    ExternalObject,
    Function,
    Instance,
    constant,
    options_of,
)
from ddpdoctor.source.projection import Projection, whole_projection
from ddpdoctor.source.queries.training_loops import feedings, loop_of_epochs, samplers_of
from ddpdoctor.source.ranks.random_numbers import TAKES_SEED
from ddpdoctor.source.script.module import Module, Scope, descend, last_name, made_from

# The fix of a sampler that is never told the epoch.

_COUNTING = frozenset({"range", "trange"})
# Progress bars: they yield what they are given.
_WRAPPING = frozenset({"tqdm", "track"})


def set_epoch_fix(forgotten: ForgottenEpoch, finding: Finding) -> Iterator[Fix]:
    """Call ``set_epoch`` first thing in the loop of epochs.

    Nothing is offered unless the loop counts with one name, and the sampler has one name, is bound to it once, and is
    certainly bound before the loop.
    """
    edit = set_epoch_of(forgotten.sampler.module, forgotten.sampler.node, forgotten.epochs)
    if edit is not None:
        yield from fix_of(finding, f"call {edit.replacement.strip()} at the start of each epoch", edit, safe=True)


def set_epoch_of(module: Module, made: ast.AST, around: LoopAround, part: str = "") -> Edit | None:
    """Return the call of ``set_epoch`` of an object with a name, or of a part of it; None as ``set_epoch_fix``."""
    loop = around.node
    if around.module is not module or not isinstance(loop, ast.For):
        return None
    epoch, name = counter_of(loop), name_bound_before(module, made, loop)
    return first_in_body(module, loop.body, f"{name}{part}.set_epoch({epoch})") if epoch and name else None


def counter_of(loop: ast.For) -> str:
    """Return the name that counts the epochs; empty when the loop does not count, or counts in another variable."""
    iterable: ast.expr = loop.iter
    while isinstance(iterable, ast.Call) and last_name(iterable.func) in _WRAPPING and iterable.args:
        iterable = iterable.args[0]
    if isinstance(iterable, ast.Call) and last_name(iterable.func) in _COUNTING and isinstance(loop.target, ast.Name):
        return loop.target.id
    return ""


def name_bound_before(module: Module, node: ast.AST, loop: ast.For) -> str:
    """Return the name that an object is bound to, once, before a loop and in its block or one around it; or empty."""
    statement = module.parents.get(node)
    if not isinstance(statement, ast.Assign) or statement.value is not node or len(statement.targets) != 1:
        return ""
    target = statement.targets[0]
    if not isinstance(target, ast.Name) or not _precedes(module, statement, loop):
        return ""
    scope = _scope(module, loop)
    if _scope(module, statement) is not scope:
        return ""
    bindings = [
        name
        for name in ast.walk(scope)
        if isinstance(name, ast.Name) and name.id == target.id and not isinstance(name.ctx, ast.Load)
    ]
    return target.id if len(bindings) == 1 else ""


def _precedes(module: Module, statement: ast.stmt, loop: ast.For) -> bool:
    """Return whether the statement stands above the loop, or what is around it, in the same list of statements."""
    around = {loop, *module.ancestors(loop)}
    parent = module.parents.get(statement)
    for name in ("body", "orelse", "finalbody"):
        block = getattr(parent, name, None)
        if isinstance(block, list) and statement in block:
            return any(later in around for later in block[block.index(statement) + 1 :])
    return False


def _scope(module: Module, node: ast.AST) -> ast.AST:
    return next((around for around in module.ancestors(node) if isinstance(around, Scope)), module.tree)


CHECK = Check(
    code="DDP102",
    name="missing-set-epoch",
    severity={"source": Severity.WARNING, "rehearsal": Severity.WARNING, "run": Severity.WARNING},
    needs=frozenset({"loaders", "passes"}),
    subjects=("sampler", "training-loader"),
    triggers=("DistributedSampler", "persistent_workers", "set_epoch"),
)


def in_source(script: Script) -> Iterator[Finding]:
    """Report loaders under a shuffling DistributedSampler that is never told the epoch.

    Raises TooLittleEvidence for one that code which was not read gets in every epoch.
    """
    unread = ""
    for forgotten in forgotten_epochs(whole_projection(script)):
        if forgotten.unread:
            unread = forgotten.unread
            continue
        epochs = forgotten.epochs
        yield CHECK.finding(
            _title(forgotten),
            remedy="Call sampler.set_epoch(epoch) at the start of every epoch, before the loop over the loader.",
            locations=(forgotten.loader.location, _made_at(forgotten.sampler)),
            because=(
                "this loop makes the sampler anew in every turn, of the same data and with the same seed"
                if forgotten.anew
                else "this loop iterates over the loader several times and never sets the sampler's epoch"
                if forgotten.told != "on some ranks"
                else "this loop sets the sampler's epoch under a test that not all ranks pass",
                epochs.module.head_location(epochs.node),
            ),
        )
    for sampler, loader, loop in own_forgotten(whole_projection(script)):
        yield CHECK.finding(
            f"the order that `{sampler.cls.node.name}` draws is seeded by the epoch that it is told, and nothing tells "
            "it one: every epoch uses the same order",
            remedy="Call its set_epoch(epoch) at the start of every epoch, before the loop over the loader.",
            locations=loader.location,
            because=("this loop iterates over the loader several times", loop.module.head_location(loop.node)),
        )
    if _keeps_workers(script):
        yield from _of_workers(script)
    if unread:
        raise TooLittleEvidence(unread)


def _keeps_workers(script: Script) -> bool:
    return any("persistent_workers" in module.text for module in script.modules)


def _of_workers(script: Script) -> Iterator[Finding]:
    """Report data sets that are told the epoch in the rank's own process while workers keep copies of them."""
    from ddpdoctor.checks.data.workers_source import stale_copies

    for stale in stale_copies(whole_projection(script)):
        setting = stale.setting
        yield CHECK.finding(
            f"the workers of this DataLoader never see `{setting.name}` set anew: they are kept, with the copies of "
            "the data set that they started with",
            remedy=KEPT_COPIES,
            locations=stale.feeding.loader.location,
            because=(
                (
                    f"this sets `{setting.name}` of {stale.reader} in the rank's own process alone, and the items are "
                    "made with it",
                    setting.location,
                ),
                ("this loop has more than one epoch", stale.epochs.module.head_location(stale.epochs.node)),
            ),
        )


def _made_at(sampler: Event) -> Location:
    """Return where a sampler is made; of a class of the project, where that is called."""
    inside = sampler.function.endswith(".__init__") and len(sampler.chain) > 1
    return Location(file=sampler.chain[1].file, line=sampler.chain[1].line) if inside else sampler.location


def _title(forgotten: ForgottenEpoch) -> str:
    if forgotten.told == "on some ranks":
        return (
            "only some ranks tell this DataLoader's DistributedSampler the epoch: from the second on the ranks divide "
            "different orders between them, so that samples are missed and others come several times"
        )
    how = "whose epoch is never set" if forgotten.told == "never" else "that is given the same epoch every time"
    return f"this DataLoader is shuffled by a DistributedSampler {how}, so every epoch has the same order"


def fixes(script: Script, finding: Finding) -> Iterator[Fix]:
    """Offer to tell the sampler the epoch, or to let workers start anew that keep the first."""
    if _keeps_workers(script):
        from ddpdoctor.checks.data.workers_source import new_workers, stale_copies

        for stale in stale_copies(whole_projection(script)):
            if stale.feeding.loader.location == finding.location:
                yield from new_workers(stale, finding)
    for forgotten in forgotten_epochs(whole_projection(script)):
        plain = not (forgotten.unread or forgotten.anew or forgotten.told == "on some ranks")
        if plain and forgotten.loader.location == finding.location:
            yield from set_epoch_fix(forgotten, finding)


in_run = CHECK.judged_by(
    "checks.data.sharding_run",
    "judge_epochs",
    "Call sampler.set_epoch(epoch) at the start of every epoch, before the loop over the loader.",
)


# What to do where a batch sampler gives every rank the same batches: a loader takes no `sampler` beside it.

OF_TORCH = frozenset({"SequentialSampler", "RandomSampler", "torch.utils.data.BatchSampler"})
"""What torch's own batch sampler draws from, and itself: it divides as soon as its sampler does."""


def batches_remedy(sampler: str) -> str:
    """Return the remedy for a batch sampler of this name, or for torch's own one that draws from such a sampler."""
    if sampler in OF_TORCH:
        return (
            "Give the batch sampler DistributedSampler(dataset) as its sampler, and call set_epoch(epoch) of that one "
            "before every epoch."
        )
    return (
        f"Let {sampler} give each rank its own batches, as many as the others: "
        "batches[rank : len(batches) // world_size * world_size : world_size], of an order that is the same on all "
        "ranks."
    )


TORCHS_ORDERS = frozenset({"", "SequentialSampler", "RandomSampler"})
"""Samplers that choose nothing, by their classes; empty where a loader has none."""


def samples_remedy(sampler: str, order: str, *, divides: bool) -> str:
    """Return the remedy for a loader with a sampler of this class, or with torch's own order, as it was asked for.

    ``order`` is empty where none was asked for. ``divides`` says that the sampler divides, as it was told, and not by
    the rank.
    """
    if divides:
        return (
            f"Give {sampler} the rank and the number of ranks of the process group; DistributedSampler takes them "
            "from the process group by default."
        )
    if sampler in TORCHS_ORDERS:
        return (
            f"Give it sampler=DistributedSampler(dataset){f' instead of {order}' if order else ''}, and call "
            "sampler.set_epoch(epoch) before each epoch."
        )
    return (
        f"Let `{sampler}` draw alike on all ranks, by a generator that is seeded with the epoch, and deal out what it "
        "draws: list(sampler)[rank : len(sampler) // world_size * world_size : world_size]."
    )


DEAL_OUT = (
    "Deal the items out by rank and by worker in __iter__: with info = get_worker_info() a worker takes item "
    "rank * info.num_workers + info.id of every world_size * info.num_workers."
)
"""The remedy for a stream that is not divided by both."""

KEPT_COPIES = (
    "Leave persistent_workers out, so that the workers of each epoch copy the data set as it then is; or keep what "
    "changes in memory that they share, a tensor made by torch.zeros(1).share_memory_(), and write into that."
)
"""The remedy where workers keep what a data set held in the first epoch."""

# Packages that are known to tell no sampler its epoch.
_READ_LIBRARIES = sys.stdlib_module_names | {"torch", "torchvision", "numpy", "tqdm", "rich", "builtins"}


class ForgottenEpoch(msgspec.Struct, frozen=True, eq=False):
    """A sampler that repeats its order."""

    sampler: Event
    loader: Event
    epochs: LoopAround
    """The loop of epochs."""
    told: Literal["never", "the same", "on some ranks"] = "never"
    """``set_epoch`` is not called, or with the same number every time, or by some ranks and not by the others."""
    anew: bool = False
    """It is made anew in every epoch, of the same data and with the same seed."""
    unread: str = ""
    """The call of code that was not read and may tell it; empty where there is none."""


def forgotten_epochs(projection: Projection) -> Iterator[ForgottenEpoch]:
    """Samplers that shuffle, feed training in several epochs, and whose ``set_epoch`` nothing that was read calls.

    Those that code which was not read gets in every epoch say so in ``unread``.
    """
    told = _samplers_with_epoch(projection)
    if told is None:
        return
    constant_calls = any(event.kind == "set-epoch" and _says_the_same(event) for event in projection.events)
    for feeding in feedings(projection):
        loop = loop_of_epochs(feeding) or projection.machine.cycles.get(feeding.loader.ordinal)
        if loop is None or not feeding.certain:
            continue
        for name, position in (("sampler", 3), ("batch_sampler", 4)):
            value = feeding.loader.argument(name, position) or NONE
            for sampler in samplers_of(projection.machine, value):
                anew = any(around.node is loop.node for around in sampler.loops)
                by = told.get(sampler.ordinal, 0)
                if (by and not feeding.backward.ranks & ~by) or not _shuffles(sampler):
                    continue
                if anew and not _is_repeated(projection, sampler, loop):
                    continue
                unread = _unread_reader(projection, loop, {sampler.ordinal, feeding.loader.ordinal})
                how: Literal["never", "the same", "on some ranks"] = "the same" if constant_calls else "never"
                if sampler.ordinal in told:
                    how = "on some ranks"
                yield ForgottenEpoch(sampler, feeding.loader, loop, how, anew, unread)


def own_forgotten(projection: Projection) -> Iterator[tuple[Instance, Event, LoopAround]]:
    """Yield samplers of the project that feed training in several epochs, each with its loader and the loop of epochs,
    whose order follows an attribute that their own ``set_epoch`` sets, which nothing that was read calls.
    """
    machine = projection.machine
    if projection.bound or not _all_are_known(projection):
        return
    for feeding in feedings(projection):
        loop = loop_of_epochs(feeding) or machine.cycles.get(feeding.loader.ordinal)
        given = [feeding.loader.argument(name, place) for name, place in (("sampler", 3), ("batch_sampler", 4))]
        for sampler in given if feeding.certain else ():
            if loop is None or not isinstance(sampler, Instance) or any(samplers_of(machine, sampler)):
                continue
            setting, turns = (class_attribute(machine, sampler.cls, name) for name in ("set_epoch", "__iter__"))
            if not isinstance(setting, Function) or not isinstance(turns, Function) or setting.node in machine.visited:
                continue
            set_there = _attributes(setting.node, ast.Store)
            read = set_there & _attributes(turns.node, ast.Load) - _attributes(turns.node, ast.Store)
            around = (node for node in descend(sampler.cls.node) if isinstance(node, ast.FunctionDef))
            others = [node for node in around if node.name not in ("__init__", "set_epoch")]
            kept = read - {name for node in others for name in _attributes(node, ast.Store)}
            seeded = {
                name for name in kept if _seeds(turns.node, name) and not _is_set_elsewhere(machine, sampler, name)
            }
            if seeded and not _unread_reader(projection, loop, {feeding.loader.ordinal}):
                yield sampler, feeding.loader, loop


def _seeds(function: ast.AST, name: str) -> bool:
    """Return whether a method seeds random numbers by an attribute of its object."""
    calls = (node for node in descend(function) if isinstance(node, ast.Call) and last_name(node.func) in TAKES_SEED)
    parts = (part for call in calls for given in call.args for part in made_from(given, function))
    return any(isinstance(part, ast.Attribute) and ast.unparse(part) == f"self.{name}" for part in parts)


def _is_set_elsewhere(machine: Machine, sampler: Instance, name: str) -> bool:
    """Return whether anything but the class of a sampler may set an attribute of it."""
    inside = set(descend(sampler.cls.node))
    bases = {one.node.name for one in family(machine, sampler.cls)}
    for module in machine.script.modules:
        if module.sets_by_name:
            return True
        for node in module.index.of(ast.Attribute):
            if node.attr != name or isinstance(node.ctx, ast.Load) or node in inside:
                continue
            owner = next((one for one in module.ancestors(node) if isinstance(one, ast.ClassDef)), None)
            if owner is None or ast.unparse(node.value) != "self" or owner.name in bases:
                return True
    return False


def _all_are_known(projection: Projection) -> bool:
    """Return whether the script comes to no ``set_epoch`` of something unknown, and nothing that was not read may."""
    told = [event for event in projection.events if event.kind == "set-epoch"]
    receivers = (option for event in told for option in options_of(event.receiver or UNIFORM))
    if not all(isinstance(one, (Instance, ExternalObject, External, Const)) for one in receivers):
        return False
    modules, walked = projection.machine.script.modules, {event.node for event in told}
    for module in modules:
        for call in module.calls_by_name.get("set_epoch", ()):
            around = next((one for one in module.ancestors(call) if isinstance(one, ast.FunctionDef)), None)
            owner = module.parents.get(around) if around is not None else None
            if any(isinstance(one, ast.Lambda) for one in module.ancestors(call)):
                return False
            if call in walked or around in projection.machine.visited:
                continue  # Of a function that was followed what was not come to is behind a test that fails.
            if around is None or not isinstance(owner, ast.ClassDef) or owner.bases:
                return False
            if any(around.name in one.calls_by_name for one in modules):
                return False
    return True


def _attributes(function: ast.AST, context: type[ast.expr_context]) -> set[str]:
    """Return the attributes of ``self`` that a method reads or sets."""
    return {
        node.attr
        for node in descend(function)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, context) and last_name(node.value) == "self"
    }


def _is_repeated(projection: Projection, sampler: Event, loop: LoopAround) -> bool:
    """Return whether a sampler made in every turn of a loop is of data from before the loop, with one seed."""
    seed = sampler.argument("seed", 4)
    if seed is not None and not isinstance(seed, Const):
        return False
    options = list(options_of(sampler.argument("dataset", 0) or NONE))
    for option in options:
        made = projection.machine.events.get(option.number) if isinstance(option, (Instance, ExternalObject)) else None
        first = option.number if isinstance(option, Instance) else made.ordinal if made is not None else 0
        if not first or (made is not None and any(around.node is loop.node for around in made.loops)):
            return False
        if isinstance(option, Instance) and _is_made_in(projection, option, loop):
            return False
    return bool(options)


def _is_made_in(projection: Projection, instance: Instance, loop: LoopAround) -> bool:
    """Return whether a loop holds the call that makes an object of the project, as far as the code shows it."""
    name = instance.cls.node.name
    calls = (node for node in loop.module.index.within(loop.node, ast.Call))
    return any(last_name(call.func) == name for call in calls)


def _unread_reader(projection: Projection, loop: LoopAround, given: set[int]) -> str:
    """Say which call in every epoch may tell a sampler its number: of code that was not read, with it in hand.

    It gets the sampler or its loader as an argument, or is a method of an object that got one.
    """
    for event in projection.in_course("call"):
        in_epoch = any(around.node is loop.node for around in event.loops)
        if not in_epoch or event.name.partition(".")[0] in _READ_LIBRARIES:
            continue
        handed = [*event.positional, *event.named.values()]
        made = projection.machine.object(event.receiver) if event.receiver is not None else None
        if made is not None and made.name.partition(".")[0] not in _READ_LIBRARIES:
            handed += [*made.positional, *made.named.values()]
        elif "." not in event.name:
            continue  # A method of something known, or of what holds no sampler.
        options = (one for value in handed for one in options_of(value))
        if any(isinstance(one, ExternalObject) and one.number in given for one in options):
            place = f"{event.module.path.name}:{getattr(event.node, 'lineno', 1)}"
            return f"`{event.name}` at {place} gets the sampler in every epoch, and was not read"
    return ""


def _shuffles(sampler: Event) -> bool:
    if not sampler.complete:
        return False
    shuffle = sampler.argument("shuffle", 3)
    return shuffle is None or constant(shuffle) is True


def _samplers_with_epoch(projection: Projection) -> dict[int, int] | None:
    """Return the samplers that get their epoch, by the ranks that tell it; None when a call fits no one sampler."""
    told: dict[int, int] = {}
    walked: set[ast.AST] = set()
    for event in projection.events:
        if event.kind != "set-epoch":
            continue
        walked.add(event.node)
        if event.receiver is None:
            return None
        if _says_the_same(event):
            continue
        for option in options_of(event.receiver):
            receiver = option.receiver if isinstance(option, BoundMethod) else option
            made = projection.machine.object(receiver)
            if isinstance(receiver, Instance):
                made = projection.machine.events.get(receiver.number)
            if isinstance(receiver, (ExternalObject, Instance)) and made is not None:
                inside = (
                    sampler.ordinal
                    for value in (*made.positional, *made.named.values())
                    for sampler in samplers_of(projection.machine, value)
                )
                sure = bool(event.guards) and not any(guard.guessed for guard in event.guards)
                for number in (receiver.number, *inside):
                    told[number] = told.get(number, 0) | (event.ranks if sure else ALL_RANKS)
            elif constant(receiver) is not None and not isinstance(receiver, Instance):
                return None  # What a method of the project does was followed: it may tell a sampler.
    for module in projection.machine.script.modules:
        for node in module.calls_by_name.get("set_epoch", ()) if "set_epoch" in module.text else ():
            if node in walked or not isinstance(node.func, ast.Attribute):
                continue
            if not _is_ruled_out(projection, module, node):
                return None
    return told


def _is_ruled_out(projection: Projection, module: Module, call: ast.Call) -> bool:
    """Return whether a followed function is given no sampler, and only tells the epoch to one that it is given.

    What is merely behind a call that was not followed to its end is not ruled out.
    """
    around = next((one for one in module.ancestors(call) if isinstance(one, ast.FunctionDef)), None)
    test = next((one.test for one in module.ancestors(call) if isinstance(one, ast.If)), None)
    if around is None or test is None or around not in projection.machine.visited:
        return False
    sampler = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    parameters = {one.arg for one in (*around.args.args, *around.args.kwonlyargs)}
    return sampler in parameters and ast.unparse(test) in (sampler, f"{sampler} is not None")


def _says_the_same(event: Event) -> bool:
    """Return whether every turn of a loop tells the same number, as ``set_epoch(0)`` does."""
    number = event.argument("epoch", 0)
    return number is not None and isinstance(number, Const) and any(not loop.once for loop in event.loops)
