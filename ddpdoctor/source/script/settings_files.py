"""The settings files of Hydra that a script is run with, composed as Hydra does: which classes and functions they name.

A settings file chooses code (``_target_: src.models.Net``), so that a training may be in no module that is imported.
What else it holds is what a setting is by default, as an option of a command line: whoever starts the job may give
another.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from ddpdoctor.files import regex
from ddpdoctor.files.untrusted import read_untrusted
from ddpdoctor.source.script.module import Module, all_once, last_name, once
from ddpdoctor.source.script.project import project_root
from ddpdoctor.source.script.written_paths import commands_beside, written_path

Tree: TypeAlias = "dict[str, Any]"
TARGET = "_target_"
_MAXIMUM_BYTES = 200_000
_MAXIMUM_FILES = 100
"""A defaults list names one file a group: the largest of the templates in use has 14."""
_MAXIMUM_PARTS = 5_000
"""Of all files together: aliases within aliases of ten lines of YAML make 10^9."""
_MAXIMUM_DEPTH = 10
_REFERENCE = regex(r"\$\{(\w+(?:\.\w+)*)\}")


class _Composed(msgspec.Struct):
    """What has been read so far."""

    root: Path
    chosen: dict[str, str]
    """Groups that the primary file overrides, with the option that it takes."""
    files: int = 0
    parts: int = 0


@once
def hydra_settings(module: Module) -> Tree | None:
    """Return what the files hold that a module's ``hydra.main`` or ``hydra.compose`` names; None where it names none.

    A file that is missing or cannot be parsed leaves its part out.
    """
    if "hydra" not in module.text:
        return None
    calls = [call for name in ("main", "initialize", "compose") for call in _calls(module, name)]
    given = {key: value for call in calls for key, value in _written(module, call)}
    directory, name = given.get("config_path"), given.get("config_name") or (_of_command(module) if calls else None)
    if directory is None or name is None:
        return None
    root = Path(os.path.normpath(module.path.parent / directory))
    composed = _Composed(root, {})
    whole = _file(composed, root / name.removesuffix(".yaml"), (), 0)
    return _resolved(composed, whole, whole, 0) if whole else None


def _resolved(composed: _Composed, whole: Tree, held: Any, depth: int) -> Any:
    """Return a part of the settings with what it takes from other parts: ``model: ${network.large}``."""
    composed.parts += 1
    if composed.parts > _MAXIMUM_PARTS or depth > _MAXIMUM_DEPTH * 2:
        return None
    if isinstance(held, dict):
        return {key: _resolved(composed, whole, value, depth + 1) for key, value in held.items()}
    if isinstance(held, list):
        return [_resolved(composed, whole, value, depth + 1) for value in held]
    named = _REFERENCE.fullmatch(held) if isinstance(held, str) else None
    if named is None:
        return held
    found: Any = whole
    for name in named[1].split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return held if found is None else _resolved(composed, whole, found, depth + 1)


@all_once
def targets(module: Module) -> Iterator[str]:
    """Yield the dotted names of what the settings of a module name."""
    waiting: list[object] = [hydra_settings(module)]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            if isinstance(target := one.get(TARGET), str):
                yield target
            waiting.extend(one.values())
        elif isinstance(one, list):
            waiting.extend(one)


def _calls(module: Module, name: str) -> Iterator[ast.Call]:
    for call in module.calls_by_name.get(name, ()):
        if name != "main" or ast.unparse(call.func) in ("hydra.main", "main"):
            yield call


def _of_command(module: Module) -> str | None:
    """Return the settings that a command of the project's files starts a script with: its README, or a shell script."""
    command = rf"{re.escape(module.path.name)}\b[^\n|;&]*?--config[-_]name[=\s]+['\"]?([\w./-]+)"
    found = (re.search(command, text) for _, text in commands_beside(project_root(module.path)))
    return next((match[1] for match in found if match is not None), None)


def _written(module: Module, call: ast.Call) -> Iterator[tuple[str, str]]:
    places = ("config_name",) if last_name(call.func) == "compose" else ("config_path", "config_name")
    named = ((word.arg or "", word.value) for word in call.keywords)
    for name, node in (*zip(places, call.args, strict=False), *named):
        if name in ("config_path", "config_name") and (text := written_path(module, node)):
            yield name, text


def _file(composed: _Composed, path: Path, package: tuple[str, ...], depth: int) -> Tree:
    """Return what a file holds, with all that its defaults list takes from others, from the root of the settings."""
    content = _parsed(composed, Path(f"{path}.yaml"))
    if content is None or depth > _MAXIMUM_DEPTH:
        return {}
    text, own = content
    for line in text.splitlines()[:20]:
        words = line.removeprefix("#").split()
        if line.startswith("#") and words[:1] == ["@package"] and len(words) == 2:
            written = words[1].replace("_group_", ".".join(package)).replace("_name_", path.name)  # of Hydra 1.0
            package = () if written == "_global_" else tuple(filter(None, written.split(".")))
    entries = own.pop("defaults", None)
    entries = list(entries) if isinstance(entries, list) else []
    if not any(entry == "_self_" for entry in entries):
        entries.append("_self_")
    if not depth:
        overrides = (one for entry in entries if isinstance(entry, dict) for one in entry.items())
        composed.chosen.update(
            (_group(composed, path, key.split()[1]), str(value)) for key, value in overrides if _is_override(key)
        )
    whole: Tree = {}
    for entry in entries:
        if entry == "_self_":
            _merge(whole, _below(package, own))
        for inner, at in _named_by(composed, path, entry, package):
            _merge(whole, _file(composed, inner, at, depth + 1))
    return whole


def _is_override(key: object) -> bool:
    return isinstance(key, str) and key.startswith("override ") and len(key.split()) > 1


def _group(composed: _Composed, path: Path, name: str) -> str:
    """Return a group's name from the root of the settings."""
    name = name.partition("@")[0]
    if name.startswith("/") or path.parent == composed.root or composed.root not in path.parents:
        return name.strip("/")
    return f"{path.parent.relative_to(composed.root).as_posix()}/{name}"


def _named_by(
    composed: _Composed, path: Path, entry: object, package: tuple[str, ...]
) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Yield the files that an entry of a defaults list takes, each with the place of its content."""
    if isinstance(entry, str) and entry != "_self_":
        name, _, at = entry.partition("@")
        yield (
            (composed.root / name[1:] if name.startswith("/") else path.parent / name),
            (package if not at else _place(at, package)),
        )
    if not isinstance(entry, dict):
        return
    for key, taken in entry.items():
        if not isinstance(key, str) or _is_override(key):
            continue
        name, _, at = key.removeprefix("optional ").strip().partition("@")
        group = _group(composed, path, name)
        options = [composed.chosen.get(group, taken)] if not isinstance(taken, list) else taken
        for option in options:
            if isinstance(option, str):
                inner = tuple(part for part in (group if name.startswith("/") else name).split("/") if part)
                where = _place(at, package) if at else (inner if name.startswith("/") else (*package, *inner))
                yield composed.root / group / option.removesuffix(".yaml"), where


def _place(text: str, package: tuple[str, ...]) -> tuple[str, ...]:
    if text == "_global_":
        return ()
    return package if text in ("_here_", "") else (*package, *text.split("."))


def _below(package: tuple[str, ...], content: Tree) -> Tree:
    for name in reversed(package):
        content = {name: content}
    return content


def _merge(whole: Tree, more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(whole.get(key), dict):
            _merge(whole[key], value)
        else:
            whole[key] = value


def _parsed(composed: _Composed, path: Path) -> tuple[str, Tree] | None:
    """Return the text of a file and what it holds; None where it cannot be read, or is larger than settings are."""
    import yaml

    composed.files += 1
    if composed.files > _MAXIMUM_FILES:
        return None
    try:
        text = read_untrusted(path, _MAXIMUM_BYTES).decode("utf-8")
        held = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return None
    content = _copied(composed, held, 0)
    return (text, content) if isinstance(content, dict) else None


def _copied(composed: _Composed, held: object, depth: int) -> object:
    """Return a copy in which nothing is shared, as what one place overrides another keeps; beyond a bound nothing."""
    composed.parts += 1
    if composed.parts > _MAXIMUM_PARTS or depth > _MAXIMUM_DEPTH * 2:
        return None
    if isinstance(held, dict):
        return {str(key): _copied(composed, value, depth + 1) for key, value in held.items()}
    return [_copied(composed, value, depth + 1) for value in held] if isinstance(held, list) else held
