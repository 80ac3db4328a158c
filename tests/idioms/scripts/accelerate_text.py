"""Accelerate: prepare, accumulate, gather for metrics, state saved per epoch, the one before removed."""

import argparse
import logging
import shutil

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset


class Sentences(Dataset):
    """Token ids of different lengths whose label is which half of the vocabulary prevails."""

    def __init__(self, size, seed):
        generator = torch.Generator().manual_seed(seed)
        self.rows = [torch.randint(1, 50, (int(n),), generator=generator) for n in torch.randint(3, 12, (size,), generator=generator)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        return {"input_ids": row, "labels": int((row > 25).float().mean() > 0.5)}


def collate(batch):
    ids = nn.utils.rnn.pad_sequence([item["input_ids"] for item in batch], batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": torch.tensor([b["labels"] for b in batch])}


class Classifier(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.embedding = nn.Embedding(50, width, padding_idx=0)
        self.classifier = nn.Sequential(nn.Dropout(0.1), nn.Linear(width, 2))

    def forward(self, input_ids, attention_mask, labels=None):
        mask = attention_mask[:, :, None]
        pooled = (self.embedding(input_ids) * mask).sum(1) / mask.sum(1)
        logits = self.classifier(pooled)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return loss, logits


def training_function(config, args):
    accelerator = Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps, project_dir=args.output_dir
    )
    logging.basicConfig(level=logging.INFO if accelerator.is_local_main_process else logging.ERROR)
    set_seed(config["seed"])
    with accelerator.main_process_first():
        train_set, eval_set = Sentences(160, 0), Sentences(50, 1)
    train_dataloader = DataLoader(train_set, shuffle=True, collate_fn=collate, batch_size=config["batch_size"])
    eval_dataloader = DataLoader(eval_set, shuffle=False, collate_fn=collate, batch_size=config["batch_size"])
    model = Classifier()
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=config["lr"])
    total = len(train_dataloader) * config["num_epochs"]
    lr_scheduler = LambdaLR(optimizer, lambda step: max(0.0, 1.0 - step / total))
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    for epoch in range(config["num_epochs"]):
        model.train()
        total_loss = 0.0
        for batch in train_dataloader:
            with accelerator.accumulate(model):
                loss, _ = model(**batch)
                total_loss += loss.detach().float()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
        model.eval()
        correct = seen = 0
        for batch in eval_dataloader:
            with torch.no_grad():
                _, logits = model(**batch)
            predictions, references = accelerator.gather_for_metrics((logits.argmax(dim=-1), batch["labels"]))
            correct += (predictions == references).sum().item()
            seen += len(references)
        accelerator.print(f"epoch {epoch}: accuracy {correct / seen:.3f}")
        accelerator.save_state(f"{args.output_dir}/epoch_{epoch}")
        if accelerator.is_main_process and epoch > 0:
            shutil.rmtree(f"{args.output_dir}/epoch_{epoch - 1}")
    accelerator.wait_for_everyone()
    unwrapped = accelerator.unwrap_model(model)
    accelerator.save(unwrapped.state_dict(), f"{args.output_dir}/final.bin")
    accelerator.end_training()


def main():
    parser = argparse.ArgumentParser(description="Simple example of training script.")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--output_dir", default="accelerated")
    args = parser.parse_args()
    training_function({"lr": 2e-3, "num_epochs": 3, "seed": 42, "batch_size": 8}, args)


if __name__ == "__main__":
    main()
