"""What projects put into their CI: the files parse, and their very shell lines do what they say."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.check_command import AT_MOST_S, ROOT, with_our_tree
from tests.gate.scripts import BROKEN, HEALTHY

CI = ROOT / "examples" / "ci"
SETTINGS = '[tool.ddpdoctor.gate]\ntargets = ["train.py"]\n'


def loaded(file: Path) -> Any:
    return yaml.safe_load(file.read_text())


def steps() -> dict[str, str]:
    """The shell lines of the action, by the names of its steps."""
    return {step["name"]: step["run"] for step in loaded(ROOT / "action.yml")["runs"]["steps"]}


def git(*words: str, cwd: Path) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main")
    done = subprocess.run(["git", *identity, *words], cwd=cwd, capture_output=True, text=True, check=True)
    return done.stdout


def shell(lines: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run lines as a CI does, with ``ddpdoctor`` and ``python`` of this tree on the path."""
    tools = cwd / ".tools"
    if not tools.exists():
        tools.mkdir()
        tool = tools / "ddpdoctor"
        tool.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ddpdoctor "$@"\n')
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    path = f"{tools}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    around = with_our_tree(PATH=path, XDG_STATE_HOME=str(cwd / ".state"), **environment)
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", lines],
        cwd=cwd,
        env=around,
        capture_output=True,
        text=True,
        timeout=AT_MOST_S,
    )


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with a healthy commit on ``main`` and ten broken ones, each on a branch of its own."""
    folder = tmp_path_factory.mktemp("repository")
    (folder / "train.py").write_text(HEALTHY)
    (folder / "pyproject.toml").write_text(SETTINGS)
    (folder / ".gitignore").write_text(".tools\n.state\nreports\n*.xml\n*.html\ngl-*.json\n")
    git("init", "-q", cwd=folder)
    done = shell("ddpdoctor gate --update", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    git("add", ".", cwd=folder)
    git("commit", "-q", "-m", "healthy", cwd=folder)
    for name, (script, _, _) in BROKEN.items():
        git("checkout", "-q", "-b", name.replace(" ", "-"), "main", cwd=folder)
        (folder / "train.py").write_text(script)
        git("commit", "-q", "-am", f"break: {name}", cwd=folder)
    git("checkout", "-q", "main", cwd=folder)
    return folder


def acted(repository: Path) -> tuple[subprocess.CompletedProcess[str], str]:
    """The action's step in the working tree; what it did, and the step summary."""
    summary = repository / ".state" / "step_summary_1"
    summary.write_text("")
    done = shell(
        steps()["Gate"],
        repository,
        PYTHON=sys.executable,
        TARGETS="",
        OPTIONS="--time-limit 300",
        REPORTS="reports",
        GITHUB_STEP_SUMMARY=str(summary),
    )
    return done, summary.read_text()


def test_the_action_takes_its_inputs_through_the_environment() -> None:
    """What a pull request can name never becomes shell."""
    action = loaded(ROOT / "action.yml")
    assert action["runs"]["using"] == "composite"
    for step in action["runs"]["steps"]:
        assert "${{" not in step["run"]
        assert step["shell"] == "bash"
        assert {value.removeprefix("${{ inputs.").removesuffix(" }}") for value in step["env"].values()} <= set(
            action["inputs"]
        )


def test_the_step_that_installs_does_nothing_where_nothing_is_named(tmp_path: Path) -> None:
    done = shell(steps()["Install ddpdoctor"], tmp_path, PYTHON="/nowhere/python", INSTALL="")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        ("", []),
        (
            "train.py -- --name 'two words' --at \"it's\" a\\ b",
            ["train.py", "--", "--name", "two words", "--at", "it's", "a b"],
        ),
        (
            "$(touch owned) `touch owned` ; touch owned",
            ["$(touch", "owned)", "`touch", "owned`", ";", "touch", "owned"],
        ),
        ("train.py\n--\n*.py", ["train.py", "--", "*.py"]),
    ],
)
def test_the_action_passes_words_with_blanks_and_quotes_as_they_are(
    targets: str, words: list[str], tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exec {sys.executable} "$@"\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    done = shell(steps()["Gate"], tmp_path, PYTHON=str(python), TARGETS=targets, OPTIONS="", REPORTS="reports")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-len(words) :] == words if words else "html=" in done.stdout.splitlines()[-1]
    assert not (tmp_path / "owned").exists()


def test_the_action_is_red_for_a_quote_that_is_not_closed(tmp_path: Path) -> None:
    around = {"PYTHON": sys.executable, "OPTIONS": "", "REPORTS": "reports"}
    done = shell(steps()["Gate"], tmp_path, TARGETS="train.py -- 'open", **around)
    assert done.returncode != 0
    assert "No closing quotation" in done.stderr


def test_the_action_is_green_on_the_healthy_commit_and_red_on_a_broken_one(repository: Path) -> None:
    git("checkout", "-q", "main", cwd=repository)
    done, summary = acted(repository)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gate passed" in summary
    git("checkout", "-q", "collective", cwd=repository)
    done, summary = acted(repository)
    assert done.returncode == 1
    line = BROKEN["collective"][0].splitlines().index("            dist.all_reduce(torch.zeros(3))") + 1
    assert f"::error title=ddpdoctor (DDP901),file=train.py,line={line}," in done.stdout
    assert "gate failed: 2 errors" in summary
    assert "| collectives a step | 1 | 2 | **grown +100%** |" in summary
    assert "To accept it: `ddpdoctor gate train.py --update" in summary
    log = json.loads((repository / "reports" / "ddpdoctor.sarif").read_text())
    assert "DDP901" in [result["ruleId"] for result in log["runs"][0]["results"]]
    assert "<failure" in (repository / "reports" / "ddpdoctor.xml").read_text()
    assert f"train.py:{line}" in (repository / "reports" / "ddpdoctor.html").read_text()
    git("checkout", "-q", "main", cwd=repository)


@pytest.mark.full
@pytest.mark.parametrize("name", BROKEN)
def test_the_action_is_red_for_the_reason_of_each_broken_commit(repository: Path, name: str) -> None:
    git("checkout", "-q", name.replace(" ", "-"), cwd=repository)
    done, _ = acted(repository)
    _, code, _ = BROKEN[name]
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"title=ddpdoctor ({code})" in done.stdout
    git("checkout", "-q", "main", cwd=repository)


def script_lines() -> dict[str, str]:
    jenkins = re.findall(r"sh '(.*)'", (CI / "Jenkinsfile").read_text())
    return {"gitlab": "\n".join(loaded(CI / "gitlab-ci.yml")["ddpdoctor"]["script"]), "jenkins": "\n".join(jenkins)}


def test_the_templates_keep_the_reports_that_their_lines_write() -> None:
    job = loaded(CI / "gitlab-ci.yml")["ddpdoctor"]
    named = {*job["artifacts"]["paths"], *job["artifacts"]["reports"].values()}
    assert job["artifacts"]["when"] == "always"
    assert set(re.findall(r"--report \w+=(\S+)", script_lines()["gitlab"])) == named
    jenkins = (CI / "Jenkinsfile").read_text()
    assert set(re.findall(r"--report \w+=(\S+)", script_lines()["jenkins"])) == {"ddpdoctor.xml", "ddpdoctor.html"}
    assert "junit 'ddpdoctor.xml'" in jenkins
    assert jenkins.count("{") == jenkins.count("}")
    github = loaded(CI / "github.yml")["jobs"]["gate"]["steps"]
    sarif = next(step["with"]["sarif_file"] for step in github if "sarif" in step.get("uses", ""))
    default = loaded(ROOT / "action.yml")["inputs"]["reports"]["default"]
    assert sarif == f"{default}/ddpdoctor.sarif"


@pytest.mark.full
@pytest.mark.parametrize("name", ["gitlab", "jenkins"])
def test_the_lines_of_the_templates_run(repository: Path, name: str) -> None:
    git("checkout", "-q", "main", cwd=repository)
    done = shell(script_lines()[name], repository)
    assert done.returncode == 0, done.stdout + done.stderr
    for file in re.findall(r"--report \w+=(\S+)", script_lines()[name]):
        assert (repository / file).stat().st_size


def test_each_hook_runs_as_pre_commit_would_run_it(repository: Path) -> None:
    hooks = {hook["id"]: hook for hook in loaded(ROOT / ".pre-commit-hooks.yaml")}
    assert set(hooks) == {"ddpdoctor", "ddpdoctor-project", "ddpdoctor-gate"}
    assert not hooks["ddpdoctor-gate"]["pass_filenames"]
    git("checkout", "-q", "no-sampler", cwd=repository)
    for name, files in (("ddpdoctor", "train.py"), ("ddpdoctor-project", "")):
        done = shell(f"{hooks[name]['entry']} {files}", repository)
        assert done.returncode == 1, done.stdout + done.stderr
        assert "DDP101" in done.stdout
    git("checkout", "-q", "main", cwd=repository)
    for name, files in (("ddpdoctor", "train.py"), ("ddpdoctor-project", "")):
        done = shell(f"{hooks[name]['entry']} {files}", repository)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.full
def test_pre_commit_itself_stops_a_broken_commit(repository: Path) -> None:
    """In an environment that pre-commit makes from a clone, without torch."""
    here = git("rev-parse", "HEAD", cwd=ROOT).strip()
    git("checkout", "-q", "no-sampler", cwd=repository)
    config = {"repos": [{"repo": str(ROOT), "rev": here, "hooks": [{"id": "ddpdoctor"}, {"id": "ddpdoctor-project"}]}]}
    (repository / ".state" / "config.yaml").write_text(yaml.safe_dump(config))
    done = shell(
        f'"{sys.executable}" -m pre_commit run --all-files --config .state/config.yaml',
        repository,
        PRE_COMMIT_HOME=str(repository / ".state" / "pre-commit"),
        PYTHONPATH="",
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.count("missing-distributed-sampler (DDP101)") == 2, done.stdout + done.stderr
    git("checkout", "-q", "main", cwd=repository)


def test_the_lines_of_the_documents_are_green_as_pasted(repository: Path) -> None:
    section = (ROOT / "docs" / "settings.md").read_text().split("Put it into CI", 1)[1]
    lines = re.search(r"```sh\n(.*?)```", section, re.DOTALL)
    assert lines is not None
    assert len(section.split("For pre-commit", 1)[0].splitlines()) <= 15
    git("checkout", "-q", "main", cwd=repository)
    done = shell(lines[1], repository)
    git("reset", "-q", "--hard", cwd=repository)
    assert done.returncode == 0, done.stdout + done.stderr
