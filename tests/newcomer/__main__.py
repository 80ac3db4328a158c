"""Does what the README and the pages of ``docs`` print, command by command, in a fresh environment.

python -m tests.newcomer [WORDS ...]

The environment has this tree installed as a package, beside what the interpreter that runs this has; WORDS choose the
commands that hold one of them, ``tutorial`` the tutorial from top to bottom, ``excerpts`` what the other pages show.
Exits with 1 where a command does not end as it should, or a page shows what is not printed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import venv
from pathlib import Path

from tests.newcomer.excerpts import tell
from tests.newcomer.printed import ROOT, Printed, printed
from tests.newcomer.story import followed
from tests.newcomer.table import FILES, FIRST, done
from tests.scratch import scratch_directory

AT_MOST_S = 600.0
STORY, EXCERPTS = "tutorial", "excerpts"


def main(chosen: list[str]) -> int:
    wrong = 0
    with scratch_directory() as directory:
        project = directory / "project"
        environment = {
            **fresh_environment(directory),
            "XDG_STATE_HOME": str(directory / "state"),
            "HOME": str(directory),
        }
        make_project(project)
        (directory / ".config" / "fish" / "completions").mkdir(parents=True)
        for one in in_order(printed()):
            what = done(one.command)
            words = (*chosen, *FIRST) if not {*chosen} <= {STORY, EXCERPTS} else ()
            if what is None or (chosen and not any(word in one.command for word in words)):
                continue
            kept = sorted((directory / "state" / "ddpdoctor" / "runs").glob("run-*"))
            names = {"first": kept[0].name, "newest": kept[-1].name} if kept else {}
            command = what.command
            for name, real in names.items():
                command = command.replace(f"{{{name}}}", real)
            began_s = time.monotonic()
            ended = subprocess.run(
                ["bash", "-c", command], cwd=project, env=environment, stdin=subprocess.DEVNULL, capture_output=True,
                text=True, timeout=AT_MOST_S,
            )  # fmt: skip
            says = bool(ended.stdout or ended.stderr) or "--only-findings" in command or ">" in command
            right = ended.returncode in what.codes and "Traceback" not in ended.stderr and says
            wrong += not right
            took = f"{time.monotonic() - began_s:.0f} s"
            print(f"{'ok ' if right else 'BAD'} {ended.returncode:>3} {took:>6}  {one.page}: {command}", flush=True)
            if not right:
                print(f"{ended.stdout[-2000:]}\n{ended.stderr[-2000:]}", flush=True)
        if not chosen or STORY in chosen:
            wrong += _follow_the_tutorial(directory, environment)
        if not chosen or EXCERPTS in chosen:
            wrong += tell(directory / "excerpts", environment)
    return min(wrong, 1)


def _follow_the_tutorial(directory: Path, environment: dict[str, str]) -> int:
    project, state = directory / "story", directory / "state-of-story"
    make_project(project)
    wrong = 0
    for told in followed(project, {**environment, "XDG_STATE_HOME": str(state)}, state / "ddpdoctor" / "runs"):
        print(f"{'BAD' if told.missing else 'ok '}  tutorial.md shows: {told.block.splitlines()[0]}", flush=True)
        for piece in told.missing:
            print(f"     not printed: {piece}", flush=True)
        wrong += bool(told.missing)
    return wrong


def in_order(commands: tuple[Printed, ...]) -> list[Printed]:
    """The commands of the documents, those first that others build on."""
    return sorted(
        commands,
        key=lambda one: next(
            (number for number, start in enumerate(FIRST) if one.command.startswith(f"ddpdoctor {start}")), len(FIRST)
        ),
    )


def fresh_environment(directory: Path) -> dict[str, str]:
    """Install this tree into an environment of its own; the variables with which a shell is in it."""
    place = directory / "venv"
    venv.create(place, with_pip=False, symlinks=True)
    python = place / "bin" / "python"
    # What the tool builds on is not fetched anew: it is where this interpreter has it.
    site = next((place / "lib").glob("python3*/site-packages"))
    theirs = [path for path in sys.path if path.endswith("site-packages")]
    (site / "theirs.pth").write_text("\n".join(theirs) + "\n")
    install = (
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--force-reinstall",
    )
    target = ("--target", str(site), "--no-compile")
    copy = directory / "source"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(copy)], check=True)
    subprocess.run([str(python), *install, *target, str(copy)], check=True, cwd=directory)
    tool = place / "bin" / "ddpdoctor"
    tool.write_text(f"#!{python}\nimport sys\nfrom ddpdoctor.__main__ import main\nsys.exit(main())\n")
    tool.chmod(0o755)
    path = f"{tool.parent}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return {**kept, "PATH": path}


def make_project(project: Path) -> None:
    """Write the project that the documents speak of, in a repository with ``origin/main``."""
    for name, text in FILES.items():
        file = project / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (project / "examples").symlink_to(ROOT / "examples")
    git = ["git", "-C", str(project), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in ("init -q", "add .", "commit -q -m first", "update-ref refs/remotes/origin/main HEAD"):
        subprocess.run([*git, *words.split()], check=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
