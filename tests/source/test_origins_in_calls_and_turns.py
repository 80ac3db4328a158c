"""What a value comes from is kept where a call unpacks it, and where it takes several turns of a loop to come about."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.source.marked import marks, places, written

_START = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, *items):
        return [self.layer(one) for one in items]

class Ranking(nn.Module):
    def forward(self, one, other, margin=0.2):
        return torch.relu(margin + (one - other).pow(2).sum(1)).mean()

def ranked(one, other, weight=1.0):
    return weight * torch.relu(one - other).mean()

def gathered(*parts, scale=1.0):
    return scale * sum(part.mean() for part in parts)

dist.init_process_group("gloo")
dataset = torch.load("pairs.pt")
loader = DataLoader(dataset, batch_size=2, sampler=DistributedSampler(dataset))
validation = DataLoader(dataset, batch_size=2, sampler=DistributedSampler(dataset, shuffle=False))
model = DDP(Net())
criterion = Ranking()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""

_LOSSES = {
    "what a model gives, unpacked for a module": "criterion(*model(*batch))",
    "for a function of the project": "ranked(*model(*batch), weight=2.0)",
    "for one that takes any number": "gathered(*model(*batch))",
    "for a function of torch": "nn.functional.mse_loss(*model(*batch))",
    "by names": "ranked(**dict(zip(('one', 'other'), model(*batch))))",
    "behind something else": "torch.stack([*model(*batch)]).mean()",
}


@pytest.mark.parametrize("loss", _LOSSES.values(), ids=list(_LOSSES))
def test_rank_skips_backward_by_a_loss_of_unpacked_outputs(tmp_path: Path, loss: str) -> None:
    path = written(
        tmp_path,
        f"""{_START}
for batch in loader:
    loss = {loss}
    optimizer.zero_grad()
    if loss != 0:  # DDP302
        loss.backward()
        optimizer.step()
""",
    )
    assert places(path, "DDP302") == marks(path)


_TWINS = {
    "always backward": "loss.backward()",
    "agreed": "flag = loss.detach().clone()\n    dist.all_reduce(flag)\n    if flag != 0:\n        loss.backward()",
    "a setting of the call": "if options.weight != 0:\n        loss.backward()",
}


@pytest.mark.parametrize("end", _TWINS.values(), ids=list(_TWINS))
@pytest.mark.parametrize("loss", [_LOSSES["what a model gives, unpacked for a module"], _LOSSES["by names"]])
def test_no_rank_skips_backward(tmp_path: Path, loss: str, end: str) -> None:
    head = "import argparse\noptions = argparse.ArgumentParser().parse_args()\n"
    path = written(tmp_path, f"{head}{_START}\nfor batch in loader:\n    loss = {loss}\n    {end}\n")
    assert places(path, "DDP302") == []


def test_default_of_a_parameter_is_not_the_batch_that_is_unpacked(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        f"""{_START}
def step(one, other, reverse=False, **more):
    loss = criterion(*model(one, other))
    if reverse:
        loss = -loss
    if more.get("skip"):
        return
    loss.backward()

for batch in loader:
    step(*batch)
for batch in loader:
    step(**batch, skip=False)
""",
    )
    assert places(path, "DDP302") == []


_STOPPERS = {
    "a counter beside the best value": """
class Stopper:
    def __init__(self):
        self.best, self.counter, self.early_stop = None, 0, False

    def __call__(self, value):
        if self.best is None or value < self.best:
            self.best, self.counter = value, 0
        else:
            self.counter += 1
            if self.counter >= 3:
                self.early_stop = True

    @property
    def stops(self):
        return self.early_stop
""",
    "a method that returns whether to stop": """
class Stopper:
    def __init__(self):
        self.best, self.waited, self.stops = None, 0, False

    def __call__(self, value):
        improved = self.best is None or value < self.best - 1e-3
        self.best = value if improved else self.best
        self.waited = 0 if improved else self.waited + 1
        self.stops = self.waited > 2
""",
    "two stages": """
class Stopper:
    def __init__(self):
        self.best, self.bad, self.reductions, self.stops = None, 0, 0, False

    def __call__(self, value):
        if self.best is None:
            self.best = value
        elif value > self.best:
            self.bad += 1
        if self.bad == 2:
            self.reductions += 1
            self.bad = 0
        if self.reductions == 3:
            self.stops = True
""",
}
_LOCALS = {
    "variables of the loop": """
best, bad, stop = None, 0, False
for epoch in range(10):
    value = validate()
    if best is None or value < best:
        best, bad = value, 0
    else:
        bad += 1
        if bad == 3:
            stop = True
    if stop:  # DDP302
        break
    train()
""",
    "while": """
state = {"best": None, "bad": 0, "stop": False}
while not state["stop"]:  # DDP302
    train()
    value = validate()
    if state["best"] is None or value < state["best"]:
        state["best"], state["bad"] = value, 0
    else:
        state["bad"] += 1
        if state["bad"] == 3:
            state["stop"] = True
""",
    "a phase that begins once the loss is low": """
warm, seen, frozen = True, 0, False
for epoch in range(10):
    value = validate()
    if not warm:
        seen += 1
        if seen == 2:
            frozen = True
    if value < 0.5:
        warm = False
    if frozen:  # DDP302
        continue
    train()
""",
}
_WORK = """
@torch.no_grad()
def validate():
    total = 0.0
    for one, other in validation:
        total += criterion(*model(one, other)).item()
    {end}

def train():
    for one, other in loader:
        criterion(*model(one, other)).backward()
        optimizer.step()
"""
_OWN = "return total / len(validation)"
_AGREED = "total = torch.tensor(total)\n    dist.all_reduce(total)\n    return total.item()"
_COURSE = """
stopper = Stopper()
for epoch in range(10):
    train()
    stopper(validate())
    if stopper.stops:  # DDP302
        break
dist.barrier()
"""
_COURSES = {**{name: cls + _COURSE for name, cls in _STOPPERS.items()}, **_LOCALS}


@pytest.mark.parametrize("course", _COURSES.values(), ids=list(_COURSES))
@pytest.mark.parametrize("end", [_OWN, _AGREED], ids=["own", "agreed"])
def test_stop_that_takes_several_turns(tmp_path: Path, course: str, end: str) -> None:
    path = written(tmp_path, _START + _WORK.replace("{end}", end) + textwrap.dedent(course))
    assert places(path, "DDP302") == (marks(path) if end is _OWN else [])
