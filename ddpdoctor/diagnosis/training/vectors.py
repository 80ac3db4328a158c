"""Sums and lengths of gradients, in which what is missing counts as zeros."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul

Vector = Sequence[float]


def dot(a: Vector | None, b: Vector | None) -> float:
    """Return the inner product."""
    return 0.0 if a is None or b is None else sum(map(mul, a, b))


def norm(a: Vector | None) -> float:
    """Return the length."""
    return math.sqrt(max(0.0, dot(a, a)))


def minus(a: Vector | None, b: Vector | None, times: float = 1.0) -> Vector | None:
    """Return a less so many times b."""
    if b is None:
        return a
    if a is None:
        return [-times * value for value in b]
    return [x - times * y for x, y in zip(a, b, strict=True)]


def distance(a: Vector | None, b: Vector | None) -> float:
    """Return the length of the difference, as a share of the longer one's."""
    most = max(norm(a), norm(b))
    return norm(minus(a, b)) / most if most else 0.0


def shares(weights: Sequence[float]) -> list[float]:
    """Return weights as shares of their sum."""
    whole = sum(weights)
    return [weight / whole if whole else 0.0 for weight in weights]


def fit(target: Sequence[Vector | None], parts: Sequence[Sequence[Vector | None]]) -> tuple[list[float], float]:
    """Return the weights of the parts that come nearest to the target, and the share of its norm that is left."""
    size = len(parts)
    products = [[sum(map(dot, a, b)) for b in parts] for a in parts]
    onto = [sum(map(dot, a, target)) for a in parts]
    whole = sum(map(dot, target, target))
    weights = _solved(products, onto)
    square = whole - 2 * sum(map(mul, weights, onto))
    square += sum(weights[i] * weights[j] * products[i][j] for i in range(size) for j in range(size))
    return weights, math.sqrt(max(0.0, square) / whole) if whole else 0.0


def _solved(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solve a small system of positive definite equations; nearly singular ones get their smallest solution."""
    size = len(right)
    ridge = 1e-9 * sum(matrix[i][i] for i in range(size)) / max(1, size)
    rows = [[*matrix[i], right[i]] for i in range(size)]
    for i in range(size):
        rows[i][i] += ridge
    for i in range(size):
        pivot = rows[i][i] or 1.0
        rows[i] = [value / pivot for value in rows[i]]
        for j in range(size):
            if j != i:
                factor = rows[j][i]
                rows[j] = [a - factor * b for a, b in zip(rows[j], rows[i], strict=True)]
    return [rows[i][size] for i in range(size)]
