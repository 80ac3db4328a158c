from __future__ import annotations

import gc
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from ddpdoctor.errors import UsageError
from ddpdoctor.source.interpreter.memory import MAXIMUM_STEPS
from ddpdoctor.source.projection import project, whole_projection
from ddpdoctor.source.queries.job_kind import starts_own_ranks, wants_cuda
from ddpdoctor.source.script.module import Module, deep_recursion
from ddpdoctor.source.script.script import MAXIMUM_BYTES, read_script, take_gap
from tests.machine_speed import is_within
from tests.source.marked import findings_of, written


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        read_script(tmp_path / "train.py")


def test_directory(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a directory"):
        read_script(tmp_path)


def test_file_that_is_not_python(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text("a: 1\n")
    with pytest.raises(UsageError, match="not a Python file"):
        read_script(path)


def test_syntax_error_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("import os\n\ndef main(:\n    pass\n")
    with pytest.raises(UsageError, match=r"train\.py, line 3: "):
        read_script(path)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"x = 1\0\n", "NUL"),
        (b"x = '\xff\xfe'\n", "is not text in utf-8"),
        (b"# -*- coding: no-such-encoding -*-\n", "unknown encoding"),
        (b"x = (" + b"(" * 100_000, "train"),
        (b"x = " + b"-" * 200_000 + b"1\n", "train"),
        (b"#" * (MAXIMUM_BYTES + 1), "bytes"),
        (b"print 'python 2'\n", "line 1"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, raw: bytes, message: str) -> None:
    path = tmp_path / "train.py"
    path.write_bytes(raw)
    with pytest.raises(UsageError, match=message):
        read_script(path)


@pytest.mark.parametrize("raw", [b"", b"\xef\xbb\xbfx = 1\n", "# -*- coding: latin-1 -*-\nx = 'é'\n".encode("latin-1")])
def test_files_that_are_unusual_but_right(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "train.py"
    path.write_bytes(raw)
    script = read_script(path)
    assert len(script.modules) == 1
    assert findings_of(script) == []


def test_project_modules_are_followed(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("")
    written(tmp_path, "from . import b\nfrom .sub.c import f\n", name="pkg/__init__.py", head="")
    written(tmp_path, "import json\n", name="pkg/b.py", head="")
    written(tmp_path, "", name="pkg/sub/__init__.py", head="")
    written(tmp_path, "from ..b import json\ndef f(): ...\n", name="pkg/sub/c.py", head="")
    written(tmp_path, "def g(): import local2\n", name="scripts/local.py", head="")
    written(tmp_path, "import train\n", name="scripts/local2.py", head="")
    path = written(tmp_path, "import pkg, local, torch\n", name="scripts/train.py", head="")
    script = read_script(path)
    assert script.root == tmp_path
    assert {module.name for module in script.modules} == {
        "__main__",
        "pkg",
        "pkg.b",
        "pkg.sub",
        "pkg.sub.c",
        "local",
        "local2",
    }
    assert script.notes == ()


def test_imported_files_that_cannot_be_read_are_notes(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("x = 1\nif:\n")
    (tmp_path / "nul.py").write_bytes(b"\0")
    path = written(tmp_path, "import broken, nul\n")
    script = read_script(path)
    assert len(script.modules) == 1
    assert [note.removeprefix(str(tmp_path) + "/") for note in script.notes] == [
        "broken.py, line 2, does not parse: invalid syntax",
        "nul.py cannot be read: it contains NUL bytes",
    ]


def test_resolved_names(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "import torch.distributed as dist\n"
        "from torch.nn.parallel.distributed import DistributedDataParallel as DDP\n"
        "import torch.nn as nn\n"
        "Wrapper = nn.parallel.DistributedDataParallel\n"
        "dist.all_reduce(x)\n"
        "DDP(m)\n"
        "Wrapper(m)\n"
        "nn.DataParallel(m)\n"
        "unknown.thing()\n"
    )
    assert [name for _, name in read_script(path).entry.calls()] == [
        "torch.distributed.all_reduce",
        "torch.nn.parallel.DistributedDataParallel",
        "torch.nn.parallel.DistributedDataParallel",
        "torch.nn.DataParallel",
    ]


def test_columns_count_characters(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("é = f(1)\n", encoding="utf-8")
    module: Module = read_script(path).entry
    (call,) = (node for node in module.nodes if type(node).__name__ == "Call")
    place = module.location(call)
    assert (place.column, place.end_column) == (5, 9)


LAUNCHES = {
    "spawned": ('mp.spawn(main, nprocs=2)\nos.environ["RANK"]\n', True),
    "spawned under a condition": ("if torch.cuda.device_count() > 1:\n    mp.spawn(main, nprocs=2)\n", True),
    "both": ('if args.spawn:\n    mp.spawn(main, nprocs=2)\nelse:\n    main(int(os.environ["LOCAL_RANK"]))\n', False),
    "launched": ('main(int(os.environ["RANK"]))\n', False),
    "processes": ("for rank in range(2):\n    mp.Process(target=main, args=(rank,)).start()\n", True),
    "a test case of torch": (
        "from torch.testing._internal.common_distributed import MultiProcessTestCase\n"
        "class Test(MultiProcessTestCase): ...\n",
        True,
    ),
    "a test case of unittest": ("import unittest\nclass MultiProcessTestCase(unittest.TestCase): ...\n", False),
    "a process that is no rank": ("mp.Process(target=serve).start()\n", False),
}


@pytest.mark.parametrize(("text", "spawns"), LAUNCHES.values(), ids=LAUNCHES)
def test_who_starts_the_ranks(tmp_path: Path, text: str, spawns: bool) -> None:
    path = written(tmp_path, "def main(rank): ...\ndef serve(): ...\n" + text)
    assert (read_script(path).spawns_ranks is not None) is spawns


def test_use_of_cuda(tmp_path: Path) -> None:
    script = read_script(written(tmp_path, "x = 1\nmodel.cuda()\n"))
    assert script.demands_cuda is not None
    assert script.demands_cuda.line == 11
    plain = read_script(
        written(tmp_path, "if torch.cuda.is_available():\n    model.cuda()\n", "b.py", "import torch\n")
    )
    assert plain.demands_cuda is None
    assert read_script(written(tmp_path, "dist.init_process_group('nccl')\n", "c.py")).demands_cuda is not None


OPTIONS = (
    'parser.add_argument("--multiprocessing-distributed", action="store_true")\n'
    'parser.add_argument("--dist-backend", default="nccl")\nparser.add_argument("--device", default="cpu")\n'
)
BY_FLAG = "if args.multiprocessing_distributed:\n    mp.spawn(main, nprocs=2)\nelse:\n    main(0)\n"
SERVES_BOTH = OPTIONS + 'args.rank = int(os.environ["RANK"])\n' + BY_FLAG


@pytest.mark.parametrize(
    ("arguments", "by_python", "spawns"),
    [
        ((), False, False),
        (("--multiprocessing-distributed",), False, True),
        (("--dist-backend", "nccl"), False, False),
        ((), True, True),
    ],
)
def test_a_flag_or_plain_python_lets_a_script_start_its_ranks(
    tmp_path: Path, arguments: tuple[str, ...], by_python: bool, spawns: bool
) -> None:
    script = read_script(written(tmp_path, "def main(rank): ...\n" + SERVES_BOTH))
    assert starts_own_ranks(script, arguments, by_python=by_python) is spawns


WANTS = {
    "an option's default": (OPTIONS + "dist.init_process_group(args.dist_backend)\n", (), True),
    "the option given": (OPTIONS + "dist.init_process_group(args.dist_backend)\n", ("--dist-backend", "gloo"), False),
    "given with =": (OPTIONS + "dist.init_process_group(backend=args.dist_backend)\n", ("--dist-backend=gloo",), False),
    "a device on the CPU": (OPTIONS + "model.to(args.device)\n", (), False),
    "a device given": (OPTIONS + "model.to(args.device)\n", ("--device", "cuda"), True),
    "a global": ('backend = "nccl"\ndist.init_process_group(backend=backend)\n', (), True),
    "a choice": ('backend = "nccl" if gpus else "gloo"\ndist.init_process_group(backend)\n', (), False),
    "changed afterwards": (
        'backend = "nccl"\nif not torch.cuda.is_available():\n    backend = "gloo"\ndist.init_process_group(backend)\n',
        (),
        False,
    ),
    "under a condition": (
        'if torch.cuda.is_available():\n    backend = "nccl"\ndist.init_process_group(backend)\n',
        (),
        False,
    ),
    "an accelerator chosen": ("torch.accelerator.set_device_index(local_rank)\n", (), True),
    "an accelerator if there is one": (
        "if torch.accelerator.is_available():\n    torch.accelerator.set_device_index(local_rank)\n",
        (),
        False,
    ),
    "nobody says": ("dist.init_process_group(args.backend)\nx.to(y)\n", (), False),
}


@pytest.mark.parametrize(("text", "arguments", "wants"), WANTS.values(), ids=WANTS)
def test_use_of_cuda_by_an_option_or_a_variable(
    tmp_path: Path, text: str, arguments: tuple[str, ...], wants: bool
) -> None:
    assert wants_cuda(read_script(written(tmp_path, text)), arguments) is wants


PATHOLOGICAL = {
    "many branches": "def f(x):\n" + "".join(f"    if x[{i}]:\n        x = g(x)\n" for i in range(200)) + "f(y)\n",
    "many returns": "def f(x):\n" + "".join(f"    if x[{i}]:\n        return {i}\n" for i in range(200)) + "f(y)\n",
    "half returns with collectives": "def f(x):\n"
    + "".join(f"    if x[{i}]:\n        if x:\n            return 1\n    dist.barrier()\n" for i in range(200))
    + "f(y)\n",
    "deep calls": "".join(f"def f{i}(x):\n    return f{i + 1}(x)\n" for i in range(100)) + "f0(1)\n",
    "wide calls": "".join(f"def f{i}(x):\n    f{i + 1}(x)\n    f{i + 1}(x)\n" for i in range(30))
    + "def f30(x):\n    dist.barrier()\nf0(1)\n",
    "recursion": "def f(x):\n    dist.barrier()\n    return f(x) + f(x)\nf(1)\n",
    "mutual recursion": "def f(x):\n    return g(x)\ndef g(x):\n    return f(x)\nf(1)\n",
    "nested loops": "".join("    " * i + f"for i{i} in range(100):\n" for i in range(15)) + "    " * 15 + "f()\n",
    "long expression": "x = " + " + ".join(["1"] * 300) + "\n",
    "long text": "x = 'a' * 10**9\ny = 10 ** 10 ** 10\nz = '%99999999d' % 1\nr = range(10**30)\n",
    "import of itself": "import train\nfrom train import *\n",
    "class that derives from itself": "class A: pass\nclass A(A):\n    def f(self): return super().f()\nA().f()\n",
    "ten thousand lines": "x = f(1)\nif x:\n    y = x.z\n" * 3_400,
    "ten thousand lines with collectives": "x = f(1)\nif x:\n    dist.barrier()\n" * 3_400,
    "ten thousand lines of returns": "def f(x):\n" + "    if x.a:\n        return x\n    x = x.b\n" * 3_400 + "f(y)\n",
    "a long sum": "x = " + " + ".join(f"f({i})" for i in range(2_500)) + "\n",
    "many terms under a condition": "if " + " or ".join(f"f({i})" for i in range(3_000)) + ":\n    dist.barrier()\n",
    "deep attributes": "x" + ".a" * 900 + "\n",
    "many small functions": "".join(f"def f{i}(x):\n    f{i + 1}(x)\n    return f{i + 1}(x)\n" for i in range(100))
    + "def f100(x):\n    dist.all_reduce(x)\nfor x in y:\n    f0(x)\n",
    "a loop in every function": "".join(f"def f{i}(x):\n    for y in x:\n        f{i + 1}(y)\n" for i in range(60))
    + "def f60(x):\n    dist.all_reduce(x)\nf0(x)\n",
    "a call of the function before": "".join(f"def f{i}():\n    return f{max(0, i - 1)}()\n" for i in range(15_000)),
    "many keys": "d = {" + ", ".join(f"'k{i}': {i}" for i in range(5_000)) + "}\n" + "d['a'] = 1\n" * 1_000,
    "a growing list": "x = []\n" + "x.append(f(x))\n" * 3_000,
    "a growing tuple": "x = (1,)\n" + "x = (x, x)\n" * 200,
    "a growing text": "x = 'a'\n" + "x = x + x\n" * 200,
}
LONGEST_S = 2.0
"""CPU seconds that reading and projecting a script may take."""


@pytest.mark.alone
@pytest.mark.parametrize("text", PATHOLOGICAL.values(), ids=PATHOLOGICAL)
def test_pathological_scripts_end_within_the_bound(tmp_path: Path, text: str) -> None:
    path = written(tmp_path, text)
    # What earlier tests left on the heap is not the reader's to collect.
    gc.collect()
    gc.freeze()
    try:
        started_s = time.process_time()
        script = read_script(path)
        projection = project(script)
        seconds = time.process_time() - started_s
    finally:
        gc.unfreeze()
    assert is_within(seconds, LONGEST_S)
    assert projection.machine.steps <= 4 * MAXIMUM_STEPS
    assert findings_of(script) == []


def test_functions_that_are_not_followed_are_named(tmp_path: Path) -> None:
    script = read_script(written(tmp_path, PATHOLOGICAL["deep calls"]))
    whole_projection(script)
    assert "f40 (" in take_gap(script) and not take_gap(script)


def test_what_is_beside_a_function_that_is_not_followed_is_still_found(tmp_path: Path) -> None:
    text = PATHOLOGICAL["many small functions"] + "if dist.get_rank() == 0:\n    dist.barrier()\n"
    script = read_script(written(tmp_path, text))
    assert [finding.code for finding in findings_of(script)] == ["DDP301"]


def test_the_reader_does_not_fail_on_the_standard_library() -> None:
    directory = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(path for path in directory.rglob("*.py") if "site-packages" not in path.parts)[::40]:
        try:
            script = read_script(path, follow_imports=False)
        except UsageError:
            continue
        project(script)


def test_nothing_heavy_is_imported(tmp_path: Path) -> None:
    path = written(tmp_path, "dist.init_process_group('gloo')\n")
    code = (
        "import sys, pathlib\n"
        "from ddpdoctor.source.script.script import read_script\n"
        "from ddpdoctor.source.projection import project\n"
        f"project(read_script(pathlib.Path({str(path)!r})))\n"
        "heavy = {'torch', 'textual', 'psutil', 'click', 'rich', 'numpy', 'asyncio'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_checks_of_a_script_with_such_a_function_are_inconclusive_and_name_it(tmp_path: Path) -> None:
    from ddpdoctor.catalogue.registry import read_catalogue
    from ddpdoctor.catalogue.run_checks import run_checks

    script = read_script(
        written(tmp_path, PATHOLOGICAL["deep calls"] + "if dist.get_rank() == 0:\n    dist.barrier()\n")
    )
    entries = [entry for entry in read_catalogue().entries if entry.code in ("DDP301", "DDP302")]
    parted, depending = run_checks(entries, script, None, static=True)
    assert [finding.code for finding in parted.from_source] == ["DDP301"]
    assert depending.bound_hit
    assert "f40 (" in depending.gap


RETURNS = {
    "before a barrier": ("    if x.a:\n        return x\n    x = x.b\n", "    dist.barrier()\n"),
    "each before a barrier": ("    if x.a:\n        return x\n    dist.barrier()\n", ""),
    "with what they wrote": ("    if x.a:\n        z = x\n        return z\n", "    dist.barrier()\n"),
}
CHEAPER_THAN_QUADRATIC = 8.0
"""Four times the returns may take four times as long, and twice that on a machine that does something else."""


@pytest.mark.alone
@pytest.mark.parametrize(("line", "end"), RETURNS.values(), ids=RETURNS)
def test_early_returns_cost_in_proportion_to_their_number(tmp_path: Path, line: str, end: str) -> None:
    text = "import torch.distributed as dist\ndist.init_process_group('gloo')\ndef f(x):\n"
    few, many = (_least_cpu_s(written(tmp_path, f"{text}{line * count}{end}f(y)\n")) for count in (400, 1_600))
    assert many < CHEAPER_THAN_QUADRATIC * few


def _least_cpu_s(path: Path) -> float:
    """The CPU time of the checks on a script, the least of seven: a busy machine makes 20 ms 40."""
    seconds = []
    for _ in range(7):
        gc.collect()
        started_s = time.process_time()
        with deep_recursion():
            findings_of(read_script(path))
        seconds.append(time.process_time() - started_s)
    return min(seconds)


def test_a_call_of_any_library_is_an_event(tmp_path: Path) -> None:
    text = "import gc\nimport numpy as np\ndef step():\n    gc.collect()\n    np.anything.at_all(1)\nstep()\nlen([])\n"
    projection = project(read_script(written(tmp_path, text)))
    assert [event.name for event in projection.of_kind("call")] == ["gc.collect", "numpy.anything.at_all"]
