"""What to install for a module that the ranks' Python lacks: all that the script lacks, by the names of packages."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ddpdoctor.diagnosis.failures import distribution_of
from ddpdoctor.files import regex
from ddpdoctor.files.untrusted import read_start
from ddpdoctor.launch.interpreter import answer_of
from ddpdoctor.launch.launcher_options import BUILT_BY, LARGEST_BYTES
from ddpdoctor.probe.rehearsal.pretend.other_packages import TAKES_ALL, TRACKERS

if TYPE_CHECKING:
    from ddpdoctor.source.script.module import Module
    from ddpdoctor.source.script.script import Script

ELSEWHERE = "give another Python with `--python`, or run this in the environment that launches the job"
_COMPILED = frozenset({".pyx", ".c", ".cc", ".cpp", ".cu"})
_DECLARE = (*BUILT_BY, "requirements*.txt", "*/requirements*.txt", "environment*.y*ml", "README*", "*/README*")
_QUOTED = regex(r"""["']([A-Za-z][\w.-]+)(?=[\s\[<>=~!;"'])""")
_LISTED = regex(r"^[\s-]*([A-Za-z][\w.-]+)", re.MULTILINE)
_INSTALLED = regex(r"\bpip3? install\s+(.+)")
_ASK = (
    "import importlib.util,json,sys;"
    "print(json.dumps([name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]))"
)
_ASK_PACKAGES = (
    "import json,sys;from importlib.metadata import distributions;"
    "import re;plain=lambda name:re.sub('[-_.]+','-',name or '').lower();"
    "there={plain(one.metadata['Name']) for one in distributions()};"
    "print(json.dumps([name for name in sys.argv[1:] if plain(name) not in there]))"
)
_REQUIRED = regex(r"^([A-Za-z][\w.-]*)(?:\[[^\]\n]*\])?[ \t]*(?:[<>=!~][^;@\n]*)?$")
"""A package that every machine needs: no address, no option, no condition."""


def module_hint(
    module: str,
    root: str = ".",
    script: Script | None = None,
    python: str = "",
    pretended: Sequence[str] = (),
) -> str:
    """Return how a module is installed, or found where the project has it; with it the others that the script lacks.

    ``pretended``: what stood for missing things in a try without them, as it reports it.
    """
    top = module.partition(".")[0]
    root = root if script is None else str(script.root)
    if (sources := _built_from(module)) is not None:
        how = "as described in the project's README (usually `python setup.py build_ext --inplace`)"
        return f"{module} is compiled from {sources} of this project: build it for the Python of the ranks, {how}."
    places = [Path(place) for place in dict.fromkeys((".", "src", root, os.path.join(root, "src")))]
    held = [place for place in places if (place / top).is_dir() or (place / f"{top}.py").exists()]
    whole = [place for place in held if _is_there(place.joinpath(*module.split(".")))]
    if held and not whole:
        name, meant = f"{top}.py", ""
        if (held[0] / top).is_dir():
            name, meant = (
                top,
                f", or a package is meant that is not installed (`pip install {_declared(top, Path(root))}`)",
            )
        return f"{name} of this project has no submodule {module}: a file is missing from the project{meant}."
    own = next(iter(whole), None)
    seen = [what.partition(" ")[0] for what in pretended if what.endswith(f" ({TAKES_ALL})")]
    others = sorted({*seen, *(_others(top, script, python) if script is not None and python else ())} - {top})
    if own is not None or _is_named(module, Path(root)):
        return _of_the_project(top, Path(root), own, others)
    if module != top and distribution_of(module) == top and not others:
        # Python names the first part that it misses: those before it are there.
        newer = f"install the version of {top} that the script's README names, or the package that adds this part"
        return f"The ranks' Python has {top}, but no submodule {module}: {newer}; or {ELSEWHERE}."
    wanted = {name: _declared(name, Path(root)) for name in (top, *others)}
    if not wanted[top]:
        return f"Build and install {top} for the Python of the ranks, {ELSEWHERE}; `--static` reads the source only."
    asked = lacking_packages(root, python)
    # Plugins are named after a module: ``hydra-colorlog``.
    plugins = [one for one in asked if _plain(one).startswith(tuple(f"{_plain(module)}-" for module in wanted))]
    packages = [package for package in dict.fromkeys((*wanted.values(), *plugins)) if package]
    line = f"`pip install {shlex.join(packages)}` for the Python of the ranks, {ELSEWHERE}"
    # What a script loads by the name in a setting, or late, is missed only then.
    known = {_plain(name) for name in (*packages, *wanted)}
    rest = [one for one in asked if _plain(one) not in known]
    also = f" The project's requirements name more that is not there: {', '.join(rest)}."
    return f"{line}; `--static` reads the source only.{also if rest else ''}"


def lacking_packages(root: str, python: str) -> tuple[str, ...]:
    """Return the packages that the project asks for and the ranks' Python lacks, but those that a rehearsal serves."""
    lines = (line.partition("#")[0].strip() for line in _requirements(Path(root)))
    # Torch itself is called pytorch by conda; what pip gets by that name only says so.
    named = dict.fromkeys(found[1] for line in lines if (found := _REQUIRED.match(line)) and found[1] != "pytorch")
    return _lacking(_ASK_PACKAGES, [name for name in named if _plain(name) not in TRACKERS], python) if python else ()


def _requirements(root: Path) -> Iterator[str]:
    """Yield the lines of ``requirements.txt`` and the dependencies in ``pyproject.toml``, where these can be read."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    with contextlib.suppress(OSError):
        yield from read_start(root / "requirements.txt", LARGEST_BYTES).decode("utf-8", "replace").splitlines()
    # ValueError is of TOML and of UTF-8; the others are of a file that is something else than it should be.
    with contextlib.suppress(OSError, ValueError, RecursionError, KeyError, TypeError):
        document = tomllib.loads(read_start(root / "pyproject.toml", LARGEST_BYTES).decode("utf-8"))
        yield from (entry for entry in document["project"]["dependencies"] if isinstance(entry, str))


def _is_there(module: Path) -> bool:
    return module.is_dir() or module.with_suffix(".py").exists()


def _of_the_project(top: str, root: Path, own: Path | None, others: Sequence[str]) -> str:
    """Return how the script finds a package of its own project: installed, as it asks for, or by the path."""
    ways = []
    if any((root / name).exists() for name in BUILT_BY):
        ways.append(f"install it (`pip install -e {shlex.quote(os.path.relpath(root))}`) for the Python of the ranks")
    if own is not None:
        ways.append(f"put `PYTHONPATH={shlex.quote(os.path.relpath(own))}` before the command")
    missing = f"; `pip install {shlex.join(_declared(name, root) for name in others)}`, too" if others else ""
    return f"{top} is in this project: {', or '.join(ways)}{missing}."


def _built_from(module: str) -> str | None:
    """Return the directory of this project that holds the sources of a compiled module; None where it is none."""
    for place in (".", "src"):
        package = Path(place, *module.split(".")[:-1])
        inside = module.count(".") and package.is_dir()
        if inside and any(one.suffix in _COMPILED for one in package.rglob("*")):
            return package.as_posix()
    return None


def _others(top: str, script: Script, python: str) -> tuple[str, ...]:
    """Return what the ranks' Python lacks of all that the script imports as it is loaded, but ``top``."""
    own = {module.name.partition(".")[0] for module in script.modules}
    known = sys.stdlib_module_names | TRACKERS | own | {top, "torch"}
    names = sorted({name for module in _loaded(script) for name, _ in _imported(module)} - known)
    return _lacking(_ASK, names, python)


def _lacking(question: str, names: Sequence[str], python: str) -> tuple[str, ...]:
    return tuple(map(str, answer_of(python, question, *names) or ()))


def _loaded(script: Script) -> Iterator[Module]:
    """Yield the modules of the project that are certainly loaded with the script."""
    queue, met = [script.entry], {script.entry.name}
    while queue:
        module = queue.pop()
        yield module
        for _, full in _imported(module):
            parts = full.split(".")
            for name in (".".join(parts[:end]) for end in range(1, len(parts) + 1)):
                found = script.module(name)
                if found is not None and name not in met:
                    met.add(name)
                    queue.append(found)


def _imported(module: Module) -> Iterator[tuple[str, str]]:
    """Yield the first and the whole name of what a module imports at its top level under no condition."""
    lines = {one.lineno for one in module.tree.body if isinstance(one, (ast.Import, ast.ImportFrom))}
    for one in module.imports:
        if one.line in lines and one.module:
            yield one.module.partition(".")[0], f"{one.module}.{one.name}" if one.name else one.module


def _is_named(name: str, root: Path) -> bool:
    """Return whether the project is built as a package of this name."""
    built = re.compile(rf"""\bname\s*=\s*["']{re.escape(name)}["']""")
    return any(built.search(text) for file, text in _texts(root) if file.name in BUILT_BY)


def _declared(module: str, root: Path) -> str:
    """Return the package for a module, by the name that the project gives it (``hydra-core``) where it names one."""
    known = distribution_of(module)
    if known != module and not known.startswith("git+"):
        return known
    named: set[str] = set()
    for file, text in _texts(root):
        if file.name.startswith("README"):
            named.update(word for line in _INSTALLED.findall(text) for word in _LISTED.findall("\n".join(line.split())))
        else:
            named.update((_QUOTED if file.suffix in (".toml", ".py") else _LISTED).findall(text))
    plain = _plain(module)
    starts = [f"{plain}-", *([f"scikit-{module[2:]}"] if module.startswith("sk") else [])]
    fitting = [name for name in named if f"{_plain(name)}-".startswith(tuple(starts))]
    # `generative` is a part of monai-generative, cleanfid of clean-fid; lightning is none of pytorch-lightning.
    fitting += [name for name in named if _plain(name).endswith(f"-{plain}") and not name.lower().startswith("pytorch")]
    fitting += [name for name in named if _plain(name).replace("-", "") == plain.replace("-", "")]
    return known if not fitting or plain in map(_plain, fitting) else min(fitting, key=len)


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _texts(root: Path) -> Iterator[tuple[Path, str]]:
    for file in (file for pattern in _DECLARE for file in sorted(root.glob(pattern))):
        with contextlib.suppress(OSError):
            yield file, read_start(file, LARGEST_BYTES).decode("utf-8", "replace")
