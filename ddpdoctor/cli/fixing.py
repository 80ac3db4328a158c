"""``ddpdoctor check --fix`` and ``--diff``: shows the fixes that the checks offer, or makes those that are safe."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ddpdoctor.examine.static_scan import STDIN, Survey, SurveyRequest, survey
from ddpdoctor.finding import shown_path
from ddpdoctor.fix import Fix
from ddpdoctor.report import streams


def fixed(request: SurveyRequest) -> Survey:
    """Make the safe fixes and examine again what is left; raises UsageError when a file cannot be written."""
    from ddpdoctor.fix import rewrite, write

    before = survey(request)
    files, left = rewrite(fix for fix in before.fixes if fix.safe)
    for file in files:
        write(file)
    made = sum(len(file.fixes) for file in files)
    if made:
        streams.say(f"made {_count(made, 'fix', 'fixes')} in {_count(len(files), 'file', 'files')}")
    _say_not_made([*left, *(fix for fix in before.fixes if not fix.safe)], before)
    return survey(msgspec.structs.replace(request, fixes=False)) if made else before


def shown(request: SurveyRequest) -> tuple[Survey, str]:
    """Return the examination, and a unified diff of what ``--fix`` would do."""
    from ddpdoctor.fix import difference, rewrite

    found = survey(request)
    root = found.examination.root
    held = {f"{root}/{request.stdin_name}": request.stdin or b""} if STDIN in request.paths else None
    files, left = rewrite((fix for fix in found.fixes if fix.safe), held)
    _say_not_made([*left, *(fix for fix in found.fixes if not fix.safe)], found, held)
    return found, "".join(difference(file, shown_path(file.file, root)) for file in files)


def _say_not_made(fixes: Sequence[Fix], found: Survey, held: dict[str, bytes] | None = None) -> None:
    """Say on stderr what was not made and why, with what it would change."""
    from ddpdoctor.fix import difference, rewrite

    for fix in fixes:
        where = f"{shown_path(fix.location.file, found.examination.root)}:{fix.location.line}"
        why = "it conflicts with the other fixes" if fix.safe else "it may change what else the script does"
        files, _ = rewrite([fix], held)
        changes = "".join(difference(file, shown_path(file.file, found.examination.root)) for file in files)
        streams.say(f"{where}: {fix.code}: not made, since {why}: {fix.description}\n" + changes.replace("\r\n", "\n"))


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
