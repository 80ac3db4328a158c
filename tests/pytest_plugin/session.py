"""Runs pytest with the plugin in a process of its own, and tells how each test ended."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from xml.etree import ElementTree

import msgspec

HEAD = """
import os, signal, subprocess, sys, threading, time
import pytest
import torch
import torch.distributed as dist
"""
_IS_INSTALLED = any(one.name == "ddpdoctor" for one in entry_points(group="pytest11"))
_LOADED = [] if _IS_INSTALLED else ["-p", "ddpdoctor.testing.plugin"]
"""An installation that is older than the entry point does not load the plugin by itself."""
ALONE = [sys.executable, "-m", "pytest", *_LOADED, "-p", "no:cacheprovider", "-q"]
SECONDS = 400.0
"""For a whole session, on a machine that is busy with others."""


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """How a run of pytest ended."""

    code: int
    output: str
    outcomes: Mapping[str, str]
    """``passed``, ``failed``, ``skipped`` or ``error`` of each test by its name with parameters."""
    messages: Mapping[str, str]
    """Whole text of each failure, and the reason of each skip."""
    seconds: Mapping[str, float]


def run_pytest(
    directory: Path, *options: str, environment: Mapping[str, str] | None = None, seconds: float = SECONDS
) -> Session:
    """Run the tests of a directory, for at most so many ``seconds``."""
    report = directory / "report.xml"
    done = subprocess.run(
        [*ALONE, f"--rootdir={directory}", f"--junitxml={report}", "--override-ini=junit_logging=all", *options],
        cwd=directory,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **(environment or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    outcomes, messages, times = {}, {}, {}
    cases = ElementTree.parse(report).iter("testcase") if report.exists() else ()
    for case in cases:
        name = case.get("name", "")
        times[name] = float(case.get("time", "0"))
        outcomes[name] = "passed"
        for kind, outcome in (("failure", "failed"), ("error", "error"), ("skipped", "skipped")):
            if (element := case.find(kind)) is not None:
                outcomes[name] = outcome
                messages[name] = f"{element.get('message')}\n{element.text}"
    return Session(
        code=done.returncode,
        output=done.stdout + done.stderr,
        outcomes=outcomes,
        messages=messages,
        seconds=times,
    )


def write_tests(directory: Path, body: str, name: str = "test_ranks.py") -> None:
    """Write a test module with the usual imports before ``body``."""
    (directory / name).write_text(HEAD + textwrap.dedent(body))


def line_of(directory: Path, words: str, name: str = "test_ranks.py") -> str:
    """``file:line`` of the first line of a test module in which ``words`` stand."""
    lines = (directory / name).read_text().splitlines()
    return f"{name}:{next(number for number, line in enumerate(lines, 1) if words in line)}"


def processes_of(marker: str) -> list[str]:
    """Command lines of the processes whose command line or environment holds ``marker``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes()
                if marker.encode() in command + (entry / "environ").read_bytes() and _lives(entry):
                    found.append(command.replace(b"\0", b" ").decode(errors="replace"))
            except OSError:
                continue
    return found


def _lives(entry: Path) -> bool:
    return re.search(r"^State:\s+[ZX]", (entry / "status").read_text(), re.MULTILINE) is None
