"""Trainings that files or classes of settings put together: what Hydra's ``instantiate`` makes is followed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ddpdoctor.source.queries.subjects import looked_at
from ddpdoctor.source.script.script import read_script
from tests.source.marked import findings_of

ENGINE = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


class Net(nn.Sequential):
    def __init__(self, width, head=None):
        super().__init__(nn.Linear(8, width), nn.Linear(width, 1))


class Numbers(torch.utils.data.Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.full((8,), float(index))


class Loop:
    def __init__(self, model, data, epochs=2, optimizer=None):
        self.model = DDP(model)
        self.sampler = DistributedSampler(data)
        self.loader = DataLoader(data, batch_size=4, sampler=self.sampler)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.epochs = epochs

    def run(self):
        for epoch in range(self.epochs):
            #EPOCH
            for batch in self.loader:
                self.optimizer.zero_grad()
                self.model(batch).mean().backward()
                self.optimizer.step()
"""
MAIN = """
import hydra
import torch.distributed as dist
from omegaconf import DictConfig


@hydra.main(version_base=None, config_path="conf", config_name="train")
def main(cfg: DictConfig):
    dist.init_process_group("gloo")
    {body}
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""
LOOP = """
model, data = hydra.utils.instantiate(cfg.model), hydra.utils.instantiate(cfg.data)
    hydra.utils.instantiate(cfg.loop, model=model, data=data).run()
""".strip()
WHOLE = """
model: {_target_: parts.engine.Net, width: 4}
data: {_target_: parts.engine.Numbers, length: 64}
loop: {_target_: parts.engine.Loop, epochs: 3}
"""
GROUPED = {
    "conf/train.yaml": "_all: {a: [1]}\ndefaults: [_self_, model: small, data: numbers, loop/kind@loop: plain]\n",
    "conf/model/small.yaml": "_target_: parts.engine.Net\nwidth: 4\n",
    "conf/data/numbers.yaml": "_target_: parts.engine.Numbers\nlength: 64\n",
    "conf/loop/kind/plain.yaml": "_target_: parts.engine.Loop\n",
}
GLOBAL = {
    "conf/train.yaml": "defaults: [model: none, data: numbers, _self_, experiment: first, override model: small]\n",
    "conf/model/none.yaml": "_target_: parts.engine.Missing\n",
    "conf/model/small.yaml": "_target_: parts.engine.Net\nwidth: 4\n",
    "conf/data/numbers.yaml": "_target_: parts.engine.Numbers\nlength: 64\n",
    "conf/experiment/first.yaml": "# @package _global_\nloop:\n  _target_: parts.engine.Loop\n",
}
NESTED = """
loop:
  _target_: parts.engine.Loop
  model: {_target_: parts.engine.Net, width: 4, head: {_target_: torch.nn.Linear, in_features: 4, out_features: 1}}
  data: {_target_: parts.engine.Numbers, length: 64}
  optimizer: {_target_: torch.optim.SGD, _partial_: true, lr: 0.1}
"""
COMPOSED = """
import torch.distributed as dist
from hydra import compose, initialize
from hydra.utils import instantiate

dist.init_process_group("gloo")
with initialize(version_base=None, config_path="conf"):
    cfg = compose(config_name="train")
loop = instantiate(cfg.loop, instantiate(cfg["model"]), data=instantiate(cfg.data))
loop.run()
dist.destroy_process_group()
"""
CLASSES = """
from dataclasses import dataclass, field

import hydra
import torch.distributed as dist
from hydra.core.config_store import ConfigStore


@dataclass
class ModelSettings:
    _target_: str = "parts.engine.Net"
    width: int = 4


@dataclass
class DataSettings:
    _target_: str = "parts.engine.Numbers"
    length: int = 64


@dataclass
class Settings:
    seed: int = 1
    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)


ConfigStore.instance().store(name="settings", node=Settings)


@hydra.main(version_base=None, config_path=None, config_name="settings")
def main(cfg: Settings):
    from parts.engine import Loop

    dist.init_process_group("gloo")
    Loop(hydra.utils.instantiate(cfg.model), hydra.utils.instantiate(cfg.data)).run()
    dist.destroy_process_group()


main()
"""
BY_HELPER = """
def made(cfg, **more):
        return hydra.utils.instantiate(cfg, **more)

    made(cfg.loop, model=made(cfg.model), data=made(cfg.data)).run()
"""
PARTIAL = """
loop = hydra.utils.instantiate(cfg.loop)
    loop(model=hydra.utils.instantiate(cfg.model), data=hydra.utils.instantiate(cfg.data)).run()
"""
HANDED_OUT = """
held = []

    @hydra.main(version_base=None, config_path="conf", config_name="train")
    def keep(cfg):
        held.append(OmegaConf.to_container(cfg, resolve=True))

    keep()
    cfg = held[0]
    model, data = hydra.utils.instantiate(cfg["model"]), hydra.utils.instantiate(cfg["data"])
    hydra.utils.instantiate(cfg["loop"], model=model, data=data, _convert_="all").run()
"""
BY_CLASS = """
import pathlib

import hydra
import torch.distributed as dist


@hydra.main(version_base=None, config_path=str(pathlib.Path(__file__).parent.joinpath("conf")))
def main(cfg):
    dist.init_process_group("gloo")
    model, data = hydra.utils.instantiate(cfg.model), hydra.utils.instantiate(cfg.data)
    hydra.utils.get_class(cfg.loop._target_)(model, data).run()
    dist.destroy_process_group()


main()
"""
SHAPES: dict[str, dict[str, str]] = {
    "one file": {"train.py": MAIN.format(body=LOOP), "conf/train.yaml": WHOLE},
    "a file a group, placed elsewhere": {"train.py": MAIN.format(body=LOOP), **GROUPED},
    "an experiment for the whole, an override": {"train.py": MAIN.format(body=LOOP), **GLOBAL},
    "objects within objects": {
        "train.py": MAIN.format(body="hydra.utils.instantiate(cfg.loop).run()"),
        "conf/train.yaml": NESTED,
    },
    "composed by hand": {"train.py": COMPOSED, "conf/train.yaml": WHOLE},
    "classes of settings": {"train.py": CLASSES},
    "a module and a function that settings name": {
        "train.py": MAIN.format(body="getattr(parts, cfg.train.module).start(cfg)").replace(
            "import hydra", "import hydra\nimport parts"
        ),
        "parts/__init__.py": "from parts import plain, other\n",
        "parts/plain.py": "import hydra\n\n\ndef start(cfg):\n    " + LOOP + "\n",
        "parts/other.py": "def start(cfg):\n    pass\n",
        "conf/train.yaml": WHOLE + "train: {module: plain}\n",
    },
    "a module by a text of settings": {
        "train.py": MAIN.format(body='importlib.import_module("parts.%s" % cfg["train"]["module"]).start(cfg)').replace(
            "import hydra", "import importlib\n\nimport hydra"
        ),
        "parts/plain.py": "import hydra\n\n\ndef start(cfg):\n    " + LOOP + "\n",
        "conf/train.yaml": WHOLE + "train: {module: plain}\n",
    },
    "handed out of a function, one part named by another": {
        "train.py": MAIN.replace("import DictConfig", "import OmegaConf")
        .replace(
            'config_name="train")\ndef main(cfg: DictConfig)',
            'config_name="train")\ndef unused(cfg):\n    pass\n\n\ndef main()',
        )
        .format(body=HANDED_OUT.strip()),
        "conf/train.yaml": WHOLE.replace("loop: {", "loop: ${loops.usual}\nloops:\n  usual: {"),
    },
    "a class, of the file that the README names": {
        "train.py": BY_CLASS,
        "conf/large.yaml": WHOLE,
        "conf/other.yaml": "loop: 1\n",
        "README.md": "Start it:\n\n    torchrun --nproc-per-node 2 train.py --config-name=large\n",
    },
    "a helper": {"train.py": MAIN.format(body=BY_HELPER.strip()), "conf/train.yaml": WHOLE},
    "a part of a call": {
        "train.py": MAIN.format(body=PARTIAL.strip()),
        "conf/train.yaml": WHOLE.replace("epochs: 3", "_partial_: true"),
    },
}


def _laid(directory: Path, files: dict[str, str], epoch: str = "pass") -> Path:
    for name, text in {"parts/__init__.py": "", "parts/engine.py": ENGINE.replace("#EPOCH", epoch), **files}.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return directory / "train.py"


@pytest.mark.parametrize("shape", SHAPES)
def test_what_settings_name_is_followed(tmp_path: Path, shape: str) -> None:
    found = findings_of(read_script(_laid(tmp_path, SHAPES[shape])), "DDP102")
    assert [Path(finding.locations[0].file).name for finding in found] == ["engine.py"]


@pytest.mark.parametrize("shape", SHAPES)
def test_nothing_is_wrong_where_each_pass_has_an_order_of_its_own(tmp_path: Path, shape: str) -> None:
    script = read_script(_laid(tmp_path, SHAPES[shape], "self.sampler.set_epoch(epoch)"))
    assert not findings_of(script)
    looked = looked_at(script, ("training", "training-loader", "sampler"), triggered=True)
    assert not looked.gap
    assert not looked.nothing


LIGHTNING = """
import hydra
import lightning.pytorch as pl
import torch


class Module(pl.LightningModule):
    def __init__(self, width):
        super().__init__()
        self.net = torch.nn.Linear(8, width)

    def training_step(self, batch, index):
        return self.net(batch).mean()

    def validation_step(self, batch, index):
        loss = self.net(batch).mean()
        self.log("val_loss", loss{how})

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@hydra.main(version_base=None, config_path="conf", config_name="train")
def main(cfg):
    pl.seed_everything(cfg.seed)
    module = Module(cfg.width)
    trainer = hydra.utils.instantiate(cfg.trainer)
    trainer.fit(module)


if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(("how", "devices", "count"), [("", 4, 1), (", sync_dist=True", 4, 0), ("", 1, 0)])
def test_a_trainer_of_lightning_has_the_ranks_that_its_file_gives_it(
    tmp_path: Path, how: str, devices: int, count: int
) -> None:
    settings = f"seed: 1\nwidth: 2\ntrainer:\n  _target_: lightning.pytorch.trainer.Trainer\n  devices: {devices}\n"
    script = read_script(_laid(tmp_path, {"train.py": LIGHTNING.replace("{how}", how), "conf/train.yaml": settings}))
    assert len(findings_of(script, "DDP606", "DDP105")) == count


def test_a_setting_that_the_command_line_may_change_decides_no_branch(tmp_path: Path) -> None:
    body = LOOP.replace(
        "hydra.utils.instantiate(cfg.loop", "if cfg.train or cfg.get('more'):\n        hydra.utils.instantiate(cfg.loop"
    )
    files = {"train.py": MAIN.format(body=body), "conf/train.yaml": f"train: false\n{WHOLE}"}
    assert findings_of(read_script(_laid(tmp_path, files)), "DDP102")


FABRIC = """
import hydra


@hydra.main(version_base=None, config_path="conf", config_name="train")
def main(cfg):
    fabric = hydra.utils.instantiate(cfg.fabric)
    model, optimizer = fabric.setup(*hydra.utils.instantiate(cfg.parts))
    for batch in fabric.setup_dataloaders(hydra.utils.instantiate(cfg.data)):
        optimizer.zero_grad()
        fabric.backward(model(batch).mean())
        optimizer.step()


main()
"""
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 10))
ALIASES = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9))
UNREADABLE = {
    "no file": None,
    "no YAML": "fabric: [1, {",
    "aliases within aliases": f"{ALIASES}\nfabric: *a8\n",
    "no text": "fabric: \udcff\udcfe",
    "merges within merges": f"{MERGES}fabric: *a9\n",
    "another object": "- fabric\n- data\n",
    "defaults that hold themselves": "defaults: [train]\n",
    "a target that is no name": "fabric: {_target_: 7}\n",
    "a tag of its own": 'fabric: !!python/object/apply:os.system ["touch harmed"]\n',
}


@pytest.mark.parametrize("how", UNREADABLE)
def test_settings_that_cannot_be_read_leave_the_training_unexamined(tmp_path: Path, how: str) -> None:
    script = _laid(tmp_path, {"train.py": FABRIC})
    text = UNREADABLE[how]
    if text is not None:
        (tmp_path / "conf").mkdir()
        (tmp_path / "conf/train.yaml").write_bytes(text.encode("utf-8", "surrogateescape"))
    looked = looked_at(read_script(script), ("training", "training-loader", "sampler"), triggered=False)
    assert "`fabric.backward`" in looked.gap
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize(
    ("directory", "name"),
    [(r"co\0nf", "train"), ("/", "/"), ("round", "train"), ("conf", "../" * 40), ("x" * 5_000, "y")],
)
def test_places_that_cannot_be_looked_at_are_no_settings(tmp_path: Path, directory: str, name: str) -> None:
    (tmp_path / "round").symlink_to("round")
    text = FABRIC.replace('"conf"', f'"{directory}"').replace('"train"', f'"{name}"')
    looked = looked_at(read_script(_laid(tmp_path, {"train.py": text})), ("training",), triggered=False)
    assert "`fabric.backward`" in looked.gap


def test_a_pipe_among_the_settings_is_not_waited_for(tmp_path: Path) -> None:
    script = _laid(tmp_path, {"train.py": FABRIC})
    (tmp_path / "conf").mkdir()
    os.mkfifo(tmp_path / "conf/train.yaml")
    assert not findings_of(read_script(script), "DDP102")
