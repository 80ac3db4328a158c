"""Where each rank does the work for every item and keeps its share, and where the share is taken before the work."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.source.marked import check_marks

HEAD = """import glob
import itertools
import json
import os

import torch
import torch.distributed as dist
from PIL import Image
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchvision import transforms
"""
TAIL = """

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
model = DDP(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(Items("data", rank, world_size), batch_size=4)
for epoch in range(3):
    for inputs in loader:
        optimizer.zero_grad()
        model(inputs).mean().backward()
        optimizer.step()
dist.destroy_process_group()
"""
START = """
class Items(IterableDataset):
    def __init__(self, root, rank, world_size):
        self.paths = sorted(glob.glob(os.path.join(root, "*")))
        self.rank, self.world_size = rank, world_size
        self.transform = transforms.Compose([transforms.Resize(64), transforms.ToTensor()])
"""
LATE = {
    "skipped by continue": """
    def __iter__(self):
        for number, path in enumerate(self.paths):
            item = torch.load(path)
            if number % self.world_size != self.rank:  # DDP404
                continue
            yield item
""",
    "every n-th of a generator": """
    def records(self):
        for path in self.paths:
            volume = torch.load(path)
            for row in volume:
                yield row

    def __iter__(self):
        yield from itertools.islice(self.records(), self.rank, None, self.world_size)  # DDP404
""",
    "a chain of generators": """
    def read(self):
        for path in self.paths:
            yield Image.open(path)

    def prepared(self, pictures):
        for picture in pictures:
            yield self.transform(picture)

    def __iter__(self):
        stream = self.prepared(self.read())
        for number, picture in enumerate(stream):
            if number % self.world_size == self.rank:  # DDP404
                yield picture
""",
    "a count by hand, and workers": """
    def items(self):
        for path in self.paths:
            yield resized(torch.load(path))

    def __iter__(self):
        info = get_worker_info()
        workers = info.num_workers if info else 1
        number = 0
        for item in self.items():
            if number % (self.world_size * workers) == self.rank * workers + (info.id if info else 0):  # DDP404
                yield item
            number += 1


def resized(item):
    return torch.nn.functional.interpolate(item[None], 64)[0]
""",
    "a comprehension": """
    def items(self):
        for path in self.paths:
            yield torch.load(path)

    def __iter__(self):
        return (item for n, item in enumerate(self.items()) if n % self.world_size == self.rank)  # DDP404
""",
}
EARLY = {
    "an index is skipped": """
    def __iter__(self):
        for number, path in enumerate(self.paths):
            if number % self.world_size == self.rank:
                yield self.transform(Image.open(path))
""",
    "a line is skipped": """
    def lines(self):
        for path in self.paths:
            with open(path) as file:
                yield from file

    def __iter__(self):
        for line in itertools.islice(self.lines(), self.rank, None, self.world_size):
            yield torch.tensor(json.loads(line))
""",
    "a table is loaded once": """
    def rows(self):
        table = torch.load("rows.pt")
        for row in table:
            yield row

    def __iter__(self):
        for number, row in enumerate(self.rows()):
            if number % self.world_size == self.rank:
                yield row
""",
    "the work is done after the split": """
    def __iter__(self):
        mine = (path for n, path in enumerate(self.paths) if n % self.world_size == self.rank)
        for picture in self.pictures(mine):
            yield picture

    def pictures(self, paths):
        for path in paths:
            yield self.transform(Image.open(path))
""",
    "every so many steps, not by rank": """
    def pictures(self):
        for path in self.paths[self.rank :: self.world_size]:
            yield self.transform(Image.open(path))

    def __iter__(self):
        for number, picture in enumerate(self.pictures()):
            if number % 10 == 0:
                print(number)
            yield picture
""",
    "every item is used": """
    def pictures(self):
        for path in self.paths:
            yield self.transform(Image.open(path))

    def __iter__(self):
        for number, picture in enumerate(self.pictures()):
            if number % self.world_size == self.rank:
                picture = picture.flip(0)
            yield picture
""",
}


PIPELINE_HEAD = HEAD.replace("from PIL", "import webdataset as wds\nfrom PIL").replace(
    "import DataLoader", "import DataLoader, datapipes"
)
PIPELINE_TAIL = TAIL.replace('Items("data", rank, world_size)', "stream")
FUNCTIONS = """
def picture(path):
    return transforms.functional.to_tensor(Image.open(path))


def stripped(path):
    return path.strip()


urls = "shards-{000..063}.tar"
"""
LATE_PIPELINES = {
    "a filter behind a map": """
stream = datapipes.iter.FileLister("data").map(picture).sharding_filter()  # DDP404
""",
    "a filter behind a map, step by step": """
stream = datapipes.iter.FileLister("data")
stream = stream.map(stripped).map(lambda path: torch.load(path))
stream = stream.shuffle().sharding_filter()  # DDP404
""",
    "a pipeline split behind decode": """
stream = wds.DataPipeline(
    wds.SimpleShardList(urls), wds.tarfile_to_samples(), wds.decode("torchrgb"), wds.split_by_node  # DDP404
)
""",
    "a stream split behind decode": """
stream = wds.WebDataset(urls).decode("pil").compose(wds.split_by_node)  # DDP404
""",
}
EARLY_PIPELINES = {
    "a filter before the map": """
stream = datapipes.iter.FileLister("data").map(stripped).sharding_filter().map(picture)
""",
    "shards are split": """
stream = wds.DataPipeline(
    wds.SimpleShardList(urls), wds.split_by_node, wds.split_by_worker, wds.tarfile_to_samples(), wds.decode("pil")
)
""",
    "the stream splits its shards": """
stream = wds.WebDataset(urls, nodesplitter=wds.split_by_node).decode("pil").batched(4)
""",
    "paths are split": """
stream = wds.WebDataset(urls).compose(wds.split_by_node).decode("pil").map(picture)
""",
}


@pytest.mark.parametrize("name", LATE_PIPELINES)
def test_a_pipeline_that_is_split_behind_the_work_is_told(name: str, tmp_path: Path) -> None:
    check_marks(tmp_path, FUNCTIONS + LATE_PIPELINES[name] + PIPELINE_TAIL, "DDP404", head=PIPELINE_HEAD)


@pytest.mark.parametrize("name", EARLY_PIPELINES)
def test_a_pipeline_that_is_split_before_the_work_is_not(name: str, tmp_path: Path) -> None:
    check_marks(tmp_path, FUNCTIONS + EARLY_PIPELINES[name] + PIPELINE_TAIL, "DDP404", head=PIPELINE_HEAD)


@pytest.mark.parametrize("name", LATE)
def test_a_split_behind_the_work_is_told_with_its_line(name: str, tmp_path: Path) -> None:
    check_marks(tmp_path, START + LATE[name] + TAIL, "DDP404", head=HEAD)


@pytest.mark.parametrize("name", EARLY)
def test_a_split_before_the_work_is_not(name: str, tmp_path: Path) -> None:
    check_marks(tmp_path, START + EARLY[name] + TAIL, "DDP404", head=HEAD)
