"""A trainer that knows nothing of the task: callbacks, an endless iterator, a step budget."""

import time
from collections import defaultdict

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


class Trainer:
    def __init__(self, config, data_config, model, train_dataset):
        self.config = config
        self.data_config = data_config
        self.optimizer = None
        self.train_dataset = train_dataset
        self.callbacks = defaultdict(list)
        self.model = DistributedDataParallel(model)
        self.iter_num = 0
        self.iter_dt = 0.0
        self.loss = None

    def add_callback(self, onevent, callback):
        self.callbacks[onevent].append(callback)

    def trigger_callbacks(self, onevent):
        for callback in self.callbacks.get(onevent, []):
            callback(self)

    @property
    def is_chief(self):
        return dist.get_rank() == 0

    def run(self):
        sampler = DistributedSampler(self.train_dataset, shuffle=True, seed=17)
        train_loader = DataLoader(
            self.train_dataset,
            sampler=sampler,
            batch_size=self.data_config.batch,
            num_workers=self.data_config.workers,
            persistent_workers=self.data_config.workers > 0,
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.config.learning_rate)
        self.model.train()
        iter_time = time.time()
        epoch = 0
        sampler.set_epoch(epoch)
        data_iter = iter(train_loader)
        while True:
            try:
                batch = next(data_iter)
            except StopIteration:
                epoch += 1
                sampler.set_epoch(epoch)
                data_iter = iter(train_loader)
                batch = next(data_iter)
            x, y = batch

            _, self.loss = self.model(x, y)
            self.model.zero_grad(set_to_none=True)
            self.loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_norm_clip)
            self.optimizer.step()

            self.trigger_callbacks("on_batch_end")
            self.iter_num += 1
            self.iter_dt, iter_time = time.time() - iter_time, time.time()
            if self.config.max_iters is not None and self.iter_num >= self.config.max_iters:
                break
