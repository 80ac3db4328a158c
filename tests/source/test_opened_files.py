"""Files that are opened by a method of their path, or by another library's function, are opened like any other."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.source.marked import check_marks

START = """
import bz2
import codecs
import gzip
import io
import json
import zipfile
from pathlib import Path

dist.init_process_group("gloo")
rank = dist.get_rank()
out = Path("results")
model = DDP(nn.Linear(4, 4))
"""
TRAIN = """
for x in torch.randn(64, 4):
    model(x).sum().backward()
"""
WRITTEN = {
    "a path in a variable": 'path = out / "all.txt"\nwith path.open("w") as file:  # DDP608\n    file.write("all")\n',
    "a path in place": 'with (out / "config.json").open(mode="wt") as file:  # DDP608\n    json.dump({}, file)\n',
    "a path that is joined": 'file = out.joinpath("config.json").open("x")  # DDP608\nfile.write("all")\n',
    "a path in an attribute": """
class Kept:
    def __init__(self, path):
        self.path = Path(path)

    def save(self):
        with self.path.open("w") as file:  # DDP608
            file.write("all")

Kept("config.txt").save()
""",
    "a path that a function is given": """
def save(path):
    with path.open("wb") as file:  # DDP608
        file.write(b"all")

save(out / "config.bin")
""",
    "what adds to it": 'with (out / "rows.txt").open("a") as file:  # DDP601\n    file.write("one")\n',
    "io": 'with io.open("config.txt", "w") as file:  # DDP608\n    file.write("all")\n',
    "codecs": 'with codecs.open("config.txt", "w", "utf-8") as file:  # DDP608\n    file.write("all")\n',
    "gzip": 'with gzip.open("config.gz", "wt") as file:  # DDP608\n    file.write("all")\n',
    "bz2": 'with bz2.open("config.bz2", mode="wb") as file:  # DDP608\n    file.write(b"all")\n',
}
IN_ORDER = {
    "a path for each rank": 'with (out / f"config-{rank}.json").open("w") as file:\n    json.dump({}, file)\n',
    "the first rank": 'if rank == 0:\n    with (out / "config.json").open("w") as file:\n        json.dump({}, file)\n',
    "what is read": 'with (out / "config.json").open("r") as file:\n    json.load(file)\n',
    "what is read by default": 'with (out / "config.json").open() as file:\n    json.load(file)\n',
    "a member of an archive": 'with zipfile.ZipFile("data.zip") as file:\n    file.open("w.txt").read()\n',
    "what is unpacked": 'with gzip.open("data.gz") as file:\n    file.read()\n',
}


@pytest.mark.parametrize("way", WRITTEN)
def test_a_file_that_all_ranks_write_is_found_however_it_is_opened(way: str, tmp_path: Path) -> None:
    check_marks(tmp_path, START + WRITTEN[way] + TRAIN, "DDP601", "DDP608")


@pytest.mark.parametrize("way", IN_ORDER)
def test_a_file_of_one_rank_and_one_that_is_read_are_in_order(way: str, tmp_path: Path) -> None:
    check_marks(tmp_path, START + IN_ORDER[way] + TRAIN, "DDP601", "DDP608")
