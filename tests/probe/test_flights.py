"""torch's flight recorder: whose entries there are, who issued them, and how they are read and written."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ddpdoctor.probe.journal import Journal
from ddpdoctor.probe.live.heartbeat import DUMPED_AGAIN, LATE_DUMPS_NS, SUSPICIOUS_AFTER_MS, HeartbeatThread
from ddpdoctor.probe.user_code import origin_of

# Entries of torch's flight recorder are those of this world by their numbers, whatever the system's clock says.
_RANK = """
import json, pickle, sys
from types import SimpleNamespace
import torch, torch.distributed as dist
from ddpdoctor.probe.groups import GroupBook
from ddpdoctor.probe.journal import Journal
from ddpdoctor.probe.live.flight_recorder import Flights

directory, back_s = sys.argv[1], int(sys.argv[2])
journal = Journal(directory, {"project_root": directory})
groups, calls = GroupBook(journal, torch), 0


def recorder(**_):
    # This is what torch's recorder would hold had the clock been set back when the second world was there.
    entries = torch._C._distributed_c10d._dump_fr_trace(includeCollectives=True, includeStackTraces=True)
    entries = pickle.loads(entries)
    for entry in entries["entries"]:
        if entry["record_id"] >= 3:
            entry["time_created_ns"] -= back_s * 1_000_000_000
    return pickle.dumps(entries)


flights = Flights(torch, journal, groups, SimpleNamespace(recorders=(recorder,), recorder_states=()))
for world, calls in enumerate((3, 4)):
    dist.init_process_group("gloo", init_method=f"file://{directory}/store{world}", rank=0, world_size=1)
    groups.note_world()
    flights.note_world()
    for _ in range(calls):
        dist.all_reduce(torch.ones(2))
    if world == 1:
        flights.dump()
    dist.destroy_process_group()
"""


def _sequences(directory: Path, back_s: int) -> list[int]:
    command = [sys.executable, "-c", _RANK, str(directory), str(back_s)]
    environment = {"TORCH_FR_BUFFER_SIZE": "100", "PATH": "/usr/bin:/bin"}
    subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [line for path in directory.glob("events-*.jsonl") for line in path.read_text().splitlines()]
    events = [event for event in map(json.loads, lines) if event["event"] == "flight"]
    return [row[0] for event in events for row in event["rows"]]


def test_a_clock_that_is_set_back_hides_no_collective_of_this_world(tmp_path: Path) -> None:
    assert _sequences(tmp_path, 86_400) == [3, 4, 5, 6]


def test_what_an_earlier_world_called_is_left_out(tmp_path: Path) -> None:
    assert _sequences(tmp_path, 0) == [3, 4, 5, 6]


# Who issued a collective, by the frames that led to it, in a rehearsal, a watched job and a dump alike.
USER, DDP = ("/job/train.py", "train"), "/site/torch/nn/parallel/distributed.py"
CALL, JOIN = ("/site/torch/nn/modules/module.py", "_call_impl"), "/site/torch/distributed/algorithms/join.py"
C10D, UTILS = "/site/torch/distributed/distributed_c10d.py", "/site/torch/distributed/utils.py"
FSDP, FWD, BWD = "/site/torch/distributed/fsdp/", "fsdp-forward", "fsdp-backward"
GROUP, STATE = f"{FSDP}_fully_shard/_fsdp_param_group.py", f"{FSDP}_fully_shard/_fsdp_state.py"
FLAT = f"{FSDP}_runtime_utils.py"
AUTOGRAD = ("/site/torch/autograd/graph.py", "_engine_run_backward")


@pytest.mark.parametrize(
    ("frames", "origin"),
    [
        ([], "ddp-backward"),
        ([AUTOGRAD, USER], "ddp-backward"),
        ([(C10D, "all_reduce"), USER], "user"),
        ([(C10D, "all_reduce"), AUTOGRAD, USER], "user"),
        ([(C10D, "all_reduce"), CALL, (DDP, "_run_ddp_forward"), (DDP, "forward"), CALL, USER], "user"),
        ([(DDP, "_sync_module_buffers"), (DDP, "_pre_forward"), (DDP, "forward"), CALL, USER], "ddp-forward"),
        ([(DDP, "DistributedDataParallel._pre_forward"), (DDP, "DistributedDataParallel.forward")], "ddp-forward"),
        ([(UTILS, "_sync_module_states"), (DDP, "__init__"), USER], "ddp-construct"),
        ([(UTILS, "_sync"), (DDP, "_ddp_init_helper"), (DDP, "DistributedDataParallel.__init__")], "ddp-construct"),
        ([(C10D, "all_reduce"), (JOIN, "notify_join_context"), (DDP, "_pre_forward"), USER], "join"),
        ([(C10D, "all_reduce")], "user"),
        ([(C10D, "all_gather"), (GROUP, "unshard"), (GROUP, "pre_forward"), (STATE, "_pre_forward"), CALL, USER], FWD),
        ([(C10D, "all_gather"), (GROUP, "unshard"), (GROUP, "pre_backward"), (STATE, "_pre_backward"), AUTOGRAD], BWD),
        ([(C10D, "reduce_scatter"), (GROUP, "post_backward"), (GROUP, "backward"), AUTOGRAD, USER], BWD),
        ([(C10D, "all_gather"), (GROUP, "unshard"), (GROUP, "pre_forward"), CALL, AUTOGRAD, USER], FWD),
        ([(C10D, "all_gather"), (FLAT, "_unshard"), (FLAT, "_pre_forward_unshard"), CALL, USER], FWD),
        ([(C10D, "reduce_scatter"), (FLAT, "_reduce_grad"), (FLAT, "_post_backward_hook")], BWD),
        ([(C10D, "all_gather"), ("/site/torch/distributed/tensor/_api.py", "full_tensor"), USER], "user"),
    ],
)
def test_the_innermost_frame_that_is_not_plain_torch_says_who_it_was(
    frames: list[tuple[str, str]], origin: str
) -> None:
    assert origin_of(frames) == origin


# What the heartbeat writes of progress and of the flight recorder belongs to one moment.


class MovingRank:
    """A training thread that enqueues a collective after each of the first looks at its progress."""

    def __init__(self, moves: int) -> None:
        self.enqueued = 3
        self.written: list[tuple[str, int]] = []
        self._moves = moves

    def counts(self) -> tuple[int, int, int]:
        """As the recorder tells them."""
        return self.enqueued, self.enqueued - 1, 1

    def note_progress(self) -> None:
        """Write how far the passes have come, before the thread goes on."""
        self.written.append(("progress", self.enqueued))
        if self._moves:
            self._moves -= 1
            self.enqueued += 1

    def dump(self) -> bool:
        """Write the entries."""
        self.written.append(("flights", self.enqueued))
        return True


@pytest.mark.parametrize("moves", [0, 1, 2])
def test_progress_and_flight_recorder_are_written_of_one_moment(tmp_path: Path, moves: int) -> None:
    rank = MovingRank(moves)
    _dump(tmp_path, rank)
    assert rank.written[-2:] == [("progress", 3 + moves), ("flights", 3 + moves)]
    assert len(rank.written) == 2 * (1 + moves)


def test_a_rank_that_goes_on_and_on_is_written_a_few_times_only(tmp_path: Path) -> None:
    rank = MovingRank(100)
    _dump(tmp_path, rank)
    assert len(rank.written) == 2 * DUMPED_AGAIN


def test_dumps_get_seldom_where_a_rank_pauses_in_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = MovingRank(0)
    heartbeat = _heartbeat(tmp_path, rank)
    clock = SimpleNamespace(now_ns=10**13)
    monkeypatch.setattr(time, "monotonic_ns", lambda: clock.now_ns)
    written_at_step = []
    for step in range(1, 61):
        for _ in range(4 * SUSPICIOUS_AFTER_MS // 1_000):  # each step stands twice as long as a pause may
            clock.now_ns += 500_000_000
            before = len(rank.written)
            heartbeat._suspect((step, step - 1, step, 1), True, clock.now_ns, late=False)
            written_at_step += [step] * (len(rank.written) > before)
    gaps = [later - earlier for earlier, later in itertools.pairwise(written_at_step)]
    assert written_at_step[:2] == [1, 2]
    assert gaps == sorted(gaps)
    assert len(written_at_step) <= 8, "60 pauses of 3 s: the gap doubles from one dump to the next"
    assert heartbeat._gap_ns > LATE_DUMPS_NS


def _dump(folder: Path, rank: MovingRank) -> None:
    _heartbeat(folder, rank)._dump()


def _heartbeat(folder: Path, rank: MovingRank) -> HeartbeatThread:
    journal = Journal(str(folder), {"project_root": str(folder), "kind": "run"})
    parts: Any = SimpleNamespace(journal=journal)
    return HeartbeatThread(parts, cast("Any", rank), parts, rank.note_progress, lambda: None)


# The flight recorder is read without an import, while the training thread may use the compiler or fork.
READ = """
import os, pickle, sys
os.environ["TORCH_FR_BUFFER_SIZE"] = "100"
import torch, torch.distributed as dist
from ddpdoctor.probe.live.flight_recorder import without_compiler
from ddpdoctor.probe.torch_compat import Capabilities

dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store", rank=0, world_size=1)
dist.all_reduce(torch.ones(1))
dump, = Capabilities(torch).recorders
with without_compiler(torch):
    entries = pickle.loads(dump(includeCollectives=True, includeStackTraces=True))["entries"]
outermost = entries[-1]["frames"][-1]["name"]
print(outermost, "torch._inductor" in sys.modules, "_inductor" in vars(torch))
sys.stdout.flush()
os._exit(0)
"""

LAZY = """
import sys, threading, importlib
from ddpdoctor.probe.live.flight_recorder import without_compiler
import lazy

def other():
    told.append(lazy._inductor.codecache)
    lazy._inductor.setting = 5

for imports in (False, True):
    told = []
    with without_compiler(lazy):
        assert not hasattr(lazy._inductor, "codecache") and "lazy._inductor" not in sys.modules
        if imports:
            importlib.import_module("lazy._inductor")
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    real = sys.modules["lazy._inductor"]
    assert told == ["real"] and lazy._inductor is real and real.setting == 5
    del sys.modules["lazy._inductor"], lazy._inductor
"""


def _run(directory: Path, script: str) -> str:
    (directory / "script.py").write_text(textwrap.dedent(script))
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=directory, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_frames_come_without_the_compiler(tmp_path: Path) -> None:
    assert _run(tmp_path, READ) == "<module> False False"


def test_another_thread_has_the_compiler_meanwhile_and_what_it_imports_stays(tmp_path: Path) -> None:
    package = tmp_path / "lazy"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import importlib\ndef __getattr__(name):\n    return importlib.import_module('lazy.' + name)\n"
    )
    (package / "_inductor.py").write_text("codecache = 'real'\n")
    _run(tmp_path, LAZY)
