"""Lightning on two nodes of one rank each; SLOW=1 in the environment makes rank 1 sleep 40 ms in every step."""

import os
import time

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))

    def training_step(self, batch):
        time.sleep(0.03 + 0.04 * (self.global_rank == int(os.environ.get("SLOW", "-1"))))
        return self.layers(batch[0]).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    loader = DataLoader(TensorDataset(torch.randn(8000, 64)), batch_size=16, shuffle=True)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(accelerator="cpu", strategy="ddp", num_nodes=2, devices=1, max_epochs=1, **quiet)
    trainer.fit(Model(), loader)
    if trainer.is_global_zero:
        print("trained")
