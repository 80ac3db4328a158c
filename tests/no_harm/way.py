"""One way in which a script writes, replaces, deletes, or leaves something behind."""

from __future__ import annotations

import importlib.util
import shlex
import shutil
from collections.abc import Iterable
from typing import Literal

import msgspec

Place = Literal["tree", "data", "home", "TMPDIR", "/tmp", "/var/tmp", "/dev/shm"]
By = Literal["Python", "native", "program"]
"""Who does it: Python itself, a library that writes from C, or a program that is not Python under our rules."""

_NAMED_CHARACTERS = 50
"""Of a long command line the report gives the beginning."""


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table. Its folder holds what ``world.furnish`` puts there."""

    name: str
    language: str
    body: str
    """Python, run in the row's folder; ``P`` is an old file there, see ``job.names_for``."""
    by: By = "Python"
    place: Place = "tree"
    suffix: str = ""
    """What the name of the file ``P`` ends in."""
    says: str = ""
    """Words of the report that name the program, where it is not held back."""
    ranks: Literal["forked", "first", "both"] = "forked"
    """Done in a process forked from rank 0, by rank 0 itself, or by both ranks."""
    effect: bool = True
    """Whether the row's folder is another one afterwards, seen from the rank, where nothing is refused."""
    needs: tuple[str, ...] = ()
    """Packages, and programs, without which there is nothing to try."""

    @property
    def is_here(self) -> bool:
        """Whether all that it needs is installed."""
        return all(shutil.which(name) or importlib.util.find_spec(name) is not None for name in self.needs)

    @property
    def label(self) -> str:
        """How the table calls it."""
        return f"{self.language}: {self.name}" + ("" if self.place == "tree" else f" in {self.place}")


def of_python(by: By = "Python", needs: Iterable[str] = (), language: str = "Python", **bodies: str) -> tuple[Way, ...]:
    """Rows of Python code, each by its name."""
    return tuple(
        Way(name=name.replace("_", " "), language=language, body=body, by=by, needs=tuple(needs))
        for name, body in bodies.items()
    )


def of_shell(language: str, commands: Iterable[str], needs: Iterable[str] = (), folder: str = "") -> tuple[Way, ...]:
    """Rows of shell commands, each named by itself."""
    return tuple(
        Way(
            name=command,
            language=language,
            body=f"run(['sh', '-c', {command!r}]" + (f", cwd={folder!r})" if folder else ")"),
            by="program",
            says=shlex.join(["sh", "-c", command])[:_NAMED_CHARACTERS],
            needs=(command.split()[0] if command.split()[0].isalnum() else "sh", *needs),
        )
        for command in commands
    )
