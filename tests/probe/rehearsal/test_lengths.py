"""Which uses of ``len(loader)`` look for the end of a pass."""

from __future__ import annotations

import ast
import sys
import textwrap

import pytest

from ddpdoctor.probe.rehearsal.data.lengths import Lengths, purpose_of, read

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
TURNS = (
    "for i in range(len(loader)):\n    batch = next(batches)",
    "n = torch.tensor([len(loader)], device=device)\nfor i in range(int(n)):\n    batch = next(batches)",
    "def steps():\n    return len(loader)\nfor i in range(steps()):\n    batch = next(batches)",
)
AGREED = (
    "n = torch.tensor([len(loader)])\ndist.all_reduce(n, op=dist.ReduceOp.MIN)\n"
    "for i in range(int(n.item())):\n    batch = next(batches)",
    "def common():\n    n = torch.tensor(len(loader)).cuda()\n    all_reduce(n, ReduceOp.MIN)\n    return n.item()\n"
    "steps = common()\nfor i in range(steps):\n    batch = next(batches)",
    "for i in range(min(len(loader), 100)):\n    batch = next(batches)",
    "for i in range(len(loader)):\n    batch = next(batches)\n    if done(): break",
)
TRUTH = (
    "n = torch.tensor([len(loader)])\ndist.all_reduce(n)\nfor i in range(int(n)):\n    batch = next(batches)",
    "n = len(loader)\nn //= 10\nfor i in range(n):\n    batch = next(batches)",
    "def steps():\n    return len(loader)\nfor i in range(steps()):\n    batch = next(batches)\nplan(steps())",
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


def _purposes(source: str, *, alone: bool = True) -> set[str]:
    read_source = read(ast.parse(source), alone=alone)
    calls = [node for node in read_source.parents if isinstance(node, ast.Call)]
    return {purpose_of(call, read_source) for call in calls if getattr(call.func, "id", "") == "len"}


@pytest.mark.parametrize("source", ENDS)
def test_a_loop_that_ends_by_the_length_is_told_where_it_will_end(source: str) -> None:
    assert "" not in _purposes(source)


@pytest.mark.parametrize("source", TURNS)
def test_a_loop_that_draws_as_often_as_the_ranks_own_length_is_known(source: str) -> None:
    assert _purposes(source) == {"turns"}


@pytest.mark.parametrize("source", AGREED)
def test_a_length_that_may_be_another_is_not_the_ranks_own(source: str) -> None:
    assert _purposes(source) == {"end"}


@pytest.mark.parametrize("source", TRUTH)
def test_everything_else_is_told_the_truth(source: str) -> None:
    assert "" in _purposes(source)


def test_what_a_function_returns_is_not_followed_where_other_files_may_call_it() -> None:
    assert _purposes(TURNS[2], alone=False) == {""}


def test_two_questions_on_one_line_are_told_apart_and_wrappers_pass_them_on(tmp_path: object) -> None:
    answers = []
    lengths = Lengths()

    class Loader:
        def __len__(self) -> int:
            answers.append(lengths.purpose(sys._getframe(1)))
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
    assert answers == (["", "end"] if sys.version_info >= (3, 11) else ["", ""])


@pytest.mark.parametrize("module", ["ignite.engine.engine", "transformers.trainer", "igniter"])
def test_a_trainer_of_a_library_ends_its_epoch_by_the_length(module: str) -> None:
    """Ignite's Engine begins a loader again that ends before the length that it read: its epoch would never end."""
    answers = []

    class Loader:
        def __len__(self) -> int:
            answers.append(Lengths().purpose(sys._getframe(1)))
            return 100

    exec("def length(data):\n    return len(data)\nlength(data)", {"data": Loader(), "__name__": module})
    assert answers == ["" if module == "igniter" else "end"]
