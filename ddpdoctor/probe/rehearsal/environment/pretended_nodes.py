"""The variables of a launcher on several nodes, set for a rank of a rehearsal on one."""

from __future__ import annotations

from collections.abc import MutableMapping


def pretend(environment: MutableMapping[str, str], ranks_per_node: int, slurm: bool) -> None:
    """Rewrite what torch's launcher set for ranks of one node; with ``slurm`` set Slurm's variables alike."""
    rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    node, local_rank = divmod(rank, ranks_per_node)
    nodes = -(-world_size // ranks_per_node)
    named: dict[str, int] = {
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": ranks_per_node,
        "GROUP_RANK": node,
        "GROUP_WORLD_SIZE": nodes,
        "NODE_RANK": node,
    }
    if slurm:
        named.update(
            SLURM_PROCID=rank,
            SLURM_LOCALID=local_rank,
            SLURM_NODEID=node,
            SLURM_NTASKS=world_size,
            SLURM_NPROCS=world_size,
            SLURM_NNODES=nodes,
            SLURM_JOB_NUM_NODES=nodes,
            SLURM_NTASKS_PER_NODE=ranks_per_node,
        )
    environment.update({name: str(number) for name, number in named.items()})
