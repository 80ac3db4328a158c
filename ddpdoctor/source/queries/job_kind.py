"""What kind of job a script is: its process group, its device, the frameworks that do things for it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache

from ddpdoctor.files import regex
from ddpdoctor.source.events import LONGEST_CONDITION, Condition, Event, Guard
from ddpdoctor.source.interpreter.values import (
    ALL_RANKS,
    NONE,
    RANKS,
    Const,
    PerRank,
    SequenceValue,
    Unknown,
    Value,
    constant,
    on_rank,
    tags_of,
)
from ddpdoctor.source.libraries.lightning import has_several
from ddpdoctor.source.libraries.rank_attributes import TRAINERS
from ddpdoctor.source.projection import Projection, project
from ddpdoctor.source.script.launch_facts import (
    declared_options,
    destination,
    launches,
    reads_launcher_rank,
    spellings,
    tests_for_gpu,
)
from ddpdoctor.source.script.module import Module, argument_of, descend, dotted, once, once_each
from ddpdoctor.source.script.script import Script, calls_any, gives_each_rank_a_machine, is_started_per_gpu, uses_part
from ddpdoctor.source.torch_model.ddp import SHARDED_TAGS
from ddpdoctor.source.torch_model.recorded_calls import SET_VARIABLE
from ddpdoctor.source.vocabulary import (
    GLOBAL_RANK_VARIABLES,
    HUGGING_FACE_TRAINERS,
    LOCAL_RANK_VARIABLES,
    SPAWNERS,
    WORLD_SIZE_VARIABLES,
    text_hints_at_ranks,
)

_FRAMEWORKS = frozenset({
    "accelerate", "byteps", "catalyst", "colossalai", "composer", "deepspeed", "detectron2", "fairseq", "horovod",
    "ignite", "lightning", "lightning_fabric", "megatron", "mmcv", "mmengine", "pytorch_lightning", "ray",
    "smdistributed", "torch_xla",
})  # fmt: skip
# Names in a framework that start ranks, place the model or train; configurations and metrics do not.
_TAKES_OVER = regex(
    r"(Trainer|Runner|Fabric|Accelerator|Strategy|Parallel|(^|\.)(init\w*|launch|spawn|run|train_\w+|main|remote|Parallel))$"
)
_JOINING = frozenset(
    {"accelerate.Accelerator", "horovod.torch.init", "deepspeed.init_distributed", "deepspeed.initialize"}
)
_TRAINING = frozenset(f"{name.rpartition('.')[2]}.train" for name in HUGGING_FACE_TRAINERS)
_OF_LAUNCHER = GLOBAL_RANK_VARIABLES | LOCAL_RANK_VARIABLES | WORLD_SIZE_VARIABLES
_WORD = regex(r"\w+")
_CHOICES_OF_MODE = regex(r"distributed|ddp|world|multi|gpu|device|nproc|parallel|rank|cuda|backend", re.IGNORECASE)


@once
def framework(script: Script) -> str:
    """Return the training framework that starts ranks and places models for a script; empty when it does so itself.

    One that is imported, or used under a condition only, does nothing for the rest of the script.
    """
    found = next(frameworks(project(script)), None)
    return "" if found is None else found.name.partition(".")[0]


def frameworks(projection: Projection) -> Iterator[Event]:
    """Yield where a training framework starts ranks, places the model or trains, whatever the mode."""
    for event in projection.events:
        if event.kind in ("object", "call") and _takes_over(event.name) and not event.conditions:
            yield event


@lru_cache(maxsize=16_384)
def _takes_over(name: str) -> bool:
    top, _, rest = name.partition(".")
    if top == "transformers" and rest.endswith("Trainer"):
        return True
    return top in _FRAMEWORKS and _TAKES_OVER.search(rest) is not None


def is_distributed(projection: Projection) -> bool:
    """Return whether a script joins a process group or wraps a model in DDP in its ranks, or lets a framework do so.

    One whose model is a DataParallel, and whose data no sampler divides, is one process: a helper may join a group.
    """
    if any(projection.of_kind("wrap")):
        return True
    if any(projection.of_kind("data-parallel")) and not any(projection.of_kind("sampler")):
        return False
    # A mesh is made of the default group, which is made with it where there is none.
    worlds = (one for one in projection.of_kind("collective") if one.name in ("init_process_group", "init_device_mesh"))
    # A tool for one process makes a group of one rank to call code for ranks.
    alone = {"world_size": Const(1), "rank": Const(0)}
    if any(not alone.items() <= one.named.items() for one in worlds):
        return True
    return joins_by_framework(projection)


def joins_by_framework(projection: Projection) -> bool:
    """Return whether a framework makes the process group of a job."""
    joins = any(
        event.name in _JOINING or (event.name in TRAINERS and has_several(projection.machine, event))
        for event in projection.of_kind("object", "call")
    )
    return joins or _trains_what_a_launcher_started(projection)


def is_training_by_trainer(event: Event) -> bool:
    """Return whether a Trainer of Hugging Face trains here: it divides its data between the ranks."""
    return event.kind == "collective" and event.name in _TRAINING


def _trains_what_a_launcher_started(projection: Projection) -> bool:
    """Return whether a Trainer of Hugging Face trains, which joins what its launcher started, if that is several ranks.

    A script that asks for a rank or the world size is written for several.
    """
    trains = any(map(is_training_by_trainer, projection.of_kind("collective")))
    return trains and any(reads_launcher_rank(module, _OF_LAUNCHER) for module in projection.machine.script.modules)


def joins_in_own_course(projection: Projection) -> bool:
    """Return whether the script itself comes to where ranks join; else only a function that nothing read calls does.

    A launcher that stands in one file with what its ranks run is no rank while it prepares their start.
    """
    joining = (
        event
        for event in projection.of_kind("wrap", "collective", "object", "call")
        if event.kind == "wrap" or event.name in _TRAINING | {"init_process_group"} or event.name in _JOINING
    )
    return any(not event.root for event in joining)


def is_of_one_process(projection: Projection, event: Event) -> bool:
    """Return whether an event is in the other arm of a test than all that joins, starts or makes DDP of ranks.

    The test may stand at another place with the same words: ``if cfg.DIST: init_process_group()``, ``else: save()``.
    """
    like_ddp = (event for event in projection.of_kind("object") if event.name.endswith("DistributedDataParallel"))
    wraps = [*projection.of_kind("wrap"), *like_ddp]  # That of Apex is an object.
    joins = [other for other in projection.in_course("collective") if other.name == "init_process_group"]
    signs = wraps, joins, starts(projection)
    of_launcher = [other for other in (*wraps, *joins) if not depends_on_mode(other)]
    for condition in event.undecided:
        arm, text = _arm(event, condition), condition[0].excerpt(condition[1], 1_000)
        if arm is None or any(arm in _arms(other, text) for other in of_launcher):
            continue  # In an arm in which nothing asks for it, ranks join that a launcher has started.
        for others in signs:
            arms = [_arms(other, text) for other in others]
            if arms and all(found and arm not in found for found in arms):
                return True
    return False


def comes_before_ranks(projection: Projection, event: Event) -> bool:
    """Return whether an event is on the way to where the script starts ranks, if only on request.

    A process that has joined a group before it could start ranks is one that a launcher has started.
    """
    joins = [one.ordinal for one in projection.of_kind("collective") if one.name == "init_process_group"]
    return any(
        event.ordinal < start.ordinal
        and not any(event.ordinal < join < start.ordinal for join in joins)
        and all(_arm(event, condition) in (None, _arm(start, condition)) for condition in start.undecided)
        for start in starts(projection)
    )


def starts(projection: Projection) -> list[Event]:
    """Return the calls that start ranks, such as ``torch.multiprocessing.spawn``."""
    return [event for event in projection.events if event.kind == "call" and event.name in SPAWNERS]


def is_of_a_mode_that_ends(projection: Projection, event: Event) -> bool:
    """Return whether an event is in an arm that ends the function, and in which ranks do nothing together.

    ``if args.submission: write_all(); return`` is for one process, though a launcher could start several.
    """
    together = [*projection.of_kind("wrap", "collective"), *filter(_may_average, projection.of_kind("backward"))]
    for condition in event.undecided:
        module, test = condition
        around, arm = module.parents.get(test), _arm(event, condition)
        if not isinstance(around, ast.If) or arm is None:
            continue
        body = around.body if arm else around.orelse
        if isinstance(body[-1], ast.Return) and not any(_arm(other, condition) is arm for other in together):
            return True
    return False


def _may_average(backward: Event) -> bool:
    """Return whether a backward is not certainly that of one process, of a model that nothing wraps."""
    loss = backward.receiver
    kinds = {kind for kind, _ in tags_of(loss)} if loss is not None else set[str]()
    opaque = isinstance(loss, Unknown) and loss.opaque
    return opaque or "ddp" in kinds or "engine" in kinds or not kinds.isdisjoint(SHARDED_TAGS)


def left_in_mode(projection: Projection, event: Event) -> Guard | None:
    """Return the test of ranks by which all but some left before an event, in an arm for jobs with ranks.

    ``if distributed: if rank != 0: return`` and then ``save()``: only in the other arm every process comes to it.
    """
    around_event = {test for _, test in event.undecided}
    for left in reversed(projection.exits):
        if left.ordinal > event.ordinal or left.scope not in event.scopes or isinstance(left.node, ast.Break):
            continue
        if isinstance(left.node, ast.Continue) and not any(left.node in descend(loop.node) for loop in event.loops):
            continue
        for around in left.module.in_function(left.node):
            if not isinstance(around, ast.If) or around.test is left.guard.node or around.test in around_event:
                continue
            if _chooses_mode(projection, left.module.excerpt(around.test, LONGEST_CONDITION)):
                return left.guard
    return None


def _chooses_mode(projection: Projection, condition: str) -> bool:
    """Return whether a condition may choose between a job with ranks and one without, by its words or its flags."""
    flags = projection.machine.mode_flags
    return _CHOICES_OF_MODE.search(condition) is not None or any(word in flags for word in _WORD.findall(condition))


def holds_with(event: Event, other: Event) -> bool:
    """Return whether all conditions of an event, or others in the same words, are around another one, in those arms."""
    tests = {test for _, test in other.undecided}
    for module, test in event.undecided:
        arm = _arm(event, (module, test))
        if arm not in _arms(other, module.excerpt(test, 1_000)) if arm is not None else test not in tests:
            return False
    return True


def _arms(event: Event, text: str) -> set[bool]:
    """Return the arms of tests with certain words, all or one part of ``a and b``, that an event is in."""
    arms: set[bool] = set()
    for module, test in event.undecided:
        arm = _arm(event, (module, test))
        parts = test.values if arm and isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]
        if arm is not None and any(module.excerpt(part, 1_000) == text for part in parts):
            arms.add(arm)
    return arms


def _arm(event: Event, condition: Condition) -> bool | None:
    """Return whether the lines that lead to an event are in the body of an ``if`` (or else in its other arm)."""
    module, test = condition
    around = module.parents.get(test)
    if not isinstance(around, ast.If) or around.test is not test:
        return None
    lines = event.lines_in(module)
    for arm, body in ((True, around.body), (False, around.orelse)):
        last = (body[-1].end_lineno or body[-1].lineno) if body else 0
        if body and any(body[0].lineno <= line <= last for line in lines):
            return arm
    return None


def in_other_modes(one: Event, other: Event) -> bool:
    """Return whether a condition that nothing decides leads to one of two events or to the other, and never to both."""
    for condition in one.undecided:
        arms = _arm(one, condition), _arm(other, condition)
        if None not in arms and arms[0] is not arms[1]:
            return True
    return False


def may_spawn(script: Script) -> bool:
    """Return whether a script may start its own ranks, if only under a condition: local and global ranks agree then."""
    return script.spawns_ranks is not None or calls_any(script, ("spawn", "start_processes", "Process"))


def initialisations(projection: Projection) -> Iterator[Event]:
    """Yield calls of ``init_process_group`` that ranks come to, each once."""
    seen: set[ast.AST] = set()
    for event in projection.in_course("collective"):
        if event.name == "init_process_group" and event.node not in seen:
            seen.add(event.node)
            yield event


def _counts_devices(projection: Projection, joined: Event) -> bool:
    """Return whether the size of a group is an attribute that the script sets to nothing but the devices of a node."""
    size = argument_of(joined.node, "world_size")
    if not isinstance(size, ast.Attribute):
        return False
    given = [
        (module, assigned.value)
        for module in projection.machine.script.modules
        for assigned in module.index.of(ast.Assign)
        if any(isinstance(target, ast.Attribute) and target.attr == size.attr for target in assigned.targets)
    ]
    return bool(given) and all(_is_device_count(module, value) for module, value in given)


def _is_device_count(module: Module, value: ast.expr) -> bool:
    values = module.assigned(module.body_around(value), value) if isinstance(value, ast.Name) else [value]
    calls = [isinstance(one, ast.Call) and module.resolve(one.func) == "torch.cuda.device_count" for one in values]
    return bool(calls) and all(calls)


_THIS_MACHINE = regex(r"^(tcp://)?(localhost|127\.0\.0\.1|\[?::1\]?)(:|$)")


def is_single_node(projection: Projection) -> bool:
    """Return whether a job cannot have two nodes: its world is the GPUs of one, or its address is this machine's."""
    for event in initialisations(projection):
        size = event.argument("world_size", 3)
        if size is not None and (("device-count", 0) in tags_of(size) or _counts_devices(projection, event)):
            return True
    return any(map(_THIS_MACHINE.match, _written_addresses(projection)))


def names_another_machine(projection: Projection) -> bool:
    """Return whether the address in the code is that of another machine: it comes from no launcher."""
    return any(
        not address.startswith(("env:", "file:")) and _THIS_MACHINE.match(address) is None
        for address in _written_addresses(projection)
    )


def _written_addresses(projection: Projection) -> Iterator[str]:
    """Yield the addresses of the rendezvous that the code holds and nothing outside of it replaces."""
    joined = list(initialisations(projection))
    values = [event.argument("init_method", 1) for event in joined]
    for event in projection.of_kind("call") if joined else ():
        names = event.name == SET_VARIABLE and constant(event.positional[0]) == "MASTER_ADDR"
        if names and len(event.positional) > 1 and not event.conditions:
            values.append(event.positional[1])
    for value in values:
        address = constant(value) if value is not None else None
        if isinstance(address, str):
            yield address


def is_nccl_only(projection: Projection) -> bool:
    """Return whether every process group of a job is certainly NCCL's and nothing else's."""
    found = list(initialisations(projection))
    names = (constant(event.argument("backend", 0) or NONE) if event.complete else None for event in found)
    return bool(found) and all(isinstance(name, str) and name.lower() in {"nccl", "cuda:nccl"} for name in names)


def may_use_cuda(script: Script) -> bool:
    """Return whether the code speaks of CUDA or NCCL anywhere."""
    return uses_part(script, ("cuda", "nccl", "CUDA", "NCCL"))


def speaks_of_devices(script: Script) -> bool:
    """Return whether the code speaks of GPUs, or of devices at all, anywhere."""
    return uses_part(script, ("cuda", "gpu", "GPU", "device", "accelerator"))


def noted(projection: Projection, *names: str) -> Iterator[Event]:
    """Yield calls of some names that ranks come to, in the order of execution."""
    return (event for event in projection.in_course("call") if event.name in names)


def on_every_rank(event: Event) -> bool:
    """Return whether all ranks come to an event, with no hint of a rank test around it."""
    return event.ranks == ALL_RANKS and not event.guards and not event.in_parent and not hints_at_ranks(event)


def hints_at_ranks(event: Event) -> bool:
    """Return whether an undecided condition around an event depends on the rank, names ranks, or is a test of one."""
    return event.rank_tested or any(_is_rank_test(module, test) for module, test in event.undecided)


@once_each
def _is_rank_test(module: Module, test: ast.AST) -> bool:
    if text_hints_at_ranks(module.excerpt(test, LONGEST_CONDITION)) or _asks_a_list_of_some_ranks(module, test):
        return True
    names = {ast.unparse(node) for node in descend(test) if isinstance(node, (ast.Name, ast.Attribute))}
    assigned = module.index.within(module.body_around(test), ast.Assign)
    conditions = [one for one in assigned if isinstance(one.value, (ast.BoolOp, ast.Compare, ast.UnaryOp))]
    return any(
        ast.unparse(target) in names and text_hints_at_ranks(module.excerpt(one.value, LONGEST_CONDITION))
        for one in conditions
        for target in one.targets
    )


def _asks_a_list_of_some_ranks(module: Module, test: ast.AST) -> bool:
    """Return whether a condition looks at a list that is only filled behind rank tests: the others find it empty."""
    if not module.calls_by_name.get("append"):
        return False
    asked = {ast.unparse(node) for node in descend(test) if isinstance(node, (ast.Name, ast.Attribute, ast.Subscript))}
    methods = (call.func for call in module.calls_by_name["append"])
    filling = [one for one in methods if isinstance(one, ast.Attribute) and ast.unparse(one.value) in asked]
    tests = [[up.test for up in module.ancestors(one) if isinstance(up, ast.If)] for one in filling]
    return bool(tests) and all(
        any(text_hints_at_ranks(module.excerpt(one, LONGEST_CONDITION)) for one in around) for around in tests
    )


def depends_on_mode(event: Event) -> bool:
    """Return whether conditions around an event may choose between a job with ranks and one without."""
    return any(_CHOICES_OF_MODE.search(condition) for condition in event.conditions)


# The GPUs that the ranks of a machine use.


def gpus_of(value: Value) -> tuple[int | None, ...]:
    """Return the GPU that a device is on each rank, given as a number, as ``cuda:N``, or as the only one of a list."""
    lanes = (on_rank(value, rank) for rank in RANKS)
    first = (one.values[0] if isinstance(one, SequenceValue) and len(one.values) == 1 else one for one in lanes)
    return tuple(_number_of(constant(on_rank(one, rank))) for rank, one in enumerate(first))


def _number_of(device: object) -> int | None:
    if isinstance(device, str) and device.startswith("cuda:") and device[5:].isdigit():
        return int(device[5:])
    return device if type(device) is int else None


def shared_gpus(projection: Projection) -> Sequence[Event]:
    """Return where all ranks put their model or their batches on one GPU, or choose it, though they see several.

    They do where the script starts them on one machine, a launcher of the project does, or the script itself gives
    each a device of another number.
    """
    seen = dict[ast.AST, Event]()
    for event in projection.in_course("device"):
        if is_one_gpu(projection, event) and (event.name != "device") and _is_of_training(projection, event):
            seen.setdefault(event.node, event)
    return tuple(seen.values())


def is_one_gpu(projection: Projection, event: Event, device: Value | None = None) -> bool:
    """Return whether a device is the same GPU on all ranks of a machine, and they are known to see several."""
    gpus = gpus_of(event.positional[0] if device is None else device)
    script = projection.machine.script
    if None in gpus or len(set(gpus)) > 1 or not on_every_rank(event) or framework(script):
        return False
    if uses_part(script, ("VISIBLE_DEVICES",)) or gives_each_rank_a_machine(script):
        return False
    return (
        script.spawns_ranks is not None
        or is_started_per_gpu(script)
        or any(
            isinstance(other.positional[0], PerRank)
            and not other.positional[0].guessed
            and len({*gpus_of(other.positional[0])} - {None}) > 1
            and on_every_rank(other)
            and set(other.conditions) <= set(event.conditions)
            for other in projection.in_course("device")
        )
    )


def _is_of_training(projection: Projection, event: Event) -> bool:
    """Return whether a process chooses its GPU, the model goes there and stays until it is wrapped, or a batch does."""
    if event.name == "device_ids":
        return True
    if any(kind == "batch" for kind, _ in tags_of(event.receiver or NONE)):
        return not depends_on_mode(event)
    if event.name == "set_device":
        return not event.conditions
    moves = [one for one in projection.in_course("device", "call") if one.receiver == event.receiver]
    for wrap in projection.in_course("wrap"):
        before = [one for one in moves if one.ordinal < wrap.ordinal]
        if event.receiver == wrap.argument("module", 0) and before and before[-1].node is event.node:
            return set(event.conditions) <= set(wrap.conditions)
    return False


# What a script does when it is started with certain arguments: who starts its ranks, and whether it wants a GPU.

_ON_CUDA = frozenset({"torch.device", "torch.cuda.set_device"})


def starts_own_ranks(script: Script, arguments: Sequence[str], *, by_python: bool) -> bool:
    """Return whether a script starts its ranks itself when it gets these arguments.

    One that serves a launcher too does so where a flag among the arguments chooses it (``if
    args.multiprocessing_distributed: mp.spawn(...)``), or where plain Python runs it (``by_python``).
    """
    return script.spawns_ranks is not None or any(
        by_python or _is_chosen(script, module, call, arguments)
        for module in script.modules
        for call in launches(module, script.modules)
    )


def wants_cuda(script: Script, arguments: Sequence[str]) -> bool:
    """Return whether a script demands CUDA or NCCL, by name or by what an option or a variable holds.

    A variable or an option that holds something else as well ("cpu" in one place, "cuda" in another) demands nothing.
    """
    if script.demands_cuda is not None:
        return True
    for module in script.modules:
        for call in module.index.of(ast.Call):
            asked = _asked(call, module.resolve(call.func))
            if asked is None or tests_for_gpu(module, call):
                continue
            value, wanted = asked
            known = dotted(value).rpartition(".")[2]
            texts = set(_texts(script, known, wanted, arguments)) if known else set()
            if texts and all(wanted in text for text in texts):
                return True
    return False


def is_run_again(script: Script, event: Event) -> bool:
    """Return whether each rank runs again what the process that spawns it has run: it imports the script anew.

    That is what stands at the top level outside of the test of ``__name__``. A forked process starts with a copy.
    """
    words = script.entry.words
    if not event.in_parent or "spawn" not in words or "fork" in words:
        return False
    around = list(event.module.ancestors(event.node))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    if any(isinstance(node, functions) for node in around):
        return False
    return not any(isinstance(node, ast.If) and "__name__" in ast.unparse(node.test) for node in around)


def rank_options(script: Script) -> tuple[str, ...]:
    """Return the spellings of the option that ``init_process_group`` gets as the rank; none where it is no option."""
    names = {
        dotted(value).rpartition(".")[2]
        for module in script.modules
        for call in module.index.of(ast.Call)
        if module.resolve(call.func) == "torch.distributed.init_process_group"
        and (value := argument_of(call, "rank")) is not None
    }
    declared = [call for call in _declared(script) if destination(call) in names - {""}]
    return tuple(sorted({spelling for call in declared for spelling in spellings(call)}))


def _is_chosen(script: Script, module: Module, call: ast.Call, arguments: Sequence[str]) -> bool:
    inner: ast.AST = call
    for around in module.ancestors(call):
        if isinstance(around, ast.If) and inner in around.body:
            test = around.test
            either = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or) else [test]
            flags = {dotted(one).rpartition(".")[2] for one in either} - {""}
            given = (declared for declared in _declared(script) if not set(spellings(declared)).isdisjoint(arguments))
            if any(_flag(declared) in flags for declared in given):
                return True
        inner = around
    return False


def _flag(declared: ast.Call) -> str:
    """Return the attribute that a ``store_true`` option sets; empty for other options."""
    action = argument_of(declared, "action")
    return destination(declared) if isinstance(action, ast.Constant) and action.value == "store_true" else ""


def _declared(script: Script) -> Iterator[ast.Call]:
    for module in script.modules:
        yield from declared_options(module)


def _asked(call: ast.Call, name: str) -> tuple[ast.expr, str] | None:
    """Return what decides about the device or the backend in a call, and the word that would demand a GPU."""
    if name == "torch.distributed.init_process_group":
        backend = argument_of(call, "backend", 0)
        return None if backend is None else (backend, "nccl")
    moves = name in _ON_CUDA or (isinstance(call.func, ast.Attribute) and call.func.attr == "to")
    return (call.args[0], "cuda") if moves and call.args else None


def _texts(script: Script, name: str, wanted: str, arguments: Sequence[str]) -> Iterator[str]:
    """Yield the texts that a variable or an option of a name holds, in lower case.

    Those with the word ``wanted`` are left out where a condition tests for a GPU first.
    """
    for declared in _declared(script):
        if destination(declared) == name:
            default = argument_of(declared, "default")
            given = _value(spellings(declared), arguments)
            if given:
                yield given.lower()
            elif default is not None and _text(default):
                yield _text(default)
    for module in script.modules:
        if name not in module.words:
            continue
        for node, targets, value in _assignments(module):
            if all(dotted(target).rpartition(".")[2] != name for target in targets):
                continue
            text = _text(value)
            if text and not (wanted in text and tests_for_gpu(module, node)):
                yield text


def _assignments(module: Module) -> Iterator[tuple[ast.stmt, Sequence[ast.expr], ast.expr]]:
    for plain in module.index.of(ast.Assign):
        yield plain, plain.targets, plain.value
    for annotated in module.index.of(ast.AnnAssign):  # A field that a class declares.
        if annotated.value is not None:
            yield annotated, [annotated.target], annotated.value


def _text(value: ast.expr) -> str:
    """Return a text in lower case; ``either`` for a choice between several, and an empty one for what is not known."""
    if isinstance(value, ast.Constant):
        return value.value.lower() if isinstance(value.value, str) else ""
    return "either" if any(isinstance(node, (ast.IfExp, ast.BoolOp)) for node in ast.walk(value)) else ""


def _value(names: Sequence[str], arguments: Sequence[str]) -> str:
    """Return what the arguments give to an option; empty when they don't name it."""
    for position, argument in enumerate(arguments):
        option, equals, value = argument.partition("=")
        if option in names and option.startswith("-"):
            return value if equals else next(iter(arguments[position + 1 : position + 2]), "")
    return ""
