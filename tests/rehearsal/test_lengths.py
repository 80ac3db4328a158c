"""Which uses of ``len(loader)`` look for the end of a pass."""

from __future__ import annotations

import ast
import sys
import textwrap

import pytest

from ddpdoctor.rehearsal.lengths import Lengths, ends_a_loop, read

ENDS = (
    "for i, batch in enumerate(loader):\n    if i == len(loader) - 1: validate()",
    "for i, batch in enumerate(loader):\n    if (i + 1) % accumulate == 0 or (i + 1) == len(loader): step()",
    "for i in range(len(loader)):\n    batch = next(batches)",
    "for i in tqdm(range(len(loader)), desc='train'):\n    batch = prefetcher.next()",
    "while done < len(loader):\n    batch = next(batches)\n    done += 1",
    "for batch in loader:\n    step += 1\n    if step % len(loader) == 0: save()",
    "last = len(loader) - 1\nfor i, batch in enumerate(loader):\n    if i == last: print(f'{i}/{last}')",
    "n = len(loader)\nfor i, batch in enumerate(loader):\n    total += loss\n    if i + 1 >= n: show(total / n)",
)
TRUTH = (
    "schedule = OneCycleLR(optimizer, steps_per_epoch=len(loader), epochs=3)",
    "total = epochs * len(loader)",
    "for i, batch in enumerate(loader):\n    if i % (len(loader) // 10) == 0: log()",
    "every = len(loader) // accumulate",
    "for batch in loader:\n    total += loss\nprint(total / len(loader))",
    "if len(loader) < args.least: raise ValueError",
    "assert len(loader) == 100",
    "assert len(one) == len(other)",
    "table = [rate(i) for i in range(len(loader))]",
    "for i in range(len(loader)):\n    table.append(rate(i))",
    "for i, batch in enumerate(loader):\n    n = len(loader)\n    if i == n - 1: save()\n    rate = n // 10",
    "n = len(loader)\nn = n - 1\nuse(n)",
    "bar = tqdm(total=len(loader))",
    "return_value = len(loader)",
)


def _judged(source: str) -> bool:
    read_source = read(ast.parse(source))
    calls = [node for node in read_source.parents if isinstance(node, ast.Call)]
    return all(ends_a_loop(call, read_source) for call in calls if getattr(call.func, "id", "") == "len")


@pytest.mark.parametrize("source", ENDS)
def test_a_loop_that_ends_by_the_length_is_told_where_it_will_end(source: str) -> None:
    assert _judged(source)


@pytest.mark.parametrize("source", TRUTH)
def test_everything_else_is_told_the_truth(source: str) -> None:
    assert not _judged(source)


def test_two_questions_on_one_line_are_told_apart_and_wrappers_pass_them_on(tmp_path: object) -> None:
    answers = []
    lengths = Lengths()

    class Loader:
        def __len__(self) -> int:
            answers.append(lengths.seeks_end(sys._getframe(1)))
            return 100

    class Wrapper:
        def __init__(self) -> None:
            self.loader = Loader()

        def __len__(self) -> int:
            return len(self.loader)

    script = tmp_path / "script.py"  # type: ignore[operator]
    script.write_text(
        textwrap.dedent(
            """
            for i in range(1):
                seen = i % (len(loader) // 10) == 5 or i == len(loader) - 1
            """
        )
    )
    exec(compile(script.read_text(), str(script), "exec"), {"loader": Wrapper(), "__name__": "script"})
    assert answers == ([False, True] if sys.version_info >= (3, 11) else [False, False])
