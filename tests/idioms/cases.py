"""The training scripts that are rehearsed, how each is started, and what a user would have beside it."""

from __future__ import annotations

import os
from pathlib import Path

from tests.script_table.model import Script

SCRIPTS = Path(__file__).parent / "scripts"


class Idiom(Script, frozen=True, kw_only=True):
    """One of them, in the structure that well-known public ones have."""

    folder: Path = SCRIPTS


def _tokens(project: Path) -> None:
    (project / "data").mkdir()
    for name in ("train", "val"):
        numbers = [(17 * i + i // 7) % 64 for i in range(3000)]
        (project / "data" / f"{name}.bin").write_bytes(b"".join(number.to_bytes(2, "little") for number in numbers))


def _corpus(project: Path) -> None:
    (project / "corpus" / "more").mkdir(parents=True)
    for number in range(6):
        folder = project / "corpus" / ("more" if number % 2 else ".")
        (folder / f"{number}.txt").write_text(" ".join(str(i * (number + 3)) for i in range(400)))
    (project / "checkpoints").mkdir()
    (project / "checkpoints" / "checkpoint_best.pt").write_bytes(b"of an earlier run")


def _sentences(project: Path) -> None:
    (project / "text").mkdir()
    for name, count in (("train", 120), ("valid", 30)):
        lines = (" ".join(f"w{(i * k) % 23}" for k in range(1, 9)) for i in range(count))
        (project / "text" / f"{name}.txt").write_text("\n".join(lines))


def _earlier_run(project: Path) -> None:
    """A checkpoint, its link and a log of an earlier run."""
    import torch

    network = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 7))
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    (project / "ckpt").mkdir()
    state = {"step": 7, "model": network.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, project / "ckpt" / "step000007.pt")
    (project / "notes.txt").write_text("the run of last week")


def _images(project: Path) -> None:
    import torch

    (project / "cifar").mkdir()
    generator = torch.Generator().manual_seed(0)
    for name, count in (("train", 128), ("test", 48)):
        images = torch.randn(count, 3, 12, 12, generator=generator)
        torch.save((images, torch.randint(10, (count,), generator=generator)), project / "cifar" / f"{name}.pt")
    (project / "runs").mkdir()


def _teacher(project: Path) -> None:
    import torch

    torch.save(
        torch.nn.Sequential(torch.nn.Linear(10, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3)).state_dict(),
        project / "teacher.pt",
    )


def _earlier_experiment(project: Path) -> None:
    (project / "runs" / "train" / "exp").mkdir(parents=True)
    (project / "runs" / "train" / "exp" / "opt.json").write_text("{}")


_HF = (
    *("--output_dir", "hf_out", "--use_cpu", "--per_device_train_batch_size", "4", "--num_train_epochs", "3"),
    *("--eval_strategy", "epoch", "--save_strategy", "epoch", "--save_total_limit", "1", "--load_best_model_at_end"),
    *("--metric_for_best_model", "accuracy", "--logging_steps", "2", "--report_to", "none"),
)

IDIOMS: tuple[Idiom, ...] = (
    Idiom(name="accelerate_text"),
    Idiom(name="callbacks_and_json", entry="main.py"),
    Idiom(
        name="config_by_exec",
        entry="train.py",
        arguments=("config/train_tiny.py", "--batch_size=2"),
        before=_tokens,
        advice=("DDP606",),
    ),
    Idiom(name="distributed_checkpoint", arguments=("--folder", "saved/dcp")),
    Idiom(name="early_stopping"),
    Idiom(name="hf_trainer", arguments=_HF, advice=("DDP202", "DDP203")),
    Idiom(name="knowledge_distillation", arguments=("--teacher", "teacher.pt"), before=_teacher),
    Idiom(name="lightning_module", arguments=("--devices", "2")),
    Idiom(
        name="nested_project",
        entry=os.path.join("tools", "train.py"),
        arguments=("--data", "cifar", "--run", "runs/first"),
        before=_images,
        advice=("DDP205",),
    ),
    Idiom(
        name="object_detection",
        arguments=("--data", "boxes.txt"),
        before=_earlier_experiment,
        advice=("DDP205", "DDP606"),
    ),
    Idiom(name="self_distillation", entry="main.py", advice=("DDP104", "DDP302")),
    Idiom(name="sharded_optimizer"),
    Idiom(name="time_limited", before=_earlier_run),
    Idiom(name="token_stream", arguments=("--corpus", "corpus"), before=_corpus, advice=("DDP313",)),
    Idiom(name="uneven_join"),
    Idiom(name="word_language_model", arguments=("--data", "text"), before=_sentences),
)
