"""Settings as dataclasses, read from one JSON file."""

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass
class ModelConfig:
    width: int
    depth: int


@dataclass
class DataConfig:
    size: int
    workers: int
    batch: int


@dataclass
class TrainerConfig:
    max_iters: int
    learning_rate: float
    grad_norm_clip: float
    snapshot: str


def load(path):
    raw = json.loads(Path(path).read_text())
    return ModelConfig(**raw["model"]), DataConfig(**raw["data"]), TrainerConfig(**raw["trainer"])
