"""Writes ``checks/index.json`` from what the checks say of themselves; run it after a check was added or renamed::

python -m ddpdoctor.catalogue.write_index
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import msgspec

from ddpdoctor.catalogue.registry import CHECKS_PACKAGE, looks_after_launch, read_check

_NO_CHECKS = ("__init__", "_run", "_source")
"""How the stems of a family's other files end."""


def main() -> None:
    """Write the index beside the checks."""
    directory = checks_directory()
    (directory / "index.json").write_text(index_text(directory), encoding="utf-8")


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
    """Import every check below ``directory`` and return the text of their index, a line per check."""
    row = importlib.import_module(CHECKS_PACKAGE).Row
    lines = []
    for path in check_files(directory):
        module = f"{path.parent.name}.{path.stem}"
        loaded = read_check(importlib.import_module(f"{CHECKS_PACKAGE}.{module}"))
        entry = row(
            module=module,
            triggers=None if loaded.in_source is None else loaded.check.triggers,
            subjects=loaded.check.subjects,
            stands_for=loaded.check.stands_for,
            after_launch=looks_after_launch(loaded.check),
        )
        lines.append(f'"{loaded.check.code}": {msgspec.json.encode(entry).decode()}')
    return "{\n" + ",\n".join(sorted(lines)) + "\n}\n"


if __name__ == "__main__":
    main()
