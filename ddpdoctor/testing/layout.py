"""What lies in the directory of one test, and what is said between pytest and its ranks; stdlib only.

``test.json``        what to run, in which environment; written by pytest before the ranks are asked to begin
``values.pickle``    the values of the fixtures and parameters
``result-N.pickle``  how the body ended on rank N
``rank-N.out``       what rank N wrote to stdout, ``rank-N.err`` to stderr
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MESSAGE_BYTES = 1 << 16
"""Messages are small: what can be large lies in files."""
TEST_FILE = "test.json"
VALUES_FILE = "values.pickle"
DONE = b"done"
"""A rank has written its result, and waits until it is ended: its peers may still talk to it."""
DEBUG = b"debug"
"""A rank asks for the terminal."""
DEBUGGED = b"debugged"
"""It gives the terminal back …"""
QUIT = b"quit"
"""… and the user wants no more tests."""


def result_name(rank: int) -> str:
    """File with the result of a rank."""
    return f"result-{rank}.pickle"


def output_name(rank: int, stream: str) -> str:
    """File with what a rank wrote to ``out`` or ``err``."""
    return f"rank-{rank}.{stream}"


def coverage_name(rank: int) -> str:
    """File with the lines that a rank ran, where pytest measures coverage."""
    return f"coverage-{rank}"


@dataclass(frozen=True)
class Body:
    """What runs on the ranks."""

    modules: list[tuple[str, str]]
    """Name and path of the modules to import, the test's own last."""
    function: str
    values: bytes
    """Its arguments, pickled."""
    nproc: int
    timeout_s: float
    device: str
    init: bool
    """The default process group is initialised before the body."""
    root: str
    captures: bool
    debugs: bool
    debugged_rank: int
    """The one that stops where it failed, if `--pdb` is given."""
    style: str
    """Of tracebacks."""
    locals: bool
    comparisons: dict[str, Any]
    """How failed comparisons are explained: see ``comparisons.settings_of``."""
    warnings: list[tuple[str, str, str, str, int]]
    coverage: dict[str, Any] = field(default_factory=dict)
