"""What the data sets of Hugging Face do for ranks: they are cut into parts that need not be equal."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import Unknown, Value, derived
from ddpdoctor.source.ranks.data_partitions import as_part, is_rank


def split_by_node(
    machine: Machine, node: ast.AST, positional: list[Value], named: Mapping[str, Value], complete: bool
) -> Value:
    """Return the part of a rank: of a stream its files or every n-th item, of a table a range of rows."""
    rank = named.get("rank", positional[1] if len(positional) > 1 else Unknown())
    result = derived([*positional, *named.values()])
    return as_part(machine, node, result) if is_rank(rank) else result


CALLS = {f"datasets.{place}split_dataset_by_node": split_by_node for place in ("", "distributed.")}
"""Functions by their full names."""
