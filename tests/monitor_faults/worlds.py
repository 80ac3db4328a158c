"""The rows: machines, disks, limits and users that are not as usual."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.monitor_faults.play import Row, Running

_MOUNTS = ("--mount", "--propagation", "private")
_OTHER_TIME = ("--time", "--monotonic", "500000", "--boottime", "900000", "--fork")
_SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <sys/time.h>
/* Seconds by which the clock of the day is wrong: in the file CLOCK. */
static long off(void) {
    long wrong = 0; FILE *file = fopen(getenv("CLOCK"), "r");
    if (file) { if (fscanf(file, "%ld", &wrong) != 1) wrong = 0; fclose(file); }
    return wrong;
}
int clock_gettime(clockid_t clock, struct timespec *at) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, at);
    if (clock == CLOCK_REALTIME) at->tv_sec += off();
    return result;
}
int gettimeofday(struct timeval *at, void *zone) {
    struct timespec now; clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec; at->tv_usec = now.tv_nsec / 1000; return 0;
}
time_t time(time_t *at) {
    struct timespec now; clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
"""
_COMPILED = """
cat > "$OUT/shim.c" <<'C'
{}
C
gcc -shared -fPIC -o "$OUT/shim.so" "$OUT/shim.c" -ldl
export LD_PRELOAD="$OUT/shim.so" CLOCK="$OUT/clock"
"""
_SECCOMP = """
cat > "$OUT/refuse.py" <<'P'
import ctypes, errno, os, struct, sys
# process_vm_readv, ptrace, kcmp, pidfd_getfd, unshare, perf_event_open, fallocate, statx (x86-64): refused.
load, equal, refuse, allow = 0x20, 0x15, 0x06, 0x06
numbers = (310, 101, 312, 438, 272, 298, 285, 332)
code = [struct.pack("HBBI", load, 0, 0, 0)]
for place, number in enumerate(numbers):
    code.append(struct.pack("HBBI", equal, len(numbers) - place, 0, number))
code += [struct.pack("HBBI", allow, 0, 0, 0x7FFF0000), struct.pack("HBBI", refuse, 0, 0, 0x50000 | errno.EPERM)]
program = ctypes.create_string_buffer(b"".join(code))
head = struct.pack("HxxxxxxP", len(code), ctypes.addressof(program))
control = ctypes.CDLL(None, use_errno=True).prctl
assert control(38, 1, 0, 0, 0) == 0 and control(22, 2, ctypes.create_string_buffer(head), 0, 0) == 0
os.execvp(sys.argv[1], sys.argv[1:])
P
"""
_NO_SHM = """
mkdir "$OUT/dev"; mount -t tmpfs tmpfs "$OUT/dev"; mkdir "$OUT/dev/pts"
for name in null zero full random urandom tty ptmx; do
    : > "$OUT/dev/$name"; mount --bind /dev/$name "$OUT/dev/$name"
done
mount --rbind "$OUT/dev" /dev
"""
_READ_ONLY_HOME = 'mount --bind "$HOME" "$HOME"; mount -o remount,ro,bind "$HOME"'
_SMALL_STATE = 'mount -t tmpfs -o size=1m tmpfs "$FOLDER/state"'
_FULL_STATE = _SMALL_STATE + '; head -c 2M /dev/zero > "$FOLDER/state/ballast" 2> "$OUT/full"'
_FULL_TEMP = 'mount -t tmpfs -o size=64k tmpfs "$TMPDIR"; head -c 1M /dev/zero > "$TMPDIR/ballast" 2> "$OUT/full"'
_AS_USER = """
places=$("$PYTHON" -c 'import sys, torch; print(sys.base_prefix, sys.prefix, torch.__path__[0][:-6])')
for place in $places; do mkdir -p "$OUT/python$place"; mount --bind "$place" "$OUT/python$place"; done
case "$places" in */root/*) mount -t tmpfs -o mode=755 tmpfs /root;; esac
for place in $places; do mkdir -p "$place"; mount --bind "$OUT/python$place" "$place"; done
chown 61234:61234 "$FOLDER/home" "$FOLDER/tmp" "$FOLDER/state" "$FOLDER/out"
"""
_TURNED = "exec setpriv --reuid 61234 --regid 61234 --clear-groups --no-new-privs "
_SITE = os.pathsep.join(path for path in sys.path if path.startswith("/"))


def jump(running: Running) -> None:
    """Set the clock of the day forward and back, by up to a day."""
    for _ in range(3):
        running.reach()
        (running.out / "clock").write_text(f"{running.chance.randint(-86_400, 86_400)}")


def _to_run(do: Callable[[Running, Path], None]) -> Callable[[Running], None]:
    def act(running: Running) -> None:
        running.pid_of("launcher")
        running.reach()
        do(running, running.run_directory())

    return act


def _truncate(running: Running, run: Path) -> None:
    for path in run.iterdir():
        os.truncate(path, 0)


def _truncate_at_creation(running: Running) -> None:
    """Truncate one ring as soon as it is there, again and again."""
    run, number = running.run_directory(), running.chance.randrange(4)
    running.wait(lambda: len(list(run.glob("*.ring"))) > number, "the ring")
    path = sorted(run.glob("*.ring"), key=lambda path: path.stat().st_ctime_ns)[number]
    for _ in range(running.chance.randrange(1, 400)):
        os.truncate(path, 0)
        time.sleep(0.001)


def _replace(running: Running, run: Path) -> None:
    """Put in the place of each file of the run something else of the same name."""
    for path in list(run.iterdir()):
        other = path.with_name("other")
        kind = running.chance.randrange(5)
        if kind == 0:
            other.mkdir()
            path.unlink()
        elif kind == 1:
            os.mkfifo(other)
        elif kind == 2:
            other.symlink_to("/dev/zero")
        elif kind == 3:
            other.write_bytes(running.chance.randbytes(100_000))
        else:
            with open(other, "wb") as file:
                file.truncate(20_000_000_000)
        other.rename(path)


def _overwrite(running: Running, run: Path) -> None:
    for path in run.iterdir():
        with open(path, "r+b") as file:
            file.write(running.chance.randbytes(300_000))


def _forbid(running: Running, run: Path) -> None:
    for path in (*run.iterdir(), run):
        path.chmod(0o500 if path.is_dir() else 0o400)


def _fill(running: Running) -> None:
    running.pid_of("launcher")
    running.reach()
    fill = ("sh", "-c", f"head -c 9M /dev/zero > {running.state}/ballast 2> /dev/null; true")
    subprocess.run(("nsenter", "-t", f"{running.process.pid}", "-m", *fill), check=True)


_LONG = "l" * 250
_STRANGE = ("a b", "line\nbreak", _LONG, "rün-日本-🩺", "-n", "$(touch x)'\"", "[red]x", "\x1b[31m")

WORLDS = (
    Row(name="the clock jumps", before=_COMPILED.format(_SHIM), act=jump, bare="likewise"),
    Row(name="clocks of a time namespace", namespaces=_OTHER_TIME),
    Row(name="ranks in a time namespace", around=("unshare", *_OTHER_TIME)),
    Row(name="ulimit -v", before="ulimit -v 6000000"),
    Row(name="ulimit -n 64", before="ulimit -n 64"),
    Row(name="ulimit -n 40", before="ulimit -n 40", bare="likewise"),
    Row(name="ulimit -f", before="ulimit -f 300"),
    Row(name="ulimit -f 1", before="ulimit -f 1", first="sys.stdout = None", bare="likewise", verdicts=(),
        keeps="none", says="the job runs unobserved"),
    Row(name="ulimit -c, -l and -s", before="ulimit -c 0; ulimit -l 0; ulimit -s 512"),
    Row(name="ulimit -u", namespaces=_MOUNTS, before=_AS_USER,
        turns=_TURNED + "bash -c 'ulimit -u 64; exec \"$@\"' bash"),
    Row(name="no /dev/shm", namespaces=_MOUNTS, before=_NO_SHM),
    Row(name="a read-only /dev/shm", namespaces=_MOUNTS, before="mount -o remount,ro,bind /dev/shm"),
    Row(name="a tiny /dev/shm", namespaces=_MOUNTS, before="mount -t tmpfs -o size=1m tmpfs /dev/shm"),
    Row(name="a read-only home", namespaces=_MOUNTS, before=_READ_ONLY_HOME,
        variables={"XDG_STATE_HOME": ""}, keeps="any"),
    Row(name="no home", variables={"XDG_STATE_HOME": "", "HOME": "/proc/nonexistent"}, keeps="any"),
    Row(name="nowhere to write", namespaces=_MOUNTS, before=_READ_ONLY_HOME, bare="likewise", keeps="any", verdicts=(),
        variables={"XDG_STATE_HOME": "", "TMPDIR": "$FOLDER/home"}, says="the job runs unobserved"),
    Row(name="a state directory of 1 MB", namespaces=_MOUNTS, before=_SMALL_STATE, keeps="any"),
    Row(name="a state directory of 1 MB, with the screen", namespaces=_MOUNTS, before=_SMALL_STATE, keeps="any",
        inside="say('x' * 2_000_000)", bare="likewise", screen="screen"),
    Row(name="ulimit -f, with the screen", before="ulimit -f 2000", inside="say('x' * 4_000_000)", bare="likewise",
        screen="screen"),
    Row(name="a full state directory", namespaces=_MOUNTS, before=_FULL_STATE, keeps="any"),
    Row(name="a state directory that is a file", before='rmdir "$FOLDER/state"; : > "$FOLDER/state"', keeps="any"),
    Row(name="a state directory that fills up", namespaces=_MOUNTS,
        before='mount -t tmpfs -o size=4m tmpfs "$FOLDER/state"', act=_fill, keeps="any"),
    Row(name="a run directory that is deleted", act=_to_run(lambda running, run: shutil.rmtree(run)), keeps="any"),
    Row(name="a run directory whose files are truncated", act=_to_run(_truncate)),
    Row(name="a ring that is truncated at its creation", act=_truncate_at_creation),
    Row(name="a run directory of others' files", act=_to_run(_replace), keeps="any"),
    Row(name="a run directory of random bytes", act=_to_run(_overwrite), keeps="any"),
    Row(name="a run directory that may not be written", namespaces=_MOUNTS, before=_AS_USER, turns=_TURNED,
        act=_to_run(_forbid)),
    Row(name="no temporary directory", variables={"TMPDIR": "$FOLDER/missing"}, bare="likewise"),
    Row(name="a full temporary directory", namespaces=_MOUNTS, before=_FULL_TEMP, bare="likewise"),
    *(
        Row(name=f"directories and a script called {name[:20]!r}", place=name, script=f"./{name[:240]}.py",
            variables={"XDG_STATE_HOME": f"$FOLDER/state/{name}"}, bare="likewise", keeps="any")
        for name in _STRANGE
    ),
    Row(name="a user without root", namespaces=_MOUNTS, before=_AS_USER, turns=_TURNED),
    Row(name="a user without a home", namespaces=_MOUNTS, before=_AS_USER,
        turns="unset HOME XDG_STATE_HOME; " + _TURNED, keeps="any"),
    Row(name="a user who sees no other processes", namespaces=(*_MOUNTS, "--pid", "--fork"),
        before="mount -t proc -o hidepid=2 proc /proc\n" + _AS_USER, turns=_TURNED),
    Row(name="LD_PRELOAD", before=_COMPILED.format("int harmless;")),
    Row(name="seccomp", before=_SECCOMP, turns='exec "$PYTHON" "$OUT/refuse.py"'),
    Row(name="variables of Python", variables={"PYTHONOPTIMIZE": "2", "PYTHONHASHSEED": "7",
        "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1",
        "PYTHONWARNINGS": "error::UserWarning:__main__"}),
    Row(name="PYTHONDEVMODE", variables={"PYTHONDEVMODE": "1"}, bare="likewise"),
    Row(name="python -I", options=("-I",)),
    Row(name="ranks of python -I", rank_options=("-I",), verdicts=("UNKNOWN",)),
    Row(name="ranks of python -S", rank_options=("-S",), variables={"PYTHONPATH": _SITE}, verdicts=("UNKNOWN",)),
    Row(name="LANG=C", variables={"LANG": "C", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}),
)  # fmt: skip
