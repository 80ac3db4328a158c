"""Where a script's project begins, and which file an import names."""

from __future__ import annotations

import copy
import os
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from ddpdoctor.errors import UsageError
from ddpdoctor.files.patterns import home_directory

PROJECT_FILES = ("pyproject.toml", "setup.py", "setup.cfg", ".git")
INSTALLED = frozenset({"site-packages", "dist-packages"})
UNDERSTOOD = frozenset({
    "accelerate", "hydra", "lightning", "lightning_fabric", "pytorch_lightning", "torch", "transformers",
})  # fmt: skip
"""Libraries that are known by what they do for ranks: in their own repositories, too, their examples use them so."""
LEVELS_UP = 4
"""How far above the script a project file still counts."""


SHORTEST_OF_COPY = 4
"""Letters of a package that may be known by a part of its directory's name: `src` and `lib` are parts of many."""


class Found(msgspec.Struct, frozen=True):
    """The file of a project module."""

    path: Path
    name: str
    package: str


class Finder:
    """A search for project modules by dotted name. What is installed is no project."""

    def __init__(self, directory: Path, root: Path) -> None:
        between = [above for above in directory.parents if root in above.parents]
        places = [directory, _outside_packages(directory), root, root / "src", *between]
        different = [place for index, place in enumerate(places) if place not in places[:index]]
        self._places = [(place, _names_in(place)) for place in different]
        self._outside = UNDERSTOOD.difference(directory.parts[len(root.parts) :])
        self._above = (directory, *directory.parents)[:LEVELS_UP]
        self._found: dict[str, Found | None] = {}
        self._real: dict[Path, Path] = {}

    @property
    def places(self) -> tuple[Path, ...]:
        """The directories that modules are looked for in, the script's first."""
        return tuple(place for place, _ in self._places)

    def with_places(self, places: Sequence[Path]) -> Finder:
        """Return one that also looks into ``places``, which a script adds to ``sys.path``."""
        new = [place for place in dict.fromkeys(places) if place not in self.places]
        if not new:
            return self
        other = copy.copy(self)
        other._places = [*self._places, *((place, _names_in(place)) for place in new)]
        other._found = {name: found for name, found in self._found.items() if found is not None}
        return other

    def find(self, name: str) -> Found | None:
        """Return the file that ``import name`` would read, or None when it is not in the project."""
        if name not in self._found:
            self._found[name] = self._search(name)
        return self._found[name]

    def within(self, package: str) -> Sequence[str]:
        """Return the names of the modules in a package of the project, or in a directory that serves as one."""
        if not all(part.isidentifier() for part in package.split(".")):
            return ()  # A part of it is not known, or it is no name: a text of the code may hold anything.
        head = package.partition(".")[0]
        for place, listing in self._places if head not in self._outside else ():
            names = _names_in(place.joinpath(*package.split("."))) if head in listing else ()
            if found := sorted(name[:-3] for name in names if name.endswith(".py") and not name.startswith("__")):
                return [f"{package}.{name}" for name in found]
        return ()

    def real(self, path: Path) -> Path:
        """Return a path without links."""
        known = self._real.get(path)
        if known is None:
            known = self._real[path] = path.resolve()
        return known

    def _search(self, name: str) -> Found | None:
        if not all(part.isidentifier() for part in name.split(".")):
            return None
        head = name.partition(".")[0]
        if head in self._outside:
            return None
        for place, listing in self._places:
            if (head in listing or f"{head}.py" in listing) and (found := _below(place, name)) is not None:
                return found
        for around in self._above:
            # A script that imports from the package that it lies in is started above of it, project file or not.
            if around.name == head and (found := _below(around.parent, name)) is not None:
                self._places.append((around.parent, _names_in(around.parent)))
                self._found = {known: place for known, place in self._found.items() if place is not None}
                return found
            # A package is its repository, which was copied under a longer name: `project-main`, `owner+project`.
            copied = len(head) >= SHORTEST_OF_COPY and head.lower() in re.split(r"\W+", around.name.lower())
            if copied and (found := _below(around, name.partition(".")[2])) is not None:
                return Found(found.path, name, ".".join(filter(None, (head, found.package))))
        return None


def _below(place: Path, name: str) -> Found | None:
    """Return the file of a module that is looked for in a directory."""
    base = place.joinpath(*name.split("."))
    try:
        if (base / "__init__.py").is_file():
            return Found(base / "__init__.py", name, name)
        if base.with_suffix(".py").is_file():
            return Found(base.with_suffix(".py"), name, name.rpartition(".")[0])
    except OSError:
        pass
    return None


def find_main(name: str, places: Sequence[Path]) -> tuple[Path, Found]:
    """Return the file that ``python -m name`` runs, and the first of ``places`` that has it.

    Raises UsageError when there is none.
    """
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts):
        raise UsageError(f"-m {name}: that is no name of a module", _meant(name))
    for place in places:
        base = place.joinpath(*parts)
        if (base / "__main__.py").is_file():
            return place, Found(base / "__main__.py", "__main__", name)
        if (base / "__init__.py").is_file():
            raise UsageError(f"-m {name}: the package {base} has no __main__.py", "Name the module in it that trains.")
        if base.with_suffix(".py").is_file():
            return place, Found(base.with_suffix(".py"), "__main__", name.rpartition(".")[0])
    looked = f"{places[0]} and where else Python looks" if len(places) > 1 else str(places[0])
    anywhere = "Run it from the directory that `python -m` is run from, or set PYTHONPATH."
    hint = _meant(name) or _lies_below(places[0], parts) or anywhere
    raise UsageError(f"-m {name}: there is no such module in {looked}", hint)


def _lies_below(place: Path, parts: Sequence[str]) -> str:
    """Return a hint for a module that Python would find one directory further down, as in ``src``; empty for none."""
    with suppress(OSError):
        for inner in ("src", *sorted(_names_in(place) - {"src"})):
            base = place.joinpath(inner, *parts)
            if base.with_suffix(".py").is_file() or (base / "__main__.py").is_file():
                found = base if base.is_dir() else base.with_suffix(".py")
                path = f"put `PYTHONPATH={shlex.quote(inner)}` before the command"
                return f"{found.relative_to(place)} is here: {path}, or install the project (`pip install -e .`)."
    return ""


def _meant(name: str) -> str:
    """Return a hint for a path that was given as a module."""
    module = name.removesuffix(".py").removeprefix("./").replace("/", ".")
    return f"Did you mean `-m {module}`?" if name.endswith(".py") else ""


def _names_in(directory: Path) -> frozenset[str]:
    try:
        return frozenset(os.listdir(directory))
    except OSError:
        return frozenset()


class Surroundings:
    """What scripts of one directory have in common, queried from the file system once.

    It holds as long as no file is moved: for one survey, not for a process that goes on.
    """

    def __init__(self) -> None:
        self._projects: dict[Path, tuple[Path, str]] = {}
        self._finders: dict[tuple[Path, Path], Finder] = {}

    def project(self, path: Path) -> tuple[Path, str]:
        """Return the root of the project that a script belongs to, and the package that it lies in."""
        known = self._projects.get(path.parent)
        if known is None:
            root = project_root(path)
            known = self._projects[path.parent] = root, package_of(path)
        return known

    def finder(self, directory: Path, root: Path) -> Finder:
        """Return the finder of the modules that scripts of a directory import."""
        known = self._finders.get((directory, root))
        if known is None:
            known = self._finders[directory, root] = Finder(directory, root)
        return known


def project_root(path: Path) -> Path:
    """Return the directory of the project that a script belongs to.

    It is the nearest directory above with a project file, or else the working directory if that is above, too: ``python
    -m`` and ``PYTHONPATH=.`` import from there. Else it is the one that holds the outermost package around the script,
    or the script's own.
    """
    directory = path.parent
    if INSTALLED.intersection(path.parts):
        return _outside_packages(directory)
    home, started_in = home_directory(), Path.cwd()
    above = None
    for level, parent in enumerate((directory, *directory.parents)):
        if level > LEVELS_UP or parent == home or parent == parent.parent:
            break
        if any((parent / name).exists() for name in PROJECT_FILES):
            return parent
        if parent == started_in:
            above = parent
    return above or _outside_packages(directory)


def package_of(path: Path) -> str:
    """Return the dotted name of the package that an entry script lies in; empty when it lies in none."""
    directory = path.parent
    outside = _outside_packages(directory)
    if outside == directory:
        return ""
    return ".".join(directory.relative_to(outside).parts)


def _outside_packages(directory: Path) -> Path:
    while (directory / "__init__.py").is_file() and directory != directory.parent:
        directory = directory.parent
    return directory
