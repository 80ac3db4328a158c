"""Composes bad inputs: one thing that is bad, and often one or two that surround it."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path
from random import Random

from ddpdoctor.report.formats import FORMATS
from tests.bad_inputs.case import ANSWERS, CLEAN, ERROR, FINDINGS, INCONCLUSIVE, Case, Make, Season
from tests.bad_inputs.rehearsed import bad_rehearsal
from tests.bad_inputs.scripts import BASE, bad_source

ODD_NAMES = (
    b"a\nb.py",
    b"\xff\xfe.py",
    b"q\"'u.py",
    b"\x1b[31m.py",
    "\u202egnp.py".encode(),
    b" .py",
    b"--.py",
    b"%s{}.py",
)
NUMBERS = (
    "99999999999999999999",
    "1e308",
    "nan",
    "inf",
    "-inf",
    "-1",
    "0",
    "1e-400",
    "9" * 5000,
    "0x10",
    "\u0663",
    "",
    " ",
    "--",
    "1.5",
    "1_0",
)
WORDS = ("", ",", "DDP", "DDP999", "ddp1", "*", "[", "\udc80", "a" * 5000, "DDP101,,nope", "-1", "\n")
REFUSED = frozenset({ERROR})
READ = frozenset({CLEAN, FINDINGS, INCONCLUSIVE})
_OPTIONS = (
    ("--nproc", NUMBERS),
    ("--batches", NUMBERS),
    ("--batch-size", NUMBERS),
    ("--time-limit", NUMBERS),
    ("--stall-after", NUMBERS),
    ("--jobs", NUMBERS),
    ("--layout", (*NUMBERS, "0x0", "1x1", "999x999", "2x", "x2", "2x1x1")),
    ("--select", WORDS),
    ("--ignore", WORDS),
    ("--fail-on", WORDS),
    ("--device", WORDS),
    ("--stress", WORDS),
    ("--output-format", WORDS),
    (
        "--exclude",
        ("*a" * 40 + "b", "[", "[!", "**/" * 50, "\\", "[z-a]", "!", "/", "a" * 100_000, "\udc80", "[[a--b&&c]]"),
    ),
    ("--module", ("", ".", "a..b", "train.py", "a" * 300, "/etc", "..", "\udc80", "sys", "-m")),
    ("--python", ("", "nowhere", "/etc/passwd", "/bin/true", "/bin/false", "/", "\udc80", "a" * 5000, "/dev/null")),
    ("--stdin-filename", ("", "/", "..", "a" * 300, "a/b", "\udc80", "\n")),
    ("--nonsense", WORDS),
)


def case(number: int, seed: int, folder: Path, *, rehearsals: bool = True) -> Case:
    """Make the case with a number, the same for the same seed, and its files in ``folder``."""
    random = Random(f"{seed}/{number}")
    if rehearsals and random.random() < 0.04:
        return bad_rehearsal(random, folder)
    made = random.choice(_KINDS)(random, folder)
    for season in random.sample(_SEASONS, random.choice([0, 0, 1, 1, 2])):
        made = season(random, folder, made)
    return made


def _option(random: Random, folder: Path) -> Case:
    _script(folder)
    option, values = random.choice(_OPTIONS)
    value = random.choice(values)
    joined = (f"{option}={value}",) if random.random() < 0.5 else (option, value)
    return Case(("check", "--static", "train.py", *joined), ANSWERS)


def _source(random: Random, folder: Path) -> Case:
    content, allowed = bad_source(random)
    (folder / "train.py").write_bytes(content)
    if random.random() < 0.2 and b"torch" in content:
        return Case(("check", "--static", "-"), allowed, stdin=content)
    return Case(("check", "--static", "train.py"), allowed)


def _module(random: Random, folder: Path) -> Case:
    _script(folder, b"import other\n" + BASE)
    (folder / "other.py").write_bytes(bad_source(random)[0])
    return Case(("check", "--static", "train.py"), ANSWERS)


def _fix(random: Random, folder: Path) -> Case:
    content, allowed = bad_source(random)
    (folder / "train.py").write_bytes(content)
    # As in a directory, a file that does not mention torch has nothing to be mended, and is not parsed.
    allowed |= {INCONCLUSIVE} | (frozenset() if b"torch" in content else {CLEAN})
    option = random.choice(["--fix", "--diff"])
    return Case(("check", option, "train.py"), allowed, may_write=frozenset({"train.py"}))


def _odd_name(random: Random, folder: Path) -> Case:
    name = random.choice(ODD_NAMES)
    _place(folder, name).write_bytes(BASE)
    named = random.random() < 0.7
    return Case(("check", "--static", os.fsencode("./") + name if named else "."), READ)


def _no_script(random: Random, folder: Path) -> Case:
    target = folder / "target"
    kind = random.randrange(11)
    if kind == 0:
        os.mkfifo(target)
    elif kind == 1:
        target.symlink_to("target")
    elif kind == 2:
        target.symlink_to("nowhere")
    elif kind == 3:
        with socket.socket(socket.AF_UNIX) as one:
            here = os.getcwd()
            os.chdir(folder)
            try:
                one.bind("target")
            finally:
                os.chdir(here)
    elif kind == 4:
        target.symlink_to("/dev/zero")
    elif kind == 5:
        target.symlink_to("/proc/self/mem")
    names: tuple[str | bytes, ...] = ("target",)
    if kind > 5:
        names = ("nowhere.py", "a" * 300, "d/" * 3000, "", "train.py/", "/proc/1/mem", "x.ipynb", b"\xff", "~", "*.py")
    name = random.choice(names)
    static = ("--static",) if random.random() < 0.8 else ()
    return Case(("check", *static, name), REFUSED)


def _directory(random: Random, folder: Path) -> Case:
    """A tree with things in it that are none to read."""
    (folder / "deep").mkdir()
    (folder / "deep" / "loop").symlink_to("..")
    (folder / "deep" / "broken.py").symlink_to("nowhere")
    (folder / "deep" / "dir.py").mkdir()
    os.mkfifo(folder / "deep" / "pipe.py")
    (folder / "deep" / "zero.py").symlink_to("/dev/zero")
    for name in random.sample(ODD_NAMES, 2):
        _place(folder / "deep", name).write_bytes(bad_source(random)[0])
    patterns = random.choice([b"*a" * 40 + b"b\n", b"[\n![\n", b"\xff\n", b"**/" * 40, b"/", b"*" * 1000, b"\0\n"])
    (folder / ".gitignore").write_bytes(patterns)
    (folder / ".git").mkdir()
    return Case(("check", "--static", ".", "-j", random.choice(["0", "1", "4"])), ANSWERS - {ERROR})


def _settings(random: Random, folder: Path) -> Case:
    _script(folder)
    value = random.choice(
        [
            "1",
            "-1",
            "true",
            "nan",
            "inf",
            "1e308",
            "9" * 400,
            "9" * 5000,
            '""',
            "[]",
            "{}",
            '["\\u0000"]',
            "[1]",
            '{a = ["nope"]}',
            "1979-05-27",
            '"' + "x" * 5000 + '"',
        ]
    )
    key = random.choice(
        [
            "select",
            "ignore",
            "per-file-ignores",
            "fail-on",
            "exclude",
            "entry-points",
            "thresholds",
            "job",
            "job.cores",
            "job.device-memory-gib",
            "job.ranks-per-node",
            "thresholds.straggler",
            "nope",
            "job.nope",
            '"\\u001b[31m"',
        ]
    )
    line = f"{key} = {value}\n".encode()
    own = random.random() < 0.5
    content = line if own else b"[tool.ddpdoctor]\n" + line
    odd = random.randrange(12)
    if odd == 0:
        content = b"# ddpdoctor\n" + b"[" * 100_000
    elif odd == 1:
        content = b"\xff\xfeddpdoctor"
    elif odd == 2:
        content = b"# ddpdoctor\na = " + b"[" * 50_000 + b"]" * 50_000
    elif odd == 3:
        content = b"tool.ddpdoctor = 1\n"
    elif odd == 4:
        content = b"# ddpdoctor\n" + b"#" * 11_000_000
    elif odd == 5:
        content = b"exclude = [" + b'"*a*a*a*a*a*a*a*a*a*a*b",' * 10_000 + b"]\n"
    path = folder / ("ddpdoctor.toml" if own else "pyproject.toml")
    if odd == 6:
        path.mkdir()
    elif odd == 7:
        path.symlink_to("/dev/zero")
    elif odd == 8:
        path.symlink_to(path.name)
    else:
        path.write_bytes(content)
    return Case(("check", "--static", random.choice(["train.py", "."])), ANSWERS)


def _output(random: Random, folder: Path) -> Case:
    _script(folder)
    (folder / "conf.yaml").write_text("lr: 1\n")
    (folder / "train").write_text("import torch\n")
    (folder / "loop").symlink_to("loop")
    (folder / "directory").mkdir()
    os.mkfifo(folder / "pipe.unread")
    names = (
        "train.py",
        "train",
        "conf.yaml",
        "directory",
        "directory/x/y",
        "loop",
        "",
        "/",
        "/dev/full",
        "/nowhere/x",
        "/proc/self/mem",
        "a" * 300,
        "b/" * 3000,
        "/dev/stdin",
        "/dev/fd/77",
        ".",
        "..",
        "\n/x",
        "/sys/x",
    )
    force = ("--force",) if random.random() < 0.3 else ()
    name = random.choice(names)
    allowed = ANSWERS if force and name in ("conf.yaml", "train") else REFUSED
    form = ("--output-format", random.choice(FORMATS))
    return Case(
        ("check", "--static", "train.py", "-o", name, *form, *force),
        allowed,
        may_write=frozenset({name} if force and name in ("conf.yaml", "train") else ()),
    )


def _stdin(random: Random, folder: Path) -> Case:
    kind = random.randrange(4)
    if kind == 0:
        return Case(("check", "--static", "-"), REFUSED, stdin=Path("/dev/zero"))
    if kind == 1:
        return Case(("check", "--static", "-"), REFUSED, closed=frozenset({0}))
    if kind == 2:
        return Case(("check", "--static", "-"), frozenset({ERROR, INCONCLUSIVE}), stdin=BASE + b"x = (\n" * 10)
    return Case(("check", random.choice(["-", "--fix"]), "-"), REFUSED, stdin=BASE)


def _run(random: Random, folder: Path) -> Case:
    """Records of runs that are none."""
    run = folder / "run"
    run.mkdir()
    job = random.choice(
        [
            b"",
            b"{}",
            b"[]",
            b'{"version": 99}',
            b'{"version": 1, "kind": "run", "job": 3}',
            b"\xff",
            b"[" * 100_000,
            b'{"version": "x", "kind": []}',
            b'{"version":1,"kind":"run","supervisor_pid":1,"project_root":"/","name":"x","job":{"kind":"run"}}',
        ]
    )
    (run / "job.json").write_bytes(job)
    for name in (
        "events-1.jsonl",
        "steps-1.ring",
        "calls-1.ring",
        "collectives-1.ring",
        "history.sqlite",
        "stacks-1.txt",
        "events-99999999999999999999.jsonl",
    ):
        if random.random() < 0.5:
            (run / name).write_bytes(
                random.choice(
                    [
                        b"",
                        b"\n\n",
                        b"{}\n[]\n",
                        b'{"event": 1}\n',
                        b'{"event": "rank", "rank": "x"}\n',
                        random.randbytes(5000),
                        b"\0" * 100_000,
                    ]
                )
            )
    name = random.choice(
        ["run", "./run", "nowhere", "train.py", "", "/", "run/job.json", "\udc80", "a" * 300, "\n", "../.."]
    )
    command: tuple[str, ...] = random.choice(
        [
            ("report", name),
            ("report", name, "--output-format", "json"),
            ("report", name, "--export", "trace=trace.json"),
            ("profile", "--run-dir", name),
            ("profile", "--replay", name),
            ("profile", "--one-rank", name, "train.py"),
            ("profile", "--env", "--run-dir", name, "--demo"),
            ("report",),
        ]
    )
    return Case(command, frozenset({CLEAN, ERROR}), may_write=frozenset({"trace.json"}))


def _words(random: Random, folder: Path) -> Case:
    """Command lines that are none."""
    _script(folder)
    words = (
        "check",
        "profile",
        "report",
        "explain",
        "--",
        "-",
        "train.py",
        "torchrun",
        "python",
        "-m",
        "--help",
        "nope",
        "\udc80",
        "=",
        "A=",
        "env",
        "srun",
        "mpirun",
        "-h",
        "--version",
        "accelerate",
        "launch",
        "--all",
        "DDP101",
        "DDP999",
        "a" * 5000,
    )
    chosen = random.choices(words, k=random.randrange(1, 5))
    # Alone it attaches to a job that runs on this machine, whoever's it is, and stays with it.
    if "profile" in chosen:
        chosen = ["explain", *chosen]
    if "check" in chosen:
        chosen.insert(chosen.index("check") + 1, "--static")
    return Case(tuple(chosen), ANSWERS)


def _environment(random: Random, folder: Path, case: Case) -> Case:
    """Variables that mislead."""
    pools: dict[str, tuple[str | None, ...]] = {
        "HOME": (None, "", "relative", "/nowhere", "/dev/null", "~", "\udc80", "a" * 5000),
        "XDG_STATE_HOME": (None, "", "relative", "/nowhere", "/dev/null", "\udc80", "/" + "a" * 5000),
        "TMPDIR": ("", "relative", "/nowhere", "/dev/null"),
        "COLUMNS": ("0", "-1", "x", "99999999999"),
        "TERM": ("", "nope", "\udc80"),
        "LC_ALL": ("nope", "C", "tr_TR.UTF-8"),
        "PYTHONIOENCODING": ("ascii", "utf-16", "latin-1:strict", "cp037"),
        "CUDA_VISIBLE_DEVICES": ("", "-1", "x", "99999999999999999999", "0,,0"),
        "DDPDOCTOR_RUN": ("", "/nowhere", "relative", "\udc80"),
        "PYTHONPATH": (None,),
        "PATH": (None, "", "/nowhere"),
        "RANK": ("x", "-1", "9" * 5000),
        "WORLD_SIZE": ("0", "x"),
        "NO_COLOR": ("1", ""),
        "FORCE_COLOR": ("1",),
        "SLURM_NODELIST": ("[", "a[1-99999999]"),
    }
    names = [name for name in pools if name != "PYTHONPATH"]
    chosen = {name: random.choice(pools[name]) for name in random.sample(names, random.choice([1, 1, 2, 4]))}
    return replace(
        case,
        environment={**case.environment, **chosen},
        allowed=case.allowed | {ERROR} if {"DDPDOCTOR_RUN"} & set(chosen) else case.allowed,
    )


def _summary(random: Random, folder: Path, case: Case) -> Case:
    """The summary of a step of GitHub that is none."""
    if case.arguments[:1] != ("check",) or "-" in case.arguments:
        return case
    (folder / "summary.md").write_text("# Build\n")
    name = random.choice(
        ["train.py", "train", "conf.yaml", "summary.md", "/dev/null", "/", "nowhere/x", "a" * 300, "\udc80"]
    )
    return replace(
        case.also("--output-format", "github", allowed=REFUSED),
        environment={**case.environment, "GITHUB_STEP_SUMMARY": name},
        may_write=case.may_write | {"summary.md", "\udc80", "train"},
    )


def _closed(random: Random, folder: Path, case: Case) -> Case:
    """Standard streams that are closed."""
    closed = frozenset(random.sample([0, 1, 2], random.choice([1, 1, 2, 3])))
    return replace(case, closed=case.closed | closed, allowed=case.allowed | {ERROR})


def _deleted(random: Random, folder: Path, case: Case) -> Case:
    """A working directory that is gone."""
    return replace(case, deletes_directory=True, allowed=REFUSED)


def _format(random: Random, folder: Path, case: Case) -> Case:
    """Another form of the report."""
    return case.also("--output-format", random.choice(FORMATS), allowed=REFUSED)


def _script(folder: Path, content: bytes = BASE) -> None:
    (folder / "train.py").write_bytes(content)


def _place(folder: Path, name: bytes) -> Path:
    return Path(os.fsdecode(os.fsencode(folder) + b"/" + name))


_KINDS: tuple[Make, ...] = (
    _option,
    _option,
    _source,
    _source,
    _source,
    _module,
    _fix,
    _odd_name,
    _no_script,
    _directory,
    _settings,
    _settings,
    _output,
    _stdin,
    _run,
    _run,
    _words,
)
_SEASONS: tuple[Season, ...] = (_environment, _environment, _summary, _closed, _deleted, _format)
