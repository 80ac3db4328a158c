"""What ``check --static`` of a tree costs: all checks of the source on 300 training scripts, against the parser.

``python -m tests.benchmarks.static_tree [TORCHFIX]`` prints the CPU seconds of ``ast.parse`` over the tree, of the
whole analysis in one process, their ratio and the memory, each measured in a process of its own with bytecode warm; it
exits with 1 when the ratio is above 6 or the memory above 300 MB. With the path of a ``torchfix`` executable its time
is printed beside them, and it exits with 1 when it is not at least 10 times as long.

The tree is made of the training scripts of this project (the examples, ``tests/source/correct``, ``tests/idioms`` and
``tests/stand_in``), each several times under other names, with its modules beside it.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path

from tests.scratch import scratch_directory

SCRIPTS = 330
"""Some train by frameworks that do it all, and count as no entry scripts; 300 are left at least."""
RUNS = 5
BOUND = 6.0
BOUND_MB = 300
TORCHFIX_BOUND = 10.0
ROOT = Path(__file__).parents[2]
FOLDERS = (
    ROOT / "examples",
    ROOT / "tests" / "source" / "correct",
    ROOT / "tests" / "idioms" / "scripts",
    ROOT / "tests" / "stand_in" / "scripts",
)

PARSING = """\
import ast, pathlib, resource, sys, time
texts = [path.read_text() for path in pathlib.Path(sys.argv[1]).rglob("*.py")]
started_s = time.process_time()
for text in texts:
    ast.parse(text)
print(time.process_time() - started_s, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""
ANALYSIS = """\
import resource, sys, time
from ddpdoctor.examine.static_scan import SurveyRequest, survey
started_s = time.process_time()
examined = survey(SurveyRequest(paths=(sys.argv[1],))).examination
assert examined.source.files >= 300, examined.source.files
print(time.process_time() - started_s, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


def make_tree(directory: Path, scripts: int = SCRIPTS) -> None:
    """Write a project of training scripts, no two of them alike."""
    sources = sorted(path for folder in FOLDERS for path in folder.glob("*.py"))
    for number in range(scripts):
        source = sources[number % len(sources)]
        text = source.read_text(encoding="utf-8").replace("0.01", f"0.01{number:03}")
        (directory / f"{source.stem}_{number:03}.py").write_text(f"RUN = {number}\n{text}", encoding="utf-8")


def measure(program: str, directory: Path) -> tuple[float, float]:
    """Run a program on a tree in a fresh process with warm bytecode; returns CPU seconds and megabytes."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        (sys.executable, "-c", program, str(directory)),
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT), "PYTHONPYCACHEPREFIX": str(directory.with_name("bytecode"))},
        check=True,
        capture_output=True,
        text=True,
    )
    seconds, megabytes = done.stdout.split()[-2:]
    return float(seconds), float(megabytes)


def torchfix_s(executable: str, directory: Path) -> float:
    """CPU seconds that TorchFix takes for the tree, in all of its processes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run((executable, "--select=ALL", str(directory)), capture_output=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(arguments: tuple[str, ...] = ()) -> int:
    """Print the table; 1 when a bound is exceeded."""
    with scratch_directory() as around:
        directory = around / "tree"
        directory.mkdir()
        make_tree(directory)
        measure(ANALYSIS, directory)
        pairs = [(measure(PARSING, directory), measure(ANALYSIS, directory)) for _ in range(RUNS)]
        other_s = torchfix_s(arguments[0], directory) if arguments else None
    parse_s = statistics.median(parsing[0] for parsing, _ in pairs)
    check_s = statistics.median(analysis[0] for _, analysis in pairs)
    memory_mb = max(analysis[1] for _, analysis in pairs)
    ratio = check_s / parse_s
    print(f"check --static of {SCRIPTS} scripts, median of {RUNS}, CPU time of one process")
    print(f"  ast.parse         {parse_s:6.2f} s")
    print(f"  all checks        {check_s:6.2f} s  {ratio:5.1f} x  (at most {BOUND:.0f} x)")
    print(f"  memory            {memory_mb:6.0f} MB          (at most {BOUND_MB} MB)")
    if other_s is not None:
        least = f"(at least {TORCHFIX_BOUND:.0f} x)"
        print(f"  torchfix          {other_s:6.2f} s  {other_s / check_s:5.1f} x ours {least}")
    slow = other_s is not None and other_s < TORCHFIX_BOUND * check_s
    return int(ratio > BOUND or memory_mb > BOUND_MB or slow)


if __name__ == "__main__":
    sys.exit(main(tuple(sys.argv[1:])))
