"""What the data sets of Hugging Face do for ranks: they are cut into parts that need not be equal."""

from __future__ import annotations

import ast

from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import Arguments, Unknown, Value, derived
from ddpdoctor.source.ranks.data_partitions import SHARE, as_part, divided, is_rank


def split_by_node(machine: Machine, node: ast.AST, given: Arguments) -> Value:
    """Return the part of a rank: of a stream its files or every n-th item, of a table a range of rows."""
    rank = given.value("rank", 1) or Unknown()
    result = derived(given.values)
    if not is_rank(rank):
        return result
    divided(machine, node, rank, given.value("world_size", 2) or Unknown())
    return as_part(machine, node, result)


def shard(machine: Machine, node: ast.AST, receiver: Value, given: Arguments) -> Value | None:
    """Return the part of a rank that ``data.shard(count, rank)`` gives; None where it is by something else."""
    rank = given.value("index", 1)
    if rank is None or not is_rank(rank):
        return None
    divided(machine, node, rank, given.value("num_shards", 0) or Unknown())
    return derived([receiver, *given.values], frozenset({SHARE}))


CALLS = {f"datasets.{place}split_dataset_by_node": split_by_node for place in ("", "distributed.")}
"""Functions by their full names."""
