from __future__ import annotations

from ddpdoctor.record import events
from ddpdoctor.record.assembly.assemble import LineRows


def test_the_lines_of_all_processes_that_were_a_rank_count() -> None:
    rows = LineRows({11: 0, 12: 1, 21: 0}.get)
    for pid, lines in ((11, (3, 4)), (12, (3,)), (21, (8,))):
        rows.on_lines(pid, events.Lines(file="train.py", lines=lines, unwatched=()))
    rows.on_begun(11, events.LinesBegun(late=True))
    first, second = rows.rows()
    assert (first.rank, first.lines, first.late) == (0, frozenset({3, 4, 8}), True)
    assert (second.rank, second.lines, second.late) == (1, frozenset({3}), False)
