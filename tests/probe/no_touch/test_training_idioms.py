"""What training scripts do to their files: new ones may come and go, old ones stay as they are."""

from __future__ import annotations

import pickle
import py_compile
from collections.abc import Callable
from typing import Any

import pytest

OLD = pickle.dumps({"epoch": 3})


def test_atomic_save_of_a_new_checkpoint_goes_through_twice(allowed: Callable[..., Any]) -> None:
    allowed(
        """
import os, torch
for epoch in range(2):
    torch.save({"epoch": epoch}, "last.pt.tmp")
    os.replace("last.pt.tmp", "last.pt")
assert torch.load("last.pt")["epoch"] == 1
""",
        torch=True,
    )


def test_atomic_save_over_an_old_checkpoint_is_stopped(project: Any, stopped: Callable[..., Any]) -> None:
    project.old({"last.pt": OLD})
    refusal = stopped(
        "import os, torch\ntorch.save({}, 'last.pt.tmp')\nos.replace('last.pt.tmp', 'last.pt')", torch=True
    )
    assert refusal.action == "rename"
    assert refusal.sentence == "would replace last.pt, which the rehearsal did not create"


def test_copy_to_best_goes_through_when_best_is_new(allowed: Callable[..., Any]) -> None:
    allowed(
        """
import shutil, torch
for epoch in range(2):
    torch.save({"epoch": epoch}, "last.pt")
    shutil.copyfile("last.pt", "best.pt")
""",
        torch=True,
    )


def test_copy_over_an_old_best_is_stopped(project: Any, stopped: Callable[..., Any]) -> None:
    project.old({"best.pt": OLD})
    refusal = stopped(
        "import shutil, torch\ntorch.save({}, 'last.pt')\nshutil.copyfile('last.pt', 'best.pt')", torch=True
    )
    assert refusal.sentence == "would write to best.pt, which the rehearsal did not create"


def test_save_load_remove_goes_through(allowed: Callable[..., Any]) -> None:
    outcome = allowed(
        """
import os, torch
torch.save({"a": 1}, "x.pt")
assert os.path.getsize("x.pt") > 0
torch.load("x.pt")
os.remove("x.pt")
""",
        torch=True,
    )
    assert outcome.files[:2] == (("save", "x.pt", False), ("remove", "x.pt", False))


def test_torch_save_over_an_old_checkpoint_is_stopped(project: Any, stopped: Callable[..., Any]) -> None:
    project.old({"checkpoint.pt": OLD})
    refusal = stopped("import torch\ntorch.save({'epoch': 0}, 'checkpoint.pt')", torch=True)
    assert (refusal.action, refusal.path) == ("save", str(project.path / "checkpoint.pt"))


def test_torch_save_into_an_opened_old_checkpoint_is_stopped(project: Any, stopped: Callable[..., Any]) -> None:
    project.old({"checkpoint.pt": OLD})
    assert stopped("import torch\ntorch.save({}, open('checkpoint.pt', 'wb'))", torch=True).action == "write"


def test_script_module_over_an_old_one_is_stopped(project: Any, stopped: Callable[..., Any]) -> None:
    project.old({"model.pt": OLD})
    code = """
import torch
module = torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(2))
module.save("new.pt")
torch.jit.save(module, "model.pt")
"""
    assert stopped(code, torch=True).path.endswith("model.pt")


def test_rotation_of_own_checkpoints_goes_through(allowed: Callable[..., Any]) -> None:
    allowed(
        """
import glob, os, torch
for epoch in range(4):
    torch.save({"epoch": epoch}, f"ckpt_{epoch}.pt")
    for old in sorted(glob.glob("ckpt_*.pt"))[:-2]:
        os.remove(old)
assert sorted(glob.glob("ckpt_*.pt")) == ["ckpt_2.pt", "ckpt_3.pt"]
""",
        torch=True,
    )


def test_rotation_that_would_delete_an_old_checkpoint_is_stopped(project: Any, stopped: Callable[..., Any]) -> None:
    project.old({"ckpt_0.pt": OLD, "ckpt_1.pt": OLD})
    refusal = stopped(
        """
import glob, os, torch
torch.save({}, "ckpt_2.pt")
for old in sorted(glob.glob("ckpt_*.pt"))[:-2]:
    os.remove(old)
""",
        torch=True,
    )
    assert refusal.sentence == "would delete ckpt_0.pt, which the rehearsal did not create"


def test_resuming_from_the_newest_goes_through(project: Any, allowed: Callable[..., Any]) -> None:
    project.old({"runs/ckpt_3.pt": OLD})
    outcome = allowed(
        """
import glob, pickle, torch
newest = max(glob.glob("runs/ckpt_*.pt"))
epoch = pickle.load(open(newest, "rb"))["epoch"] + 1
torch.save({"epoch": epoch}, f"runs/ckpt_{epoch}.pt")
""",
        torch=True,
    )
    assert outcome.files[0] == ("save", "runs/ckpt_4.pt", False)


def test_rmtree_of_an_old_output_directory_is_stopped_before_its_first_file(
    project: Any, stopped: Callable[..., Any]
) -> None:
    project.old({"out/a.pt": OLD, "out/deep/b.pt": OLD})
    refusal = stopped("import shutil, os\nshutil.rmtree('out', ignore_errors=True)\nos.makedirs('out')")
    assert refusal.sentence == "would delete the directory out, which the rehearsal did not create"


def test_rmtree_of_an_own_output_directory_goes_through(allowed: Callable[..., Any]) -> None:
    allowed(
        """
import os, shutil
for _ in range(2):
    shutil.rmtree("out", ignore_errors=True)
    os.makedirs("out/deep")
    open("out/deep/a", "w").close()
"""
    )


def test_safetensors_over_an_old_file_is_stopped(project: Any, stopped: Callable[..., Any]) -> None:
    project.old({"model.safetensors": "old"})
    refusal = stopped(
        """
import torch
from safetensors.torch import save_file
save_file({"weight": torch.ones(2)}, "new.safetensors")
save_file({"weight": torch.ones(2)}, "model.safetensors")
""",
        torch=True,
    )
    assert refusal.path.endswith("model.safetensors")


@pytest.mark.parametrize(
    "code",
    [
        "open('train.log', 'a').write('epoch 4')",
        "import logging; logging.basicConfig(filename='train.log'); logging.error('x')",
        "import pathlib; pathlib.Path('train.log').write_text('x')",
        "import os; os.write(os.open('train.log', os.O_WRONLY), b'x')",
        "import os; os.write(os.open('b.log', os.O_WRONLY, dir_fd=os.open('sub', os.O_RDONLY)), b'x')",
        "import os; os.open(b'train.log', os.O_RDONLY | os.O_TRUNC)",
        "open('train.log', 'r+').truncate()",
        "import os; os.truncate('train.log', 0)",
        "import os; os.unlink('train.log')",
        "import os; os.unlink('b.log', dir_fd=os.open('sub', os.O_RDONLY))",
        "import os; os.rename('train.log', 'train.log.1')",
        "import shutil; shutil.move('train.log', '..')",
        "import os; os.symlink('train.log', 'latest'); open('latest', 'w')",
        "import os; os.link('train.log', 'latest'); open('latest', 'w')",
        "import os; os.link('train.log', 'a'); os.rename('a', 'b'); open('b', 'w')",
        "import os; os.mkdir('new'); os.link('train.log', 'new/a'); os.rename('new', 'n'); open('n/a', 'w')",
        "import os; os.chdir('..'); open('project/train.log', 'w')",
        "import numpy; numpy.save(open('train.log', 'wb'), numpy.zeros(3))",
        "import numpy; numpy.zeros(3).tofile('train.log')",
        "import sqlite3; sqlite3.connect('train.log').execute('create table t (x)')",
        "import os; os.rmdir('empty')",
        "import threading; t = threading.Thread(target=open, args=('train.log', 'w')); t.start(); t.join()",
        "import os; pid = os.fork(); open('train.log', 'w') if pid == 0 else os.waitpid(pid, 0)",
        "import multiprocessing as m; p = m.get_context('fork').Process(target=open, args=('train.log', 'w'))\n"
        "p.start(); p.join()",
    ],
)
def test_nothing_happens_to_an_old_file(project: Any, stopped: Callable[..., Any], code: str) -> None:
    (project.path / "empty").mkdir()
    project.old({"train.log": "epoch 3\n", "sub/b.log": "epoch 3\n"})
    assert "which the rehearsal did not create" in stopped(code).sentence


@pytest.mark.parametrize(
    "code",
    [
        "open('old.txt').read()",
        "import os; open(os.devnull, 'w').write('x')",
        "import os; os.makedirs('runs/a/b', exist_ok=True); os.makedirs('runs/a/b', exist_ok=True)",
        "import os; os.makedirs('full', exist_ok=True); open('full/new', 'w').write('x')",
        "import os, contextlib\nwith contextlib.suppress(OSError): os.rmdir('full')",
        "import contextlib\nwith contextlib.suppress(FileExistsError): open('old.txt', 'x')",
        "import os, contextlib\nwith contextlib.suppress(OSError): os.remove('not_there')",
        "import fcntl; fcntl.flock(open('data.lock', 'a'), fcntl.LOCK_EX)",
        "import tempfile\nwith tempfile.TemporaryDirectory(dir='.') as d: open(d + '/x', 'w').write('x')",
        "import tempfile; tempfile.TemporaryFile(); tempfile.NamedTemporaryFile().write(b'x')",
        "import os; open('x', 'w'); os.rename('x', 'y'); os.rename('y', 'x'); open('x', 'a'); os.remove('x')",
        "import os; os.symlink('old.txt', 'latest'); os.remove('latest'); os.symlink('old.txt', 'latest')",
        "import os; os.link('old.txt', 'latest'); os.remove('latest')",
        "import os; os.mkdir('a'); open('a/x', 'w'); os.rename('a', 'b'); open('b/x', 'w'); os.mkdir('a')",
        "import sqlite3; sqlite3.connect('new.db').execute('create table t (x)'); sqlite3.connect(':memory:')",
        "import sqlite3; sqlite3.connect('file:old.txt?mode=ro', uri=True)",
        "import pathlib; pathlib.Path('old.txt').touch()",
        "import os; os.system('echo x > by_shell; rm by_shell')",
        "import os, tempfile\nwith tempfile.TemporaryDirectory(dir='.') as d: os.system(f'touch {d}/by_shell')",
        "import os, socket; os.mkdir('d'); s = socket.socket(socket.AF_UNIX); s.bind('d/s'); os.unlink('d/s')",
        "open('/proc/self/comm', 'w').write('rank')",
        "import sys; sys.path.insert(0, 'full'); import module; assert module.VALUE == 1",
        "import os; f = os.open('.', 0); os.open('x', os.O_WRONLY | os.O_CREAT, dir_fd=f); os.remove('x', dir_fd=f)",
        "from sys import audit; audit('open', None, None, 1); audit('open'); audit('os.remove', 3); audit('os.link')",
    ],
)
def test_what_does_not_touch_an_old_file_goes_through(project: Any, allowed: Callable[..., Any], code: str) -> None:
    project.old({"old.txt": "old", "full/old.txt": "old", "full/module.py": "VALUE = 1", "data.lock": ""})
    allowed(code)


def test_stale_bytecode_beside_a_module_neither_stops_the_rehearsal_nor_changes(
    project: Any, allowed: Callable[..., Any]
) -> None:
    module = project.path / "model.py"
    module.write_text("WIDTH = 1")
    py_compile.compile(str(module))
    project.old({"model.py": "WIDTH = 2048"})
    allowed("import sys; sys.path.insert(0, '.'); import model; assert model.WIDTH == 2048")
