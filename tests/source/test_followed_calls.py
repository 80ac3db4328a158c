"""Calls that are not written by a function's own name: it is chosen, kept, wrapped, or handed on to be called.

Each way leads rank 0 alone to a collective. Where every rank goes that way, or rank 0 does something of its own, there
is nothing to report.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpdoctor.source.script.script import read_script
from tests.source.marked import findings_of, marks, places, written

JOB = """
import argparse
import contextlib
import functools
import threading
from concurrent.futures import ThreadPoolExecutor

dist.init_process_group("gloo")
rank, total = dist.get_rank(), torch.ones(1)

def collect(values=total):
    dist.all_reduce(values)

def change(values=total):
    values += 1

class Sum:
    def run(self, values):
        dist.all_reduce(values)

class Nothing:
    def run(self, values):
        pass

"""
WAYS = {
    "a list that a loop goes over": """
for call in [change, collect]:
    if rank == 0:
        call(total)
""",
    "pairs that a loop goes over": """
for name, call in [("change", change), ("sum", collect)]:
    if rank == 0:
        call(total)
""",
    "one of two by rank": """
call = collect if rank == 0 else change
call(total)
""",
    "a table and a setting": """
parser = argparse.ArgumentParser()
parser.add_argument("--how", default="sum")
table = {"sum": collect, "change": change}
if rank == 0:
    table[parser.parse_args().how](total)
""",
    "its name among those of the module": """
if rank == 0:
    globals()["collect"](total)
""",
    "a name that is put together": """
def run_sum():
    if rank == 0:
        collect()

def run_change():
    if rank == 0:
        change()

getattr(sys.modules[__name__], f"run_{sys.argv[1]}")()
""",
    "a method's name that is put together before": """
class Engine:
    def run_sum(self):
        if rank == 0:
            collect()
    def run_change(self):
        if rank == 0:
            change()
    def run(self, how):
        name = "run_%s" % how
        getattr(self, name)()

Engine().run(sys.argv[1])
""",
    "names that a setting ends": """
class Engine:
    def run_sum(self):
        if rank == 0:
            collect()
    def run_change(self):
        pass

method = getattr(Engine(), "run_" + os.environ.get("HOW", "sum"))
method()
""",
    "a method that a setting names": """
class Engine:
    def train(self):
        if rank == 0:
            collect()
    def show(self):
        print("nothing")

getattr(Engine(), f"{sys.argv[1]}")()
""",
    "its name in the module's object": """
if rank == 0:
    getattr(sys.modules[__name__], "collect")(total)
""",
    "hooks that are added": """
class Trainer:
    def __init__(self):
        self.hooks = []
    def add(self, hook):
        self.hooks.append(hook)
    def run(self, values):
        for hook in self.hooks:
            hook(values)

trainer = Trainer()
trainer.add(change)
if rank == 0:
    trainer.add(collect)
trainer.run(total)
""",
    "callbacks by rank": """
class Trainer:
    def __init__(self, callbacks):
        self.callbacks = callbacks
    def run(self, values):
        for callback in self.callbacks:
            callback.run(values)

Trainer([Nothing(), Sum()] if rank == 0 else [Nothing()]).run(total)
""",
    "a decorator that is a class": """
class first_rank_only:
    def __init__(self, function):
        self.function = function
    def __call__(self, *arguments):
        if rank == 0:
            return self.function(*arguments)

report = first_rank_only(collect)

@first_rank_only
def finish(values):
    dist.all_reduce(values)

finish(total)
""",
    "the end of a context": """
class Stage:
    def __enter__(self):
        return self
    def __exit__(self, *error):
        if rank == 0:
            collect()

with Stage():
    total += 1
""",
    "the beginning of a context": """
class Stage:
    def __enter__(self):
        if rank == 0:
            collect()
        return total
    def __exit__(self, *error):
        return False

with Stage() as values:
    values += 1
""",
    "for each of some items": """
if rank == 0:
    list(map(collect, [total, total]))
""",
    "a thread": """
if rank == 0:
    thread = threading.Thread(target=collect, args=(total,))
    thread.start()
    thread.join()
""",
    "a pool": """
with ThreadPoolExecutor() as pool:
    if rank == 0:
        pool.submit(collect, total).result()
""",
    "a text that is made": """
class Meter:
    def __str__(self):
        dist.all_reduce(total)
        return str(total.item())

if rank == 0:
    print(f"mean {Meter()}")
""",
}
EVERY_RANK = {"if rank == 0:": "if True:", " if rank == 0 else change": "", " if rank == 0 else [Nothing()]": ""}
OF_ITS_OWN = {"dist.all_reduce(values)": "values.mul_(2)", "dist.all_reduce(total)": "total.mul_(2)"}


def script(directory: Path, way: str, changes: dict[str, str]) -> Path:
    text = JOB + WAYS[way] + "\ndist.barrier()\n"
    for old, new in changes.items():
        text = text.replace(old, new)
    return written(directory, text)


@pytest.mark.parametrize("way", WAYS)
def test_a_call_that_is_not_written_by_name_is_followed(way: str, tmp_path: Path) -> None:
    path = script(tmp_path, way, {})
    [(code, line)] = places(path, "DDP301", "DDP302")
    assert code == "DDP301"
    assert "all_reduce" in path.read_text(encoding="utf-8").splitlines()[line - 1]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("changes", [EVERY_RANK, OF_ITS_OWN], ids=["every rank", "of its own"])
def test_a_call_that_keeps_no_rank_waiting_is_in_order(way: str, changes: dict[str, str], tmp_path: Path) -> None:
    assert places(script(tmp_path, way, changes), "DDP301", "DDP302") == []


def test_a_thread_that_never_ends_hides_nothing_behind_it(tmp_path: Path) -> None:
    text = """
    import threading

    dist.init_process_group("gloo")

    def watch():
        while True:
            dist.barrier()

    threading.Thread(target=watch, daemon=True).start()
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))  # DDP301
    """
    assert [code for code, _ in places(written(tmp_path, text), "DDP301")] == ["DDP301"]


def test_what_only_the_first_rank_has_as_a_function_it_alone_runs(tmp_path: Path) -> None:
    text = """
    dist.init_process_group("gloo")
    rank, model = dist.get_rank(), DDP(nn.Linear(4, 4))
    save = torch.save if rank == 0 else (lambda *given: None)
    save(model.state_dict(), "model.pt")
    everywhere = torch.save if os.path.exists("old.pt") else (lambda *given: None)
    everywhere(model.state_dict(), "again.pt")  # DDP601
    """
    path = written(tmp_path, text)
    assert places(path, "DDP601") == marks(path, "DDP601")


def test_what_is_not_the_same_function_on_every_rank_is_named(tmp_path: Path) -> None:
    [finding] = findings_of(read_script(script(tmp_path, "callbacks by rank", {})), "DDP301")
    assert "`self.callbacks` does not hold as many on every rank" in [fact.text for fact in finding.evidence]
