from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddpdoctor.catalogue.select import suppressions_in
from ddpdoctor.cli.main import main

HEAD = "import torch.distributed as dist\n\ndist.init_process_group('gloo')\nif dist.get_rank() == 0:\n"
TAIL = "dist.destroy_process_group()\n"


@pytest.mark.parametrize(
    ("comment", "kind", "words"),
    [
        ("# ddpdoctor: ignore[DDP101]", "ignore", ("DDP101",)),
        ("#ddpdoctor:ignore[DDP101,missing-set-epoch]", "ignore", ("DDP101", "missing-set-epoch")),
        ("# noqa  # ddpdoctor: ignore[ DDP101 , ]", "ignore", ("DDP101",)),
        ("# ddpdoctor: ignore", "ignore", ()),
        ("# ddpdoctor: ignore[]", "ignore", ()),
        ("# ddpdoctor: file-ignore[DDP6] since we want it", "file-ignore", ("DDP6",)),
    ],
)
def test_a_comment_is_read(comment: str, kind: str, words: tuple[str, ...]) -> None:
    (found,) = suppressions_in("f.py", f"x = 1  {comment}\n")
    assert (found.kind, found.words) == (kind, words)


def test_text_that_is_no_comment_is_none() -> None:
    assert suppressions_in("f.py", 'x = "# ddpdoctor: ignore[DDP101]"\n# about ddpdoctor\n') == ()


def test_a_comment_alone_on_its_line_speaks_of_the_next_line_of_code() -> None:
    (found,) = suppressions_in("f.py", "# ddpdoctor: ignore[DDP101]\n# more\nx = 1\n")
    assert found.lines == (1, 3)


@pytest.mark.parametrize(
    "body",
    [
        "    dist.barrier()  # ddpdoctor: ignore[DDP301]\n",
        "    dist.barrier()  # ddpdoctor: ignore[rank-divergent-collective]\n",
        "    # ddpdoctor: ignore[ddp301]\n    dist.barrier()\n",
        "    dist.barrier(\n    )  # ddpdoctor: ignore[DDP301]\n",
        "    dist.barrier()\n# ddpdoctor: file-ignore[DDP301]\n",
    ],
)
@pytest.mark.parametrize("target", ["train.py", "."])
def test_a_finding_is_suppressed(body: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _said(HEAD + body + TAIL, tmp_path, monkeypatch, target) == []


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("    dist.barrier()  # ddpdoctor: ignore[DDP516]\n", [(5, "DDP301"), (5, "DDP001")]),
        ("    dist.barrier()  # ddpdoctor: ignore[DDP301, DDP516]\n", [(5, "DDP001")]),
        ("    dist.barrier()  # ddpdoctor: ignore\n", [(5, "DDP301"), (5, "DDP001")]),
        ("    dist.barrier()  # ddpdoctor: ignore[DDP999]\n", [(5, "DDP301"), (5, "DDP001")]),
        ("    # ddpdoctor: ignore[DDP516]\n\n    dist.barrier()\n", [(7, "DDP301"), (5, "DDP001")]),
        # These checks look at runs as well, or only: without a run nobody knows whether the comment is needed.
        ("    dist.barrier()  # ddpdoctor: ignore[DDP301, DDP305, DDP102, DDP001]\n", []),
        ("    # ddpdoctor: ignore[DDP301]\n\n    dist.barrier()\n", [(7, "DDP301")]),
        ("    x = 1  # ddpdoctor: ignore[DDP301]\n    dist.barrier()\n", [(6, "DDP301")]),
    ],
)
@pytest.mark.parametrize("target", ["train.py", "."])
def test_a_comment_that_suppresses_nothing_is_reported(
    body: str, said: list[tuple[int, str]], target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _said(HEAD + body + TAIL, tmp_path, monkeypatch, target) == said


def test_a_comment_for_a_check_of_the_source_alone_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = HEAD + "    print()\n" + TAIL + "# ddpdoctor: file-ignore[DDP516]\n"
    assert _said(text, tmp_path, monkeypatch, "train.py") == [(7, "DDP001")]
    assert _said(text, tmp_path, monkeypatch, "train.py", "--ignore", "unused-suppression") == []
    assert _said(text, tmp_path, monkeypatch, "train.py", "--ignore", "DDP516") == []
    assert _said(text, tmp_path, monkeypatch, "train.py", "--select", "DDP516") == []
    assert _said(text, tmp_path, monkeypatch, "train.py", "--select", "DDP516,DDP001") == [(7, "DDP001")]


def test_a_comment_in_a_module_that_is_no_entry_script_is_not_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import torch\n\ndef step():\n    pass  # ddpdoctor: ignore[DDP516]\n"
    assert _said(text, tmp_path, monkeypatch, "train.py") == []


def test_it_is_explained_like_a_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "DDP001"]) == 0
    assert "suppresses nothing" in capsys.readouterr().out


def _said(
    text: str, directory: Path, monkeypatch: pytest.MonkeyPatch, target: str, *arguments: str
) -> list[tuple[int, str]]:
    (directory / "train.py").write_text(text)
    monkeypatch.chdir(directory)
    report = directory / "report.json"
    main(["check", "--static", target, "--output-format", "json", "-o", str(report), *arguments])
    return [
        (finding["locations"][0]["line"], finding["code"])
        for finding in json.loads(report.read_text())["findings"]
        if finding["code"] in ("DDP301", "DDP001")
    ]


@pytest.mark.parametrize(
    "comments",
    [
        "# ddpdoctor: ignore[DDP101]\n" * 100_000 + "x = 1\n",
        "x = 1  # ddpdoctor: ignore[nope]\n" * 20_000,
        f"x = 1  # ddpdoctor: ignore[{', '.join(f'word{number}' for number in range(50_000))}]\n",
        "x = 1  " + "# ddpdoctor: ignore[" * 50_000 + "\n",
    ],
    ids=["alone", "lines", "words", "open"],
)
@pytest.mark.timeout(120)
def test_thousands_of_comments_are_judged_in_time(
    comments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(_said(HEAD + "    pass\n" + TAIL + comments, tmp_path, monkeypatch, "train.py")) <= 101
