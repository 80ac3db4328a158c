"""Which runs are put together: those of nodes of one job, and never those of two that ran at once."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from ddpdoctor.errors import UsageError
from ddpdoctor.profile.recorded_run import _refuse_others
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.setup import Node
from tests.diagnosis.measured_job import MeasuredJob

RECORD = MeasuredJob(2).run(5, {"forward": 20.0}).record()


def met_at(address: str, port: str) -> RunRecord:
    environment = {"MASTER_ADDR": address, "MASTER_PORT": port} if address else {}
    return msgspec.structs.replace(RECORD, nodes=(Node(host="node0", ranks=(0, 1), environment=environment),))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("10.0.0.1", "29500"), ("10.0.0.1", "29501")),
        (("node0", "29500"), ("node7", "29500")),
    ],
)
def test_runs_whose_ranks_met_elsewhere_are_of_two_jobs(one: tuple[str, str], other: tuple[str, str]) -> None:
    with pytest.raises(UsageError, match="belong to two jobs: one has its rendezvous at "):
        _refuse_others(Path("a"), met_at(*one), Path("b"), met_at(*other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("node0", "29500"), ("10.0.0.1", "29500")),
        (("localhost", "29500"), ("node0", "29500")),
        (("127.0.0.1", "29500"), ("127.0.1.1", "29500")),
        (("", ""), ("node0", "29500")),
        (("node0", "29500"), ("Node0.cluster.local", "29500")),
        (("10.0.0.1", "29500"), ("192.168.7.1", "29500")),
        (("ip6-localhost", "29500"), ("node0", "29500")),
    ],
)
def test_one_machine_may_have_several_names(one: tuple[str, str], other: tuple[str, str]) -> None:
    _refuse_others(Path("a"), met_at(*one), Path("b"), met_at(*other))


def test_the_launchers_number_of_the_job_decides_where_there_is_one() -> None:
    def of_job(number: str, port: str) -> RunRecord:
        environment = {"MASTER_ADDR": "node0", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": number}
        return msgspec.structs.replace(RECORD, nodes=(Node(host="node0", ranks=(0, 1), environment=environment),))

    # An elastic job that has lost its first node meets elsewhere in the next round.
    _refuse_others(Path("a"), of_job("7", "29500"), Path("b"), of_job("7", "29501"))
    with pytest.raises(UsageError, match="belong to two jobs"):
        _refuse_others(Path("a"), of_job("7", "29500"), Path("b"), of_job("8", "29500"))
    with pytest.raises(UsageError, match="belong to two jobs"):
        _refuse_others(Path("a"), of_job("none", "29500"), Path("b"), of_job("none", "29501"))
