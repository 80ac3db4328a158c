"""The examination as JSON, for machines: one object, schema 1, paths relative to the working directory."""

from __future__ import annotations

from typing import Any

import msgspec

from ddpdoctor import __version__
from ddpdoctor.examination import AutopsySection, Examination, Unreached
from ddpdoctor.finding import Fact, Finding, Frame, Location
from ddpdoctor.findings.locations import plain, shown_path
from ddpdoctor.gate_section import Figure, GateSection, TimeComparison

SCHEMA = 1


def render(examination: Examination) -> str:
    """Render the examination as indented JSON that ends with a line feed."""
    encoded = msgspec.json.encode(as_object(examination))
    return msgspec.json.format(encoded, indent=2).decode("utf-8") + "\n"


def as_object(examination: Examination) -> dict[str, Any]:
    """Build the object that is encoded."""
    source, rehearsal = examination.source, examination.rehearsal
    return {
        "schema": SCHEMA,
        "tool": {"name": "ddpdoctor", "version": __version__},
        "target": plain(examination.target),
        "verdict": examination.verdict,
        "exit_code": int(examination.exit_code),
        "complete": examination.complete,
        "source": {
            "status": source.status,
            "files": source.files,
            "seconds": source.seconds,
            "notes": [plain(note) for note in source.notes],
        },
        "rehearsal": {
            "status": rehearsal.status,
            "reason": plain(rehearsal.reason),
            "hint": plain(rehearsal.hint),
            "output": plain(rehearsal.output),
            "ranks": rehearsal.ranks,
            "ranks_of_job": rehearsal.ranks_of_job or None,
            "steps": rehearsal.steps,
            "seconds": rehearsal.seconds,
            "device": plain(rehearsal.device),
            "batch_size": rehearsal.batch_size,
            "overlay": rehearsal.overlay,
            "unreached": [_unreached(place, examination.root) for place in rehearsal.unreached],
            "notes": [plain(note) for note in rehearsal.all_notes],
        },
        "findings": [finding_object(finding, examination.root) for finding in examination.findings],
        "refuted": [
            {
                "code": refuted.code,
                "name": refuted.name,
                "location": _location(refuted.location, examination.root) if refuted.location else None,
                "reason": plain(refuted.reason),
            }
            for refuted in examination.refuted
        ],
        "outcomes": [
            {"code": outcome.code, "name": outcome.name, "state": outcome.state.value, "reason": plain(outcome.reason)}
            for outcome in examination.outcomes
        ],
        "notes": [plain(note) for note in examination.notes],
        **({"autopsy": _autopsy(examination.autopsy)} if examination.autopsy is not None else {}),
        **({"gate": _gate(examination.gate, examination.root)} if examination.gate is not None else {}),
        **({"targets": [as_object(part) for part in examination.parts]} if examination.parts else {}),
        **({"scripts": [plain(script) for script in examination.scripts]} if examination.scripts else {}),
    }


def _autopsy(section: AutopsySection) -> dict[str, Any]:
    return {
        "logs": section.logs,
        "lines": section.lines,
        "dumps": section.dumps,
        "error_files": section.error_files,
        "processes": section.processes,
        "ranks": list(section.ranks),
        "attempts": section.attempts,
        "certain": section.certain,
        "missing": [plain(sentence) for sentence in section.missing],
        "seconds": section.seconds,
    }


def _gate(section: GateSection, root: str) -> dict[str, Any]:
    times = section.times
    return {
        "against": plain(section.against),
        "written": section.written,
        "known": section.known,
        "gone": [plain(sentence) for sentence in section.gone],
        "allowed_growth": section.allowed_growth,
        "steps": section.steps,
        "doubt": plain(section.doubt),
        "budget": [_figure(figure, root) for figure in section.figures],
        "times": None if times is None else _times(times),
        "notes": [plain(note) for note in section.notes],
    }


def _times(times: TimeComparison) -> dict[str, Any]:
    told = msgspec.structs.asdict(times)
    return told | ({"low": None, "high": None} if times.note else {})


def _figure(figure: Figure, root: str) -> dict[str, Any]:
    return {
        "metric": figure.metric,
        "unit": figure.unit,
        "before": figure.before,
        "now": figure.now,
        "change": figure.change,
        "lines": [
            {
                "what": plain(one.what),
                "location": _location(one.location, root) if one.location else None,
                "before": one.before,
                "now": one.now,
            }
            for one in figure.differences
        ],
    }


def _unreached(place: Unreached, root: str) -> dict[str, Any]:
    return {
        "file": plain(shown_path(place.file, root)),
        "line": place.first_line,
        "end_line": place.last_line,
        "function": plain(place.function),
        "calls": [plain(name) for name in place.calls],
    }


def finding_object(finding: Finding, root: str) -> dict[str, Any]:
    """Build the object of one finding; its paths are relative to ``root``."""
    return {
        "code": finding.code,
        "name": finding.name,
        "severity": finding.severity.value,
        "title": plain(finding.title),
        "ranks": list(finding.ranks),
        "locations": [_location(location, root) for location in finding.locations],
        "basis": sorted(finding.basis),
        "evidence": [_fact(fact, root) for fact in finding.evidence],
        "remedy": plain(finding.remedy),
        "unconfirmed": plain(finding.unconfirmed),
        "stress": plain(finding.stress),
        "fingerprint": finding.fingerprint,
        **({"gain": msgspec.to_builtins(finding.gain)} if finding.gain is not None else {}),
        **({"role": finding.role, "doubt": plain(finding.doubt)} if finding.role else {}),
    }


def _location(location: Location, root: str) -> dict[str, Any]:
    return {
        "file": plain(shown_path(location.file, root)),
        "line": location.line,
        "column": location.column,
        "end_line": location.end_line or None,
        "end_column": location.end_column or None,
        "function": plain(location.function),
    }


def _fact(fact: Fact, root: str) -> dict[str, Any]:
    return {
        "text": plain(fact.text),
        "basis": fact.basis,
        "numbers": dict(fact.numbers),
        "rank": fact.rank,
        "location": _location(fact.location, root) if fact.location else None,
        "stack": [_frame(frame, root) for frame in fact.stack],
    }


def _frame(frame: Frame, root: str) -> dict[str, Any]:
    return {"file": plain(shown_path(frame.file, root)), "line": frame.line, "function": plain(frame.function)}
