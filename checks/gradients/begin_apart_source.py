"""Replicas of shards that are made after seeds of the ranks' own, and that nothing makes alike."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddpdoctor.check import Verdict
from ddpdoctor.checks.data.unseeded_random_split import seeds_of
from ddpdoctor.files import regex
from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.values import ALL_RANKS, FALSE, ExternalObject, Instance, PerRank, constant
from ddpdoctor.source.libraries.sharding import PART
from ddpdoctor.source.projection import Projection
from ddpdoctor.source.queries.meshes import MeshUse, mesh_uses
from ddpdoctor.source.queries.wrapped_models import averages_by_hand, reaches_unread
from ddpdoctor.source.script.script import calls_any
from ddpdoctor.source.torch_model.buffers import parts_of_module

ALIKE_BEFORE = (
    "Make the model, or load it, alike on all ranks before it is sharded: call torch.manual_seed with the same "
    "number on every rank before, and seed by rank afterwards."
)
_WHOLE_MESH = "Give it the mesh with both dimensions, and seed all ranks alike before the model is made."
# Modules of torch that draw their parameters when they are made.
_DRAWN = regex(
    r"torch\.nn\.(Linear|Bilinear|Conv\dd|ConvTranspose\dd|Embedding|EmbeddingBag|RNN|LSTM|GRU|MultiheadAttention"
    r"|Transformer\w*)$"
)
# Parts of the names of calls that may give all ranks the same parameters: of torch.distributed, of checkpoints, and of
# libraries that fetch weights.
_MAKES_ALIKE = regex(r"broadcast|scatter|copy_$|pretrained|(^|_)load|state_dict$")
_MEETING = frozenset({"init_process_group", "init_device_mesh", "new_group", "barrier"})


def begin_apart(projection: Projection) -> Iterator[Verdict]:
    """Yield the seeds of the ranks' own after which replicas are made, each once."""
    modules = projection.machine.script.modules
    seeds = [seed for seed in seeds_of(projection, "torch") if _is_of_models(seed)]
    if not any(map(_is_by_rank, seeds)) or any(
        _MAKES_ALIKE.search(name) for one in modules for name in one.calls_by_name
    ):
        return
    told: set[ast.AST] = set()
    for use in mesh_uses(projection):
        model = use.event.receiver
        if isinstance(model, (Instance, ExternalObject)) and reaches_unread(projection, model):
            continue
        kept = _kept(projection, use)
        made = _made_apart(projection, use, seeds) if kept else None
        if made is None or made[0].node in told:
            continue
        seed, layer = made
        told.add(seed.node)
        yield Verdict(
            sentence="each rank makes the model after a seed of its own, and nothing makes the replicas of a shard "
            f"alike: {kept}",
            remedy=_WHOLE_MESH if len(use.places) == 1 else ALIKE_BEFORE,
            locations=seed.location,
            because=(
                (f"{layer.name.rpartition('.')[2]} draws its parameters after that seed", layer.location),
                ("here the model is sharded", use.event.location),
            ),
        )


def _is_of_models(seed: Event) -> bool:
    """Return whether a seed decides what parameters are drawn on the CPU, and holds on."""
    return not seed.name.startswith("torch.cuda.") and all("fork_rng" not in ast.unparse(c.node) for c in seed.contexts)


def _is_by_rank(seed: Event) -> bool:
    """Return whether every rank certainly gives torch another number."""
    value = seed.argument("seed", 0)
    certain = seed.name.startswith("torch.") and seed.ranks == ALL_RANKS and not seed.undecided
    if not certain or not isinstance(value, PerRank) or value.guessed:
        return False
    numbers = {constant(one) for one in value.values}
    return len(numbers) == len(value.values) and ... not in numbers


def _kept(projection: Projection, use: MeshUse) -> str:
    """Return what becomes of the replicas along a dimension that shards are not divided along; empty for none."""
    if use.tensors or use.event.kind == "wrap" or use.event.named.get("sync_module_states", FALSE) != FALSE:
        return ""
    sizes = use.made.argument("mesh_shape", 1)
    if constant(next(iter(getattr(sizes, "values", ())), FALSE)) == 1:
        return ""
    if len(use.places) == 2:
        return "those that the mesh keeps train on from different parameters"
    names = [constant(one) for one in getattr(use.made.named.get("mesh_dim_names"), "values", ())]
    script = projection.machine.script
    parts = [one for one in projection.of_kind("object") if one.name == PART]
    taken = {constant(one.positional[1]) for one in parts}
    written = [one.value for module in script.modules for one in module.index.of(ast.Constant)]
    left = [name for name in names if isinstance(name, str) and name not in taken and written.count(name) == 1]
    asked = calls_any(script, ("get_group", "get_all_groups", "new_group")) or averages_by_hand(script)
    if len(names) != 2 or len(left) != 1 or ... in taken or asked:
        return ""
    return f"the dimension `{left[0]}` of the mesh is used by nothing, and ranks along it train models of their own"


def _made_apart(projection: Projection, use: MeshUse, seeds: list[Event]) -> tuple[Event, Event] | None:
    """Return a layer of a sharded model that each rank draws after another seed, behind that seed."""
    begun = min((one.ordinal for one in projection.in_course("backward")), default=0)
    for part in parts_of_module(projection.machine, use.event.receiver or FALSE):
        layer = projection.machine.object(part) if isinstance(part, ExternalObject) else None
        if layer is None or not _DRAWN.match(layer.name) or layer.ranks != ALL_RANKS or layer.undecided:
            continue
        before = [seed for seed in seeds if seed.ordinal < layer.ordinal]
        later = [seed for seed in seeds if layer.ordinal < seed.ordinal < begun]
        between = (one for one in projection.of_kind("collective") if layer.ordinal < one.ordinal < begun)
        meets = any(one.name not in _MEETING and " of the sharded" not in one.name for one in between)
        if before and _is_by_rank(before[-1]) and all(map(_is_by_rank, later)) and not meets:
            return before[-1], layer
    return None
