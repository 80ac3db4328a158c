"""Digests of tensors and of samples, equal exactly when the bytes are."""

from __future__ import annotations

import ctypes
import hashlib
import sys
from typing import Any, Optional

WHOLE_UP_TO_BYTES = 1 << 20
"""Larger inputs are digested by a sample of their bytes."""
PIECES = 16
"""A sample is made of so many pieces, spread evenly, the head and the tail among them."""
_MOST_LEAVES = 64


def tensor_digest(tensor: Any, most_bytes: Optional[int] = None) -> str:
    """Return a digest of a tensor's type, shape and bytes, of at most so many; empty when they cannot be read."""
    try:
        # What only wraps other tensors (a sharded one, say) has no bytes of its own behind its address: reading them
        # would kill the process.
        if type(tensor).__torch_dispatch__ is not sys.modules["torch"].Tensor.__torch_dispatch__:
            return ""
        flat = tensor.detach().cpu().contiguous()
        size = flat.numel() * flat.element_size()
        digest = hashlib.blake2b(f"{flat.dtype}{tuple(flat.shape)}".encode(), digest_size=8)
        if size:
            address = flat.data_ptr()
            if not address:
                return ""
            content = memoryview((ctypes.c_char * size).from_address(address))
            if most_bytes is None or size <= most_bytes:
                digest.update(content)
            else:
                length = max(1, most_bytes // PIECES)
                for piece in range(PIECES):
                    start = (size - length) * piece // (PIECES - 1)
                    digest.update(content[start : start + length])
        return digest.hexdigest()
    except (RuntimeError, NotImplementedError, AttributeError, KeyError, TypeError, ValueError):
        return ""


def leaves(value: Any, torch: Any) -> tuple[str, ...]:
    """Return digests of the tensors, arrays, numbers and strings in a sample, in a fixed order."""
    found: list[str] = []
    _collect(value, torch, found, 0)
    return tuple(found)


def _collect(value: Any, torch: Any, found: list[str], depth: int) -> None:
    if len(found) >= _MOST_LEAVES or depth > 6:
        return
    if isinstance(value, torch.Tensor):
        found.append(tensor_digest(value, WHOLE_UP_TO_BYTES))
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            _collect(value[key], torch, found, depth + 1)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _collect(item, torch, found, depth + 1)
    elif isinstance(value, (str, bytes, int, float, bool, complex)) or value is None:
        found.append(_hash(repr(value).encode()))
    elif hasattr(value, "tobytes"):
        found.append(_hash(value.tobytes()[:WHOLE_UP_TO_BYTES]))
    elif hasattr(value, "__dict__"):
        _collect(vars(value), torch, found, depth + 1)
    else:
        found.append("")


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()
