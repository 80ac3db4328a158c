"""The ways in which scripts draw from loaders, in one script: each is cut, none breaks, and all of them go on."""

from __future__ import annotations

import json
import textwrap

import pytest

from ddpdoctor.record.model import RunRecord

from .conftest import Rehearse

SETTING = """
import json, queue, threading
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, Sampler

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(400, 4), torch.arange(400) % 3)
model = DDP(nn.Linear(4, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
seen = {}


def step(x, y, now=True):
    nn.functional.cross_entropy(model(x), y).backward()
    if now:
        optimizer.step()
        optimizer.zero_grad()


def sharded():
    return DistributedSampler(data)


def note(name, *numbers):
    seen.setdefault(name, []).append(list(numbers))
"""

FORMS: dict[str, tuple[str, list[list[int]]]] = {
    "three epochs with persistent workers": (
        """
        loader = DataLoader(data, batch_size=2, sampler=sharded(), num_workers=1, persistent_workers=True)
        for epoch in range(3):
            for count, (x, y) in enumerate(loader, 1):
                step(x, y)
            note(NAME, count)
        """,
        [[4], [4], [1]],
    ),
    "a stream without a length": (
        """
        class Stream(IterableDataset):
            def __iter__(self):
                for index in range(10_000):
                    yield data[index % 400]
        for epoch in range(3):
            count = 0
            for x, y in DataLoader(Stream(), batch_size=2):
                step(x, y)
                count += 1
            note(NAME, count)
        """,
        [[4], [4], [1]],
    ),
    "an own batch sampler without an end": (
        """
        class Endless(Sampler):
            def __iter__(self):
                while True:
                    yield [dist.get_rank(), 2]
        count = 0
        for x, y in DataLoader(data, batch_sampler=Endless()):
            step(x, y)
            count += 1
            if count == 100:
                break
        note(NAME, count)
        """,
        [[4]],
    ),
    "a subclass that repeats its sampler for ever": (
        """
        class Repeat:
            def __init__(self, sampler):
                self.sampler = sampler
            def __iter__(self):
                while True:
                    yield from iter(self.sampler)
        class Infinite(DataLoader):
            def __init__(self, *arguments, **options):
                super().__init__(*arguments, **options)
                object.__setattr__(self, "batch_sampler", Repeat(self.batch_sampler))
                self.iterator = super().__iter__()
            def __len__(self):
                return len(self.batch_sampler.sampler)
            def __iter__(self):
                for _ in range(len(self)):
                    yield next(self.iterator)
        loader = Infinite(data, batch_size=2, sampler=sharded(), num_workers=1)
        for epoch in range(3):
            for count, (x, y) in enumerate(loader, 1):
                step(x, y)
            note(NAME, count, len(loader))
        """,
        [[4, 100], [4, 100], [1, 100]],
    ),
    "a subclass that is its own iterator": (
        """
        class Prefetcher(DataLoader):
            def __iter__(self):
                self.batches = super().__iter__()
                self.ahead = next(self.batches, None)
                return self
            def __next__(self):
                batch, self.ahead = self.ahead, next(self.batches, None)
                if batch is None:
                    raise StopIteration
                return batch
        loader = Prefetcher(data, batch_size=2, sampler=sharded())
        for epoch in range(2):
            for count, (x, y) in enumerate(loader, 1):
                step(x, y)
            note(NAME, count)
        """,
        [[4], [4]],
    ),
    "the last batch by its number": (
        """
        def train(loader, micro_batches=3):
            last = len(loader) - 1
            steps = 0
            for index, (x, y) in enumerate(loader):
                now = (index + 1) % micro_batches == 0 or index == last
                steps += now
                step(x, y, now)
            note(NAME, index + 1, steps)
        loader = DataLoader(data, batch_size=2, sampler=sharded())
        train(loader)
        train(loader)
        """,
        [[4, 2], [4, 2]],
    ),
    "a bare next in a range of the length": (
        """
        loader = DataLoader(data, batch_size=2, sampler=sharded())
        for epoch in range(2):
            batches = iter(loader)
            for index in range(len(loader)):
                step(*next(batches))
            note(NAME, index + 1)
        """,
        [[4], [4]],
    ),
    "a bare next as often as the shortest rank can": (
        """
        def common_length(loader):
            length = torch.tensor([len(loader)])
            dist.all_reduce(length, op=dist.ReduceOp.MIN)
            return int(length.item())
        loader = DataLoader(data, batch_size=2, sampler=sharded())
        shortest = common_length(loader)
        for epoch in range(3):
            batches = iter(loader)
            for index in range(shortest):
                step(*next(batches))
            note(NAME, index + 1)
        """,
        [[4], [4], [4]],
    ),
    "an exhausted iterator made anew": (
        """
        loader = DataLoader(data, batch_size=2, sampler=sharded())
        batches, anew = iter(loader), 0
        for index in range(12):
            try:
                batch = next(batches)
            except StopIteration:
                batches, anew = iter(loader), anew + 1
                batch = next(batches)
            step(*batch)
        note(NAME, anew)
        """,
        [[2]],
    ),
    "schedules and intervals made of the length": (
        """
        loader = DataLoader(data, batch_size=2, sampler=sharded())
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, epochs=3, steps_per_epoch=len(loader))
        for epoch in range(3):
            shown = 0
            for index, (x, y) in enumerate(loader):
                step(x, y)
                schedule.step()
                shown += index % (len(loader) // 10) == 0 or index == len(loader) - 1
            note(NAME, shown, len(loader))
        """,
        [[2, 100], [2, 100], [1, 100]],
    ),
    "a thread that fetches ahead, and accumulation beyond the cut": (
        """
        def fetched_ahead(loader):
            ahead = queue.Queue(maxsize=2)
            def fetch():
                for batch in loader:
                    ahead.put(batch)
                ahead.put(None)
            threading.Thread(target=fetch, daemon=True).start()
            return iter(ahead.get, None)
        loader = DataLoader(data, batch_size=2, sampler=sharded())
        for epoch in range(4):
            steps = 0
            for count, (x, y) in enumerate(fetched_ahead(loader), 1):
                step(x, y, count % 6 == 0)
                steps += count % 6 == 0
            note(NAME, count, steps)
        """,
        [[4, 0], [64, 10], [4, 0], [4, 0]],
    ),
    "accumulation beyond the cut": (
        """
        loader = DataLoader(data, batch_size=2, sampler=sharded())
        for epoch in range(2):
            for count, (x, y) in enumerate(loader, 1):
                step(x, y, count % 6 == 0)
            note(NAME, count)
        """,
        [[12], [12]],
    ),
    "statistics and accuracy over the training loader": (
        """
        loader = DataLoader(data, batch_size=2, sampler=sharded())
        mean = torch.stack([x.mean() for x, y in loader]).mean()
        for epoch in range(3):
            for count, (x, y) in enumerate(loader, 1):
                step(x - mean, y)
            right = [int((model.module(x).argmax(1) == y).sum()) for x, y in loader]
            note(NAME, count, len(right))
        """,
        [[4, 4], [4, 1], [1, 1]],
    ),
    "two loaders side by side": (
        """
        one = DataLoader(data, batch_size=2, sampler=sharded())
        other = DataLoader(data, batch_size=4, sampler=sharded())
        for epoch in range(3):
            for count, ((x, y), (a, b)) in enumerate(zip(one, other), 1):
                step(torch.cat([x, a]), torch.cat([y, b]))
            note(NAME, count)
        """,
        [[4], [4], [1]],
    ),
    "a new loader for every epoch": (
        """
        for epoch in range(3):
            for count, (x, y) in enumerate(DataLoader(data, batch_size=2, sampler=sharded()), 1):
                step(x, y)
            note(NAME, count)
        """,
        [[4], [4], [1]],
    ),
}
LAST = """
        for form in seen.items():
            print(json.dumps(form))
        from itertools import cycle
        for index, (x, y) in enumerate(cycle(DataLoader(data, batch_size=2, sampler=sharded()))):
            step(x, y)
            if index == 1_000:
                raise RuntimeError("nobody ends a cycle")
"""


def _script() -> str:
    parts = [textwrap.dedent(SETTING)]
    parts += [textwrap.dedent(body).replace("NAME", repr(name)) for name, (body, _) in FORMS.items()]
    return "\n".join([*parts, textwrap.dedent(LAST)])


@pytest.fixture(scope="module")
def all_forms() -> dict[str, RunRecord]:
    """The one rehearsal that the cases share, made by the first that asks."""
    return {}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_drawing_is_cut_and_goes_on(
    form: str, rehearse_script: Rehearse, all_forms: dict[str, RunRecord]
) -> None:
    if not all_forms:
        all_forms["record"] = rehearse_script(_script())
    record = all_forms["record"]
    for rank in record.ranks:
        assert not rank.exceptions, rank.exceptions[0].traceback
        assert rank.end == "ended-by-rehearsal"
        seen = dict(json.loads(line) for line in rank.output_tail.splitlines() if line.startswith("["))
        assert seen[form] == FORMS[form][1]
    assert record.job.stop_reason == ""
