"""Which code of a training script a rehearsal is said not to have reached."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

import pytest

from ddpdoctor.examine.unreached_code import gaps
from tests.check_command import check

SCRIPT = """
    def train(args, model, loader, optimizer, scaler=None):
        best = None
        for epoch in range(args.epochs):
            for step, batch in enumerate(loader):
                if scaler is not None:  # run
                    scaler.scale(model(batch)).backward()
                model(batch).backward()  # run: trained
                optimizer.step()  # run: trained
                if step % 100 == 99:  # run
                    validate(model)
                    save(model)
                elif step % 10 == 0:  # run
                    print(step)
                if not finite(model):  # run
                    raise ValueError(step)
            if args.swap:  # run
                swap(model)
            if epoch % 10 == 9:  # run
                save(
                    model,
                )
            best = step  # run
            try:
                log(best)  # run
            except OSError:
                recover(model)
        for batch in loader:
            test(model)
        validate(model)

    def validate(model): ...
    def save(model): ...
    def test(model): ...
    """


def _found(source: str, unwatched: frozenset[int] = frozenset()) -> list[tuple[str, str, tuple[str, ...]]]:
    text = textwrap.dedent(source)
    lines = text.splitlines()
    trained = frozenset(number for number, line in enumerate(lines, 1) if "# run: trained" in line)
    run = frozenset(number for number, line in enumerate(lines, 1) if "# run" in line)
    found = sorted(gaps(ast.parse(text), "/train.py", trained, run, unwatched))
    return [(lines[gap.first_line - 1].strip(), lines[gap.last_line - 1].strip(), gap.calls) for gap in found]


def test_what_later_steps_epochs_and_the_end_would_run_is_named_with_what_it_calls() -> None:
    assert _found(SCRIPT) == [
        ("validate(model)", "save(model)", ("validate", "save")),
        ("save(", ")", ("save",)),
        ("for batch in loader:", "validate(model)", ("test", "validate")),
    ]


def test_of_a_function_that_was_not_watched_to_its_end_nothing_is_said() -> None:
    assert _found(SCRIPT, unwatched=frozenset({2})) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        (
            """
            class Trainer:
                def train_step(self, batch):
                    self.model(batch).backward()  # run: trained
                    self.steps += 1  # run
                    if self.steps % 50 == 0:  # run
                        self.save()
                    if self.ema is not None:  # run
                        self.ema.update()
                    if self.config.clip:  # run
                        clip(self.model)
                def save(self): ...
            """,
            ["self.save()"],
        ),
        (
            """
            def work(rank, world):
                join(rank, world)
                prepare(rank)
                model = wrap(rank)  # run
                train(model)  # run: trained
                finish(model)
            """,
            ["finish(model)"],
        ),
        (
            """
            setup()
            if __name__ == "__main__":
                train()  # run: trained
                evaluate()
            """,
            ["evaluate()"],
        ),
        (
            """
            for fold in range(5):
                model = build(fold)
                wrapped = wrap(model)  # run
                while True:
                    wrapped.step()  # run: trained
                    if done(wrapped):  # run
                        break
                report(fold)
            """,
            ["report(fold)"],
        ),
    ],
)
def test_code_that_ran_before_or_that_training_cannot_come_to_is_no_gap(source: str, found: list[str]) -> None:
    assert [first for first, _, _ in _found(source)] == found


COUNTED = """
    class Net(Module):
        def __init__(self):
            self.calls, self.made = 0, 0  # run

        def forward(self, x):
            self.calls += 1  # run
            if self.calls > 60:  # run
                self.body.requires_grad_(False)
            if self.made > 3:  # run
                self.rebuild()
            if self.calls > 9:  # run
                print(self.calls)
            return self.head(self.body(x))  # run

        def rebuild(self):
            self.made += 1

    step = 0  # run
    for x in loader:  # run
        step += 1  # run
        if step == 100:  # run
            drop(optimizer)
        else:
            keep(optimizer)  # run
        if verbose:  # run
            plot(model)
        model(x).backward()  # run: trained
    """


def test_what_a_count_of_steps_decides_waits_for_it_in_the_model_as_well() -> None:
    text = textwrap.dedent(COUNTED)
    lines = text.splitlines()
    trained = frozenset(number for number, line in enumerate(lines, 1) if "# run: trained" in line)
    run = frozenset(number for number, line in enumerate(lines, 1) if "# run" in line)
    found = sorted(gaps(ast.parse(text), "/train.py", trained, run))
    assert [(lines[gap.first_line - 1].strip(), gap.waits_for) for gap in found] == [
        ("self.body.requires_grad_(False)", "self.calls > 60"),
        ("drop(optimizer)", "step == 100"),
    ]


WITHOUT_A_WRAP = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Linear(8, 8)
{shard}
optimizer = torch.optim.SGD(model.parameters(), 0.1)


def validate():
    dist.all_reduce(torch.ones(2))


for step in range(1000):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).sum().backward()
    {average}
    optimizer.step()
    if step == 600:
        validate()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("shard", "average"),
    [("fully_shard(model)", "pass"), ("", "[dist.all_reduce(one.grad) for one in model.parameters()]")],
    ids=["sharded", "averaged by hand"],
)
def test_what_waits_for_a_step_is_named_where_nothing_is_wrapped_and_no_loader_feeds_it(
    shard: str, average: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(WITHOUT_A_WRAP.format(shard=shard, average=average), encoding="utf-8")
    report = check("--no-equivalence", "train.py", cwd=tmp_path)[1]
    assert report["rehearsal"]["status"] == "completed", report["rehearsal"]
    (gap,) = report["rehearsal"]["unreached"]
    assert (gap["waits_for"], gap["calls"]) == ("step == 600", ["validate"])
