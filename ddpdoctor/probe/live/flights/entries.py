"""What an entry of torch's flight recorder means: the names of kinds and dtypes."""

from __future__ import annotations

from typing import Any

from ...facts import collectives
from ...facts.collectives import elements

KINDS = {
    "_all_gather_base": "all_gather_into_tensor",
    "_allgather_base": "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor",
    "all_reduce_barrier": "barrier",
    "allreduce_coalesced": "all_reduce",
}
"""Names in the recorder, as users spell them."""
DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
}
BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2}


def described(kind: str, shapes: list[tuple[int, ...]], dtype: str, origin: str) -> dict[str, Any]:
    """Return the fields of a signature; ``dtype`` is torch's name of it."""
    name = DTYPES.get(dtype, dtype.lower())
    size_bytes = sum(map(elements, shapes)) * BYTES.get(name, 1)
    return collectives.described(kind, shapes, name, size_bytes, origin)
