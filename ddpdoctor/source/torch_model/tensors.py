"""Sizes of tensors made by torch's factories from constants: elements and bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ddpdoctor.source.interpreter.values import Const, External, SequenceValue, TensorSize, Value, derived, tags_of

DEFAULT_BYTES = 4
"""float32."""
_BYTES_OF: Mapping[str, int] = {
    "float64": 8,
    "double": 8,
    "int64": 8,
    "long": 8,
    "float32": 4,
    "float": 4,
    "int32": 4,
    "int": 4,
    "float16": 2,
    "half": 2,
    "bfloat16": 2,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
}
_KEEPS_SIZE = frozenset(
    {
        "view",
        "reshape",
        "unsqueeze",
        "squeeze",
        "contiguous",
        "clone",
        "detach",
        "transpose",
        "permute",
        "t",
        "triu",
        "tril",
        "flatten",
        "to",
        "cuda",
        "cpu",
        "requires_grad_",
        "normal_",
        "uniform_",
        "fill_",
        "mul",
        "div",
        "neg",
        "exp",
    }
)


def _shaped(positional: Sequence[Value], named: Mapping[str, Value]) -> Value:
    sizes = list(positional)
    if len(sizes) == 1 and isinstance(sizes[0], SequenceValue) and not sizes[0].open:
        sizes = list(sizes[0].values)
    return _sized(sizes, named, positional)


def _sized(sizes: Sequence[Value], named: Mapping[str, Value], inputs: Sequence[Value]) -> Value:
    elements = 1
    for size in sizes:
        if not isinstance(size, Const) or not isinstance(size.value, int) or isinstance(size.value, bool):
            return derived([*inputs, *named.values()])
        elements *= size.value
    return TensorSize(elements, elements * _item_bytes(named.get("dtype")))


def _full(positional: Sequence[Value], named: Mapping[str, Value]) -> Value:
    return _shaped(positional[:1], named) if positional else derived(named.values())


def _arange(positional: Sequence[Value], named: Mapping[str, Value]) -> Value:
    if len(positional) == 1:
        size = _sized(positional, named, positional)
        if isinstance(size, TensorSize) and "dtype" not in named:
            return TensorSize(size.elements, size.elements * 8)
        return size
    return derived([*positional, *named.values()])


def _eye(positional: Sequence[Value], named: Mapping[str, Value]) -> Value:
    return _sized([positional[0], positional[-1]], named, positional) if positional else derived(named.values())


def _same_size(positional: Sequence[Value], named: Mapping[str, Value]) -> Value:
    if positional and isinstance(positional[0], TensorSize):
        return positional[0]
    return derived([*positional, *named.values()])


def _item_bytes(dtype: Value | None) -> int:
    if isinstance(dtype, External):
        return _BYTES_OF.get(dtype.name.rpartition(".")[2], DEFAULT_BYTES)
    return DEFAULT_BYTES


TENSOR_CALLS: Mapping[str, Callable[[Sequence[Value], Mapping[str, Value]], Value]] = {
    **{f"torch.{name}": _shaped for name in ("zeros", "ones", "empty", "rand", "randn")},
    "torch.full": _full,
    "torch.arange": _arange,
    "torch.eye": _eye,
    **{f"torch.{name}": _same_size for name in ("tril", "triu", "zeros_like", "ones_like", "exp", "log", "sin", "cos")},
}


def tensor_method(receiver: Value, name: str, arguments: Sequence[Value]) -> Value | None:
    """Return what a method makes of a tensor of known size; None when that is not known."""
    if not isinstance(receiver, TensorSize):
        return None
    if name in _KEEPS_SIZE:
        return receiver
    if name in _BYTES_OF and not arguments:
        return TensorSize(receiver.elements, receiver.elements * _BYTES_OF[name], receiver.tags)
    return derived(arguments, tags_of(receiver))
