"""What an entry of torch's flight recorder means: the names of kinds and dtypes, and who issued it."""

from __future__ import annotations

from typing import Any

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


def origin_of(frames: list[tuple[str, int, str]]) -> str:
    """Return who issued a collective, by the Python frames that led to it, innermost first."""
    if not frames or "/torch/autograd/" in frames[0][0]:
        return "ddp-backward"  # by the reducer: nothing of Python's stands between autograd and the collective
    for file, _, name in frames:
        if file.endswith("/algorithms/join.py"):
            return "join"
        if file.endswith("/nn/parallel/distributed.py"):
            if name.endswith("__init__"):
                return "ddp-construct"
            if not name.endswith(("_run_ddp_forward", "forward")) or name.endswith(("_pre_forward", "_post_forward")):
                return "ddp-forward"
        elif "/torch/" not in file:
            return "user"
    return "user"


def described(kind: str, shapes: list[tuple[int, ...]], dtype: str, origin: str) -> dict[str, Any]:
    """Return the fields of a signature; ``dtype`` is torch's name of it."""
    name = DTYPES.get(dtype, dtype.lower())
    numels = []
    for shape in shapes:
        count = 1
        for size in shape:
            count *= int(size)
        numels.append(count)
    return {
        "kind": kind,
        "shapes": shapes,
        "numels": numels,
        "dtype": name,
        "reduce_op": "",
        "root": None,
        "size_bytes": sum(numels) * BYTES.get(name, 1),
        "origin": origin,
    }
