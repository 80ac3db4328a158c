"""States that differ between the ranks, of which rank 0 saves its own for all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.source.marked import marks, places, written

_HEAD = """
class Stream:
    def __init__(self, items, rank, world):
        self.items, self.rank, self.world = items, rank, world
        self.position, self.turns, self.rest = {start}, 0, items[rank::world]

    def __iter__(self):
        return self

    def __next__(self):
        {advance}
        self.turns += 1
        self.rest = self.rest[1:]
        return self.items[self.position]

    def state_dict(self):
        return {{"{kept}": self.{kept}}}

    def load_state_dict(self, state):
        self.{kept} = {given}

class Loader:
    def __init__(self, stream):
        self.stream = stream

    def state_dict(self):
        return {{"stream": self.stream.state_dict()}}

    def load_state_dict(self, state):
        self.stream.load_state_dict(state["stream"])

def save(step, model, loader, path):
    {save}

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
loader = Loader(Stream(torch.load("tokens.pt"), rank, world))
model = DDP(nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if os.path.exists("state.pt"):
    {load}
for step in range(100):
    loss = model(next(loader.stream)).sum()
    loss.backward()
    optimizer.step()
    save(step, model, loader, "state.pt")
    dist.barrier()
"""
_STEPS = {
    "start": "-1",
    "advance": "self.position += 1\n"
    "        while self.position % self.world != self.rank:\n            self.position += 1",
    "kept": "position",
    "given": 'state["position"]',
    "save": "if dist.get_rank() == 0:\n"
    '        state = {"model": model.module.state_dict(), "step": step, "loader": loader.state_dict()}\n'
    "        torch.save(state, path)  # DDP609",
    "load": 'state = torch.load("state.pt")\n    model.module.load_state_dict(state["model"])\n'
    '    loader.load_state_dict(state["loader"])',
}
_BUILT_BEFORE = (
    'state = {"loader": loader.state_dict(), "step": step}\n    if dist.get_rank() == 0:\n'
    "        torch.save(state, path)  # DDP609"
)
_DIRECT = 'if rank == 0:\n        torch.save({"at": loader.stream.position}, path)  # DDP609'


def job(**parts: str) -> str:
    return _HEAD.format(**{**_STEPS, **parts})


_LOST = {
    "a position that a loop moves": job(),
    "one that begins at the rank": job(start="rank", advance="self.position += self.world"),
    "what is left of the rank's share": job(kept="rest", given='state["rest"]'),
    "copied when it is loaded": job(kept="rest", given='state["rest"].clone()'),
    "a state that every rank has made before": job(save=_BUILT_BEFORE),
    "without a method": job(save=_DIRECT, load='loader.stream.position = torch.load("state.pt")["at"]'),
    "by get": job(given='state.get("position", 0)'),
}


@pytest.mark.parametrize("script", _LOST.values(), ids=list(_LOST))
def test_every_rank_goes_on_from_the_state_of_rank_0(tmp_path: Path, script: str) -> None:
    path = written(tmp_path, script)
    assert places(path, "DDP609") == marks(path)


_GATHERED = (
    "states = [None] * dist.get_world_size()\n    dist.all_gather_object(states, loader.state_dict())\n"
    '    if dist.get_rank() == 0:\n        torch.save({"loader": states}, path)'
)
_RIGHT = {
    "the states of all ranks": job(
        save=_GATHERED, load='loader.load_state_dict(torch.load("state.pt")["loader"][dist.get_rank()])'
    ),
    "a file of each rank": job(
        save='torch.save({"loader": loader.state_dict()}, f"{path}.{dist.get_rank()}")',
        load='loader.load_state_dict(torch.load(f"state.pt.{rank}")["loader"])',
    ),
    "a count that is alike": job(kept="turns", given='state["turns"]'),
    "moved on to the rank's own": job(given='state["position"] + self.rank'),
    "never loaded": job(load='model.module.load_state_dict(torch.load("state.pt")["model"])'),
    "loaded by rank 0": job(load='if rank == 0:\n        loader.load_state_dict(torch.load("state.pt")["loader"])'),
}


@pytest.mark.parametrize("script", _RIGHT.values(), ids=list(_RIGHT))
def test_each_rank_has_its_own_state_again(tmp_path: Path, script: str) -> None:
    assert places(written(tmp_path, script), "DDP609") == []
