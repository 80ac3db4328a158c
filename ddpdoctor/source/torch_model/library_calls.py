"""Results of calls of functions that run nothing of interest, by the full name of the function."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial

from ddpdoctor.source.events import EventKind
from ddpdoctor.source.interpreter.assignment import item_of
from ddpdoctor.source.interpreter.attributes import attribute_of, guess_from_name, lacks, promised_by_name
from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import (
    MAXIMUM_OPTIONS,
    NONE,
    SYNCHRONISED,
    UNIFORM,
    BoundMethod,
    Const,
    External,
    ExternalObject,
    OneOf,
    PerRank,
    ProjectClass,
    ProjectModule,
    SequenceValue,
    Tag,
    TensorSize,
    Unknown,
    Value,
    derived,
    is_varying,
    options_of,
    tags_of,
)
from ddpdoctor.source.ranks.rank_local_values import (
    COUNTED,
    LISTED,
    OWN_KINDS,
    POLLED,
    UNREAD_ITEM,
    agrees_by_name,
    lists_names,
    members_of,
    origin_of,
)
from ddpdoctor.source.script.module import Module, last_name
from ddpdoctor.source.vocabulary import (
    DATA_LOADER,
    DATA_PARALLEL,
    MODEL_LIBRARY,
    NOT_FALSE,
    OPTIMIZER,
    PRETRAINED,
    RANK_VARYING_CALLS,
    SAME_ITEMS,
)

_STARTS = frozenset(
    {
        "torch.distributed.init_process_group",
        "deepspeed.init_distributed",
        "deepspeed.initialize",
        "accelerate.Accelerator",
    }
)
"""What makes the process group, itself or in a framework."""
_STARTING = frozenset(name.rpartition(".")[2] for name in _STARTS)
Named = dict[str, Value]
Handler = Callable[[Machine, ast.AST, list[Value], Named, bool], Value]
"""Makes a call: where it stands, the arguments by position and by name, and whether those are all."""
_MAKERS = frozenset({"from_pretrained", "from_config"})
_OPENING = frozenset({"builtins.open", "io.open", "codecs.open", "gzip.open", "bz2.open", "lzma.open"})
_OF_NAMES = frozenset({"clock", "random", "drawn"})
"""Kinds of the tags of what names of files are made of."""
_NUMBERS = frozenset({"world-size", "local-world-size", "device-count", "task-count"})
_GENERATORS = frozenset({"random.Random", "numpy.random.RandomState", "numpy.random.default_rng"})
"""Generators of random numbers that may be given a seed."""
TensorFactory = Callable[[Sequence[Value], Mapping[str, Value]], Value]


def plain_handler_of(name: str) -> Handler:
    """Return the handler of a call that runs nothing of interest."""
    last = name.rpartition(".")[2]
    if name == "torch.distributed.is_initialized":
        return _is_initialized
    if name in NOT_FALSE:
        return partial(_fixed, Const(True))
    if last in SAME_ITEMS:
        return _zipped if last == "zip" else partial(_same_items, last)
    factory = TENSOR_CALLS.get(name)
    if factory is not None:
        return partial(_tensor, factory)
    if name in _OPENING:
        return _opened
    if lists_names(name):
        return _listed
    if name in _GENERATORS:
        return _generator
    if RANK_VARYING_CALLS.match(name):
        return partial(_fixed, Unknown(True, False, origin_of(name)))
    if name == "apex.amp.initialize":
        return _initialized_by_apex
    if last == "_get_default_store":
        return partial(_object, "torch.distributed.Store")
    if name == "str.format" or name.startswith(("os.path.", "pathlib.", "torch.distributions.")):
        return _mixture
    if name.startswith("torch.distributed.") and last[:1].islower():
        return _uncounted
    if name.startswith("torch.") and last[:1].islower():
        return _mixture
    owner = name.removesuffix(f".{last}")
    if last in _MAKERS and PRETRAINED.match(owner):
        return partial(_object, owner)
    if last[:1].isupper() or name.startswith(MODEL_LIBRARY):
        return partial(_object, name)
    return partial(_unread, name)


def _fixed(
    value: Value, machine: Machine, node: ast.AST, positional: list[Value], named: Named, complete: bool
) -> Value:
    return value


def _generator(machine: Machine, node: ast.AST, positional: list[Value], named: Named, complete: bool) -> Value:
    """Return a generator, which draws alike where its seed is alike; without a seed each process draws its own."""
    seeds = [value for value in (*positional, *named.values()) if value != NONE]
    return derived(seeds) if seeds else Unknown(True, False, origin_of("random.random"))


def _listed(machine: Machine, node: ast.AST, positional: list[Value], named: Named, complete: bool) -> Value:
    """Return names in a directory, which a ``while`` that lists them again and again waits for."""
    polls = any(isinstance(loop.around.node, ast.While) for loop in machine.loops)
    return Unknown(True, False, frozenset({POLLED if polls else LISTED}))


def _opened(machine: Machine, node: ast.AST, positional: list[Value], named: Named, complete: bool) -> Value:
    """Return a file, whose content does not come from the time or the random number that its name is made of."""
    result = derived([*positional, *named.values()])
    return Unknown(result.varying, False, frozenset(tag for tag in origins_kept(result) if tag[0] not in _OF_NAMES))


def _is_initialized(machine: Machine, node: ast.AST, positional: list[Value], named: Named, complete: bool) -> Value:
    """Return true, except in code that makes the group itself if there is none, where none was made so far.

    Elsewhere a false answer would be a guess: a framework, or a call that was not followed, may have made it.
    """
    owner = machine.frame.owner
    module = machine.frame.module
    makes = _names_a_start(module, module.tree if owner is None else owner.node)
    return Const(not makes or any(event.name in _STARTS for event in machine.events.values()))


def _initialized_by_apex(
    machine: Machine, node: ast.AST, positional: list[Value], named: Named, complete: bool
) -> Value:
    """Return the models that it is given, and the optimizers where there are any: it changes them and returns them."""
    models, optimizers = (
        named.get(name, positional[place] if len(positional) > place else None)
        for place, name in enumerate(("models", "optimizers"))
    )
    if models is None:
        return derived(positional)
    return models if optimizers in (None, NONE) else SequenceValue((models, optimizers))


@lru_cache(maxsize=4096)
def _names_a_start(module: Module, scope: ast.AST) -> bool:
    """Return whether the code of a function, or of a module outside of its definitions, starts the process group."""
    waiting = list(ast.iter_child_nodes(scope))
    while waiting:
        node = waiting.pop()
        name = last_name(node)
        if name in _STARTING and (name == "init_process_group" or module.resolve(node) in _STARTS):
            return True
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            waiting.extend(ast.iter_child_nodes(node))
    return False


def _mixture(machine: Machine, node: ast.AST, positional: list[Value], named: Named, complete: bool) -> Value:
    return derived([*positional, *named.values()])


def _uncounted(machine: Machine, node: ast.AST, positional: list[Value], named: Named, complete: bool) -> Value:
    """Return a mesh or a store: made of numbers of ranks, and none itself."""
    result = derived([*positional, *named.values()])
    return Unknown(result.varying, result.opaque, frozenset(tag for tag in result.tags if tag[0] not in _NUMBERS))


def _tensor(
    factory: TensorFactory, machine: Machine, node: ast.AST, positional: list[Value], named: Named, complete: bool
) -> Value:
    return factory(positional, named)


def _object(name: str, machine: Machine, node: ast.AST, positional: list[Value], named: Named, complete: bool) -> Value:
    number = machine.object_number(node)
    sampler = "Sampler" in name.rpartition(".")[2]
    kind: EventKind = "data-parallel" if name == DATA_PARALLEL else "sampler" if sampler else "object"
    machine.emit(kind, name, node, positional, named, number=number, complete=complete)
    return ExternalObject(number, name)


def _unread(name: str, machine: Machine, node: ast.AST, positional: list[Value], named: Named, complete: bool) -> Value:
    """Return the result of a function of which only the name is known."""
    last = name.rpartition(".")[2]
    if not name.startswith(_KNOWN):
        machine.note_unread(node)
    promised = None if name.startswith(("builtins.", "torch.")) else promised_by_name(machine, last)
    if promised is not None:
        return promised
    if agrees_by_name(last):
        return SYNCHRONISED
    result = derived([*positional, *named.values()])
    return members_of(name, Unknown(result.varying, opaque=not name.startswith("builtins."), tags=origins_kept(result)))


_KNOWN = ("builtins.", "torch.", "torchvision.", "torchaudio.", "numpy.")
"""Beginnings of the names of what is known to train nothing and to give back no more than its arguments."""


def origins_kept(value: Unknown) -> frozenset[Tag]:
    """Return the origins of its arguments that the result of a call which cannot be read keeps."""
    if not value.tags:
        return value.tags
    return frozenset(tag for tag in value.tags if tag[0] in OWN_KINDS or tag[0] == "bare")


def _is_zip(value: SequenceValue) -> bool:
    return value.open and len(value.values) == 1 and isinstance(value.values[0], SequenceValue)


def _zipped(machine: Machine, node: ast.AST, positional: list[Value], named: Named, complete: bool) -> Value:
    """Return tuples for ``zip`` whose parts keep their own origins."""
    if not positional or any(isinstance(value, PerRank) for value in positional):
        return _same_items("zip", machine, node, positional, named, complete)
    return SequenceValue((SequenceValue(tuple(item_of(value) for value in positional)),), open=True)


def _same_items(
    last: str, machine: Machine, node: ast.AST, positional: list[Value], named: Named, complete: bool
) -> Value:
    """Return the items of the arguments, as ``tqdm(loader)`` and ``enumerate(loader)`` do."""
    if len(positional) == 1 and isinstance(positional[0], SequenceValue):
        if last in {"list", "tuple"} or (last == "tqdm" and _is_zip(positional[0])):
            return positional[0]
        if last == "enumerate" and _is_zip(positional[0]):
            return SequenceValue((SequenceValue((UNIFORM, positional[0].values[0])),), open=True)
    tags: set[tuple[str, int]] = set()
    for value in positional:
        for option in options_of(value):
            if isinstance(option, ExternalObject) and option.name == DATA_LOADER:
                tags.add(("loader", option.number))
    if last == "enumerate":
        tags.add(COUNTED)
    if last == "iter" and not isinstance(machine.frame.module.parents.get(node), ast.Call):
        # Begun again in every turn of a loop, for its batches one by one; ``next(iter(loader))`` only looks at one.
        again = next((loop.around for loop in reversed(machine.loops) if not loop.around.once), None)
        if again is not None:
            machine.cycles.update({number: again for kind, number in tags if kind == "loader"})
    mixed = derived(positional, frozenset(tags))
    if last == "next":
        if not mixed.varying and mixed.tags <= {COUNTED}:
            return Unknown(tags=mixed.tags | {UNREAD_ITEM})
        return Unknown(
            mixed.varying or bool(tags),
            False,
            frozenset(("batch", n) if k == "loader" else (k, n) for k, n in mixed.tags),
            any(kind == "loader" for kind, _ in mixed.tags) and len(positional) == 1,
        )
    return mixed


def read_attribute(machine: Machine, node: ast.AST, positional: list[Value], named: Named, complete: bool) -> Value:
    """Return what ``getattr`` gives: an attribute by a name that is known, or the default of one that is not there."""
    if len(positional) >= 2 and isinstance(positional[1], Const) and isinstance(positional[1].value, str):
        name = positional[1].value
        if len(positional) == 3 and all(lacks(machine, owner, name) for owner in options_of(positional[0])):
            return positional[2]
        value = guess_from_name(machine, name, attribute_of(machine, positional[0], name))
        return derived((value,)) if isinstance(value, BoundMethod) else value
    if len(positional) == 2 and positional[0] == External("torch.optim") and not is_varying(positional[1]):
        return External(OPTIMIZER)
    if len(positional) == 2 and isinstance(positional[0], ProjectModule) and not is_varying(positional[1]):
        return _class_of_module(machine, positional[0]) or derived(positional)
    return derived(positional)


def _class_of_module(machine: Machine, module: ProjectModule) -> Value | None:
    """Return the classes of which a module of the project offers one by a name that is not known; None of many."""
    scope = machine.scope_modules.get(module.name, -1)
    held = [machine.store.get(scope, name) for name in machine.store.names(scope)]
    classes = tuple(dict.fromkeys(one for one in held if isinstance(one, ProjectClass)))
    if len(classes) > MAXIMUM_OPTIONS:
        return None
    return OneOf(classes) if len(classes) > 1 else classes[0] if classes else None


# Sizes of tensors made by torch's factories from constants: elements and bytes.

DEFAULT_BYTES = 4
"""float32."""
_BYTES_OF: Mapping[str, int] = {
    "float64": 8,
    "double": 8,
    "int64": 8,
    "long": 8,
    "float32": 4,
    "float": 4,
    "int32": 4,
    "int": 4,
    "float16": 2,
    "half": 2,
    "bfloat16": 2,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
}
_KEEPS_SIZE = frozenset(
    {
        "view",
        "reshape",
        "unsqueeze",
        "squeeze",
        "contiguous",
        "clone",
        "detach",
        "transpose",
        "permute",
        "t",
        "triu",
        "tril",
        "flatten",
        "to",
        "cuda",
        "cpu",
        "requires_grad_",
        "normal_",
        "uniform_",
        "fill_",
        "mul",
        "div",
        "neg",
        "exp",
    }
)


def _shaped(positional: Sequence[Value], named: Mapping[str, Value]) -> Value:
    sizes = list(positional)
    if len(sizes) == 1 and isinstance(sizes[0], SequenceValue) and not sizes[0].open:
        sizes = list(sizes[0].values)
    return _sized(sizes, named, positional)


def _sized(sizes: Sequence[Value], named: Mapping[str, Value], inputs: Sequence[Value]) -> Value:
    elements = 1
    for size in sizes:
        if not isinstance(size, Const) or not isinstance(size.value, int) or isinstance(size.value, bool):
            return derived([*inputs, *named.values()])
        elements *= size.value
    return TensorSize(elements, elements * _item_bytes(named.get("dtype")))


def _full(positional: Sequence[Value], named: Mapping[str, Value]) -> Value:
    return _shaped(positional[:1], named) if positional else derived(named.values())


def _arange(positional: Sequence[Value], named: Mapping[str, Value]) -> Value:
    if len(positional) == 1:
        size = _sized(positional, named, positional)
        if isinstance(size, TensorSize) and "dtype" not in named:
            return TensorSize(size.elements, size.elements * 8)
        return size
    return derived([*positional, *named.values()])


def _eye(positional: Sequence[Value], named: Mapping[str, Value]) -> Value:
    return _sized([positional[0], positional[-1]], named, positional) if positional else derived(named.values())


def _same_size(positional: Sequence[Value], named: Mapping[str, Value]) -> Value:
    if positional and isinstance(positional[0], TensorSize):
        return positional[0]
    return derived([*positional, *named.values()])


def _item_bytes(dtype: Value | None) -> int:
    if isinstance(dtype, External):
        return _BYTES_OF.get(dtype.name.rpartition(".")[2], DEFAULT_BYTES)
    return DEFAULT_BYTES


TENSOR_CALLS: Mapping[str, Callable[[Sequence[Value], Mapping[str, Value]], Value]] = {
    **{f"torch.{name}": _shaped for name in ("zeros", "ones", "empty", "rand", "randn")},
    "torch.full": _full,
    "torch.arange": _arange,
    "torch.eye": _eye,
    **{f"torch.{name}": _same_size for name in ("tril", "triu", "zeros_like", "ones_like", "exp", "log", "sin", "cos")},
}


def tensor_method(receiver: Value, name: str, arguments: Sequence[Value]) -> Value | None:
    """Return what a method makes of a tensor of known size; None when that is not known."""
    if not isinstance(receiver, TensorSize):
        return None
    if name in _KEEPS_SIZE:
        return receiver
    if name in _BYTES_OF and not arguments:
        return TensorSize(receiver.elements, receiver.elements * _BYTES_OF[name], receiver.tags)
    return derived(arguments, tags_of(receiver))
