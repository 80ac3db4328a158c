from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ddpdoctor.probe.rehearsal.data.loaders import Copies


class Transform:
    def __init__(self) -> None:
        self.scale = 1.0

    def __call__(self, item: float) -> float:
        return item * self.scale


class Data:
    def __init__(self) -> None:
        self.epoch = 0
        self.order = [2, 1, 0]
        self.served = 0
        self.transform = Transform()

    def place(self, index: int) -> int:
        return self.order[index] + self.epoch

    def __getitem__(self, index: int) -> float:
        return self.transform(self.place(index))

    def report(self) -> int:
        return self.served


def loader_of(data: Any, **options: Any) -> Any:
    return SimpleNamespace(**{"dataset": data, "num_workers": 2, "persistent_workers": True, **options})


def test_what_items_are_made_with_and_was_set_since_the_workers_started_is_named() -> None:
    copies, data = Copies(), Data()
    subset = SimpleNamespace(dataset=data, indices=[0, 1])
    assert copies.changed(loader_of(subset), 0) == []
    data.epoch, data.served = 1, 5
    assert copies.changed(loader_of(subset), 0) == ["epoch"]
    data.order, data.transform.scale = [0, 1, 2], 2.0
    assert copies.changed(loader_of(subset), 0) == ["epoch", "order", "scale"]


def test_nothing_is_old_in_new_workers_and_where_nothing_was_set() -> None:
    copies, data = Copies(), Data()
    loaders = [loader_of(data), loader_of(data, persistent_workers=False), loader_of(data, num_workers=0)]
    for number, loader in enumerate(loaders):
        assert copies.changed(loader, number) == []
    data.served = 3
    assert copies.changed(loaders[0], 0) == []
    data.epoch = 3
    assert [copies.changed(loader, number) for number, loader in enumerate(loaders)] == [["epoch"], [], []]
    assert copies.changed(loader_of(data), 3) == []
