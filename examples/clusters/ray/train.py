"""Ray Train: the workers are actors that Ray starts; they inherit the variables of the cluster that starts with them.

SLOW=1 in the environment makes rank 1 sleep 40 ms in every step.
"""

import os
import time

import ray.train
import ray.train.torch
import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train(config):
    rank = ray.train.get_context().get_world_rank()
    model = ray.train.torch.prepare_model(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)))
    data = DataLoader(TensorDataset(torch.randn(4096, 64)), batch_size=16, shuffle=True)
    loader = ray.train.torch.prepare_data_loader(data)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for (inputs,) in loader:
            optimizer.zero_grad()
            time.sleep(0.03 + 0.04 * (rank == config["slow"]))
            model(inputs).pow(2).mean().backward()
            optimizer.step()
    ray.train.report({"trained": 1})


if __name__ == "__main__":
    TorchTrainer(
        train,
        train_loop_config={"slow": int(os.environ.get("SLOW", "-1"))},
        scaling_config=ScalingConfig(num_workers=2),
        torch_config=TorchConfig(backend="gloo"),
    ).fit()
    print("trained")
