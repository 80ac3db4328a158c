"""The Hugging Face Trainer on a tiny model made from a config, arguments as dataclasses."""

import sys
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)


@dataclass
class ModelArguments:
    hidden_size: int = field(default=32, metadata={"help": "Width of the encoder"})
    num_hidden_layers: int = field(default=1, metadata={"help": "Depth of the encoder"})


@dataclass
class DataArguments:
    train_size: int = field(default=96)
    max_seq_length: int = field(default=12)


class Pairs(Dataset):
    def __init__(self, size, length, seed):
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(5, 100, (size, length), generator=generator)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        row = self.ids[index]
        return {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": int(row[0] > row[-1])}


def compute_metrics(prediction):
    labels = np.argmax(prediction.predictions, axis=1)
    return {"accuracy": float((labels == prediction.label_ids).mean())}


def main():
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    if len(sys.argv) == 2 and sys.argv[1].endswith(".json"):
        model_args, data_args, training_args = parser.parse_json_file(json_file=sys.argv[1])
    else:
        model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)
    config = BertConfig(
        vocab_size=100,
        hidden_size=model_args.hidden_size,
        num_hidden_layers=model_args.num_hidden_layers,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
    )
    model = BertForSequenceClassification(config)
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=Pairs(data_args.train_size, data_args.max_seq_length, 0),
        eval_dataset=Pairs(32, data_args.max_seq_length, 1),
        compute_metrics=compute_metrics,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=3)],
    )
    result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()
    trainer.log_metrics("train", result.metrics)
    trainer.save_metrics("train", result.metrics)
    trainer.save_state()
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)


if __name__ == "__main__":
    main()
