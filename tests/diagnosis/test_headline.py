from __future__ import annotations

import pytest

from ddpdoctor.record.joining import headline
from ddpdoctor.record.model import RankException

WORKER = """Caught ValueError in DataLoader worker process 1.
Original Traceback (most recent call last):
  File "/venv/lib/python3.11/site-packages/torch/utils/data/_utils/worker.py", line 374, in _worker_loop
    data = fetcher.fetch(index)
  File "/home/me/data.py", line 21, in __getitem__
    raise ValueError(path)
  File "/venv/lib/python3.11/site-packages/PIL/Image.py", line 9, in open
    raise ValueError(path)
ValueError: cannot decode image 21.jpg
"""


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (WORKER, "cannot decode image 21.jpg (data.py:21 in DataLoader worker process 1)"),
        (WORKER.replace("\nValueError: cannot", "\npackage.errors.ValueError: cannot"), "cannot decode image 21.jpg"),
        (WORKER.partition("\n  File")[0], "Caught ValueError in DataLoader worker process 1."),
        ("no data\nValueError: else", "no data"),
        ("", ""),
    ],
)
def test_the_headline_is_what_went_wrong(message: str, said: str) -> None:
    assert headline(RankException(time_ns=1, type="ValueError", message=message)).startswith(said)
