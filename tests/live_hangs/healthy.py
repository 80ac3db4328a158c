"""Jobs that go on, however long it takes: of none may be said that it stands still, or that anything is an error."""

from __future__ import annotations

from tests.faults.healthy import HEALTHY as CORRECT
from tests.live_hangs.script import script

_EVALUATE = """
def evaluate(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end: sum(range(10_000))
"""
_WRITE = """
def save(seconds):
    end = time.monotonic() + seconds
    with open(f"checkpoint-{os.getpid()}", "wb") as file:
        while time.monotonic() < end:
            file.write(b"x" * 4096)
            os.fsync(file.fileno())
            time.sleep(0.5)
"""
_BACKOFF = """
def fetch():
    for attempt in range(5):
        try:
            if attempt < 4: raise ConnectionError
            return
        except ConnectionError:
            time.sleep(1.4 * 2 ** attempt)
"""
_POLLED_LOCK = """
def locked(seconds):
    with open("lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        code = "import fcntl, time; f = open('lock', 'w'); fcntl.flock(f, fcntl.LOCK_EX); time.sleep(SECONDS)"
        holder = subprocess.Popen([sys.executable, "-c", code.replace("SECONDS", str(seconds))])
    time.sleep(1)
    with open("lock", "w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
    holder.wait()
"""
_RELEASED = """
lock = threading.Lock()
lock.acquire()
threading.Timer(14, lock.release).start()
lock.acquire()
"""
_STOPPED = """
subprocess.Popen(["sh", "-c", f"sleep 5; kill -CONT {os.getpid()}"])
os.kill(os.getpid(), signal.SIGSTOP)
"""
_COMPILED = """
def compile():
    code = "import time; end = time.monotonic() + 14\\nwhile time.monotonic() < end: sum(range(10_000))"
    subprocess.run([sys.executable, "-c", code], check=True)
"""
_SLOW_WORKERS = "if index % 80 == 40: time.sleep(9)"
_IMPORTING = """
if torch.utils.data.get_worker_info() is not None:
    from torch.fx.experimental import symbolic_shapes
    from torch.export import exported_program
"""
_POOL = """
import multiprocessing
def work(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end: sum(range(10_000))
def spread():
    with multiprocessing.get_context("fork").Pool(1) as pool: pool.map(work, [14])
"""
_EXECUTOR = """
from concurrent.futures import ThreadPoolExecutor
def work(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end: sum(range(10_000))
"""
_AT_EXIT = """
import atexit
def upload():
    if int(os.environ["RANK"]) == 1: subprocess.run(["sleep", "14"])
atexit.register(upload)
"""
_STOPPED_LAUNCHER = """
launcher = os.getppid()
subprocess.Popen(["sh", "-c", f"kill -STOP {launcher}; sleep 6; kill -CONT {launcher}"])
time.sleep(9)
"""
_SERVER = """
def slow_server(seconds):
    server = socket.socket(); server.bind(("127.0.0.1", 0)); server.listen()
    code = "import socket, sys, time; s = socket.create_connection(('127.0.0.1', int(sys.argv[1])))\\n"
    code += "for _ in range(int(sys.argv[2])): s.send(b'x'); time.sleep(1)"
    child = subprocess.Popen([sys.executable, "-c", code, str(server.getsockname()[1]), str(seconds)])
    connection, _ = server.accept()
    while connection.recv(1): pass
    child.wait()
"""
_DOWNLOAD = """
SERVER = \"\"\"
import socket, sys, time
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
connection, _ = server.accept()
connection.recv(65536)
chunks = int(sys.argv[1]) * 20
connection.sendall(b"HTTP/1.0 200 OK\\\\r\\\\nContent-Length: %d\\\\r\\\\n\\\\r\\\\n" % (chunks * 20_000))
for _ in range(chunks): connection.sendall(bytes(20_000)); time.sleep(0.05)
\"\"\"
def download(seconds):
    import urllib.request
    # Not below this rank: what sleeps there would be its own.
    command = ["setsid", "--fork", sys.executable, "-c", SERVER, str(seconds)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE)
    port = int(server.stdout.readline())
    urllib.request.urlopen(f"http://127.0.0.1:{port}/data").read()
"""
_DOWNLOADING_WORKER = "if index // 2 == 160 and index % 2: download(16)"


def _on_rank_1(line: str, top: str = "pass") -> str:
    return script(top=top, within=f"if rank == 1 and struck:\n    {line}")


def _on_rank_0_with_barrier(line: str, top: str = "pass") -> str:
    return script(top=top, within=f"if struck:\n    if rank == 0: {line}\n    dist.barrier()")


NEAR_HANGS: dict[str, str] = {
    "nothing unusual": script(epochs=3),
    "an evaluation of 30 s on rank 0": _on_rank_0_with_barrier("evaluate(30)", _EVALUATE),
    "a save that sleeps 25 s": _on_rank_0_with_barrier("time.sleep(25)"),
    "a save that trickles for 25 s": _on_rank_0_with_barrier("save(25)", _WRITE),
    "a backoff of 21 s": _on_rank_1("fetch()", _BACKOFF),
    "loader workers that are started anew": script(
        epochs=3, sample=_IMPORTING, loader_options=", num_workers=2, multiprocessing_context='spawn'"
    ),
    "a compiler in a child": _on_rank_1("compile()", _COMPILED),
    "a file lock of 75 s that is asked for": _on_rank_1("locked(75)", _POLLED_LOCK),
    "a lock that a timer releases": script(
        within="if rank == 1 and struck:\n    " + _RELEASED.strip().replace("\n", "\n    ")
    ),
    "a child that sleeps 15 s": _on_rank_1("subprocess.run(['sleep', '15'])"),
    "a child that sleeps 75 s": _on_rank_1("subprocess.run(['sleep', '75'])"),
    "SIGSTOP for 5 s": script(within="if rank == 1 and struck:\n    " + _STOPPED.strip().replace("\n", "\n    ")),
    "a loader worker that takes 9 s": script(sample=_SLOW_WORKERS, loader_options=", num_workers=1"),
    "a loader worker that takes 16 s": script(
        sample="if index // 2 == 160 and index % 2: time.sleep(16)", loader_options=", num_workers=1"
    ),
    "a pool that works for 14 s": _on_rank_1("spread()", _POOL),
    "a task of an executor that works for 14 s": _on_rank_1(
        "ThreadPoolExecutor(1).submit(work, 14).result()", _EXECUTOR
    ),
    "an event loop that sleeps for 14 s": _on_rank_1("asyncio.run(asyncio.sleep(14))", "import asyncio"),
    "monitored_barrier that rank 1 reaches late": script(
        top=_EVALUATE,
        within="if struck:\n    if rank == 1: evaluate(12)\n    dist.monitored_barrier(timeout=timedelta(seconds=60))",
    ),
    "an exit handler that takes 14 s": script(top=_AT_EXIT),
    "a launcher that is stopped for 6 s": script(
        within="if rank == 0 and struck:\n    " + _STOPPED_LAUNCHER.strip().replace("\n", "\n    ")
    ),
    "a slow download": _on_rank_0_with_barrier("download(16)", _DOWNLOAD),
    "a slow download in a loader worker": script(
        top=_DOWNLOAD, sample=_DOWNLOADING_WORKER, loader_options=", num_workers=1"
    ),
    "a slow server": _on_rank_1("slow_server(15)", _SERVER),
    "rank 0 prepares the data first": script(top=_EVALUATE, after_init="if rank == 0: evaluate(20)\ndist.barrier()"),
    "all ranks sleep between epochs": script(epochs=2, end_of_epoch="time.sleep(9)"),
    "rank 0 saves after the last step": script(after="if rank == 0: time.sleep(12)\ndist.barrier()"),
    "rank 0 works when the others have left": script(after="if rank == 0: evaluate(12)", top=_EVALUATE),
    "joined uneven loaders, long": script(
        after_init="lengths = [240, 160]",
        after_wrap="loader = DataLoader(Samples(lengths[rank]), 4)\njoin = model.join()\njoin.__enter__()",
        after="join.__exit__(None, None, None)",
    ),
    "a pipeline of sends and receives": script(
        within="if rank == 0: dist.send(value, 1)\nelse: dist.recv(value, 0)\nif struck and rank == 0: evaluate(12)",
        top=_EVALUATE,
    ),
    "sub-groups and ranks that wait in turns": script(
        after_init="own = [dist.new_group([0]), dist.new_group([1])][rank]",
        within="dist.all_reduce(value, group=own)\nif struck:\n    if rank: dist.barrier()\n"
        "    else: evaluate(9); dist.barrier()",
        top=_EVALUATE,
    ),
    **{f"rehearsal: {name}": text for name, text in CORRECT.items()},
}
QUICK = ("a child that sleeps 15 s",)
"""Also run by the tests."""
SAID = {
    "a loader worker that takes 16 s": "which waits in `main` at train.py:52 for its loader's workers",
    "a slow download": "in `download` at train.py:54 for a connection",
    "an evaluation of 30 s on rank 0": "busy in `evaluate`",
}
"""What the wait of some is told as."""
