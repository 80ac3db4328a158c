"""The training scripts of the rows: long enough that a job which goes on is called healthy."""

from __future__ import annotations

import textwrap

from tests.faults.script import HEAD

STEPS = 60
STRIKES_AT = 40
"""The step in which a fault strikes: by then a run without one would have been measured for long enough."""

# The sleep before the end: torch 2.13 can stand for good where gloo's thread has not let go of the last backward then.
_TRAINING = f"""
import contextlib, ctypes, fcntl, queue, random, re, select, subprocess, tempfile
from datetime import timedelta

class Samples(Dataset):
    def __init__(self, length): self.length = length
    def __len__(self): return self.length
    def __getitem__(self, index):
        SAMPLE
        return torch.randn(8)

def collate(samples):
    COLLATE
    return torch.stack(samples)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 3)
        self.norm = NORM
    def forward(self, x):
        FORWARD
        return self.second(self.norm(self.first(x)))

TOP
def main():
    START
    dist.init_process_group("gloo"GROUP_OPTIONS)
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    value, other = torch.ones(2), torch.ones(3)
    AFTER_INIT
    data = Samples(size * 4 * {STEPS})
    loader = DataLoader(data, 4, sampler=DistributedSampler(data, shuffle=False), collate_fn=collate LOADER_OPTIONS)
    model = DDP(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    AFTER_WRAP
    for epoch in range(EPOCHS):
        for step, x in enumerate(loader):
            struck = step == {STRIKES_AT} and epoch == 0
            WITHIN
            optimizer.zero_grad()
            loss = model(x).sum()
            BETWEEN
            loss.backward()
            optimizer.step()
            END_OF_STEP
        END_OF_EPOCH
    AFTER
    time.sleep(0.2)
    dist.destroy_process_group()

if __name__ == "__main__":
    CALL
"""
_PLACES = (
    "SAMPLE", "COLLATE", "FORWARD", "TOP", "START", "AFTER_INIT", "AFTER_WRAP", "WITHIN", "BETWEEN", "END_OF_STEP",
    "END_OF_EPOCH", "AFTER", "CALL",
)  # fmt: skip


def script(
    norm: str = "nn.Identity()", group_options: str = "", loader_options: str = "", epochs: int = 1, **lines: str
) -> str:
    """A script that trains on a sharded loader, with a row's lines at their places, named in lower case.

    In them ``struck`` is true once a run; ``fault()`` tells the table when the fault strikes.
    """
    lines.setdefault("call", "main()")
    filled = []
    text = _TRAINING.replace("NORM", norm).replace("GROUP_OPTIONS", group_options).replace("EPOCHS", str(epochs))
    for line in text.replace("LOADER_OPTIONS", loader_options).splitlines():
        place = line.strip()
        if place in _PLACES:
            indent = line[: len(line) - len(place)]
            filled.append(textwrap.indent(textwrap.dedent(lines.pop(place.lower(), "pass")).strip("\n"), indent))
        else:
            filled.append(line)
    assert not lines, f"no such place: {lines}"
    return HEAD + "\n".join(filled) + "\n"
