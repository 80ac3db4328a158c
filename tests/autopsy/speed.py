"""Reads 1 GB of the interleaved log of a 64-rank job that died, from a file and from stdin, and prints the figures.

Then 1 GB of which nearly every line reports some failure, and 1 GB of tracebacks.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
from pathlib import Path

SIZE = 1_000_000_000
SECONDS = 20.0
"""On a machine that others use as well the seconds of CPU count: the reader is one process."""
MEMORY_BYTES = 150_000_000
"""Of the whole process, Python and checks included, whatever the size of the log."""
_READER = (
    "import sys, resource, time; from ddpdoctor.cli.main import main; t = time.perf_counter();"
    "code = main(['autopsy', sys.argv[1], '--output-format', 'concise']);"
    "used = resource.getrusage(resource.RUSAGE_SELF); cpu = used.ru_utime + used.ru_stime;"
    "peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024;"
    "print(time.perf_counter() - t, cpu, peak, file=sys.stderr)"
)
DEATH = (
    "[rank17]: Traceback (most recent call last):\n"
    '[rank17]:   File "/home/user/job/train.py", line 88, in <module>\n'
    "[rank3]: step 99999 loss 1.0\n"
    "[rank17]:     batch = next(batches)\n"
    "[rank17]: KeyError: 'label'\n"
    "[rank0]: Traceback (most recent call last):\n"
    '[rank0]:   File "/home/user/job/train.py", line 91, in <module>\n'
    "[rank0]:     loss.backward()\n"
    "[rank0]: RuntimeError: [../gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.17]:4242\n"
)


def write_log(path: Path, size: int) -> None:
    """Write a log of so many bytes: steps of 64 ranks, warnings, progress bars, and a death near its end."""
    lines = []
    for step in range(400):
        for rank in range(64):
            lines.append(
                f"[rank{rank}]: 2026-11-20 20:{step // 60 % 60:02}:{step % 60:02},{rank:03} INFO trainer: "
                f"step {step} "
                f"loss {1 / (step + 1 + rank):.6f} grad_norm {rank / 7:.4f} tokens/s {1e6 / (rank + 3):.1f}\n"
            )
        bar = "#" * (step % 30)
        lines.append(f"\x1b[32mepoch 3\x1b[0m: {step % 100}%|{bar} | {step}/400 [00:0{step % 10}<00:01]\r")
        lines.append("[rank5]:/opt/x/reader.py:12: UserWarning: default value of num_workers is used\n")
    _write(path, size, [line.removesuffix("\n") for line in lines])


def write_failures(path: Path, size: int) -> None:
    """Write a log of so many bytes in which nearly every line reports a failure, hardly two of them alike, and a death
    at its end.
    """
    noise = random.Random(1)

    def word() -> str:
        return "".join(noise.choices("abcdefghijklmnopqrstuvwxyz", k=noise.randrange(2, 12)))

    lines: list[str] = []
    for step in range(40_000):
        mark = f"[rank{step % 64}]:"
        lines += (
            f"{mark} 20:17:{step % 60:02} ERROR loader: shard {word()}: ConnectionError: host {word()} refused",
            f"{mark}[E1120 20:17:{step % 60:02}.101 ProcessGroupNCCL.cpp:616] [Rank {step % 64}] Watchdog caught "
            f"collective operation timeout: WorkNCCL(SeqNum={step}, OpType=ALLREDUCE, Timeout(ms)=600000) ran for "
            f"{600_000 + step} milliseconds before timing out.",
            f"node{step % 16}:{step}:{step + 1} [{step % 8}] misc/socket.cc:49 NCCL WARN socketProgress: Connection "
            f"closed by remote peer {word()}.cluster<4711>",
            f"{mark}[W1120 20:17:{step % 60:02}.101 socket.cpp:697] [c10d] The client socket has failed to connect to "
            f"[{word()}]:29500 (errno: 97).",
            f"{mark} {word()} error: cannot read {word()}",
        )
    _write(path, size, lines)


def write_tracebacks(path: Path, size: int) -> None:
    """Write a log of so many bytes that holds nothing but tracebacks, those of 8 ranks line by line between each other,
    and a death at its end.
    """
    noise = random.Random(2)

    def word() -> str:
        return "".join(noise.choices("abcdefghijklmnopqrstuvwxyz", k=noise.randrange(2, 12)))

    names = [word() for _ in range(50)]
    raised = [
        (
            "Traceback (most recent call last):",
            '  File "/home/user/job/train.py", line 88, in <module>',
            "    main()",
            *(
                line
                for _ in range(number % 7)
                for called in (noise.choice(names),)
                for line in (f'  File "/home/user/job/{called}.py", line {number + 3}, in {called}', f"    {called}()")
            ),
            f"{noise.choice(('ValueError', 'KeyError', 'OSError', 'job.shards.ShardError'))}: shard ? is bad",
        )
        for number in range(60)
    ]
    lines: list[str] = []
    for step in range(2_500):
        told = [
            [f"[rank{rank}]: {line.replace('?', word())}" for line in raised[noise.randrange(60)]] for rank in range(8)
        ]
        lines += [f"[rank{rank}]: step {step} loss 1.{step}" for rank in range(8)] if step % 100 == 0 else []
        if step % 2:
            lines += (line for one in told for line in one)
        else:
            lines += (one[place] for place in range(24) for one in told if place < len(one))
    last = "".join(f"[rank{rank}]: step 99998 loss 1.0\n" for rank in range(8))
    _write(path, size, lines, last + DEATH)


def _write(path: Path, size: int, lines: list[str], death: str = DEATH) -> None:
    block = "".join(f"{line}\n" for line in lines).encode()
    with path.open("wb") as file:
        while file.tell() < size - len(death):
            file.write(block[: max(0, size - len(death) - file.tell())].rpartition(b"\n")[0] + b"\n")
        file.write(death.encode())


def read(path: Path, *, from_stdin: bool) -> tuple[float, float, int, str]:
    """Seconds, seconds of CPU, bytes of memory at the most, and what was said."""
    with path.open("rb") as file:
        done = subprocess.run(
            (sys.executable, "-c", _READER, "-" if from_stdin else str(path)),
            stdin=file if from_stdin else subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=True,
        )
    seconds, cpu, peak = done.stderr.split()[-3:]
    return float(seconds), float(cpu), int(peak), done.stdout


def main() -> int:
    """Print a line for each."""
    kept = True
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "job.log")
        for write, from_stdin in (
            (write_log, False),
            (write_log, True),
            (write_failures, False),
            (write_tracebacks, False),
        ):
            write(path, SIZE)
            seconds, cpu, peak, said = read(path, from_stdin=from_stdin)
            right = "rank 17 raised KeyError" in said
            kept &= min(seconds, cpu) < SECONDS and peak < MEMORY_BYTES and right
            where = "stdin" if from_stdin else write.__name__.removeprefix("write_")
            print(
                f"{where}: {SIZE / 1e9:.1f} GB in {seconds:.1f} s, {cpu:.1f} s of CPU (bound {SECONDS:.0f} s), "
                f"{peak / 1e6:.0f} MB at the most (bound {MEMORY_BYTES / 1e6:.0f}), "
                f"cause {'right' if right else 'WRONG: ' + said}"
            )
    return 0 if kept else 1
