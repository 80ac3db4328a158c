"""Reads ``job.json``, the first file of a run directory: what is run, and by whom."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ddpdoctor.errors import RecordError
from ddpdoctor.files.untrusted import quoted, read_untrusted, reason_of
from ddpdoctor.record import layout
from ddpdoctor.record.model import Job, RunKind

_LARGEST_BYTES = 8 << 20
"""Of a plan: a command line and the environment of a job have at most 2 MiB."""
_RECORDED = "`ddpdoctor runs` lists the kept runs by their names."
_ANEW = "Copy the run directory anew, or record the run again with `ddpdoctor profile`."


class RunPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What was known of a run before it started."""

    version: int = layout.VERSION
    kind: RunKind = "run"
    supervisor_pid: int | None = None
    """Process that started the job and watches it; None when the job was started without the doctor."""
    launcher_pid: int | None = None
    """Process that the supervisor started."""
    project_root: str = ""
    name: str = ""
    """What people call the run: the file name of its script."""
    job: Job = Job(kind="run")
    clock: Mapping[str, Any] | None = None
    """What ``record.clock`` keeps for the processes of the run; None in plans of other versions."""


class _Version(msgspec.Struct, frozen=True):
    version: int = layout.VERSION


def read_plan(directory: Path) -> RunPlan:
    """Read the plan of a run.

    Raises RecordError, with a sentence that says what is wrong, when ``directory`` is no run directory, belongs to
    someone else, is damaged, or was written by a newer version.
    """
    path = directory / layout.JOB_FILE
    try:
        content = read_untrusted(path, _LARGEST_BYTES, directory)
    except (FileNotFoundError, NotADirectoryError) as error:
        if not directory.is_dir():
            raise RecordError(f"there is no run directory {directory}", _RECORDED) from error
        raise RecordError(f"{directory} is not a run directory: it has no {layout.JOB_FILE}", _RECORDED) from error
    except PermissionError as error:
        raise _of_another_user(directory) from error
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {reason_of(error)}", _ANEW) from error
    if any(file.is_file() and not os.access(file, os.R_OK) for file in directory.glob("*-[0-9]*.*")):
        raise _of_another_user(directory)
    try:
        version = msgspec.json.decode(content, type=_Version).version
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RecordError(f"{path} is damaged: {quoted(error)}", _ANEW) from error
    if version > layout.VERSION:
        raise RecordError(
            f"{directory} was recorded by a newer ddpdoctor (format {version}; this one reads up to {layout.VERSION})",
            "Read it with the version that recorded it.",
        )
    try:
        return msgspec.json.decode(content, type=RunPlan)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RecordError(f"{path} is damaged: {quoted(error)}", _ANEW) from error


def _of_another_user(directory: Path) -> RecordError:
    return RecordError(
        f"{directory} belongs to {owner_of(directory)} and cannot be read",
        "Run ddpdoctor as that user, or ask for a copy of the directory.",
    )


def owner_of(directory: Path) -> str:
    """Name the user whom a directory belongs to."""
    try:
        import pwd

        user_id = os.stat(directory).st_uid
        return pwd.getpwuid(user_id).pw_name
    except (OSError, KeyError, ImportError):
        return "another user"
