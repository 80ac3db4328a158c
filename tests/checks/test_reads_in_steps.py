"""Results that each step reads back, behind tests of what a value is, which come out alike in each step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.source.marked import check_marks

RUN = """
import argparse
args = argparse.ArgumentParser().parse_args()

class Meters:
    def __init__(self):
        self.sums = {{}}

    def update(self, **values):
        for name, value in values.items():
            {meter}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        out = self.layer(x)
        return {{"loss": out.mean(), "acc": out.max()}}

def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    data = TensorDataset(torch.randn(64, 4))
    loader = DataLoader(data, 8, sampler=DistributedSampler(data))
    model = DDP(Net().cuda(), device_ids=[local_rank])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    meters, sums = Meters(), {{"loss": 0, "acc": 0}}
    for step, (x,) in enumerate(loader):
        losses = model(x.cuda())
        optimizer.zero_grad()
        losses["loss"].backward()
        optimizer.step()
        {step}

main()
"""
NOTHING = "pass"
READ = {
    "a meter that takes numbers and tensors": (
        "if isinstance(value, torch.Tensor):\n                value = value.item()  # DDP406\n"
        "            self.sums[name] = self.sums.get(name, 0) + value",
        "meters.update(**losses)",
    ),
    "a meter that asks for the method": (
        'self.sums[name] = value.item() if hasattr(value, "item") else value  # DDP406',
        "meters.update(loss=losses['loss'])",
    ),
    "names of one kind": (
        NOTHING,
        'for key in losses:\n            if "loss" in key or "acc" in key:\n'
        "                sums[key] += losses[key].item()  # DDP406",
    ),
    "what is no number yet": (
        NOTHING,
        "for key, value in losses.items():\n            if isinstance(value, float):\n"
        "                sums[key] += value\n            else:\n                sums[key] += value.item()  # DDP406",
    ),
    "a part of a dict": (
        NOTHING,
        'sums = {k: v.item() for k, v in losses.items() if k.startswith("loss")}  # DDP406',
    ),
    "what torch calls a tensor": (
        "if torch.is_tensor(value) and not isinstance(value, int):\n                value = float(value)  # DDP406",
        "meters.update(**losses)",
    ),
}
NOW_AND_THEN = {
    "some of the steps": (
        NOTHING,
        'if step % 50 == 0 and isinstance(losses["loss"], torch.Tensor):\n            print(losses["loss"].item())',
    ),
    "some of the steps, of one name": (
        NOTHING,
        'for key in losses:\n            if "loss" in key and step % args.every == 0:\n'
        "                sums[key] += losses[key].item()",
    ),
    "where a switch asks for it": (NOTHING, "if args.verbose:\n            print(losses['loss'].item())"),
    "numbers of the machine": (
        "if isinstance(value, torch.Tensor):\n                value = value.item()",
        "meters.update(step=torch.tensor(step))",
    ),
}


@pytest.mark.parametrize("way", READ)
def test_a_test_of_what_a_value_is_leaves_no_step_out(way: str, tmp_path: Path) -> None:
    meter, step = READ[way]
    check_marks(tmp_path, RUN.format(meter=meter, step=step), "DDP406")


@pytest.mark.parametrize("way", NOW_AND_THEN)
def test_reads_of_some_steps_and_of_other_values_are_in_order(way: str, tmp_path: Path) -> None:
    meter, step = NOW_AND_THEN[way]
    check_marks(tmp_path, RUN.format(meter=meter, step=step), "DDP406")
