"""The committed file: written alike each time, refused when it is not what was written."""

from __future__ import annotations

import json
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from ddpdoctor.errors import UsageError
from ddpdoctor.gate.baseline import Entry, Rehearsed, encoded, read_baseline, write_entries
from tests.gate.budgets import budget, share


def entry(collectives: int = 1) -> Entry:
    rehearsed = Rehearsed(ranks=2, layout="1x2", device="cpu", batches=4, batch_size="")
    row = (collectives, collectives, collectives)
    return Entry(rehearsed=rehearsed, torch="2.13.0", budget=budget(share("collectives", row, row)))


def test_what_was_written_is_read_again_and_written_alike(tmp_path: Path) -> None:
    file = tmp_path / "baseline.json"
    write_entries(file, {"train.py": entry(), "tune.py --lr 1": entry(2)})
    assert read_baseline(file) == {"train.py": entry(), "tune.py --lr 1": entry(2)}
    assert file.read_bytes() == encoded({"tune.py --lr 1": entry(2), "train.py": entry()})
    assert max(map(len, file.read_text().splitlines())) < 300, "a reviewer reads it line by line"


def test_entries_of_other_targets_stay(tmp_path: Path) -> None:
    file = tmp_path / "baseline.json"
    write_entries(file, {"a.py": entry(), "b.py": entry()})
    write_entries(file, {"a.py": entry(5), "c.py": None})
    assert read_baseline(file) == {"a.py": entry(5), "b.py": entry()}


def test_there_may_be_none(tmp_path: Path) -> None:
    assert read_baseline(tmp_path / "baseline.json") is None


def _edited(content: str) -> str:
    return content.replace("[1, 1, 1]", "[9, 9, 9]")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_edited, "the entry of `train.py` was edited by hand"),
        (lambda content: content.replace('"format": 1', '"format": 7'), "was written by a newer ddpdoctor"),
        (lambda content: content.replace('"ddpdoctor"', '"another"'), "is not a ddpdoctor baseline"),
        (lambda content: f"<<<<<<< HEAD\n{content}>>>>>>> theirs\n", "holds a merge conflict"),
        (lambda content: content[:-30], "is not a readable baseline"),
        (lambda content: "[]", "is not a readable baseline"),
        (lambda content: "", "is not a readable baseline"),
        (lambda content: content.replace('"collectives"', '"conviviality"'), "is not a readable baseline"),
    ],
)
def test_what_is_not_as_it_was_written_is_refused(tmp_path: Path, change: object, told: str) -> None:
    assert callable(change)
    file = tmp_path / "baseline.json"
    write_entries(file, {"train.py": entry()})
    file.write_text(change(file.read_text()))
    with pytest.raises(UsageError) as raised:
        read_baseline(file)
    assert told in raised.value.message
    assert raised.value.hint


def test_updating_an_edited_file_keeps_the_entries_that_are_whole(tmp_path: Path) -> None:
    file = tmp_path / "baseline.json"
    write_entries(file, {"a.py": entry(3), "b.py": entry()})
    file.write_text(file.read_text().replace("[3, 3, 3]", "[9, 9, 9]"))
    write_entries(file, {"c.py": entry()})
    assert read_baseline(file) == {"b.py": entry(), "c.py": entry()}


def test_a_file_of_somebody_else_is_never_replaced(tmp_path: Path) -> None:
    file = tmp_path / "package.json"
    file.write_text(json.dumps({"name": "theirs"}))
    with pytest.raises(UsageError, match="is not a ddpdoctor baseline"):
        write_entries(file, {"train.py": entry()})
    assert json.loads(file.read_text()) == {"name": "theirs"}


def _write(file: str, target: str) -> None:
    write_entries(Path(file), {target: entry()})


def test_gates_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    file = tmp_path / "baseline.json"
    targets = [f"train_{number}.py" for number in range(12)]
    with ProcessPoolExecutor(4) as pool:
        list(pool.map(_write, [str(file)] * len(targets), targets))
    assert set(read_baseline(file) or {}) == set(targets)
    assert [path.name for path in tmp_path.iterdir()] == ["baseline.json"]
