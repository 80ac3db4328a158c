"""A healthy training script that a table rehearses, and the one edit that breaks it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """One healthy script in the structure that well-known public ones have."""

    name: str
    """Of the file, or of the directory, under ``folder``."""
    folder: Path
    """Where the scripts of its table are."""
    entry: str = ""
    """The script in that directory; empty for a single file."""
    arguments: tuple[str, ...] = ()
    before: Callable[[Path], object] | None = None
    """Puts the files there that a user would have."""
    advice: tuple[str, ...] = ()
    """Codes of advice that is true of it."""

    @property
    def script(self) -> str:
        """Path of the entry script in the project."""
        return self.entry or f"{self.name}.py"

    def lay_out(self, project: Path) -> None:
        """Copy the script's files to a project of its own and add what exists before."""
        source = self.folder / self.name
        if source.is_dir():
            shutil.copytree(source, project, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source.with_suffix(".py"), project)
        if self.before is not None:
            self.before(project)


class Edit(msgspec.Struct, frozen=True, kw_only=True):
    """One edit of a script that breaks it, and what must be found then."""

    name: str
    file: str
    """The file that is edited, relative to the project."""
    old: str
    new: str
    code: str
    """What must be found."""
    severity: str = "error"
    others: tuple[str, ...] = ()
    """Further codes that are true of it."""
    options: tuple[str, ...] = ()
    """Options of the command that it takes to see it."""

    def apply(self, project: Path) -> None:
        """Edit the file; the text that is replaced must occur exactly once."""
        path = project / self.file
        text = path.read_text(encoding="utf-8")
        assert text.count(self.old) == 1, f"{self.name}: {text.count(self.old)} places to edit"
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")
