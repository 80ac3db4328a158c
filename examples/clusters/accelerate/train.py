"""Accelerate on two nodes of one rank each; SLOW=1 in the environment makes rank 1 sleep 40 ms in every step."""

import os
import time

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(8000, 64)), batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for (inputs,) in loader:
        optimizer.zero_grad()
        time.sleep(0.03 + 0.04 * (accelerator.process_index == int(os.environ.get("SLOW", "-1"))))
        accelerator.backward(model(inputs).pow(2).mean())
        optimizer.step()
    accelerator.print("trained")
    accelerator.end_training()


if __name__ == "__main__":
    main()
