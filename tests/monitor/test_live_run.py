"""What a plain job under plain torchrun says of itself, against what the job measured with its own stopwatch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddpdoctor.monitor.build_snapshot import bucket_views
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.measured import StepTrack
from tests.monitor.watched import finished, job, watch

MS = 1_000_000
SCRIPT = """
class Slow(TensorDataset):
    def __getitem__(self, index):
        time.sleep(0.004)
        return super().__getitem__(index)

class Noted(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.Linear(256, 4))
    def forward(self, inputs):
        time.sleep(0.003)
        return self.layers(inputs)

def batches(loader):
    iterator = iter(loader)
    while True:
        begun = time.monotonic_ns()
        try:
            batch = next(iterator)
        except StopIteration:
            return
        waits.append(time.monotonic_ns() - begun)
        yield batch

os.environ["NCCL_P2P_DISABLE"] = "1"
waits, spans, met = [], [], []
data = Slow(torch.randn(160, 64), torch.randint(0, 4, (160,)))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=4, sampler=sampler)
validation = DataLoader(TensorDataset(torch.randn(16, 64)), batch_size=8)
model = DDP(Noted(), gradient_as_bucket_view=True)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    began = time.monotonic_ns()
    for number, (inputs, targets) in enumerate(batches(loader)):
        last = number % 2 == 1
        model.require_backward_grad_sync = last
        nn.functional.cross_entropy(model(inputs), targets).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
            if number == 5:
                time.sleep(0.1 * rank)
                entered = time.monotonic_ns()
                dist.barrier()
                met.append(time.monotonic_ns() - entered)
            counted = torch.ones(100)
            work = dist.all_reduce(counted, async_op=True)
            work.wait()
            stopped = time.monotonic_ns()
    spans.append(stopped - began)
    with torch.no_grad():
        model.eval()
        for (inputs,) in validation:
            model(inputs)
            time.sleep(0.05)
        model.train()
    if rank == 0:
        torch.save(model.state_dict(), "weights.pt")
with open(f"truth-{rank}.json", "w") as file:
    json.dump({"waits": waits, "spans": spans, "met": met}, file)
os._exit(0)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("live")


@pytest.fixture(scope="module")
def record(folder: Path) -> RunRecord:
    return finished(folder, SCRIPT)


def tracks(record: RunRecord) -> tuple[StepTrack, ...]:
    assert [track.rank for track in record.step_tracks] == [0, 1]
    return record.step_tracks


def lengths(track: StepTrack) -> list[int]:
    return [end - start for start, end in zip(track.started_at_ns, track.ended_at_ns, strict=True)]


def test_steps_are_counted_with_their_micro_batches(record: RunRecord) -> None:
    for track in tracks(record):
        assert list(track.step) == list(range(1, 21))
        assert set(track.micro_batches) == {2}
        assert set(track.synchronised) == {1}
        assert set(track.samples) == {8}
    assert {rank.end for rank in record.ranks} == {"left-by-exit"}


def test_the_wait_for_data_is_the_jobs_own(record: RunRecord, folder: Path) -> None:
    for track in tracks(record):
        truth = json.loads((folder / f"truth-{track.rank}.json").read_text())["waits"]
        assert sum(track.data_wait_ns) == pytest.approx(sum(truth), rel=0.1)


def test_steps_fill_the_time_of_training_and_leave_out_evaluation(record: RunRecord, folder: Path) -> None:
    for track in tracks(record):
        truth = json.loads((folder / f"truth-{track.rank}.json").read_text())["spans"]
        assert sum(lengths(track)) == pytest.approx(sum(truth), rel=0.02)


def test_phases_never_exceed_the_step(record: RunRecord) -> None:
    names = ("data_wait_ns", "forward_ns", "backward_ns", "explicit_ns", "optimizer_ns")
    for track in tracks(record):
        for row, length in enumerate(lengths(track)):
            assert sum(getattr(track, name)[row] for name in names) <= length
            assert track.forward_ns[row] >= 6 * MS


def test_a_barrier_that_waits_for_a_late_rank_is_an_explicit_collective(record: RunRecord, folder: Path) -> None:
    for track, calls in zip(tracks(record), record.call_tracks, strict=True):
        truth = json.loads((folder / f"truth-{track.rank}.json").read_text())["met"]
        barriers = [row for row, kind in enumerate(calls.kind) if calls.kinds[kind] == "barrier"]
        waited = [calls.left_at_ns[row] - calls.entered_at_ns[row] for row in barriers]
        assert waited == pytest.approx(truth, rel=0.1, abs=5 * MS)
        assert track.explicit_ns[2] >= waited[0] and track.explicit_ns[12] >= waited[1]


def test_the_reduction_of_gradients_is_measured_and_lies_inside_of_backward(record: RunRecord) -> None:
    for track in tracks(record):
        sampled = [row for row in range(len(track)) if track.exposed_ns[row] >= 0]
        assert len(sampled) >= 15
        for row in sampled:
            assert 0 <= track.exposed_ns[row] <= track.window_ns[row] <= track.backward_ns[row] + MS
            assert track.started_at_ns[row] < track.ready_at_ns[row] <= track.reduced_at_ns[row]
            assert track.reduced_at_ns[row] <= track.ended_at_ns[row] + MS
        assert set(track.reduced_bytes) == {4 * (64 * 256 + 256 + 2 * 256 + 256 * 4 + 4)}
        assert set(track.buckets) == {1}


def test_the_buckets_of_gradients_are_known_with_what_is_in_them(record: RunRecord) -> None:
    assert {layout.rank for layout in record.bucket_layouts} == {0, 1}
    (bucket,) = bucket_views(record)
    assert (bucket.module, bucket.order, bucket.parameters) == ("Noted", 0, 6)
    assert bucket.size_bytes == 4 * (64 * 256 + 256 + 2 * 256 + 256 * 4 + 4)
    assert bucket.first_parameter in ("layers.2.weight", "layers.2.bias")  # The last layer's gradients come first.


def test_explicit_calls_agree_between_the_ranks(record: RunRecord) -> None:
    found = []
    for track in record.call_tracks:
        calls = [(track.kinds[kind], track.sequence[row]) for row, kind in enumerate(track.kind)]
        assert all(left > entered for entered, left in zip(track.entered_at_ns, track.left_at_ns, strict=True))
        found.append(calls)
        reduced = [row for row, kind in enumerate(track.kind) if track.kinds[kind] == "all_reduce"]
        assert {track.size_bytes[row] for row in reduced} == {400}
        frames = {record.site(track.site[row]).innermost for row in reduced}
        assert [Path(frame.file).read_text().splitlines()[frame.line - 1].strip() for frame in frames if frame] == [
            "work.wait()"
        ]
    assert found[0] == found[1]
    names = [name for name, _ in found[0]]
    assert (names.count("barrier"), names.count("all_reduce")) == (2, 20)
    # DDP broadcasts in the first forward and in each after a synchronised one, which is the evaluation's once a pass.
    assert names.count("buffers") == 10 + 1 + 9 + 1


def test_wraps_loaders_passes_and_files_are_known(record: RunRecord) -> None:
    wraps = [(wrap.module_class, wrap.options["gradient_as_bucket_view"], wrap.batch_norms) for wrap in record.wraps]
    assert wraps == [("Noted", True, 1)] * 2
    training = [one for one in record.passes if one.loader == 0]
    assert {(one.set_epoch, one.yielded, one.end, one.backwards) for one in training} == {
        (0, 20, "exhausted", 20),
        (1, 20, "exhausted", 20),
    }
    assert {(one.averaged, one.looped, one.joined) for one in training} == {(10, False, False)}
    evaluated = [one for one in record.passes if one.loader == 1]
    assert {(one.averaged, one.looped, one.joined) for one in evaluated} == {(0, True, False)}
    by_rank = {rank: {index for one in training if one.rank == rank for index in one.indices} for rank in (0, 1)}
    assert all(len(indices) >= 80 for indices in by_rank.values())
    assert len({one.index_digest for one in training}) == 4
    saved = [(event.action, Path(event.path).name, event.rank) for event in record.files]
    assert saved == [("save", "weights.pt", 0)] * 2
    assert {record.groups[0].ranks} == {(0, 1)}


def test_variables_that_the_script_sets_are_known_with_their_line(record: RunRecord) -> None:
    own = [setting for setting in record.settings if setting.name == "NCCL_P2P_DISABLE"]
    assert {(setting.rank, setting.value, setting.imported, setting.joined) for setting in own} == {
        (0, "1", True, True),
        (1, "1", True, True),
    }
    (line,) = {record.site(setting.site).innermost for setting in own}
    assert line is not None
    assert Path(line.file).read_text().splitlines()[line.line - 1].startswith("os.environ[")


def test_what_a_live_run_does_not_record_is_absent(record: RunRecord) -> None:
    assert record.stream("step_tracks").state == "complete"
    assert record.stream("forwards").state == "truncated"
    for name in ("backwards", "missing_gradients", "parameter_digests", "lines", "gpus"):
        assert record.stream(name).state == "absent"


def test_a_standstill_is_explained_by_the_ranks_own_flight_recorders(tmp_path: Path) -> None:
    body = """
    model = DDP(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
    def log(value):
        dist.all_reduce(value)
    for step in range(40):
        model(torch.ones(2, 8)).sum().backward()
        if step == 25 and rank == 0:
            log(torch.ones(3))
    """
    with job(tmp_path, body) as (_, run):
        # Where the ranks part may be known while one of them is still on its way into the wait.
        live, record = watch(
            run,
            lambda live, record: live.divergence is not None and any(turn.waiting for turn in live.divergence.turns),
        )
        live.close()
    found = live.divergence
    assert found is not None
    assert (found.form, found.culprit) == ("mismatch", 0)
    lines = {turn.rank: turn.line for turn in found.turns}
    assert lines[0] is not None and lines[0].function == "log"
    assert {heartbeat.rank: heartbeat.phase for heartbeat in record.heartbeats}[0] == "explicit"
