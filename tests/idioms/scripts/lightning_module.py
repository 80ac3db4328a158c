"""A LightningModule and DataModule under torchrun, with checkpoint and early-stopping callbacks and a CSV logger."""

import argparse

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class Digits(L.LightningDataModule):
    def __init__(self, batch_size=8):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(224, 12, generator=generator)
        full = TensorDataset(x, x[:, :4].argmax(dim=1))
        self.train, self.val = random_split(full, [160, 64], generator=torch.Generator().manual_seed(1))

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True, num_workers=1, persistent_workers=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=self.batch_size)


class LitClassifier(L.LightningModule):
    def __init__(self, hidden=16, learning_rate=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(12, hidden), nn.ReLU(), nn.Linear(hidden, 4))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("val_loss", loss, sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--max_epochs", type=int, default=4)
    args = parser.parse_args()
    L.seed_everything(3, workers=True)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy="ddp",
        max_epochs=args.max_epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        num_sanity_val_steps=1,
        logger=CSVLogger("lightning_logs"),
        callbacks=[
            ModelCheckpoint(dirpath="lightning_checkpoints", monitor="val_loss", save_top_k=2, save_last=True),
            EarlyStopping(monitor="val_loss", patience=3),
        ],
        log_every_n_steps=2,
    )
    model = LitClassifier()
    trainer.fit(model, datamodule=Digits())
    if trainer.is_global_zero:
        print(f"best checkpoint: {trainer.checkpoint_callback.best_model_path}")


if __name__ == "__main__":
    main()
