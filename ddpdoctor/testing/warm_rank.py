"""The main loop of a warm process: torch and the user's modules are imported once, and each test runs in a fork of it.

What a test changes, leaks or breaks is gone with its fork. Where a fork would not work, because the user's modules have
started threads or CUDA while they were imported, the process itself becomes the rank of one test, and is replaced.

Each rank has a process of its own, and so the hashes of its strings, the order of its sets and its random numbers.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import random
import select
import shutil
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from ddpdoctor.probe.process import SET_CHILD_SUBREAPER, SET_PARENT_DEATH_SIGNAL, end_with_parent, process_control
from ddpdoctor.testing import ranks
from ddpdoctor.testing.hooks import RankHooks

LOOK_EVERY_S = 0.02
MOST_TEXT = 30_000
_MOST_LEARNED = 1_000


class _Ended(Exception):
    """No one wants this process any more."""


def serve(control: socket.socket, first: dict[str, Any]) -> None:
    """Run one test after another until the other end is closed; never returns."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # pytest gets it as well, and ends the ranks.
    end_with_parent(int(first["pytest"]))
    process_control(SET_CHILD_SUBREAPER, 1)
    try:
        import torch
        import torch.distributed

        uses_gpu = torch.cuda.is_initialized  # The stand-in puts another function in its place.
        hooks = RankHooks(torch, first["root"], first["device"], int(first["gpus"]))
    except BaseException:
        _send(control, error=_traceback())
        os._exit(1)
    _send(control, ready=True)
    try:
        while True:
            _run_one(control, hooks, torch, first, uses_gpu)
    except (_Ended, OSError):
        pass
    end_descendants()
    if os.getppid() != int(first["pytest"]):
        shutil.rmtree(first["directory"], ignore_errors=True)  # It was killed, and cannot do so itself.
    hooks.process_end.leave(0)


def _run_one(
    control: socket.socket,
    hooks: RankHooks,
    torch: ModuleType,
    first: dict[str, Any],
    uses_gpu: Callable[[], bool],
) -> None:
    # Whoever only waits sees that pytest is gone, and ends what its tests have left before it goes as well.
    process_control(SET_PARENT_DEATH_SIGNAL, 0)
    content, descriptors, _, _ = socket.recv_fds(control, ranks.MESSAGE_BYTES, 4)
    if not content:
        raise _Ended
    end_with_parent(int(first["pytest"]))
    message = json.loads(content)
    if message["do"] != "run":
        return
    talk = socket.socket(fileno=descriptors[0])
    directory, rank = Path(message["directory"]), int(message["rank"])
    test = json.loads((directory / ranks.TEST_FILE).read_bytes())
    try:
        _be_like_pytest(test)
        module = imported(test["modules"], rewrite=first["rewrite"])
    except BaseException:
        _send(control, error=_traceback())
        return
    from ddpdoctor.testing.rank import run

    forks = threading.active_count() == 1 and not uses_gpu()
    if not forks:
        _send(control, started=os.getpid(), forked=False)
        run(hooks, torch, module, test, directory, rank, talk)
    warm, (taught, teaches) = os.getpid(), os.pipe()
    known = set(sys.modules)
    pid = os.fork()
    if pid == 0:
        control.close()
        end_with_parent(warm)
        random.seed()
        run(hooks, torch, module, test, directory, rank, talk, lambda: _teach(teaches, known))
    talk.close()
    os.close(teaches)
    process_control(SET_PARENT_DEATH_SIGNAL, 0)
    _send(control, started=pid, forked=True)
    status = _status_of(control, pid)
    _send(control, gone=pid, status=status)
    end_descendants()
    _learn(taught)


def _teach(teaches: int, known: set[str]) -> None:
    """Tell the warm process which parts of torch the body has made it import."""
    names = [name for name in sys.modules if name.startswith("torch.") and name not in known]
    os.write(teaches, json.dumps(names[:_MOST_LEARNED]).encode())


def _learn(taught: int) -> None:
    """Import what a test had to import of torch, so that no other test has to: 1.4 s where DDP wraps a model."""
    os.set_blocking(taught, False)
    try:
        names = json.loads(os.read(taught, ranks.MESSAGE_BYTES) or b"[]")
    except (OSError, ValueError):
        return
    finally:
        os.close(taught)
    for name in names:
        try:
            importlib.import_module(name)
        except Exception:  # It was made by hand, or wants what only the test had.
            continue


def _status_of(control: socket.socket, pid: int) -> int:
    """Wait until a fork is gone, and end it when asked to; its exit code, negative for a signal."""
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if select.select([control], [], [], LOOK_EVERY_S)[0]:
            content = control.recv(ranks.MESSAGE_BYTES)
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            if not content:
                raise _Ended
            return os.waitstatus_to_exitcode(status)


def _be_like_pytest(test: dict[str, Any]) -> None:
    """Take over the environment, the directory and the import path that pytest has now."""
    os.environ.clear()
    os.environ.update(test["environment"])
    os.chdir(test["directory"])
    sys.path[:] = test["path"]


def end_descendants() -> None:
    """Kill every process that came of this one; those whose parent died are its own children."""
    import psutil

    for _ in range(100):
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                child.kill()
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        threading.Event().wait(0.01)


def _send(control: socket.socket, **message: object) -> None:
    control.send(json.dumps(message).encode())


def _traceback() -> str:
    return traceback.format_exc()[-MOST_TEXT:]


# Imports the user's test modules into a rank, under the names and with the rewritten assertions that pytest gives.


def imported(files: Iterable[tuple[str, str]], *, rewrite: bool) -> ModuleType:
    """Import modules, each given by name and path, in their order; the last one. Raises whatever they raise."""
    module = None
    for name, path in files:
        module = sys.modules.get(name)
        if module is None or getattr(module, "__file__", None) != path:
            module = _import(name, path, rewrite=rewrite)
    assert module is not None
    return module


def _import(name: str, path: str, *, rewrite: bool) -> ModuleType:
    parent = _parent(name.rpartition(".")[0], Path(path).parent)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    source = Path(path).read_bytes()
    tree = ast.parse(source, filename=path)
    if rewrite:
        _rewrite(tree, source, path)
    sys.modules[name] = module
    try:
        exec(compile(tree, path, "exec", dont_inherit=True), module.__dict__)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    if parent is not None:
        setattr(parent, name.rpartition(".")[2], module)
    return module


def _parent(name: str, directory: Path) -> ModuleType | None:
    """Return the package above; an empty one where none can be imported, as in pytest's importlib mode."""
    if not name:
        return None
    try:
        return importlib.import_module(name)
    except ImportError:
        _parent(name.rpartition(".")[0], directory.parent)
        package = sys.modules[name] = ModuleType(name)
        package.__path__ = [str(directory)]
        return package


def _rewrite(tree: ast.Module, source: bytes, path: str) -> None:
    """Have failing assertions show their values; without it they only say where they are."""
    try:
        from _pytest.assertion.rewrite import rewrite_asserts
    except ImportError:
        return
    rewrite_asserts(tree, source, path)
