import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class FineTuner(L.LightningModule):
    def __init__(self, unfreeze_at=2):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 32))
        self.classifier = nn.Linear(32, 3)
        self.unfreeze_at = unfreeze_at
        for p in self.backbone.parameters():
            p.requires_grad = False

    def on_train_epoch_start(self):
        if self.current_epoch == self.unfreeze_at:
            for p in self.backbone.parameters():
                p.requires_grad = True

    def training_step(self, batch, _):
        x, y = batch
        loss = nn.functional.cross_entropy(self.classifier(self.backbone(x)), y)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        opt = torch.optim.SGD(self.parameters(), lr=0.05)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(opt), "monitor": "loss"}}


def main():
    L.seed_everything(1)
    train = TensorDataset(torch.randn(96, 12), torch.randint(0, 3, (96,)))
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=4, logger=False, enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(FineTuner(), DataLoader(train, batch_size=8, shuffle=True))


if __name__ == "__main__":
    main()
