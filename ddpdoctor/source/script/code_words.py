"""The words of the code of a script: what decides whether it uses something at all.

A word is a name, an attribute, a keyword argument, a parameter, a part of an import, a function or class that is
defined, or a string that is one word (``"nccl"``, ``"cuda:0"``). Comments, docstrings and what is printed or logged run
nothing, and are no words.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from ddpdoctor.source.script.module import Scope
from ddpdoctor.source.script.syntax_index import descend, last_name

if TYPE_CHECKING:
    from ddpdoctor.source.script.module import Module
    from ddpdoctor.source.script.script import Script

LONGEST_WORD = 120
"""Characters of a string that counts as a word: longer ones are data."""
_SAYING = re.compile(r"(print|debug|info|warn(ing)?|log|error|critical|exception|write|\w*(Error|Exception|Warning))$")
"""Last names of Python's own functions and classes whose strings are for people to read."""
_PART = re.compile(r"\w+")


def uses_any(script: Script, words: Iterable[str]) -> bool:
    """Return whether one of the words is a word of the code of a script's modules."""
    return any(_in_modules(script, word, _whole) for word in words)


def uses_part(script: Script, parts: Iterable[str]) -> bool:
    """Return whether one of the parts occurs in a word of the code; upper and lower case differ."""
    return any(_in_modules(script, part, _partly) for part in parts)


def calls_any(script: Script, names: Iterable[str]) -> bool:
    """Return whether something is called whose last name is one of these."""
    return any(name in module.calls_by_name for name in names for module in script.modules)


def imports_any(script: Script, packages: Iterable[str]) -> bool:
    """Return whether something of one of the top-level packages is imported."""
    wanted = frozenset(packages)
    return any(entry.module.partition(".")[0] in wanted for module in script.modules for entry in module.imports)


def says(call: ast.Call) -> bool:
    """Return whether a call prints, logs or describes an error: its strings are for people."""
    return _SAYING.match(last_name(call.func)) is not None


def words_of(module: Module) -> frozenset[str]:
    """Return the words of a module's code; kept with it."""
    known: frozenset[str] | None = module.__dict__.get("_code_words")
    if known is None:
        known = module.__dict__["_code_words"] = frozenset(_words(module))
    return known


def code_of(node: ast.AST) -> str:
    """Return the words of a part of a module, one a line: its names and strings of one word, and no docstrings."""
    found: list[str] = []
    for inner in descend(node):
        if isinstance(inner, ast.Name):
            found.append(inner.id)
        elif isinstance(inner, ast.Attribute):
            found.append(inner.attr)
        elif isinstance(inner, (ast.arg, ast.keyword)):
            found.append(inner.arg or "")
        elif isinstance(inner, Scope):
            found.append(inner.name)
        elif isinstance(inner, ast.Constant) and isinstance(inner.value, str) and len(inner.value.split()) == 1:
            found.append(inner.value)
    return "\n".join(found)


def _in_modules(script: Script, word: str, test: Callable[[Module, str], bool]) -> bool:
    known: dict[tuple[str, bool], bool] = script.__dict__.setdefault("_used_words", {})
    key = word, test is _whole
    if key not in known:
        known[key] = any(test(module, word) for module in script.modules)
    return known[key]


def _whole(module: Module, word: str) -> bool:
    return word in words_of(module)


def _partly(module: Module, part: str) -> bool:
    # An imported module is searched once, however many scripts import it.
    known: dict[str, bool] = module.__dict__.setdefault("_code_parts", {})
    found = known.get(part)
    if found is None:
        text: str | None = module.__dict__.get("_code_text")
        if text is None:
            text = module.__dict__["_code_text"] = "\n".join(words_of(module))
        found = known[part] = part in module.text and part in text
    return found


def _words(module: Module) -> Iterator[str]:
    index = module.index
    yield from (node.id for node in index.of(ast.Name))
    yield from (node.attr for node in index.of(ast.Attribute))
    yield from (node.arg for node in index.of(ast.keyword) if node.arg)
    yield from (node.arg for node in index.of(ast.arg))
    definitions = index.places(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    yield from (node.name for place in definitions if isinstance(node := index.nodes[place], Scope))
    for entry in module.imports:
        yield from (*entry.module.split("."), entry.name, entry.bound_as)
    if index.places(ast.ExceptHandler):
        yield "except"
    for constant in index.of(ast.Constant):
        text = constant.value
        if text.__class__ is str and len(text) <= LONGEST_WORD and not _is_prose(module, constant, text):
            yield text
            yield from _PART.findall(text)


def _is_prose(module: Module, node: ast.Constant, text: str) -> bool:
    """Return whether a string is for people: of several words, a docstring, or what is printed or logged."""
    if any(map(str.isspace, text)):
        return True
    around = module.parents.get(node)
    if isinstance(around, ast.JoinedStr):
        around = module.parents.get(around)
    if isinstance(around, ast.Call):
        return says(around)
    return isinstance(around, ast.Expr)
