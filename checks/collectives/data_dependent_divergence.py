"""A rank decides from its own data, files or clock whether to take part in a collective.

What it finds
    A condition that each rank decides from something local (its batch, a loss that was not reduced, the clock, files on
    its machine, unseeded random numbers, a number drawn from the store), or from its number and a counter, so that it
    holds in another number of turns on each rank, with a collective, or a forward or backward of the DDP model, that
    only one of its outcomes runs: a skipped batch, early stopping, a time limit, a loop over the keys of a loss dict,
    or values that Lightning logs with sync_dist by such keys. Or collectives in the order of a set of strings, whatever
    was made of it in between; or parts and buffers of a DDP model that were registered, or are joined, in such an
    order, because DDP pairs them by position. As advice: leaving because its own loss is not finite. In a run: ranks
    that diverge at lines which each had run before, batches that only some ranks trained on, and models that the ranks
    built in different orders.

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

from ddpdoctor.check import Check, RunRecord, Script
from ddpdoctor.files import regex
from ddpdoctor.finding import Fact, Finding, Frame, Refuted, Severity
from ddpdoctor.source.events import Branch, Event, Loop, OwnKind, OwnTest, Tree, events_in, same
from ddpdoctor.source.libraries.lightning import OF_ALL_RANKS, keys_logged
from ddpdoctor.source.projection import Projection, whole_projection
from ddpdoctor.source.queries.divergence import function_around, mentions, nodes_of, partings
from ddpdoctor.source.queries.files import writes
from ddpdoctor.source.ranks.rank_local_values import FILE_QUERIES, agrees_by_name, origin_of
from ddpdoctor.source.script.module import Module, descend, last_name, made_from
from ddpdoctor.source.script.script import makes_sets
from ddpdoctor.source.torch_model.recorded_calls import FILE_CALLS, FILE_METHODS

if TYPE_CHECKING:
    from ddpdoctor.source.queries.origins import Origins

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
_LOG_ALL = "Log the same keys on every rank: all of a fixed list, with a sum and a count of 0 where the batch has none."
_SKIP_TOGETHER = "Let the ranks leave a batch out together (all-reduce the test), or train on it with its loss times 0."
_REMEDIES = {
    "raise": "All-reduce the check first, so that all ranks leave together, with a message.",
    "loop": "Iterate over something that is the same on every rank, such as a sorted, fixed list of names.",
    **dict.fromkeys(("files", "polled"), "Let rank 0 look and broadcast the result, then branch on it."),
    "turns": "Take the rank out of the condition, so that all ranks run it in the same turns.",
    "reduced": "Give the result to all ranks: dist.all_reduce instead of dist.reduce.",
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
            Fact(text=f"`{other.condition}` depends on it as well", basis="source", location=other.test.location)
            for other in others
        ]
        yield CHECK.finding(
            _title(parting),
            remedy=_remedy(parting),
            locations=(parting.test.location, parting.event.location),
            evidence=(*_evidence(parting), *also),
            severity=Severity.ADVICE if parting.how == "raise" or parting.of_inputs else None,
        )


def _evidence(parting: OwnParting) -> tuple[Fact, ...]:
    asked = f"`{parting.condition}` {'is' if parting.test.kind == 'order' else 'depends on'} {WORDS[parting.test.kind]}"
    needed = f"every rank must reach this {parting.collective} together"
    if parting.collective == _WRAP and parting.test.kind == "order":
        needed = "DDP pairs the parameters and buffers of the ranks by their position in the model"
    elif parting.how == "callback":
        needed = f"all ranks have to do the same things in this {parting.collective}"
    first = Fact(text=asked, basis="source", location=parting.test.location, stack=parting.test.chain)
    return first, Fact(text=needed, basis="source", location=parting.event.location)


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
        yield CHECK.finding(title, basis=basis, remedy=_TOGETHER, locations=places, ranks=ranks, evidence=facts)
    elif find_divergence(record) is None and (skip := next(skipped_batches(record), None)) is not None:
        luck = f"{skip.sentence}, and nothing hung only because other ranks skipped as many"
        yield CHECK.finding(
            luck, basis=basis, remedy=_TOGETHER, locations=skip.locations, ranks=skip.named, severity=Severity.WARNING
        )
    yield from _models_apart(record)


def _models_apart(record: RunRecord) -> Iterator[Finding]:
    """Report models that the ranks built in different orders: DDP compares the shapes of their parameters alone."""
    from ddpdoctor.diagnosis.training.replicas import in_other_orders
    from ddpdoctor.diagnosis.wording import site_location

    for wraps, name, texts in in_other_orders(record):
        low = min(wraps)
        other = next(rank for rank, listed in texts.items() if listed != texts[low])
        place = next(n for n, pair in enumerate(zip(texts[low], texts[other], strict=True)) if len(set(pair)) > 1)
        what = "the parameters" if name == "parameters" else f"`{name}`"
        one, another = texts[low][place], texts[other][place]
        yield CHECK.finding(
            f"ranks {low} and {other} have {what} of {wraps[low].module_class or 'the model'} in different orders, and "
            "DDP pairs parameters by their place",
            basis=record.job.kind,
            remedy=_REMEDIES["loop"],
            locations=site_location(record.site(wraps[low].site)),
            ranks=(low, other),
            because=(f"number {place} is `{one}` on rank {low}, `{another}` on rank {other}", None),
            severity=None if name == "parameters" else Severity.WARNING,
        )


def _title(parting: OwnParting) -> str:
    line = f"{parting.collective} at line {parting.event.location.line}"
    if parting.how == "raise":
        return f"one rank can end the job alone: `{parting.condition}` depends on {WORDS[parting.test.kind]}"
    if parting.test.kind == "order":
        return f"{line} pairs different things: `{parting.condition}` is {WORDS[parting.test.kind]}"
    if _logs_own_keys(parting):
        return f"ranks may log other keys in {line}, by {WORDS[parting.test.kind]}"
    if parting.how == "loop":
        return f"ranks may run {line} a different number of times, by {WORDS[parting.test.kind]}"
    decides = "tells this rank alone how to go on in" if parting.how == "callback" else "decides whether this rank runs"
    return f"`{parting.condition}` depends on {WORDS[parting.test.kind]} and {decides} {line}"


def _logs_own_keys(parting: OwnParting) -> bool:
    return parting.how == "loop" and parting.test.kind != "order" and parting.collective.endswith(OF_ALL_RANKS)


def _remedy(parting: OwnParting) -> str:
    own = _REMEDIES.get(parting.test.kind) if parting.test.kind == "guard" else None
    if _logs_own_keys(parting):
        return _LOG_ALL
    if parting.how == "loop" and parting.test.kind == "batch" and "backward" in parting.collective:
        return _SKIP_TOGETHER
    return own or _REMEDIES.get(parting.how) or _REMEDIES.get(parting.test.kind, _TOGETHER)


WORDS: Mapping[OwnKind, str] = {
    "batch": "the rank's own batch",
    "clock": "the rank's own clock",
    "files": "the rank's own view of the file system",
    "polled": "the names that this rank finds in a directory at that moment",
    "random": "random numbers that the ranks do not share",
    "store": "the number that this rank got from the store",
    "guard": "a number that only some ranks were given",
    "turns": "the number of the rank",
    "reduced": "a result of dist.reduce, which one rank alone gets",
    "state": "a value that the rank took from its own data before",
    "order": "in the order of a set, which differs between processes",
}
"""What a condition asks, for titles."""
# The loss of one rank may be NaN where those of the others are not: it raises there alone.
_ASKS_FINITE = regex(r"isnan|isfinite|isinf|is_nan|is_finite|nan_")


class OwnParting(msgspec.Struct, frozen=True, eq=False):
    """A condition of a rank's own that decides over collectives."""

    how: Literal["branch", "loop", "raise", "callback"]
    """It chooses an arm, bounds a loop, ends the rank, or has a callback tell a Trainer what to do next."""
    test: OwnTest
    """The condition, or what the loop goes over."""
    event: Event
    """The first collective that only one of the outcomes runs."""
    of_inputs: bool = False
    """It asks for files that nothing in the job makes: ranks see the same unless a disk is missing."""

    @property
    def condition(self) -> str:
        """Source of the condition."""
        return self.test.module.excerpt(self.test.node)

    @property
    def collective(self) -> str:
        """What the collective is called."""
        return _WRAP if self.event.kind == "wrap" else self.event.name

    def is_one_with(self, other: OwnParting) -> bool:
        """Return whether another condition of the same function asks the same variable: one decision to agree on."""
        here, there = self.test.chain[0], other.test.chain[0]
        alike = (self.how, self.test.kind, self.of_inputs) == (other.how, other.test.kind, other.of_inputs)
        loops = (_outermost_loop(one.test) for one in (self, other))
        near = (here.file, here.function, next(loops)) == (there.file, there.function, next(loops))
        return alike and near and not set(_words(self.test.node)).isdisjoint(_words(other.test.node))


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
        for test, how, event in (found for tree in trees for found in _in_tree(tree, None, set())):
            place = event.location
            if test.node not in seen and (place.file, place.line) not in told:
                seen.add(test.node)
                inputs = test.kind == "files" and not _is_made(made, test, event)
                yield OwnParting(how, test, event, inputs)
    yield from _keys_of_batch(projection, seen)
    yield from _raises(projection, seen)
    yield from _trainers_stopped(projection)
    yield from in_order


def _keys_of_batch(projection: Projection, seen: set[ast.AST]) -> Iterator[OwnParting]:
    """Yield keys made of what a batch holds under which Lightning reduces a value: each rank pairs another one."""
    logs = [event for event in projection.of_kind("collective") if event.name.endswith(OF_ALL_RANKS)]
    if not logs:
        return
    from ddpdoctor.source.queries.origins import Origins

    origins = Origins(projection.machine.script.modules)
    for event in logs:
        for key in keys_logged(event.node) if isinstance(event.node, ast.Call) else ():
            if key not in seen and not isinstance(key, ast.Constant) and _is_in_batch(origins, event.module, key):
                seen.add(key)
                yield OwnParting("loop", OwnTest(key, event.module, "batch", event.chain), event)


# What is alike on every rank of batches that hold other things: their keys, and mostly their sizes.
_OF_FORM = frozenset({"keys", "items", "len", "list", "iter", "next", "size", "shape", "enumerate", "type", "dtype"})


def _is_in_batch(origins: Origins, module: Module, node: ast.expr, depth: int = 4) -> bool:
    """Return whether an expression is read from the batch of a step, and not from what a loop goes over."""
    found = False
    inside = list(descend(node))
    if not depth or not _OF_FORM.isdisjoint(map(last_name, inside)):
        return False
    for name in (one for one in inside if isinstance(one, ast.Name)):
        function = function_around(module, name)
        parameters = [one.arg for one in function.args.args] if isinstance(function, ast.FunctionDef) else []
        if isinstance(function, ast.FunctionDef) and function.name.endswith("_step") and name.id in parameters[1:2]:
            found = True
            continue
        bound = origins.bindings(module, name)
        unpacked = [one.value for one in nodes_of(function) if isinstance(one, ast.Assign) and _unpacks(one, name.id)]
        given = [*(bound or ()), *(("value", module, value) for value in unpacked)]
        if any(how != "value" for how, _, _ in given):
            return False
        found = found or any(_is_in_batch(origins, home, value, depth - 1) for _, home, value in given)
    return found


def _unpacks(assigned: ast.Assign, name: str) -> bool:
    several = isinstance(assigned.value, ast.Tuple)
    targets = (target for target in assigned.targets if isinstance(target, ast.Tuple) and not several)
    return any(last_name(one) == name for target in targets for one in target.elts)


def _in_set_order(projection: Projection, seen: set[ast.AST]) -> Iterator[OwnParting]:
    """Yield what follows the order of a set; what a loop over it asks of its items is decided by that order."""
    if not makes_sets(projection.machine.script):
        return
    from ddpdoctor.checks.collectives.set_order_source import collectives_in_set_order, models_in_set_order, targets_of

    for event, module, order in (*collectives_in_set_order(projection), *models_in_set_order(projection)):
        if order in seen:
            continue
        loop = module.parents.get(order)
        if isinstance(loop, ast.For):
            names = set(targets_of(loop))
            asked = (one.test for one in descend(loop) if isinstance(one, (ast.If, ast.IfExp)))
            seen.update(test for test in asked if mentions(test, names))
        seen.add(order)
        yield OwnParting("loop", OwnTest(order, module, "order", event.chain), event)


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
    """Return whether a condition speaks of something that the job may have made before, or in a turn before."""
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
_Found = tuple[OwnTest, Literal["branch", "loop"], Event]


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
                yield item.test, "branch" if isinstance(item.node, ast.While) else "loop", first
            yield from _in_tree(item.body, item, seen)
        elif isinstance(item, Branch):
            if item.test is not None:
                event = _difference(item.arms) or _first_in(around)
                if event is not None:
                    yield item.test, "branch", event
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
            yield OwnParting("raise", test, trained)


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
            kinds += ["files" for one in asked if last_name(one.func) in FILE_QUERIES]
            called = {last_name(one.func) for one in descend(body) if isinstance(one, ast.Call)}
            agreed = called & projection.machine.mentions.synchronising or any(map(agrees_by_name, called))
            kind: OwnKind | None = "clock" if "clock" in kinds else "files" if "files" in kinds else None
            if kind is not None and trained is not None and not agreed:
                frame = Frame(str(module.path), test.lineno, getattr(body, "name", ""))
                yield OwnParting("callback", OwnTest(test.test, module, kind, (frame,)), trained)


def _orders(statement: ast.stmt) -> bool:
    """Return whether a statement tells a Trainer to do something that all of its ranks do together."""
    return isinstance(statement, ast.Assign) and any(
        isinstance(target, ast.Attribute) and _ORDERS.match(target.attr) for target in statement.targets
    )


def _outermost_loop(test: OwnTest) -> ast.AST | None:
    found: ast.AST | None = None
    for around in test.module.ancestors(test.node):
        if isinstance(around, (ast.FunctionDef, ast.AsyncFunctionDef)):
            break
        if isinstance(around, (ast.For, ast.While)):
            found = around
    return found
