"""Ten of PyTorch's own tests in both ways, and all suites with ``-m full``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.peers.rows import SUITES
from tests.peers.suites import Compared, compare, in_two_lanes

MIRROR = "DDPDOCTOR_PEERS_MIRROR"
"""Environment variable with the folder of snapshots for the whole table."""
_SAMPLE = (
    "test_ddp_logging_data_cpu",
    "test_static_graph_api_cpu",
    "test_DistributedDataParallelCPU",
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_DistributedDataParallel_requires_grad",
    "test_ddp_create_graph",
    "test_accumulate_gradients_no_sync",
    "test_all_reduce_coalesced_sum",
    "test_send_recv_any_source_autograd_profiler",
    "test_gather_checks",
)


@pytest.mark.timeout(280)
def test_a_sample_of_torchs_own_tests_ends_as_without_the_doctor(tmp_path: Path) -> None:
    compared = compare(SUITES[0], tmp_path, None, _SAMPLE)
    assert compared.plain == {**dict.fromkeys(_SAMPLE, "passed"), "(exit code)": "0"}
    assert compared.differing == [], compared


def test_what_is_not_there_is_said_and_not_passed(tmp_path: Path) -> None:
    lacking = [compare(suite, tmp_path, None) for suite in SUITES if suite.repository]
    assert len(lacking) >= 5
    assert all(one.lacks and not one.plain and not one.watched for one in lacking)


def test_another_outcome_and_a_missing_one_are_differences() -> None:
    compared = Compared("peer", "", {"a": "passed", "b": "passed", "c": "skipped"}, {"a": "failed", "c": "skipped"}, {})
    assert compared.differing == ["a", "b"]


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_every_suite_ends_as_without_the_doctor(tmp_path: Path) -> None:
    given = os.environ.get(MIRROR)
    mirror = Path(given) if given else None
    assert [one for one in in_two_lanes(lambda suite: compare(suite, tmp_path, mirror), SUITES) if one.differing] == []
