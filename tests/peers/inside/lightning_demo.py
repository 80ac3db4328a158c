"""Trains Lightning's own demo model on two ranks of the CPU, as its documentation does."""

import lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel, ManualOptimBoringModel

if __name__ == "__main__":
    for model in (BoringModel(), ManualOptimBoringModel()):
        trainer = pl.Trainer(
            max_epochs=2,
            accelerator="cpu",
            devices=2,
            strategy="ddp",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        trainer.fit(model)
