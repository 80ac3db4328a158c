"""What the probe writes is what the record reads: each event has a type, and every field of it is known there."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import ddpdoctor
from ddpdoctor.record.assembly.assemble import row_types
from ddpdoctor.record.events import Event, Row, event_types, typed

PACKAGE = Path(ddpdoctor.__file__).parent
NUMBERED = {"signature", "pass_begun"}
"""Rows that other events refer to, by a number of the process's own."""


def written() -> Iterator[tuple[str, str, frozenset[str], bool]]:
    """Place, name and fields of each event that is written, and whether it has others that the call does not show."""
    for room in ("probe", "testing"):
        for path in sorted((PACKAGE / room).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "event":
                    name = node.args[0]
                    if isinstance(name, ast.Constant) and isinstance(name.value, str):
                        names = {keyword.arg for keyword in node.keywords}
                        place = f"{path.relative_to(PACKAGE)}:{node.lineno}"
                        yield place, name.value, frozenset(filter(None, names)), None in names


@pytest.mark.parametrize(("place", "name", "fields", "has_more"), [pytest.param(*one, id=one[0]) for one in written()])
def test_every_event_that_is_written_has_a_type(place: str, name: str, fields: frozenset[str], has_more: bool) -> None:
    kind: type[msgspec.Struct] | None = event_types().get(name) or row_types().get(name)
    assert kind is not None, f"{place}: nobody reads the event {name}"
    known = {field.name for field in msgspec.structs.fields(kind)} | ({"number"} if name in NUMBERED else set())
    assert fields <= known, f"{place}: nobody reads {', '.join(fields - known)} of {name}"
    if not has_more:
        needed = {field.name for field in msgspec.structs.fields(kind) if field.required} - {"rank", "time_ns"}
        needed |= {"rank"} if issubclass(kind, Event) and kind is event_types()["world"] else set()
        assert needed <= fields, f"{place}: {name} lacks {', '.join(needed - fields)}"


def test_all_types_are_written() -> None:
    by_writer = {"lost"}  # ``EventWriter`` itself
    assert {*event_types(), *row_types()} - by_writer - {name for _, name, _, _ in written()} == BY_NAME


BY_NAME = {"gradient_digests", "parameter_digests"}
"""Events whose names are variables where they are written."""


def test_a_line_is_its_event_and_a_damaged_one_is_refused() -> None:
    event = typed({"event": "pass_trained", "number": 3, "backwards": 2, "time_ns": 7})
    assert isinstance(event, event_types()["pass_trained"])
    assert (event.time_ns, msgspec.structs.asdict(event)["backwards"]) == (7, 2)
    row = typed({"event": "forward", "wrap": 0, "time_ns": 7})
    assert isinstance(row, Row) and (row.kind, row.time_ns) == ("forward", 7)
    for damaged in ({"event": "pass_trained", "number": 3}, {"event": "forward", "time_ns": "now"}):
        with pytest.raises(msgspec.ValidationError):
            typed(damaged)
