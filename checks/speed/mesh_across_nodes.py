"""The ranks of a device mesh that exchange the most lie on different nodes.

What it finds
    In the source, as advice: a DeviceMesh of which neighbouring ranks hold replicas of one shard (HSDP), while the
    ranks that share the shards are apart; sizes that keep as many replicas on each node as it has GPUs; and tensor
    parallelism along a dimension that comes before that of the data. In a rehearsal of several nodes (`--layout 2x2`):
    shards that are gathered between nodes by ranks whose replicas share a node, though a node has room for the shards.

Why it is bad
    The ranks of a node are neighbours. Shards are gathered in every forward and every backward, and the slices of a
    layer summed in every layer; what replicas exchange is one sum of the gradients of their shards. Within a node the
    former are carried by NVLink, between nodes by a network that is many times slower.

Example
    ranks = torch.arange(16).view(2, 8)
    mesh = DeviceMesh("cuda", ranks.T, mesh_dim_names=("dp_replicate", "dp_shard"))
    fully_shard(model, mesh=mesh)         # 8 replicas on each node, shards between nodes

Remedy
    Let the last dimension be the one that exchanges the most, with the ranks in their order:
    init_device_mesh("cuda", (nodes, ranks_of_a_node), mesh_dim_names=("dp_replicate", "dp_shard")).

When it is wrong
    In a job of one node, which reaches all its GPUs alike; or where the launcher does not number the ranks of a node
    one after the other.

References
    https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
    https://docs.pytorch.org/tutorials/intermediate/TP_tutorial.html
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from ddpdoctor.check import Check
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.source.interpreter.values import SequenceValue, tags_of
from ddpdoctor.source.projection import project
from ddpdoctor.source.queries.job_kind import is_single_node
from ddpdoctor.source.queries.meshes import MeshUse, mesh_uses
from ddpdoctor.source.ranks.ranks import DEVICE_COUNT, LOCAL_WORLD_SIZE
from ddpdoctor.source.script.script import Script
from ddpdoctor.source.vocabulary import MESH

CHECK = Check(
    code="DDP413",
    name="mesh-across-nodes",
    severity={"source": Severity.ADVICE, "rehearsal": Severity.WARNING},
    needs=frozenset({"sharded_modules", "collectives"}),
    nodes=2,
    subjects=("job",),
    triggers=("DeviceMesh", "device_mesh"),
)
IN_ORDER = (
    "Leave the ranks in their order, with the shards in the last dimension: "
    "init_device_mesh(device_type, (replicas, shards), mesh_dim_names=names)."
)
_TENSORS_LAST = (
    "Put the dimension of the tensor parallelism last: "
    "init_device_mesh(device_type, (data, tensor), mesh_dim_names=names)."
)
_OF_A_NODE = (DEVICE_COUNT.tags, LOCAL_WORLD_SIZE.tags)
_EXCHANGE = "Exchange the sizes: the number of nodes first, the ranks of a node last."


def in_source(script: Script) -> Iterator[Finding]:
    """Report the meshes that a job of several nodes would lay across them the wrong way round, each once."""
    projection = project(script)
    if is_single_node(projection):
        return
    uses = list(mesh_uses(projection))
    seen: set[ast.AST] = set()
    for use in uses:
        found = _of_tensors(use, uses) if use.tensors else _of_replicas(use)
        if found is not None and use.made.node not in seen:
            seen.add(use.made.node)
            yield found


in_run = CHECK.judged_by("checks.speed.steps_run", "shards_across_nodes", IN_ORDER)


def _of_replicas(use: MeshUse) -> Finding | None:
    """Return what is wrong with a mesh of two dimensions, of which the first keeps replicas and the second shards."""
    if use.event.kind == "wrap" or len(use.places) != 2:
        return None
    kept = "the first dimension of this mesh keeps replicas, and the second shards"
    if use.places[0] > use.places[1]:
        return CHECK.finding(
            "neighbouring ranks hold replicas of one shard, and those that share the shards lie apart: on several "
            "nodes every gather of the parameters goes between them",
            remedy=IN_ORDER,
            locations=use.location,
            because=(
                (kept, use.event.location),
                ("the ranks count on along its first dimension", use.location),
            ),
        )
    shape = use.made.argument("mesh_shape", 1)
    sizes = shape.values if isinstance(shape, SequenceValue) and len(shape.values) == 2 else ()
    if not sizes or tags_of(sizes[0]) not in _OF_A_NODE or use.made.name == MESH:
        return None
    return CHECK.finding(
        "each node keeps as many replicas of the model as it has ranks, and shards it over as many ranks as there are "
        "nodes: the sizes of the mesh are the wrong way round",
        remedy=_EXCHANGE,
        locations=use.location,
        because=((kept, use.event.location), ("the first has the size of a node", use.location)),
    )


def _of_tensors(use: MeshUse, uses: Sequence[MeshUse]) -> Finding | None:
    """Return what is wrong with a mesh along which tensors are divided between ranks that are not neighbours."""
    beside = next((one for one in uses if one.made.node is use.made.node and not one.tensors), None)
    if beside is None or max(use.places) > max(beside.places):
        return None
    return CHECK.finding(
        "the ranks that compute a layer together lie apart, and neighbours share no more than gradients: on several "
        "nodes the sums of every layer go between them",
        remedy=_TENSORS_LAST,
        locations=use.location,
        because=(
            ("this divides layers along a dimension whose ranks are apart", use.event.location),
            ("this shares gradients along one of neighbours", beside.event.location),
        ),
    )
