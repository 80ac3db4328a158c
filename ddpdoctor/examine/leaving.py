"""By which statement a rank left early, from the lines that it alone ran."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from ddpdoctor.files.untrusted import tree_of
from ddpdoctor.finding import Fact, Finding, Location

_EXITS = frozenset({"exit", "_exit", "quit"})


def with_leaving(
    findings: Iterable[Finding], alone: Mapping[str, Mapping[int, tuple[int, ...]]]
) -> tuple[Finding, ...]:
    """Return the findings; one of a rank that left early, of which the source shows no cause, begins with its way out.

    ``alone``: by file the lines that not all ranks ran, with the ranks that did.
    """
    return tuple(_with_way_out(finding, alone) if _asks(finding) else finding for finding in findings)


def _asks(finding: Finding) -> bool:
    return finding.trouble == "early-exit" and "source" not in finding.basis and len(finding.ranks) == 1


def _with_way_out(finding: Finding, alone: Mapping[str, Mapping[int, tuple[int, ...]]]) -> Finding:
    (rank,) = finding.ranks
    ways = [way for file, ran in sorted(alone.items()) for way in _ways_out(file, ran, rank)]
    if len(ways) != 1:
        return finding
    (node, test, file), basis = ways[0], next(iter(finding.basis))
    place = Location(file=file, line=node.lineno)
    asked = f"`{ast.unparse(test)}` decides, which every rank asked"
    return msgspec.structs.replace(
        finding,
        locations=tuple(dict.fromkeys((place, *finding.locations))),
        evidence=(
            Fact(text=f"rank {rank} alone ran `{ast.unparse(node)}`", basis=basis, location=place, rank=rank),
            Fact(text=asked, basis=basis, location=Location(file=file, line=test.lineno)),
            *finding.evidence,
        ),
    )


def _ways_out(file: str, ran: Mapping[int, tuple[int, ...]], rank: int) -> Iterator[tuple[ast.stmt, ast.expr, str]]:
    """Yield the statements that leave a function, a loop or the program and that this rank alone ran, by a test that
    all ran.
    """
    tree = tree_of(file) if any(those == (rank,) for those in ran.values()) else None
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.If) and node.test.lineno not in ran:
            for inner in (*node.body, *node.orelse):
                if ran.get(inner.lineno) == (rank,) and _leaves(inner):
                    yield inner, node.test, file


def _leaves(node: ast.stmt) -> bool:
    called = node.value.func if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
    last = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    return isinstance(node, (ast.Return, ast.Break)) or last in _EXITS
