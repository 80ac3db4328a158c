"""The memory that training a model needs, against what is free."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from ddpdoctor.probe.rehearsal.surroundings import Need, free_bytes, need_of, shortage


def _parameter(count: int, trained: bool = True, device: str = "cpu", size: int = 4) -> SimpleNamespace:
    return SimpleNamespace(
        device=SimpleNamespace(type=device), requires_grad=trained, numel=lambda: count, element_size=lambda: size
    )


def test_trained_parameters_need_sixteen_bytes_and_frozen_ones_their_own() -> None:
    parameters = [_parameter(1_000), _parameter(500, trained=False), _parameter(9_999, device="cuda")]
    assert need_of(parameters, ranks=2) == Need(1_500, 2 * (16_000 + 2_000), 2 * 12_000)


def test_a_shortage_is_said_with_its_numbers() -> None:
    need = Need(7_000_000_000, 224_000_000_000, 168_000_000_000)
    assert shortage(need, 168_000_000_000, 2) == ""
    assert shortage(need, None, 2) == ""
    assert shortage(need, 60_000_000_000, 2) == (
        "the model has 7,000,000,000 parameters: 2 ranks need 224.0 GB for weights, gradients and optimizer state, "
        "168.0 GB of it still to come, and 60.0 GB of memory are free"
    )


@pytest.mark.parametrize(("limit", "free"), [("max", 8_000 * 1024), ("5000000", 4_000_000), ("900000", 0)])
def test_a_container_has_less_than_its_machine(tmp_path: Path, limit: str, free: int) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")
    group = tmp_path / "sys" / "fs" / "cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text(limit + "\n")
    (group / "memory.current").write_text("1000000\n")
    assert free_bytes(str(tmp_path)) == free


def test_where_nothing_is_known_nothing_is_said(tmp_path: Path) -> None:
    assert free_bytes(str(tmp_path)) is None
