"""The pytest plugin: ``@pytest.mark.ddp(nproc=2, timeout=60)`` runs the body of a test on several real ranks.

It is loaded into every pytest of the environment, also where no one uses it: it imports pytest and a little of the
standard library, and all else when the first test with the mark is met.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from functools import partial

    from ddpdoctor.examination import Examination
    from ddpdoctor.testing.ranks import NotYetKnown


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the rank that `--pdb` is about."""
    parser.getgroup("debugconfig").addoption(
        "--pdb-rank",
        type=int,
        default=0,
        metavar="N",
        help="with --pdb: the rank of a test with the mark ddp that stops",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Make the mark known."""
    config.addinivalue_line(
        "markers",
        "ddp(nproc=2, timeout=60, device='cpu', init=True): run the test's body on `nproc` ranks of one process group,"
        " for at most `timeout` seconds; on the CPU with gloo, on a 'stand-in' for GPUs, or on 'cuda'.",
    )


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the warm processes, where there are any."""
    on_ranks = sys.modules.get("ddpdoctor.testing.on_ranks")
    if on_ranks is not None:
        on_ranks.close(config)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse what could not run on ranks, before any fixture is made."""
    if item.get_closest_marker("ddp") is not None:
        from ddpdoctor.testing.on_ranks import refuse

        refuse(item)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run the body on ranks instead of here."""
    if pyfuncitem.get_closest_marker("ddp") is None:
        return None
    from ddpdoctor.testing.on_ranks import call

    call(pyfuncitem)
    return True


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, None]:
    """Take the name of our own exception from the summary: what failed is said behind it."""
    report = (yield).get_result()
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        crash.message = crash.message.removeprefix("RanksFailed: ")


@pytest.fixture
def ddp_rank() -> NotYetKnown:
    """The rank that the body of a test with the mark ``ddp`` runs on: an int with ``world_size`` and ``device``."""
    from ddpdoctor.testing.ranks import NotYetKnown

    return NotYetKnown()


@pytest.fixture
def ddp_run(request: pytest.FixtureRequest) -> partial[list[Any]]:
    """A function for tests without the mark: ``ddp_run(function, *arguments, nproc=2, timeout=60, ...)``.

    It calls the function on so many ranks, and returns what each rank's call has, in their order.
    """
    from functools import partial

    from ddpdoctor.testing.on_ranks import run_function

    return partial(run_function, request.node)


@pytest.fixture
def ddp_rehearsal() -> Callable[..., Examination]:
    """The function ``ddpdoctor.rehearse``: it takes a script, its ``args``, ``nproc`` …, and returns the report."""
    from ddpdoctor.api import rehearse

    return rehearse
