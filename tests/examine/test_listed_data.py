"""Scripts that list their own pictures, which are not on the disk, continue with pretended names; others are left."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.check_command import check

TRAINING = """
import glob
import os
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
from PIL import Image
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Pictures(Dataset):
    def __init__(self, root):
        FIND

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        picture = Image.open(self.files[index]).convert("RGB").resize((8, 8))
        return torch.from_numpy(numpy.array(picture)).flatten().float()


def main():
    dist.init_process_group("gloo")
    data = Pictures("/data/street")
    model = DistributedDataParallel(torch.nn.Linear(192, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    sampler = DistributedSampler(data)
    for batch in DataLoader(data, batch_size=8, sampler=sampler, num_workers=1):
        model(batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""
LISTS = "self.files = [os.path.join(root, name) for name in sorted(os.listdir(root)) if name.endswith('.png')]"
MATCHES = "self.files = sorted(glob.glob(os.path.join(root, 'train', '*', '*.jpg')))"
PATHS = "self.files = sorted(Path(root).glob('*.jpeg')) if Path(root) else None"
READS_A_LIST = """with open(os.path.join(root, "train.txt")) as lines:
            self.files = [os.path.join(root, "images", line.strip() + ".jpg") for line in lines]
        for file in self.files:
            assert os.path.isfile(file), file"""
READS_LABELS = """with open(os.path.join(root, "train.txt")) as lines:
            self.files = [line.split()[1] for line in lines]"""


@pytest.mark.parametrize(
    ("find", "note"),
    [
        (LISTS, "pretended: the files of /data/street (64 .png files)"),
        (MATCHES, "pretended: the files that /data/street/train/*/*.jpg matches (64)"),
        (PATHS, "pretended: the files that /data/street/*.jpeg matches (64)"),
        (READS_A_LIST, "pretended: /data/street/train.txt (64 names)"),
    ],
    ids=["listdir", "glob", "pathlib", "list"],
)
def test_a_script_that_finds_its_pictures_itself_is_given_names(tmp_path: Path, find: str, note: str) -> None:
    (tmp_path / "train.py").write_text(TRAINING.replace("FIND", find))
    code, report = check("train.py", cwd=tmp_path)
    rehearsal = report["rehearsal"]
    assert (code, rehearsal["status"]) == (0, "completed") and rehearsal["steps"] >= 2, rehearsal
    assert note in rehearsal["notes"]
    assert any("rehearsed again with pretended names in what the script lists" in one for one in rehearsal["notes"])


def test_a_script_that_reads_more_than_names_ends_for_lack_of_its_data(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING.replace("FIND", READS_LABELS))
    code, report = check("train.py", cwd=tmp_path)
    rehearsal = report["rehearsal"]
    assert (code, rehearsal["status"], rehearsal["steps"]) == (3, "failed", 0), rehearsal
    assert "No such file or directory: '/data/street/train.txt'" in rehearsal["reason"]
    assert not [note for note in rehearsal["notes"] if note.startswith("pretended")]


def test_nothing_is_listed_where_nothing_may_be_pretended(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING.replace("FIND", LISTS))
    code, report = check("--no-pretend", "train.py", cwd=tmp_path)
    assert (code, report["rehearsal"]["status"]) == (3, "failed")
    assert "/data/street" in report["rehearsal"]["reason"]


NUMBERS = TRAINING.replace("len(self.files)", "len(self.files) // 192").replace(
    """picture = Image.open(self.files[index]).convert("RGB").resize((8, 8))
        return torch.from_numpy(numpy.array(picture)).flatten().float()""",
    "return torch.from_numpy(self.files[192 * index : 192 * index + 192].astype(numpy.float32)) / 64",
)
LOOKS_FIRST = """for part in ("train", "val"):
            file = f"{root}/{part}.bin"
            if not os.path.exists(file):
                raise FileNotFoundError(f"tokens not found at {file}. Please run prepare.py")
            assert not os.path.exists(f"{root}/{part}.idx")
            self.files = numpy.memmap(file, dtype=numpy.uint16, mode="r")"""
ASSERTS = """file = Path(root) / "tokens_00.npy"
        assert file.is_file(), f"file {file} does not exist"
        self.files = numpy.load(file)"""
LOADS = """self.files = numpy.load(os.path.join(root, "x.npy"), mmap_mode="r")"""


@pytest.mark.parametrize("find", [LOOKS_FIRST, ASSERTS, LOADS], ids=["raises", "asserts", "loads"])
def test_a_file_of_numbers_that_is_looked_for_is_there_in_another_try(tmp_path: Path, find: str) -> None:
    (tmp_path / "train.py").write_text(NUMBERS.replace("FIND", find))
    code, report = check("--time-limit", "240", "train.py", cwd=tmp_path)
    rehearsal = report["rehearsal"]
    assert (code, rehearsal["status"]) == (0, "completed") and rehearsal["steps"] >= 2, rehearsal
    assert any(note.endswith("(an array of numbers)") for note in rehearsal["notes"])


def test_a_file_that_the_script_can_make_itself_is_not_pretended(tmp_path: Path) -> None:
    made = """file = os.path.join(root, "cache.npy")
        try:
            self.files = numpy.load(file)
        except FileNotFoundError:
            self.files = numpy.zeros(192 * 40)
        assert not os.path.exists(file) and self.files.max() == 0"""
    (tmp_path / "train.py").write_text(NUMBERS.replace("FIND", made))
    code, report = check("--time-limit", "240", "train.py", cwd=tmp_path)
    assert (code, report["rehearsal"]["status"]) == (0, "completed"), report["rehearsal"]
