"""What a collective is, alike in every record: who issued it, and the fields of its signature."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Optional

_ENDINGS = (("torch/nn/parallel/distributed.py", "ddp"), ("torch/distributed/algorithms/join.py", "join"))
_parts: dict[str, str] = {}


def origin_of(frames: Iterable[tuple[str, str]]) -> str:
    """Return who issued a collective, by file and function of the frames that led to it, innermost first.

    It is the user, ``join()``, or a moment of DDP; one of the module that DDP wraps is the user's. In a backward it is
    DDP's reducer: nothing of Python's stands between autograd and the collective.
    """
    is_innermost, in_ddp = True, False
    for file, qualified in frames:
        part, function = _part_of(file), qualified.rpartition(".")[2]
        if is_innermost and part == "autograd":
            return "ddp-backward"
        is_innermost = False
        if in_ddp and part != "ddp":
            return "ddp-forward"
        if part == "":
            return "user"
        if part == "join":
            return "join"
        if part == "ddp":
            if function == "__init__":
                return "ddp-construct"
            if not in_ddp and function in ("_run_ddp_forward", "forward"):
                return "user"
            in_ddp = True
    if is_innermost:
        return "ddp-backward"
    return "ddp-forward" if in_ddp else "user"


def described(
    kind: str,
    shapes: list[tuple[int, ...]],
    dtype: str,
    size_bytes: int,
    origin: str,
    *,
    reduce_op: str = "",
    root: Optional[int] = None,
) -> dict[str, Any]:
    """Return the fields of a signature."""
    return {
        "kind": kind,
        "shapes": shapes,
        "numels": [elements(shape) for shape in shapes],
        "dtype": dtype,
        "reduce_op": reduce_op,
        "root": root,
        "size_bytes": size_bytes,
        "origin": origin,
    }


def elements(shape: Iterable[int]) -> int:
    """Return how many elements a tensor of this shape has."""
    count = 1
    for size in shape:
        count *= int(size)
    return count


def _part_of(file: str) -> str:
    """Return the part of torch that a file belongs to, empty for other files; looked up once a file."""
    part = _parts.get(file)
    if part is None:
        part = next((part for ending, part in _ENDINGS if file.endswith(ending)), "torch")
        part = "autograd" if "/torch/autograd/" in f"/{file}" else part if "/torch/" in f"/{file}" else ""
        _parts[file] = part
    return part
