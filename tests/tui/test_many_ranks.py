"""The ranks of a job of 4,096 on 512 nodes: the worst first, those that are alike in one line, and all on a map."""

from __future__ import annotations

import msgspec
import pytest

from ddpdoctor.monitor.snapshot import Snapshot
from ddpdoctor.tui.draw.table import Cursor
from ddpdoctor.tui.screens.many_ranks import MANY, node_rows, nodes_of
from ddpdoctor.tui.screens.ranks import paint_ranks
from ddpdoctor.tui.view import View
from tests.benchmarks.many_ranks_cost import big_run
from tests.tui import runs


@pytest.fixture(scope="module")
def big() -> Snapshot:
    return big_run()


def _lines(view: View, width: int = 160, height: int = 45) -> list[str]:
    painting = paint_ranks(view, width, height)
    lines = ["".join(cell.text for cell in cells) for cells in painting.lines]
    assert max(map(len, lines)) <= width and len(lines) == height
    return lines


def test_the_worst_come_first_and_nodes_that_are_alike_are_one_line(big: Snapshot) -> None:
    rows = node_rows(nodes_of(View(snapshot=big, page="ranks")))
    told = [(row.nodes[0].name if len(row.nodes) == 1 else len(row.nodes), row.summary, row.worst.rank) for row in rows]
    assert told == [
        ("node-320", "to blame", 2560),
        ("node-30", "1 of 8 ranks gone", 242),
        ("node-03", "all 8 ranks late", 24),
        (5, "1 of 8 ranks late", 325),
        (504, "", 0),
    ]
    assert sum(len(node.ranks) for row in rows for node in row.nodes) == 4096


def test_every_rank_has_its_sign_on_the_map_where_there_is_room(big: Snapshot) -> None:
    lines = _lines(View(snapshot=big, page="ranks"))
    first = next(number for number, text in enumerate(lines) if "How late each rank is" in text)
    signs = [text[13:] for text in lines[first + 1 :] if text.strip()]
    assert sum(len(text.rstrip()) for text in signs) == 4096
    drawn = "".join(text.rstrip() for text in signs)
    assert drawn.index("◀") == 2560 and drawn.index("■") == 242
    assert set(drawn[24:32]) == {"▄"} and drawn[23] == drawn[32] == "▁"


def test_a_small_screen_has_a_sign_for_each_node(big: Snapshot) -> None:
    lines = _lines(View(snapshot=big, page="ranks"), 80, 22)
    first = next(number for number, text in enumerate(lines) if "How late each node is" in text)
    drawn = "".join(text[13:].rstrip() for text in lines[first + 1 :])
    assert len(drawn) == 512 and drawn[320] == "◀" and drawn[30] == "■" and drawn[3] == "▄"


def test_a_filter_or_a_sorted_column_shows_the_ranks_themselves(big: Snapshot) -> None:
    filtered = _lines(View(snapshot=big, page="ranks", filters={"ranks": "node-320"}))
    assert "Ranks (8)" in filtered[0] and "2560" in "".join(filtered)
    cursor = Cursor(sort="p50", descending=True)
    assert "Ranks (4096)" in _lines(View(snapshot=big, page="ranks", cursors={"ranks": cursor}))[0]


def test_a_row_opens_its_worst_rank_and_a_small_job_keeps_its_table(big: Snapshot) -> None:
    assert paint_ranks(View(snapshot=big, page="ranks"), 160, 45).rows[:3] == ("2560", "242", "24")
    small = msgspec.structs.replace(big, ranks=big.ranks[:MANY])
    assert len(paint_ranks(View(snapshot=small, page="ranks"), 160, 45).rows) == MANY


def test_ranks_without_host_or_figures_are_drawn(big: Snapshot) -> None:
    bare = tuple(
        msgspec.structs.replace(rank, host="", node=None, lateness_ns=(), step_times=None) for rank in big.ranks[:200]
    )
    text = "\n".join(_lines(View(snapshot=msgspec.structs.replace(runs.many_ranks(8), ranks=bare), page="ranks")))
    assert "Ranks (200 on 1 node)" in text and "." * 100 in text
