"""A failed assertion reads on ranks as it does in plain pytest, conftest's own explanations included."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from tests.pytest_plugin.session import Session, run_pytest

CONFTEST = """
import pytest
class Size:
    def __init__(self, value): self.value = value
    def __eq__(self, other): return self.value == other.value
@pytest.fixture
def size(): return Size(3)
def pytest_assertrepr_compare(op, left, right):
    if isinstance(left, Size) and op == "==":
        return ["sizes differ", f"by {right.value - left.value} %"]
"""
BODIES = """
import pytest
import torch
from dataclasses import dataclass
@dataclass
class Point:
    x: int
    y: int
def helper(value):
    __tracebackhide__ = True
    assert value == 2, "helped"
def test_dict(): assert {"loss": 1, "same": [1, 2]} == {"loss": 2, "same": [1, 2]}
def test_text(): assert "a line\\nwith another\\nthird" == "a line\\nwith other\\nthird"
def test_long_text(): assert "x" * 300 == "x" * 200 + "y" * 100
def test_list(): assert list(range(40)) == [*range(39), 5]
def test_set(): assert {1, 2} == {2, 3}
def test_dataclass(): assert Point(1, 2) == Point(1, 3)
def test_tensor(): assert torch.ones(3).sum() == 4
def test_tensors(): assert torch.equal(torch.ones(2), torch.zeros(2))
def test_bytes(): assert b"one" == b"two"
def test_not_in(): assert "ab" not in "cabd"
def test_approx(): assert 0.1 + 0.3 == pytest.approx(0.3)
def test_percent(): assert ["50 %", "%s"] == ["50 %", "%d"]
def test_message(): assert 1 == 2, "my message"
def test_none(): assert None is not None
def test_conftest(size): assert size == type(size)(5)
def test_helper(): helper(3)
def test_chained(): assert 1 < torch.tensor(3).item() < 2
def test_is(size): assert size is torch
def test_in_list(): assert 7 in [len(word) for word in ("one", "three")]
def test_no_instance(): assert isinstance(torch.ones(1), str)
def test_all(): assert all([number > 0 for number in (1, -1)])
def test_both(): assert len("ab") == 2 and not {"a": 1}.get("a")
def test_raises():
    with pytest.raises(ValueError, match="x"):
        raise ValueError("y")
"""
NAMES = re.findall(r"def (test_\w+)", BODIES)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    folder = tmp_path_factory.mktemp("comparisons")
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_here.py").write_text(BODIES)
    (folder / "test_ranks.py").write_text(
        f"{BODIES}\npytestmark = pytest.mark.ddp\n".replace("def test_", "def test_on_")
    )
    return run_pytest(folder)


def explanations(text: str) -> Counter[str]:
    """The lines of an explanation, how often each: what differs from run to run is masked."""
    lines = [re.sub(r"0x[0-9a-f]+", "0x", line) for line in text.splitlines() if line.startswith("E ")]
    return Counter(lines)


@pytest.mark.parametrize("name", NAMES)
def test_an_assertion_reads_on_ranks_as_in_plain_pytest(session: Session, name: str) -> None:
    plain = explanations(session.messages[name])
    _, of_first, of_second = session.messages[name.replace("test_", "test_on_")].rsplit(" of 2: failed -", 2)
    assert plain and explanations(of_first) == explanations(of_second) == plain


def test_frames_that_hide_themselves_are_hidden(session: Session) -> None:
    assert "__tracebackhide__" not in session.messages["test_on_helper"]
    assert "raises.py" not in session.messages["test_on_raises"]


def test_the_summary_says_what_failed_and_not_the_name_of_an_exception_of_ours(session: Session) -> None:
    assert "RanksFailed" not in session.output
    assert "every rank failed: AssertionError: helped" in session.messages["test_on_helper"]
