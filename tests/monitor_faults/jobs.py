"""The rows: jobs that do strange things."""

from __future__ import annotations

from tests.monitor_faults.play import Row

_FORKS = """
for number in range(100):
    child = os.fork()
    if child == 0:
        os._exit(number % 2)
    os.waitpid(child, 0)
"""
_DAEMON = """
if RANK == 0 and os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    time.sleep(3)
    os._exit(0)
"""
_ANEW = """
if "AGAIN" not in os.environ:
    os.environ["AGAIN"] = "1"
    os.execv(sys.executable, [sys.executable, *sys.argv])
"""
_HANDLERS = """
import signal
for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
    signal.signal(number, lambda *_: None)
"""
_FAULTHANDLER = """
import faulthandler, signal
faulthandler.enable()
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    faulthandler.register(number, chain=True)
faulthandler.dump_traceback_later(1000)
"""
_TRACE = """
import threading
def traced(frame, event, argument): return traced
threading.settrace(traced); threading.setprofile(traced); sys.settrace(traced); sys.setprofile(traced)
"""
_AT_FORK = """
def refuse(): raise RuntimeError("not now")
os.register_at_fork(before=refuse, after_in_parent=refuse, after_in_child=refuse)
child = os.fork()
if child == 0:
    os._exit(0)
os.waitpid(child, 0)
sys.unraisablehook = lambda *_: None
"""
_CONTROL = """
import ctypes
control = ctypes.CDLL(None).prctl
control(15, b"renamed", 0, 0, 0); control(4, 0, 0, 0, 0); control(38, 1, 0, 0, 0)
"""
_LIMITS = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (12, 12))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
"""
_NO_MORE_MEMORY = """
import resource
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + (24 << 20),) * 2)
"""
_NO_MORE_BYTES = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
"""
_AS_THE_SYSTEM_HAS_IT = """
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
"""
_FROZEN = """
import time
for name in ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns"):
    setattr(time, name, lambda value=getattr(time, name)(): value)
"""
_PATCHED = """
import builtins, json, threading
def refuse(*_, **__): raise RuntimeError("replaced")
builtins.print = json.dumps = json.loads = os.getpid = threading.enumerate = sys._current_frames = refuse
"""
_PATCHED_OS = """
def refuse(*_, **__): raise RuntimeError("replaced")
os.pwrite = os.pread = os.write = refuse
"""

JOBS = (
    Row(name="64 ranks", ranks=64, steps=3, bare="likewise", runs=1),
    Row(name="a job that prints 100 MB", inside="for _ in range(500): say('x' * 100_000)", bare="likewise"),
    Row(
        name="a job that prints bytes and endless lines",
        inside="os.write(1, bytes(range(256)) * 400 + b'x' * 10_000_000 + b'\\n'); os.write(2, b'\\xff\\x1b[2J\\n')",
        bare="likewise",
    ),
    Row(
        name="a job that prints bytes and endless lines, with the screen",
        inside="os.write(1, bytes(range(256)) * 400 + b'x' * 10_000_000 + b'\\n'); os.write(2, b'\\xff\\x1b[2J\\n')",
        screen="screen",
    ),
    Row(name="a job that closes its descriptors", inside="os.closerange(3, 1024)", bare="likewise", trains="may end",
        verdicts=("HEALTHY", "SLOW", "UNKNOWN", "BROKEN")),
    Row(name="a job that closes the descriptors that it got", first="os.closerange(3, 1024)"),
    Row(name="a job that closes its streams", first="os.closerange(0, 3); sys.stdout = sys.stderr = None",
        bare="likewise"),
    Row(name="a job that starts a daemon", inside=_DAEMON),
    Row(name="a job that becomes another user",
        inside="os.setresgid(65534, 65534, 65534); os.setresuid(*(65534,) * 3)"),
    Row(name="a job that sets umask and directory first", first="os.umask(0o777); os.chdir('/')", bare="likewise"),
    Row(name="a job that sets umask and directory later", inside="os.umask(0o777); os.chdir('/')", bare="likewise"),
    Row(name="a job that forks all the time", inside=_FORKS),
    Row(name="a job that leaves by os._exit", last="os._exit(3)", bare="likewise", verdicts=("BROKEN",)),
    Row(name="a job that leaves with a code", last="sys.exit(7)", bare="likewise", verdicts=("BROKEN",)),
    Row(name="a job that starts itself anew", first=_ANEW),
    Row(name="a job with its own signal handlers", first=_HANDLERS),
    Row(name="a job with its own signal handlers later", inside=_HANDLERS),
    Row(name="a job with faulthandler", first=_FAULTHANDLER),
    Row(name="a job with faulthandler later", inside=_FAULTHANDLER),
    Row(name="a job that traces", first=_TRACE),
    Row(name="a job whose forks meet exceptions", inside=_AT_FORK, bare="likewise"),
    Row(name="a job that is renamed and cannot be looked at", inside=_CONTROL),
    Row(name="a job that lowers its limits", inside=_LIMITS),
    Row(name="a job without more memory", inside=_NO_MORE_MEMORY),
    Row(name="a job that may write no file", first="sys.stdout = None", inside=_NO_MORE_BYTES, bare="likewise"),
    Row(name="a job that dies of a file too large", first=_AS_THE_SYSTEM_HAS_IT, before="ulimit -f 100"),
    Row(name="a job that may write no file and dies of one", first="sys.stdout = None",
        inside=_AS_THE_SYSTEM_HAS_IT + _NO_MORE_BYTES, bare="likewise"),
    Row(name="a job without garbage collection", first="import gc; gc.disable(); gc.freeze()"),
    Row(name="a job without streams", first="sys.stdout = sys.stderr = None",
        bare="likewise"),
    Row(name="a job with frozen clocks", inside=_FROZEN, bare="likewise"),
    Row(name="a job that has replaced functions", inside=_PATCHED, bare="likewise"),
    Row(name="a job that has replaced the functions of os", inside=_PATCHED_OS, bare="likewise"),
    Row(name="a job that empties its environment", inside="os.environ.clear()"),
)  # fmt: skip
