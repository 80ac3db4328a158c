"""What sharding does for ranks: modules in place or wrapped, tensors, state dicts and meshes, and who must call them.

What is sharded over every rank of the job is matched by every rank. Where a mesh has several dimensions only the ranks
along one of them meet, and which those are is not followed. But such a group has two ranks or more: one rank alone, or
all but one, leave a group incomplete however the mesh is laid out. Of two in four it depends, and nothing is said.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from functools import partial

from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import (
    NONE,
    SYNCHRONISED,
    VARYING,
    Arguments,
    Const,
    External,
    ExternalObject,
    Instance,
    OneOf,
    SequenceValue,
    Sharded,
    Tag,
    Unknown,
    Value,
    constant,
    derived,
    options_of,
    tagged,
    tags_of,
)
from ddpdoctor.source.ranks.rank_local_values import of_own_data
from ddpdoctor.source.ranks.ranks import GLOBAL_RANK, WORLD_SIZE, exact_per_rank
from ddpdoctor.source.script.script import uses_part
from ddpdoctor.source.torch_model.ddp import SHARDED_TAGS
from ddpdoctor.source.torch_model.external_objects import SHARDED_PARAMETERS, Handler
from ddpdoctor.source.torch_model.recorded_calls import SHARDED
from ddpdoctor.source.vocabulary import ENGINE, MESH, SHARDED_WRAPPER

FORWARD = "forward of the sharded model"
PART = "a part of torch.distributed.DeviceMesh"
"""Name of the event that takes dimensions of a mesh; its arguments are the mesh and their names."""
_MESHES = frozenset({MESH, PART})
_GROUP = "torch.distributed.ProcessGroup of a mesh"
COORDINATE = "coordinate"
"""Kind of the tags of what is made of a rank's place in a mesh; the number is that of the dimensions that count it."""
# Methods of the older wrapper in which it gathers or reduces.
_ITS_OWN = frozenset({"state_dict", "clip_grad_norm_"})
SHARDS = "shards"
"""Kind of the tags of a rank's own part of a sharded model's state; with a number, of an optimizer's state of one."""
OF_TENSORS = frozenset({"full_tensor", "redistribute"})
"""Methods of a distributed tensor that are collectives; nothing else that is met beside torch has them."""
_PLAIN = (ast.Name, ast.Attribute)
_GATHERING_OPTIONS = ("full_state_dict", "broadcast_from_rank0")


def wrapper(machine: Machine, node: ast.AST, given: Arguments) -> Value:
    """Make the wrapper whose forward, backward and state dict are collectives."""
    number = machine.object_number(node)
    machine.emit("object", SHARDED_WRAPPER, node, given, number=number)
    group = given.named.get("process_group", given.named.get("device_mesh", NONE))
    whole = given.complete and constant(group) is None and len(given.positional) < 2
    machine.sharded[number] = Sharded(whole, True, True, with_data=True)
    if given.positional:
        machine.note("training", SHARDED, node, given, receiver=given.positional[0])
    return ExternalObject(number, SHARDED_WRAPPER)


def make_mesh(machine: Machine, node: ast.AST, given: Arguments) -> Value:
    """Make a mesh of the ranks, in which all take part; one of several dimensions has groups that only some share."""
    number = machine.object_number(node)
    machine.emit("collective", "init_device_mesh", node, given, number=number, in_tree=True)
    shape = given.value("mesh_shape", 1)
    known = isinstance(shape, SequenceValue) and not shape.open
    _note_sizes(machine, [constant(one) for one in shape.values] if isinstance(shape, SequenceValue) and known else [])
    return ExternalObject(number, MESH)


def mesh_of_ranks(machine: Machine, node: ast.AST, given: Arguments) -> Value:
    """Make a mesh of an array of ranks; its dimensions are counted by their names, or by how the array is written."""
    from ddpdoctor.source.script.rank_arrays import axes_of_mesh

    number = machine.object_number(node)
    machine.emit("object", MESH, node, given, number=number)
    names, array = given.named.get("mesh_dim_names"), given.value("mesh", 1)
    sizes: list[object] = []
    while isinstance(array, SequenceValue) and not array.open and array.values:
        sizes.append(len(array.values))
        array = array.values[0]
    if not sizes and isinstance(names, SequenceValue) and not names.open:
        sizes = [...] * len(names.values)
    _note_sizes(machine, sizes or [...] * len(axes_of_mesh(machine.frame.module, node)))
    return ExternalObject(number, MESH)


def _note_sizes(machine: Machine, sizes: Sequence[object]) -> None:
    machine.meshes_are_flat = machine.meshes_are_flat and len(sizes) == 1
    machine.meshes_divide = machine.meshes_divide and len(sizes) > 0 and 1 not in sizes


def part_of_mesh(machine: Machine, node: ast.AST | tuple[ast.AST, int], mesh: Value, key: Value) -> Value | None:
    """Return what ``mesh[...]`` is: the mesh itself where it has one dimension; None where it is no mesh."""
    if not isinstance(mesh, ExternalObject) or mesh.name not in _MESHES:
        return None
    if machine.meshes_are_flat:
        return mesh
    number = machine.object_number(node)
    here = node if isinstance(node, ast.AST) else node[0]
    machine.emit("object", PART, here, Arguments((mesh, key)), number=number)
    return ExternalObject(number, PART)


def meets_peers(machine: Machine, group: Value | None) -> bool:
    """Return whether peers have to match what the present ranks do in a group that a mesh has made."""
    made = isinstance(group, ExternalObject) and group.name == _GROUP
    return made and _is_matched(machine, everywhere=machine.meshes_are_flat, along_mesh=True)


def _is_matched(machine: Machine, *, everywhere: bool, along_mesh: bool) -> bool:
    if everywhere or not along_mesh or not machine.meshes_divide:
        return everywhere
    present = machine.mask.bit_count()
    if present == 2:
        machine.uncertain = True  # What the other two do may match it or not.
    return present != 2


def method(machine: Machine, node: ast.AST, receiver: Value, name: str, given: Arguments) -> Value | None:
    """Do a method of a mesh or of the wrapper, and return its result; None for one like any other."""
    if not isinstance(receiver, ExternalObject):
        return None
    if receiver.name == SHARDED_WRAPPER and name in _ITS_OWN:
        if name == "state_dict" and uses_part(machine.script, ("SHARDED_STATE_DICT", "LOCAL_STATE_DICT")):
            return derived([])  # Of the rank's own shards.
        matched = _is_met(machine, machine.sharded[receiver.number])
        machine.emit("collective", f"{name} of the sharded model", node, receiver=receiver, in_tree=matched)
        return SYNCHRONISED
    if receiver.name == ENGINE and name == "step" and receiver.number in machine.sharded:
        machine.emit("collective", "step of the sharded model", node, in_tree=True)
        return NONE
    if receiver.name not in _MESHES:
        return None
    if name == "get_rank":
        return exact_per_rank(GLOBAL_RANK)
    dimension = given.value("mesh_dim", 0)
    if name == "get_local_rank":
        if machine.meshes_are_flat:
            return exact_per_rank(GLOBAL_RANK)
        return _place_in(receiver if dimension is None else part_of_mesh(machine, node, receiver, dimension))
    if name == "get_coordinate":
        made = machine.object(receiver)
        shape = None if made is None or made.name == PART else made.argument("mesh_shape", 1)
        if machine.meshes_are_flat or not isinstance(shape, SequenceValue) or shape.open:
            return VARYING
        parts = (part_of_mesh(machine, (node, at), receiver, Const(at)) for at in range(len(shape.values)))
        return SequenceValue(tuple(map(_place_in, parts)))
    if name == "size":
        return WORLD_SIZE if machine.meshes_are_flat and not given.positional and not given.named else derived([])
    if name == "get_group":
        number = machine.object_number((node, "group"))
        part = receiver if dimension is None else part_of_mesh(machine, node, receiver, dimension)
        machine.emit("object", _GROUP, node, Arguments((part or receiver,)), number=number)
        return ExternalObject(number, _GROUP)
    return None


def rank_in(machine: Machine, group: Value) -> Value:
    """Return the rank in a group, which a mesh may have made."""
    made = machine.object(group)
    return VARYING if made is None or made.name != _GROUP else _place_in(made.positional[0])


def _place_in(mesh: Value | None) -> Value:
    tags = frozenset({(COORDINATE, mesh.number)}) if isinstance(mesh, ExternalObject) else frozenset[Tag]()
    return Unknown(True, False, tags)


def of_tensor(machine: Machine, node: ast.AST, name: str) -> Value:
    """Gather or redistribute a distributed tensor, whatever it is held in."""
    everywhere = machine.meshes_are_flat and _all_everywhere(machine)
    along_mesh = all(one.everywhere or one.along_mesh for one in machine.sharded.values())
    matched = _is_matched(machine, everywhere=everywhere, along_mesh=along_mesh and not machine.meshes_are_flat)
    machine.emit("collective", name, node, in_tree=matched)
    return SYNCHRONISED


def state_dict(name: str, machine: Machine, node: ast.AST, given: Arguments) -> Value:
    """Gather the state of a sharded model, or spread one, where the options ask for the whole."""
    options = given.named.get("options", NONE)
    made = machine.object(options)
    asks = made is not None and any(constant(made.named.get(option, NONE)) is True for option in _GATHERING_OPTIONS)
    if asks and machine.sharded and all(one.certain for one in machine.sharded.values()):
        machine.emit("collective", name, node, given, in_tree=_all_everywhere(machine))
    elif name == "get_model_state_dict" and options == NONE and given.positional:
        return own_part(machine, given.positional[0]) or derived(given.positional)
    return derived(given.values)


def own_part(machine: Machine, held: Value) -> Value | None:
    """Return the state of a module that is certainly sharded in place, a part on each rank, or that of an optimizer of
    such parameters or of those that the older wrapper has sharded; None for others.
    """
    made = machine.object(held)
    if made is not None and made.name.startswith("torch.optim.") and ".lr_scheduler." not in made.name:
        kinds = {kind for value in made.values for kind, _ in tags_of(value)}
        return derived([], frozenset({(SHARDS, made.ordinal)})) if SHARDED_PARAMETERS in kinds else None
    wrapped = made is not None and made.name == SHARDED_WRAPPER
    return None if wrapped or not is_in_parts(machine, held) else derived([], frozenset({(SHARDS, 0)}))


def is_in_parts(machine: Machine, module: Value) -> bool:
    """Return whether each rank certainly has a part of a module, which a strategy of the older wrapper may prevent."""
    options = list(options_of(module))
    how = machine.sharded.get(getattr(options[0], "number", 0)) if len(options) == 1 else None
    if how is None or not (how.certain and how.gathers and how.with_data):
        return False
    made = machine.object(options[0])
    if made is None or made.name != SHARDED_WRAPPER:
        return True
    strategy = made.named.get("sharding_strategy", External("FULL_SHARD"))
    known = made.complete and isinstance(strategy, External) and not strategy.name.endswith("NO_SHARD")
    return known and (how.everywhere or (machine.meshes_divide and "device_mesh" in made.named))


def clip_gradients(machine: Machine, node: ast.AST, given: Arguments) -> Value:
    """Reduce the norm of gradients that are sharded in place; those of other models are the rank's own."""
    how = None
    clipped = node.args[0] if isinstance(node, ast.Call) and node.args else None
    method = clipped.func if isinstance(clipped, ast.Call) else None
    if isinstance(method, ast.Attribute) and method.attr == "parameters" and isinstance(method.value, _PLAIN):
        owner = machine.evaluate(method.value)
        kinds = [machine.sharded.get(getattr(one, "number", 0)) for one in options_of(owner)]
        wrapped = any(isinstance(one, ExternalObject) and one.name == SHARDED_WRAPPER for one in options_of(owner))
        how = kinds[0] if len(kinds) == 1 and not wrapped else None
    if how is not None and how.gathers and how.certain:
        machine.emit("collective", "clip_grad_norm_ of the sharded model", node, in_tree=_is_met(machine, how))
    return derived(given.positional)


def forward(
    machine: Machine, node: ast.AST, module: Instance | ExternalObject, given: Arguments, result: Value
) -> Value:
    """Run a forward of a module that may be sharded; return what comes out of it, marked as such."""
    how = machine.sharded.get(module.number)
    if how is None:
        return result

    def gather() -> None:
        machine.emit("forward", FORWARD, node, given, receiver=module, in_tree=_is_met(machine, how))

    if how.gathers and how.certain:
        gather()
    elif how.gathers:
        machine.fork([gather, lambda: None])
    if not machine.gradients or not how.everywhere or not how.certain:
        return result
    kept = result if not isinstance(result, (ExternalObject, Instance, OneOf, Const)) else derived(given.positional)
    return tagged(
        of_own_data(kept) if how.with_data else kept, frozenset({(SHARDED_TAGS[not how.with_data], module.number)})
    )


def _in_place(machine: Machine, node: ast.AST, given: Arguments, *, gathers: bool, with_data: bool) -> Value:
    """Shard a module in place, or several as one unit, let it average its gradients, or divide its computation.

    Of the latter the ranks share their data.
    """
    module = given.value("module", 0) or NONE
    mesh = given.named.get("mesh", given.named.get("device_mesh", NONE))
    if not with_data and len(given.positional) > 1:
        mesh = given.positional[1]
    on_mesh = isinstance(mesh, ExternalObject) and mesh.name in _MESHES
    whole = constant(mesh) is None or (isinstance(mesh, ExternalObject) and mesh.name == MESH)
    whole = whole and (with_data or machine.meshes_are_flat)
    if gathers:
        machine.note("training", SHARDED, node, given, receiver=module)
    parts = module.values if isinstance(module, SequenceValue) else (module,)
    for option in (option for part in parts for option in options_of(part)):
        if isinstance(option, (Instance, ExternalObject)) and not machine.quiet:
            known = machine.sharded.get(option.number)
            machine.sharded[option.number] = Sharded(
                everywhere=whole and (known is None or known.everywhere),
                along_mesh=on_mesh and (known is None or known.everywhere or known.along_mesh),
                gathers=gathers or (known is not None and known.gathers),
                certain=not machine.undecided and len(parts) == 1 == len(list(options_of(module))),
                with_data=with_data and (known is None or known.with_data),
            )
    return module


def _is_met(machine: Machine, how: Sharded) -> bool:
    return _is_matched(machine, everywhere=how.everywhere, along_mesh=how.along_mesh)


def _all_everywhere(machine: Machine) -> bool:
    return all(one.everywhere for one in machine.sharded.values())


CALLS: Mapping[str, Handler] = {
    "torch.distributed.fsdp.fully_shard": partial(_in_place, gathers=True, with_data=True),
    "torch.distributed._composable.replicate": partial(_in_place, gathers=False, with_data=True),
    "torch.distributed.tensor.parallel.parallelize_module": partial(_in_place, gathers=True, with_data=False),
    SHARDED_WRAPPER: wrapper,
    "torch.distributed.init_device_mesh": make_mesh,
    MESH: mesh_of_ranks,
    "torch.nn.utils.clip_grad_norm_": clip_gradients,
    **{
        f"torch.distributed.checkpoint.state_dict.{name}": partial(state_dict, name)
        for name in (
            *("get_model_state_dict", "get_optimizer_state_dict", "get_state_dict"),
            *("set_model_state_dict", "set_optimizer_state_dict", "set_state_dict"),
        )
    },
}
