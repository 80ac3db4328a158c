"""Takes the options of a launcher apart, as its own parser would, up to the script that it starts."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from ddpdoctor.errors import UsageError
from ddpdoctor.files import regex
from ddpdoctor.files.untrusted import read_start


class Syntax(msgspec.Struct, frozen=True, kw_only=True):
    """The options that a launcher knows; in long ones ``_`` and ``-`` are the same."""

    name: str
    """Of the launcher, as the user writes it."""
    valued: frozenset[str]
    """Options that take a value."""
    flags: frozenset[str]
    """Options that take none."""
    families: tuple[str, ...] = ()
    """Beginnings of further options, all of which take a value."""
    short: dict[str, str] = {}
    """Long names of the short options."""


class Parsed(msgspec.Struct, frozen=True, kw_only=True):
    """The options that a command line holds and what it starts."""

    options: dict[str, str]
    """By long name with ``-``; a flag has the value ``true``."""
    rest: tuple[str, ...]
    """The script and its arguments."""

    def count(self, option: str, launcher: str) -> int | None:
        """Return the positive number that an option has; None when it is absent. Raises UsageError for all else."""
        text = self.options.get(option)
        if text is None:
            return None
        if not text.isdigit() or int(text) == 0:
            raise UsageError(f"{launcher}: {option} {text} is not a number of processes")
        return int(text)


def names(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


def parse_options(words: Sequence[str], syntax: Syntax) -> Parsed:
    """Take apart what follows the launcher's name.

    Raises UsageError for an option that the launcher does not have, for one without its value, and when no script is
    named.
    """
    options: dict[str, str] = {}
    left = list(words)
    while left and left[0].startswith("-") and left[0] != "-":
        word = left.pop(0)
        if word == "--":
            break
        name, given, value = _split(word, syntax)
        if name in syntax.flags:
            if given:
                raise UsageError(f"{syntax.name}: {name} takes no value", f"It was given as `{word}`.")
            options[name] = "true"
        elif given:
            options[name] = value
        elif left:
            options[name] = left.pop(0)
        else:
            raise UsageError(f"{syntax.name}: {name} needs a value")
    if not left:
        raise UsageError(
            f"{syntax.name} has no script",
            f"Write it as you launch it: `{syntax.name} ... train.py --its options`.",
        )
    return Parsed(options=options, rest=tuple(left))


def _split(word: str, syntax: Syntax) -> tuple[str, bool, str]:
    """Long name of an option, whether its value is in the same word, and the value."""
    if not word.startswith("--"):
        name = syntax.short.get(word[:2])
        if name is None:
            raise _unknown(word, syntax)
        return name, len(word) > 2, word[2:].removeprefix("=")
    written, equals, value = word.partition("=")
    name = written.replace("_", "-")
    known = syntax.valued | syntax.flags
    if name not in known and not name.startswith(syntax.families):
        longer = [option for option in known if option.startswith(name)]
        if len(longer) != 1:
            raise _unknown(written, syntax, longer)
        name = longer[0]
    return name, bool(equals), value


def _unknown(word: str, syntax: Syntax, meant: Sequence[str] = ()) -> UsageError:
    from difflib import get_close_matches

    near = sorted(meant) or get_close_matches(word.replace("_", "-"), sorted(syntax.valued | syntax.flags), n=1)
    hint = f"Did you mean {' or '.join(near[:3])}? " if near else ""
    return UsageError(f"{syntax.name} has no option {word}", f"{hint}Options of the script itself go after the script.")


# Reads the command line of Lightning's ``fabric run``, which lets torch's launcher start the ranks.

NAME = "fabric run"
_VALUED = names(
    "--accelerator --strategy --devices --num-nodes --node-rank --main-address --main-port --precision"
)  # fmt: skip
_TOLD = ("accelerator", "strategy", "precision")
"""Options that a Fabric object reads from the environment; the ranks are as many as a rehearsal starts."""


class FrameworkLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """What an ``accelerate launch`` or a ``fabric run`` starts."""

    parsed: Parsed
    ranks: int | None
    """Of the whole job; None when there are as many as devices."""
    nodes: int
    environment: Mapping[str, str]
    """What its processes read of it."""


def parse_fabric(words: Sequence[str]) -> FrameworkLaunch:
    """Take apart what follows ``fabric run``; ``fabric run model`` is what it was called before Lightning 2.4.

    Its options may stand behind the script, too, and what it does not know belongs to the script. Raises UsageError
    for a wrong command line, and when the job is no DistributedDataParallel job.
    """
    options: dict[str, str] = {}
    rest: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        if word == "--":
            rest += left
            break
        written, equals, value = word.partition("=")
        name = written.replace("_", "-")
        if name not in _VALUED:
            rest.append(word)
        elif not equals and not left:
            raise UsageError(f"{NAME}: {written} needs a value")
        else:
            options[name] = value if equals else left.pop(0)
    if rest[:1] == ["model"]:
        rest.pop(0)
    if not rest or rest[0].startswith("-"):
        raise UsageError(f"{NAME} has no script", f"Write it as you launch it: `{NAME} train.py --devices 2`.")
    strategy = options.get("--strategy", "auto").lower()
    if not strategy.startswith(("ddp", "auto")):
        raise UsageError(
            f"{NAME} starts a job with the strategy {strategy}: only DDP jobs are examined",
            "`--static` with the script alone still reads its source.",
        )
    parsed = Parsed(options=options, rest=tuple(rest))
    nodes = parsed.count("--num-nodes", NAME) or 1
    per_node = _devices(options.get("--devices", "1"))
    told = {f"LT_{name.upper()}": options[f"--{name}"] for name in _TOLD if f"--{name}" in options}
    return FrameworkLaunch(
        parsed=parsed,
        ranks=per_node * nodes if per_node else None,
        nodes=nodes,
        environment={"LT_CLI_USED": "1", **told},
    )


def _devices(text: str) -> int | None:
    """Return how many devices a number or a list of them names; None for as many as there are."""
    listed = [entry for entry in text.strip("[]").split(",") if entry.strip()]
    if len(listed) > 1:
        return len(listed)
    if text in ("auto", "-1"):
        return None
    if text.isdigit() and int(text) > 0:
        return int(text)
    return 1


# What stands around a launch command: environment assignments, and programs that start it for someone else.

_ASSIGNMENT = regex(r"[A-Za-z_][A-Za-z0-9_]*=")
_TRANSPARENT = frozenset({"exec", "nohup", "time", "setsid", "unbuffer"})
_SHELLS = frozenset({"bash", "sh", "zsh", "dash", "ksh", "fish", "source", "."})
_LAUNCH_IN_SHELL = regex(r"\b(torchrun|accelerate\s+launch|torch\.distributed\.(run|launch)|python[\d.]*\s+\S*\.py)\b")
_ELSEWHERE = names(
    "srun sbatch salloc mpirun mpiexec mpiexec.hydra horovodrun deepspeed ds colossalai jsrun aprun lsrun flux ray"
    " kubectl docker podman singularity apptainer ssh sky modal nsys ncu numactl taskset nice chrt sudo xvfb-run"
    " timeout stdbuf"
)
_ENVIRONMENTS = frozenset({"uv", "poetry", "pipenv", "pdm", "hatch", "conda", "mamba", "micromamba", "pixi", "rye"})
BUILT_BY = ("pyproject.toml", "setup.cfg", "setup.py")
"""Files by which a project is installed."""
LARGEST_BYTES = 200_000
"""What is read of one."""
_SETS = regex(r"""(export\s+)?([A-Za-z_]\w*)=([^\s;#"']*|"[^"]*"|'[^']*')""")
"""A line of a shell script."""
_VARIABLE = regex(r"\$(?:\{(\w+)\}|(\w+))")
_STARTS = regex(r"(torchrun|accelerate|python[\d.]*)$")
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
    if (of_project := _command_of_the_project(words)) is not None:
        return of_project
    if Path(words[0]).is_dir():
        return UsageError(f"{words[0]} is a directory", _HINT)
    hint = f"Omit what comes before it: `ddpdoctor check -- {inner}`." if inner else _script_in(words)
    return UsageError(f"{words[0]} is not a launcher known to ddpdoctor", hint)


def _command_of_the_project(words: Sequence[str]) -> UsageError | None:
    """Return the error for a command that the project installs for a function of its own; None for another one."""
    starts = re.compile(rf"""["'\s]{re.escape(words[0])}["']?\s*=\s*["']?([\w.]+):(\w+)""")
    found = None
    for name in BUILT_BY:
        with contextlib.suppress(OSError):
            found = found or starts.search(f" {read_start(name, LARGEST_BYTES).decode('utf-8', 'replace')}")
    if found is None:
        return None
    start = f"from {found[1]} import {found[2]}; {found[2]}()"
    return UsageError(
        f"{words[0]} is a command that this project installs, and no script",
        f"Write `{start}` to a file here, and pass that: `ddpdoctor check -- "
        f"{shlex.join(['python', 'start.py', *words[1:]])}`.",
    )


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
    at = next((at for at, word in enumerate(words) if word.endswith((".sh", ".bash"))), -1)
    if at < 0:
        return UsageError(f"{words[0]} runs shell code, which is not rehearsed", "Put the launch command after `--`.")
    script = Path(words[at])
    if not script.is_file():
        return UsageError(f"{script} does not exist")
    example = "torchrun --nproc-per-node 8 train.py"
    found = ""
    lines = script.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, 1):
        if _LAUNCH_IN_SHELL.search(line) and not line.lstrip().startswith("#"):
            example, found = _with_continuations(lines[number - 1 :]), f", line {number},"
            example = _with_values(example, lines[: number - 1])
            example = _with_arguments(example, words[at + 1 :])
            break
    return UsageError(
        f"{script} is a shell script, which is not rehearsed",
        f"Put the launch command from it{found} after `--`: `ddpdoctor check -- {example}`.",
    )


def _with_arguments(command: str, arguments: Sequence[str]) -> str:
    """Return a shell command with what its script is given, and without what becomes of its output."""
    command = _OUTPUT_GOES.sub("", command)

    def given(found: re.Match[str]) -> str:
        number = int(found["one"] or found["from"] or 1)
        chosen = arguments[number - 1 : number] if found["one"] else arguments[number - 1 :]
        return shlex.join(chosen) if chosen or not found["one"] else found[0]

    return _GIVEN.sub(given, command).strip()


_OUTPUT_GOES = re.compile(r"""\s+(?:\|&?|&>|\d?>)[^"']*$""")
_GIVEN = re.compile(r'"?\$(?:\{?[@*](?::(?P<from>[1-9]))?\}?|\{?(?P<one>[1-9])\}?)"?')
"""What a shell script is given: one of its arguments, all of them, or those from one on."""


def _with_values(command: str, before: Sequence[str]) -> str:
    """Return a shell command as it stands for itself: with what the lines before it export, and the values that they
    give to its variables; what is computed stays as it is written.
    """
    set_to: dict[str, str] = {}
    exported: dict[str, str] = {}
    for line in before:
        found = _SETS.fullmatch(line.strip())
        if found is None:
            continue
        value = _filled_in(found[3], set_to)
        set_to[found[2]] = value.strip("\"'")
        if found[1]:
            exported[found[2]] = value
    return " ".join([*(f"{name}={value}" for name, value in exported.items()), _filled_in(command, set_to)])


def _filled_in(text: str, values: Mapping[str, str]) -> str:
    return _VARIABLE.sub(lambda found: values.get(found[1] or found[2], found[0]), text)


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
