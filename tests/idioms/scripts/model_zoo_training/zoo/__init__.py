"""Models, averages and checkpoints of the training script."""

from .averaging import ModelEma, distribute_bn, reduce_tensor
from .saver import CheckpointSaver

__all__ = ["CheckpointSaver", "ModelEma", "distribute_bn", "reduce_tensor"]
