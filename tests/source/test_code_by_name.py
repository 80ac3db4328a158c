"""Code that a setting names: a module that is imported by its name, and a member of a table of many.

What the default of the setting names is followed, wherever more would have to be followed than can be. The mark is in
that code; members that nothing names by default are left alone, and no condition is decided by a default.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from ddpdoctor.source.interpreter.values import RANKS, Const, PerRank, is_varying, join
from ddpdoctor.source.script.script import read_script
from ddpdoctor.source.script.written_paths import UNKNOWN_PART, may_be
from tests.source.marked import HEAD, places, written

PARSER = """
import argparse

def options():
    parser = argparse.ArgumentParser()
    parser.add_argument("--trainer", default="plain")
    parser.add_argument("--n", type=int, default=1)
    return parser.parse_args()
"""
JOIN = 'dist.init_process_group("gloo")\n'
BAD = """
def fit(args):
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))  # DDP301
"""
GOOD = """
def fit(args):
    dist.all_reduce(torch.ones(1))
"""
Files = dict[str, str]


def classes(*numbers: int, base: str = "") -> str:
    """Return classes of which each trains by itself, that of each number in order."""
    return "".join(
        f"""
class Way{number}{f"({base})" if base else ""}:
    def fit(self):
        dist.all_reduce(torch.ones({number}))
"""
        for number in numbers
    )


def with_fault(text: str, number: int) -> str:
    """Return classes with one that waits for the first rank alone."""
    call = f"dist.all_reduce(torch.ones({number}))"
    assert call in text
    return text.replace(call, f"(dist.get_rank() == 0 and {call})  # DDP301")


TABLE = "TABLE = {" + ", ".join(f'"way{number}": Way{number}' for number in range(30)) + "}\n"
OPTION = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--way", default="way7")
args = parser.parse_args()
"""
LIGHTNING = """
import pytorch_lightning as pl

class Base(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = self.build()
        self.criterion = nn.MSELoss()

    def build(self):
        raise NotImplementedError

    def training_step(self, batch, number):
        return self.criterion(self.model(batch[0]), batch[1])

    def validation_step(self, batch, number):
        self.log("val_loss", self.criterion(self.model(batch[0]), batch[1]))  # DDP606
"""
LIGHTNING_TABLE = (
    "from .base import Base\n"
    + "".join(f"\nclass Net{n}(Base):\n    def build(self):\n        return nn.Linear(4, {n})\n" for n in range(1, 13))
    + "\nNETS = {"
    + ", ".join(f'"net{n}": Net{n}' for n in range(1, 13))
    + "}\n"
)

NAMED: dict[str, Files] = {
    "a module of a folder without a package's file, by format and __import__": {
        "train.py": JOIN
        + "from lib.options import options\nargs = options()\n"
        + 'Trainer = getattr(__import__("lib.trainers.{}".format(args.trainer), fromlist=["Trainer"]), "Trainer")\n'
        + "Trainer(args).run()\n",
        "lib/options.py": PARSER,
        "lib/trainers/plain.py": BAD
        + "\nclass Trainer:\n    def __init__(self, args):\n        self.args = args\n"
        + "    def run(self):\n        fit(self.args)\n",
    },
    "a module by the field of a dataclass": {
        "train.py": JOIN
        + "import importlib\nfrom settings import Settings\ncfg = Settings()\n"
        + 'importlib.import_module(f"models.{cfg.name}").fit(cfg)\n',
        "settings.py": "from dataclasses import dataclass\n\n@dataclass\nclass Settings:\n    name: str = 'unet'\n",
        "models/__init__.py": "",
        "models/unet.py": BAD,
        **{f"models/other{n}.py": GOOD for n in range(12)},
    },
    "a module by what a function is given, put together before": {
        "train.py": JOIN
        + "from lib.options import options\nfrom lib.load import run\nargs = options()\n"
        + 'run("lib.ways." + args.trainer, args)\n',
        "lib/__init__.py": "",
        "lib/options.py": PARSER,
        "lib/load.py": "from importlib import import_module\n\ndef run(where, args):\n"
        + "    module = import_module(where)\n    module.fit(args)\n",
        "lib/ways/__init__.py": "",
        "lib/ways/plain.py": BAD,
        **{f"lib/ways/other{n}.py": GOOD for n in range(12)},
    },
    "one of few modules, by no default": {
        "train.py": JOIN
        + "import importlib, sys\nway = importlib.import_module('ways.%s' % sys.argv[1])\nway.fit(None)\n",
        "ways/plain.py": BAD,
        "ways/common.py": "NUMBER = 1\n",
    },
    "a relative name": {
        "train.py": JOIN
        + "from ways import build\nfrom options import options\nargs = options()\nbuild(args.trainer).fit(args)\n",
        "options.py": PARSER,
        "ways/__init__.py": "import importlib\n\ndef build(name):\n"
        + '    return importlib.import_module("." + name, package=__package__)\n',
        "ways/plain.py": BAD,
        **{f"ways/other{n}.py": GOOD for n in range(12)},
    },
    "the package that __import__ gives": {
        "train.py": JOIN + '__import__("lib.plain").plain.fit(None)\n',
        "lib/plain.py": BAD,
    },
    "modules that are imported for what they register": {
        "train.py": JOIN
        + "import os, importlib\nfrom registry import build\n"
        + 'for file in os.listdir("ways"):\n    importlib.import_module("ways." + file[:-3])\n'
        + 'parser = __import__("argparse").ArgumentParser()\nparser.add_argument("--way", default="way7")\n'
        + "build(parser.parse_args().way).fit()\n",
        "registry.py": "WAYS = {}\n\ndef register(cls):\n    WAYS[cls.__name__.lower()] = cls\n    return cls\n"
        + "\ndef build(name):\n    return WAYS[name]()\n",
        **{
            f"ways/of{n}.py": "from registry import register\n\n@register"
            + (with_fault(classes(n), n) if n == 7 else classes(n))
            for n in range(12)
        },
    },
    "a list of modules with classes of one base, by no default": {
        "train.py": JOIN + "from ways import build\nbuild(eval(open('options.txt').read())).run()\n",
        "ways/__init__.py": "from importlib import import_module\nfrom .base import WAYS\n"
        + "found = [import_module(f'ways.{file[:-3]}') for file in os.listdir('ways')]\n"
        + "\ndef build(options):\n    return WAYS.get(options.pop('type'))(**options)\n",
        "ways/base.py": "class Registry:\n    def __init__(self):\n        self.held = {}\n"
        + "    def enter(self, name, cls):\n        assert name not in self.held\n        self.held[name] = cls\n"
        + "    def register(self, cls=None):\n        if cls is None:\n            def keep(cls):\n"
        + "                self.enter(cls.__name__, cls)\n                return cls\n            return keep\n"
        + "        self.enter(cls.__name__, cls)\n"
        + "    def get(self, name):\n        found = self.held.get(name)\n        if found is None:\n"
        + "            raise KeyError(name)\n        return found\n\nWAYS = Registry()\n"
        + "\nclass Base:\n    def run(self):\n        if dist.get_rank() == 0:\n"
        + "            dist.all_reduce(torch.ones(50))  # DDP301\n",
        **{
            f"ways/of{n}.py": "from .base import Base, WAYS\n\n@WAYS.register()" + classes(n, base="Base")
            for n in range(12)
        },
    },
    "a table of 30 classes": {
        "train.py": JOIN + OPTION + "from ways import TABLE\nTABLE[args.way]().fit()\n",
        "ways.py": with_fault(classes(*range(30)), 7) + TABLE,
    },
    "a table by a setting that is made lower first": {
        "train.py": JOIN
        + OPTION.replace("way7", "Way7")
        + "from ways import TABLE\n\nclass Job:\n    def __init__(self, args):\n        self.args = args\n"
        + "        self.args.way = self.args.way.lower()\n        self.way = TABLE[self.args.way]()\n"
        + "\nJob(args).way.fit()\n",
        "ways.py": with_fault(classes(*range(30)), 7) + TABLE,
    },
    "a registry of functions, an option of click": {
        "train.py": "import click\nfrom registry import build\n\n@click.command()\n"
        + '@click.option("--way-to-train", default="way7")\ndef main(way_to_train):\n'
        + '    dist.init_process_group("gloo")\n'
        + "    build(way_to_train)()\n\nmain()\n",
        "registry.py": "class Registry:\n    def __init__(self):\n        self.held = {}\n"
        + "    def register(self, name):\n        def keep(function):\n            self.held[name] = function\n"
        + "            return function\n        return keep\n    def get(self, name):\n        return self.held[name]\n"
        + "\nWAYS = Registry()\n\ndef build(name):\n    return WAYS.get(name)\n"
        + "".join(
            f'\n@WAYS.register("way{n}")\ndef run{n}():\n'
            + (BAD if n == 7 else GOOD).partition("\n")[2].partition("\n")[2]
            for n in range(12)
        ),
    },
    "the globals of a module, a dict of settings": {
        "train.py": JOIN
        + 'from ways import pick\nCONFIG = {"way": "Way7", "n": 1}\n\ndef settings(path):\n'
        + "    return {**CONFIG, **eval(open(path).read())}\n\n"
        + 'config = settings("c.txt")\npick(config["way"])().fit()\n',
        "ways.py": with_fault(classes(*range(12)), 7) + "\ndef pick(name):\n    return globals()[name]\n",
    },
    "a function of a module, by getattr": {
        "train.py": JOIN + OPTION + "import ways\ngetattr(ways, args.way)(args)\n",
        "ways.py": "".join((BAD if n == 7 else GOOD).replace("def fit", f"def way{n}") for n in range(12)),
    },
    "the dict of a module, the default of a parameter": {
        "train.py": JOIN
        + "import ways\n\ndef main(way='way7', **rest):\n    ways.__dict__[way](rest)\n\nmain(**dict(os.environ))\n",
        "ways.py": "".join((BAD if n == 7 else GOOD).replace("def fit", f"def way{n}") for n in range(12)),
    },
    "a table of classes of one base, by no default": {
        "train.py": JOIN + "from ways import TABLE\nTABLE[sys.argv[1]]().run()\n",
        "ways.py": with_fault(
            "class Base:\n    def run(self):\n        dist.all_reduce(torch.ones(50))\n        self.fit()\n", 50
        )
        + classes(*range(30), base="Base")
        + TABLE,
    },
}


def project(directory: Path, files: Files) -> Path:
    """Write a project with nothing but its entry known of it; return that."""
    for name, text in files.items():
        written(directory, text, name, head=HEAD)
    return directory / "train.py"


def marked(directory: Path) -> list[tuple[str, int]]:
    found = []
    for path in directory.rglob("*.py"):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if line.endswith("  # DDP301"):
                found.append(("DDP301", number))
    return found


@pytest.mark.parametrize("way", NAMED)
def test_code_that_a_setting_names_is_followed(way: str, tmp_path: Path) -> None:
    path = project(tmp_path, NAMED[way])
    assert len(marked(tmp_path)) == 1
    assert places(path, "DDP301") == marked(tmp_path)


@pytest.mark.parametrize("way", NAMED)
def test_the_same_code_on_every_rank_is_in_order(way: str, tmp_path: Path) -> None:
    files = {
        name: text.replace("if dist.get_rank() == 0:", "if True:").replace("dist.get_rank() == 0 and ", "")
        for name, text in NAMED[way].items()
    }
    assert places(project(tmp_path, files), "DDP301") == []


@pytest.mark.parametrize("way", [way for way in NAMED if "no default" not in way and "package that" not in way])
def test_what_no_default_names_is_left_alone(way: str, tmp_path: Path) -> None:
    changed = {"plain": "other3", "way7": "way3", "Way7": "Way3", "'unet'": "'other3'"}
    files = dict(NAMED[way])
    if "lib/trainers/plain.py" in files:
        files |= {f"lib/trainers/other{n}.py": GOOD + "\nTrainer = None\n" for n in range(12)}
    options = [name for name, text in files.items() if any(f"{old}" in text for old in changed)]
    for name in options:
        for old, new in changed.items():
            for start in ('default="', '"way": "', "way='", ": str = "):
                files[name] = files[name].replace(f"{start}{old}", f"{start}{new}")
    assert files != NAMED[way]
    assert places(project(tmp_path, files), "DDP301") == []


def test_a_variable_of_another_function_is_no_default(tmp_path: Path) -> None:
    text = JOIN + "from ways import TABLE\nTABLE[sys.argv[1:].way]().fit()\n\ndef other():\n    way = 'way7'\n"
    files = {"train.py": text, "ways.py": with_fault(classes(*range(30)), 7) + TABLE}
    assert places(project(tmp_path, files), "DDP301") == []


def test_a_default_decides_no_condition(tmp_path: Path) -> None:
    text = """
    from ways import TABLE
    TABLE[args.way]().fit()
    if args.way == "way3":
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(1))  # DDP301
    """
    files = {"train.py": JOIN + OPTION + textwrap.dedent(text), "ways.py": classes(*range(30)) + TABLE}
    assert places(project(tmp_path, files), "DDP301") == marked(tmp_path)


@pytest.mark.parametrize("default", [', default="net7"', ""], ids=["by default", "by no default"])
@pytest.mark.parametrize("synchronised", [False, True])
def test_what_lightning_trains_is_followed(default: str, synchronised: bool, tmp_path: Path) -> None:
    entry = f"""
    import argparse
    from pytorch_lightning import Trainer
    from nets.table import NETS

    parser = argparse.ArgumentParser()
    parser.add_argument("--net"{default})
    net = NETS[parser.parse_args().net]()
    Trainer(devices=4, strategy="ddp").fit(net)
    """
    base = LIGHTNING.replace("batch[1]))  #", "batch[1]), sync_dist=True)  #") if synchronised else LIGHTNING
    files = {"train.py": entry, "nets/__init__.py": "", "nets/base.py": base, "nets/table.py": LIGHTNING_TABLE}
    path = project(tmp_path, {name: textwrap.dedent(text) for name, text in files.items()})
    assert [code for code, _ in places(path, "DDP606")] == ([] if synchronised else ["DDP606"])


def test_a_module_that_two_arms_import_is_run_for_both(tmp_path: Path) -> None:
    text = """
    if len(sys.argv) > 1:
        from second import NUMBER
    else:
        from ways import Way1
        Way1().fit()
    """
    files = {
        "train.py": JOIN + textwrap.dedent(text),
        "second.py": "from ways import Way1\nNUMBER = 1\n",
        "ways.py": with_fault(classes(1), 1),
    }
    assert places(project(tmp_path, files), "DDP301") == marked(tmp_path)


@pytest.mark.parametrize("test", ["args.main", "args.rank < 100"])
@pytest.mark.parametrize("rank", ["args.rank += index", "args.rank = args.rank + index"])
def test_a_number_that_is_added_to_a_rank_makes_the_rank(rank: str, test: str, tmp_path: Path) -> None:
    text = f"""
    def begin(args):
        args.gpus = torch.cuda.device_count()
        if "SLURM_JOB_ID" in os.environ:
            args.rank = int(os.getenv("SLURM_NODEID")) * args.gpus
        else:
            args.rank = 0

    def work(index, args):
        if args.cluster:
            args.rank = args.job.global_rank
        else:
            {rank}
        dist.init_process_group("gloo", rank=args.rank, world_size=args.size)
        args.main = args.rank == 0
        model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
        if {test}:
            torch.save(model.state_dict(), "model.pt")

    if __name__ == "__main__":
        args = options()
        begin(args)
        mp.spawn(work, args=(args,), nprocs=args.gpus)
    """
    found = places(written(tmp_path, PARSER + textwrap.dedent(text)), "DDP601")
    assert [code for code, _ in found] == ([] if test == "args.main" else ["DDP601"])


@pytest.mark.parametrize(
    "name",
    [
        "'ways.' + " + " + ".join(["name"] * 3000),
        "'ways.' + " + "('a' + " * 90 + "name" + ")" * 90,
        "'{}'.format(" * 90 + "name" + ")" * 90,
        "'{b}.{a}'.format(a='plain', b=name)",
        "'%s.%s' % name",
        "'..' + name",
        "''",
        "name",
    ],
    ids=range(8),
)
def test_a_name_of_any_form_is_read(name: str, tmp_path: Path) -> None:
    text = JOIN + f"import importlib\nname = sys.argv[1]\nimportlib.import_module({name}).fit(None)\n"
    files = {"train.py": text, "ways/plain.py": BAD, **{f"ways/other{n}.py": GOOD for n in range(12)}}
    assert places(project(tmp_path, files), "DDP301") == []


@pytest.mark.parametrize(
    ("template", "name", "fits"),
    [
        ("ways.?", "ways.plain", True),
        ("ways.?", "ways.", True),
        ("ways.?", "ways.deep.plain", False),
        ("run_?_on_?", "run_this_on_that", True),
        ("run_?_on_?", "run_this", False),
        ("?_?", "a_b_c", True),
        ("ab?ba", "aba", False),
        ("?", "any", True),
        ("plain", "plain", True),
        ("?_" * 40 + "!", "_" * 79, False),
    ],
)
def test_a_name_fits_what_is_known_of_it(template: str, name: str, fits: bool) -> None:
    assert may_be(template.replace("?", UNKNOWN_PART), name) is fits


def test_one_of_two_numbers_that_differ_by_rank_differs_by_rank() -> None:
    one, other = (PerRank(tuple(Const(first + rank) for rank in RANKS)) for first in (0, 4))
    assert is_varying(join(one, other))


def test_a_trainer_behind_thirty_modules_is_read(tmp_path: Path) -> None:
    files = {
        "train.py": JOIN + OPTION + "import parts\nimport ways\ngetattr(ways, args.way)()\n",
        "parts/__init__.py": "".join(f"from . import part{n}\n" for n in range(40)),
        **{f"parts/part{n}.py": "NUMBER = 1\n" for n in range(40)},
        "ways.py": "from deep import " + ", ".join(f"way{n}" for n in range(12)) + "\n",
        "deep.py": "import torch\n"
        + "".join(f"\ndef way{n}(model, batch):\n    model(batch).sum().backward()\n" for n in range(12)),
    }
    for name, text in files.items():
        written(tmp_path, text, name, head=HEAD if name == "train.py" else "")
    assert "deep" in {module.name for module in read_script(tmp_path / "train.py").modules}


REGISTRY = """
TRAINERS = {}

def register(name):
    def add(cls):
        TRAINERS[name] = cls
        return cls
    return add
"""
OF_LIST = 'for name in ["way1", "way2"]:\n    '
REGISTERING = {
    "a list": "import importlib\n" + OF_LIST + 'importlib.import_module(f"ways.{name}")\n',
    "a list, joined": "import importlib\n" + OF_LIST + 'importlib.import_module(".".join(["ways", name]))\n',
    "a list, by its own name": "from importlib import import_module\n"
    + OF_LIST
    + 'import_module(__name__ + "." + name)\n',
    "the files of its folder": """
import importlib
for file in os.listdir(os.path.dirname(__file__)):
    if file.endswith(".py") and not file.startswith("_"):
        importlib.import_module("ways." + file[:-3])
""",
    "what pkgutil finds": """
import importlib, pkgutil
for _, name, _ in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{name}")
""",
    "a pattern of files": """
import glob, importlib
for file in glob.glob(os.path.join(os.path.dirname(__file__), "*.py")):
    if not file.endswith("__init__.py"):
        importlib.import_module("ways." + os.path.basename(file)[:-3])
""",
    "a function": """
import importlib
def import_all(names):
    for name in names:
        importlib.import_module("." + name, package=__package__)
import_all(["way1", "way2"])
""",
}


@pytest.mark.parametrize("faulty", [1, 2])
@pytest.mark.parametrize("way", REGISTERING)
def test_modules_that_are_imported_for_what_they_register_are_run(way: str, faulty: int, tmp_path: Path) -> None:
    import_them = "import ways\nfrom ways.registry import TRAINERS\n"
    files = {
        "train.py": JOIN + PARSER + import_them + "TRAINERS[options().trainer]().fit()\n",
        "ways/__init__.py": REGISTERING[way],
        "ways/registry.py": REGISTRY,
    }
    for number in (1, 2):
        text = classes(number)
        text = with_fault(text, number) if number == faulty else text
        head = "from ways.registry import register\n"
        files[f"ways/way{number}.py"] = head + text.replace("class Way", f'@register("way{number}")\nclass Way')
    path = project(tmp_path, files)
    assert places(path, "DDP301") == marked(tmp_path)
