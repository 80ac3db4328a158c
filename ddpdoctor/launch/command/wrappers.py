"""What stands around a launch command: environment assignments, and programs that start it for someone else."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ddpdoctor.errors import UsageError
from ddpdoctor.launch.command.launcher_options import names

_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_TRANSPARENT = frozenset({"exec", "nohup", "time", "setsid", "unbuffer"})
_SHELLS = frozenset({"bash", "sh", "zsh", "dash", "ksh", "fish", "source", "."})
_LAUNCH_IN_SHELL = re.compile(
    r"\b(torchrun|accelerate\s+launch|torch\.distributed\.(run|launch)|python[\d.]*\s+\S*\.py)\b"
)
_ELSEWHERE = names(
    "srun sbatch salloc mpirun mpiexec mpiexec.hydra horovodrun deepspeed ds colossalai jsrun aprun lsrun flux ray"
    " kubectl docker podman singularity apptainer ssh sky modal nsys ncu numactl taskset nice chrt sudo xvfb-run"
    " timeout stdbuf"
)
_ENVIRONMENTS = frozenset({"uv", "poetry", "pipenv", "pdm", "hatch", "conda", "mamba", "micromamba", "pixi", "rye"})
_STARTS = re.compile(r"(torchrun|accelerate|python[\d.]*)$")
_HINT = "Pass the script and its arguments: `ddpdoctor check train.py -- --its options`."


class Wrapped(msgspec.Struct, frozen=True, kw_only=True):
    """A launch command without what stands around it."""

    words: tuple[str, ...]
    environment: dict[str, str]
    """Variables that are set for it."""
    without: tuple[str, ...]
    """Variables that are taken from it."""


def without_wrappers(words: Sequence[str]) -> Wrapped:
    """Take assignments, ``env``, ``nohup`` and the like from the front of a command.

    Raises UsageError when nothing is left, and for options of ``env`` that are not understood.
    """
    left, environment, without = list(words), dict[str, str](), list[str]()
    inside_env = False
    while left:
        word = left[0]
        if _ASSIGNMENT.match(word):
            name, _, value = left.pop(0).partition("=")
            environment[name] = value
        elif inside_env and word.startswith("-"):
            without += _taken_away(left)
        elif Path(word).name == "env":
            inside_env = True
            left.pop(0)
        elif word in _TRANSPARENT:
            left.pop(0)
        else:
            return Wrapped(words=tuple(left), environment=environment, without=tuple(without))
    raise UsageError("there is no command after `--`", _HINT)


def refuse(words: Sequence[str]) -> UsageError:
    """Return the error for a command that is none of those that are understood, with what to write instead."""
    name = Path(words[0]).name
    if name in _SHELLS or name.endswith((".sh", ".bash")):
        return _shell(words)
    if name in _ENVIRONMENTS:
        index = _start_of_launch(words) or (list(words).index("run") + 1 if "run" in words else 1)
        command = f"{shlex.join(words[:index])} ddpdoctor check -- {_inner(words) or 'torchrun train.py'}"
        return UsageError(
            f"{name} starts the job in its own environment",
            f"Let it start ddpdoctor: `{command}`; or give that environment's Python with `--python`.",
        )
    inner = _inner(words)
    if name in _ELSEWHERE:
        meant = f"Omit {name}: `ddpdoctor check -- {inner}`." if inner else _script_in(words)
        return UsageError(f"{name} is not started in a rehearsal, which runs a few ranks on this machine", meant)
    if name.endswith(".ipynb"):
        return UsageError(f"{words[0]} is a notebook", "Export it: `jupyter nbconvert --to script`.")
    if Path(words[0]).is_dir():
        return UsageError(f"{words[0]} is a directory", _HINT)
    hint = f"Omit what comes before it: `ddpdoctor check -- {inner}`." if inner else _script_in(words)
    return UsageError(f"{words[0]} is not a launcher known to ddpdoctor", hint)


def _taken_away(left: list[str]) -> list[str]:
    """Take an option of ``env`` from ``left``; the variables that it unsets."""
    option = left.pop(0)
    if option == "--":
        return []
    if option in ("-u", "--unset") and left:
        return [left.pop(0)]
    if option.startswith("--unset="):
        return [option.partition("=")[2]]
    if option.startswith("-u") and len(option) > 2:
        return [option[2:]]
    raise UsageError(
        f"env {option} is not supported", "Of env's options, only `-u NAME` and assignments are supported."
    )


def _shell(words: Sequence[str]) -> UsageError:
    """Return the error for a shell script, with the launch that stands in it."""
    script = next((Path(word) for word in words if word.endswith((".sh", ".bash"))), None)
    if script is None:
        return UsageError(f"{words[0]} runs shell code, which is not rehearsed", "Put the launch command after `--`.")
    if not script.is_file():
        return UsageError(f"{script} does not exist")
    example = "torchrun --nproc-per-node 8 train.py"
    found = ""
    lines = script.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, 1):
        if _LAUNCH_IN_SHELL.search(line) and not line.lstrip().startswith("#"):
            example, found = _with_continuations(lines[number - 1 :]), f", line {number},"
            break
    return UsageError(
        f"{script} is a shell script, which is not rehearsed",
        f"Put the launch command from it{found} after `--`: `ddpdoctor check -- {example}`.",
    )


def _with_continuations(lines: Sequence[str]) -> str:
    """Return the first of some shell lines, with those that a backslash joins to it, on one line."""
    last = next((index for index, line in enumerate(lines) if not line.endswith("\\")), len(lines) - 1)
    return " ".join(" ".join(line.rstrip("\\") for line in lines[: last + 1]).split())


def _start_of_launch(words: Sequence[str]) -> int:
    """Return where in a command a launcher that is understood stands; 0 when nowhere."""
    for index, word in enumerate(words[1:], 1):
        if _STARTS.match(Path(word).name) and index + 1 < len(words):
            return index
    return 0


def _inner(words: Sequence[str]) -> str:
    """Return the part of a command that starts with a launcher that is understood; empty when there is none."""
    index = _start_of_launch(words)
    return shlex.join(words[index:]) if index else ""


def _script_in(words: Sequence[str]) -> str:
    """Return a hint that names the script of a command, if one can be made out."""
    for index, word in enumerate(words[1:], 1):
        if word.endswith(".py"):
            arguments = shlex.join(words[index + 1 :])
            return f"Pass the script: `ddpdoctor check {shlex.quote(word)}{f' -- {arguments}' if arguments else ''}`."
    return _HINT
