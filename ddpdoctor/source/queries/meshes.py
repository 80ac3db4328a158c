"""Along which dimensions of a device mesh models are divided, and how these count the ranks."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ddpdoctor.finding import Location
from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.values import ExternalObject, SequenceValue, Value, constant, tags_of
from ddpdoctor.source.libraries.sharding import COORDINATE, PART
from ddpdoctor.source.projection import Projection
from ddpdoctor.source.script.rank_arrays import axes_of_mesh
from ddpdoctor.source.torch_model.recorded_calls import SHARDED
from ddpdoctor.source.vocabulary import MESH, SHARDED_WRAPPER


class MeshUse(msgspec.Struct, frozen=True, eq=False):
    """A call that divides a model along dimensions of a mesh."""

    event: Event
    made: Event
    """The construction of the whole mesh."""
    places: tuple[int, ...]
    """Of each of the dimensions, among those that count the ranks, outermost first: the last is of neighbours."""
    tensors: bool
    """It divides the tensors of a layer, and not the data."""

    @property
    def location(self) -> Location:
        """The line that lays out the mesh."""
        return self.made.location


def mesh_uses(projection: Projection) -> Iterator[MeshUse]:
    """Yield the calls that divide a model along dimensions that are known of a mesh."""
    wrappers = {one.node for one in projection.in_course("object") if one.name == SHARDED_WRAPPER}
    for event in projection.in_course("training", "wrap"):
        if event.name != SHARDED and event.kind != "wrap":
            continue
        second = event.positional[1] if len(event.positional) > 1 else None
        tensors = event.kind != "wrap" and event.node not in wrappers and "mesh" not in event.named
        mesh = event.named.get("mesh") or event.named.get("device_mesh") or (second if tensors else None)
        laid = _dimensions(projection, mesh)
        if laid is not None and laid[1]:
            yield MeshUse(event, *laid, tensors)


def coordinates_in(projection: Projection, value: Value) -> list[tuple[Event, tuple[int, ...]] | None]:
    """Return by which dimensions of which meshes a value counts the ranks; None for what is not known."""
    numbers = sorted(number for kind, number in tags_of(value) if kind == COORDINATE)
    return [_dimensions(projection, ExternalObject(number, PART)) for number in numbers]


def _dimensions(projection: Projection, mesh: Value | None) -> tuple[Event, tuple[int, ...]] | None:
    """Return where a mesh is made and the places of its dimensions; None where its making is not known."""
    made = projection.machine.object(mesh) if isinstance(mesh, ExternalObject) else None
    if made is None:
        return None
    if made.name == PART:
        laid = _dimensions(projection, made.positional[0])
        names = _items(laid[0].named.get("mesh_dim_names")) if laid is not None else []
        chosen = _items(made.positional[1]) or [constant(made.positional[1])]
        numbers = [one for one in chosen if isinstance(one, int)]
        if laid is not None and len(numbers) == len(chosen) and all(one < len(laid[1]) for one in numbers):
            return laid[0], tuple(laid[1][one] for one in numbers)
        if laid is None or len(names) != len(laid[1]) or not set(chosen) <= set(names) - {...}:
            return None
        return laid[0], tuple(laid[1][names.index(name)] for name in chosen)
    if made.name == MESH:
        return made, axes_of_mesh(made.module, made.node)
    return made, tuple(range(len(_items(made.argument("mesh_shape", 1)))))


def _items(value: Value | None) -> list[object]:
    return [constant(one) for one in value.values] if isinstance(value, SequenceValue) and not value.open else []
