"""Reads an entry script and the project modules that it imports."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, islice
from operator import attrgetter
from pathlib import Path

import msgspec

from ddpdoctor.errors import UnreadableScript, UsageError
from ddpdoctor.files import regex
from ddpdoctor.files.untrusted import decoded
from ddpdoctor.finding import Location
from ddpdoctor.source.script.launch_facts import cuda_demand, rank_launch
from ddpdoctor.source.script.module import (
    LEAVES,
    Module,
    all_once,
    children_of,
    deep_recursion,
    descend,
    last_name,
    once,
    once_each,
)
from ddpdoctor.source.script.project import UNDERSTOOD, Finder, Surroundings, find_main
from ddpdoctor.source.script.written_paths import (
    UNKNOWN_PART,
    absolute_name,
    added_directories,
    commands_beside,
    given_for,
    imports_by_name,
    may_be,
    registers,
    template_of,
    texts_beside,
)

# Other spellings of the same thing, put plainly, so that whatever reads a tree needs to know one of them.


def in_plain_spelling(tree: ast.Module) -> None:
    """Put the expressions and statements of a tree in their plain spelling, in place; all keep their locations."""
    waiting: list[ast.AST] = [tree]
    for node in waiting:
        if node.__class__ in LEAVES:
            continue
        # In a class an annotation declares a field, too.
        spelt = _SPELT - {ast.AnnAssign} if node.__class__ is ast.ClassDef else _SPELT
        for name, field in vars(node).items():
            if field.__class__ is list:
                for place, child in enumerate(field):
                    if child.__class__ in spelt and (plain := _plain(child)) is not None:
                        field[place] = plain
            elif field.__class__ in spelt and (plain := _plain(field)) is not None:
                setattr(node, name, plain)
        waiting += children_of(node)


def _plain(node: object) -> ast.AST | None:
    """Return the plain spelling of a node; None where it has no other."""
    if isinstance(node, ast.JoinedStr):
        texts = [str(part.value) for part in node.values if isinstance(part, ast.Constant)]
        return ast.copy_location(ast.Constant("".join(texts)), node) if len(texts) == len(node.values) else None
    if isinstance(node, ast.Call):
        name = _attribute_named(node, "getattr", 2)
        return ast.copy_location(ast.Attribute(node.args[0], name, ast.Load()), node) if name else None
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        return ast.copy_location(ast.Assign([node.target], node.value), node)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        name = _attribute_named(node.value, "setattr", 3)
        if name:
            owner, _, value = node.value.args
            target = ast.copy_location(ast.Attribute(owner, name, ast.Store()), node.value)
            return ast.copy_location(ast.Assign([target], value), node)
    return None


def _attribute_named(call: ast.Call, function: str, arguments: int) -> str:
    """Return the attribute that ``getattr`` or ``setattr`` is given as a constant; empty for any other call."""
    if not isinstance(call.func, ast.Name) or call.func.id != function or call.keywords:
        return ""
    name = call.args[1] if len(call.args) == arguments else None
    text = name.value if isinstance(name, ast.Constant) else None
    return text if isinstance(text, str) and text.isidentifier() else ""


_SPELT = frozenset({ast.AnnAssign, ast.Call, ast.Expr, ast.JoinedStr})


MAXIMUM_MODULES = 300
MODULES_READ_WHOLE = 30
"""Further modules are read only where they have words for ranks: timm imports 270, nearly all model definitions."""
MODULES_OF_CHOICE = 8
"""Modules of a package of which a setting chooses one that are all read."""
_OF_RANKS = (
    *(b"torch.distributed", b"dist.", b"get_rank", b"local_rank", b"RANK", b"world_size", b"DistributedDataParallel"),
    *(b"DataLoader(", b"set_epoch", b"no_sync", b"set_device", b"horovod", b"accelerate"),
    *(b".backward(", b"training_step"),
)
"""In the text of a module: what nearly everything begins with that checks look for."""
PARSER_RECURSION_LIMIT = 4_000
"""Enough for sums of 3,000 terms; the parser recurses in C, three times as deep, which its stack has to hold."""
MAXIMUM_BYTES = 5_000_000
"""Larger files are data or generated code."""

# In the text of a module: it may read attributes by their names as strings, or have f-strings without a value in them.
_OTHER_SPELLINGS = regex(
    r"[gs]etattr\(|\b[rR]?[fF][rR]?(?:\"(?:[^\"{]|\{\{)*\"|'(?:[^'{]|\{\{)*')"
    r"|(?m:^[ \t]*[\w.]+(?:\[[\w.\[\]]*\])?[ \t]*:[^=\n]+=)"
)

Reader = Callable[[Path, str, str], Module]
"""Makes a module of a file, the module's dotted name, and that of its package; raises what ``parse`` raises."""


class Script(msgspec.Struct, frozen=True, dict=True, eq=False, kw_only=True):
    """An entry script with the project modules that can be reached from it by imports."""

    path: Path
    """The entry script, absolute."""
    root: Path
    """Directory of the project that the script belongs to."""
    modules: tuple[Module, ...]
    """The entry script first, then imported modules in the order in which they were met."""
    notes: tuple[str, ...] = ()
    """What could not be read, in sentences."""

    @property
    def entry(self) -> Module:
        """The entry script's module."""
        return self.modules[0]

    def module(self, name: str) -> Module | None:
        """Return the project module with a dotted name, if it was read."""
        return self._by_name.get(name)

    def is_package(self, name: str) -> bool:
        """Return whether a project module with a dotted name below this one was read."""
        return name in self._packages

    @cached_property
    def _packages(self) -> frozenset[str]:
        names = {module.name for module in self.modules}
        return frozenset(name[:place] for name in names for place, letter in enumerate(name) if letter == ".")

    @cached_property
    def _by_name(self) -> dict[str, Module]:
        # A script may import what it spawns from itself, by the name of its file.
        own = {self.path.stem: self.entry} if self.path.stem not in UNDERSTOOD else {}
        return {**own, **{module.name: module for module in self.modules}}

    @cached_property
    def spawns_ranks(self) -> Location | None:
        """Where the script starts its own ranks; None when a launcher has to."""
        return rank_launch(self.modules)

    @cached_property
    def demands_cuda(self) -> Location | None:
        """Where the script demands CUDA or NCCL whatever the machine has; None when it does not."""
        return cuda_demand(self.modules)


def read_script(path: Path, follow_imports: bool = True) -> Script:
    """Read an entry script and, with ``follow_imports``, the project modules that it imports.

    Raises UsageError when the entry script is missing, is not a Python file, or does not parse; for imported modules
    these become notes.
    """
    return script_at(_checked(path), follow_imports=follow_imports)


def read_module(name: str, places: Sequence[Path]) -> Script:
    """Read what ``python -m name`` runs, looking for it in the directories ``places``, the working directory first.

    Raises UsageError when there is no such module, and as ``read_script`` does.
    """
    place, found = find_main(name, places)
    return script_at(_checked(found.path), package=found.package, directory=place)


def script_at(
    path: Path,
    reader: Reader | None = None,
    *,
    follow_imports: bool = True,
    package: str | None = None,
    directory: Path | None = None,
    surroundings: Surroundings | None = None,
) -> Script:
    """Read a script as ``read_script`` does, by an absolute path; ``reader`` parses its files (by default ``parse``).

    ``package`` is what relative imports start from (by default that of the directories) and ``directory`` is where
    imports are looked for first (by default beside the script), which differ for a script that is run as a module.
    ``surroundings`` is what was learnt of the directories from other scripts.
    """
    reader, surroundings = reader or parse, surroundings or Surroundings()
    root, around = surroundings.project(path)
    entry = _parse_entry(path, around if package is None else package, reader)
    modules = [entry]
    notes: list[str] = []
    if follow_imports:
        notes.extend(_follow(modules, surroundings.finder(directory or path.parent, root), reader))
        _share_aliases(modules)
    return Script(path=path, root=root, modules=tuple(modules), notes=tuple(notes))


def _share_aliases(modules: Sequence[Module]) -> None:
    """Resolve names that ``from utils import *`` brings, such as ``mp`` and ``dist``, as the imported module does."""
    by_name = {module.name: module for module in modules}
    for module in reversed(modules):
        for entry in module.imports:
            source = by_name.get(entry.module) if entry.name == "*" else None
            if source is not None:
                module.adopt({name: full for name, full in source.aliases.items() if not name.startswith("_")})


def parse(path: Path, name: str, package: str) -> Module:
    """Parse one file. Raises OSError, SyntaxError, ValueError or RecursionError when it cannot be read."""
    return parse_bytes(path.read_bytes(), path, name, package)


def parse_bytes(raw: bytes, path: Path, name: str, package: str) -> Module:
    """Parse the content of a file. Raises SyntaxError, ValueError or RecursionError when it is no Python."""
    if len(raw) > MAXIMUM_BYTES:
        raise ValueError(f"it has {len(raw):,} bytes, more than {MAXIMUM_BYTES:,}")
    if b"\0" in raw:
        raise ValueError("it contains NUL bytes")
    text, _ = decoded(raw)
    with warnings.catch_warnings(), deep_recursion(PARSER_RECURSION_LIMIT):
        warnings.simplefilter("ignore")
        tree = ast.parse(text, filename=str(path))
    if _OTHER_SPELLINGS.search(text):
        in_plain_spelling(tree)
    return Module(path, name, package, text, tree)


def _checked(path: Path) -> Path:
    if not path.exists():
        raise UsageError(f"{path} does not exist")
    if path.is_dir():
        raise UsageError(
            f"{path} is a directory", hint="Name the entry script of the job, the file that torchrun is given."
        )
    if not path.is_file():
        raise UsageError(f"{path} is not a regular file")
    if path.suffix == ".ipynb":
        raise UsageError(
            f"{path} is a notebook, which no launcher can start", "Export it: `jupyter nbconvert --to script`."
        )
    if path.suffix not in {".py", ".pyw", ""}:
        raise UsageError(f"{path} is not a Python file", hint="Name the .py file that torchrun is given.")
    return path.absolute()


def _parse_entry(path: Path, package: str, reader: Reader) -> Module:
    try:
        return reader(path, "__main__", package)
    except SyntaxError as error:
        line = error.lineno or 1
        raise UnreadableScript(
            f"{path}, line {line}: {error.msg}", hint="The script has to parse before it can be examined."
        ) from error
    except UnicodeDecodeError as error:
        where = f"{error.reason} at byte {error.start}"
        raise UnreadableScript(f"{path} is not text in {error.encoding}: {where}") from error
    except (ValueError, OSError) as error:
        raise UnreadableScript(f"{path} cannot be read: {error}") from error
    except (RecursionError, MemoryError) as error:
        raise UnreadableScript(f"{path} cannot be read: its expressions are nested too deeply") from error


def _follow(modules: list[Module], finder: Finder, reader: Reader) -> Iterator[str]:
    """Append the project modules that ``modules`` import, breadth first; yield notes."""
    seen: set[Path] = set()
    asked: set[str] = set()
    bases = finder.places
    finder = finder.with_places([*added_directories(modules[0], bases)])
    for name, named in _wanted(modules, lambda: finder):  # noqa: B023
        if name in asked:
            continue
        asked.add(name)
        found = finder.find(name)
        if found is None:
            continue
        if not seen:
            seen.add(modules[0].path.resolve())
        real = finder.real(found.path)
        if real in seen:
            continue
        if len(modules) >= MAXIMUM_MODULES:
            yield f"only the first {MAXIMUM_MODULES} imported project modules were read"
            return
        seen.add(real)
        if len(modules) >= MODULES_READ_WHOLE and not named and not _mentions_ranks(found.path):
            continue
        try:
            modules.append(reader(found.path, found.name, found.package))
            finder = finder.with_places([*added_directories(modules[-1], bases)])
        except SyntaxError as error:
            yield f"{found.path}, line {error.lineno or 1}, does not parse: {error.msg}"
        except (OSError, ValueError, RecursionError, MemoryError) as error:
            yield f"{found.path} cannot be read: {error or type(error).__name__}"


def _mentions_ranks(path: Path) -> bool:
    try:
        content = path.read_bytes()
    except OSError:
        return True  # Reading it as a module reports why it cannot be read.
    return any(word in content for word in _OF_RANKS)


def _wanted(modules: Sequence[Module], finder: Callable[[], Finder]) -> Iterator[tuple[str, bool]]:
    """Yield what the imports of modules may mean, which grow meanwhile; then, with True, what a setting names of these.

    Of a package with many modules, such as the models of a library, only those of which the name is a word of the code,
    as the default of a setting is.
    """
    begun = 0
    while begun < len(modules):
        new = begun
        for module in islice(modules, begun, None):
            begun += 1
            yield from ((name, False) for name in _imported(module))
        for name, all_run in dict.fromkeys(one for module in modules[new:] for one in _named(module, modules)):
            *packages, _ = accumulate(name.split("."), "{}.{}".format)
            listed = finder().within(packages[-1]) if UNKNOWN_PART in name and packages else (name,)
            found = [one for one in listed if may_be(name, one)]
            few = len(found) <= MODULES_OF_CHOICE
            yield from ((one, False) for one in packages)
            for one in found:
                named = few or any(one.rpartition(".")[2] in words_of(module) for module in modules)
                if named or all_run:
                    yield one, named


@all_once
def _imported(module: Module) -> Iterator[str]:
    """Yield dotted names that a module's imports may mean, packages before what is in them."""
    for entry in module.imports:
        yield from accumulate(entry.module.split(".") if entry.module else (), "{}.{}".format)
        if entry.module and entry.name and entry.name != "*":
            yield f"{entry.module}.{entry.name}"
    for target in _targets(module):
        yield from accumulate(target.split("."), "{}.{}".format)


def _named(module: Module, modules: Sequence[Module]) -> Iterator[tuple[str, bool]]:
    """Yield the names by which calls in a module import others, and whether that is all that they do."""
    for call in imports_by_name(module):
        for where, given in given_for(module, call.args[0], modules):
            name = absolute_name(module, call, template_of(where, given))
            yield name, registers(module, call)


def _targets(module: Module) -> Iterable[str]:
    if "hydra" not in module.text:
        return ()
    from ddpdoctor.source.script.settings_files import targets

    return targets(module)


def note_gap(script: Script, text: str) -> None:
    """Note, in a sentence, that the present answer may be incomplete."""
    script.__dict__["_gap"] = text


def take_gap(script: Script) -> str:
    """Return what was noted since the last call; empty when nothing was."""
    gap: str = script.__dict__.pop("_gap", "")
    return gap


# The words of the code of a script: what decides whether it uses something at all.
#
# A word is a name, an attribute, a keyword argument, a parameter, a part of an import, a function or class that is
# defined, or a string that is one word (``"nccl"``, ``"cuda:0"``). Comments, docstrings and what is printed or logged
# run nothing, and are no words.

LONGEST_WORD = 120
"""Characters of a string that counts as a word: longer ones are data."""
# Last names of Python's own functions and classes whose strings are for people to read.
_SAYING = regex(
    r"(print(_exc|_exception|_tb|_stack)?|debug|info|warn(ing)?|log|error|critical|exception|write|"
    r"\w*(Error|Exception|Warning))$"
)
_PART = regex(r"\w+")
# The field that holds the word of a node, by the class of the node.
_NAMING: Mapping[type[ast.AST], str] = {
    ast.Name: "id",
    ast.Attribute: "attr",
    **dict.fromkeys((ast.arg, ast.keyword), "arg"),
    **dict.fromkeys((ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef), "name"),
}


def uses_any(script: Script, words: Iterable[str]) -> bool:
    """Return whether one of the words is a word of the code of a script's modules."""
    return any(word in words_of(module) for word in words for module in script.modules)


def uses_part(script: Script, parts: Iterable[str]) -> bool:
    """Return whether one of the parts occurs in a word of the code; upper and lower case differ."""
    return any(_partly(module, part) for part in parts for module in script.modules)


def makes_sets(script: Script) -> bool:
    """Return whether a set is made in the code of a script's modules."""
    written = any(any(module.index.of(kind)) for module in script.modules for kind in (ast.Set, ast.SetComp))
    return written or uses_any(script, ("set", "frozenset", "Set"))


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


@once
def words_of(module: Module) -> frozenset[str]:
    """Return the words of a module's code; kept with it."""
    return frozenset(_words(module))


def code_of(node: ast.AST) -> str:
    """Return the words of a part of a module, one a line: its names and strings of one word, and no docstrings."""
    inside = descend(node)
    names = [getattr(inner, _NAMING[inner.__class__]) or "" for inner in inside if inner.__class__ in _NAMING]
    texts = [inner.value for inner in inside if isinstance(inner, ast.Constant) and isinstance(inner.value, str)]
    return "\n".join((*names, *(text for text in texts if len(text.split()) == 1)))


# An imported module is searched once, however many scripts import it.
@once_each
def _partly(module: Module, part: str) -> bool:
    written = part in module.text or any(part in target for target in _targets(module))
    return written and part in _code_text(module)


@once
def _code_text(module: Module) -> str:
    return "\n".join(words_of(module))


def _words(module: Module) -> Iterator[str]:
    index = module.index
    for kind, field in _NAMING.items():
        yield from filter(None, map(attrgetter(field), index.of(kind)))
    for entry in module.imports:
        yield from (*entry.module.split("."), entry.name, entry.bound_as)
    if index.places(ast.ExceptHandler):
        yield "except"
    for target in _targets(module):
        yield from target.split(".")
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


# Files of the project that say how its jobs are started: shell scripts, cluster manifests, and the README.

_JOB = regex(r"^kind:\s*['\"]?PyTorchJob\b", re.MULTILINE)


def exports(script: Script, variable: str) -> bool:
    """Return whether a file sets a variable of the environment: ``export MASTER_ADDR=localhost``."""
    setting = re.compile(rf"^\s*(export|ENV)\s+{variable}\b|^\s*(-\s+)?name:\s*['\"]?{variable}\b", re.MULTILINE)
    return any(setting.search(text) for _, text in texts_beside(script.root))


def asks_for_old_torch(script: Script) -> bool:
    """Return whether the project's requirements name a release of torch before 2.0."""
    asked = r"^\W*(py)?torch *(==?|<=?|~=) *1\."  # As pip's and conda's files write it.
    texts = (text for path, text in texts_beside(script.root) if path.suffix in (".txt", ".yml", ".yaml"))
    return any(re.search(asked, text, re.MULTILINE) for text in texts)


def is_started_by_old_launcher(script: Script) -> bool:
    """Return whether a file starts the script with torch.distributed.launch, which passes it the local rank.

    Not under ``--use_env``.
    """
    commands = _commands(script, r"torch\.distributed\.launch\b")
    return any("--use_env" not in command and "--use-env" not in command for command in commands)


@once
def is_started_on_several(script: Script) -> bool:
    """Return whether a file starts the script by torch's launcher with several processes, or a number from outside."""
    commands = _commands(script, r"(torchrun|torch\.distributed\.(launch|run))\b")
    return any(re.search(r"--(nproc[_-]per[_-]node|nnodes)[=\s]+(?!1\b)", command) for command in commands)


@once
def is_started_per_gpu(script: Script) -> bool:
    """Return whether a file starts the script by torch's launcher with several processes on one machine."""
    commands = _commands(script, r"(torchrun|torch\.distributed\.(launch|run))\b")
    return any(re.search(r"--nproc[_-]per[_-]node[=\s]+(?!1\b)(\d|gpu|auto)", command) for command in commands)


def _commands(script: Script, launcher: str) -> Iterator[str]:
    """Yield the commands of the project's files by which a launcher starts the script, up to its name."""
    entry = script.entry.path
    command = rf"{launcher}(?:\\\n|[^\n|;&])*?[\s/\"']{re.escape(entry.name)}(?![\w.])"
    for path, text in commands_beside(script.root):
        for match in re.finditer(command, text):
            if _means(match[0].split()[-1].strip("\"'"), path, entry):
                yield match[0]


def _means(written: str, file: Path, entry: Path) -> bool:
    """Return whether a path in a command may be the entry, from a directory above or below that of the command's file.

    ``$HOME/project/train.py`` is taken for what follows the variable.
    """
    parts = re.sub(r"^.*\$[^/]*/|^(\.{0,2}/)+", "", written).split("/")
    if list(entry.parts[-len(parts) :]) != parts:
        return False
    base, beside = entry.parents[len(parts) - 1], file.parent
    return base == beside or base in beside.parents or beside in base.parents


def gives_each_rank_a_machine(script: Script) -> bool:
    """Return whether a manifest of a cluster starts the job as pods of one GPU each."""
    return any(
        _JOB.search(text) is not None and set(re.findall(r"nvidia\.com/gpu:\s*['\"]?(\d+)", text)) == {"1"}
        for _, text in texts_beside(script.root)
    )
