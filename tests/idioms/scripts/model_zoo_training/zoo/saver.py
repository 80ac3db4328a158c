"""Keeps the best few checkpoints, a link-like copy of the last one, and one for recovery."""

import glob
import operator
import os
import shutil

import torch


class CheckpointSaver:
    def __init__(self, model, optimizer, model_ema=None, checkpoint_dir="", recovery_dir="", max_history=2):
        self.model, self.optimizer, self.model_ema = model, optimizer, model_ema
        self.checkpoint_files = []
        self.best_epoch = None
        self.best_metric = None
        self.curr_recovery_file = ""
        self.last_recovery_file = ""
        self.checkpoint_dir = checkpoint_dir
        self.recovery_dir = recovery_dir
        self.extension = ".pth.tar"
        self.max_history = max_history
        self.cmp = operator.gt

    def save_checkpoint(self, epoch, metric):
        tmp_save_path = os.path.join(self.checkpoint_dir, "tmp" + self.extension)
        last_save_path = os.path.join(self.checkpoint_dir, "last" + self.extension)
        self._save(tmp_save_path, epoch, metric)
        if os.path.exists(last_save_path):
            os.unlink(last_save_path)
        os.rename(tmp_save_path, last_save_path)
        worst_file = self.checkpoint_files[-1] if self.checkpoint_files else None
        if len(self.checkpoint_files) < self.max_history or metric is None or self.cmp(metric, worst_file[1]):
            if len(self.checkpoint_files) >= self.max_history:
                self._cleanup_checkpoints(1)
            save_path = os.path.join(self.checkpoint_dir, f"checkpoint-{epoch}{self.extension}")
            os.link(last_save_path, save_path)
            self.checkpoint_files.append((save_path, metric))
            self.checkpoint_files = sorted(self.checkpoint_files, key=lambda x: x[1], reverse=True)
            if self.best_metric is None or self.cmp(metric, self.best_metric):
                self.best_epoch, self.best_metric = epoch, metric
                best_save_path = os.path.join(self.checkpoint_dir, "model_best" + self.extension)
                if os.path.exists(best_save_path):
                    os.unlink(best_save_path)
                shutil.copyfile(last_save_path, best_save_path)
        return self.best_metric, self.best_epoch

    def save_recovery(self, epoch, batch_idx=0):
        filename = f"recovery-{epoch}-{batch_idx}{self.extension}"
        save_path = os.path.join(self.recovery_dir, filename)
        self._save(save_path, epoch)
        if os.path.exists(self.last_recovery_file):
            os.remove(self.last_recovery_file)
        self.last_recovery_file = self.curr_recovery_file
        self.curr_recovery_file = save_path

    def find_recovery(self):
        files = glob.glob(os.path.join(self.recovery_dir, "recovery-*"))
        return max(files, default="")

    def _save(self, save_path, epoch, metric=None):
        save_state = {"epoch": epoch, "state_dict": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        if self.model_ema is not None:
            save_state["state_dict_ema"] = self.model_ema.module.state_dict()
        if metric is not None:
            save_state["metric"] = metric
        torch.save(save_state, save_path)

    def _cleanup_checkpoints(self, trim=0):
        trim = min(len(self.checkpoint_files), trim)
        delete_index = self.max_history - trim
        for old_file, _ in self.checkpoint_files[delete_index:]:
            os.remove(old_file)
        self.checkpoint_files = self.checkpoint_files[:delete_index]
