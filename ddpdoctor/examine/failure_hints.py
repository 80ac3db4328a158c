"""What helps against an exception that ended a script in its rehearsal before it had shown anything."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpdoctor.record.model import RankException

ARGUMENTS_HINT = (
    "Pass the script's own arguments after `--`, as in `ddpdoctor check train.py -- --data DIR`, or the whole command"
    " that launches it; `--static` reads the source only."
)
_ELSEWHERE = "give another Python with `--python`, or run this in the environment that launches the job"
_INPUT_HINT = "Ranks cannot read from a terminal: let the script take this from its arguments, after `--`."
_PORT_HINT = (
    "Another program listens on the script's port: stop it, or let the system choose a port (torchrun "
    "`--standalone`, or port 0)."
)
_DATA_HINT = f"This machine lacks the data. {ARGUMENTS_HINT}"
_NETWORK_HINT = (
    "The script fetches this from the network, which a rehearsal keeps from it: put the data where the script looks "
    "before it downloads, or rehearse with `--network`; `--static` reads the source only."
)
_VARIABLE = re.compile(r"'([A-Z][A-Z0-9_]+)'")
"""The message of a KeyError for what must be the name of an environment variable."""
_PROGRAM = re.compile(r"No such file or directory: '([^/']+)'")
_COMPILED = frozenset({".pyx", ".c", ".cc", ".cpp", ".cu"})
_STARTS_A_PROGRAM = "in _execute_child"
"""Where Python's subprocess module raises it; Python names no other place for a program that is missing."""


def hint_for(raised: RankException | None) -> str:
    """Return what to do about an exception; mostly the script lacks its arguments."""
    from ddpdoctor.diagnosis.failures import gpus_of_the_node, lack_behind

    if raised is None:
        return ARGUMENTS_HINT
    if "EADDRINUSE" in raised.message:
        return _PORT_HINT
    lack = lack_behind(raised)
    if lack is not None and lack.kind == "package":
        return _module_hint(lack.name)
    if lack is not None and lack.kind == "version":
        wanted = f"Install the version of {lack.name} named in the script's README for the Python of the ranks"
        return f"{wanted}, or {_ELSEWHERE}; `--static` reads the source only."
    if raised.type == "EOFError" and "reading a line" in raised.message:
        return _INPUT_HINT
    if lack is not None and lack.kind == "network":
        return _NETWORK_HINT
    variable = _VARIABLE.fullmatch(raised.message)
    if raised.type == "KeyError" and variable and "environ" in raised.traceback:
        return (
            f"Set {variable[1]} for this command: the ranks inherit its environment; `--static` reads the source only."
        )
    if _STARTS_A_PROGRAM in raised.traceback and (program := _PROGRAM.search(raised.message)):
        return (
            f"The script starts {program[1]}, which this machine lacks: let it continue without, or rehearse elsewhere."
        )
    if lack is not None and lack.kind == "program":
        return "The script starts a program that fails on this machine: let it continue without, or rehearse elsewhere."
    if (gpus := gpus_of_the_node(raised)) is not None:
        many = f"{gpus} GPU" + ("s" if gpus > 1 else "")
        return f"A node of this rehearsal has {many}: let the script ask for no more, or raise `--nproc`."
    return ARGUMENTS_HINT if lack is None else _DATA_HINT


def _built_from(module: str) -> str | None:
    """Return the directory of this project that holds the sources of a compiled module; None where it is none."""
    for place in (".", "src"):
        package = Path(place, *module.split(".")[:-1])
        inside = module.count(".") and package.is_dir()
        if inside and any(one.suffix in _COMPILED for one in package.rglob("*")):
            return package.as_posix()
    return None


def _module_hint(module: str) -> str:
    """Return how a module is installed, or found where the project has it."""
    from ddpdoctor.diagnosis.failures import install_line

    top = module.partition(".")[0]
    if (sources := _built_from(module)) is not None:
        how = "as described in the project's README (usually `python setup.py build_ext --inplace`)"
        return f"{module} is compiled from {sources} of this project: build it for the Python of the ranks, {how}."
    if module != top and any(Path(place, f"{top}.py").exists() for place in (".", "src")):
        return f"{top}.py of this project has no submodule {module}: a file is missing from the project."
    if any(Path(place, name).exists() for place in (".", "src") for name in (top, f"{top}.py")):
        return f"{top} is in this project: start from the directory, or with the PYTHONPATH, given in its README."
    line = install_line(module)
    if module != top and line == f"pip install {top}":
        # Python names the first part that it misses: those before it are there.
        newer = f"install the version of {top} that the script's README names, or the package that adds this part"
        return f"The ranks' Python has {top}, but no submodule {module}: {newer}; or {_ELSEWHERE}."
    how = f"`{line}` for the Python of the ranks" if line else f"build and install {top} for the Python of the ranks"
    return f"{how[0].upper()}{how[1:]}, {_ELSEWHERE}; `--static` reads the source only."
