"""The bundled examples do under plain torchrun what their docstrings say."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs_of_tests import kill_marked, marked

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))
ABORTED_AT_EXIT = "terminate called without an active exception"
"""What torch 2.13 with gloo sometimes prints at interpreter exit, after the script has done its work."""


@pytest.fixture
def torchrun(tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    kill_marked(tmp_path)
    for process in started:
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def _start(
    started: list[subprocess.Popen[str]], directory: Path, script: Path, *arguments: str
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    process = subprocess.Popen(
        [*command, *arguments],
        cwd=directory,
        env={**marked(os.environ, directory), "OMP_NUM_THREADS": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    started.append(process)
    return process


def test_there_is_a_healthy_one_and_one_for_each_headline_defect_and_each_thing_that_makes_jobs_slow() -> None:
    defects = ["missing_sampler", "rank_divergent_hang", "silent_desync", "unused_parameters", "wasted_buffers"]
    slow = ["comm_bound", "slow_loader", "straggler"]
    assert sorted(["healthy", *defects, *slow]) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_short_documented_and_knows_nothing_of_the_tool(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text()
    documentation = ast.get_docstring(ast.parse(text)) or ""
    assert 40 <= len(text.splitlines()) <= 80
    assert documentation.startswith("Broken: ") == (name != "healthy")
    assert f"torchrun --nproc-per-node 2 examples/{name}.py" in documentation
    assert "ddpdoctor" not in text


@pytest.mark.parametrize("name", ["healthy", "missing_sampler", "silent_desync", "wasted_buffers"])
def test_it_trains_to_its_end_on_two_ranks(name: str, tmp_path: Path, torchrun: list[subprocess.Popen[str]]) -> None:
    output = tmp_path / "output"
    output.mkdir()
    process = _start(torchrun, tmp_path, EXAMPLES / f"{name}.py", "--output-dir", str(output))
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0 or ABORTED_AT_EXIT in stderr, stderr
    numbers = [float(number) for number in re.findall(r"epoch \d: \D+([\d.]+)", stdout)]
    assert len(numbers) == 3
    assert sorted(numbers, reverse=name != "healthy") == numbers
    assert len(list(output.iterdir())) == 1


def test_unused_parameters_fail_in_the_second_step(tmp_path: Path, torchrun: list[subprocess.Popen[str]]) -> None:
    process = _start(torchrun, tmp_path, EXAMPLES / "unused_parameters.py")
    _, stderr = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "Expected to have finished reduction in the prior iteration" in stderr
    assert "Parameter indices which did not receive grad for rank 0: 2 3" in stderr


def test_the_divergent_ranks_hang_without_a_word(tmp_path: Path, torchrun: list[subprocess.Popen[str]]) -> None:
    code = (EXAMPLES / "rank_divergent_hang.py").read_text()
    script = tmp_path / "rank_divergent_hang.py"
    script.write_text(
        code.replace("evaluate(model, test_loader)", "(open('evaluating', 'w'), evaluate(model, test_loader))[1]")
    )
    process = _start(torchrun, tmp_path, script)
    deadline = time.monotonic() + 60
    while not (tmp_path / "evaluating").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    with pytest.raises(subprocess.TimeoutExpired):
        process.communicate(timeout=4)
    assert process.poll() is None


def test_the_silent_desync_ends_well_with_different_models(
    tmp_path: Path, torchrun: list[subprocess.Popen[str]]
) -> None:
    code = (EXAMPLES / "silent_desync.py").read_text()
    end = "    dist.destroy_process_group()\n"
    assert end in code
    save = "    torch.save(model.module.state_dict(), f'replica_{dist.get_rank()}.pt')\n"
    script = tmp_path / "silent_desync.py"
    script.write_text(code.replace(end, save + end))
    process = _start(torchrun, tmp_path, script)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0 or ABORTED_AT_EXIT in stderr, stderr
    import torch

    replicas = [torch.load(tmp_path / f"replica_{rank}.pt") for rank in range(2)]
    assert any(not torch.equal(replicas[0][name], replicas[1][name]) for name in replicas[0])
