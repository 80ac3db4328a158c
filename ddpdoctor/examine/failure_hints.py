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
_ELSEWHERE = "name another Python with `--python`, or run this where the job is launched from"
_INPUT_HINT = (
    "Ranks have no terminal to read from: let the script take this from its arguments, which stand after `--`."
)
_PORT_HINT = (
    "Another program listens on the port that the script names: end it, or let the system choose one (torchrun "
    "`--standalone`, or port 0)."
)
_DATA_HINT = f"This machine lacks the data. {ARGUMENTS_HINT}"
_NETWORK_HINT = (
    "The script asks the network for this: put the data where the script looks before it downloads, or rehearse where"
    " there is a network; `--static` reads the source only."
)
_VARIABLE = re.compile(r"'([A-Z][A-Z0-9_]+)'")
"""The message of a KeyError for what must be the name of an environment variable."""
_PROGRAM = re.compile(r"No such file or directory: '([^/']+)'")
_COMPILED = frozenset({".pyx", ".c", ".cc", ".cpp", ".cu"})
_STARTS_A_PROGRAM = "in _execute_child"
"""Where Python's subprocess module raises it; Python names no other place for a program that is missing."""


def hint_for(raised: RankException | None) -> str:
    """Return what to do about an exception; mostly the script lacks its arguments."""
    from ddpdoctor.diagnosis.failures.environment import lack_behind
    from ddpdoctor.diagnosis.failures.gpu_indices import gpus_of_the_node

    if raised is None:
        return ARGUMENTS_HINT
    if "EADDRINUSE" in raised.message:
        return _PORT_HINT
    lack = lack_behind(raised)
    if lack is not None and lack.kind == "package":
        return _module_hint(lack.name)
    if lack is not None and lack.kind == "version":
        wanted = f"Install the version of {lack.name} that the script's README names for the Python of the ranks"
        return f"{wanted}, or {_ELSEWHERE}; `--static` reads the source only."
    if raised.type == "EOFError" and "reading a line" in raised.message:
        return _INPUT_HINT
    if lack is not None and lack.kind == "network":
        return _NETWORK_HINT
    variable = _VARIABLE.fullmatch(raised.message)
    if raised.type == "KeyError" and variable and "environ" in raised.traceback:
        return f"Set {variable[1]} for this command: the ranks get its environment; `--static` reads the source only."
    if _STARTS_A_PROGRAM in raised.traceback and (program := _PROGRAM.search(raised.message)):
        return f"The script starts {program[1]}, which this machine lacks: let it go on without, or rehearse elsewhere."
    if lack is not None and lack.kind == "program":
        return "The script starts a program that fails on this machine: let it go on without, or rehearse elsewhere."
    if (gpus := gpus_of_the_node(raised)) is not None:
        many = f"{gpus} GPU" + ("s" if gpus > 1 else "")
        return f"A node of this rehearsal has {many}: let the script's arguments ask for no more, or raise `--nproc`."
    return ARGUMENTS_HINT if lack is None else _DATA_HINT


def _built_from(module: str) -> str | None:
    """The directory of this project that holds the sources of a compiled module; None where it is none."""
    for place in (".", "src"):
        package = Path(place, *module.split(".")[:-1])
        inside = module.count(".") and package.is_dir()
        if inside and any(one.suffix in _COMPILED for one in package.rglob("*")):
            return package.as_posix()
    return None


def _module_hint(module: str) -> str:
    """How a module is installed, or found where the project has it."""
    from ddpdoctor.diagnosis.failures.environment import install_line

    top = module.partition(".")[0]
    if (sources := _built_from(module)) is not None:
        how = "as the project's README says (`python setup.py build_ext --inplace` in most)"
        return f"{module} is compiled from {sources} of this project: build it for the Python of the ranks, {how}."
    if module != top and any(Path(place, f"{top}.py").exists() for place in (".", "src")):
        return f"{top}.py of this project has no part {module}: the script asks for a file that the project lacks."
    if any(Path(place, name).exists() for place in (".", "src") for name in (top, f"{top}.py")):
        return f"{top} is in this project: start from the directory, or with the PYTHONPATH, that its README names."
    line = install_line(module)
    how = f"`{line}` for the Python of the ranks" if line else f"build and install {top} for the Python of the ranks"
    return f"{how[0].upper()}{how[1:]}, {_ELSEWHERE}; `--static` reads the source only."
