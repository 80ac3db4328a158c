# The option that others advise: it changes nothing, as DDP never lists what was frozen when it was built.
# BackboneFinetuning unfreezes after DDP wrap -> the backbone's gradients are not averaged, replicas diverge
# RIGHT ANSWER: parameters unfrozen after the wrap have no DDP hook; name the callback / unfreezing; freeze by lr=0 (or unfreeze before the wrap)
import argparse

import lightning as L
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Pose(L.LightningModule):
    def __init__(self, lr=1e-2):
        super().__init__()
        self.lr = lr
        self.backbone = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32))
        self.head = nn.Linear(32, 4)

    def training_step(self, batch, _):
        x, y = batch
        loss = nn.functional.mse_loss(self.head(self.backbone(x)), y)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(filter(lambda p: p.requires_grad, self.parameters()), lr=self.lr)


class Keypoints(L.LightningDataModule):
    def setup(self, stage):
        g = torch.Generator().manual_seed(0)
        self.data = TensorDataset(torch.randn(128, 16, generator=g), torch.randn(128, 4, generator=g))

    def train_dataloader(self):
        return DataLoader(self.data, batch_size=8, shuffle=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--devices", type=int, default=2)
    args = parser.parse_args()
    L.seed_everything(1)
    tuning = BackboneFinetuning(unfreeze_backbone_at_epoch=1, lambda_func=lambda epoch: 1.5)
    trainer = L.Trainer(
        accelerator="cpu", devices=args.devices, strategy="ddp_find_unused_parameters_true", max_epochs=args.epochs, callbacks=[tuning],
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )
    trainer.fit(Pose(), Keypoints())


if __name__ == "__main__":
    main()
