"""The suite for GPU machines where there is none: what it refuses, what it pretends, and how its parts end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import psutil
import pytest
from packaging.requirements import Requirement

from tests.on_gpu.__main__ import MOST_S, NEEDED, WHEELS
from tests.on_gpu.claims import Bench, Claim, Row, rows_of, table_of, with_missing
from tests.on_gpu.device import look
from tests.on_gpu.parts.phases import phase_ms
from tests.on_gpu.parts.stand_in import differences
from tests.on_gpu.suite import PARTS, ROOT, module_of, run_part, run_suite

BROKEN = "tests.on_gpu.broken"
BROUGHT_BY_TORCH = {"jinja2", "markupsafe", "typing-extensions"}


def suite(*arguments: str, limit_s: float = 250) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        (sys.executable, "-m", "tests.on_gpu", *arguments),
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )


def outcomes(rows: list[Row]) -> dict[str, str]:
    return {row.key: row.outcome for row in rows}


def test_without_a_gpu_it_refuses_in_one_sentence_and_says_what_can_be_done() -> None:
    done = suite()
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("There is no GPU to measure on: torch ")
    assert done.stderr.endswith("`--pretend` runs what needs none.\n")
    assert len(done.stderr.splitlines()) == 1


def test_a_directory_with_results_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text("kept")
    done = suite("--pretend", "--only", "screen", "--out", str(tmp_path))
    assert (done.returncode, (tmp_path / "results.json").read_text()) == (2, "kept")


def test_one_part_is_pretended_with_a_table_and_json(tmp_path: Path) -> None:
    done = suite("--pretend", "--only", "screen", "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "out" / "results.json").read_text())
    assert document["machine"]["pretended"]
    assert {row["outcome"] for row in document["rows"]} == {"right"}
    for row in document["rows"]:
        assert row["claim"] in done.stdout
    assert "pretended: 5 claims, 5 right, 0 WRONG, 0 not measured, 0 not here" in done.stdout


@pytest.mark.parametrize(
    ("way", "limit_s", "why"),
    [
        ("hangs", 15.0, "its 15 s are over"),
        ("crashes", 30.0, "the part ended with code -11"),
        ("loses its device", 60.0, "the part ended with code 1: RuntimeError: the NVIDIA driver has not answered for"),
    ],
)
def test_a_part_that_comes_to_a_bad_end_ends_in_time_with_a_row_for_each_claim(
    way: str, limit_s: float, why: str, tmp_path: Path
) -> None:
    began_s = time.monotonic()
    rows = run_part(BROKEN, tmp_path / "part", limit_s, pretends=False, variables={"BROKEN": way})
    assert time.monotonic() - began_s < limit_s + 20
    known = outcomes(rows)
    assert known == {"before": "right", "after": "not measured", "never": "not measured"}
    assert next(row.note for row in rows if row.key == "after").startswith(why)
    child = tmp_path / "part" / "child"
    deadline_s = time.monotonic() + 60
    while child.exists() and is_alive(int(child.read_text())):
        assert time.monotonic() < deadline_s, "the job of the part is left behind"
        time.sleep(0.1)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that was killed may wait for its parent."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_once_the_device_is_gone_no_other_part_is_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tests.on_gpu.suite.module_of", lambda name: BROKEN)
    monkeypatch.setenv("BROKEN", "crashes")
    asked: list[str] = []

    def trouble() -> str:
        asked.append("asked")
        return "it fell off the bus"

    parts = run_suite(("one", "two", "three"), tmp_path, pretends=False, trouble_with_device=trouble, most_s=100)
    first, second, third = parts
    assert outcomes(first)["before"] == "right"
    assert asked == ["asked"]
    for rows in (second, third):
        assert {(row.outcome, row.note) for row in rows} == {
            ("not measured", "the device is gone: it fell off the bus")
        }
        assert len(rows) == 3


def test_no_part_begins_once_the_time_is_over(tmp_path: Path) -> None:
    (rows,) = run_suite(("screen",), tmp_path, pretends=True, trouble_with_device=lambda: "", most_s=0)
    assert {(row.outcome, row.note) for row in rows} == {("not measured", "no time was left")}


def test_the_parts_together_are_bounded() -> None:
    import importlib

    modules = [importlib.import_module(module_of(name)) for name in PARTS]
    assert sum(module.LIMIT_S for module in modules) <= MOST_S
    assert all(any(claim.pretends for claim in module.CLAIMS.values()) for module in modules)
    files = {path.stem for path in (Path(__file__).parent / "parts").glob("*.py")} - {"__init__"}
    assert files == set(PARTS)


def test_a_driver_that_answers_no_one_is_not_waited_for() -> None:
    began_s = time.monotonic()
    machine, trouble = look(within_s=0.05)
    assert time.monotonic() - began_s < 20
    assert "torch cannot be asked" in trouble
    assert machine["count"] == 0


def test_rows_say_what_was_expected_and_a_cut_off_line_is_left_out(tmp_path: Path) -> None:
    claims = {name: Claim(f"claim {name}", "4") for name in ("a", "b", "c", "d", "e")}
    bench = Bench("part", claims, tmp_path, tmp_path / "rows", pretends=False)
    bench.near("a", 100.0, 109.0, share=0.1)
    bench.near("b", 100.0, 111.0, share=0.1)
    bench.near("c", 100.0, None, share=0.1)
    bench.leave_out("d", "there is no such thing")
    with (tmp_path / "rows").open("a") as file:
        file.write('{"part": "part", "key": "e"')
    rows = with_missing(rows_of(tmp_path / "rows"), "part", claims, pretends=False, why="it crashed")
    assert outcomes(rows) == {"a": "right", "b": "WRONG", "c": "WRONG", "d": "not here", "e": "not measured"}
    table = table_of(rows)
    assert "expected 100 within 10%; measured 111" in table
    assert "measured it crashed" in table


def test_a_phase_on_the_gpu_begins_when_what_came_before_it_has_ended() -> None:
    def span(cat: str, name: str, ts: float, dur: float, **args: int) -> dict[str, object]:
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}

    trace = [
        span("user_annotation", "step 4 forward", 100, 50),
        span("user_annotation", "step 4 backward", 160, 40),
        span("cuda_runtime", "cudaLaunchKernel", 110, 5, correlation=1),
        span("cuda_runtime", "cudaLaunchKernel", 140, 5, correlation=2),
        # From autograd's thread, while backward waits in its own.
        span("cuda_driver", "cuLaunchKernel", 170, 5, correlation=3),
        span("kernel", "gemm", 120, 2000, correlation=1),
        span("kernel", "relu", 2120, 1000, correlation=2),
        span("kernel", "gemm", 3120, 4000, correlation=3),
        span("kernel", "of another trace", 9000, 4000, correlation=77),
    ]
    # The GPU had nothing to do when the forward began: its beginning is the host's.
    assert phase_ms(trace, 4, "forward", on_gpu=True) == pytest.approx(3.02)
    assert phase_ms(trace, 4, "backward", on_gpu=True) == pytest.approx(4.0)
    assert phase_ms(trace, 4, "forward", on_gpu=False) == pytest.approx(0.05)


def test_types_differ_only_where_bfloat16_does_not_stand_for_float16() -> None:
    linear, loss = ("forward", "Linear"), ("forward", "MSELoss")
    served = {linear: frozenset({("float32 -> bfloat16", "cpu")}), loss: frozenset({("bfloat16 -> bfloat16", "cpu")})}
    real = {linear: frozenset({("float32 -> float16", "cuda")}), loss: frozenset({("float16 -> float32", "cuda")})}
    assert differences(served, {linear: real[linear]}) == []
    (words,) = differences(served, real)
    assert words.startswith("MSELoss in a forward")


def test_the_wheels_are_all_that_ddpdoctor_needs_beside_torch() -> None:
    lines = [line for line in WHEELS.read_text().splitlines() if line and not line.startswith("#")]
    listed = {Requirement(line).name for line in lines}
    wanted, todo = set[str](), [("ddpdoctor", frozenset({""}))]
    while todo:
        package, extras = todo.pop()
        for needed in map(Requirement, metadata.requires(package) or ()):
            name, marker = needed.name.lower().replace("_", "-"), needed.marker
            in_force = marker is None or any(
                marker.evaluate({"extra": extra, "python_version": "3.12"}) for extra in extras
            )
            if in_force and name not in wanted | BROUGHT_BY_TORCH:
                wanted.add(name)
                todo.append((name, frozenset({"", *needed.extras})))
    assert wanted == listed
    modules = {"jinja2", "torch", *(name.replace("-", "_") for name in listed)}
    assert {{"pynvml": "nvidia_ml_py", "yaml": "pyyaml", "zmq": "pyzmq"}.get(name, name) for name in NEEDED} <= modules


@pytest.mark.gpu
@pytest.mark.timeout(1_600)
def test_what_is_said_of_a_gpu_is_right(tmp_path: Path) -> None:
    if trouble := look()[1]:
        pytest.skip(trouble)
    done = subprocess.run(
        (sys.executable, "-m", "tests.on_gpu", "--out", str(tmp_path / "out")),
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
