"""``ddpdoctor check`` on a script that does to its directory what no rule could hold back."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.check_command import check, with_our_tree
from tests.launch.box.conftest import WITHOUT_POWER

SCRIPT = """
import os, shutil, socket, subprocess, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if dist.get_rank() == 0:
    subprocess.run("rm -rf runs/old; echo gone > notes.txt; mv runs moved", shell=True, check=True)
    os.rename("cache", "cache-of-yesterday")
    shutil.rmtree("moved")
    with open("config.yaml", "r+") as file:
        file.truncate(0)
    subprocess.Popen(["env", "-i", "setsid", "-f", "sleep", sys.argv[2]])
    try:
        socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=5).close()
        raise SystemExit("the network is there")
    except OSError:
        pass
for step in range(3):
    optimizer.zero_grad()
    model(torch.randn(2, 4)).mean().backward()
    optimizer.step()
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), "last.pt")
dist.barrier()
dist.destroy_process_group()
"""


def tree(directory: Path) -> dict[str, object]:
    """What lies below a directory: mode, time of change and content."""
    return {
        str(path.relative_to(directory)): (
            path.stat().st_mode,
            path.stat().st_ctime_ns,
            path.read_bytes() if path.is_file() else None,
        )
        for path in sorted(directory.rglob("*"))
    }


def test_nothing_of_it_stays_nothing_survives_and_what_was_written_can_be_kept(tmp_path: Path) -> None:
    project = tmp_path / "project"
    for name in ("runs/old/ckpt.pt", "runs/best.pt", "cache/deep/tokens.bin", "notes.txt", "config.yaml", "last.pt"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(f"{name} of the user\n")
    (project / "train.py").write_text(SCRIPT)
    before, seconds = tree(project), f"4321.{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as server:
        words = ("--no-network", "--keep", "train.py", "--", str(server.getsockname()[1]), seconds)
        exit_code, report = check(*words, cwd=project, XDG_STATE_HOME=str(tmp_path / "state"))
    rehearsal = report["rehearsal"]
    if not rehearsal["overlay"]:
        pytest.skip(f"the kernel allows no overlay here: {rehearsal['notes']}")
    assert tree(project) == before
    assert (exit_code, rehearsal["status"]) == (0, "completed"), report
    assert not [each for each in psutil.process_iter(["cmdline"]) if seconds in (each.info["cmdline"] or ())]
    (note,) = (note for note in rehearsal["notes"] if "is kept below" in note)
    assert note.endswith(": config.yaml; last.pt; notes.txt")
    assert not any("not held back" in note for note in rehearsal["notes"])
    below = Path(note.partition("kept below ")[2].partition(": ")[0])
    assert (below / "config.yaml").read_text() == "" and (below / "notes.txt").read_text() == "gone\n"
    assert not list((tmp_path / "state" / "ddpdoctor" / "runs").iterdir())


def test_a_file_of_another_owner_is_no_fault_of_the_script_where_no_overlay_can_stand_for_him(tmp_path: Path) -> None:
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root can make a file of another owner, and only setpriv gives up root's powers")
    append = "    with open('log.txt', 'a') as file:\n        file.write('new')\n"
    (tmp_path / "train.py").write_text(SCRIPT.partition("    subprocess.run")[0] + append + "dist.barrier()\n")
    (tmp_path / "log.txt").write_text("shared\n")
    os.chown(tmp_path / "log.txt", 1234, 5678)
    (tmp_path / "log.txt").chmod(0o666)
    done = subprocess.run(
        [*WITHOUT_POWER, sys.executable, "-m", "ddpdoctor", "check", "--output-format", "json", "train.py"],
        cwd=tmp_path,
        env=with_our_tree(XDG_STATE_HOME=str(tmp_path / "state")),
        capture_output=True,
        text=True,
    )
    report = json.loads(done.stdout)
    if any("no overlay could be made" in note for note in report["rehearsal"]["notes"]):
        pytest.skip("the kernel allows no overlay here")
    assert (tmp_path / "log.txt").read_text() == "shared\n"
    assert done.returncode == 3
    assert [finding for finding in report["findings"] if finding["severity"] != "advice"] == []
    assert "train.py:" in report["rehearsal"]["reason"] and "overlay" in report["rehearsal"]["reason"]
    assert "--no-overlay" in report["rehearsal"]["hint"]


ASKS = """
import socket, sys, urllib.request
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def ask(question):
    try:
        question()
    except OSError:
        pass


dist.init_process_group("gloo")
own = socket.create_server((socket.gethostname(), 0))
socket.create_connection(own.getsockname()).close()
ask(lambda: urllib.request.urlopen("https://data.example.org/tokens.bin"))
ask(lambda: socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=5))
ask(lambda: socket.socket(socket.AF_UNIX).connect("service"))
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    model(torch.randn(2, 4)).mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""


def test_what_is_asked_for_outside_is_blocked_and_said_and_the_jobs_own_is_not(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ASKS)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as service:
        service.bind(str(tmp_path / "service"))
        service.listen()
        port = str(server.getsockname()[1])

        def rehearsed(*options: str) -> tuple[dict[str, object], str]:
            words = (*options, "train.py", "--", port)
            _, report = check(*words, cwd=tmp_path, XDG_STATE_HOME=str(tmp_path / "state"))
            assert report["rehearsal"]["status"] == "completed", report
            return report["rehearsal"], "; ".join(report["rehearsal"]["notes"])

        rehearsal, notes = rehearsed()
        if not rehearsal["overlay"]:
            pytest.skip(f"the kernel allows no box here: {notes}")
        assert f"data.example.org:443 at train.py:18; 127.0.0.1:{port} at train.py:19, which is blocked" in notes
        assert "/service at train.py:20, which is blocked" in notes
        assert "not isolated" not in notes and notes.count("127.0.0.1:") == 1
        _, notes = rehearsed("--network", "--allow-socket", "service")
        assert f"and contacted data.example.org:443; 127.0.0.1:{port}" in notes
        assert "/service" in notes.partition("could reach …")[2] and "blocked" not in notes


def test_a_socket_that_is_allowed_must_be_there(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\n")
    words = [sys.executable, "-m", "ddpdoctor", "check", "--allow-socket", "nothing", "train.py"]
    done = subprocess.run(words, cwd=tmp_path, env=with_our_tree(), capture_output=True, text=True)
    assert done.returncode == 2 and "no socket is there" in done.stderr
