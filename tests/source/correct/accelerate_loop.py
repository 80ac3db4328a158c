"""A loop that Accelerate prepares: it divides the data, accumulates, waits and gathers."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from torchvision.datasets import FakeData


def main():
    acc = Accelerator(gradient_accumulation_steps=4)
    model = torch.nn.Linear(2, 2)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    data = FakeData()
    loader = DataLoader(data, shuffle=True, batch_size=4)
    model, opt, loader = acc.prepare(model, opt, loader)
    for _ in range(3):
        for x, _ in loader:
            with acc.accumulate(model):
                loss = model(x).sum()
                acc.backward(loss)
                opt.step()
                opt.zero_grad()
        acc.wait_for_everyone()
        if acc.is_main_process:
            acc.save(acc.unwrap_model(model).state_dict(), "m.pt")
        acc.print(acc.gather(loss.detach()).mean())


main()
