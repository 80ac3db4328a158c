"""Which checks there are and how each is loaded; imports a check only when someone is about to run it."""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import msgspec

from ddpdoctor.check import Check, Gone, LoadedCheck, Subject
from ddpdoctor.errors import ConfigurationError, UsageError
from ddpdoctor.finding import FoundInRun, Trouble

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

CHECKS_PACKAGE = "ddpdoctor.checks"
"""The only place where the core names the package of the built-in checks."""


class CatalogueEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A check that exists, known before its module is imported."""

    code: str
    name: str
    module: str
    """Dotted name."""
    in_source: bool
    """It has something to say about the source alone."""
    after_launch: bool = False
    """It looks at what only a job itself shows, and at no source and no rehearsal."""
    stands_for: Trouble | None = None
    """As in ``Check.stands_for``."""
    triggers: tuple[str, ...] = ()
    """A script without all of these words cannot have what the check looks for; empty when nothing is known."""
    subjects: tuple[Subject, ...] = ()
    """As in ``Check.subjects``."""
    loaded: LoadedCheck | None = None
    """Third-party checks are loaded while they are looked for: their code is not known before."""


class Catalogue(msgspec.Struct, frozen=True, kw_only=True):
    """Every check that exists, by code, and what was wrong with those that had to be left out."""

    entries: tuple[CatalogueEntry, ...]
    notes: tuple[str, ...] = ()
    gone: Mapping[str, Gone] = {}
    """Checks that there were, by code; settings may still name them."""

    def went(self, word: str) -> tuple[str, Gone] | None:
        """Return the check that there was whose code or name is ``word``, with its code."""
        return next((one for one in self.gone.items() if word.upper() == one[0] or word.lower() == one[1].name), None)


def gone_notes(catalogue: Catalogue, words: Iterable[str]) -> Iterator[str]:
    """Yield what became of the checks that are named and that there no longer are."""
    for code, went in filter(None, map(catalogue.went, words)):
        if went.into:
            yield f"{code} ({went.name}) is part of {went.into} since {went.since}, which is taken instead"
        else:
            yield f"{code} ({went.name}) is no longer there since {went.since}"


def read_catalogue() -> Catalogue:
    """List the built-in checks and those that other packages offer.

    Raises ConfigurationError when there are no built-in checks: an empty catalogue would pass everything.
    """
    built_in = _built_in_entries()
    known = {entry.code: entry for entry in built_in}
    names = {entry.name for entry in built_in}
    notes: list[str] = []
    for offer in third_party_modules():
        origin = f"the check {offer.name!r} of {offer.dist.name if offer.dist else 'an unknown package'}"
        try:
            loaded = read_check(offer.load())
        except (Exception, SystemExit) as error:
            notes.append(f"{origin} was skipped: {type(error).__name__}: {error}")
            continue
        code, name = loaded.check.code, loaded.check.name
        if code in known or name in names:
            notes.append(f"{origin} was skipped: its code {code} or its name {name} is taken")
            continue
        names.add(name)
        known[code] = CatalogueEntry(
            code=code,
            name=name,
            module=offer.value,
            in_source=loaded.in_source is not None,
            after_launch=looks_after_launch(loaded.check),
            stands_for=loaded.check.stands_for,
            triggers=loaded.check.triggers,
            subjects=loaded.check.subjects,
            loaded=loaded,
        )
    gone = importlib.import_module(CHECKS_PACKAGE).GONE
    return Catalogue(entries=tuple(known[code] for code in sorted(known)), notes=tuple(notes), gone=gone)


_LOADED: dict[tuple[str, str], tuple[ModuleType, LoadedCheck]] = {}
"""Checks that were loaded, with the modules that they were loaded from."""


def load(entry: CatalogueEntry) -> LoadedCheck:
    """Import the module of a check.

    Raises ConfigurationError when a built-in check cannot be imported or is not what the index says.
    """
    if entry.loaded is not None:
        return entry.loaded
    known = _LOADED.get((entry.module, entry.code))
    if known is not None and known[0] is sys.modules.get(entry.module):
        return known[1]
    try:
        module = importlib.import_module(entry.module)
        loaded = read_check(module)
    except Exception as error:
        raise ConfigurationError(
            f"the built-in check {entry.code} cannot be loaded: {type(error).__name__}: {error}", _REINSTALL
        ) from error
    if (loaded.check.code, loaded.check.name) != (entry.code, entry.name):
        raise ConfigurationError(
            f"the index lists {entry.code} {entry.name}, but {entry.module} holds"
            f" {loaded.check.code} {loaded.check.name}",
            _REINSTALL,
        )
    _LOADED[entry.module, entry.code] = (module, loaded)
    return loaded


def described(entry: CatalogueEntry) -> LoadedCheck:
    """Return what a check says of itself, from the head of its file; its functions import it when they are called.

    Raises ConfigurationError as ``load`` does.
    """
    finder = None if entry.loaded is not None else importlib.util.find_spec(entry.module)
    source = getattr(finder and finder.loader, "get_source", lambda name: None)(entry.module) or ""
    # To import a check is to import the reader of sources: 76 modules of ours, to print one docstring.
    begin = source.find("\nCHECK = Check(")
    head = source[: source.find("\n)\n", begin) + 3]
    if begin < 0 or len(head) < begin:
        return load(entry)
    documentation = ast.get_docstring(ast.parse(head), clean=False) or ""
    names = dict(vars(sys.modules[Check.__module__]))
    exec(compile(head[begin:], entry.module, "exec"), names)
    halves: dict[str, Any] = {
        name: partial(_late, entry, name)
        for name in ("in_source", "in_run", "in_log", "in_restart")
        if f"\ndef {name}(" in source or f"\n{name} = " in source
    }
    return LoadedCheck(check=names["CHECK"], documentation=documentation, **halves)


def _late(entry: CatalogueEntry, name: str, evidence: object) -> Iterator[FoundInRun]:
    yield from getattr(load(entry), name)(evidence)


def choose(catalogue: Catalogue, select: Sequence[str], ignore: Sequence[str]) -> tuple[CatalogueEntry, ...]:
    """Keep the entries that ``select`` names (all when empty) and ``ignore`` does not.

    Each word is a code, a prefix of codes, or a name. Raises UsageError for a word that means nothing, with the nearest
    one that does, and when nothing is left.
    """
    selected = codes_meant(catalogue, select, "--select") if select else {entry.code for entry in catalogue.entries}
    ignored = codes_meant(catalogue, ignore, "--ignore")
    chosen = tuple(entry for entry in catalogue.entries if entry.code in selected - ignored)
    if not chosen:
        raise UsageError("--select and --ignore leave no check to run", "Run `ddpdoctor explain` for a list of checks.")
    return chosen


def codes_meant(catalogue: Catalogue, words: Sequence[str], option: str, file: str = "") -> set[str]:
    """Return the codes that are meant by words, each a code, a prefix of codes, or a name.

    Raises UsageError for a word that means nothing, or ConfigurationError when the words stand in a ``file``.
    """
    codes: set[str] = set()
    for word in words:
        upper, lower = word.upper(), word.lower()
        found = {
            code
            for code, name in (*((entry.code, entry.name) for entry in catalogue.entries), *_BESIDE_THE_CATALOGUE)
            if name == lower or (upper and code.startswith(upper))
        }
        went = catalogue.went(word)
        if went is not None:
            found |= {went[1].into} - {""}
        elif not found:
            message = f"{option}: there is no check called {word!r}"
            if file:
                raise ConfigurationError(f"{file}: {message}", suggestion(catalogue, word))
            raise UsageError(message, suggestion(catalogue, word))
        codes |= found
    return codes


def find(catalogue: Catalogue, word: str) -> CatalogueEntry:
    """Find the one check whose code or name is, or was, ``word``; raises UsageError with the nearest one for none."""
    went = catalogue.went(word)
    if went is not None and went[1].into:
        word = went[1].into
    elif went is not None:
        raise UsageError(f"there is no check called {word!r} any more", next(gone_notes(catalogue, (word,))))
    for code, name in _BESIDE_THE_CATALOGUE:
        if word.upper() == code or word.lower() == name:
            return _beside_the_catalogue(code, name)
    for entry in catalogue.entries:
        if word.upper() == entry.code or word.lower() == entry.name:
            return entry
    raise UsageError(f"there is no check called {word!r}", suggestion(catalogue, word))


def standing_for(catalogue: Catalogue, trouble: Trouble | None) -> CatalogueEntry:
    """Return the check that speaks for a trouble: a built-in one stands for each that a divergence is."""
    return next(entry for entry in catalogue.entries if entry.stands_for == trouble)


def suggestion(catalogue: Catalogue, word: str) -> str:
    """Say which check the user may have meant."""
    from difflib import get_close_matches

    codes = {entry.code: entry for entry in catalogue.entries}
    names = {entry.name: entry for entry in catalogue.entries}
    # A code that differs in two places is another code, not a slip of the finger.
    similar = [
        code
        for code in get_close_matches(word.upper(), codes, n=len(codes))
        if len(code) != len(word) or sum(a != b for a, b in zip(code, word.upper(), strict=True)) == 1
    ]
    close = get_close_matches(word.lower(), names, n=1, cutoff=0.5) or similar
    if not close:
        return "Run `ddpdoctor explain` for a list of checks."
    entry = names.get(close[0]) or codes[close[0]]
    return f"Did you mean {entry.code} ({entry.name})? Run `ddpdoctor explain` for a list of checks."


_BESIDE = {
    ("DDP001", "unused-suppression"): "ddpdoctor.catalogue.unused_suppression",
    ("DDP901", "budget-growth"): "ddpdoctor.gate.budget_growth",
    ("DDP902", "lost-reach"): "ddpdoctor.gate.reach",
    ("DDP903", "step-time-growth"): "ddpdoctor.gate.step_time_growth",
}
_BESIDE_THE_CATALOGUE = tuple(_BESIDE)
"""What is selected, ignored and explained like a check, but looks at what the checks said, or at two runs."""
_REINSTALL = "The installation is broken: reinstall ddpdoctor."


def _beside_the_catalogue(code: str, name: str) -> CatalogueEntry:
    module = importlib.import_module(_BESIDE[code, name])
    return CatalogueEntry(
        code=code, name=name, module=module.__name__, in_source=code == "DDP001", loaded=module.LOADED
    )


def _built_in_entries() -> tuple[CatalogueEntry, ...]:
    try:
        package = importlib.import_module(CHECKS_PACKAGE)
    except ImportError as error:
        raise ConfigurationError(f"the built-in checks cannot be imported: {error}", _REINSTALL) from error
    if not package.INDEX:
        raise ConfigurationError("no built-in check was found", _REINSTALL)
    return tuple(
        CatalogueEntry(
            code=code,
            name=row.module.rpartition(".")[2].replace("_", "-"),
            module=f"{CHECKS_PACKAGE}.{row.module}",
            in_source=row.triggers is not None,
            after_launch=row.after_launch,
            stands_for=row.stands_for,
            triggers=row.triggers or (),
            subjects=row.subjects,
        )
        for code, row in package.INDEX.items()
    )


def looks_after_launch(check: Check) -> bool:
    """Return whether a check looks at what only a job itself shows, and at no source and no rehearsal."""
    return check.severity.keys().isdisjoint(("source", "rehearsal"))


def read_check(module: ModuleType) -> LoadedCheck:
    """Return the check that a module holds; raises TypeError with what it lacks when it holds none."""
    check = getattr(module, "CHECK", None)
    if not isinstance(check, Check):
        raise TypeError(f"{module.__name__} has no CHECK")
    in_source = getattr(module, "in_source", None)
    in_run = getattr(module, "in_run", None)
    in_log = getattr(module, "in_log", None)
    if in_log is None and "log" in check.severity:
        in_log = check.reported_by("diagnosis.logs.findings", "from_log")
    in_restart = getattr(module, "in_restart", None)
    if not any(map(callable, (in_source, in_run, in_log, in_restart))):
        raise TypeError(f"{module.__name__} has neither in_source nor in_run nor in_log")
    documentation = _documentation(module)
    if not documentation.strip():
        raise TypeError(f"{module.__name__} has no documentation")
    return LoadedCheck(
        check=check,
        documentation=documentation,
        in_source=in_source,
        in_run=in_run,
        in_log=in_log,
        in_restart=in_restart,
    )


def _documentation(module: ModuleType) -> str:
    """Return the docstring of a module, also where PYTHONOPTIMIZE=2 has taken it away."""
    if module.__doc__ or sys.flags.optimize < 2:
        return module.__doc__ or ""
    import ast
    import inspect

    return ast.get_docstring(ast.parse(inspect.getsource(module)), clean=False) or ""


# Looks for checks that other packages offer through the entry-point group ``ddpdoctor.checks``.
#
# Asking ``importlib.metadata`` costs about 30 ms with 60 packages installed, because it parses every one of them.
# Nearly no one has third-party checks, so the files are searched for the name of the group first, which costs about 1
# ms.

GROUP = "ddpdoctor.checks"


def third_party_modules() -> tuple[EntryPoint, ...]:
    """List the modules on offer, by name; imports none of them."""
    if not any(map(may_offer, sys.path)):
        return ()
    from importlib.metadata import entry_points

    return tuple(sorted(entry_points(group=GROUP), key=lambda offer: (offer.name, offer.value)))


def may_offer(path_entry: str) -> bool:
    """Return whether a package below this entry of ``sys.path`` names the group; unsure (a zip file) counts as yes."""
    directory = path_entry or os.curdir
    if os.path.isfile(directory):
        return True
    return any(_names_group(path) for path in _entry_point_files(directory))


def _entry_point_files(directory: str) -> Iterable[str]:
    try:
        with os.scandir(directory) as entries:
            names = [entry.name for entry in entries if entry.name.endswith((".dist-info", ".egg-info"))]
    except OSError:
        return ()
    return [os.path.join(directory, name, "entry_points.txt") for name in names]


def _names_group(path: str) -> bool:
    try:
        with open(path, "rb") as stream:
            return GROUP.encode() in stream.read()
    except OSError:
        return False
