"""Writes ``checks/index.py`` from what the checks say of themselves; run it after a check was added or renamed::

python -m ddpdoctor.catalogue.write_index
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path

from ddpdoctor.catalogue.registry import CHECKS_PACKAGE, looks_after_launch, read_check
from ddpdoctor.check import LoadedCheck

_HEAD = '''"""What the catalogue knows of the checks before it imports them.

Written by ``python -m ddpdoctor.catalogue.write_index``; do not edit.
"""

from __future__ import annotations

from collections.abc import Mapping

from ddpdoctor.check import Subject
from ddpdoctor.finding import Trouble
'''
_NO_CHECKS = ("__init__", "_run", "_source")
"""How the stems of a family's other files end."""
_LINE_LENGTH = 120


def main() -> None:
    """Write the index beside the checks."""
    directory = checks_directory()
    (directory / "index.py").write_text(index_text(directory), encoding="utf-8")


def checks_directory() -> Path:
    """Return the directory of the built-in checks."""
    specification = importlib.util.find_spec(CHECKS_PACKAGE)
    places = specification.submodule_search_locations if specification is not None else None
    if not places:
        raise FileNotFoundError(f"there is no package {CHECKS_PACKAGE}")
    return Path(places[0])


def check_files(directory: Path) -> list[Path]:
    """Return the file of every check below ``directory``, without the halves that several share."""
    return [path for path in sorted(directory.glob("*/*.py")) if not path.stem.endswith(_NO_CHECKS)]


def index_text(directory: Path) -> str:
    """Import every check below ``directory`` and return the text of their index."""
    found = sorted((loaded.check.code, module, loaded) for module, loaded in _checks(directory))
    read_in_source = [(code, loaded.check.triggers) for code, _, loaded in found if loaded.in_source is not None]
    return "\n".join(
        (
            _HEAD,
            "BUILT_IN: Mapping[str, str] = {",
            *(f'    "{code}": "{module}",' for code, module, _ in found),
            "}",
            '"""Dotted module of every check by its code."""',
            "",
            "AFTER_LAUNCH: frozenset[str] = frozenset(",
            "    {",
            *(f'        "{code}",' for code, _, loaded in found if looks_after_launch(loaded.check)),
            "    }",
            ")",
            '"""Checks of what only a job itself shows, live or dead: neither a source nor a rehearsal has it."""',
            "",
            "STANDS_FOR: Mapping[str, Trouble] = {",
            *(f'    "{code}": "{loaded.check.stands_for}",' for code, _, loaded in found if loaded.check.stands_for),
            "}",
            '"""What the checks say in ``stands_for``."""',
            "",
            "READ_IN_SOURCE: Mapping[str, tuple[str, ...]] = {",
            *(line for code, words in read_in_source for line in _entry(code, words)),
            "}",
            '"""Trigger words of the checks that have ``in_source``."""',
            "",
            "SUBJECTS: Mapping[str, tuple[Subject, ...]] = {",
            *(
                line
                for code, _, loaded in found
                if loaded.check.subjects
                for line in _entry(code, loaded.check.subjects)
            ),
            "}",
            '"""What the checks say in ``subjects``."""',
            "",
        )
    )


def _checks(directory: Path) -> Iterator[tuple[str, LoadedCheck]]:
    """Yield the dotted name of every check with what its module holds."""
    for path in check_files(directory):
        module = ".".join((CHECKS_PACKAGE, path.parent.name, path.stem))
        yield module, read_check(importlib.import_module(module))


def _entry(code: str, words: Iterable[str]) -> Iterator[str]:
    """Yield the lines of one entry, as the formatter would break them."""
    quoted = [f'"{word}"' for word in words]
    line = f'    "{code}": ({", ".join(quoted)}{"," if len(quoted) == 1 else ""}),'
    if len(line) <= _LINE_LENGTH:
        yield line
    else:
        yield from (f'    "{code}": (', *(f"        {word}," for word in quoted), "    ),")


if __name__ == "__main__":
    main()
