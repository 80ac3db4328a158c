"""The same few ways at every place that a script writes to."""

from __future__ import annotations

import msgspec

from tests.no_harm.way import Way
from tests.no_harm.world import PLACES

_WAYS = (
    Way(name="overwrite", language="Python", body="open('old.txt', 'w').write('n')"),
    Way(name="delete a directory", language="Python", body="shutil.rmtree('folder')"),
    Way(name="leave new files", language="Python", body="os.makedirs('made'); open('made/new', 'w').write('n')"),
    Way(name="rename a directory", language="Python", body="os.rename('folder', 'moved')"),
    Way(name="rm -rf", language="shell", body="run(['sh', '-c', 'rm -rf folder'])", by="program", says="rm -rf folder"),
    Way(
        name="append and leave",
        language="shell",
        body="run(['sh', '-c', 'echo n >> train.log; echo n > left'])",
        by="program",
        says="echo n >> train.log",
    ),
)

PLACE_ROWS = tuple(msgspec.structs.replace(way, place=place) for place in PLACES if place != "tree" for way in _WAYS)
