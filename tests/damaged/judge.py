"""Says what is wrong with the answer to a case."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from tests.damaged.cases import ERROR, Case
from tests.damaged.damages import OUTSIDE, SECRET
from tests.damaged.server import Ending
from tests.machine_speed import is_within

AT_MOST_S = 10.0
AT_MOST_BYTES = 1 << 30
LONGEST_ERROR = 900
"""Characters on stderr of an error: 200 of what a file holds, names, what is wrong, and a hint."""
MOST_WRITTEN = 400_000
_OURS = re.compile(
    r"Traceback \(most recent call last\):\n  File|defect of ddpdoctor|error: out of memory|Exception ignored"
)
_OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
COMMAND = re.compile(r"^\s*::[A-Za-z]|##\w*\[", re.MULTILINE)
"""What the logs of GitHub, Azure and TeamCity take for a command."""
_REPEATED = re.compile(r"(.)\1{220}")


def problems(case: Case, ending: Ending, scratch: Path, before: dict[str, str], slowness: float) -> Iterator[str]:
    """Yield what is wrong, in a few words each."""
    said = (scratch / "stderr").read_bytes().decode("utf-8", "replace")
    shown = (scratch / "stdout").read_bytes().decode("utf-8", "replace")
    if ending.code < 0:
        yield f"ended by signal {-ending.code} after {ending.seconds:.0f} s"
        return
    # Beside two other workers 7 s of work took 13.7 s of the clock: its work counts, and what it waited beyond that.
    if not is_within(ending.processor_s, AT_MOST_S) or ending.seconds > 2 * ending.processor_s + AT_MOST_S * slowness:
        yield f"took {ending.seconds:.1f} s"
    if ending.peak_bytes > AT_MOST_BYTES:
        yield f"took {ending.peak_bytes >> 20} MiB"
    if found := _OURS.search(said + shown):
        last = [line for line in said.strip().splitlines() if line and not line.startswith("error: this is")]
        yield f"{found.group().splitlines()[0]} ({last[-1][:90] if last else ''})"
    elif ending.code not in case.allowed:
        yield f"exit code {ending.code}, not one of {sorted(case.allowed)}"
    elif ending.code == ERROR:
        yield from _wrong_error(case, said)
    elif case.unread not in said + re.sub(r"[\s\\]+", "", shown):
        yield f"does not say that {case.unread} was not read"
    if len(shown) > MOST_WRITTEN and "html" not in case.arguments:
        yield f"wrote {len(shown):,} characters"
    for name, text in (("stderr", said), ("stdout", shown)):
        if found := _OBEYED.search(text):
            yield f"{name} holds {found.group()!r}"
        if found := COMMAND.search(text) if "json" not in case.arguments else None:
            yield f"{name} holds the command {found.group()!r}"
    if not case.may_read and (SECRET.decode() in said + shown or os.stat(scratch / OUTSIDE / "secret").st_atime != 1):
        yield "read outside"
    after = tree(scratch)
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    if left := [name for name in changed if not _may_change(case, name)]:
        yield f"changed {left[:3]}"


def _wrong_error(case: Case, said: str) -> Iterator[str]:
    if not said.startswith("error: ") and "\nerror: " not in said:
        yield "exit code 2 without an error"
    elif not any(name in said for name in case.named):
        yield f"names none of {case.named}"
    if len(said) > LONGEST_ERROR and "cannot write" not in said:  # What was to be written is shown then.
        yield f"an error of {len(said):,} characters"
    if _REPEATED.search(said):
        yield "repeats more than 200 characters of a file"
    if "hint: " not in said and "cannot write" not in said:
        yield "does not say what to do"


def _may_change(case: Case, name: str) -> bool:
    written = name in ("trace.json", "work/report.json", "work/nothing") or name.startswith(("home", "tmp"))
    return written or (bool(case.grows) and case.grows.endswith(name))


def tree(scratch: Path) -> dict[str, str]:
    """What lies in the case's directories: kind and mode, of files also the size and when they were written."""
    found = {}
    for place in ("work", OUTSIDE):
        for directory, folders, files in os.walk(scratch / place):
            for name in (*folders, *files):
                path = os.path.join(directory, name)
                status = os.lstat(path)
                at_ns = status.st_mtime_ns if name in files else 0
                known = f"{status.st_mode:o} {status.st_size if name in files else 0} {at_ns}"
                found[os.path.relpath(path, scratch)] = known
    found |= {name: "new" for name in os.listdir(scratch) if name not in ("work", OUTSIDE, "stdout", "stderr")}
    return found
