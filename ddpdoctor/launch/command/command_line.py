"""Reads the command line by which a user launches a job: which script it starts, how, and on how many ranks."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from ddpdoctor.errors import UsageError
from ddpdoctor.launch.command.accelerate_launch import parse_accelerate
from ddpdoctor.launch.command.fabric_run import parse_fabric
from ddpdoctor.launch.command.launcher_options import Parsed
from ddpdoctor.launch.command.programs import is_python_script, named_by_path, program_of, python_of
from ddpdoctor.launch.command.torch_launchers import LAUNCH, TORCHRUN, most_nodes, parse_torch_launcher, ranks_of_job
from ddpdoctor.launch.command.wrappers import refuse, without_wrappers
from ddpdoctor.launch.request import Launch, LaunchLine, Starter

_PYTHON = re.compile(r"python(w|\d+(\.\d+)?)?$")
_MODULE_OR_CODE = re.compile(r"-(?P<flags>[bBdEiIOPqsSuvx]*)(?P<what>[mc])(?P<value>.*)$", re.DOTALL)
"""``-m`` or ``-c``, maybe behind other letters and before its value in one word."""
_PYTHON_OPTION_WITH_VALUE = frozenset({"-W", "-X", "--check-hash-based-pycs"})
_LAUNCHER_MODULES: dict[str, Starter] = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launcher.run": "torchrun",
    "torch.distributed.launch": "torch.distributed.launch",
    "accelerate.commands.launch": "accelerate",
    "accelerate.commands.accelerate_cli": "accelerate",
    "lightning.fabric.cli": "fabric",
    "lightning_fabric.cli": "fabric",
}


def read_launch_line(words: Sequence[str], environment: Mapping[str, str]) -> LaunchLine:
    """Read a command as the shell would hand it over, environment assignments in front included.

    Raises UsageError, with what to write instead, for what is no such command or cannot be rehearsed.
    """
    wrapped = without_wrappers(words)
    around = {name: value for name, value in environment.items() if name not in wrapped.without}
    around |= wrapped.environment
    line = _read(wrapped.words, around)
    launch = msgspec.structs.replace(
        line.launch,
        environment={**wrapped.environment, **line.launch.environment},
        without=wrapped.without,
    )
    return msgspec.structs.replace(line, launch=launch)


def looks_like_launch(words: Sequence[str]) -> bool:
    """Return whether words that should be a script's arguments are a launch command."""
    head = Path(words[0]).name if words else ""
    return head == "torchrun" or (head, *words[1:2]) in (("accelerate", "launch"), ("fabric", "run"))


def _read(words: Sequence[str], environment: Mapping[str, str]) -> LaunchLine:
    head, rest = words[0], words[1:]
    name = Path(head).name
    if _PYTHON.match(name):
        return _python(head, rest, environment)
    if name == "torchrun":
        return _launched("torchrun", head, rest, environment)
    if name in ("accelerate", "accelerate-launch"):
        return _accelerate(head, rest if name == "accelerate" else ["launch", *rest], environment)
    if name == "fabric":
        return _fabric(head, rest, environment)
    if head.endswith(".py") or is_python_script(head, environment):
        return LaunchLine(target=head, arguments=tuple(rest), launch=Launch(starter="python"))
    raise refuse(words)


def _python(head: str, rest: Sequence[str], environment: Mapping[str, str]) -> LaunchLine:
    """``python [options] script`` or ``-m module``; the module may be a launcher."""
    options, left = [], list(rest)
    module = ""
    while left and left[0].startswith("-") and left[0] != "-":
        word = left.pop(0)
        if found := _MODULE_OR_CODE.match(word):
            if found["what"] == "c":
                raise UsageError(f"{head} -c runs code that is not in a file", "Write it to a script and pass that.")
            if not found["value"] and not left:
                raise UsageError(f"{head} -m has no module name")
            options += [f"-{found['flags']}"] if found["flags"] else []
            module = found["value"] or left.pop(0)
            break
        options.append(word)
        if word in _PYTHON_OPTION_WITH_VALUE and left:
            options.append(left.pop(0))
    if module in _LAUNCHER_MODULES:
        starter = _LAUNCHER_MODULES[module]
        if starter == "accelerate":
            through_cli = module.endswith("accelerate_cli")
            return _accelerate(head, left if through_cli else ["launch", *left], environment)
        if starter == "fabric":
            return _fabric(head, left, environment)
        return _launched(starter, head, left, environment)
    if not module and (not left or left[0] == "-"):
        raise UsageError(f"{head} has no script", f"Write it as you launch it: `{head} train.py --its options`.")
    target = module or left.pop(0)
    launch = Launch(
        starter="python",
        module=bool(module),
        program=program_of(head, environment),
        must_use_program=named_by_path(head),
        python_options=tuple(option for option in options if option not in ("-u", "-B")),
    )
    return LaunchLine(target=target, arguments=tuple(left), launch=launch)


def _launched(starter: Starter, head: str, rest: Sequence[str], environment: Mapping[str, str]) -> LaunchLine:
    syntax = LAUNCH if starter == "torch.distributed.launch" else TORCHRUN
    parsed = parse_torch_launcher(rest, syntax, environment)
    if starter == "torch.distributed.launch" and "--use-env" in parsed.options:
        starter = "torchrun"
    ranks, nodes = ranks_of_job(parsed, syntax.name), most_nodes(parsed, syntax.name)
    return _of_launcher(starter, head, parsed, ranks, nodes, environment)


def _accelerate(head: str, rest: Sequence[str], environment: Mapping[str, str]) -> LaunchLine:
    if not rest or rest[0] != "launch":
        written = shlex.join([head, *rest[:1]])
        raise UsageError(f"{written} starts no job", "`accelerate launch ... train.py` does.")
    accelerated = parse_accelerate(rest[1:], environment)
    line = _of_launcher("accelerate", head, accelerated.parsed, accelerated.ranks, accelerated.nodes, environment)
    launch = msgspec.structs.replace(line.launch, environment=accelerated.environment)
    return msgspec.structs.replace(line, launch=launch)


def _fabric(head: str, rest: Sequence[str], environment: Mapping[str, str]) -> LaunchLine:
    if not rest or rest[0] != "run":
        written = shlex.join([head, *rest[:1]])
        raise UsageError(f"{written} starts no job", "`fabric run train.py --devices 2` does.")
    fabric = parse_fabric(rest[1:])
    line = _of_launcher("fabric", head, fabric.parsed, fabric.ranks, fabric.nodes, environment)
    return msgspec.structs.replace(line, launch=msgspec.structs.replace(line.launch, environment=fabric.environment))


def _of_launcher(
    starter: Starter, head: str, parsed: Parsed, ranks: int | None, nodes: int, environment: Mapping[str, str]
) -> LaunchLine:
    launch = Launch(
        starter=starter,
        module="--module" in parsed.options,
        ranks=ranks,
        nodes=nodes,
        program=python_of(head, environment),
        must_use_program=named_by_path(head),
    )
    if "--no-python" not in parsed.options:
        return LaunchLine(target=parsed.rest[0], arguments=parsed.rest[1:], launch=launch)
    inner = _read(parsed.rest, environment)
    if inner.launch.has_launcher:
        raise UsageError(f"one launcher starts another: {shlex.join(parsed.rest[:4])}", "Use the inner one only.")
    launch = msgspec.structs.replace(
        launch,
        module=inner.launch.module,
        program=inner.launch.program or launch.program,
        must_use_program=inner.launch.must_use_program or launch.must_use_program,
        python_options=inner.launch.python_options,
    )
    return LaunchLine(target=inner.target, arguments=inner.arguments, launch=launch)
