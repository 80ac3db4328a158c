"""What calls of torch, of the standard library and of unknown code do to the four ranks."""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import PurePath

from ddpdoctor.source.interpreter.assignment import GROWING, adopts_variables, container_method, overwrite, scope_of
from ddpdoctor.source.interpreter.attributes import base_names, bases_of, bound_to, class_attribute, text_of
from ddpdoctor.source.interpreter.imports import import_by_name
from ddpdoctor.source.interpreter.operators import BUILTIN_CALLS
from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import (
    ALL_RANKS,
    NO_CONTEXT,
    NO_GRADIENTS,
    NO_SYNC,
    NONE,
    OPAQUE,
    OPEN,
    OWN_FOLDER,
    OWN_ROWS,
    REDUCED,
    SYNCHRONISED,
    TRUE,
    UNIFORM,
    VARYING,
    Arguments,
    BoundMethod,
    Const,
    DictValue,
    External,
    ExternalObject,
    Function,
    Instance,
    ProjectClass,
    ProjectModule,
    SequenceValue,
    TensorSize,
    Unknown,
    Value,
    by_rank,
    constant,
    derived,
    in_own_folder,
    is_varying,
    join,
    never_none,
    only_of_files,
    options_of,
    tagged,
    tags_of,
)
from ddpdoctor.source.libraries import lightning, sharding
from ddpdoctor.source.libraries.rank_attributes import ACCELERATOR, HELPERS, make_bar
from ddpdoctor.source.ranks.data_partitions import PART, SHARE, ranged, strided
from ddpdoctor.source.ranks.launches import run_callback, spawn, start_method, start_process
from ddpdoctor.source.ranks.random_numbers import SEEDS
from ddpdoctor.source.ranks.rank_local_values import (
    FILE_QUERIES,
    agrees_by_name,
    extent_of,
    makes_members,
    members_of,
    number_from_store,
)
from ddpdoctor.source.ranks.ranks import DEVICE_COUNT, GLOBAL_RANK, LOCAL_RANK, WORLD_SIZE, exact_per_rank, variable
from ddpdoctor.source.torch_model.buffers import note_buffer, parts_of_module
from ddpdoctor.source.torch_model.choices import MERGES, chosen_command, is_model, merge, note_commands
from ddpdoctor.source.torch_model.ddp import backward, is_thin_wrap, wrap
from ddpdoctor.source.torch_model.external_objects import (
    GROUP,
    SHARDED_PARAMETERS,
    STARTS,
    WORLD_GROUP,
    Handler,
    has_attribute,
    is_instance,
    make_ddp,
    make_device,
    make_dict,
    make_engine,
    make_group,
    make_loader,
    make_partial,
    make_sampler,
    make_super,
    note_device,
    origins_kept,
    plain_handler_of,
    read_attribute,
    read_text,
    set_device,
    tensor_method,
    type_of,
)
from ddpdoctor.source.torch_model.recorded_calls import OF_MODELS, RESULT, is_noted_method, note_call, note_method
from ddpdoctor.source.vocabulary import (
    COLLECTIVES,
    COMMAND_LINES,
    DATA_LOADER,
    DDP,
    DISTRIBUTED_SAMPLER,
    FABRICS,
    METRICS,
    MODEL_PRESERVING,
    MODULE_SELF_METHODS,
    PROCESSES,
    RANK_AND_SIZE,
    RUNNERS,
    SPAWNERS,
    SYNCHRONISES,
    collective_methods,
)

GIVEN_TO_BASE = "super().__init__()"
"""The attribute that stands for what the constructor of a library's class keeps of its arguments."""
_SIZE_METHODS = frozenset({"size", "numel", "nelement", "dim"})
# Methods that make a tensor for the device and type of another, of nothing that is in it.
_MADE_FOR = frozenset({"new_ones", "new_zeros", "new_empty", "new_full"})
# Methods on a file's name, which is the same wherever it is found.
_FORMS_OF_NAMES = frozenset({"endswith", "startswith", "isdigit"})
# Methods of a path or a text that make another of it and of what they are given.
_OF_PATHS = frozenset({"with_suffix", "with_name", "with_stem", "joinpath", "as_posix", "relative_to"}) | frozenset(
    {"replace", "format", "strip", "lstrip", "rstrip", "lower", "upper", "removesuffix", "removeprefix", "zfill"}
)
# Methods that give another form of a tensor or a module, whatever it is, and so never None.
_MOVES = frozenset(
    {"to", "cuda", "cpu", "float", "half", "long", "detach", "clone", "contiguous", "squeeze", "flatten"}
)
MOST_PARTS = 20
"""Of a module, that are each handed to the function that it is to apply."""
_GROWS = frozenset({"append", "extend", "insert"})
_MAKE_TEXT = frozenset({"builtins.print", "builtins.str", "builtins.repr", "builtins.format"})
_EXITS = frozenset({"sys.exit", "os._exit", "builtins.exit", "builtins.quit"})
_ARGUMENT_PARSERS = frozenset({"parse_args", "parse_known_args"})
_OF_TRAINERS = frozenset({"train", "evaluate", "predict"})
# Classes whose methods are in a file that is read where a script has them.
_WRAPPING = (ACCELERATOR, *FABRICS, "ignite.")
# Methods with an effect of their own, whatever has them.
_KNOWN_METHODS = (
    MODULE_SELF_METHODS
    | _ARGUMENT_PARSERS
    | {"backward", "register_buffer", "set_epoch", "no_sync", "set_defaults", "cuda", "to"}
    | sharding.OF_TENSORS
)


def call_external(machine: Machine, node: ast.AST, name: str, given: Arguments) -> Value:
    """Call something that is not of the project, by its full name."""
    if name in _MAKE_TEXT:
        given = _as_texts(machine, given)
    note_call(machine, node, name, given)
    if name in STARTS:
        machine.store.write(GROUP, TRUE)
    return _handler_of(name)(machine, node, given)


def _as_texts(machine: Machine, given: Arguments) -> Arguments:
    return Arguments([text_of(machine, value) for value in given.positional], given.named, given.complete)


_FILLED_LATER = frozenset({"builtins.list", "builtins.set", "collections.deque"})
"""What makes, of nothing, a container that is followed as a list is."""


@lru_cache(maxsize=16_384)
def _handler_of(name: str) -> Handler:
    """Return what a call does, by the full name of the function."""
    if name in COLLECTIVES:
        return partial(_collective, name)
    special = _SPECIAL.get(name)
    if special is not None:
        return special
    if name.startswith(("ignite.", "datasets.", "logging.")):  # Their files are read where a script has them.
        from ddpdoctor.source.libraries import hugging_face_datasets, python_logging, wrapping

        calls = {**wrapping.CALLS, **hugging_face_datasets.CALLS, "logging.getLogger": python_logging.get_logger}
        if name in calls:
            return calls[name]
    if name.startswith(("hydra.", "omegaconf.")):
        from ddpdoctor.source.libraries import hydra

        if name in hydra.CALLS:
            return hydra.CALLS[name]
    if name.startswith(("tqdm.", "accelerate.utils.tqdm")) and name.endswith(("tqdm", "trange")):
        return partial(make_bar, name, plain_handler_of(name))
    if name in SPAWNERS:
        return spawn
    if name in PROCESSES or name.endswith(".Process"):
        return start_process
    if name in _EXITS:
        return _exit
    if name in RUNNERS:
        return partial(run_callback, of_command_line=name in COMMAND_LINES)
    plain, function = plain_handler_of(name), BUILTIN_CALLS.get(name.removeprefix("builtins."))
    known: Handler = plain
    if function is not None and name.startswith("builtins."):
        known = partial(_of_builtin, plain, function)
    if name in _FILLED_LATER:
        return lambda machine, node, given: known(machine, node, given) if given.positional else SequenceValue(())
    if name in MODEL_PRESERVING:
        return lambda machine, node, given: given.positional[0] if given.positional else plain(machine, node, given)
    return known


def _of_builtin(
    plain: Handler, function: Callable[..., Value], machine: Machine, node: ast.AST, given: Arguments
) -> Value:
    return plain(machine, node, given) if given.named else by_rank(function, *given.positional)


def _exit(machine: Machine, node: ast.AST, given: Arguments) -> Value:
    code = constant(given.positional[0]) if given.positional else 0
    machine.leave_program(node, raising=code not in (0, None))
    return NONE


def _served_by_library(machine: Machine, node: ast.AST, receiver: Value, name: str, given: Arguments) -> Value | None:
    """Do a method of a library's object, and return its result; None for one like any other."""
    if isinstance(receiver, ExternalObject) and receiver.name.startswith(_WRAPPING):
        from ddpdoctor.source.libraries import wrapping

        return wrapping.method(machine, node, receiver, name, given)
    served = lightning.method(machine, node, receiver, name, given)
    return sharding.method(machine, node, receiver, name, given) if served is None else served


def call_method(machine: Machine, node: ast.AST, function: BoundMethod, given: Arguments) -> Value:
    """Call a method of an external or unknown object."""
    receiver, name = function.receiver, function.name
    if name == "joinpath":
        return _joined_path(receiver, *given.values)
    if name == "shard":
        from ddpdoctor.source.libraries.hugging_face_datasets import shard

        part = shard(machine, node, receiver, given)
        if part is not None:
            return part
    if receiver.__class__ is Unknown and receiver.opaque and not receiver.tags:
        machine.note_unread(node, given.values)
    if receiver.__class__ is Unknown and _is_unremarkable(name):
        return _mixture_of(receiver, name, given.values, opaque=True)
    if name == "format":
        given = _as_texts(machine, given)
    note_method(machine, node, receiver, name, given)
    if isinstance(receiver, BoundMethod) and receiver.name == "super()":
        return _call_super(machine, node, receiver.receiver, name, given)
    if name == "state_dict" and machine.sharded and (part := sharding.own_part(machine, receiver)) is not None:
        return part
    if receiver.__class__ is ExternalObject or name in lightning.METHODS:
        served = _served_by_library(machine, node, receiver, name, given)
        if served is not None:
            return served
    inherited = base_names(machine, receiver.cls) if isinstance(receiver, Instance) and name in _OF_TRAINERS else ()
    if isinstance(receiver, Instance) and any(name in collective_methods(base) for base in inherited):
        _make_loader_of(machine, node, receiver)
        machine.emit("collective", f"Trainer.{name}", node, given, in_tree=True)
        return SYNCHRONISED
    if name in _KNOWN_METHODS or receiver.__class__ is ExternalObject:
        known = _known_method(machine, node, function, given)
        if known is not None:
            return known
    if name == "start" and isinstance(receiver, Instance):
        started = start_method(machine, node, receiver)
        if started is not None:
            return started
    promised = _by_promise(machine, receiver, name)
    if promised is not None:
        with_receiver = Arguments([OPAQUE, *given.positional], given.named, given.complete)
        return machine.call_function(node, promised, with_receiver)
    return _plain_method(machine, node, function, given.values)


@lru_cache(maxsize=16_384)
def _is_unremarkable(name: str) -> bool:
    """Return whether a method of an unknown object does no more than mix its arguments, by its name."""
    promises = SYNCHRONISES.search(name) is not None or agrees_by_name(name) or makes_members(name)
    known = name in _KNOWN_METHODS or name in _SIZE_METHODS or name in _FORMS_OF_NAMES or name in FILE_QUERIES
    return not promises and not known and not is_noted_method(name)


def _mixture_of(receiver: Value, name: str, arguments: list[Value], *, opaque: bool) -> Unknown:
    """Return what an unreadable method gives: something with the origins of its object and its arguments."""
    result = derived([receiver, *arguments])
    tags = tags_of(receiver)
    lost = ("loader",) if name in _MOVES else ("loader", "length")
    own = frozenset(tag for tag in tags if tag[0] not in lost) if tags else tags
    opaque = opaque and not tags and (name not in _OF_PATHS or getattr(receiver, "opaque", False))
    return Unknown(result.varying, opaque, origins_kept(result) | own)


def _known_method(machine: Machine, node: ast.AST, function: BoundMethod, given: Arguments) -> Value | None:
    """Do what a method does by its name, and return its result; None when it does no more than others."""
    receiver, name = function.receiver, function.name
    if name == "backward":
        backward(machine, node, given.positional, receiver)
        return NONE
    if name == "register_buffer":
        note_buffer(machine, receiver, given)
        return NONE
    if name in sharding.OF_TENSORS:
        return sharding.of_tensor(machine, node, name)
    if name == "set_epoch":
        machine.emit("set-epoch", name, node, given, receiver=receiver)
        return NONE
    if name == "no_sync":
        return NO_SYNC
    if name in MERGES:
        return merge(machine, receiver)
    if name == "set_defaults":
        note_commands(machine, given.named)
        return NONE
    if name in _ARGUMENT_PARSERS:
        namespace = ExternalObject(machine.object_number(node), "argparse.Namespace")
        for attribute, functions in machine.commands.items():
            machine.assign(namespace.number, attribute, chosen_command(functions))
        return namespace if name == "parse_args" else SequenceValue((namespace, UNIFORM))
    if isinstance(receiver, ExternalObject) and name in collective_methods(receiver.name):
        if receiver.name.startswith(METRICS) and not _gathers(machine, receiver):
            return SYNCHRONISED
        owner = "" if receiver.name.startswith("accelerate.") else f"{receiver.name.rpartition('.')[2]}."
        machine.emit("collective", owner + name, node, given, in_tree=True)
        return SYNCHRONISED
    if (drawn := number_from_store(name, receiver, given.positional)) is not None:
        return drawn
    if name in MODULE_SELF_METHODS and is_model(receiver):
        if name == "apply" and given.positional and isinstance(given.positional[0], Function):
            made = machine.object(receiver)
            inside = made.argument("module", 0) if made is not None and made.kind == "wrap" else receiver
            for part in list(parts_of_module(machine, inside or receiver, registered=True))[:MOST_PARTS]:
                machine.apply(node, given.positional[0], Arguments((part,)))
        note_device(machine, node, name, given, receiver)
        return receiver
    if name in {"cuda", "to"}:
        note_device(machine, node, name, given, receiver)
    return None


def _make_loader_of(machine: Machine, node: ast.AST, trainer: Instance) -> None:
    """Run what a Trainer of the project makes its loader with, by the Accelerator that the library's own has made."""
    found = class_attribute(machine, trainer.cls, "get_train_dataloader")
    if isinstance(found, Function):
        made = ExternalObject(machine.object_number((node, ACCELERATOR)), ACCELERATOR)
        machine.assign(trainer.number, "accelerator", made)
        machine.apply(node, bound_to(found, trainer))


def _gathers(machine: Machine, metric: ExternalObject) -> bool:
    """Return whether a metric's ``compute`` gathers: it may not where all ranks have just called it."""
    made = machine.object(metric)
    if made is None or not made.complete or "sync_on_compute" in made.named or metric.number in machine.computed:
        return False
    if machine.mask == ALL_RANKS & ~machine.gone:
        machine.computed.add(metric.number)
    return True


def _by_promise(machine: Machine, receiver: Value, name: str) -> Function | None:
    """Return the only method of the project that an object of unknown class can mean by a name such as ``synchronize``.

    Collectives in it would go unseen otherwise. A method that is being run is not meant: it calls those of its parts.
    """
    if not isinstance(receiver, (Unknown, BoundMethod)) or name not in machine.mentions.synchronising:
        return None
    if not SYNCHRONISES.search(name):
        return None
    running = {frame.owner.node for frame in machine.frames if frame.owner is not None}
    found: list[Function] = []
    for scope in machine.scope_modules.values():
        for cls in machine.store.owners.get(scope, {}).values():
            method = machine.store.get(cls.scope, name) if isinstance(cls, ProjectClass) else None
            if isinstance(method, Function) and method.node not in running and method not in found:
                found.append(method)
    return found[0] if len(found) == 1 else None


def _plain_method(machine: Machine, node: ast.AST, function: BoundMethod, arguments: list[Value]) -> Value:
    receiver, name = function.receiver, function.name
    if name == "update" and adopts_variables(machine, node, receiver):
        return NONE
    named = node.func if isinstance(node, ast.Call) else None  # A name where `add = rows.append` is called.
    if name in _GROWS and OWN_ROWS in tags_of(receiver) and _fills_up(machine) and isinstance(named, ast.Attribute):
        overwrite(machine, named.value, derived((receiver,)))
    sized = tensor_method(receiver, name, arguments) if receiver.__class__ is TensorSize else None
    if sized is not None:
        return sized
    if receiver.__class__ is External and receiver.name == "os.environ":
        return UNIFORM
    if name in FILE_QUERIES and not arguments and isinstance(receiver, Unknown):
        return Unknown(True, False, frozenset({("files", 0)}))
    if name in _SIZE_METHODS and (extent := extent_of(receiver)) is not None:
        return extent
    if name in _MADE_FOR and (extent := extent_of(receiver)) is not None:
        return never_none(derived([extent, *arguments]))
    if name in _FORMS_OF_NAMES and any(kind == "files" for kind, _ in tags_of(receiver)):
        return UNIFORM
    unread = isinstance(receiver, (Unknown, BoundMethod, ExternalObject))
    if unread and agrees_by_name(name):
        return SYNCHRONISED
    known = container_method(machine, node, function, arguments) if not unread else None
    if known is not None:
        return known
    result = members_of(name, _mixture_of(receiver, name, arguments, opaque=unread))
    if machine.sharded and name in ("parameters", "named_parameters") and sharding.is_in_parts(machine, receiver):
        return tagged(result, frozenset({(SHARDED_PARAMETERS, 0)}))
    return never_none(result) if name in _MOVES else result


def _fills_up(machine: Machine) -> bool:
    """Return whether a loop runs as long as something is not reached: ``while len(rows) < most: rows.append(0)``."""
    return bool(machine.loops) and isinstance(machine.loops[-1].around.node, ast.While) and not machine.own_tests


def make_helper(machine: Machine, node: ast.AST, name: str, given: Arguments, number: int) -> Value:
    """Make an object of the project what the helper of a library is that its class derives from."""
    note_call(machine, node, name, given)
    if name in STARTS:
        machine.store.write(GROUP, TRUE)
    machine.emit("object", name, node, given, number=number)
    return NONE


def _call_super(machine: Machine, node: ast.AST, receiver: Value, name: str, given: Arguments) -> Value:
    owner = machine.frame.owner.owner if machine.frame.owner is not None else None
    if owner is None:
        return UNIFORM
    if name == "__init__" and isinstance(receiver, Instance) and is_thin_wrap(machine, receiver.cls):
        return wrap(machine, node, given, number=receiver.number)
    for base in bases_of(machine, owner):
        if name == "__init__" and base == External(DATA_LOADER) and isinstance(receiver, Instance):
            machine.emit("loader", DATA_LOADER, node, given, number=receiver.number)
            machine.loader_classes[receiver.number] = receiver.cls
            return NONE
        if name == "__init__" and base == External(DISTRIBUTED_SAMPLER) and isinstance(receiver, Instance):
            make_sampler(machine, node, given, number=receiver.number)
            return NONE
        if isinstance(base, ProjectClass):
            method = class_attribute(machine, base, name)
            if isinstance(method, Function):
                return machine.call_function(node, bound_to(method, receiver), given)
        if isinstance(base, External) and base.name in HELPERS and isinstance(receiver, Instance):
            if name == "__init__":
                return make_helper(machine, node, base.name, given, receiver.number)
            return call_method(machine, node, BoundMethod(ExternalObject(receiver.number, base.name), name), given)
    values = given.values
    if name == "__init__" and values and isinstance(receiver, Instance):
        machine.assign(receiver.number, GIVEN_TO_BASE, SequenceValue(tuple(values)))
    return derived(values)


def _collective(name: str, machine: Machine, node: ast.AST, given: Arguments) -> Value:
    how = COLLECTIVES[name]
    if constant(given.named.get("no_dist", NONE)) is True:
        return UNIFORM  # A checkpoint that this rank saves or loads alone.
    group = given.named.get("group", given.named.get("process_group"))
    if group is None and 0 <= how.group_position < len(given.positional):
        group = given.positional[how.group_position]
    whole = group is None or constant(group) is None or group == WORLD_GROUP or sharding.meets_peers(machine, group)
    short = name.removeprefix("torch.distributed.")
    if short == "init_process_group" and machine.in_parent and not machine.undecided:
        rank = given.named.get("rank", NONE)
        machine.in_parent = not (is_varying(rank) or constant(rank) is None)  # A launcher has started it as a rank.
    if short == "init_process_group" and constant(given.named.get("world_size", NONE)) == machine.mask.bit_count():
        whole = machine.mask == ALL_RANKS  # A group of just the ranks that come here: the others do not belong to it.
    machine.emit("collective", short, node, given, in_tree=whole)
    if short == "init_process_group" and isinstance(node, ast.Call):
        _learn_roles(machine, node)
    if isinstance(node, ast.Call):
        for position in how.writes:
            target = (
                node.args[position] if position < len(node.args) else node.keywords[0].value if node.keywords else None
            )
            if target is not None:
                held = given.positional[position] if position < len(given.positional) else NONE
                of_model = any(kind in OF_MODELS for kind, _ in tags_of(held))
                of_all = tagged(SYNCHRONISED, frozenset({RESULT})) if of_model else SYNCHRONISED
                of_one = Unknown(True, tags=frozenset({REDUCED})) if whole and short == "reduce" else VARYING
                overwrite(machine, target, of_all if how.uniform and whole else of_one)
                if how.uniform and whole and isinstance(target, ast.Name):
                    machine.frame.agreed.add(target.id)
    return SYNCHRONISED


# What a variable of unknown origin holds that is given under these names to `init_process_group`.
_ROLES: dict[str, Value] = {"rank": exact_per_rank(GLOBAL_RANK), "world_size": WORLD_SIZE}


def _learn_roles(machine: Machine, node: ast.Call) -> None:
    """Learn from how the group is made which variable is the rank, and which the number of ranks, by any name."""
    for entry in node.keywords:
        value, role = entry.value, _ROLES.get(entry.arg or "")
        if isinstance(value, ast.Name) and role is not None:
            known = machine.lookup(value.id)
            if isinstance(known, Unknown) and not known.varying and not known.tags:
                machine.assign(scope_of(machine, value.id), value.id, role)


def _get_rank(machine: Machine, node: ast.AST, given: Arguments) -> Value:
    group = given.value("group", 0) or NONE
    if constant(group) is not None and group != WORLD_GROUP:
        return sharding.rank_in(machine, group)
    return exact_per_rank(GLOBAL_RANK)


def _environment(machine: Machine, node: ast.AST, given: Arguments) -> Value:
    if not given.positional:
        return UNIFORM
    value = by_rank(lambda name: variable(machine, constant(name)), given.positional[0])
    fallback = given.value("default", 1) or NONE
    if isinstance(value, Unknown) and not value.tags:
        return join(value, fallback) if value.varying else derived((value,))
    return value


def _save(machine: Machine, node: ast.AST, given: Arguments) -> Value:
    machine.emit("save", "torch.save", node, given)
    return NONE


def _load(machine: Machine, node: ast.AST, given: Arguments) -> Value:
    """Return the same on all ranks, except for a file of the part of the data that a rank took for itself.

    What each rank loads of a file of its own name is its share, and yet alike in what it holds, as a checkpoint is.
    """
    path = given.value("f", 0) or NONE
    parts = frozenset(tag for tag in tags_of(path) if tag[0] == PART)
    shared = frozenset({SHARE}) if is_varying(path) and not only_of_files(path) else frozenset()
    names = {PurePath(str(one.value)).name if isinstance(one, Const) else "" for one in options_of(path)}
    copied = OWN_FOLDER in tags_of(path) or (len(names) == 1 and "" not in names)
    return Unknown(bool(parts), False, parts | shared | (frozenset({OWN_FOLDER}) if copied else frozenset()))


def _joined_path(*parts: Value) -> Value:
    return derived(parts, in_own_folder(parts[:-1], parts[-1]) if parts else frozenset())


def _range(machine: Machine, node: ast.AST, given: Arguments) -> Value:
    result = by_rank(BUILTIN_CALLS["range"], *given.positional)
    return ranged(machine, node, given.positional, result)


def _islice(machine: Machine, node: ast.AST, given: Arguments) -> Value:
    result = plain_handler_of("itertools.islice")(machine, node, given)
    return strided(machine, node, given.positional, result)


def _infer(machine: Machine, node: ast.AST, given: Arguments) -> Value:
    """Call the model that MONAI's inference over windows is given, as it does for each part of its input."""
    model = given.value("predictor", 3)
    if not isinstance(model, (Function, Instance, ExternalObject)):
        return derived(given.values)
    window = given.value("inputs", 0) or UNIFORM
    return derived([machine.apply(node, model, Arguments((window,))), window])


def _no_gradients(machine: Machine, node: ast.AST, given: Arguments) -> Value:
    if len(given.positional) == 1 and isinstance(given.positional[0], Function):
        function = given.positional[0]
        return Function(function.node, function.module, function.scope, function.receiver, function.owner, False)
    return NO_GRADIENTS


def _class_of_fields(machine: Machine, node: ast.AST, given: Arguments) -> Value:
    """Return the class that ``namedtuple`` and the like make: one of fields, in their order."""
    listed = given.value("field_names", 1) or given.named.get("fields", UNIFORM)
    names = constant(listed)
    if isinstance(listed, SequenceValue) and not listed.open:
        names = [constant(one.values[0] if isinstance(one, SequenceValue) else one) for one in listed.values]
    fields = names.replace(",", " ").split() if isinstance(names, str) else names
    if not isinstance(fields, list) or not all(isinstance(one, str) and one.isidentifier() for one in fields):
        return derived(given.values)
    return ProjectClass(_made_class(node, tuple(fields)), machine.frame.module.name, machine.object_number(node))


@lru_cache(maxsize=1_024)
def _made_class(node: ast.AST, fields: tuple[str, ...]) -> ast.ClassDef:
    lines = ["@dataclass", "class Fields:", *(f"    {field}: object" for field in fields), "    pass"]
    made = ast.parse("\n".join(lines)).body[0]
    assert isinstance(made, ast.ClassDef)
    return ast.copy_location(made, node)


def _field(machine: Machine, node: ast.AST, given: Arguments) -> Value:
    """Return the default of a field of a dataclass, made by its factory where it has one."""
    factory = given.named.get("default_factory")
    if isinstance(factory, (Function, ProjectClass, External)):
        return machine.apply(node, factory)
    return given.named.get("default", UNIFORM)


def _make_growing(machine: Machine, node: ast.AST, given: Arguments) -> Value:
    """Return a dict that makes what it lacks; of a class of the project, one object stands for all that it makes."""
    factory = given.value("default_factory", 0)
    made = machine.apply(node, factory) if isinstance(factory, ProjectClass) else None
    if isinstance(made, Instance):
        return DictValue(((OPEN, made),))
    return Unknown(opaque=True, tags=frozenset({GROWING}))


_SPECIAL: dict[str, Handler] = {
    **dict.fromkeys(("collections.namedtuple", "typing.NamedTuple", "dataclasses.make_dataclass"), _class_of_fields),
    "dataclasses.field": _field,
    "collections.defaultdict": _make_growing,
    "collections.Counter": lambda machine, node, given: members_of(
        "set", Unknown(any(map(is_varying, given.positional)), True, derived(given.positional).tags | {GROWING})
    ),
    **sharding.CALLS,
    "torch.distributed.new_group": make_group,
    "torch.distributed.get_rank": _get_rank,
    "torch.distributed.get_node_local_rank": lambda machine, node, given: (
        UNIFORM if machine.spawns else exact_per_rank(LOCAL_RANK)
    ),
    "torch.distributed.get_world_size": lambda machine, node, given: UNIFORM if given.values else WORLD_SIZE,
    **dict.fromkeys(
        RANK_AND_SIZE, lambda machine, node, given: SequenceValue((exact_per_rank(GLOBAL_RANK), WORLD_SIZE))
    ),
    "os.getenv": _environment,
    "os.environ.get": _environment,
    "os.environ.setdefault": _environment,
    **SEEDS,
    DATA_LOADER: make_loader,
    DISTRIBUTED_SAMPLER: make_sampler,
    DDP: make_ddp,
    "torch.save": _save,
    "torch.load": _load,
    "os.path.join": lambda machine, node, given: _joined_path(*given.values),
    "deepspeed.initialize": make_engine,
    "torch.cuda.set_device": set_device,
    "torch.cuda.device": set_device,
    "torch.cuda.device_count": lambda machine, node, given: DEVICE_COUNT,
    "torch.device": make_device,
    "contextlib.nullcontext": lambda machine, node, given: NO_CONTEXT,
    "functools.partial": make_partial,
    "builtins.super": make_super,
    "builtins.isinstance": is_instance,
    "builtins.hasattr": has_attribute,
    "builtins.type": type_of,
    "builtins.getattr": read_attribute,
    "builtins.eval": read_text,
    "builtins.globals": lambda machine, node, given: ProjectModule(machine.frame.module.name),
    "importlib.import_module": import_by_name,
    "builtins.__import__": import_by_name,
    **dict.fromkeys(("builtins.dict", "collections.OrderedDict"), make_dict),
    "builtins.range": _range,
    "itertools.islice": _islice,
    **dict.fromkeys(
        ("multiprocessing.get_context", "torch.multiprocessing.get_context"),
        lambda machine, node, given: External("multiprocessing"),  # It has the same functions.
    ),
    **dict.fromkeys((f"monai.inferers.{part}sliding_window_inference" for part in ("", "utils.")), _infer),
    **dict.fromkeys(("torch.no_grad", "torch.inference_mode", "torch.autograd.no_grad"), _no_gradients),
    "torch.set_grad_enabled": lambda machine, node, given: (
        NO_GRADIENTS if given.positional and constant(given.positional[0]) is False else UNIFORM
    ),
}
