"""Two launches of a script against each other: strategies that train the same, and some that do not."""
# ruff: noqa: RUF001 -- the factor of a gradient is written with its sign

from __future__ import annotations

import msgspec

from tests.equivalence.cases import Case


def _case(name: str, mine: str, other: str, kind: str = "", factor: float | None = None, **fields: object) -> Case:
    arguments, against = tuple(mine.split()), tuple(other.split())
    made = Case(f"against: {name}", "strategies", (), kind, factor, arguments=arguments, against=against)
    return msgspec.structs.replace(made, **fields)


FAULTS = (
    _case("a sharded model that sums", "ddp none", "sharded sums", "scaled", 0.5, says="0.50 ×", quick=True),
    _case("a sharded layer that sums", "ddp none", "sharded sums-up", "part", 0.5, modules=("up",)),
    _case("a loss that is half as large again", "sharded longer", "ddp none", "scaled", 1.5, says="gradient norms"),
    _case("a mean over the own samples of each rank", "ddp own-counts", "sharded none", "other", says="gradient norms"),
    _case("a sum against one process", "sharded sums", "ddp none", "scaled", 2.0, against_ranks=1),
)

CORRECT = (
    _case("a sharded model", "ddp none", "sharded none", says="sharded none` does", quick=True),
    _case("the same from the other side", "sharded none", "ddp none", says="ddp none` does"),
    _case("one process", "sharded none", "ddp none", against_ranks=1),
    _case("layers that are divided, with the same samples on all ranks", "ddp none", "tensor none"),
    _case("other numbers of ranks", "ddp none", "ddp none", against_ranks=3, may_be_unclear=True),
)
