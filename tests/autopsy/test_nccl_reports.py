"""What NCCL's RAS and its Inspector write about a job, and dumps of torchcomms: read like flight-recorder dumps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ddpdoctor.autopsy.dead_job import AutopsyRequest, autopsy
from ddpdoctor.examination import Examination
from tests.autopsy.test_dumps import called


def examined(*paths: Path) -> Examination:
    return autopsy(AutopsyRequest(paths=tuple(map(str, paths))))


def ras_rank(rank: int, **counts: int) -> dict[str, Any]:
    names = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce")
    flags = {"init_state": 0, "async_error": 0, "finalize_called": False, "destroy_flag": False, "abort_flag": False}
    return {
        "rank": rank, "host": f"10.0.0.{rank // 2}", "pid": 4_000 + rank, "cuda_dev": rank % 2, "nvml_dev": rank % 2,
        "status": flags, "collective_counts": {name: counts.get(name, 0) for name in names},
    }  # fmt: skip


def ras(path: Path, *communicators: list[dict[str, Any]], missing: tuple[dict[str, Any], ...] = ()) -> Path:
    """Write what ``ncclras -f json`` prints; the missing ranks are of the first communicator."""
    told = [
        {
            "hash": f"0x{number:x}", "secondary_hash": "0x1:0x2", "size": len(ranks) + (0 if number else len(missing)),
            "ranks_count": len(ranks), "missing_ranks_count": 0 if number else len(missing), "ranks": ranks,
            "missing_ranks": [] if number else list(missing),
        }
        for number, ranks in enumerate(communicators)
    ]  # fmt: skip
    whole = {
        "nccl_version": "2.29.1", "cuda_runtime_version": 13_000, "cuda_driver_version": 13_000,
        "timestamp": "2026-03-02 13:06:53", "communicators_count": len(told), "communicators": told,
        "ras": {"collection_time_sec": 0.0, "timeouts_count": 0},
    }  # fmt: skip
    path.write_text(json.dumps(whole, indent=2))
    return path


def test_ras_names_the_rank_that_launched_fewer_collectives(tmp_path: Path) -> None:
    ranks = [ras_rank(rank, AllReduce=6_649 if rank == 2 else 6_650, Broadcast=3) for rank in range(4)]
    examination = examined(ras(tmp_path / "ras.json", ranks))
    (cause,) = examination.findings
    assert (cause.code, cause.ranks, bool(cause.doubt)) == ("DDP305", (2,), True)
    assert "all_reduce" in cause.title


def test_ras_shows_ranks_in_different_collectives(tmp_path: Path) -> None:
    ranks = [ras_rank(rank, AllReduce=9 if rank == 1 else 10, Broadcast=6 if rank == 1 else 5) for rank in range(3)]
    (cause,) = examined(ras(tmp_path / "ras.json", ranks)).findings
    assert cause.code in ("DDP301", "DDP304")
    assert (cause.ranks, bool(cause.doubt)) == ((1,), True)


def test_ras_of_a_job_that_gets_on_shows_nothing(tmp_path: Path) -> None:
    assert examined(ras(tmp_path / "ras.json", [ras_rank(rank, AllReduce=77) for rank in range(4)])).findings == ()


def test_a_rank_that_ras_cannot_reach_has_gone(tmp_path: Path) -> None:
    gone = {**ras_rank(1), "status": {"unresponsive": True, "considered_dead": True}}
    del gone["collective_counts"]
    others = [ras_rank(rank, AllReduce=12) for rank in (0, 2, 3)]
    examination = examined(ras(tmp_path / "ras.json", others, missing=(gone,)))
    (cause,) = examination.findings
    assert examination.autopsy is not None and examination.autopsy.culprit.hosts == ("10.0.0.0",)
    assert (cause.code, cause.ranks) == ("DDP306", (1,))
    text = " ".join(fact.text for fact in cause.evidence)
    assert "RAS" in text and "4001" in text and "10.0.0.0" in text


def test_ranks_of_a_smaller_communicator_are_those_of_the_whole_job(tmp_path: Path) -> None:
    everyone = [ras_rank(rank, AllReduce=5) for rank in range(4)]
    pair = [{**ras_rank(rank, AllGather=8 if rank == 2 else 7), "rank": rank - 2} for rank in (2, 3)]
    (cause,) = examined(ras(tmp_path / "ras.json", everyone, pair)).findings
    assert (cause.code, cause.ranks) == ("DDP305", (3,))


def test_the_collectives_of_one_communicator_that_differ_for_several_do_no_harm(tmp_path: Path) -> None:
    bad = tmp_path / "ras.json"
    bad.write_text('{"nccl_version": "2.29.1", "communicators": [{"size": 2, "ranks": [{"rank": "x"}]}]}')
    examination = examined(bad)
    assert examination.findings == () and "ras.json is not a usable dump" in examination.notes[0]


def inspector(directory: Path, last: dict[int, int], world: int) -> None:
    """Write what the Inspector of each rank wrote: its completed collectives, the last of which has that number."""
    for rank, number in last.items():
        lines = [
            {
                "header": {"id": "0x7f8c496ae9f661", "rank": rank, "n_ranks": world, "nnodes": 1},
                "metadata": {
                    "inspector_output_format_version": "v4.0", "git_rev": "",
                    "rec_mechanism": "nccl_profiler_interface", "dump_timestamp_us": 1_748_030_377_000_000 + place,
                    "hostname": f"n{rank}", "pid": 9_000 + rank,
                },
                "coll_perf": {
                    "coll": "AllReduce", "coll_sn": place, "coll_msg_size_bytes": 4_096, "coll_exec_time_us": 61,
                    "coll_algobw_gbs": 2.1, "coll_busbw_gbs": 3.9,
                },
            }
            for place in range(number - 5, number + 1)
        ]  # fmt: skip
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        (directory / f"n{rank}-pid{9_000 + rank}.log").write_text(text)


def test_the_inspector_shows_who_is_one_collective_behind(tmp_path: Path) -> None:
    inspector(tmp_path, {0: 1_407, 1: 1_407, 2: 1_406}, 3)
    (cause,) = examined(tmp_path).findings
    assert (cause.code, cause.ranks, bool(cause.doubt)) == ("DDP305", (2,), True)


def test_an_inspector_that_wrote_long_ago_proves_nothing(tmp_path: Path) -> None:
    inspector(tmp_path, {0: 1_407, 1: 1_407, 2: 1_311}, 3)
    assert examined(tmp_path).findings == ()


def test_dumps_of_torchcomms_are_dumps(tmp_path: Path) -> None:
    config = {"world": {"name": "world", "desc": "world", "ranks": "0,1,2"}}
    for rank in range(3):
        rows = [called(number, pg_id=0, process_group=["world", "world"], over=number < 3) for number in (1, 2, 3)]
        dump = {"version": "2.10", "pg_config": config, "pg_status": {}, "entries": rows[: 2 if rank == 1 else 3]}
        (tmp_path / f"torchcomm_fr_trace_{rank}").write_text(json.dumps(dump))
    (cause,) = examined(tmp_path).findings
    assert (cause.code, cause.ranks) == ("DDP305", (1,))
