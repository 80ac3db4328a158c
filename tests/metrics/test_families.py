"""What is served is what is documented, and what the dashboard and the alert rules ask for."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from ddpdoctor.diagnosis.performance.summarise import summarise
from ddpdoctor.metrics import FAMILIES, Address, MetricsServer
from ddpdoctor.monitor.build_snapshot import rank_views
from ddpdoctor.monitor.snapshot import Snapshot, WaitView
from ddpdoctor.record.model import Job, Rank, RunRecord
from ddpdoctor.record.streams.measured import Gpu
from tests.demo.job import demo_snapshot

ROOT = Path(__file__).parents[2]
S = 1_000_000_000
STARTED_NS = 1_700_000_000 * S
_NAME = re.compile(r"ddpdoctor_\w+")
_SELECTION = re.compile(r"(ddpdoctor_\w+)\{([^}]*)\}")
_MATCHER = re.compile(r"(\w+)\s*(=~|=)\s*\"([^\"]*)\"")


def _moment(elapsed_s: float) -> Snapshot:
    snapshot = demo_snapshot(int(elapsed_s * S), STARTED_NS)
    ranks = tuple(msgspec.structs.replace(rank, late_ns=1e6 * rank.rank) for rank in snapshot.ranks)
    return msgspec.structs.replace(snapshot, ranks=ranks)


def _in_trouble() -> Snapshot:
    """The demo's hang, with a wait and a GPU that slows itself down and has errors: every family has a sample."""
    snapshot = _moment(100)
    sample = msgspec.structs.replace(
        snapshot.gpus[0].samples[-1],
        taken_at_ns=snapshot.now_ns,
        throttle_reasons=("hot",),
        ecc_errors=3,
        power_w=250.0,
        sm_clock_mhz=1200,
    )
    gpu: Gpu = msgspec.structs.replace(snapshot.gpus[0], samples=(sample,))
    wait = WaitView(late=3, since_ns=snapshot.now_ns - 14 * S, text="ranks 0-2 have waited 14 s for rank 3")
    return msgspec.structs.replace(snapshot, gpus=(gpu,), wait=wait)


def _served(*snapshots: Snapshot) -> dict[str, list[Any]]:
    """The samples of all snapshots by their names, as the parser of prometheus_client reads them from the port."""
    from prometheus_client.openmetrics.parser import text_string_to_metric_families

    server = MetricsServer(Address("127.0.0.1", 0))
    found: dict[str, list[Any]] = {}
    try:
        for snapshot in snapshots:
            server.take(snapshot)
            request = urllib.request.Request(
                f"http://{server.address}/metrics", headers={"Accept": "application/openmetrics-text"}
            )
            with urllib.request.urlopen(request, timeout=30) as response:
                assert response.headers["Content-Type"].startswith("application/openmetrics-text")
                text = response.read().decode()
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    found.setdefault(sample.name, []).append(sample)
    finally:
        server.close()
    return found


@pytest.fixture(scope="module")
def served() -> dict[str, list[Any]]:
    return _served(_moment(10), _in_trouble())


def test_every_family_is_served_with_its_labels(served: dict[str, list[Any]]) -> None:
    assert {family.name: set(family.labels) for family in FAMILIES} == {
        name: set(samples[0].labels) for name, samples in served.items()
    }


def test_units_are_in_the_names() -> None:
    lacking = [family.name for family in FAMILIES if not family.name.removesuffix("_total").endswith(family.unit)]
    assert lacking == []


def test_the_figures_are_those_of_the_snapshot() -> None:
    snapshot = _moment(10)
    served = _served(snapshot)
    late = {sample.labels["rank"]: sample.value for sample in served["ddpdoctor_rank_late_seconds"]}
    assert late == {str(rank.rank): pytest.approx((rank.late_ns or 0) / 1e9) for rank in snapshot.ranks}
    assert snapshot.phases is not None
    together = sum(sample.value for sample in served["ddpdoctor_phase_seconds"])
    assert together == pytest.approx(snapshot.phases.step_ns / 1e9, rel=0.01)
    (hang,) = served["ddpdoctor_hang"]
    assert hang.value == 0 and "ddpdoctor_hang_culprit" not in served
    holds = {sample.labels["state"]: sample.value for sample in served["ddpdoctor_run_state"]}
    assert holds == {"waiting": 0, "running": 1, "stalled": 0, "ended": 0}


def test_a_hang_and_its_culprit_are_told() -> None:
    snapshot = _moment(100)
    served = _served(snapshot)
    assert snapshot.stall is not None
    named = [str(rank) for side in snapshot.stall.sides if side.culprit for rank in side.ranks]
    assert [sample.labels["rank"] for sample in served["ddpdoctor_hang_culprit"]] == named
    assert served["ddpdoctor_hang"][0].value == 1
    assert served["ddpdoctor_standstill_seconds"][0].value > 0
    unsure = msgspec.structs.replace(snapshot.stall, may_go_on=True)
    assert _served(msgspec.structs.replace(snapshot, stall=unsure))["ddpdoctor_hang"][0].value == 0


def test_what_was_cut_short_is_no_hang() -> None:
    snapshot = _moment(100)
    assert snapshot.stall is not None
    ended = msgspec.structs.replace(snapshot.stall, may_go_on=False, cut_short=True)
    assert _served(msgspec.structs.replace(snapshot, stall=ended))["ddpdoctor_hang"][0].value == 0


def test_groups_of_the_same_ranks_are_one_sample() -> None:
    snapshot = _moment(10)
    one = msgspec.structs.replace(snapshot.traffic[0], bytes_per_step=100.0, bus_bandwidth_bytes_per_s=7.0)
    other = msgspec.structs.replace(one, bytes_per_step=20.0, bus_bandwidth_bytes_per_s=9.0)
    unmeasured = msgspec.structs.replace(one, bytes_per_step=3.0, bus_bandwidth_bytes_per_s=None)
    served = _served(msgspec.structs.replace(snapshot, traffic=(one, other, unmeasured)))
    assert [sample.value for sample in served["ddpdoctor_traffic_bytes_per_step"]] == [123]
    assert [sample.value for sample in served["ddpdoctor_bus_bandwidth_bytes_per_second"]] == [9]


def test_a_rank_that_ended_well_has_not_failed() -> None:
    ranks = (
        Rank(rank=0, end="running"),
        Rank(rank=1, end="finished", exit_code=0, main_finished=True),
        Rank(rank=2, end="signalled", signal=6, main_finished=True),
        Rank(rank=3, end="left-by-exit", exit_code=0),
        Rank(rank=4, end="signalled", signal=9),
        Rank(rank=5, end="left-by-exit", exit_code=2),
        Rank(rank=6, end="raised"),
    )
    record = RunRecord(job=Job(kind="run", world_size=7), ranks=ranks)
    snapshot = msgspec.structs.replace(_moment(10), ranks=rank_views(record, summarise(record), 1))
    served = _served(snapshot)
    failed = {sample.labels["rank"] for sample in served["ddpdoctor_rank_failed"] if sample.value == 1}
    assert failed == {"4", "5", "6"}
    assert sum(sample.value for sample in served["ddpdoctor_rank_alive"]) == 1


def test_the_rule_on_ranks_that_have_failed_asks_not_who_is_alive() -> None:
    expressions = [text for alert, text in _expressions() if alert == "DdpRankGone"]
    assert any("ddpdoctor_rank_failed == 1" in text for text in expressions)
    assert not any("rank_alive" in text for text in expressions)


@pytest.mark.skipif(shutil.which("jq") is None, reason="there is no jq")
@pytest.mark.parametrize("hears", ["a hang", "no JSON"])
def test_the_documented_command_sends_a_message(hears: str, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    (script,) = [block for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL) if "jq" in block]
    (tmp_path / "notify.sh").write_text(script)
    (tmp_path / "curl").write_text(
        f'#!/bin/sh\nfor last; do :; done\necho "$last" > {tmp_path}/to\ncat > {tmp_path}/sent\n'
    )
    (tmp_path / "curl").chmod(0o755)
    text = 'train.py: rank 1 "stands"\nat $HOME'
    ended = subprocess.run(
        ("sh", tmp_path / "notify.sh"),
        input=json.dumps({"text": text, "culprits": []}) if hears == "a hang" else "{{",
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "WEBHOOK": "https://hooks/x"},
        text=True,
        check=False,
    )
    if hears == "a hang":
        assert ended.returncode == 0 and json.loads((tmp_path / "sent").read_text()) == {"text": text}
        assert (tmp_path / "to").read_text() == "https://hooks/x\n"
    else:
        assert ended.returncode != 0 and not (tmp_path / "sent").exists()


def test_what_is_not_known_or_old_has_no_sample() -> None:
    snapshot = _moment(10)
    ranks = tuple(msgspec.structs.replace(rank, phases=None, late_ns=None) for rank in snapshot.ranks)
    stale = msgspec.structs.replace(snapshot, now_ns=snapshot.now_ns + 60 * S, ranks=ranks, phases=None)
    served = _served(stale)
    absent = {
        "ddpdoctor_phase_seconds",
        "ddpdoctor_rank_phase_seconds",
        "ddpdoctor_rank_late_seconds",
        "ddpdoctor_gpu_utilisation_ratio",
    }
    assert absent & set(served) == set()


def test_the_documented_table_is_what_is_served() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(ddpdoctor_\w+)` \| (.*?) \| (.*?) \|$", page, re.MULTILINE)
    told = [(family.name, ", ".join(f"`{label}`" for label in family.labels), family.help) for family in FAMILIES]
    assert [(name, labels.strip(), text) for name, labels, text in rows] == told


def _expressions() -> Iterator[tuple[str, str]]:
    rules = yaml.safe_load((ROOT / "examples/metrics/alerts.yml").read_text())
    for rule in rules["groups"][0]["rules"]:
        yield rule["alert"], rule["expr"]
        yield rule["alert"], str(rule["annotations"])
    dashboard = json.loads((ROOT / "examples/metrics/grafana.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for entry in (*dashboard["annotations"]["list"], *dashboard["templating"]["list"]):
        yield entry["name"], str(entry.get("expr", "")) + str(entry.get("query", ""))


def test_the_rules_and_the_dashboard_ask_for_what_is_served(served: dict[str, list[Any]]) -> None:
    asked = {name for _, expression in _expressions() for name in _NAME.findall(expression)}
    assert asked <= set(served)
    assert len(asked) > 25
    phases = {sample.labels["phase"] for sample in served["ddpdoctor_phase_seconds"]}
    values = {"phase": phases, "severity": {"error", "warning", "advice"}, "state": {"running", "stalled"}}
    for _, expression in _expressions():
        for name, matchers in _SELECTION.findall(expression):
            for label, _, value in _MATCHER.findall(matchers):
                if label != "instance":
                    assert label in served[name][0].labels, name
                    assert set(value.split("|")) <= values[label], (name, label, value)


def test_legends_name_labels_that_are_there(served: dict[str, list[Any]]) -> None:
    dashboard = json.loads((ROOT / "examples/metrics/grafana.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            (first, *_) = _NAME.findall(target["expr"])
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert label in served[first][0].labels, (panel["title"], label)
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
