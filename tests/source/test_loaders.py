from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from ddpdoctor.finding import Severity
from ddpdoctor.source.script.script import read_script
from tests.source.marked import check_marks, findings_of, written

TRAINING = """
dist.init_process_group("gloo")
model = DDP(nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.ones(100, 4))
"""
LOOP = """
for epoch in range(3):
    for (x,) in loader:
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
"""

UNDIVIDED = {
    "shuffled loader": "loader = DataLoader(data, batch_size=4, shuffle=True)  # DDP101",
    "loader in order": "loader = DataLoader(data, batch_size=4)  # DDP101",
    "random sampler": "loader = DataLoader(data, sampler=torch.utils.data.RandomSampler(data))  # DDP101",
    "settings that are added by name": """
options = dict(batch_size=4)
options.update(shuffle=True)
loader = DataLoader(data, **options)  # DDP101
""",
    "in an object whose iterator is the loader's": """
class Batches:
    def __init__(self):
        self.loader = DataLoader(data, batch_size=4, shuffle=True)  # DDP101

    def __iter__(self):
        return iter(self.loader)

loader = Batches()
""",
    "in an object that is its own iterator": """
class Batches:
    def __init__(self):
        self.loader = DataLoader(data, batch_size=4, shuffle=True)  # DDP101

    def __iter__(self):
        self.source = iter(self.loader)
        return self

    def __next__(self):
        return next(self.source)

loader = Batches()
""",
    "sampler=None": "loader = DataLoader(data, shuffle=True, sampler=None)  # DDP101",
    "data of unknown origin, shuffled": """
from somewhere import build_dataset
loader = DataLoader(build_dataset("train"), shuffle=True)  # DDP101
""",
    "own map-style data set": """
class Pictures(torch.utils.data.Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return (torch.ones(4),)

loader = DataLoader(Pictures(), batch_size=4)  # DDP101
""",
    "from a helper": """
def build(data):
    return DataLoader(data, shuffle=True)  # DDP101

loader = build(data)
""",
    "under a progress bar": """
from tqdm import tqdm
loader = tqdm(DataLoader(data, shuffle=True))  # DDP101
""",
}

DIVIDED = {
    "sampler": "loader = DataLoader(data, sampler=DistributedSampler(data, shuffle=False))",
    "made in a helper with two returns": """
def build(data, distributed):
    if distributed:
        return DataLoader(data, sampler=DistributedSampler(data, shuffle=False))
    return DataLoader(data, shuffle=True)

loader = build(data, "RANK" in os.environ and bool(torch.initial_seed()))
""",
    "own sharding sampler": """
class ShardSampler(torch.utils.data.Sampler):
    def __init__(self, data, rank, size):
        self.data, self.rank, self.size = data, rank, size

    def __iter__(self):
        return iter(range(self.rank, len(self.data), self.size))

loader = DataLoader(data, sampler=ShardSampler(data, dist.get_rank(), dist.get_world_size()))
""",
    "sampler of another package": """
from timm.data.distributed_sampler import RepeatAugSampler
loader = DataLoader(data, sampler=RepeatAugSampler(data))
""",
    "batch sampler around a sharding sampler": """
from torch.utils.data import BatchSampler
loader = DataLoader(data, batch_sampler=BatchSampler(DistributedSampler(data, shuffle=False), 4, True))
""",
    "data split by rank": """
part = torch.utils.data.Subset(data, range(dist.get_rank(), len(data), dist.get_world_size()))
loader = DataLoader(part, shuffle=True)
""",
    "data set split by a helper of another package": """
from datasets.distributed import split_dataset_by_node
loader = DataLoader(split_dataset_by_node(data, rank=dist.get_rank(), world_size=dist.get_world_size()), shuffle=True)
""",
    "generator seeded by rank": """
loader = DataLoader(data, shuffle=True, generator=torch.Generator().manual_seed(dist.get_rank()))
""",
    "prepared by accelerate": """
from accelerate import Accelerator
loader = Accelerator().prepare(DataLoader(data, shuffle=True))
""",
    "subclass with a sampler inside": """
class ShardedLoader(DataLoader):
    def __init__(self, data):
        super().__init__(data, sampler=DistributedSampler(data, shuffle=False))

loader = ShardedLoader(data)
""",
    "options from elsewhere": """
from somewhere import loader_options
loader = DataLoader(data, **loader_options)
""",
}


@pytest.mark.parametrize("text", UNDIVIDED.values(), ids=UNDIVIDED)
def test_loaders_that_give_every_rank_everything(tmp_path: Path, text: str) -> None:
    check_marks(tmp_path, TRAINING + text + LOOP, "DDP101")


@pytest.mark.parametrize("text", DIVIDED.values(), ids=DIVIDED)
def test_loaders_that_are_divided(tmp_path: Path, text: str) -> None:
    check_marks(tmp_path, TRAINING + text + LOOP, "DDP101")


SILENT_SCRIPTS = {
    "horovod": """
        import horovod.torch as hvd
        hvd.init()
        model = nn.Linear(4, 4)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for (x,) in DataLoader(TensorDataset(torch.ones(100, 4)), shuffle=True):
            model(x).sum().backward()
        """,
    "random batches seeded by rank": """
        dist.init_process_group("gloo")
        torch.manual_seed(1337 + dist.get_rank())
        model = DDP(nn.Linear(4, 4))
        tokens = torch.arange(1000)

        def get_batch():
            starts = torch.randint(900, (8,))
            return torch.stack([tokens[i : i + 4] for i in starts]).float()

        for step in range(100):
            model(get_batch()).sum().backward()
        """,
}


@pytest.mark.parametrize("text", SILENT_SCRIPTS.values(), ids=SILENT_SCRIPTS)
def test_scripts_in_which_no_loader_needs_a_sampler(tmp_path: Path, text: str) -> None:
    check_marks(tmp_path, text, "DDP101", "DDP102")


def test_loader_of_a_function_that_returns_fewer_in_another_mode(tmp_path: Path) -> None:
    build = """
        def build(training):
            loader = DataLoader(data, shuffle=True)  # DDP101
            if training:
                return loader, DataLoader(data, shuffle=False), 10
            return DataLoader(data, shuffle=False), 10

        loader, validation, classes = build(len(sys.argv) > 1)
        """
    check_marks(tmp_path, TRAINING + textwrap.dedent(build) + LOOP, "DDP101")


def test_module_that_is_imported_by_a_name_in_a_call(tmp_path: Path) -> None:
    written(tmp_path, TRAINING + "loader = DataLoader(data, shuffle=True)\n" + LOOP, "recipes/plain.py")
    path = tmp_path / "train.py"
    path.write_text(
        "import importlib, sys\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "if len(sys.argv) > 1:\n"
        "    importlib.import_module(sys.argv[1])\n"
        "else:\n"
        "    importlib.import_module('recipes.plain')\n"
    )
    (finding,) = findings_of(read_script(path), "DDP101")
    assert Path(finding.locations[0].file).name == "plain.py"


def test_location_covers_the_whole_construction(tmp_path: Path) -> None:
    loader = """
loader = DataLoader(
    data,
    batch_size=4,
    shuffle=True,
)
"""
    path = written(tmp_path, TRAINING + loader + LOOP)
    (finding,) = findings_of(read_script(path), "DDP101")
    first = path.read_text().splitlines().index("loader = DataLoader(") + 1
    place = finding.locations[0]
    assert (place.line, place.end_line, place.column, place.end_column) == (first, first + 4, 10, 2)
    assert finding.severity is Severity.WARNING


SET_EPOCH = {
    "through the batch sampler": """
        batches = torch.utils.data.BatchSampler(DistributedSampler(data), 4, True)
        loader = DataLoader(data, batch_sampler=batches)
        for epoch in range(3):
            loader.batch_sampler.sampler.set_epoch(epoch)
            for (x,) in loader:
                model(x).sum().backward()
        """,
    "on a sampler given as argument": """
        def fit(loader, sampler):
            for epoch in range(3):
                if sampler is not None:
                    sampler.set_epoch(epoch)
                for (x,) in loader:
                    model(x).sum().backward()

        sampler = DistributedSampler(data)
        fit(DataLoader(data, sampler=sampler), sampler)
        """,
    "on an attribute": """
        class Trainer:
            def __init__(self):
                self.train_data = DataLoader(data, sampler=DistributedSampler(data))

            def fit(self):
                for epoch in range(3):
                    self.train_data.sampler.set_epoch(epoch)
                    for (x,) in self.train_data:
                        model(x).sum().backward()

        Trainer().fit()
        """,
    "where the sampler can have one": """
        from somewhere import maybe_sampler
        sampler = maybe_sampler(data)
        loader = DataLoader(data, sampler=DistributedSampler(data))
        for epoch in range(3):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
            for (x,) in loader:
                model(x).sum().backward()
        """,
    "a sampler for each fold": """
        for fold in range(5):
            part = torch.utils.data.Subset(data, range(20 * fold, 100))
            loader = DataLoader(part, sampler=DistributedSampler(part))
            for (x,) in loader:
                model(x).sum().backward()
        """,
}


@pytest.mark.parametrize("text", SET_EPOCH.values(), ids=SET_EPOCH)
def test_set_epoch(tmp_path: Path, text: str) -> None:
    head = """
        dist.init_process_group("gloo")
        model = DDP(nn.Linear(4, 4))
        data = TensorDataset(torch.ones(100, 4))
        """
    check_marks(tmp_path, head + text, "DDP102")


# What gives a loader alone, beside a pair of loaders: the call takes two apart, so the pair is meant.
ALONE = {
    "another branch": ("if args.split > 0:", "return train, test", "return train"),
    "no else": ("if args.split > 0:", "return [train, test]", "pass\n    return test"),
    "a function": ("if args.split > 0:", "return train, test", "return lambda: (train, test)"),
    "a class": ("if args.split:", "return (train, test)", "return DataLoader"),
    "three of them": ("if args.split:", "return train, test", "return train, test, test"),
    "nothing": ("if args.split:", "return train, test", "return None"),
}


@pytest.mark.parametrize("way", ALONE)
def test_what_is_taken_apart_is_a_row_of_so_many(way: str, tmp_path: Path) -> None:
    test, pair, other = ALONE[way]
    check_marks(
        tmp_path,
        f"""
import argparse
args = argparse.ArgumentParser().parse_args()
dist.init_process_group("gloo")
data = TensorDataset(torch.randn(64, 4))

def loaders():
    train = DataLoader(data, 8, sampler=DistributedSampler(data))  # DDP102
    test = DataLoader(data, 8)
    {test}
        {pair}
    {other}

train, test = loaders()
model = DDP(nn.Linear(4, 4))
for epoch in range(20):
    for (x,) in train:
        model(x).sum().backward()
""",
        "DDP102",
    )
