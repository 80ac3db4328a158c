"""Short logs as people post them, each with the right answer, and what an autopsy says of them.

Each block of ``posted/*.txt`` begins with a line of its own: ``=== name | codes | ranks | words | words that would be
wrong``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from ddpdoctor.autopsy.dead_job import AutopsyRequest, autopsy
from ddpdoctor.report.formats.json import as_object

FOLDER = Path(__file__).parent / "posted"
OF_FILES = (
    "34-warnings-only |  |  |  | rendezvous failed; could not be reached; cannot reach",
    "61-silent-rank | DDP305,DDP306,DDP308 | 3 | rank 3 | rank 0 did not arrive",
    "70-flight-recorder | DDP305,DDP306,DDP308 | 2 | rank 2 | rank 0 did not; rank 1 did not",
    "73-elastic-two-causes | DDP706 | 2 | rank 2; keyerror |",
    "74-compressed | DDP706 | 6 | rank 6; valueerror; fit.py:118 |",
)
"""The same lines of what is no text: packed, of several files, or with bytes that are no letters."""


class Excerpt(msgspec.Struct, frozen=True, kw_only=True):
    """One log and what is right of it."""

    name: str
    source: Path | str
    """Where it is, or its text."""
    code: tuple[str, ...]
    """Any of them is right; empty where nothing died."""
    ranks: tuple[int, ...] = ()
    must_say: tuple[str, ...] = ()
    must_not_say: tuple[str, ...] = ()


def excerpts() -> Iterator[Excerpt]:
    """Yield all excerpts."""
    for head in OF_FILES:
        (source,) = FOLDER.glob(f"{head.partition('-')[0]}*")
        yield _excerpt(head, source)
    for path in sorted(FOLDER.glob("*.txt")):
        yield from blocks_of(path.read_text(encoding="utf-8"))


def blocks_of(text: str) -> Iterator[Excerpt]:
    """Yield the excerpts of a text of several."""
    for block in re.split(r"^=== ", text, flags=re.MULTILINE)[1:]:
        head, _, content = block.partition("\n")
        yield _excerpt(head, content)


def _excerpt(head: str, source: Path | str) -> Excerpt:
    name, codes, ranks, words, wrong = (part.strip() for part in head.split("|"))
    return Excerpt(
        name=name,
        source=source,
        code=tuple(filter(None, codes.split(","))),
        ranks=tuple(int(rank) for rank in ranks.split(",") if rank),
        must_say=tuple(word.strip() for word in words.split(";") if word.strip()),
        must_not_say=tuple(word.strip() for word in wrong.split(";") if word.strip()),
    )


def found_in(excerpt: Excerpt, directory: Path) -> list[dict[str, Any]]:
    """Return the findings of an autopsy of an excerpt; a text is written into the directory first."""
    path = excerpt.source
    if isinstance(path, str):
        path = directory / f"{excerpt.name}.log"
        path.write_text(str(excerpt.source), encoding="utf-8")
    found: list[dict[str, Any]] = as_object(autopsy(AutopsyRequest(paths=(str(path),))))["findings"]
    return found


def faults_of(excerpt: Excerpt, directory: Path) -> list[str]:
    """Return what is wrong with an autopsy of an excerpt, in clauses."""
    found = found_in(excerpt, directory)
    faults = []
    errors = [one for one in found if one["severity"] == "error"]
    if not excerpt.code:
        faults += [f"claims {one['code']}: {one['title']}" for one in errors[:1]]
    elif not found:
        faults.append("says nothing")
    else:
        first = found[0]
        text = json.dumps(first, ensure_ascii=False).replace("\\\\", "\\").replace('\\"', '"').lower()
        text += "".join(f" rank {rank}" for rank in first["ranks"])
        if first["code"] not in excerpt.code:
            faults.append(f"{first['code']} instead of {'/'.join(excerpt.code)}: {first['title']}")
        if excerpt.ranks and tuple(first["ranks"]) != excerpt.ranks:
            faults.append(f"ranks {first['ranks']}")
        faults += [f"lacks {word!r}" for word in excerpt.must_say if word not in text]
    for one in found:
        said = f"{one['title']} {one['remedy']}".lower()
        faults += [f"says {word!r}: {one['title']}" for word in excerpt.must_not_say if word in said]
    return faults
