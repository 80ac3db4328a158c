"""Puts the parts together; the package is found by a path that the script adds itself."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import torch
import torch.distributed as dist
from project.settings import load
from project.task import SortDataset, Sorter
from project.trainer import Trainer


def verify_min_ranks(min_ranks=2):
    return int(os.environ.get("WORLD_SIZE", "1")) >= min_ranks


def main(config_path):
    model_config, data_config, trainer_config = load(config_path)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    model = Sorter(model_config.width, model_config.depth)
    trainer = Trainer(trainer_config, data_config, model, SortDataset(data_config.size))

    def batch_end_callback(trainer):
        if trainer.iter_num % 10 == 0 and trainer.is_chief:
            print(f"iter {trainer.iter_num}: loss {trainer.loss.item():.5f}, {trainer.iter_dt * 1000:.1f} ms")

    def snapshot_callback(trainer):
        if trainer.iter_num == 5 and trainer.is_chief:
            torch.save(
                {"model": trainer.model.module.state_dict(), "iteration": trainer.iter_num}, trainer_config.snapshot
            )

    trainer.add_callback("on_batch_end", batch_end_callback)
    trainer.add_callback("on_batch_end", snapshot_callback)
    trainer.run()
    dist.destroy_process_group()


if __name__ == "__main__":
    if not verify_min_ranks():
        print("this example wants torchrun with at least 2 ranks")
        sys.exit(1)
    main(sys.argv[1] if len(sys.argv) > 1 else "config.json")
