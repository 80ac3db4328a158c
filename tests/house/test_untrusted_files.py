"""What a job, another user or a stranger left is opened in one way: any other opening of a file has its reason here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("ddpdoctor", "checks", "tui")
ELSEWHERE = ("ddpdoctor/probe", "ddpdoctor/testing", "ddpdoctor/source", "ddpdoctor/launch/box")
"""In the ranks, whose own files these are; in tests of the user's; the reader of scripts, which bounds them itself; the
box, which opens directories that it has made."""
_METHODS = frozenset({"open", "read_text", "read_bytes"})
_FUNCTIONS = frozenset(
    {"open", "os.open", "io.open", "gzip.open", "lzma.open", "bz2.open", "tarfile.open", "zipfile.ZipFile", "mmap.mmap",
     "gzip.GzipFile", "sqlite3.connect", "pickle.load", "pickle.loads", "numpy.load", "shelve.open", "codecs.open"}
)  # fmt: skip
ALLOWED = {
    "checks/__init__.py module": "of this package",
    "catalogue/registry.py _names_group": "of an installed package",
    "cli/live/hang_command.py _output": "written",
    "examine/static_scan.py _portable": "what this process has pickled",
    "examine/static_scan.py in_processes": "what a process of ours has pickled",
    "files/patterns.py _ignore_file": "a .gitignore of the user's, beside scripts",
    "files/replace_file.py _write_new": "written, a new file",
    "files/replace_file.py replace_file": "written, what was there was examined",
    "files/untrusted.py open_untrusted": "it is the one way",
    "gate/baseline.py _alone": "a directory",
    "launch/command_line.py _configuration": "of the command line",
    "launch/command_line.py _first_line": "of the command line",
    "launch/launcher_options.py _shell": "of the command line",
    "monitor/rehearsal.py _quota": "of the system",
    "launch/kept_output.py keep": "written, in a directory that was just made",
    "launch/kept_runs.py _read": "of the system",
    "monitor/replay.py demo": "of this package",
    "monitor/history.py __enter__": "of SQLite, which opens by name: `_refuse_foreign` comes first",
    "monitor/history.py __init__": "written: `_refuse_foreign` comes first",
    "monitor/rehearsal.py kernel_kills": "of the system",
    "monitor/nodes/meeting.py write_private": "written",
    "monitor/nodes/nodes.py _takes_place": "a lock",
    "autopsy/live_job.py _of_pipe": "a pipe, which was examined, for writing",
    "monitor/rehearsal.py begin": "written, in a directory that was just made",
    "postmortem/inputs.py _open_pipe": "a pipe that the user names",
    "postmortem/catalogue/messages.py _read": "of this package",
    "cli/scaling.py sweep": "in a directory of this process",
    "record/writer.py _counts_from": "of the system",
    "record/writer.py private_descriptor": "in a rank",
    "record/writer.py __init__": "in a rank",
    "record/writer.py write": "in a rank",
    "record/writer.py write_indices": "in a rank",
    "report/formats/html.py _filled": "of this package",
    "report/output_file.py _opened": "written: a device or a pipe that the user names",
    "report/output_file.py append_step_summary": "written",
    "report/streams.py _forget": "the null device",
    "report/streams.py occupy_closed": "the null device",
    "tui/app.py _written": "written, a new file",
}


def test_files_of_others_are_opened_in_one_way() -> None:
    found = {place for path in _files() for place in _openings(path)}
    assert sorted(found - ALLOWED.keys()) == []
    assert sorted(ALLOWED.keys() - found) == []


def _files() -> Iterator[Path]:
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            inside = path.relative_to(ROOT).as_posix()
            linked = any(part.is_symlink() for part in path.parents if part.is_relative_to(ROOT))
            if not linked and not inside.startswith(ELSEWHERE):
                yield path


def _openings(path: Path) -> Iterator[str]:
    name = path.relative_to(ROOT).as_posix().removeprefix("ddpdoctor/")
    for function, call in _calls(ast.parse(path.read_text()), "module"):
        spelled = ast.unparse(call.func)
        if "/proc/" in ast.unparse(call):
            continue
        if spelled in _FUNCTIONS or (isinstance(call.func, ast.Attribute) and call.func.attr in _METHODS):
            yield f"{name} {function}"


def _calls(node: ast.AST, function: str) -> Iterator[tuple[str, ast.Call]]:
    """Yield the calls with the innermost function that holds each."""
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.Call):
            yield function, inner
        yield from _calls(inner, inner.name if isinstance(inner, ast.FunctionDef) else function)
