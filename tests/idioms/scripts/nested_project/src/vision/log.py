"""What is written down, by the first rank only."""

import csv
import functools
import os


def rank_zero_only(fn):
    @functools.wraps(fn)
    def wrapped(*args, **kwargs):
        if int(os.environ.get("RANK", 0)) == 0:
            return fn(*args, **kwargs)
        return None

    return wrapped


class Logger:
    """Scalars to TensorBoard and to a table."""

    def __init__(self, folder):
        self.folder = folder
        self.writer = None
        self._open()

    @rank_zero_only
    def _open(self):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(self.folder)
        self.table = open(os.path.join(self.folder, "log.csv"), "w", newline="")
        csv.writer(self.table).writerow(["epoch", "name", "value"])

    @rank_zero_only
    def scalar(self, name, value, epoch):
        self.writer.add_scalar(name, value, epoch)
        csv.writer(self.table).writerow([epoch, name, f"{value:.6f}"])
        self.table.flush()

    @rank_zero_only
    def close(self):
        self.writer.close()
        self.table.close()
