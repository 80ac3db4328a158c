from __future__ import annotations

import msgspec
import pytest

from ddpdoctor.diagnosis.performance.traffic import Link, link_of
from ddpdoctor.monitor.gpus import nvlink_bytes_per_s, pcie_bytes_per_s
from ddpdoctor.record.streams.collectives import Group
from ddpdoctor.record.streams.measured import Gpu
from tests.gpu.jobs import gpu, record

ALL = (0, 1, 2, 3)


def four(name: str = "NVIDIA H100 80GB HBM3", nvlink: float | None = 478e9, pcie: float | None = 63e9) -> list[Gpu]:
    return [
        msgspec.structs.replace(gpu(index, ()), name=name, nvlink_bytes_per_s=nvlink, pcie_bytes_per_s=pcie)
        for index in ALL
    ]


def test_the_link_of_a_group_is_its_slowest() -> None:
    gpus = four()
    gpus[2] = msgspec.structs.replace(gpus[2], nvlink_bytes_per_s=239e9)
    assert link_of(record(gpus), ALL) == Link(kind="NVLink", bytes_per_s=239e9)
    assert link_of(record(gpus), (0, 1)) == Link(kind="NVLink", bytes_per_s=478e9)
    assert link_of(record(four(nvlink=None)), ALL) == Link(kind="PCIe", bytes_per_s=63e9)
    gpus[2] = msgspec.structs.replace(gpus[2], nvlink_bytes_per_s=None)
    assert link_of(record(gpus), ALL) == Link(kind="PCIe", bytes_per_s=63e9)


def test_bridges_join_pairs_and_no_larger_groups() -> None:
    bridged = four(name="NVIDIA A100 80GB PCIe", nvlink=300e9, pcie=31e9)
    assert link_of(record(bridged), (0, 1)) == Link(kind="NVLink", bytes_per_s=300e9)
    assert link_of(record(bridged), ALL) == Link(kind="PCIe", bytes_per_s=31e9)


def test_what_this_node_does_not_show_has_no_known_link() -> None:
    assert link_of(record(four()), (*ALL, 4)) is None
    assert link_of(record(four(nvlink=None, pcie=None)), ALL) is None
    assert link_of(record(four(), backend="gloo"), ALL) is None
    assert link_of(record([msgspec.structs.replace(gpu(0, ()), ranks=ALL, pcie_bytes_per_s=63e9)]), ALL) is None
    on_cpu = msgspec.structs.replace(record(four()), groups=(Group(ranks=(0, 1), backend="gloo"),))
    assert link_of(on_cpu, (1, 0)) is None
    assert link_of(on_cpu, ALL) is not None


def test_speeds_of_links_by_their_standards() -> None:
    assert pcie_bytes_per_s(4, 16) == pytest.approx(31.5e9, rel=0.01)
    assert pcie_bytes_per_s(None, 16) is None
    assert pcie_bytes_per_s(9, 16) is None
    assert pcie_bytes_per_s(4, 0) is None
    assert nvlink_bytes_per_s(12, 25_781, 3) == pytest.approx(309e9, rel=0.01)
    assert nvlink_bytes_per_s(18, None, 5) == pytest.approx(900e9)
    assert nvlink_bytes_per_s(2, None, None) is None
