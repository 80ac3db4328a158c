"""Flight-recorder dumps: of real ranks on gloo, of large NCCL jobs with a planted fault, and such as do harm."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.autopsy.dead_job import AutopsyRequest, autopsy
from ddpdoctor.errors import ExitCode
from ddpdoctor.examination import Examination
from ddpdoctor.postmortem.dumps import dumps
from tests.autopsy.made_dumps import FAULTS, Fault, dump_of, entry, write_dumps

DUMPING = Path(__file__).parent / "jobs" / "dumping.py"
CODES = {"stuck": "DDP305", "skipped": "DDP304", "size": "DDP304", "kind": "DDP301", "no-dump": "DDP305"}


def examined(*paths: Path) -> Examination:
    return autopsy(AutopsyRequest(paths=tuple(map(str, paths))))


def of_job(directory: Path, ranks: dict[int, list[dict[str, Any]]], world: int | None = None, **config: Any) -> Path:
    """Write dumps of ranks with these entries."""
    groups = config or {"0": {"name": "0", "desc": "default_pg", "ranks": json.dumps(list(range(world or len(ranks))))}}
    for rank, entries in ranks.items():
        content = {"version": "2.9", "pg_config": groups, "entries": entries}
        (directory / f"dump_rank_{rank}").write_bytes(pickle.dumps(content, protocol=2))
    return directory


def called(
    sequence: int, kind: str = "all_reduce", *, over: bool = True, line: int = 40, **fields: Any
) -> dict[str, Any]:
    return {**entry(sequence, sequence, kind, [64], line, 10**18 + sequence * 10**9, over=over), **fields}


@pytest.mark.parametrize("encode", [partial(pickle.dumps, protocol=2), lambda dump: json.dumps(dump).encode()])
@pytest.mark.parametrize("fault", FAULTS)
def test_the_culprit_of_a_planted_fault_is_named(fault: Fault, encode: Any, tmp_path: Path) -> None:
    write_dumps(tmp_path, 8, 120, fault, 5, encode)
    (cause,) = examined(tmp_path).findings
    assert (cause.role, cause.code, cause.ranks) == ("cause", CODES[fault], (5,))
    assert bool(cause.doubt) == (fault == "no-dump")


def test_real_ranks_on_gloo_and_the_one_that_does_not_come(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", str(DUMPING))
    environment = {**os.environ, "DUMPS": str(tmp_path), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=environment, capture_output=True, timeout=200)
    for form, place in (("trace_*.json", "an unknown line"), ("dump_*", "dumping.py:41")):
        paths = sorted(tmp_path.glob(form))
        assert len(paths) == 3
        examination = examined(*paths)
        (cause,) = examination.findings
        assert (cause.code, cause.ranks) == ("DDP305", (2,))
        assert f"in broadcast at {place}" in cause.title
        assert examination.exit_code is ExitCode.FINDINGS


def test_the_log_of_the_rank_that_raised_comes_before_what_the_dumps_show(tmp_path: Path) -> None:
    of_job(tmp_path, {0: [called(1), called(2, over=False)], 1: [called(1)]})
    (tmp_path / "job.log").write_text(
        '[rank1]: Traceback (most recent call last):\n[rank1]:   File "/j/train.py", line 9, in <module>\n'
        "[rank1]:     x\n[rank1]: KeyError: 'x'\n"
    )
    first = examined(tmp_path).findings[0]
    assert (first.role, first.code, first.ranks) == ("cause", "DDP706", (1,))


def test_the_dumps_name_who_did_not_come_where_the_log_tells_of_a_timeout_only(tmp_path: Path) -> None:
    of_job(tmp_path, {0: [called(1), called(2, over=False)], 1: [called(1)], 2: [called(1), called(2, over=False)]})
    (tmp_path / "job.log").write_text(
        "[rank0]:[E1120 20:17:01.0 ProcessGroupNCCL.cpp:616] [Rank 0] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=2, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600029 milliseconds before timing out.\n"
    )
    findings = examined(tmp_path).findings
    assert [(one.role, one.code) for one in findings] == [("cause", "DDP305"), ("echo", "DDP308")]
    assert findings[0].ranks == (1,)


def test_several_groups_are_told_apart_by_their_ranks(tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"},
        "1": {"name": "1", "desc": "undefined", "ranks": "[0, 1]"},
        "2": {"name": "2", "desc": "undefined", "ranks": "[2, 3]"},
    }

    def of_pair(name: str, *, late: bool) -> list[dict[str, Any]]:
        inner: dict[str, Any] = {"process_group": (name, "undefined"), "pg_id": int(name)}
        own = [called(sequence, record_id=10 + sequence, line=51, **inner) for sequence in (1, 2, 3)]
        last = [] if late else [called(2, record_id=20, over=False)]
        return [called(1, record_id=0), *own, *last]

    ranks = {rank: of_pair("1" if rank < 2 else "2", late=rank == 3) for rank in range(4)}
    (cause,) = examined(of_job(tmp_path, ranks, **config)).findings
    assert (cause.code, cause.ranks) == ("DDP305", (3,))


def test_point_to_point_takes_no_part_in_the_matching_of_sequences(tmp_path: Path) -> None:
    def talks(kind: str, peer: str, *, late: bool) -> list[dict[str, Any]]:
        extra: dict[str, Any] = {"is_p2p": True, "p2p_seq_id": 1, "collective_seq_id": 1, "record_id": 1}
        talk = called(1, f"{kind} {peer}", **extra)
        return [called(1, record_id=0), talk, *([] if late else [called(2, record_id=2, over=False)])]

    ranks = {0: talks("send", "0->1", late=False), 1: talks("recv", "1<-0", late=False), 2: [called(1, record_id=0)]}
    (cause,) = examined(of_job(tmp_path, ranks)).findings
    assert (cause.code, cause.ranks) == ("DDP305", (2,))


def test_the_parts_of_a_coalesced_operation_are_one(tmp_path: Path) -> None:
    def rank(*, over: bool) -> list[dict[str, Any]]:
        parts = [called(2, "all_gather_into_tensor_coalesced", record_id=1 + part, over=False) for part in range(3)]
        return [called(1, record_id=0), *parts, called(2, "coalesced", record_id=9, over=over), called(3, record_id=10)]

    examination = examined(of_job(tmp_path, {0: rank(over=True), 1: rank(over=True)}))
    assert (examination.findings, examination.exit_code) == ((), ExitCode.INCONCLUSIVE)


def test_entries_of_the_oldest_format_are_understood(tmp_path: Path) -> None:
    def old(sequence: int, *, over: bool) -> dict[str, Any]:
        fields = called(sequence, over=over)
        del fields["collective_seq_id"], fields["p2p_seq_id"], fields["is_p2p"], fields["timeout_ms"]
        return {**fields, "seq_id": sequence}

    for rank in range(3):
        rows = [old(1, over=True)] + ([old(2, over=False)] if rank else [])
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(rows))
    (cause,) = examined(tmp_path).findings
    assert (cause.code, cause.ranks) == ("DDP305", (0,))


def test_a_ring_that_has_wrapped_says_what_is_lost_and_is_compared_where_it_is_left(tmp_path: Path) -> None:
    write_dumps(tmp_path, 4, 60, "size", 2)
    examination = examined(tmp_path)
    assert examination.findings[0].ranks == (2,)
    assert "overwritten up to 10,000 older entries" in examination.notes[0]


@pytest.mark.parametrize("damage", ["cut", "empty", "bits"])
def test_a_damaged_dump_costs_a_sentence_and_a_doubt(damage: str, tmp_path: Path) -> None:
    of_job(tmp_path, {rank: [called(1), called(2, over=False)] for rank in range(3)}, world=4)
    whole = pickle.dumps({"version": "2.9", "entries": [called(1)]}, protocol=2)
    broken = {"cut": whole[:87], "empty": b"\x80\x02.", "bits": whole[:60] + b"\xff\xfe" + whole[62:]}[damage]
    (tmp_path / "dump_rank_3").write_bytes(broken)
    examination = examined(tmp_path)
    assert "dump_rank_3 is not a usable dump" in examination.notes[0]
    assert (examination.findings[0].ranks, bool(examination.findings[0].doubt)) == ((3,), True)


class Harm:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("touch /tmp/harm-of-a-pickle",)


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps({"entries": [Harm()]}, protocol=2),
        b"\x80\x02" + b"]" * 2_000_000 + b".",
        b"\x80\x02(" + b"}" * 2_000_000 + b"l.",
        b"\x80\x04\x8d" + (1 << 40).to_bytes(8, "little") + b"x.",
        pickle.dumps({"entries": [{"input_sizes": "no"}]}, protocol=2),
        pickle.dumps({"entries": 7}, protocol=2),
        b'{"entries": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"entries": [{"record_id": "x"}], "pg_config": {}}',
    ],
    ids=["global", "deep", "wide", "huge-text", "wrong-type", "no-list", "deep-json", "json-type"],
)
def test_a_dump_that_means_harm_is_refused_in_one_sentence(content: bytes, tmp_path: Path) -> None:
    bad = tmp_path / "dump_rank_0"
    bad.write_bytes(content)
    examination = examined(bad)
    (note,) = examination.notes
    assert "dump_rank_0" in note and "\n" not in note
    assert (examination.exit_code, examination.findings) == (ExitCode.INCONCLUSIVE, ())
    assert not Path("/tmp/harm-of-a-pickle").exists()


def test_a_dump_larger_than_any_recorder_writes_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpdoctor.postmortem.read.LARGEST_BYTES", 100)
    monkeypatch.setattr(dumps, "LARGEST_BYTES", 100)
    of_job(tmp_path, {0: [called(1)]})
    assert "not a usable dump" in examined(tmp_path).notes[0]


def test_time_stamps_that_look_like_marks_do_not_make_equal_dumps_differ() -> None:
    noisy = int.from_bytes(b"\x00\x8a\x08\x8a\x08\x00\x00\x18", "little")
    entries = [[called(1, time_created_ns=stamp), called(2)] for stamp in (10**18, noisy)]
    one, other = (pickle.dumps({"entries": rows}, protocol=2) for rows in entries)
    assert dumps.timeless(one) == dumps.timeless(other)
    different = pickle.dumps({"entries": [called(1), called(3)]}, protocol=2)
    assert dumps.timeless(one) != dumps.timeless(different)


def test_equal_dumps_of_many_ranks_are_unpickled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_dumps(tmp_path, 24, 60, "size", 11)
    unpickled: list[bytes] = []
    really = dumps._of_pickle

    def counted(content: bytes) -> dumps.Dump:
        unpickled.append(content)
        return really(content)

    monkeypatch.setattr(dumps, "_of_pickle", counted)
    assert examined(tmp_path).findings[0].ranks == (11,)
    assert len(unpickled) == 2


def test_a_file_whose_name_tells_no_rank_is_told(tmp_path: Path) -> None:
    (tmp_path / "trace.pkl").write_bytes(pickle.dumps(dump_of(0, 2, 50, "size", 1, __import__("random").Random(0))))
    assert "a name without a rank" in examined(tmp_path).notes[0]


def retired(sequence: int, size: list[int], state: str = "scheduled") -> dict[str, Any]:
    """An entry of a dump that was made after the exception: what timed out is retired, and has not completed."""
    return called(sequence, over=False, retired=True, state=state, input_sizes=[size])


@pytest.mark.parametrize("last", [(7, 7, 6), (7, 6, 7), (6, 7, 7)])
def test_dumps_made_after_the_exception_show_who_is_behind(last: tuple[int, ...], tmp_path: Path) -> None:
    ranks = {
        rank: [called(number) for number in range(1, 7)] + [retired(7, [64])] * (highest == 7)
        for rank, highest in enumerate(last)
    }
    (cause,) = examined(of_job(tmp_path, ranks)).findings
    assert (cause.code, cause.ranks) == ("DDP305", (last.index(6),))


def test_shapes_that_differ_are_seen_in_dumps_made_after_the_exception(tmp_path: Path) -> None:
    ranks = {
        rank: [called(number) for number in range(1, 7)] + [retired(7, [33 if rank == 1 else 32], "started")]
        for rank in range(3)
    }
    examination = examined(of_job(tmp_path, ranks))
    (cause,) = examination.findings
    assert (cause.code, cause.ranks) == ("DDP304", (1,))
    assert "seen in the dumps" in render(examination) and "in the logs" not in render(examination)


def test_a_finding_of_logs_and_dumps_says_where_each_was_seen(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text("[rank0]: step 4\n[rank1]: step 4\n")
    of_job(tmp_path, {0: [called(1), called(2, over=False)], 1: [called(1)]})
    assert "seen in the dumps" in render(examined(tmp_path))


def render(examination: Examination) -> str:
    from ddpdoctor.report.autopsy_text import render as text

    assert examination.autopsy is not None
    return text(examination, examination.autopsy, 100, colour=False)
