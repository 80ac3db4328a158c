"""What pytest does for a test with the mark ``ddp``: imported by the plugin when the first such test is met."""

from __future__ import annotations

import bdb
import inspect
import os
import pickle
import socket
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from _pytest.outcomes import Failed

from ddpdoctor.finding import signal_name
from ddpdoctor.testing import ranks
from ddpdoctor.testing.comparisons import settings_of
from ddpdoctor.testing.hooks import DdpMark, asked_of, mark_of
from ddpdoctor.testing.ranks import Body
from ddpdoctor.testing.run_test import RankEnd, TestEnd, run_test
from ddpdoctor.testing.warm_ranks import RanksFailedToStart, WarmRanks

# Puts the failure of a test into words: one line for the summary, then the verdict, then each rank by itself.


def failure_text(end: TestEnd, outcomes: Sequence[str], mark: DdpMark) -> str:
    """Return the message of the failure."""
    parts = [_first_line(end, outcomes, mark)]
    if end.account:
        parts.append(end.account.rstrip())
    for rank, outcome in zip(end.ranks, outcomes, strict=True):
        if outcome not in ("passed", "running") or len(set(outcomes)) > 1:
            heading = f" rank {rank.rank} of {mark.nproc}: {_how(rank, outcome)} "
            text = (rank.result or {}).get("text", "")
            parts.append("\n".join((heading.center(80, "-"), text)).rstrip())
    return "\n\n".join(parts)


def _first_line(end: TestEnd, outcomes: Sequence[str], mark: DdpMark) -> str:
    """Return the first cause: the test's own exception, else what is wrong between the ranks, else how one ended."""
    paired = list(zip(end.ranks, outcomes, strict=True))
    failed = {rank.rank: _reason(rank) for rank, outcome in paired if outcome == "failed"}
    own = {number: reason for number, reason in failed.items() if not (end.ranks[number].result or {})["echo"]}
    gone = [rank for rank, outcome in paired if outcome == "gone"]
    aside = f" [{end.verdict}]" if end.verdict and not end.stopped else ""
    if own:
        return f"{_ranks(own, mark.nproc)} failed: {next(iter(own.values()))}{aside}"
    if end.stopped == "time-limit":
        where = f": {end.verdict}" if end.verdict else ""
        return f"the ranks had not finished after {mark.timeout:g} s{where}"
    if end.verdict:
        return end.verdict
    if gone:
        return f"rank {gone[0].rank} {_how(gone[0], 'gone')}"
    if failed:
        return f"{_ranks(failed, mark.nproc)} failed: {next(iter(failed.values()))}"
    listed = ", ".join(f"rank {rank.rank} {outcome}" for rank, outcome in paired)
    return f"the ranks do not agree: {listed}"


def _ranks(reasons: Mapping[int, str], nproc: int) -> str:
    """Return the ranks that failed alike; the first alone where others failed otherwise."""
    first = next(iter(reasons))
    alike = [number for number, reason in reasons.items() if reason == reasons[first]]
    if len(alike) < len(reasons):
        return f"rank {first} (and {len(reasons) - 1} more)"
    if len(alike) == nproc:
        return "every rank"
    return f"rank {first}" if len(alike) == 1 else f"ranks {', '.join(map(str, alike))}"


def _reason(rank: RankEnd) -> str:
    return str((rank.result or {})["reason"]).partition("\n")[0]


def _how(rank: RankEnd, outcome: str) -> str:
    if outcome == "gone":
        status = rank.status or 0
        if status < 0:
            return f"was ended by {signal_name(-status)}"
        return f"left its process with exit code {status}"
    if outcome == "running":
        return "was still running, and was ended"
    reason = str((rank.result or {}).get("reason", ""))
    return f"{outcome} ({reason})" if outcome in ("skipped", "xfailed") and reason else outcome


_warm_key = pytest.StashKey[WarmRanks]()
_STYLES = {"no": "line"}
"""What pytest does not show at all still has its line among the ranks."""
_STREAMS = {"out": "stdout", "err": "stderr"}


class RanksFailed(Failed):
    """A test failed on its ranks."""

    __module__ = "builtins"  # pytest names its own so, too: a summary has few columns


class _SeenInDebugger(RanksFailed, bdb.BdbQuit):
    """The same, once the user has looked at it on the rank: pytest need not open a debugger of its own."""

    __module__, __qualname__ = "builtins", "RanksFailed"


def close(config: pytest.Config) -> None:
    """End the warm processes."""
    warm = config.stash.get(_warm_key, None)
    if warm is not None:
        del config.stash[_warm_key]
        warm.close()


def refuse(item: pytest.Item) -> None:
    """Refuse what could not run on ranks, before any fixture is made."""
    _refuse_machine(mark_of(item))
    if not isinstance(item, pytest.Function) or not hasattr(item, "funcargs") or _is_unittest(item):
        pytest.fail("the mark `ddp` is for test functions, and for methods of classes other than TestCase", False)
    if inspect.iscoroutinefunction(item.obj) or inspect.isasyncgenfunction(item.obj):
        pytest.fail("the mark `ddp` cannot run a coroutine: write `asyncio.run(...)` in the test's body", False)


def _refuse_machine(mark: DdpMark) -> None:
    if not sys.platform.startswith("linux"):
        pytest.fail(f"tests on ranks need Linux, and this is {sys.platform}", False)
    if mark.device == "cuda" and (there := _gpus()) < mark.nproc:
        pytest.skip(f"needs {mark.nproc} GPUs, one for each rank; this machine offers {there}")


def call(item: pytest.Function) -> None:
    """Run the body on ranks, and pass, skip or fail as they did."""
    mark = mark_of(item)
    _run(item, mark, _body(item, mark, item.originalname, _pickled(item)))


def run_function(
    item: pytest.Function, function: Callable[..., Any], /, *arguments: object, **options: Any
) -> list[Any]:
    """Call a function on ranks, with the ``options`` of the mark; return what each returned, or fail as they did."""
    __tracebackhide__ = True
    mark = asked_of(**options)
    _refuse_machine(mark)
    values = _pickled_values({"function": partial(function, *arguments)})
    end = _run(item, mark, _body(item, mark, "", values))
    return [pickle.loads((rank.result or {})["returned"]) for rank in end.ranks]


def _run(item: pytest.Function, mark: DdpMark, body: Body) -> TestEnd:
    __tracebackhide__ = True
    config = item.config
    warm = config.stash.get(_warm_key, None)
    if warm is None:
        rewrite = config.getoption("assertmode", "rewrite") == "rewrite"
        warm = config.stash[_warm_key] = WarmRanks(
            config.rootpath, rewrite=rewrite, captures=config.getoption("capture") != "no"
        )
    try:
        end = run_test(warm, body, lambda talk: _lend_terminal(config, talk))
    except RanksFailedToStart as error:
        raise RanksFailed(str(error), pytrace=False) from None
    _pass_on(item, end)
    _judge(end, mark, shows_call=not body.function)
    return end


def _body(item: pytest.Function, mark: DdpMark, function: str, values: bytes) -> Body:
    config = item.config
    debugs = bool(config.getoption("usepdb", False))
    return Body(
        modules=[*_conftests(item), (item.module.__name__, str(item.path))],
        function=function,
        values=values,
        nproc=mark.nproc,
        timeout_s=mark.timeout,
        device=mark.device,
        init=mark.init,
        root=str(config.rootpath),
        captures=config.getoption("capture") != "no",
        debugs=debugs,
        debugged_rank=int(config.getoption("pdb_rank", 0)),
        style=_STYLES.get(config.getoption("tbstyle", "auto"), config.getoption("tbstyle", "auto")),
        locals=bool(config.getoption("showlocals", False)),
        comparisons=settings_of(config),
        warnings=_warning_filters(),
        coverage=_coverage(),
    )


def _conftests(item: pytest.Function) -> list[tuple[str, str]]:
    """Return the conftest files that count for a test, the outermost first: its values may be of their classes."""
    found = []
    for plugin in item.config.pluginmanager.get_plugins():
        path = getattr(plugin, "__file__", None)
        if path is not None and Path(path).name == "conftest.py" and item.path.is_relative_to(Path(path).parent):
            found.append((plugin.__name__, str(path)))
    return sorted(found, key=lambda one: len(one[1]))


def _pickled(item: pytest.Function) -> bytes:
    """Return what the body is called with, pickled; fails the test with the name of what cannot be."""
    wanted = inspect.signature(item.obj).parameters
    values: dict[str, object] = {name: value for name, value in item.funcargs.items() if name in wanted}
    if item.instance is not None:
        values["self"] = item.instance
    return _pickled_values(values)


def _pickled_values(values: Mapping[str, object]) -> bytes:
    try:
        return pickle.dumps(values)
    except Exception:
        pass
    lines = []
    for name, value in values.items():
        try:
            pickle.dumps(value)
        except Exception as error:
            what = {"self": "the test's instance", "function": "the call"}.get(name, f"`{name}`")
            lines.append(f"{what} cannot be sent to the ranks: {type(value).__name__}: {error}")
    raise RanksFailed(
        "; ".join(lines) + "\nFixtures and parameters are made in pytest's own process and pickled for the ranks: make"
        " what does not pickle in the test's body, or pass its ingredients.",
        pytrace=False,
    )


def _warning_filters() -> list[tuple[str, str, str, str, int]]:
    """Return how warnings are treated now, as plain data."""
    found = []
    for action, message, category, module, line in warnings.filters:
        for kind in category if isinstance(category, tuple) else (category,):
            name = f"{kind.__module__}.{kind.__qualname__}"
            found.append((action, _pattern(message), name, _pattern(module), line))
    return found


def _pattern(expression: Any) -> str:
    return str(getattr(expression, "pattern", expression) or "")


def _coverage() -> dict[str, Any]:
    """Return how coverage is measured here, as options for the ranks; empty where it is not."""
    if "coverage" not in sys.modules:
        return {}
    current = sys.modules["coverage"].Coverage.current()
    if current is None:
        return {}
    names = ("source", "source_pkgs", "branch", "include", "omit")
    asked = {name: current.get_option(f"run:{name}") for name in names}
    file = getattr(current.config, "config_file", None)
    return {"config_file": file or False, **{name: value for name, value in asked.items() if value}}


def _lend_terminal(config: pytest.Config, talk: socket.socket) -> bool:
    """Give a rank the terminal, and wait until it gives it back; whether the user wants no more tests."""
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is not None:
        capture.suspend(in_=True)
    try:
        socket.send_fds(talk, [b"terminal"], [0, 1])
        content = b""
        while content not in (ranks.DEBUGGED, ranks.QUIT):
            content = talk.recv(ranks.MESSAGE_BYTES)
            if not content:
                break
        return content == ranks.QUIT
    finally:
        if capture is not None:
            capture.resume()


def _pass_on(item: pytest.Function, end: TestEnd) -> None:
    """Hand what the ranks printed and warned of to pytest."""
    for rank in end.ranks:
        for stream, text in rank.output.items():
            if text.strip():
                item.add_report_section("call", f"{_STREAMS[stream]} rank {rank.rank}", text)
    seen = set()
    for rank in end.ranks:
        for message, category, file, line in (rank.result or {}).get("warnings", ()):
            if (message, file, line) not in seen:
                seen.add((message, file, line))
                _warn(message, category, file, line)


def _warn(message: str, category: bytes, file: str, line: int) -> None:
    try:
        kind = pickle.loads(category)
    except Exception:
        kind = UserWarning
    with warnings.catch_warnings():
        warnings.simplefilter("always")  # What is an error was one on the rank.
        warnings.warn_explicit(message, kind, file, line)


def _judge(end: TestEnd, mark: DdpMark, *, shows_call: bool) -> None:
    """Pass, skip or fail as the ranks did."""
    __tracebackhide__ = True
    outcomes = [_outcome(rank) for rank in end.ranks]
    results = [rank.result or {} for rank in end.ranks]
    if end.quits:
        pytest.exit("Quitting debugger")
    for result, outcome in zip(results, outcomes, strict=True):
        if outcome == "exit":
            pytest.exit(result["reason"])
    if not end.stopped and not end.verdict:
        if set(outcomes) == {"passed"}:
            return
        if set(outcomes) == {"skipped"}:
            pytest.skip(results[0]["reason"])
        if set(outcomes) == {"xfailed"}:
            pytest.xfail(results[0]["reason"])
    kind = _SeenInDebugger if end.debugged else RanksFailed
    raise kind(failure_text(end, outcomes, mark), pytrace=shows_call)


def _outcome(rank: RankEnd) -> str:
    return str(rank.result["outcome"]) if rank.result is not None else "gone" if rank.is_over else "running"


def _is_unittest(item: pytest.Item) -> bool:
    unittest = sys.modules.get("unittest")
    kind = getattr(item, "cls", None)
    return unittest is not None and kind is not None and issubclass(kind, unittest.TestCase)


def _gpus() -> int:
    from ddpdoctor.launch.request import visible_gpus

    return visible_gpus(os.environ)
