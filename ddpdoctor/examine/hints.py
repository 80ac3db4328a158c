"""What helps against an exception that ended a script in its rehearsal before it had shown anything."""

from __future__ import annotations

import ast
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddpdoctor.examine.missing_modules import ELSEWHERE, lacking_packages, module_hint
from ddpdoctor.files import regex
from ddpdoctor.source.script.module import functions_named

if TYPE_CHECKING:
    from ddpdoctor.record.model import Job, RankException, RunRecord
    from ddpdoctor.source.script.script import Script

ARGUMENTS_HINT = (
    "Pass the script's own arguments after `--`, as in `ddpdoctor check train.py -- --data DIR`, or the whole command"
    " that launches it; `--static` reads the source only."
)
_INPUT_HINT = "Ranks cannot read from a terminal: let the script take this from its arguments, after `--`."
_PORT_HINT = (
    "Another program listens on the script's port: stop it, or let the system choose a port (torchrun "
    "`--standalone`, or port 0)."
)
_OWN_FILE_HINT = "A rank makes this file: let it do so before the others read it, with dist.barrier() between the two."
_DATA_HINT = "This machine lacks the data: put them where the script looks for them"
_OWN_FAULT_HINT = (
    "The script fails so however it is started: mend this line, or take the version of the project that works;"
    " `--static` reads the source only."
)
_WRAPPER_HINT = (
    "The name that is asked for is one of the DDP object, and the names of the bare module are known here: mend this"
    " line; `--static` reads the source only."
)
_OWN_FAULTS = frozenset({"NameError", "UnboundLocalError"})
_UNREADABLE = frozenset({"SyntaxError", "IndentationError", "TabError"})
_UNREADABLE_HINT = (
    "The ranks' Python does not accept this line: give the Python that the script's README asks for with `--python`, or"
    " mend the line; `--static` reads the source only."
)
# What is loaded of a pretrained model is no data.
_OF_DATA, _OF_PATHS = regex(r"data|corpus|images|(?<!pre)train"), regex(r"root|path|dir|folder|file")
_NETWORK_HINT = (
    "The script fetches this from the network, which a rehearsal keeps from it: put the data where the script looks "
    "before it downloads, or rehearse with `--network`; `--static` reads the source only."
)
_OTHER_SIGNATURE = regex(
    r"(?:[\w.]*\.)?(\w+)\(\) (?:takes \d+ positional arguments? but|got an unexpected keyword|missing \d+ required)"
)
"""Python's message for a call that the function does not take: one of a library has changed."""
MOST_OPTIONS = 3
"""More of them say nothing."""
_VARIABLE = regex(r"'([A-Z][A-Z0-9_]+)'")
"""The message of a KeyError for what must be the name of an environment variable."""
_PROGRAM = regex(r"No such file or directory: '([^/']+)'")
_STARTS_A_PROGRAM = "in _execute_child"
"""Where Python's subprocess module raises it; Python names no other place for a program that is missing."""


def hint_for(
    raised: RankException | None, root: str = ".", script: Script | None = None, record: RunRecord | None = None
) -> str:
    """Return what to do about an exception that ended a rank of a job."""
    from ddpdoctor.diagnosis.failures import directory_to_make, gpus_of_the_node, is_written_by_ranks, lack_behind

    job = None if record is None else record.job
    if raised is None:
        return ARGUMENTS_HINT
    if "EADDRINUSE" in raised.message:
        return _PORT_HINT
    lack = lack_behind(raised, record)
    if lack is not None and lack.kind == "package":
        named = f"Install what it names for the Python of the ranks, or {ELSEWHERE}; `--static` reads the source only."
        python, pretended = ("", ()) if job is None else (job.python, job.pretended)
        return module_hint(lack.name, root, script, python, pretended) if lack.name else named
    if lack is not None and lack.kind == "version":
        wanted = f"Install the version of {lack.name} named in the script's README for the Python of the ranks"
        return f"{wanted}, or {ELSEWHERE}; `--static` reads the source only."
    if raised.type == "EOFError" and "reading a line" in raised.message:
        return _INPUT_HINT
    if lack is not None and lack.kind == "network":
        return _NETWORK_HINT
    variable = _VARIABLE.fullmatch(raised.message)
    if raised.type == "KeyError" and variable and "environ" in raised.traceback:
        said = f"Set {variable[1]} for this command: the ranks inherit its environment"
        return f"{said}; `--static` reads the source only."
    if _STARTS_A_PROGRAM in raised.traceback and (program := _PROGRAM.search(raised.message)):
        started = f"The script starts {program[1]}, which this machine lacks"
        return f"{started}: let it continue without, or rehearse elsewhere."
    if lack is not None and lack.kind == "program":
        return "The script starts a program that fails on this machine: let it continue without, or rehearse elsewhere."
    if (gpus := gpus_of_the_node(raised)) is not None:
        many = f"{gpus} GPU" + ("s" if gpus > 1 else "")
        return f"A node of this rehearsal has {many}: let the script ask for no more, or raise `--nproc`."
    if raised.type in _OWN_FAULTS or (raised.type == "ImportError" and "cannot import name" in raised.message):
        return _OWN_FAULT_HINT
    if raised.type == "KeyError" and raised.message.startswith("'module."):
        return _WRAPPER_HINT
    if raised.type in _UNREADABLE:
        return _UNREADABLE_HINT
    if raised.type == "FileNotFoundError" and record is not None and is_written_by_ranks(raised.message, record):
        return _OWN_FILE_HINT
    if directory := directory_to_make(raised):
        made = f"Make the directory {directory}, into which the script writes (`mkdir -p {shlex.quote(directory)}`)"
        return f"{made}: it does not make it by itself."
    called = _OTHER_SIGNATURE.match(raised.message) if raised.type == "TypeError" else None
    if called is not None and not (script is not None and functions_named(script.modules, called[1])):
        return _other_versions(job)
    return _unexplained(script, job) if lack is None else _data_hint(script)


def _unexplained(script: Script | None, job: Job | None) -> str:
    """Return what helps where nothing is known of an exception: arguments only where some may be missing."""
    if script is None or job is None or (not job.arguments and _reads_arguments(script)):
        return ARGUMENTS_HINT
    if missing := lacking_packages(str(script.root), job.python):
        line = f"pip install {shlex.join(missing)}"
        return f"The project asks for packages that are missing: `{line}` for the Python of the ranks, or {ELSEWHERE}."
    if job.pretended:
        return f"Rehearse with the real data and packages: {' and '.join(job.pretended)} may not fit the script."
    return _other_versions(job)


def _other_versions(job: Job | None) -> str:
    here = f" (here is torch {job.torch_version})" if job is not None and job.torch_version else ""
    return (
        "Start the script without ddpdoctor: where it fails alike, install the versions of Python and of its packages,"
        f" those of its README{here}, or mend it; `--static` reads the source only."
    )


def _reads_arguments(script: Script) -> bool:
    return any(
        module.calls_by_name.get("add_argument") or any(node.attr == "argv" for node in module.index.of(ast.Attribute))
        for module in script.modules
    )


def _data_hint(script: Script | None) -> str:
    """Return what helps against missing data: the options by which the script is told where they are."""
    options = list(dict.fromkeys(_options(script))) if script is not None else []
    named = [name for name in options if _OF_DATA.search(name) and _OF_PATHS.search(name)]
    named = named or [name for name in options if _OF_DATA.search(name)] or [o for o in options if _OF_PATHS.search(o)]
    if not named or len(named) > MOST_OPTIONS:
        return f"{_DATA_HINT}, as its README says; `--static` reads the source only."
    return f"{_DATA_HINT}, or say where they are by its own {' or '.join(named)}; `--static` reads the source only."


def _options(script: Script) -> Iterator[str]:
    """Yield the options that the modules of a script add to a parser and that take a value."""
    for module in script.modules:
        for call in module.calls_by_name.get("add_argument", ()):
            if not any(keyword.arg == "action" for keyword in call.keywords):
                yield from (
                    one.value
                    for one in call.args
                    if isinstance(one, ast.Constant) and isinstance(one.value, str) and one.value.startswith("--")
                )
