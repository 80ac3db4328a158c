"""Jobs that hang while they are watched, and what has to be said of each."""

from __future__ import annotations

import sys
from typing import Literal

import msgspec

from tests.faults.script import HEAD
from tests.live_hangs.script import STRIKES_AT, script

Kind = Literal["proof", "stuck", "busy", "loop", "end"]
"""How it can be known: by a proof, by a rank that does nothing, as a wait for a busy rank, as an endless loop, or only
once the job has ended."""
Ending = Literal["ctrl-c", "term", "launcher", "kill", "itself"]
"""Who ends the job: the terminal, a SIGTERM to ddpdoctor, one to the launcher, SIGKILL to all ranks, or nobody."""
MOST_S: dict[Kind, float] = {"proof": 5.0, "stuck": 8.0, "busy": 16.0, "loop": 85.0, "end": 60.0}
"""How long after the fault it may take until it is told."""


class Hang(msgspec.Struct, frozen=True, kw_only=True):
    """One job."""

    script: str
    """Of its lines that end in ``# here`` one must be among the places of the finding."""
    codes: tuple[str, ...]
    """The final verdict has one of these codes."""
    culprits: tuple[tuple[int, ...], ...] = ((1,),)
    """The ranks that the finding may name."""
    kind: Kind = "proof"
    ending: Ending | None = None
    """None takes them in turns."""
    ranks: int = 2
    says: str = ""
    """What the final verdict has to say."""
    command: tuple[str, ...] = ()
    """Instead of the script: a launch command."""
    variables: dict[str, str] = {}
    quick: bool = False
    """Also run by the tests."""


BOTH = ((0, 1), (0,), (1,))


def stuck(within: str, **more: object) -> Hang:
    """Rank 1 does something in the midst of training that never returns."""
    top = str(more.pop("top", "pass"))
    options: dict[str, object] = {"codes": ("DDP305",), "kind": "stuck"} | more
    return msgspec.convert({"script": script(within=within, top=top)} | options, Hang)


AT = "if rank == 1 and struck and fault(): "
_FIFO = """
def fifo():
    name = f"fifo-{os.getpid()}"
    os.mkfifo(name)
    return name
"""
_COLLATE = """
if dist.get_rank() == 1 and float(samples[0][0]) == 1.5:
    fault()
    open(fifo()).read()  # here
"""
_PREFETCH = """
class Prefetch:
    def __init__(self, batches):
        self.batches, self.queue = batches, queue.Queue(2)
        threading.Thread(target=self.fill, daemon=True).start()
    def fill(self):
        for number, batch in enumerate(self.batches):
            if number == 30 and dist.get_rank() == 1: fault(); raise SystemExit
            self.queue.put(batch)
        self.queue.put(None)
    def __iter__(self):
        while (batch := self.queue.get()) is not None:  # here
            yield batch
"""
_WORKER_LOCK = f"""
if index % 2 and index // 2 == {4 * STRIKES_AT} and torch.utils.data.get_worker_info() is not None:
    fault()
    threading.Lock().acquire(); lock = threading.Lock(); lock.acquire(); lock.acquire()
"""
_SERVER = """
def silent_server():
    server = socket.socket(); server.bind(("127.0.0.1", 0)); server.listen()
    client = socket.create_connection(server.getsockname())
    held.append((server, server.accept()))
    return client
held = []
"""
_REGEX = """
def parse(text):
    fault()
    return re.match(r"(a+)+$", text)  # here
"""
_LOOP = """
def search():
    fault()
    found = 0
    while found >= 0:  # here
        found += 1  # here
"""
_RETRY = """
def next_sample():
    fault()
    while True:  # here
        try:
            return [][0]  # here
        except IndexError:
            continue  # here
"""
_THREAD_AT_EXIT = """
def serve():
    threading.Event().wait()  # here
threading.Thread(target=serve, name="exporter").start()
fault()
"""
_IN_A_THREAD = "worker = threading.Thread(target=main); worker.start(); worker.join()"
_ACCELERATE = (
    HEAD
    + f"""
from accelerate import Accelerator

def main():
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    data = TensorDataset(torch.randn({8 * 60}, 8))
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, 4))
    for epoch in range(4):
        for step, (x,) in enumerate(loader):
            optimizer.zero_grad()
            accelerator.backward(model(x).sum())
            optimizer.step()
            if step == 40 and rank == 1 and fault():
                accelerator.wait_for_everyone()  # here

main()
"""
)
_DEBUG_LAUNCHER = """
from accelerate import debug_launcher
if __name__ == "__main__":
    debug_launcher(main, num_processes=2)
"""
_NO_LOADER = (
    HEAD
    + """
def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DDP(nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(60):
        x = torch.randn(4, 8)
        if rank == 1 and step == 5: x[0] = float("nan")
        loss = model(x).sum()  # here
        if not torch.isfinite(loss) and fault(): continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.02)
    dist.all_reduce(torch.ones(2))
    dist.destroy_process_group()

main()
"""
)
TWO_OF_THREE = """
for rank in 0 1; do
    RANK=$rank LOCAL_RANK=$rank WORLD_SIZE=3 MASTER_ADDR=127.0.0.1 MASTER_PORT=FREE python train.py &
done
wait
"""
"""What ``launch.sh`` holds in the folder of a row, with a free port; ``python`` is the one of the tests."""
_MISSING = """
if os.environ["RANK"] == "1":
    fault()
    LINE
"""

NEW: dict[str, Hang] = {
    # A rank that does nothing.
    "a FIFO that nobody writes to": stuck(AT + "open(fifo()).read()  # here", top=_FIFO, quick=True),
    "a collate function that reads a FIFO": Hang(
        script=script(
            top=_FIFO,
            collate=_COLLATE,
            sample=f"if index // 2 == {4 * STRIKES_AT}: return torch.full((8,), 1.5)",
        ),
        codes=("DDP305",),
        kind="stuck",
    ),
    "a lock that is never released": stuck(
        AT + "lock = threading.Lock(); lock.acquire(); lock.acquire()  # here", ending="ctrl-c"
    ),
    "a file lock that another process holds": stuck(
        """
        if rank == 1 and struck:
            other_file, own_file = open("lock", "w"), open("lock", "w")
            fcntl.flock(other_file, fcntl.LOCK_EX)
            fault()
            fcntl.flock(own_file, fcntl.LOCK_EX)  # here
        """
    ),
    "store.get of a key that nobody sets": stuck(
        AT + "dist.distributed_c10d._get_default_store().get('never')  # here", codes=("DDP305", "DDP301")
    ),
    "a prefetch thread that died": Hang(
        script=script(top=_PREFETCH, after_wrap="loader = Prefetch(loader)"), codes=("DDP305",), kind="stuck"
    ),
    "a loader worker that stands in a lock": Hang(
        script=script(sample=_WORKER_LOCK, loader_options=", num_workers=1, multiprocessing_context='fork'").replace(
            "enumerate(loader):", "enumerate(loader):  # here"
        ),
        codes=("DDP305",),
        kind="stuck",
    ),
    "a socket that never answers": stuck(AT + "silent_server().recv(1)  # here", top=_SERVER),
    "a child that reads a FIFO": stuck(AT + "subprocess.run(['cat', fifo()])  # here", top=_FIFO),
    "a join of a thread that stands": stuck(
        """
        if rank == 1 and struck and fault():
            thread = threading.Thread(target=threading.Event().wait, daemon=True)
            thread.start()
            thread.join()  # here
        """
    ),
    "an event that nobody sets": stuck(AT + "threading.Event().wait()  # here"),
    "signal.pause": stuck(AT + "signal.pause()  # here", ending="kill"),
    "SIGSTOP in the midst of training": stuck(AT + "os.kill(os.getpid(), 19)", says="stopped"),
    "a C call that holds the interpreter and stands": stuck(AT + "ctypes.PyDLL(None).pause()  # here"),
    "a sleep of three hours": stuck(AT + "time.sleep(10_000)  # here", says="sleeps", ending="term"),
    "a child that sleeps for three hours": stuck(AT + "subprocess.run(['sleep', '10000'])  # here"),
    "stuck on rank 2 of 3": stuck(
        "if rank == 2 and struck and fault(): threading.Event().wait()  # here", ranks=3, culprits=((2,),)
    ),
    "stuck until the group's timeout": Hang(
        script=script(group_options=", timeout=timedelta(seconds=14)", within=AT + "threading.Event().wait()  # here"),
        codes=("DDP305",),
        kind="stuck",
        ending="itself",
    ),
    "stuck before the first step": Hang(
        script=script(after_wrap="if rank == 1:\n    fault()\n    threading.Event().wait()  # here"),
        codes=("DDP305",),
        kind="stuck",
    ),
    # A rank that works without end.
    "an endless loop": Hang(
        script=script(top=_LOOP, within="if rank == 1 and struck: search()"), codes=("DDP305",), kind="loop"
    ),
    "a loop that tries a broken sample again and again": Hang(
        script=script(top=_RETRY, within="if rank == 1 and struck: next_sample()"), codes=("DDP305",), kind="loop"
    ),
    "a regular expression without end": Hang(
        script=script(top=_REGEX, within="if rank == 1 and struck: parse('a' * 60 + 'b')"),
        codes=("DDP305",),
        kind="loop",
    ),
    "a busy rank, ended early": Hang(
        script=script(top=_LOOP, within="if rank == 1 and struck: search()"), codes=("DDP307",), kind="busy"
    ),
    # Ranks that part.
    "receive against receive while training": Hang(
        script=script(within="if struck:\n    fault()\n    dist.recv(value, 1 - rank)  # here"),
        codes=("DDP305",),
        culprits=BOTH,
        says="wait for each other",
        quick=True,
    ),
    "receives in a ring of 3 while training": Hang(
        script=script(within="if struck:\n    fault()\n    dist.recv(value, (rank + 1) % 3)  # here"),
        codes=("DDP305",),
        culprits=((0, 1, 2),),
        ranks=3,
        says="wait for each other",
    ),
    "a send whose tag nobody receives": Hang(
        script=script(
            within="if struck:\n    fault()\n"
            "    dist.recv(value, 0, tag=1) if rank else dist.recv(value, 1, tag=2)  # here"
        ),
        codes=("DDP305",),
        culprits=BOTH,
    ),
    "an irecv that is waited for": Hang(
        script=script(within="if struck:\n    fault()\n    dist.irecv(value, 1 - rank).wait()  # here"),
        codes=("DDP305",),
        culprits=BOTH,
    ),
    "a receive against an all_reduce": Hang(
        script=script(
            within="""
            if struck:
                fault()
                if rank: dist.recv(value, 0)  # here
                else: dist.all_reduce(value)  # here
            """
        ),
        codes=("DDP301", "DDP305"),
        culprits=BOTH,
    ),
    "new_group that rank 1 skips": Hang(
        script=script(within="if struck and rank == 0 and fault(): dist.new_group([0, 1])  # here"),
        codes=("DDP309",),
        culprits=BOTH,
    ),
    "new_group that rank 0 of 3 makes alone": Hang(
        script=script(within="if struck and rank == 0 and fault(): dist.new_group([0, 1])  # here"),
        codes=("DDP309",),
        culprits=((0,), (0, 1, 2)),
        ranks=3,
    ),
    "a rank that never starts": Hang(
        script=script(start="fault()").replace('init_process_group("gloo")', 'init_process_group("gloo")  # here'),
        codes=("DDP705",),
        culprits=((2,),),
        kind="busy",
        command=("sh", "launch.sh"),
        says="rank 2",
    ),
    "a rank that stands before init_process_group": Hang(
        script=script(start=_MISSING.replace("LINE", "threading.Event().wait()  # here")),
        codes=("DDP305", "DDP705"),
        kind="stuck",
    ),
    "a rank that loops before init_process_group": Hang(
        script=script(start=_MISSING.replace("LINE", "while True: sum(range(1000))  # here")),
        codes=("DDP307", "DDP305", "DDP705"),
        kind="busy",
    ),
    "an exception that is caught": Hang(
        script=script(
            within="""
            try:
                if rank == 1 and struck and fault(): raise ValueError("bad sample")
            except ValueError:
                continue
            """
        )
        .replace("model(x).sum()", "model(x).sum()  # here")
        .replace("loss.backward()", "loss.backward()  # here"),
        codes=("DDP312", "DDP302", "DDP306", "DDP103"),
    ),
    "no_sync on one rank": Hang(
        script=script(
            within="""
            if rank == 1 and struck and fault():
                with model.no_sync(): model(x).sum().backward()
                continue
            """
        ).replace("loss.backward()", "loss.backward()  # here"),
        codes=("DDP312", "DDP306", "DDP302"),
    ),
    "a bad loss on one rank, without a loader": Hang(script=_NO_LOADER, codes=("DDP312",), kind="end", ending="itself"),
    "uneven lengths": Hang(
        script=script(
            after_init=f"lengths = [{4 * 60}, {4 * 44}]",
            after_wrap="loader = DataLoader(Samples(lengths[rank]), 4)  # here",
            end_of_epoch="if rank == 1: fault()\ndist.barrier()  # here",
        ).replace("loss.backward()", "loss.backward()  # here"),
        codes=("DDP103",),
        culprits=BOTH,
    ),
    "one rank stops early": Hang(
        script=script(within="if rank == 1 and struck and fault(): break", end_of_epoch="dist.barrier()  # here"),
        codes=("DDP301", "DDP302", "DDP312", "DDP103"),
        culprits=BOTH,
    ),
    "one rank evaluates with a collective": Hang(
        script=script(
            top="def evaluate(value):\n    fault()\n    dist.all_reduce(value)  # here",
            within="if rank == 0 and struck: evaluate(value)",
        ),
        codes=("DDP301",),
        culprits=BOTH,
        kind="end",  # gloo may end the process at once, for the sizes differ
        ending="term",
    ),
    "mismatched shapes that end the process": Hang(
        script=script(within="if struck: fault(); dist.all_reduce(torch.ones(1000 + 4000 * rank))  # here"),
        codes=("DDP304", "DDP301"),
        culprits=BOTH,
        kind="end",
        ending="itself",
    ),
    "a broadcast against a gather of other sizes": Hang(
        script=script(
            within="""
            if struck:
                fault()
                if rank: dist.broadcast(torch.ones(7), 0)  # here
                else: dist.all_reduce(torch.ones(1000))  # here
            """
        ),
        codes=("DDP304", "DDP301"),
        culprits=BOTH,
        kind="end",
    ),
    "a rank leaves early and others wait": Hang(
        script=script(
            within=AT + "os._exit(0)",
        ).replace("loss.backward()", "loss.backward()  # here"),
        codes=("DDP306",),
        kind="end",
        ending="itself",
    ),
    # Ends and beginnings.
    "a thread that keeps the processes": Hang(
        script=script(after=_THREAD_AT_EXIT),
        codes=("DDP305",),
        culprits=((0, 1), (0,), (1,)),
        kind="stuck",
        says="thread",
    ),
    "a thread that keeps one process": Hang(
        script=script(after="if rank == 1:\n    " + _THREAD_AT_EXIT.strip().replace("\n", "\n    ")),
        codes=("DDP305",),
        kind="stuck",
        says="thread",
    ),
    "training in another thread, one rank stands": Hang(
        script=script(call=_IN_A_THREAD, within=AT + "threading.Event().wait()  # here"),
        codes=("DDP305",),
        kind="stuck",
    ),
    "training in another thread, ranks part": Hang(
        script=script(call=_IN_A_THREAD, within="if rank == 0 and struck and fault(): dist.all_reduce(value)  # here"),
        codes=("DDP301",),
        culprits=BOTH,
        kind="end",
    ),
    "Accelerate, started by python": Hang(
        script=_ACCELERATE.replace("\nmain()\n", _DEBUG_LAUNCHER),
        codes=("DDP301", "DDP302"),
        culprits=BOTH,
        command=(sys.executable, "train.py"),
    ),
    "Accelerate, started by ddpdoctor": Hang(script=_ACCELERATE, codes=("DDP301", "DDP302"), culprits=BOTH),
}
