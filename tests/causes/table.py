"""The broken scripts of the other tables, of which the whole check must not say less than the source alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.causes.judge import EXPLAINED, worse_than_static
from tests.check_command import check
from tests.checks.case_blocks import cases_of
from tests.faults.cases import FAULTS
from tests.grid.cases import grid
from tests.index_of_checks import BUILT_IN

CHECKS = Path(__file__).parents[2] / "checks"


class Script(NamedTuple):
    """A script of another table; the entry is ``train.py``."""

    name: str
    files: dict[str, str]


def scripts() -> Iterator[Script]:
    """Every fault, every cause in a check's file of cases, and of the grid what stands in a file or beside it.

    How the rank is asked, which the grid has nine forms of, makes no difference to what the run adds.
    """
    for name, fault in FAULTS.items():
        yield Script(f"fault: {name}", {"train.py": fault.script})
    for code in sorted(EXPLAINED):
        module = BUILT_IN[code].removeprefix("ddpdoctor.checks.").replace(".", "/")
        for case in cases_of(CHECKS / f"{module}.md"):
            if case.marks:
                yield Script(f"{module.rpartition('/')[2]}:{case.line}", case.files)
    for one in grid():
        if one.broken and one.test == "call" and one.place in ("direct", "imported module"):
            yield Script(f"grid: {one.name}", dict(one.files))


def complaints(script: Script, directory: Path) -> list[str]:
    """Check a script both ways in an empty directory; what the whole check does not tell, in sentences."""
    project = directory / "job"
    project.mkdir()
    (project / ".git").mkdir()
    for name, text in script.files.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text, encoding="utf-8")
    static = check("--static", "train.py", cwd=project)[1]
    if not any(finding["code"] in EXPLAINED for finding in static["findings"]):
        return []
    return worse_than_static(static, check("train.py", cwd=project, XDG_STATE_HOME=str(directory / "state"))[1])
