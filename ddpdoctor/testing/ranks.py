"""What a test sees of the rank that it runs on; stdlib only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


class DdpRank(int):
    """The number of this rank, with what a test may want to know beside it."""

    world_size: int
    """Ranks of the test."""
    device: str
    """What ``.to(...)`` takes to bring a tensor to this rank: ``cpu``, or ``cuda:N`` on GPUs and the stand-in."""

    def __new__(cls, rank: int, world_size: int, device: str) -> DdpRank:
        """Rank ``rank`` of ``world_size``."""
        made = super().__new__(cls, rank)
        made.world_size, made.device = world_size, device
        return made


class NotYetKnown:
    """Stands for the rank where fixtures are made: in pytest's own process, which is no rank.

    Where it is sent to a rank, alone or within something else, that rank's own number arrives.
    """

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return this_rank, ()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(_EARLY if not name.startswith("__") else name)

    def _refuse(self, *arguments: object) -> Any:
        raise TypeError(_EARLY)

    __int__ = __index__ = __bool__ = __eq__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __hash__ = _refuse

    def __repr__(self) -> str:
        return "<the rank, once the test runs on it>"


_EARLY = (
    "ddp_rank is known on the ranks only: fixtures are made once, in pytest's own process. "
    "Pass it on as it is, or use it in the body of a test that is marked with `ddp`."
)
_here: list[DdpRank] = []


def this_rank() -> DdpRank:
    """Return the rank that this process is; raises TypeError where it is none."""
    if not _here:
        raise TypeError(_EARLY)
    return _here[-1]


def become(rank: DdpRank) -> None:
    """This process is that rank from now on."""
    _here.append(rank)


# What lies in the directory of one test, and what is said between pytest and its ranks; stdlib only.
#
# ``test.json`` what to run, in which environment; written by pytest before the ranks are asked to begin
# ``values.pickle`` the values of the fixtures and parameters ``result-N.pickle`` how the body ended on rank N
# ``rank-N.out`` what rank N wrote to stdout, ``rank-N.err`` to stderr

MESSAGE_BYTES = 1 << 16
"""Messages are small: what can be large lies in files."""
TEST_FILE = "test.json"
VALUES_FILE = "values.pickle"
RESULT_FILE = "result-{}.pickle"
OUTPUT_FILE = "rank-{}.{}"
COVERAGE_FILE = "coverage-{}"
"""Of a rank: the lines that it ran, where pytest measures coverage."""
DONE = b"done"
"""A rank has written its result, and waits until it is ended: its peers may still talk to it."""
DEBUG = b"debug"
"""A rank asks for the terminal."""
DEBUGGED = b"debugged"
"""It gives the terminal back …"""
QUIT = b"quit"
"""… and the user wants no more tests."""


@dataclass(frozen=True)
class Body:
    """What runs on the ranks."""

    modules: list[tuple[str, str]]
    """Name and path of the modules to import, the test's own last."""
    function: str
    """Of the last module; empty where the function is among the values."""
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
