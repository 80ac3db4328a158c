"""Runs the body of one test as one rank, and says how it ended."""

from __future__ import annotations

import os
import pdb
import pickle
import random
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NoReturn

import pytest

from ddpdoctor.probe.process import is_echo, text_of
from ddpdoctor.testing import ranks
from ddpdoctor.testing.comparisons import explain_comparisons
from ddpdoctor.testing.hooks import RankHooks
from ddpdoctor.testing.ranks import DdpRank, become

_OURS = str(Path(__file__).resolve().parents[1]) + os.sep
_TORCH = os.path.join("", "site-packages", "torch", "")
_NO_FAILURES: dict[type[Any], str] = {
    pytest.skip.Exception: "skipped",
    pytest.xfail.Exception: "xfailed",
    pytest.exit.Exception: "exit",
}
GROUP_TIMEOUT = timedelta(minutes=30)
"""gloo's own; the test's time limit ends it earlier."""


def run(
    hooks: RankHooks,
    torch: ModuleType,
    module: ModuleType,
    test: dict[str, Any],
    directory: Path,
    rank: int,
    talk: socket.socket,
    teach: Callable[[], None] = lambda: None,
) -> NoReturn:
    """Be the rank, run the body, tell how it ended, wait until all have, and leave.

    ``teach`` is called once the body is over.
    """
    leave = hooks.process_end.leave
    try:
        _redirect(test, directory, rank)
        hooks.begin(str(directory), test["plan"], rank, int(test["nproc"]))
        terminal = _Terminal(talk, debugs=test["debugs"])
        sys.breakpointhook = terminal.breakpoint
        result = _run_body(hooks, torch, module, test, directory, rank, terminal)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        path = directory / ranks.RESULT_FILE.format(rank)
        path.with_suffix(".new").write_bytes(pickle.dumps(result))
        path.with_suffix(".new").rename(path)
        teach()
        talk.send(ranks.DONE)
        talk.recv(ranks.MESSAGE_BYTES)
    except OSError:
        pass  # No one listens any more.
    finally:
        leave(0)
    raise AssertionError


def _run_body(
    hooks: RankHooks,
    torch: ModuleType,
    module: ModuleType,
    test: dict[str, Any],
    directory: Path,
    rank: int,
    terminal: _Terminal,
) -> dict[str, Any]:
    """Return the result of the body, with the warnings that it gave."""
    nproc = int(test["nproc"])
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(nproc), LOCAL_WORLD_SIZE=str(nproc), GROUP_RANK="0"
    )
    random.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    device = "cpu" if test["device"] == "cpu" else f"cuda:{rank}"
    become(DdpRank(rank, nproc, device))
    measure = _coverage(test, directory, rank)
    with warnings.catch_warnings(record=True) as caught:
        try:
            if device != "cpu":
                torch.cuda.set_device(rank)
            if test["init"]:
                _make_group(torch, test, directory, rank)
            _filter_warnings(test["warnings"])
            values = pickle.loads((directory / ranks.VALUES_FILE).read_bytes())
            explain_comparisons(test["comparisons"], [name for name, _ in test["modules"]])
            function = values.pop("function", None) or _function_of(module, test, values.pop("self", None))
            measure.start()
            try:
                returned = function(**values)
            finally:
                measure.stop()
            # What a test returns is nobody's, and need not pickle.
            kept = b"" if test["function"] else _pickled(returned)
            hooks.finished(0)
            result: dict[str, Any] = {"outcome": "passed", "returned": kept}
        except BaseException as error:
            result = _failure(hooks, error, test)
            if result["outcome"] == "failed" and test["debugs"] and rank == test["debugged_rank"]:
                result["quits"] = terminal.post_mortem(error)
    measure.save()
    result["warnings"] = [
        (str(one.message), pickle.dumps(one.category), one.filename, one.lineno) for one in caught[:100]
    ]
    return result


def _make_group(torch: ModuleType, test: dict[str, Any], directory: Path, rank: int) -> None:
    """Initialise the default process group, over a file: a port could be taken by someone else meanwhile."""
    distributed = torch.distributed
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        store = distributed.FileStore(str(directory / "store"), int(test["nproc"]))
        backend = "gloo" if test["device"] == "cpu" else "nccl"
        distributed.init_process_group(
            backend, store=store, rank=rank, world_size=int(test["nproc"]), timeout=GROUP_TIMEOUT
        )


def _function_of(module: ModuleType, test: dict[str, Any], instance: object) -> Callable[..., Any]:
    """Return the test's function; raises AttributeError where its module has none of that name."""
    owner = module if instance is None else instance
    found: Callable[..., Any] = getattr(owner, test["function"])
    return found


def _pickled(returned: object) -> bytes:
    try:
        return pickle.dumps(returned)
    except Exception as error:
        what = f"{type(returned).__name__}: {error}"
        pytest.fail(f"what the function returns cannot be sent from the rank: {what}", pytrace=False)


def _failure(hooks: RankHooks, error: BaseException, test: dict[str, Any]) -> dict[str, Any]:
    """Return the text of the exception that ended the body."""
    reason = ""
    for kind, outcome in _NO_FAILURES.items():
        if isinstance(error, kind):
            hooks.finished(0)
            return {"outcome": outcome, "reason": error.msg or ""}
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        hooks.finished(code & 0xFF)
        reason = f"the body called sys.exit({error.code!r})" if error.code is not None else "the body called sys.exit()"
    else:
        hooks.failed(error)
    try:
        shown, crash = _shown(error, test)
    except Exception:  # of an exception whose own words fail
        shown, crash = "".join(traceback.format_tb(error.__traceback__)), f"{type(error).__name__}: {text_of(error)}"
    return {"outcome": "failed", "echo": is_echo(text_of(error)), "reason": reason or crash, "text": shown}


def _shown(error: BaseException, test: dict[str, Any]) -> tuple[str, str]:
    """Return the traceback of an exception as pytest shows it, and the same in one line."""
    info = pytest.ExceptionInfo.from_exception(error)
    plain = isinstance(error, pytest.fail.Exception) and not error.pytrace
    shown = info.getrepr(
        style="value" if plain else "long" if test["style"] == "auto" else test["style"],
        showlocals=test["locals"],
        tbfilter=lambda info: _without_own_frames(info.traceback.filter(info), whole=test["style"] != "auto"),
    )
    crash = shown.reprcrash
    return _indented(str(shown)), crash.message if crash is not None else text_of(error)


def _without_own_frames(trace: Any, *, whole: bool) -> Any:
    """Return a traceback without our own lines, and unless asked for without torch's where it called what failed."""
    own = trace.filter(lambda entry: not str(entry.path).startswith(_OURS)) or trace
    return own if whole else own.filter(lambda entry: _TORCH not in str(entry.path)) or own


def _indented(text: str) -> str:
    """Give back the indent of the first line of the source, which the whole text was stripped of."""
    return text if text.startswith((">", "E", "/")) or "\n    " not in text else f"    {text}"


def _filter_warnings(filters: list[tuple[str, str, str, str, int]]) -> None:
    """Treat warnings as pytest does."""
    warnings.resetwarnings()
    for action, message, category, module, line in reversed(filters):
        place, _, name = category.rpartition(".")
        kind = getattr(sys.modules.get(place), name, None)
        if isinstance(kind, type):
            warnings.filterwarnings(action, message, kind, module, line)  # type: ignore[arg-type]


def _redirect(test: dict[str, Any], directory: Path, rank: int) -> None:
    """Give the rank nothing to read, and files to write to unless pytest captures nothing."""
    for descriptor, name in ((1, "out"), (2, "err")):
        if test["captures"]:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            file = os.open(directory / ranks.OUTPUT_FILE.format(rank, name), flags, 0o600)
            os.dup2(file, descriptor)
            os.close(file)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


class _Terminal:
    """The user's terminal, which pytest lends to one rank at a time."""

    def __init__(self, talk: socket.socket, *, debugs: bool) -> None:
        self._talk = talk
        self._debugs = debugs

    def post_mortem(self, error: BaseException) -> bool:
        """Let the user look at where the body failed; whether they want no more tests."""
        debugger = self._borrowed()
        if debugger is None:
            return False
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_OURS):
            trace = trace.tb_next
        debugger.reset()
        debugger.message("".join(traceback.format_exception_only(error)).rstrip())
        try:
            debugger.interaction(None, trace)
        finally:
            quits = bool(debugger.quitting)
            self._talk.send(ranks.QUIT if quits else ranks.DEBUGGED)
        return quits

    def breakpoint(self, *arguments: object, **options: object) -> None:
        """What ``breakpoint()`` does on a rank."""
        debugger = self._borrowed()
        if debugger is not None:
            frame: FrameType | None = sys._getframe(1)
            debugger.gives_back = lambda: self._talk.send(ranks.DEBUGGED)
            debugger.set_trace(frame)

    def _borrowed(self) -> _Debugger | None:
        self._talk.send(ranks.DEBUG)
        content, descriptors, _, _ = socket.recv_fds(self._talk, ranks.MESSAGE_BYTES, 2)
        if not content or len(descriptors) < 2:
            return None
        signal.signal(signal.SIGINT, signal.default_int_handler)
        reading: Any = _Lines(descriptors[0])
        writing = os.fdopen(descriptors[1], "w", buffering=1)
        return _Debugger(stdin=reading, stdout=writing)


class _Debugger(pdb.Pdb):
    gives_back: Callable[[], object] | None = None

    def set_continue(self) -> None:
        super().set_continue()
        if self.gives_back is not None:
            self.gives_back()

    def set_quit(self) -> None:
        super().set_quit()
        if self.gives_back is not None:
            self.gives_back()


class _Lines:
    """Reads no further than to the end of a line: what comes after it may be for another rank."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def readline(self) -> str:
        """Return the next line; empty at the end of the file."""
        line = b""
        while not line.endswith(b"\n") and (byte := os.read(self._descriptor, 1)):
            line += byte
        return line.decode(errors="replace")


class _NoCoverage:
    def start(self) -> None:
        """Nothing is measured."""

    stop = save = start


def _coverage(test: dict[str, Any], directory: Path, rank: int) -> Any:
    """Return a measurement like pytest's own, into a file that pytest takes in; an empty one where there is none."""
    if not test["coverage"]:
        return _NoCoverage()
    import coverage

    return coverage.Coverage(data_file=str(directory / ranks.COVERAGE_FILE.format(rank)), **test["coverage"])
