"""Training waits for its data.

What it finds
    A DataLoader that feeds the training of a DDP model on a GPU from files, or through a transformation, without worker
    processes; and one with workers but without pinned memory. A stream of which each rank loads or transforms every
    item and keeps its share, also by a stage of a pipeline. In a live run: steps that wait for their batch for more
    than 10% of their time on half of the ranks or more, on the whole and in three of four quarters; the figures are
    those of the quarter in the middle, so that one long wait does not make them. Where the data of a single rank come
    late, see DDP403.

Why it is bad
    Without workers each batch is read and decoded in the training process, between two steps, while the GPU and,
    through the next collective, all other ranks wait. From memory that is not pinned each batch is copied twice, and
    non_blocking=True has no effect. Where the share of a rank is taken behind the work, more ranks make no batch come
    sooner: each works for all.

Example
    loader = DataLoader(ImageFolder(root, transform), batch_size=64, sampler=sampler)

Remedy
    num_workers=4 or more per rank (cores divided by ranks), persistent_workers=True, and pin_memory=True.

When it is wrong
    From the source: where the data set is small and lies in memory, or loading is a small part of the step. A run
    measures it.

References
    https://docs.pytorch.org/docs/stable/data.html#memory-pinning
    https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ddpdoctor.check import Check, Script, Verdict
from ddpdoctor.finding import Finding, Location, Severity
from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.scopes import Store
from ddpdoctor.source.interpreter.values import (
    NONE,
    ExternalObject,
    Instance,
    SequenceValue,
    Value,
    constant,
    options_of,
    parts_of,
    tags_of,
)
from ddpdoctor.source.libraries.rank_attributes import ACCELERATOR
from ddpdoctor.source.projection import Projection, whole_projection
from ddpdoctor.source.queries.job_kind import depends_on_mode, framework, may_use_cuda, noted
from ddpdoctor.source.queries.training_loops import feedings, is_averaged
from ddpdoctor.source.ranks.data_partitions import gives_turns, takes_every_nth
from ddpdoctor.source.script.module import Module, descend, last_name, made_from
from ddpdoctor.source.script.script import code_of
from ddpdoctor.source.torch_model.recorded_calls import OF_MODELS, READING_FUNCTIONS, READING_METHODS
from ddpdoctor.source.vocabulary import FABRICS

CHECK = Check(
    code="DDP404",
    name="input-bound",
    stands_for="input-bound",
    severity={"source": Severity.ADVICE, "run": Severity.WARNING},
    needs=frozenset({"step_tracks"}),
    subjects=("training-loader",),
    triggers=("DataLoader",),
)

_OF_STREAMS = frozenset({"IterableDataset", "sharding_filter", "split_by_node"})
"""Words without one of which no stream is divided."""


def in_source(script: Script) -> Iterator[Finding]:
    """Report loaders without workers or pinned memory, and streams that are divided behind the work."""
    if any(_OF_STREAMS & module.words for module in script.modules):
        yield from CHECK.suspected(late_splits(whole_projection(script)))
    for loader, has_no_workers in slow_loaders(whole_projection(script)):
        if has_no_workers:
            title = "this DataLoader has no worker processes: batches are loaded between the steps, while the GPU waits"
            remedy = "Give it num_workers (cores over ranks), persistent_workers=True and pin_memory=True."
        else:
            title = "this DataLoader does not pin its batches: each is copied twice on its way to the GPU"
            remedy = "Give it pin_memory=True, and move batches with non_blocking=True."
        yield CHECK.finding(title, remedy=remedy, locations=loader.location)


in_run = CHECK.judged_by("checks.speed.steps_run", "data_wait")


# What makes a GPU wait in every step: loading without workers, and reads of its results.

_LOADING = ("torchvision.datasets.", "torchaudio.datasets.")
# torchvision holds these in memory as a whole, or makes them up: an item costs no file.
_IN_MEMORY = ("MNIST", "CIFAR10", "CIFAR100", "FakeData", "FashionMNIST", "KMNIST", "QMNIST", "EMNIST", "SVHN")


# Names of functions that read an item as a whole, or make what is trained on of it, and packages of such functions.
_WORKING = frozenset({"load", "imread", "read_image", "transform", "tokenizer", "decode"})
_WORKING_PACKAGES = ("torch.nn.functional.", "torchvision.", "torchaudio.", "PIL.")

# Frameworks under which a script that has a loop around a backward writes its steps itself.
_LOOPS_LEFT = frozenset({"", "accelerate", "deepspeed", "lightning", "lightning_fabric"})


def slow_loaders(projection: Projection) -> Iterator[tuple[Event, bool]]:
    """Loaders that feed the training of a DDP model on a GPU without pinned memory, or, if true, without workers."""
    if framework(projection.machine.script) or not trains_on_cuda(projection):
        return
    for feeding in feedings(projection):
        loader = feeding.loader
        dataset = loader.argument("dataset", 0)
        if not loader.complete or dataset is None or not _does_work(dataset):
            continue
        workers = loader.argument("num_workers", 5)
        if workers is None or constant(workers) == 0:
            yield loader, True
            continue
        pinned = loader.argument("pin_memory", 7)
        if (pinned is None or constant(pinned) is False) and not _on_device(dataset):
            yield loader, False


def trains_on_cuda(projection: Projection) -> bool:
    """Return whether ranks certainly work on GPUs: one is chosen or asked for whatever the mode, or wherever DDP is."""
    placed = (event.name for event in projection.in_course("object"))
    if any(name == ACCELERATOR or name in FABRICS for name in placed):
        return True  # They work on GPUs wherever there are some.
    if any(noted(projection, "deepspeed.initialize")):
        return True
    if not may_use_cuda(projection.machine.script):
        return False
    wrapped = [set(wrap.conditions) for wrap in projection.in_course("wrap")] or [set()]
    for event in projection.in_course("device", "call", "wrap"):
        chosen = event.kind == "device" and event.name in {"set_device", "cuda"}
        given = event.argument("device_ids", 1) if event.kind == "wrap" else None
        chosen = chosen or any(isinstance(option, SequenceValue) for option in options_of(given or NONE))
        with_ddp = all(set(event.conditions) <= around for around in wrapped)
        if (chosen or event.name == "cuda") and (with_ddp or not depends_on_mode(event)):
            return True
    return False


def _does_work(dataset: Value) -> bool:
    """Return whether a data set reads or computes something for each item."""
    for option in options_of(dataset):
        if isinstance(option, ExternalObject):
            last = option.name.rpartition(".")[2]
            if not option.name.startswith(_LOADING) or last in _IN_MEMORY:
                return False
        elif isinstance(option, Instance):
            if not _reads_files(option.cls.node):
                return False
        else:
            return False
    return True


def _reads_files(cls: ast.ClassDef) -> bool:
    """Return whether ``__getitem__`` opens, loads or transforms what it returns."""
    for method in cls.body:
        if isinstance(method, ast.FunctionDef) and method.name == "__getitem__":
            for node in descend(method):
                if isinstance(node, ast.Call) and last_name(node.func) in _WORKING | {"open", "read"}:
                    return True
    return False


def is_work(module: Module, call: ast.Call) -> bool:
    """Return whether a call reads, decodes or transforms an item; a line that becomes text is cheap."""
    name = last_name(call.func)
    if name == "decode" and all(isinstance(argument, ast.Constant) for argument in call.args):
        return False
    return name in _WORKING or module.resolve(call.func).startswith(_WORKING_PACKAGES)


def _on_device(dataset: Value) -> bool:
    return any(isinstance(option, Instance) and "cuda" in code_of(option.cls.node) for option in options_of(dataset))


def reads_in_every_step(projection: Projection) -> Iterator[Event]:
    """Reads of a result of the DDP model back from the GPU in every step of training, each once."""
    if not trains_on_cuda(projection) or framework(projection.machine.script) not in _LOOPS_LEFT:
        return
    fed = {feeding.loop.node: feeding.backward for feeding in feedings(projection) if feeding.loop is not None}
    averaged = [one for one in projection.in_course("backward") if one.loops and is_averaged(projection, one)]
    unfed = [one for one in averaged if not any(loop.node in fed for loop in one.loops)]
    loops = {**{one.loops[-1].node: one for one in unfed}, **fed}
    seen: set[ast.AST] = set()
    for event in noted(projection, *READING_METHODS, *READING_FUNCTIONS):
        backward = next((loops[loop.node] for loop in event.loops if loop.node in loops), None)
        if backward is None or event.node in seen or not event.gradients or event.receiver is None:
            continue
        # What rank 0 alone waits for, the others wait for in the next reduction.
        decided = all(constant(one) is not ... for guard in event.guards for one in parts_of(guard.value))
        tests = zip(event.conditions, event.undecided, strict=True)
        beside = [test for text, (_, test) in tests if text not in backward.conditions]
        if (
            decided
            and all(map(_asks_what_it_is, beside))
            and any(kind in OF_MODELS for kind, _ in tags_of(event.receiver))
        ):
            seen.add(event.node)
            yield event


# What a value is, or what it is called: a test of it comes out alike in each step.
_KINDS = frozenset({"isinstance", "issubclass", "hasattr", "callable", "is_tensor", "startswith", "endswith"})


def _asks_what_it_is(test: ast.AST) -> bool:
    if isinstance(test, ast.BoolOp):
        return all(map(_asks_what_it_is, test.values))
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _asks_what_it_is(test.operand)
    if isinstance(test, ast.Compare):
        word = isinstance(test.left, ast.Constant) and isinstance(test.left.value, str)
        return word and len(test.ops) == 1 and isinstance(test.ops[0], (ast.In, ast.NotIn))
    return isinstance(test, ast.Call) and last_name(test.func) in _KINDS


# Streams of which each rank takes its share only after the work for every item is done.

_YIELDS = (ast.Yield, ast.YieldFrom)
_COMPREHENSIONS = (ast.ListComp, ast.GeneratorExp)


def late_splits(projection: Projection) -> Iterator[Verdict]:
    """Yield the late splits in the code of data sets that feed the training of a DDP model, each once."""
    from ddpdoctor.checks.data.workers_source import reached_from

    store, modules = projection.machine.store, projection.machine.script.modules
    datasets = [
        dataset
        for feeding in feedings(projection)
        for dataset in options_of(feeding.loader.argument("dataset", 0) or NONE)
    ]
    found: dict[Verdict, None] = {}
    for dataset in datasets:
        if isinstance(dataset, Instance):
            found |= dict.fromkeys(_Code(reached_from(projection, dataset).places, store).late_splits())
    if datasets:
        places = tuple((module, module.tree) for module in modules)
        found |= dict.fromkeys(_Code(places, store).late_stages())
    yield from found


def _late(split: Location, module: Module, work: ast.AST) -> Verdict:
    place = module.location(work)
    return Verdict(
        sentence="the share of a rank is taken behind the work: each rank does that for all items, and drops the "
        "others'",
        remedy="Take the share of what is cheap, such as `paths[rank::world_size]` or the indices, before the items "
        "are loaded and transformed.",
        locations=(split, place),
        because=(
            f"`{module.excerpt(work)}` is run for each item, before the test whose item it is",
            module.location(work),
        ),
    )


class _Code:
    """The code that a data set runs, or all that was read."""

    def __init__(self, places: Sequence[tuple[Module, ast.AST]], store: Store) -> None:
        self._places = places
        self._store = store
        functions: dict[str, dict[ast.AST, Module]] = {}
        for module, place in places:
            for node in module.index.within(place, ast.FunctionDef):
                functions.setdefault(node.name, {})[node] = module
        self._functions: Mapping[str, list[tuple[Module, ast.AST]]] = {
            name: [(module, node) for node, module in found.items()] for name, found in functions.items()
        }

    def late_splits(self) -> Iterator[Verdict]:
        """Yield the splits by the number of an item behind the work."""
        for module, place in self._places:
            for split, source, before in self._splits(module, place):
                work = next(self._of_each(module, before), None) or next(self._behind(module, source, set()), None)
                if work is not None:
                    yield _late(module.location(split), *work)

    def late_stages(self) -> Iterator[Verdict]:
        """Yield the stages of pipelines that keep a rank's items, behind one that works on each."""
        for module, _ in self._places:
            for split, before in _stages(module):
                for stage in before:
                    work = next(self._of_stage(module, stage), None)
                    if work is not None:
                        yield _late(module.location(split), *work)
                        break

    def _of_stage(self, module: Module, stage: ast.AST) -> Iterator[tuple[Module, ast.AST]]:
        if not isinstance(stage, ast.Call):
            return
        if last_name(stage.func) == "decode":
            yield module, stage
        elif last_name(stage.func) == "map" and stage.args:
            function = stage.args[0]
            yield from self._of_each(module, (function,))
            for home, code in self._functions.get(last_name(function), ()):
                yield from self._of_each(home, (code,))

    def _splits(self, module: Module, place: ast.AST) -> Iterator[tuple[ast.AST, ast.expr, Iterable[ast.AST]]]:
        """Yield each split, what it goes over, and what is done for an item before."""
        for loop in module.index.within(place, ast.For):
            for number, node in enumerate(loop.body):
                if (
                    isinstance(node, ast.If)
                    and gives_turns(self._store, node.test)
                    and _drops(node, loop.body[number:])
                ):
                    yield node, loop.iter, loop.body[:number]
        comprehensions: tuple[ast.GeneratorExp | ast.ListComp, ...] = (
            *module.index.within(place, ast.GeneratorExp),
            *module.index.within(place, ast.ListComp),
        )
        for made in comprehensions:
            for over in made.generators:
                if any(_is_equal(test) and gives_turns(self._store, test) for test in over.ifs):
                    yield made, over.iter, ()
        for call in module.index.within(place, ast.Call):
            if takes_every_nth(self._store, call):
                yield call, call.args[0], ()

    def _behind(self, module: Module, source: ast.expr, seen: set[ast.AST]) -> Iterator[tuple[Module, ast.AST]]:
        """Yield the work for each item that what a loop goes over does."""
        for node in made_from(source, module.body_around(source)):
            if isinstance(node, _COMPREHENSIONS):
                yield from self._of_each(module, (node.elt,))
            if not isinstance(node, ast.Call):
                continue
            for home, function in self._functions.get(last_name(node.func), ()):
                if function in seen:
                    continue
                seen.add(function)
                for loop in descend(function):
                    if isinstance(loop, (ast.For, ast.While)):
                        yield from self._of_each(home, loop.body)
                    if isinstance(loop, ast.For):
                        yield from self._behind(home, loop.iter, seen)
                    elif isinstance(loop, _COMPREHENSIONS):
                        yield from self._of_each(home, (loop.elt,))

    def _of_each(self, module: Module, code: Iterable[ast.AST]) -> Iterator[tuple[Module, ast.AST]]:
        """Yield the calls in some code that work on an item, in functions of the project as well."""
        pending = [(module, node) for node in code]
        seen: set[ast.AST] = set()
        while pending:
            home, place = pending.pop()
            for node in descend(place):
                if not isinstance(node, ast.Call):
                    continue
                if is_work(home, node):
                    yield home, node
                for found in self._functions.get(last_name(node.func), ()):
                    if found[1] not in seen:
                        seen.add(found[1])
                        pending.append(found)


def _stages(module: Module) -> Iterator[tuple[ast.AST, Iterable[ast.AST]]]:
    """Yield each stage of a pipeline that divides what comes to it by rank, and what comes before it."""
    for call in module.calls_by_name.get("sharding_filter", ()):
        yield call, _before(module, call)
    for call in module.calls_by_name.get("compose", ()):
        if any(last_name(argument) == "split_by_node" for argument in call.args):
            yield call, _before(module, call)
    for call in module.calls_by_name.get("DataPipeline", ()):
        for number, argument in enumerate(call.args):
            if last_name(argument) == "split_by_node":
                yield argument, call.args[:number]


def _before(module: Module, call: ast.Call) -> Iterator[ast.AST]:
    """Yield what a method's object is made of, in variables as well, where it stands before the call."""
    end = call.func.end_lineno or 0, call.func.end_col_offset or 0
    for node in made_from(call.func, module.body_around(call)):
        if isinstance(node, ast.Call) and (node.end_lineno or 0, node.end_col_offset or 0) < end:
            yield node


def _drops(test: ast.If, rest: list[ast.stmt]) -> bool:
    """Return whether only the items of a rank are yielded: those of the others are skipped, or nothing else yields."""
    if not _is_equal(test.test):
        return isinstance(test.body[-1], ast.Continue) and not _yields(test.body)
    return _yields(test.body) and not _yields([*test.orelse, *rest[1:]])


def _is_equal(test: ast.expr) -> bool:
    return isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Eq)


def _yields(code: Iterable[ast.AST]) -> bool:
    return any(isinstance(node, _YIELDS) for statement in code for node in descend(statement))
