"""The command of a job that is watched: the user's own, or the script under torch's launcher."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from ddpdoctor.errors import UsageError
from ddpdoctor.launch.command.wrappers import without_wrappers
from ddpdoctor.launch.environment import LOOPBACK
from ddpdoctor.probe.free_port import free_port

RANKS_WITHOUT_GPU = 2


class ObservedCommand(msgspec.Struct, frozen=True, kw_only=True):
    """What is started, and how."""

    words: tuple[str, ...]
    environment: Mapping[str, str] = {}
    """Variables that the command line sets."""
    without: tuple[str, ...] = ()
    """Variables that the command line takes away."""
    script: str = ""
    """Path of the script as it is written, where it can be made out."""
    arguments: tuple[str, ...] = ()
    """The script's own."""
    python: str = ""
    """Interpreter of the ranks, where it is known."""

    @property
    def name(self) -> str:
        """What people call the run."""
        return Path(self.script or self.words[0]).name


def script_command(
    python: str, script: str, arguments: Sequence[str], ranks: int, *, module: bool, spawns_ranks: bool
) -> ObservedCommand:
    """Return the command that starts a script on so many ranks of this machine by torch's launcher.

    A script that starts its ranks itself is started by Python alone.
    """
    target = ("-m", script) if module else (script,)
    if spawns_ranks:
        words: tuple[str, ...] = (python, *target, *arguments)
    else:
        words = (
            *(python, "-m", "torch.distributed.run"),
            *(f"--nproc-per-node={ranks}", "--nnodes=1", "--node-rank=0"),
            *(f"--master-addr={LOOPBACK}", f"--master-port={free_port()}"),
            # Without `--` the launcher reads the script's options, too, and stumbles over beginnings of its own.
            *(("-m",) if module else ()),
            *("--", script, *arguments),
        )
    return ObservedCommand(words=words, script=script, arguments=tuple(arguments), python=python)


def launch_command(words: Sequence[str]) -> ObservedCommand:
    """Return the command as the user gives it, environment assignments in front included.

    Raises UsageError when there is no such program.
    """
    wrapped = without_wrappers(words)
    program = wrapped.words[0]
    if shutil.which(program) is None:
        where = "no such program" if os.sep in program else "no such program on the PATH"
        raise UsageError(f"{program}: {where}", "Write the launch command after `--` as you would write it alone.")
    index = next((number for number, word in enumerate(wrapped.words) if word.endswith(".py")), None)
    return ObservedCommand(
        words=wrapped.words,
        environment=wrapped.environment,
        without=wrapped.without,
        script=wrapped.words[index] if index is not None else "",
        arguments=wrapped.words[index + 1 :] if index is not None else (),
    )
