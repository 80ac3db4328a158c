"""Jobs that hang in what Python's library gives them: handlers, pools, executors, event loops, the end of a process."""

from __future__ import annotations

from tests.live_hangs.cases import AT, BOTH, Hang, stuck
from tests.live_hangs.script import script

_HANDLER = """
def checkpoint(number, frame):
    fault()
    threading.Event().wait()  # here
"""
_POOL = """
import multiprocessing
def leave(number): os._exit(1)
def spread():
    with multiprocessing.get_context("fork").Pool(1) as pool:
        fault()
        return pool.map(leave, [1])  # here
"""
_EXECUTOR = """
from concurrent.futures import ThreadPoolExecutor
def nested():
    pool = ThreadPoolExecutor(1)
    outer = pool.submit(lambda: pool.submit(int).result())
    fault()
    return outer.result()  # here
"""
_EVENT_LOOP = """
import asyncio
async def fetch():
    fault()
    await asyncio.Event().wait()
"""
_FULL_PIPE = """
def log(text):
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], stdin=subprocess.PIPE)
    fault()
    child.stdin.write(text)  # here
"""
_FORKED_LOCK = """
import logging
logging.basicConfig(level=logging.WARNING)
def child_that_logs():
    logging.getLogger().handlers[0].acquire()
    thread = threading.Thread(target=fork); thread.start(); thread.join()  # here
def fork():
    if not (child := os.fork()):
        held[0].acquire()
    fault()
    os.waitpid(child, 0)
held = [threading.Lock()]
held[0].acquire()
"""
_AT_EXIT = """
import atexit
def upload():
    if dist.is_initialized() or rank_of_job: fault(); threading.Event().wait()  # here
rank_of_job = int(os.environ["RANK"])
atexit.register(upload)
"""
_FINALLY = """
if rank == 1 and struck:
    try:
        fault()
        raise ValueError("bad batch")
    finally:
        dist.barrier()  # here
"""

LIBRARY: dict[str, Hang] = {
    "a signal handler that stands": stuck(
        "if rank == 1 and struck: signal.signal(signal.SIGUSR1, checkpoint); os.kill(os.getpid(), signal.SIGUSR1)",
        top=_HANDLER,
    ),
    "a pool whose worker died": stuck("if rank == 1 and struck: spread()", top=_POOL),
    "a task that waits for its own executor": stuck("if rank == 1 and struck: nested()", top=_EXECUTOR),
    "an event loop that nobody wakes": stuck("if rank == 1 and struck: asyncio.run(fetch())  # here", top=_EVENT_LOOP),
    "a pipe that nobody reads": stuck("if rank == 1 and struck: log(bytes(1 << 20))", top=_FULL_PIPE),
    "a forked child that stands in a lock": stuck("if rank == 1 and struck: child_that_logs()", top=_FORKED_LOCK),
    "an exit handler that stands": Hang(script=script(top=_AT_EXIT, call="main()"), codes=("DDP305",), kind="stuck"),
    "a barrier in the finally of one rank": Hang(
        script=script(within=_FINALLY).replace("loss.backward()", "loss.backward()  # here"),
        codes=("DDP301", "DDP302", "DDP306", "DDP706"),
        culprits=BOTH,
        kind="end",
    ),
    "monitored_barrier that rank 1 does not reach": Hang(
        script=script(
            within="if struck:\n    if rank == 1 and fault(): threading.Event().wait()  # here\n"
            "    dist.monitored_barrier(timeout=timedelta(seconds=60))  # here"
        ),
        codes=("DDP305",),
        kind="stuck",
    ),
    "a breakpoint that was left in": stuck(
        AT + "sys.stdin = os.fdopen(os.openpty()[1]); breakpoint()\nvalue = value  # here"
    ),
    "a queue that is joined and never done": stuck(AT + "work = queue.Queue(); work.put(1); work.join()  # here"),
    "all ranks read what nobody writes": Hang(
        script=script(within='if struck:\n    fault(); os.mkfifo(f"fifo-{rank}"); open(f"fifo-{rank}").read()  # here'),
        codes=("DDP305",),
        culprits=BOTH,
        kind="stuck",
    ),
    "rank 0 has left and rank 1 stands": Hang(
        script=script(after="if rank == 1: fault(); threading.Event().wait()  # here"),
        codes=("DDP305",),
        kind="stuck",
    ),
}
