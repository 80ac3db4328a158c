"""Turns the numbers of parameters in DDP's errors into names: by a run that we recorded, or by the script itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.findings.locations import in_user_code
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.devices import Incident


def with_names(record: RunRecord, runs: Sequence[RunRecord]) -> tuple[RunRecord, tuple[str, ...]]:
    """Return the record with names where they are known, and sentences on where they are from."""
    incidents, notes = [], set[str]()
    for one in record.logs.incidents:
        if any(name.startswith("#") for name in one.unused):
            named, origin = _named(one, runs)
            if named:
                notes.add(origin)
                one = replace(one, unused=named)
        incidents.append(one)
    return replace(record, logs=replace(record.logs, incidents=tuple(incidents))), tuple(sorted(notes))


def _named(one: Incident, runs: Sequence[RunRecord]) -> tuple[tuple[str, ...], str]:
    numbers = [int(name[1:]) for name in one.unused if name[1:].isdecimal()]
    for run in runs:
        for wrap in run.wraps:
            names = [info.name for info in wrap.parameters if info.requires_grad and info.name not in wrap.ignored]
            if numbers and max(numbers) < len(names):
                found = tuple(names[number] for number in numbers)
                return found, "the names of parameters are those of the recorded run"
    script = next((Path(frame.file) for frame in reversed(one.frames) if in_user_code(frame.file)), None)
    if script is None or script.suffix != ".py" or not script.is_file():
        return (), ""
    names = list(_of_script(script.absolute()))
    if not numbers or max(numbers) >= len(names):
        return (), ""
    return tuple(names[number] for number in numbers), f"the names of parameters are read from {script} as it is now"


def _of_script(path: Path) -> tuple[str, ...]:
    from ddpdoctor.source.queries.parameter_names import parameter_names
    from ddpdoctor.source.recursion import deep_recursion
    from ddpdoctor.source.script.script import script_at

    try:
        with deep_recursion():
            return parameter_names(script_at(path))
    except (DdpDoctorError, OSError, RecursionError):
        return ()
