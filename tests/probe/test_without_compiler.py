"""The flight recorder is read without an import, while the training thread may use the compiler or fork."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

READ = """
import os, pickle, sys
os.environ["TORCH_FR_BUFFER_SIZE"] = "100"
import torch, torch.distributed as dist
from ddpdoctor.probe.live.flight_recorder import without_compiler
from ddpdoctor.probe.torch_compat import Capabilities

dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store", rank=0, world_size=1)
dist.all_reduce(torch.ones(1))
dump, = Capabilities(torch).recorders
with without_compiler(torch):
    entries = pickle.loads(dump(includeCollectives=True, includeStackTraces=True))["entries"]
outermost = entries[-1]["frames"][-1]["name"]
print(outermost, "torch._inductor" in sys.modules, "_inductor" in vars(torch))
sys.stdout.flush()
os._exit(0)
"""

LAZY = """
import sys, threading, importlib
from ddpdoctor.probe.live.flight_recorder import without_compiler
import lazy

def other():
    told.append(lazy._inductor.codecache)
    lazy._inductor.setting = 5

for imports in (False, True):
    told = []
    with without_compiler(lazy):
        assert not hasattr(lazy._inductor, "codecache") and "lazy._inductor" not in sys.modules
        if imports:
            importlib.import_module("lazy._inductor")
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    real = sys.modules["lazy._inductor"]
    assert told == ["real"] and lazy._inductor is real and real.setting == 5
    del sys.modules["lazy._inductor"], lazy._inductor
"""


def _run(directory: Path, script: str) -> str:
    (directory / "script.py").write_text(textwrap.dedent(script))
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=directory, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_frames_come_without_the_compiler(tmp_path: Path) -> None:
    assert _run(tmp_path, READ) == "<module> False False"


def test_another_thread_has_the_compiler_meanwhile_and_what_it_imports_stays(tmp_path: Path) -> None:
    package = tmp_path / "lazy"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import importlib\ndef __getattr__(name):\n    return importlib.import_module('lazy.' + name)\n"
    )
    (package / "_inductor.py").write_text("codecache = 'real'\n")
    _run(tmp_path, LAZY)
