"""A rank decides from its own data, files or clock whether to take part in a collective.

What it finds
    A condition that each rank decides from something local (its batch, a loss that was not reduced, the clock, files
    on its machine, unseeded random numbers, a number drawn from the store) with a collective, or a forward or backward
    of the DDP model, that only one of its outcomes runs: a skipped batch, early stopping, a time limit, a loop over the
    keys of a loss dict. Or collectives in the order of a set of strings, whatever was made of it in between; or parts
    and buffers of a DDP model that were registered in such an order, because DDP pairs them by position. As advice:
    leaving because its own loss is not finite. In a run: ranks that diverge at lines which each had run before, and
    batches that only some ranks trained on.

Why it is bad
    The ranks agree until the data makes them disagree, hours into the run. Then one skips a collective in which the
    others wait: the job hangs, or averages gradients of different steps from then on.

Example
    for batch in loader:
        if batch["boxes"].numel() == 0:
            continue                        # this rank alone skips backward
        model(batch).backward()

Remedy
    Decide together: all-reduce the condition (MAX for "any rank", MIN for "all ranks") and branch on the result; or run
    the backward on every rank and multiply the loss by 0 where it should not count.

When it is wrong
    If the ranks' data is identical by construction: all read one shared file, or draw the same samples.

References
    https://docs.pytorch.org/docs/stable/notes/ddp.html
    https://github.com/open-mmlab/mmdetection/issues/6495
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import msgspec

from ddpdoctor.check import Check
from ddpdoctor.files import regex
from ddpdoctor.finding import Fact, Finding, Frame, Location, Refuted, Severity
from ddpdoctor.source.events import Branch, Event, Loop, OwnKind, OwnTest, Tree, events_in, same
from ddpdoctor.source.interpreter.values import ALL_RANKS, Instance
from ddpdoctor.source.projection import Projection, whole_projection
from ddpdoctor.source.queries.divergence import mentions, partings
from ddpdoctor.source.queries.files import writes
from ddpdoctor.source.ranks.rank_local_values import agrees_by_name, origin_of, queries_file
from ddpdoctor.source.script.module import Module, descend, last_name, made_from
from ddpdoctor.source.script.script import Script, uses_any
from ddpdoctor.source.torch_model.buffers import parts_of_module
from ddpdoctor.source.torch_model.recorded_calls import FILE_CALLS, FILE_METHODS

if TYPE_CHECKING:
    from ddpdoctor.record.model import RunRecord

CHECK = Check(
    code="DDP302",
    name="data-dependent-divergence",
    stands_for="data-branch",
    severity={"source": Severity.WARNING, "rehearsal": Severity.ERROR, "run": Severity.ERROR},
    needs=frozenset({"ranks", "collectives", "forwards", "passes"}),
    subjects=("collectives",),
    triggers=("distributed", "Distributed", "ccelerat", "horovod", "ightning", "TrainerCallback"),
)
_TOGETHER = (
    "All-reduce or broadcast the condition and branch on the result, so that all ranks take the same path; or "
    "run the collective on every rank and ignore its result where it should not count."
)
_REMEDIES = {
    "raise": "All-reduce the check first, so that all ranks leave together, with a message.",
    "loop": "Iterate over something that is the same on every rank, such as a sorted, fixed list of names.",
    **dict.fromkeys(("files", "polled"), "Let rank 0 look and broadcast the result, then branch on it."),
    "guard": "Let every rank read it, or broadcast it from the rank that did.",
    "store": "Give every rank the same number of pieces, or stop together: all-reduce whether any rank has run out.",
}


def in_source(script: Script) -> Iterator[Finding]:
    """Report conditions of a rank's own that decide over collectives."""
    decisions: list[list[OwnParting]] = []
    for parting in own_partings(whole_projection(script)):
        same = next((found for found in decisions if found[0].is_one_with(parting)), None)
        if same is None:
            decisions.append([parting])
        else:
            same.append(parting)
    for parting, *others in decisions:
        also = [
            Fact(text=f"`{other.condition}` depends on it as well", basis="source", location=other.location)
            for other in others
        ]
        yield CHECK.finding(
            "source",
            _title(parting),
            remedy=_remedy(parting),
            locations=(parting.location, parting.collective_location),
            evidence=(*_evidence(parting), *also),
            severity=Severity.ADVICE if parting.how == "raise" or parting.of_inputs else None,
        )


def _evidence(parting: OwnParting) -> tuple[Fact, ...]:
    asked = f"`{parting.condition}` {'is' if parting.kind == 'order' else 'depends on'} {WORDS[parting.kind]}"
    needed = f"every rank must reach this {parting.collective} together"
    if parting.collective == _WRAP:
        needed = "DDP pairs the parameters and buffers of the ranks by their position in the model"
    elif parting.collective in _TRAININGS:
        needed = f"all ranks have to do the same things in this {parting.collective}"
    first = Fact(text=asked, basis="source", location=parting.location, stack=parting.chain)
    return first, Fact(text=needed, basis="source", location=parting.collective_location)


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report ranks that diverge where they continued alike before, and batches that some ranks passed over."""
    from ddpdoctor.diagnosis.divergence import describe
    from ddpdoctor.diagnosis.divergence.divergence import find_divergence
    from ddpdoctor.diagnosis.divergence_kind import divergence_of, skip_behind
    from ddpdoctor.diagnosis.training.pass_lengths import skipped_batches

    basis = record.job.kind
    divergence = divergence_of(record, CHECK.stands_for)
    if divergence is not None:
        skip = skip_behind(divergence, record)
        title, ranks, places = describe.title(divergence), describe.ranks(divergence), describe.locations(divergence)
        if skip is not None:
            title, ranks = f"{skip.sentence}; then {title}", skip.named
            places = tuple(dict.fromkeys((*skip.locations, *places)))
        facts = describe.facts(divergence, basis)
        yield CHECK.finding(basis, title, remedy=_TOGETHER, locations=places, ranks=ranks, evidence=facts)
    elif find_divergence(record) is None and (skip := next(skipped_batches(record), None)) is not None:
        luck = f"{skip.sentence}, and nothing hung only because other ranks skipped as many"
        yield CHECK.finding(
            basis, luck, remedy=_TOGETHER, locations=skip.locations, ranks=skip.named, severity=Severity.WARNING
        )


def _title(parting: OwnParting) -> str:
    line = f"{parting.collective} at line {parting.collective_location.line}"
    if parting.how == "raise":
        return f"one rank can end the job alone: `{parting.condition}` depends on {WORDS[parting.kind]}"
    if parting.kind == "order":
        return f"{line} pairs different things: `{parting.condition}` is {WORDS[parting.kind]}"
    if parting.how == "loop":
        return f"ranks may run {line} a different number of times: {WORDS[parting.kind]} decides how often"
    own = parting.collective in _TRAININGS
    decides = "tells this rank alone how to go on in" if own else "decides whether this rank runs"
    return f"`{parting.condition}` depends on {WORDS[parting.kind]} and {decides} {line}"


def _remedy(parting: OwnParting) -> str:
    own = _REMEDIES.get(parting.kind) if parting.kind == "guard" else None
    return own or _REMEDIES.get(parting.how) or _REMEDIES.get(parting.kind, _TOGETHER)


# Collectives that ranks call by what their own data is.

WORDS: Mapping[OwnKind, str] = {
    "batch": "the rank's own batch",
    "clock": "the rank's own clock",
    "files": "the rank's own view of the file system",
    "polled": "the names that this rank finds in a directory at that moment",
    "random": "random numbers that the ranks do not share",
    "store": "the number that this rank got from the store",
    "guard": "a number that only some ranks were given",
    "state": "what the rank decided from its own data before",
    "order": "in the order of a set, which differs between processes",
}
"""What a condition asks, for titles."""
# The loss of one rank may be NaN where those of the others are not: it raises there alone.
_ASKS_FINITE = regex(r"isnan|isfinite|isinf|is_nan|is_finite|nan_")


class OwnParting(msgspec.Struct, frozen=True, kw_only=True):
    """A condition of a rank's own that decides over collectives."""

    how: Literal["branch", "loop", "raise"]
    """It chooses an arm, bounds a loop, or ends the rank."""
    kind: OwnKind
    condition: str
    """Source of the condition."""
    location: Location
    """The condition, or what the loop goes over."""
    chain: tuple[Frame, ...]
    collective: str
    """The first collective that only one of the outcomes runs."""
    collective_location: Location
    leaves: bool
    """An outcome leaves the turn, the loop or the function."""
    asked: frozenset[str]
    """The variables and attributes in the condition."""
    loop: ast.AST | None
    """The outermost loop of its function around it."""
    of_inputs: bool = False
    """It asks for files that nothing in the job makes: ranks see the same unless a disk is missing."""

    def is_one_with(self, other: OwnParting) -> bool:
        """Return whether another condition of the same function asks the same variable: one decision to agree on."""
        here, there = self.chain[0], other.chain[0]
        alike = (self.how, self.kind, self.of_inputs) == (other.how, other.kind, other.of_inputs)
        near = (here.file, here.function, self.loop) == (there.file, there.function, other.loop)
        return alike and near and bool(self.asked & other.asked)


def own_partings(projection: Projection) -> Iterator[OwnParting]:
    """Every such condition once, except where a rank test already keeps the same collective from some ranks."""
    made = _made_files(projection)
    told = {(parting.location.file, parting.location.line) for parting in partings(projection)}
    seen: set[ast.AST] = set()
    in_order = list(_in_set_order(projection, seen))
    for walk in projection.walks:
        trees: list[Tree] = []
        for rank, tree in enumerate(walk.trees):
            if not walk.uncertain and not walk.raised >> rank & 1 and not any(same(tree, other) for other in trees):
                trees.append(tree)
        for test, how, event, leaves in (found for tree in trees for found in _in_tree(tree, None, set())):
            place = event.location
            if test.node not in seen and (place.file, place.line) not in told:
                seen.add(test.node)
                found = _described(test, how, event, leaves)
                inputs = test.kind == "files" and not _is_made(made, test, event)
                yield msgspec.structs.replace(found, of_inputs=inputs)
    yield from _raises(projection, seen)
    yield from _trainers_stopped(projection)
    yield from in_order


def _in_set_order(projection: Projection, seen: set[ast.AST]) -> Iterator[OwnParting]:
    """Yield what follows the order of a set; what a loop over it asks of its items is decided by that order."""
    for event, module, order in (*collectives_in_set_order(projection), *models_in_set_order(projection)):
        if order in seen:
            continue
        loop = module.parents.get(order)
        if isinstance(loop, ast.For):
            names = set(targets_of(loop))
            asked = (one.test for one in descend(loop) if isinstance(one, (ast.If, ast.IfExp)))
            seen.update(test for test in asked if mentions(test, names))
        seen.add(order)
        yield _described(OwnTest(order, module, "order", event.chain), "loop", event, False)


_Made = tuple[Event, frozenset[str]]
"""A call that makes a file or a directory, and the words by which it names it."""


def _made_files(projection: Projection) -> list[_Made]:
    """Return what the job makes: by variables, attributes and texts in the paths."""
    makers = {*FILE_CALLS, *FILE_METHODS, "torch.save", "extractall"}
    found = [(use.event, frozenset(_words(use.node))) for use in writes(projection) if use.node is not None]
    for event in projection.events:
        if event.kind in ("call", "save", "training") and event.name in makers and isinstance(event.node, ast.Call):
            nodes = [*event.node.args, *([event.node.func] if event.name in FILE_METHODS else [])]
            found.append((event, frozenset(word for node in nodes for word in _words(node))))
    return found


def _is_made(made: list[_Made], test: OwnTest, decided: Event) -> bool:
    """Return whether a condition speaks of something that the job may have made by then: before, or in a turn
    before.
    """
    words = set(_words(test.node))
    body = test.module.body_around(test.node)
    words |= {word for node in made_from(test.node, body) for word in _words(node)}
    loops = {loop.node for loop in decided.loops}
    return any(
        words & named
        and _may_be_one(words, event, named)
        and (event.ordinal < decided.ordinal or any(loop.node in loops for loop in event.loops))
        for event, named in made
    )


def _may_be_one(words: set[str], made: Event, named: frozenset[str]) -> bool:
    """Return whether what a call makes may be what is asked for: a file of the same ending, where that is said."""
    asked, given = _endings(words), _endings(named)
    if not asked:
        return True
    return made.name.rpartition(".")[2] not in _DIRECTORIES and (not given or bool(asked & given))


def _endings(words: Iterable[str]) -> set[str]:
    return {match[0] for word in words if (match := _ENDING.search(word)) is not None}


def _words(node: ast.AST) -> Iterator[str]:
    for inner in descend(node):
        if isinstance(inner, ast.Attribute):
            if inner.attr not in _PLAIN_WORDS:
                yield inner.attr
        elif isinstance(inner, ast.Name):
            if inner.id not in _PLAIN_WORDS:
                yield inner.id
        elif isinstance(inner, ast.Constant) and isinstance(inner.value, str) and len(inner.value) > 3:
            yield inner.value


_ENDING = regex(r"\.[A-Za-z]\w{0,11}$")
_DIRECTORIES = frozenset({"mkdir", "makedirs"})
# What conditions and paths have in common whatever they are about.
_PLAIN_WORDS = frozenset(
    {"os", "path", "join", "self", "args", "exists", "isfile", "isdir", "is_file", "is_dir", "str", "Path", "pathlib"}
    | {"cfg", "config", "opt", "hparams", "params", "format", "epoch", "step", "mkdir", "dirname", "basename"}
)
_WRAP = "DistributedDataParallel"
_TRAININGS = frozenset({"Trainer.fit", "Trainer.train"})
# Attributes by which callbacks of Lightning and of the Hugging Face Trainer tell it what to do next.
_ORDERS = regex(r"should_(stop|training_stop|epoch_stop|save|evaluate)$")
_Found = tuple[OwnTest, Literal["branch", "loop"], Event, bool]


def _in_tree(tree: Tree, around: Loop | None, seen: set[int]) -> Iterator[_Found]:
    """Yield what stands in a tree; parts that alternatives share are looked at once."""
    for item in tree:
        if id(item) in seen:
            continue
        if isinstance(item, (Loop, Branch)):
            seen.add(id(item))
        if isinstance(item, Loop):
            first = next(events_in(item.body), None)
            if item.test is not None and first is not None:
                yield item.test, "branch" if isinstance(item.node, ast.While) else "loop", first, False
            yield from _in_tree(item.body, item, seen)
        elif isinstance(item, Branch):
            if item.test is not None:
                event = _difference(item.arms) or _first_in(around)
                if event is not None:
                    yield item.test, "branch", event, item.leaves
            for arm in item.arms:
                yield from _in_tree(arm, around, seen)


def _difference(arms: tuple[Tree, ...]) -> Event | None:
    """Return the first collective that one arm runs and another does not."""
    for one, other in pairwise(arms):
        position = 0
        while position < min(len(one), len(other)) and same((one[position],), (other[position],)):
            position += 1
        for rest in (one[position:], other[position:]):
            event = next(events_in(rest), None)
            if event is not None:
                return event
    return None


def _first_in(loop: Loop | None) -> Event | None:
    """Return what a rank that leaves a loop misses in the turns that the others still make."""
    return None if loop is None else next(events_in(loop.body), None)


def _raises(projection: Projection, seen: set[ast.AST]) -> Iterator[OwnParting]:
    """Exits with an error because a loss is not finite, in a job whose ranks average gradients."""
    met = [
        event
        for walk in projection.walks
        for event in events_in(walk.trees[0])
        if event.kind in ("backward", "collective")
    ]
    trained = next((event for event in met if event.kind == "backward"), met[0] if met else None)
    for test, _ in projection.machine.own_raises:
        if trained is None or test.node in seen or test.kind != "batch":
            continue
        if _ASKS_FINITE.search(test.module.excerpt(test.node, 1_000)):
            seen.add(test.node)
            yield _described(test, "raise", trained, True)


def _trainers_stopped(projection: Projection) -> Iterator[OwnParting]:
    """Callbacks in which a rank asks its own clock or disk whether the Trainer stops, saves or evaluates."""
    trained = next((event for event in projection.of_kind("collective") if event.name in _TRAININGS), None)
    for module in projection.machine.script.modules if trained is not None else ():
        for test in module.index.of(ast.If):
            body = module.body_around(test)
            bases = [base for around in module.ancestors(body) for base in getattr(around, "bases", ())]
            if not any(last_name(base).endswith("Callback") for base in bases) or not any(map(_orders, test.body)):
                continue
            asked = [one for one in made_from(test.test, body) if isinstance(one, ast.Call)]
            kinds = [kind for one in asked for kind, _ in origin_of(module.resolve(one.func))]
            kinds += ["files" for one in asked if queries_file(last_name(one.func))]
            agreed = any(agrees_by_name(last_name(one.func)) for one in descend(body) if isinstance(one, ast.Call))
            kind: OwnKind | None = "clock" if "clock" in kinds else "files" if "files" in kinds else None
            if kind is not None and trained is not None and not agreed:
                frame = Frame(str(module.path), test.lineno, getattr(body, "name", ""))
                yield _described(OwnTest(test.test, module, kind, (frame,)), "branch", trained, True)


def _orders(statement: ast.stmt) -> bool:
    """Return whether a statement tells a Trainer to do something that all of its ranks do together."""
    return isinstance(statement, ast.Assign) and any(
        isinstance(target, ast.Attribute) and _ORDERS.match(target.attr) for target in statement.targets
    )


def _described(test: OwnTest, how: Literal["branch", "loop", "raise"], event: Event, leaves: bool) -> OwnParting:
    return OwnParting(
        how=how,
        kind=test.kind,
        condition=test.module.excerpt(test.node),
        location=test.location,
        chain=test.chain,
        collective=_WRAP if event.kind == "wrap" else event.name,
        collective_location=event.location,
        leaves=leaves,
        asked=frozenset(_words(test.node)),
        loop=_outermost_loop(test),
    )


def _outermost_loop(test: OwnTest) -> ast.AST | None:
    found: ast.AST | None = None
    for around in test.module.ancestors(test.node):
        if isinstance(around, (ast.FunctionDef, ast.AsyncFunctionDef)):
            break
        if isinstance(around, (ast.For, ast.While)):
            found = around
    return found


_SETS = frozenset({"set", "frozenset"})
# Methods that give tensors, which are hashed by their addresses.
_TENSORS = frozenset({"parameters", "buffers"})
# Methods of a set that give another set, whose order is as little fixed.
_OF_SETS = frozenset({"union", "intersection", "difference", "symmetric_difference"})
# Functions and methods that give what they are given, or a view of it, in the same order.
_KEEPS_ORDER = frozenset({"list", "tuple", "enumerate", "iter", "reversed", "dict", "keys", "values", "items", "copy"})
# Functions that put tensors or numbers one after another.
_PACKS = frozenset({"stack", "cat", "concatenate", "tensor", "as_tensor", "array", "FloatTensor", "Tensor"})
_FIXES_ORDER = "PYTHONHASHSEED"
# Methods and functions that give a module a part, a parameter or a buffer by its name.
_REGISTERS = frozenset({"register_buffer", "register_parameter", "register_module", "add_module", "setattr"})
# Modules that hold others by their names, in the order of the names.
_KEYED = frozenset({"ModuleDict", "ParameterDict"})
# Variables, parameters and functions between a set and what is made of it.
_DEEPEST = 8
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_NAMED = (ast.Name, ast.Attribute)


_InOrder = tuple[Event, Module, ast.expr]
"""What follows the order of a set, and that order with its module."""


def collectives_in_set_order(projection: Projection) -> Iterator[_InOrder]:
    """Yield collectives on what a loop over a set names, or on what was put together in its order; with that order."""
    if uses_any(projection.machine.script, (_FIXES_ORDER,)):
        return
    seen: set[ast.AST] = set()
    for event in projection.of_kind("collective"):
        if event.node in seen or event.ranks != ALL_RANKS or not isinstance(event.node, ast.Call):
            continue
        if not event.loops and not event.node.args:
            continue
        loop = event.loops[-1].node if event.loops else None
        order = _order_of_loop(event, event.node, loop) if isinstance(loop, ast.For) else None
        order = order or _order_of_parts(event.module, event.node)
        if order is not None:
            seen.add(event.node)
            yield event, event.module, order


def models_in_set_order(projection: Projection) -> Iterator[_InOrder]:
    """Yield wraps of models whose parts or buffers were registered in a set's order: DDP pairs them by position."""
    script = projection.machine.script
    if uses_any(script, (_FIXES_ORDER,)):
        return
    for wrap in projection.of_kind("wrap"):
        wrapped = wrap.argument("module", 0)
        parts = () if wrapped is None else parts_of_module(projection.machine, wrapped, registered=True)
        for cls in dict.fromkeys(part.cls for part in parts if isinstance(part, Instance)):
            module = script.module(cls.module)
            for node in descend(cls.node) if module is not None else ():
                order = _order_of_registration(module, node) if module is not None else None
                if module is not None and order is not None and _has_no_order(module, order):
                    yield wrap, module, order


def _order_of_registration(module: Module, node: ast.AST) -> ast.expr | None:
    """Return what a loop goes over that registers something in each turn, or a dict of modules is made of."""
    if isinstance(node, ast.For):
        names = targets_of(node)
        registers = any(
            (isinstance(one, ast.Call) and last_name(one.func) in _REGISTERS and mentions(one, names))
            or (isinstance(one, ast.Assign) and any(_is_part(module, target, names) for target in one.targets))
            for one in descend(node)
        )
        return node.iter if registers else None
    if isinstance(node, ast.Call) and last_name(node.func) in _KEYED and node.args:
        items = node.args[0]
        return items.generators[0].iter if isinstance(items, ast.DictComp) else items
    return None


def _is_part(module: Module, target: ast.expr, names: list[str]) -> bool:
    if not isinstance(target, ast.Subscript) or not isinstance(target.value, _NAMED) or not mentions(target, names):
        return False
    return any(isinstance(one, ast.Call) and last_name(one.func) in _KEYED for one in _given(module, target.value))


def targets_of(loop: ast.For) -> list[str]:
    """Return the variables that a loop gives its items to."""
    return [node.id for node in descend(loop.target) if isinstance(node, ast.Name)]


def _order_of_loop(event: Event, call: ast.Call, loop: ast.For) -> ast.expr | None:
    """Return the set that a loop goes over, whose items decide what is handed to a collective, or whether it runs."""
    names, inside = targets_of(loop), ast.Module(loop.body, [])
    parts = [*call.args, *(test for module, test in event.undecided if module is event.module)]
    by_item = any(mentions(part, names) for part in parts) or any(
        isinstance(node, ast.Name) and node.id in names for part in call.args for node in made_from(part, inside)
    )
    return loop.iter if by_item and _has_no_order(event.module, loop.iter) else None


def _order_of_parts(module: Module, call: ast.Call) -> ast.expr | None:
    """Return the set in whose order the tensor was put together that a collective is given."""
    body = module.body_around(call)
    for part in call.args[:1]:
        packed = _value_of(module, part, body)
        if isinstance(packed, ast.Call) and last_name(packed.func) in _PACKS and packed.args:
            items = packed.args[0]
            if isinstance(items, (ast.ListComp, ast.GeneratorExp)) and _has_no_order(module, items):
                return items.generators[0].iter
            if isinstance(items, ast.Call) and _has_no_order(module, items):
                return items
    return None


def _value_of(module: Module, node: ast.expr, body: ast.AST) -> ast.expr:
    """Return what a variable is set to, when a function sets it only once; of anything else the expression itself."""
    if not isinstance(node, ast.Name):
        return node
    given = [one.value for one in descend(body) if isinstance(one, ast.Assign) and _assigns(one, node.id)]
    return given[0] if len(given) == 1 else node


def _has_no_order(module: Module, node: ast.expr, depth: int = 0) -> bool:
    """Return whether an expression is a set of several texts or of tensors, or goes through one from its beginning."""
    if depth > _DEEPEST:
        return False
    if isinstance(node, (ast.Name, ast.Attribute)):
        given = list(_given(module, node))
        return bool(given) and all(_has_no_order(module, value, depth + 1) for value in given)
    if isinstance(node, ast.Set):
        return _are_texts(node.elts)
    if isinstance(node, (ast.ListComp, ast.GeneratorExp, ast.DictComp)):
        return len(node.generators) == 1 and _has_no_order(module, node.generators[0].iter, depth + 1)
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitAnd, ast.BitOr, ast.BitXor, ast.Sub)):
        return any(_is_set(module, side, depth + 1) for side in (node.left, node.right))
    return isinstance(node, ast.Call) and _call_has_no_order(module, node, depth)


def _call_has_no_order(module: Module, node: ast.Call, depth: int) -> bool:
    last = last_name(node.func)
    owner = node.func.value if isinstance(node.func, ast.Attribute) else None
    if owner is None and last in _SETS and len(node.args) == 1:
        inner = next(_given(module, node.args[0]), None) if isinstance(node.args[0], _NAMED) else node.args[0]
        if isinstance(inner, (ast.List, ast.Tuple, ast.Set)):
            return _are_texts(inner.elts)
        return isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute) and inner.func.attr in _TENSORS
    if owner is not None and last in _OF_SETS:
        return _is_set(module, owner, depth + 1)
    if last in _KEEPS_ORDER:
        source = owner if owner is not None else node.args[0] if node.args else None
        return source is not None and _has_no_order(module, source, depth + 1)
    results = [
        one.value for function in _called(module, node) for one in descend(function) if isinstance(one, ast.Return)
    ]
    return bool(results) and all(one is not None and _has_no_order(module, one, depth + 1) for one in results)


def _is_set(module: Module, node: ast.expr, depth: int) -> bool:
    """Return whether an operand is itself a set without an order: arithmetic of numbers is written the same way."""
    if isinstance(node, (ast.Name, ast.Attribute)):
        given = list(_given(module, node))
        return bool(given) and depth <= _DEEPEST and all(_is_set(module, value, depth + 1) for value in given)
    is_set = isinstance(node, (ast.Set, ast.BinOp)) or (isinstance(node, ast.Call) and last_name(node.func) in _SETS)
    return is_set and _has_no_order(module, node, depth)


def _given(module: Module, node: ast.Name | ast.Attribute) -> Iterator[ast.expr]:
    """Yield what a variable or attribute is set to; of a parameter, what the calls of its function give."""
    wanted, body = ast.unparse(node), module.body_around(node)
    here = body if isinstance(node, ast.Name) else module.tree
    given = [one.value for one in descend(here) if isinstance(one, ast.Assign) and _assigns(one, wanted)]
    if given or not isinstance(node, ast.Name):
        yield from given
    elif isinstance(body, _FUNCTIONS) and node.id in [one.arg for one in body.args.args]:
        yield from _arguments(module, body, node.id)
    elif body is not module.tree:
        top = (one for one in module.tree.body if isinstance(one, ast.Assign) and _assigns(one, wanted))
        yield from (one.value for one in top)


def _arguments(module: Module, function: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> Iterator[ast.expr]:
    names = [one.arg for one in function.args.args]
    position = names.index(name) - (names[0] == "self")
    for call in module.index.of(ast.Call):
        if last_name(call.func) == function.name and function in _called(module, call):
            named = [word.value for word in call.keywords if word.arg == name]
            yield from named or call.args[position : position + 1]


def _called(module: Module, node: ast.Call) -> list[ast.FunctionDef]:
    """Return the function of the module that a call runs by its name; of a module of torch, its ``forward``."""
    found = [one for one in module.index.of(ast.FunctionDef) if one.name == last_name(node.func)]
    if found or not isinstance(node.func, ast.Name):
        return found if len(found) == 1 else []
    made = _value_of(module, node.func, module.body_around(node))
    names = {last_name(one.func) for one in descend(made) if isinstance(one, ast.Call)}
    classes = [one for one in module.index.of(ast.ClassDef) if one.name in names]
    inside = [one for cls in classes for one in cls.body if isinstance(one, ast.FunctionDef) and one.name == "forward"]
    return inside if len(inside) == 1 else []


def _assigns(statement: ast.Assign, name: str) -> bool:
    return [ast.unparse(target) for target in statement.targets] == [name]


def _are_texts(elements: list[ast.expr]) -> bool:
    """Return whether several different texts are written out: numbers have the same order in every process."""
    texts = {element.value for element in elements if isinstance(element, ast.Constant)}
    return len(texts) > 1 and all(isinstance(text, str) for text in texts) and len(elements) >= len(texts)
