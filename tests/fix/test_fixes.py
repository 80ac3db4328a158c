"""The fixes that checks offer: what is made, what is only shown, and that the defect is gone afterwards."""

from __future__ import annotations

import ast
import io
import subprocess
import sys
from pathlib import Path

import pytest

from ddpdoctor.cli.main import main
from ddpdoctor.errors import ExitCode

Output = pytest.CaptureFixture[str]

HEAD = """\
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from tqdm import tqdm


def is_main_process():
    return dist.get_rank() == 0


def is_main_of(name):
    return dist.get_rank() == 0


"""
EPOCHS = """\
def main(epochs=3):
    dist.init_process_group("gloo")
    model = DDP(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.ones(8, 2))
    sampler = DistributedSampler(data)  # a comment
    loader = DataLoader(data, sampler=sampler)
    for epoch in range(epochs):
        # another comment
        for (x,) in loader:
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


main()
"""
NET = """\
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def forward(self, x):
        return self.layer(x)


"""
GUARD = """\
def main():
    dist.init_process_group("gloo")
    model = DDP(torch.nn.Linear(2, 2))
    if is_main_process:
        print("done")
    dist.destroy_process_group()


main()
"""
LOAD = """\
def main():
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    model = torch.nn.Linear(2, 2).cuda()
    model.load_state_dict(torch.load("checkpoint.pt"))
    model = DDP(model)
    dist.destroy_process_group()


main()
"""
FIXABLE = {
    "DDP102": (EPOCHS, "        for (x,)", "        sampler.set_epoch(epoch)\n        for (x,)"),
    "DDP516": (GUARD, "if is_main_process:", "if is_main_process():"),
    "DDP602": (LOAD, '"checkpoint.pt")', '"checkpoint.pt", map_location="cpu")'),
}


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("code", FIXABLE)
def test_a_safe_fix_is_made_and_the_defect_is_gone(code: str, newline: str, project: Path, capsys: Output) -> None:
    body, before, after = FIXABLE[code]
    script = project / "train.py"
    script.write_bytes((HEAD + body).replace("\n", newline).encode())
    script.chmod(0o750)
    assert main(["check", "--fix", "--select", code, "train.py"]) == ExitCode.CLEAN
    assert "made 1 fix in 1 file" in capsys.readouterr().err
    expected = HEAD + body.replace(before, after)
    assert script.read_bytes() == expected.replace("\n", newline).encode()
    assert script.stat().st_mode & 0o777 == 0o750
    ast.parse(script.read_bytes())
    assert main(["check", "--fix", "--select", code, "train.py"]) == ExitCode.CLEAN
    assert script.read_bytes() == expected.replace("\n", newline).encode()


@pytest.mark.parametrize("code", FIXABLE)
def test_the_difference_changes_nothing_and_is_a_patch(code: str, project: Path, capsys: Output) -> None:
    body, before, after = FIXABLE[code]
    script = project / "train.py"
    script.write_text(HEAD + body)
    assert main(["check", "--diff", "--select", code, "train.py"]) == ExitCode.FINDINGS
    patch = capsys.readouterr().out
    assert script.read_text() == HEAD + body
    subprocess.run(("git", "apply", "-p1", "-"), input=patch, text=True, cwd=project, check=True)
    assert script.read_text() == HEAD + body.replace(before, after)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        # The loop does not count, or not with one name.
        ("for epoch in range(epochs)", "for epoch in os.listdir('.')"),
        ("for epoch in range(epochs)", "for epoch, name in enumerate(range(epochs))"),
        # The sampler has no name, several, or may be something else by then.
        ("sampler=sampler", "sampler=DistributedSampler(data)"),
        ("    loader =", "    if epochs > 2:\n        sampler = DistributedSampler(data, seed=1)\n    loader ="),
    ],
)
def test_no_fix_where_it_might_not_fit(before: str, after: str, project: Path, capsys: Output) -> None:
    text = (HEAD + EPOCHS).replace(before, after)
    (project / "train.py").write_text(text)
    main(["check", "--fix", "--select", "DDP102", "train.py"])
    assert "made" not in capsys.readouterr().err
    assert (project / "train.py").read_text() == text


def test_a_loop_with_a_progress_bar_counts_too(project: Path) -> None:
    (project / "train.py").write_text((HEAD + EPOCHS).replace("range(epochs)", "tqdm(range(epochs))"))
    assert main(["check", "--fix", "--select", "DDP102", "train.py"]) == ExitCode.CLEAN
    assert "sampler.set_epoch(epoch)" in (project / "train.py").read_text()


@pytest.mark.parametrize(
    ("text", "code"),
    [
        # Called on one rank only, the collective would hang.
        (GUARD.replace('print("done")', "dist.barrier()"), "DDP516"),
        (
            GUARD.replace('print("done")', "evaluate()").replace(
                "def main", "def evaluate():\n    dist.barrier()\n\n\ndef main"
            ),
            "DDP516",
        ),
        (GUARD.replace('print("done")', "return"), "DDP516"),
        (GUARD.replace("if is_main_process:", "if is_main_of:"), "DDP516"),
        # The tensors are used as they are.
        (LOAD.replace("model.load_state_dict(torch.load", "weights = (torch.load"), "DDP602"),
    ],
)
def test_what_may_change_more_than_was_asked_for_is_shown_and_not_made(
    text: str, code: str, project: Path, capsys: Output
) -> None:
    (project / "train.py").write_text(HEAD + text)
    assert main(["check", "--fix", "--select", code, "train.py"]) == ExitCode.FINDINGS
    assert f"{code}: not made, since it may change what else the script does" in capsys.readouterr().err
    assert (project / "train.py").read_text() == HEAD + text
    assert main(["check", "--diff", "--select", code, "train.py"]) == ExitCode.FINDINGS
    out, err = capsys.readouterr()
    assert out == ""
    assert "not made" in err
    assert "--- a/train.py" in err


def test_leaving_out_the_search_for_unused_parameters_is_a_suggestion(project: Path, capsys: Output) -> None:
    text = HEAD + NET + EPOCHS.replace("torch.nn.Linear(2, 2))", "Net(), find_unused_parameters=True)")
    (project / "train.py").write_text(text)
    main(["check", "--fix", "--select", "DDP202", "train.py"])
    err = capsys.readouterr().err
    assert "-    model = DDP(Net(), find_unused_parameters=True)\n" in err
    assert "+    model = DDP(Net())\n" in err
    assert (project / "train.py").read_text() == text


WHOLE = EPOCHS.replace("    sampler = DistributedSampler(data)  # a comment\n", "").replace(
    "sampler=sampler", "batch_size=2, shuffle=True, num_workers=2"
)
UNSHUFFLED = EPOCHS.replace("DistributedSampler(data)", "DistributedSampler(data, shuffle=False)")
ACCUMULATED = UNSHUFFLED.replace("for (x,) in loader:", "for i, (x,) in enumerate(loader):").replace(
    """\
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
""",
    """\
            # the forward
            loss = model(x).sum()

            loss.backward()
            if (i + 1) % 4 == 0 or i + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()
""",
)
NESTED = UNSHUFFLED.replace(
    """\
            model(x).sum().backward()
""",
    """\
            for part in range(4):
                model(x[part]).sum().backward()
""",
)
STREAM = """\
class Rows(IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        for index, row in enumerate(self.rows):
            if index % dist.get_world_size() == dist.get_rank():
                yield row


"""
KEPT = """\
class Rolled(Dataset):
    def __init__(self, rows):
        self.rows, self.epoch = rows, 0

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index - self.epoch]


"""
SHOWN = {
    "a stream that every worker repeats": (
        "DDP101",
        HEAD.replace("DistributedSampler, ", "IterableDataset, ")
        + STREAM
        + UNSHUFFLED.replace("    sampler = DistributedSampler(data, shuffle=False)  # a comment\n", "")
        .replace("TensorDataset(torch.ones(8, 2))", "Rows(torch.ones(8, 2))")
        .replace("sampler=sampler", "num_workers=4"),
        ["loader = DataLoader(data, num_workers=1)"],
    ),
    "workers that are kept": (
        "DDP102",
        HEAD.replace("TensorDataset", "Dataset")
        + KEPT
        + UNSHUFFLED.replace("TensorDataset(torch.ones(8, 2))", "Rolled(torch.ones(8, 2))")
        .replace("sampler=sampler", "sampler=sampler, num_workers=1, persistent_workers=True")
        .replace("        # another comment\n", "        data.epoch = epoch\n"),
        ["loader = DataLoader(data, sampler=sampler, num_workers=1)"],
    ),
    "a whole data set": (
        "DDP101",
        HEAD + WHOLE,
        ["batch_size=2, sampler=DistributedSampler(data), num_workers=2)", "loader.sampler.set_epoch(epoch)"],
    ),
    "a data set in its order": (
        "DDP101",
        HEAD + WHOLE.replace("shuffle=True", "shuffle=False"),
        ["batch_size=2, sampler=DistributedSampler(data, shuffle=False), num_workers=2)"],
    ),
    "a sampler without a name": (
        "DDP101",
        HEAD.replace("DistributedSampler, ", "RandomSampler, ")
        + WHOLE.replace("shuffle=True", "sampler=RandomSampler(data)"),
        ["from torch.utils.data import DistributedSampler", "sampler=DistributedSampler(data)", "set_epoch(epoch)"],
    ),
    "accumulation": (
        "DDP204",
        HEAD + ACCUMULATED,
        [
            "from contextlib import nullcontext",
            "            with nullcontext() if (i + 1) % 4 == 0 or i + 1 == len(loader) else model.no_sync():",
            "                loss = model(x).sum()",
            "                loss.backward()",
        ],
    ),
    "accumulation in a loop of its own": (
        "DDP204",
        HEAD + NESTED,
        [
            "                with nullcontext() if part == 4 - 1 else model.no_sync():",
            "                    model(x[part]).sum().backward()",
        ],
    ),
}


@pytest.mark.parametrize("case", SHOWN)
def test_a_suggestion_is_shown_and_never_made_and_would_mend_the_defect(
    case: str, project: Path, capsys: Output
) -> None:
    code, text, wanted = SHOWN[case]
    script = project / "train.py"
    script.write_text(text)
    assert main(["check", "--fix", "--select", code, "train.py"]) == ExitCode.FINDINGS
    shown = capsys.readouterr().err
    assert script.read_text() == text
    added = [line[1:] for line in shown.splitlines() if line.startswith("+") and not line.startswith("+++")]
    assert all(any(part in line for line in added) for part in wanted)
    patch = "--- a/" + shown.partition("--- a/")[2].partition("train.py:")[0].partition("Read ")[0]
    subprocess.run(("git", "apply", "-p1", "-"), input=patch, text=True, cwd=project, check=True)
    assert script.read_text() != text
    related = ["--select", "DDP101", "--select", "DDP102", "--select", "DDP204", "--select", "DDP216,DDP217"]
    assert main(["check", "--static", *related, "train.py"]) == ExitCode.CLEAN


@pytest.mark.parametrize(
    ("code", "text"),
    [
        # The data set would be read or drawn twice.
        ("DDP101", WHOLE.replace("DataLoader(data,", "DataLoader(TensorDataset(torch.ones(8, 2)),")),
        # The sampler chooses.
        (
            "DDP101",
            WHOLE.replace("shuffle=True", "sampler=torch.utils.data.WeightedRandomSampler(torch.ones(8), 8)"),
        ),
        # The test counts only after the backward.
        ("DDP204", ACCUMULATED.replace("loss.backward()\n", "loss.backward()\n            i += 1\n")),
        # The text in the block would be changed.
        (
            "DDP204",
            ACCUMULATED.replace("            # the forward\n", "").replace(
                "loss.backward()\n", 'loss.backward(); print("""two\nlines""")\n'
            ),
        ),
    ],
)
def test_no_suggestion_where_it_might_not_fit(code: str, text: str, project: Path, capsys: Output) -> None:
    (project / "train.py").write_text(HEAD + text)
    assert main(["check", "--diff", "--select", code, "train.py"]) == ExitCode.FINDINGS
    assert "not made" not in capsys.readouterr().err


def test_a_suppressed_finding_is_not_fixed(project: Path) -> None:
    text = (HEAD + GUARD).replace("if is_main_process:", "if is_main_process:  # ddpdoctor: ignore[DDP516]")
    (project / "train.py").write_text(text)
    assert main(["check", "--fix", "--select", "DDP516", "train.py"]) == ExitCode.CLEAN
    assert (project / "train.py").read_text() == text


def test_a_module_of_several_scripts_is_fixed_once(project: Path, capsys: Output) -> None:
    (project / "job.py").write_text((HEAD + GUARD).replace("\nmain()\n", ""))
    for name in ("one.py", "two.py"):
        (project / name).write_text("import torch\nfrom job import main\n\nmain()\n")
    assert main(["check", "--fix", "--select", "DDP516", "."]) == ExitCode.CLEAN
    assert "made 1 fix in 1 file" in capsys.readouterr().err
    assert (project / "job.py").read_text().count("if is_main_process():") == 1


def test_the_difference_of_stdin_is_shown(project: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO((HEAD + GUARD).encode())))
    assert main(["check", "--diff", "--select", "DDP516", "-"]) == ExitCode.FINDINGS
    assert "+    if is_main_process():" in capsys.readouterr().out


def test_a_file_that_does_not_parse_is_left_as_it_is(project: Path) -> None:
    (project / "train.py").write_text("import torch\ndef main(:\n")
    assert main(["check", "--fix", "train.py"]) == ExitCode.ERROR
    assert (project / "train.py").read_text() == "import torch\ndef main(:\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_report_for_people_says_what_there_is_a_patch_for(project: Path, capsys: Output) -> None:
    unguarded = HEAD + GUARD
    (project / "train.py").write_text(unguarded)
    for paths in (["train.py"], ["train.py", "train.py"]):
        main(["check", "--static", "--select", "DDP516", *paths])
        assert "`--diff` shows a patch for DDP516; `--fix` applies it" in " ".join(capsys.readouterr().out.split())
    main(["check", "--static", "--select", "DDP516", "--output-format", "json", "train.py"])
    assert "--diff" not in capsys.readouterr().out
    (project / "train.py").write_text(unguarded.replace("if is_main_process:", "if is_main_process():"))
    main(["check", "--static", "--select", "DDP516", "train.py"])
    assert "--diff" not in capsys.readouterr().out
