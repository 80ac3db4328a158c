"""Two machines, each with its own network, name, home and files: what their monitors find out together."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.nodes.jobs import CASES, HAS_COMPILER, SCRIPT, report, run, until, wrong
from tests.nodes.machines import Machine, machines, watched, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "never")


def told(machine: Machine, *words: str) -> subprocess.CompletedProcess[str]:
    """What ddpdoctor says where nothing runs any more."""
    command = (sys.executable, "-m", "ddpdoctor", *words)
    return subprocess.run(command, cwd=machine.home, capture_output=True, text=True, timeout=120, check=False)


def runs(*nodes: Machine) -> list[str]:
    return [str(path) for node in nodes for path in (node.home / "state/ddpdoctor/runs").iterdir()]


def test_a_straggler_on_the_other_machine_is_named_with_nothing_given(tmp_path: Path) -> None:
    outcome = run(CASES["straggler"], tmp_path, ahead_s=5 if HAS_COMPILER else 0)
    assert wrong(CASES["straggler"], outcome) == []
    assert any("the verdict on all ranks is on node0" in note for note in outcome.agent["notes"])
    hosts = {rank["rank"]: rank["host"] for rank in outcome.head["ranks"]}
    assert hosts == {0: "node0", 1: "node0", 2: "node1", 3: "node1"}


@pytest.mark.full
@pytest.mark.parametrize("name", list(CASES))
def test_the_truth_table(name: str, tmp_path: Path) -> None:
    assert wrong(CASES[name], run(CASES[name], tmp_path)) == []


@pytest.fixture
def straggling(tmp_path: Path) -> Any:
    """Starts the job of a straggler on two machines."""
    (tmp_path / "train.py").write_text(SCRIPT)

    def start(both: list[Machine], steps: int) -> list[subprocess.Popen[bytes]]:
        return [
            machine.start([*watched(machine, both[0], number, tmp_path / "train.py"), "straggler", str(steps)])
            for number, machine in enumerate(both)
        ]

    return start


def test_machines_whose_monitors_cannot_talk_are_put_together_afterwards(tmp_path: Path, straggling: Any) -> None:
    with machines(tmp_path) as both:
        # A firewall that lets through what torch uses, and drops the rest without a word.
        first, second = both
        first.run("ip", "address", "add", "192.0.2.1/32", "dev", "lo")
        started = [
            process
            for number, machine in enumerate(both)
            for process in [
                machine.start(
                    [
                        *(sys.executable, "-m", "ddpdoctor", "profile", "--no-tui", "--output-format", "json"),
                        *("--head", "192.0.2.1:29600", "-o", "report.json"),
                        *watched(machine, first, number, tmp_path / "train.py")[9:],
                        *("straggler", "120"),
                    ]
                )
            ]
        ]
        for process in started:
            assert process.wait(timeout=240) == 0
        assert any("2 of 4 ranks reported" in note for note in report(first)["notes"])
        assert any("cannot receive this node's ranks (192.0.2.1: " in note for note in report(second)["notes"])
        together = told(first, "report", *reversed(runs(first, second)))
        assert together.returncode == 0, together.stderr
        assert "rank 3 on node1 keeps the others waiting for " in " ".join(together.stdout.split())
        shutil.copytree(runs(first)[0], tmp_path / "copy")
        for wrongly, complaint in (
            ((runs(first)[0], str(tmp_path / "copy")), "both have ranks 0 and 1"),
            ((runs(first)[0], str(tmp_path / "none")), "there is no run directory"),
        ):
            refused = told(first, "report", *wrongly)
            assert refused.returncode == 2 and complaint in " ".join(refused.stderr.split())


@pytest.mark.full
def test_a_monitor_that_dies_leaves_the_training_and_the_other_record_alone_and_may_come_back(
    tmp_path: Path, straggling: Any
) -> None:
    with machines(tmp_path) as both:
        first, second = both
        head, agent = straggling(both, 250)
        until(lambda: "the verdict on all ranks is on node0" in second.text())
        head.send_signal(signal.SIGKILL)
        head.wait()
        (directory,) = runs(first)
        attaching = ("profile", "--run-dir", directory, "--no-tui", "--output-format", "json", "-o", "again.json")
        again = first.start([sys.executable, "-m", "ddpdoctor", *attaching], output="again.txt")
        assert again.wait(timeout=240) == 0
        assert agent.wait(timeout=240) == 0
        back = json.loads((first.home / "again.json").read_text())
        assert [rank["rank"] for rank in back["ranks"]] == [0, 1, 2, 3]
        assert back["verdict"]["text"].startswith("rank 3 on node1 keeps the others waiting for ")
        assert len(report(second)["ranks"]) == 2 and report(second)["verdict"]["code"] == "DDP403"


@pytest.mark.full
def test_a_machine_whose_monitor_dies_is_not_judged_any_more(tmp_path: Path, straggling: Any) -> None:
    with machines(tmp_path) as both:
        first, second = both
        head, agent = straggling(both, 250)
        until(lambda: "the verdict on all ranks is on node0" in second.text())
        agent.send_signal(signal.SIGKILL)
        agent.wait()
        assert head.wait(timeout=240) == 0
        ended = report(first)
        assert any("no message from node1 (ranks 2 and 3) for " in note for note in ended["notes"])
        assert ended["verdict"]["state"] == "unknown"
        assert ended["verdict"]["text"] == "2 of 4 ranks are visible here, and nothing slow was found on these"


@pytest.mark.full
def test_machines_that_have_ipv6_alone_are_joined(tmp_path: Path, straggling: Any) -> None:
    with machines(tmp_path, only_ipv6=True) as both:
        for process in straggling(both, 120):
            assert process.wait(timeout=240) == 0
        assert report(both[0])["verdict"]["text"].startswith("rank 3 on node1 keeps the others waiting for ")
        assert any("the verdict on all ranks is on node0" in note for note in report(both[1])["notes"])


@pytest.mark.full
def test_a_link_that_is_cut_for_a_minute_ends_nothing_and_is_told(tmp_path: Path, straggling: Any) -> None:
    with machines(tmp_path) as both:
        first, second = both
        started = straggling(both, 250)
        until(lambda: "the verdict on all ranks is on node0" in second.text())
        until(lambda: "steps/s" in first.text())
        second.cut()
        cut_s = time.monotonic()
        until(lambda: "no message from node1 (ranks 2 and 3) for " in first.text())
        until(lambda: "node0 cannot receive this node's ranks" in second.text())
        time.sleep(max(0.0, cut_s + 60 - time.monotonic()))
        assert "STALLED" not in first.text() + second.text()
        second.cut(down=False)
        for process in started:
            assert process.wait(timeout=240) == 0
        ended = report(first)
        assert [rank["rank"] for rank in ended["ranks"]] == [0, 1, 2, 3]
        assert ended["verdict"]["text"].startswith("rank 3 on node1 keeps the others waiting for ")
        assert not any("no message from" in note for note in ended["notes"])
