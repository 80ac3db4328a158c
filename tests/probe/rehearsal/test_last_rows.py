"""What a rank did last is in the record, however it ended."""

from __future__ import annotations

import pytest

from .conftest import Rehearse


@pytest.mark.parametrize(
    "end", ["dist.all_reduce(torch.ones(3))", "os.kill(os.getpid(), 9)", "os._exit(1)", "os.abort()"]
)
def test_the_last_row_is_the_guilty_one(rehearse_script: Rehearse, end: str) -> None:
    record = rehearse_script(
        f"""
        dist.init_process_group("gloo")
        value = torch.ones(2)
        for step in range(40):
            dist.all_reduce(value)
        if dist.get_rank() == 1:
            dist.all_reduce(value, op=dist.ReduceOp.MAX, async_op=True)  # the last
            {end}
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        dist.all_reduce(value)
        """
    )
    track = record.track(1)
    assert track is not None
    rows = [record.signatures[number] for number in track.signature]
    wanted = 42 if "all_reduce" in end else 41
    assert len(rows) == wanted
    assert (rows[40].reduce_op, rows[-1].numels) == ("max", (3,) if wanted == 42 else (2,))
    site = record.site(track.site[40]).innermost
    assert site is not None and site.line == 14, "the line is known before the collective starts"
