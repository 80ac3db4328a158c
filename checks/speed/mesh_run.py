"""Meshes whose shards are gathered between nodes, though those who hold replicas of one shard share a node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ddpdoctor.check import Verdict
from ddpdoctor.diagnosis.wording import bytes_text, count, rank_list, site_location
from ddpdoctor.record.model import RunRecord


def shards_across_nodes(record: RunRecord) -> Iterator[Verdict]:
    """Yield the groups of ranks that share shards and lie on several nodes, although a node has room for one of them
    and has replicas instead.
    """
    node = {rank.rank: rank.node for rank in record.ranks}
    smallest = min(Counter(node.values()).values(), default=0)
    for module in sorted(record.sharded_modules, key=lambda one: (-one.module, one.rank)):
        for replicas in sorted({ranks for ranks, _ in module.replicas}):
            if len(replicas) < 2 or len({node[rank] for rank in replicas}) > 1:
                continue
            for shards, (calls, moved) in sorted(_gathered(record, module.rank).items()):
                across = sorted({node[rank] for rank in shards})
                if len(set(shards) & set(replicas)) != 1 or len(across) < 2 or len(shards) > smallest:
                    continue
                made = next((one.site for one in record.waits if one.ranks == shards), module.site)
                location, nodes = site_location(record.site(made)), rank_list(across).replace("rank", "node")
                forward = site_location(record.site(module.site))
                yield Verdict(
                    sentence=f"the shards of {module.module_class} are gathered between nodes, and the ranks of each "
                    "node hold replicas of one another",
                    locations=location,
                    because=(
                        (
                            f"{rank_list(shards)}, which share shards, are on {nodes}: "
                            f"rank {module.rank} gathers and reduces them {count(calls, 'time')}, "
                            f"and hands in {bytes_text(moved)}",
                            forward,
                            {"calls": calls, "bytes": moved},
                        ),
                        (
                            f"{rank_list(replicas)}, which hold replicas of one shard, are "
                            f"{'both' if len(replicas) == 2 else 'all'} on node {node[replicas[0]]}",
                            location,
                        ),
                    ),
                )
                return


def _gathered(record: RunRecord, rank: int) -> dict[tuple[int, ...], tuple[int, int]]:
    """Return how often a rank gathers or reduces shards in each group, and how many bytes it has handed in there."""
    track, found = record.track(rank), dict[tuple[int, ...], tuple[int, int]]()
    for group, number in zip(track.group, track.signature, strict=True) if track is not None else ():
        signature, ranks = record.signatures[number], record.groups[group].ranks
        if signature.origin.startswith("fsdp-") and signature.kind != "all_reduce":
            calls, moved = found.get(ranks, (0, 0))
            found[ranks] = calls + 1, moved + signature.size_bytes
    return found
