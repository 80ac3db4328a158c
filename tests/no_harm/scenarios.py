"""What happens beside a rehearsal: other rehearsals, real training in the same tree, and a doctor that is killed."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from tests.no_harm.rehearsal import (
    AT_MOST_S,
    Mode,
    Row,
    command_for,
    fault_of_rehearsal,
    has_command,
    line_to,
    listening,
    rehearse,
    write_job,
)
from tests.no_harm.way import Way
from tests.no_harm.world import Entry, World, changes, furnish, world

Kept = dict[str, Entry]
"""What the user has made or changed, as it was then."""

_MAKES = Way(
    name="makes and waits",
    language="job",
    ranks="first",
    body="""
for name in ("overwritten", "appended", "replaced", "again", "touched", "modes", "moved", "untouched"):
    open(name, "w").write("of the rehearsal")
os.makedirs("made/deep"); open("made/deep/own", "w").write("of the rehearsal"); os.mkdir("left_empty")
tell(kind="hold")
""",
)
_SAVES_AGAIN = Way(
    name="makes, waits, saves again",
    language="job",
    ranks="first",
    body="""
torch.save({"w": torch.ones(4)}, "last.ckpt")
tell(kind="hold")
torch.save({"w": torch.ones(4)}, "last.ckpt")
""",
)
_TRAINS = Way(
    name="trains and waits",
    language="job",
    ranks="first",
    body="""
log = open("metrics.csv", "a"); log.write("4,0.4\\n"); log.flush()
torch.save({"w": torch.ones(4)}, "ckpt.pt")
tell(kind="hold")
log.write("5,0.3\\n"); log.close()
torch.save({"w": torch.ones(4)}, "ckpt.pt")
""",
)


def two_at_once(mode: Mode) -> str:
    """Two doctors rehearse the same script in the same directory at the same time."""
    with world() as here, listening(here.line, lambda message: None):
        write_job(here, ())
        before = here.snapshot()
        both = [_started(here, mode) for _ in range(2)]
        texts = [doctor.communicate(timeout=AT_MOST_S)[0] for doctor in both]
        codes = {doctor.returncode for doctor in both}
        if not codes <= ({0} if mode == "overlay" else {0, 3}):
            return f"exit codes {codes}: {texts}"
        return _harm(here, before, {}, mode)


def user_changes_what_it_made(mode: Mode) -> str:
    """While the rehearsal waits, the user overwrites, appends to, replaces and moves what it has made."""

    def act(here: World) -> list[Path]:
        folder = here.folder(_MAKES)
        (folder / "overwritten").write_text("of the user")
        with open(folder / "appended", "a") as file:
            file.write("of the user")
        (folder / "new").write_text("of the user")
        (folder / "new").replace(folder / "replaced")
        (folder / "again").unlink(missing_ok=True)
        (folder / "again").write_text("of the rehearsal")
        for name in ("touched", "modes", "moved"):
            (folder / name).touch()
        (folder / "modes").chmod(0o600)
        (folder / "moved").rename(folder / "elsewhere")
        (folder / "made/deep").mkdir(parents=True, exist_ok=True)
        (folder / "left_empty").mkdir(exist_ok=True)
        for name in ("made/deep/mine", "left_empty/mine"):
            (folder / name).write_text("of the user")
        names = ("overwritten", "appended", "replaced", "again", "touched", "modes", "elsewhere", "made", "made/deep")
        return [folder / name for name in (*names, "made/deep/mine", "left_empty", "left_empty/mine")]

    return _during(mode, _MAKES, act)


def rehearsal_saves_again(mode: Mode) -> str:
    """The user's training replaces a checkpoint that the rehearsal has made, and the rehearsal saves once more."""

    def act(here: World) -> list[Path]:
        target = here.folder(_SAVES_AGAIN) / "last.ckpt"
        target.with_suffix(".tmp").write_text("a day of training")
        target.with_suffix(".tmp").replace(target)
        return [target]

    return _during(mode, _SAVES_AGAIN, act)


def training_during(mode: Mode) -> str:
    """Real training starts and ends in the same tree while the rehearsal waits, and saves under the same names."""

    def act(here: World) -> list[Path]:
        _train(here, lambda: None)
        return _of_training(here)

    return _during(mode, _MAKES, act)


def training_throughout(mode: Mode) -> str:
    """Real training starts before, waits in its middle while the rehearsal runs, and goes on after it."""
    with world() as here:
        _prepare(here, _MAKES)
        before = here.snapshot()
        faults: list[str] = []
        _train(here, lambda: faults.append(fault_of_rehearsal(rehearse(here, [_MAKES], mode), mode)))
        kept = _kept(here, _of_training(here))
        return "".join(faults) or _check_elsewhere(here, mode) or _harm(here, before, kept, mode)


def machines_that_share_a_home(mode: Mode) -> str:
    """A doctor on another machine, by its name and its processes, rehearses while a rehearsal of ours waits."""

    def act(here: World) -> list[Path]:
        done = _check_elsewhere(here, mode, ("unshare", "-Urpf", "--mount-proc", "--uts", "sh", "-c", _ELSEWHERE, "sh"))
        assert not done, done
        own = here.folder(_MAKES) / "untouched"
        assert mode == "overlay" or own.exists(), "the other machine has swept what a live rehearsal made"
        return []

    if subprocess.run(["unshare", "-Urpf", "--mount-proc", "--uts", "true"], capture_output=True).returncode:
        return ""
    return _during(mode, _MAKES, act)


def killed(mode: Mode, times: int) -> str:
    """``kill -9`` of the doctor at random moments, then real work in the same tree, then the next ``check``."""
    moments = random.Random(12)
    with ExitStack() as stack:
        state = stack.enter_context(world())
        began = time.monotonic()
        if wrong := _check_elsewhere(state, mode):
            return wrong
        whole_s = time.monotonic() - began
        trees: list[tuple[World, dict[str, Entry], Kept]] = []
        for _ in range(times):
            here = msgspec.structs.replace(stack.enter_context(world()), state=state.state)
            _prepare(here, _MAKES)
            before = here.snapshot()
            if wrong := _kill_one(here, mode, moments.uniform(0, whole_s)):
                return wrong
            if mode == "overlay" and (wrong := _harm(here, before, {}, mode)):
                return wrong
            trees.append((here, before, _kept(here, _work(here))))
        if wrong := _check_elsewhere(state, mode):
            return wrong
        swept = "".join(_of_user(here, before, kept) for here, before, kept in trees)
        if swept or mode == "overlay" or not has_command("clean"):
            return swept
        _clean(state)
        return "".join(_of_user(*tree) or _harm(*tree, mode) for tree in trees)


def _kill_one(here: World, mode: Mode, moment_s: float) -> str:
    """Start a rehearsal and kill its doctor; all that it started must end by itself."""
    with listening(here.line, lambda message: None):
        doctor = _started(here, mode)
        try:
            doctor.communicate(timeout=moment_s)
        except subprocess.TimeoutExpired:
            doctor.send_signal(signal.SIGKILL)
        doctor.communicate()
        left = here.settled(60.0)
    here.line.unlink()
    return f"after {moment_s:.1f} s: left {[process.cmdline() for process in left]}; " if left else ""


def _work(here: World) -> list[Path]:
    """The user's real work in the tree of a rehearsal that was killed, under names that it may have used."""
    folder = here.folder(_MAKES)
    made = [here.tree / "runs/epoch_0.pt", here.tree / "runs/mine.pt", folder / "made/deep/mine", folder / "replaced"]
    for path in made:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("a day of training")
    with open(folder / "appended", "a") as file:
        file.write("of the user")
    return [*made, folder / "appended", folder / "made", folder / "made/deep", here.tree / "runs"]


def _during(mode: Mode, way: Way, act: Callable[[World], list[Path]]) -> str:
    """Let the user act while a rehearsal waits, and see that all of it stays, now and after the next ``check``."""
    with world() as here:
        _prepare(here, way)
        before = here.snapshot()
        kept: Kept = {}
        done = rehearse(here, [way], mode, on_hold=lambda: kept.update(_kept(here, act(here))))
        wrong = fault_of_rehearsal(done, mode)
        if not done.held:
            wrong = f"the rehearsal never waited: {done.text}"
        return wrong or _check_elsewhere(here, mode) or _harm(here, before, kept, mode)


def _prepare(here: World, way: Way) -> None:
    """The tree of a rehearsal with this row, and of a training."""
    for one in (way, _TRAINS):
        furnish(here.folder(one))
    write_job(here, [way])
    write_job(here, [_TRAINS], "training")


def _train(here: World, while_it_waits: Callable[[], None]) -> None:
    """Train for real on two ranks, with nobody watching."""

    def answer(message: dict[str, Any]) -> None:
        if message["kind"] == "hold":
            while_it_waits()

    with listening(here.root / "training", answer):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        # What it ends with is not asked for: torch's gloo sometimes aborts when the interpreter exits.
        subprocess.run(
            [*command, "train.py", "training.json"],
            cwd=here.tree,
            # torchrun leaves its own temporary directory.
            env={**here.environment, "TMPDIR": str(here.root)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=AT_MOST_S,
        )
    (here.root / "training").unlink()


def _of_training(here: World) -> list[Path]:
    """What the training has written."""
    return [
        *(here.folder(_TRAINS) / name for name in ("metrics.csv", "ckpt.pt")),
        *(here.tree / name for name in ("runs", "runs/epoch_0.pt", "runs/epoch_1.pt")),
        *here.tree.glob("__pycache__"),
        *here.tree.glob("__pycache__/*"),
    ]


def _kept(here: World, paths: list[Path]) -> Kept:
    now = here.snapshot()
    missing = [str(path) for path in paths if str(path) not in now]
    assert not missing, f"the user's work did not come about: {missing}"
    return {str(path): now[str(path)] for path in paths}


def _of_user(here: World, before: Mapping[str, Entry], kept: Kept) -> str:
    """What is lost of the user's files, those of before and those of meanwhile; new names are nobody's yet."""
    wanted = {**before, **kept}
    changed = changes(wanted, here.snapshot(), directory_times=False)
    return "".join(f"{what} {path}; " for path, what in sorted(changed.items()) if path in wanted)


def _harm(here: World, before: Mapping[str, Entry], kept: Kept, mode: Mode) -> str:
    """All that is not as it was before, or as the user has made it since."""
    left = "".join(f"left {process.cmdline()}; " for process in here.settled())
    changed = changes({**before, **kept}, here.snapshot(), directory_times=mode == "overlay" and not kept)
    return left + "".join(f"{what} {path}; " for path, what in sorted(changed.items()))


def _started(here: World, mode: Mode) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*command_for(mode, *line_to(here)), "--", "world.json"],
        cwd=here.tree,
        env=here.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


_ELSEWHERE = 'hostname elsewhere 2>/dev/null; exec "$@"'


def _check_elsewhere(here: World, mode: Mode, within: tuple[str, ...] = ()) -> str:
    """Rehearse another script, in another directory, with the same home; what went wrong."""
    with world() as other:
        write_job(other, ())
        done = subprocess.run(
            [*within, *command_for(mode), "--", "world.json"],
            cwd=other.tree,
            env={**other.environment, "XDG_STATE_HOME": str(here.state)},
            capture_output=True,
            text=True,
            timeout=AT_MOST_S,
        )
    return "" if done.returncode == 0 else f"a check elsewhere ended with {done.returncode}: {done.stdout}{done.stderr}"


def _clean(here: World) -> None:
    """Let ``ddpdoctor clean`` remove what killed rehearsals have left."""
    subprocess.run(
        [sys.executable, "-m", "ddpdoctor", "clean", "--yes"],
        cwd=here.tree,
        env=here.environment,
        capture_output=True,
        check=True,
        timeout=AT_MOST_S,
    )


SCENARIOS: dict[str, Callable[[Mode], str]] = {
    "two rehearsals at once in one directory": two_at_once,
    "the user changes, replaces and adds to what the rehearsal made": user_changes_what_it_made,
    "the user's training replaces a checkpoint, the rehearsal saves again": rehearsal_saves_again,
    "real training starts and ends during the rehearsal": training_during,
    "real training runs before, during and after the rehearsal": training_throughout,
    "another machine that shares the home rehearses at the same time": machines_that_share_a_home,
}
"""Each plays in a mode and tells what was lost, with nothing where nothing was."""


def played(name: str, play: Callable[[Mode], str], mode: Mode) -> Row:
    """The row of a scenario."""
    try:
        wrong = play(mode)
    except (AssertionError, subprocess.SubprocessError) as error:
        wrong = str(error) or repr(error)
    return Row(label=name, mode=mode, verdict="lost" if wrong else "held", why=wrong)
