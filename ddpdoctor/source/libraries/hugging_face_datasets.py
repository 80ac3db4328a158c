"""What the data sets of Hugging Face do for ranks: they are cut into parts that need not be equal."""

from __future__ import annotations

import ast

from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import Arguments, Unknown, Value, derived
from ddpdoctor.source.ranks.data_partitions import as_part, is_rank


def split_by_node(machine: Machine, node: ast.AST, given: Arguments) -> Value:
    """Return the part of a rank: of a stream its files or every n-th item, of a table a range of rows."""
    rank = given.value("rank", 1) or Unknown()
    result = derived(given.values)
    return as_part(machine, node, result) if is_rank(rank) else result


CALLS = {f"datasets.{place}split_dataset_by_node": split_by_node for place in ("", "distributed.")}
"""Functions by their full names."""
