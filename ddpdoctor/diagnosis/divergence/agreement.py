"""When two ranks' collectives are the same collective: the size rules of each kind."""

from __future__ import annotations

from ddpdoctor.record.model import Signature

POINT_TO_POINT = frozenset({"send", "recv", "isend", "irecv", "recv_any_source", "batch_isend_irecv"})
"""Kinds that pair two ranks, not a group: they take no part in the matching of sequences."""

_FAMILIES = {
    "all_gather_into_tensor": "all_gather",
    "all_gather_coalesced": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_coalesced": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "all_reduce_coalesced": "all_reduce",
}
"""Spellings of one collective; between two spellings only the family is compared."""

_LEGALLY_UNEQUAL = frozenset({"gather", "scatter", "all_to_all"})
"""Families whose ranks hand in tensors of different number and size."""

_LISTS = frozenset({"all_gather", "reduce_scatter"})
"""Kinds that NCCL also serves with tensors of unequal sizes, where the list on each rank has these sizes."""


def disagreement(one: Signature, other: Signature, backend: str = "") -> str:
    """Name what differs between two ranks' collectives that must agree; empty when they fit.

    ``backend`` is the group's: NCCL serves uneven lists in all_gather and reduce_scatter.
    """
    family = _FAMILIES.get(one.kind, one.kind)
    if family != _FAMILIES.get(other.kind, other.kind):
        return "kind of collective"
    if one.kind != other.kind:
        return ""
    if family not in _LEGALLY_UNEQUAL and one.numels != other.numels and not _uneven_list(one, other, backend):
        return "number of elements"
    if one.dtype and other.dtype and one.dtype != other.dtype:
        return "dtype"
    if one.reduce_op and other.reduce_op and one.reduce_op != other.reduce_op:
        return "reduce operation"
    if one.root is not None and other.root is not None and one.root != other.root:
        return "root"
    return ""


def _uneven_list(one: Signature, other: Signature, backend: str) -> bool:
    """Whether the number of elements may differ: each rank knows the others' sizes, or whether it does was not seen."""
    if not one.numels or not other.numels:
        return True
    if one.kind not in _LISTS:
        return False
    if one.uneven or other.uneven or len(set(one.numels)) > 1 or len(set(other.numels)) > 1:
        return True
    return "nccl" in backend and None in (one.uneven, other.uneven)
