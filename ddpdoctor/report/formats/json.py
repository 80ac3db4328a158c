"""The examination as JSON, for machines: one object, schema 1, paths relative to the working directory."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import msgspec

from ddpdoctor import __version__
from ddpdoctor.check import Outcome
from ddpdoctor.examination import AutopsySection, Difference, Examination, Figure, RehearsalSection, TimeComparison
from ddpdoctor.finding import Finding, Location, plain, shown_path

HEAD: Mapping[str, Any] = {"schema": 1, "tool": {"name": "ddpdoctor", "version": __version__}}
"""How the object of every JSON report begins."""
LEFT_OUT: Mapping[type[msgspec.Struct], frozenset[str]] = {
    Finding: frozenset({"trouble", "what_if", "gain", "role", "doubt", "disproved_at"}),
    RehearsalSection: frozenset({"told_by", "passes_cut", "not_held_back", "pretended"}),
    AutopsySection: frozenset({"runs"}),
    Figure: frozenset({"label"}),
    Difference: frozenset({"shown"}),
    Outcome: frozenset({"unstated"}),
}
"""Fields that are for people, for the program itself, or written only where they hold something."""
RENAMED = {"figures": "budget", "differences": "lines", "first_line": "line", "last_line": "end_line"}


def indented(content: object) -> str:
    """Return JSON for people's eyes, too, which ends with a line feed."""
    return msgspec.json.format(msgspec.json.encode(content), indent=2).decode("utf-8") + "\n"


def of_result(result: msgspec.Struct) -> str:
    """Render what was computed from runs as indented JSON that ends with a line feed."""
    return indented({**HEAD, **msgspec.to_builtins(result)})


def render(examination: Examination) -> str:
    """Render the examination as indented JSON that ends with a line feed."""
    return indented(as_object(examination))


def as_object(examination: Examination) -> dict[str, Any]:
    """Build the object that is encoded."""
    root, rehearsal = examination.root, examination.rehearsal
    autopsy, gate, equivalence = examination.autopsy, examination.gate, examination.equivalence
    return {
        **HEAD,
        "target": plain(examination.target),
        "verdict": examination.verdict,
        "exit_code": int(examination.exit_code),
        "complete": examination.complete,
        "recognised": examination.recognised,
        "source": _object(examination.source, root),
        "rehearsal": _object(rehearsal, root)
        | {"ranks_of_job": rehearsal.ranks_of_job or None, "notes": _value(rehearsal.all_notes, root)},
        "findings": [finding_object(finding, root) for finding in examination.findings],
        **({"equivalence": _object(equivalence, root)} if equivalence is not None else {}),
        "refuted": _value(examination.refuted, root),
        "outcomes": _value(examination.outcomes, root),
        "notes": _value(examination.notes, root),
        **({"autopsy": _object(autopsy, root)} if autopsy is not None else {}),
        **({"gate": _object(gate, root)} if gate is not None else {}),
        **({"targets": [as_object(part) for part in examination.parts]} if examination.parts else {}),
        **({"scripts": _value(examination.scripts, root)} if examination.scripts else {}),
    }


def finding_object(finding: Finding, root: str) -> dict[str, Any]:
    """Build the object of one finding; its paths are relative to ``root``."""
    return {
        **_object(finding, root),
        **({"gain": msgspec.to_builtins(finding.gain)} if finding.gain is not None else {}),
        **({"role": finding.role, "doubt": plain(finding.doubt)} if finding.role else {}),
    }


def _object(of: msgspec.Struct, root: str) -> dict[str, Any]:
    """Return the fields of a struct that are reported, in their order; its files are shown relative to ``root``."""
    left_out = LEFT_OUT.get(type(of), frozenset())
    fields = {RENAMED.get(name, name): getattr(of, name) for name in of.__struct_fields__ if name not in left_out}
    told = {name: _value(value, root) for name, value in fields.items()}
    if "file" in told:
        told["file"] = plain(shown_path(fields["file"], root))
    if isinstance(of, Location):
        told |= {"end_line": of.end_line or None, "end_column": of.end_column or None}
    if isinstance(of, TimeComparison) and of.note:
        told |= {"low": None, "high": None}
    return told


def _value(value: Any, root: str) -> Any:
    if isinstance(value, msgspec.Struct):
        return _object(value, root)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, frozenset):
        return sorted(value)
    return [_value(one, root) for one in value] if isinstance(value, tuple) else value
