"""One place of meeting for the ranks of a rehearsal on this machine, and a group of those that are here.

A script may name an address at which nothing listens here (``10.0.0.7``, a host of its cluster), or more ranks than
were started; init_process_group would wait for its timeout. What it named is noted, and the rest is rehearsed. A port
that the script names is given another number, the same on every rank: two rehearsals at a time, or one beside the live
job, would otherwise meet at one port.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import stat
import sys
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, Optional
from urllib.parse import parse_qs, urlparse

from ..free_port import free_port
from ..journal import Journal
from ..torch_compat import replaces
from .schedule import Ending

# The variables of a launcher on several nodes, set for a rank of a rehearsal on one.


def pretend(environment: MutableMapping[str, str], ranks_per_node: int, slurm: bool) -> None:
    """Rewrite what torch's launcher set for ranks of one node; with ``slurm`` set Slurm's variables alike."""
    rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    node, local_rank = divmod(rank, ranks_per_node)
    nodes = -(-world_size // ranks_per_node)
    named: dict[str, int] = {
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": ranks_per_node,
        "GROUP_RANK": node,
        "GROUP_WORLD_SIZE": nodes,
        "NODE_RANK": node,
    }
    if slurm:
        named.update(
            SLURM_PROCID=rank,
            SLURM_LOCALID=local_rank,
            SLURM_NODEID=node,
            SLURM_NTASKS=world_size,
            SLURM_NPROCS=world_size,
            SLURM_NNODES=nodes,
            SLURM_JOB_NUM_NODES=nodes,
            SLURM_NTASKS_PER_NODE=ranks_per_node,
        )
    environment.update({name: str(number) for name, number in named.items()})


# Python's own connections to what lies outside the job: held back by the box, or made where there is none.

ADDRESSES_NOTED = 16
_RESOLVES = ("socket.getaddrinfo", "socket.gethostbyname")


def hook_network(journal: Journal) -> None:
    """Note the first hosts, ports of this machine and Unix sockets that the job asks for, and those that it serves."""
    noted: set[tuple[str, bool]] = set()
    is_open = bool(journal.plan.get("job", {}).get("network", True))

    def note(address: str, serves: bool) -> None:
        if address and (address, serves) not in noted and len(noted) < ADDRESSES_NOTED:
            noted.add((address, serves))
            place: dict[str, Any] = {}
            if not serves and (frames := journal.user_code.frames(sys._getframe(2))):
                place = {"file": frames[0][0], "line": frames[0][1]}
            journal.event("network", address=address, serves=serves, **place)

    def asked(address: Any) -> str:
        written = _written(address)
        if _is_own(address, written, "" if not is_open else journal.run_directory):
            return ""
        # The name that was resolved has been noted.
        port = written.rpartition(":")[2]
        named = is_open and isinstance(address, tuple) and any(name.endswith(f":{port}") for name, _ in noted)
        return "" if named else written

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("socket.connect", "socket.sendto"):
            journal.guarded(lambda: note(asked(arguments[1]), False), harms=())
        elif event in _RESOLVES:
            journal.guarded(lambda: note(_named(*arguments[:2]), False), harms=())
        elif event == "socket.bind":
            journal.guarded(lambda: note(_written(arguments[1]), True), harms=())

    sys.addaudithook(hook)


def _named(host: Any, port: Any = None) -> str:
    """Return the host that a name server is asked for; empty where it is this machine, or an address already."""
    name = os.fsdecode(host) if isinstance(host, bytes) else str(host or "")
    if _is_local(name) or ":" in name or name.replace(".", "").isdigit() or name == os.uname().nodename:
        return ""
    return f"{name}:{port}" if port else name


def _is_own(address: Any, written: str, job: str) -> bool:
    """Return whether someone of this job listens at an address; without ``job`` no one else shares its network."""
    if isinstance(address, tuple):
        inode = _listener(int(address[1])) if _is_local(str(address[0])) else ""
    elif job or _is_socket(written):
        lines = map(str.split, _text("/proc/net/unix").splitlines())
        inode = next((words[6] for words in lines if words[7:] == [written]), "")
    else:
        return True  # no socket lies there: no one was asked
    return bool(inode) and (not job or _is_held(inode, job))


def _listener(port: int) -> str:
    """Return the inode of the socket that listens on a port of this machine; empty where there is none."""
    ending = f":{port:04X}"
    lines = map(str.split, (_text("/proc/net/tcp") + _text("/proc/net/tcp6")).splitlines())
    return next((words[9] for words in lines if words[1].endswith(ending) and words[3] == "0A"), "")


def _is_held(inode: str, job: str) -> bool:
    """Return whether a process that was started with this job's run directory holds a socket."""
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                its_own = os.fsencode(job) in file.read()
            numbers = os.listdir(f"/proc/{pid}/fd") if its_own else []
        except OSError:
            continue
        if any(_link(f"/proc/{pid}/fd/{number}") == f"socket:[{inode}]" for number in numbers):
            return True
    return False


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _written(address: Any) -> str:
    if isinstance(address, tuple):
        host, port = str(address[0]), address[1]
        if _is_local(host):
            return f"127.0.0.1:{port}" if port else ""
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    path = os.fsdecode(address) if isinstance(address, (str, bytes)) else ""
    # A name without a file, which only the box's own network has.
    return "" if not path or path.startswith("\0") else os.path.abspath(path)


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return ""


def _is_local(host: Optional[str]) -> bool:
    return host in ("", None, "localhost", "0.0.0.0", "::", "::1") or str(host).startswith(("127.", "::ffff:127."))


SPAWNED_VARIABLE = "DDPDOCTOR_SPAWNED_RANKS"
"""How many processes ``mp.spawn`` has started, for those processes."""
_LAUNCHER_HAS_THE_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_HERE = "127.0.0.1"


class Rendezvous:
    """Changes of where ranks meet and how many they are, where they would wait in vain."""

    def __init__(self, journal: Journal, ending: Ending) -> None:
        """Save the launcher's variables before the user's first line, which may overwrite them."""
        self._journal = journal
        self._ending = ending
        self._launched = os.environ.get(_LAUNCHER_HAS_THE_STORE) == str(True)
        self._address = os.environ.get("MASTER_ADDR", "")
        self._port = os.environ.get("MASTER_PORT", "")
        self._launched_as = os.environ.get("RANK", "")
        """Of this process, or of the one that has spawned it."""
        self._joined = 0
        """How often this process has joined a group."""

    def install(self) -> None:
        """Replace what makes the store, what numbers the ranks, and what spawns them; torch must be imported."""
        module = sys.modules.get("torch.distributed.rendezvous")
        if hasattr(module, "_create_c10d_store"):

            @replaces("_create_c10d_store", module)
            def make_store_here(make_store: Any, hostname: str, port: int, *arguments: Any, **options: Any) -> Any:
                place = self._journal.guarded(self._place, hostname, port, harms=())
                if place is None:
                    return make_store(hostname, port, *arguments, **options)
                with self._with_launchers_address():
                    return make_store(*place, *arguments, **options)

        functions = sys.modules.get("torch.distributed.distributed_c10d")
        if hasattr(functions, "rendezvous"):

            @replaces("rendezvous", functions)
            def meet_as_many(meet: Any, url: str, rank: int = -1, world_size: int = -1, **options: Any) -> Any:
                fitted = self._journal.guarded(self._fitted, url, rank, world_size, harms=())
                rank, world_size = fitted or (rank, world_size)
                return meet(url, rank, world_size, **options)

        spawning = sys.modules.get("torch.multiprocessing.spawn")
        if hasattr(spawning, "start_processes"):

            @replaces("start_processes", spawning, sys.modules["torch.multiprocessing"])
            def start_processes(
                start: Any, fn: Any, args: Any = (), nprocs: int = 1, *others: Any, **options: Any
            ) -> Any:
                waits = options.get("join", others[0] if others else True)
                if nprocs == 1 and waits:
                    nprocs = int(self._journal.plan.get("spawned_ranks") or 1)
                # The process that starts one and goes on may be a rank itself.
                os.environ[SPAWNED_VARIABLE] = str(nprocs) if waits or nprocs > 1 else ""
                try:
                    return start(fn, args, nprocs, *others, **options)
                finally:
                    os.environ.pop(SPAWNED_VARIABLE, None)

    @contextlib.contextmanager
    def _with_launchers_address(self) -> Iterator[None]:
        """Undo what the script wrote over the launcher's address: torch 2.14 joins the launcher's store only where
        the variables name it, and otherwise opens one of its own at the same port.
        """
        launcher = {"MASTER_ADDR": self._address, "MASTER_PORT": self._port} if self._launched else {}
        scripts = {name: os.environ.get(name) for name in launcher}
        os.environ.update(launcher)
        try:
            yield
        finally:
            for name, value in scripts.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value

    def _place(self, hostname: str, port: int) -> Optional[tuple[str, int]]:
        """Return where the store of this rehearsal is that stands for an address; None to leave it as it is."""
        if not port:
            return None
        away = not _is_here(hostname)
        if not self._launched:
            if away:
                self._journal.event("led", address=f"{hostname}:{port}")
            return _HERE, self._other(port)
        if not self._port.isdigit():
            return None
        if away or str(port) != self._port:
            self._journal.event("led", address=f"{hostname}:{port}")
        return self._address, int(self._port)

    def _other(self, port: int) -> int:
        """Return the port that stands for ``port`` in this rehearsal; the first rank here chooses it."""
        return self._chosen("ports.json", str(port), free_port)

    def _chosen(self, name: str, key: str, choose: Callable[[], int]) -> int:
        """Return what the first rank here has chosen, in a file that all of them share."""
        with open(os.path.join(self._journal.run_directory, name), "a+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            chosen: dict[str, int] = json.loads(file.read() or "{}")
            if key not in chosen:
                chosen[key] = choose()
                file.truncate(0)
                json.dump(chosen, file)
            return int(chosen[key])

    def _fitted(self, url: str, rank: Any, world_size: Any) -> Optional[tuple[int, int]]:
        """Return rank and number of ranks where the script names more ranks than were started, else None."""
        started = self.started()
        if not isinstance(rank, int) or not isinstance(world_size, int):
            return None  # torch words the error
        asked = world_size if world_size >= 0 else _number_in(url, "world_size", "WORLD_SIZE")
        own = rank if rank >= 0 else _number_in(url, "rank", "RANK")
        if self._launched and own is not None:
            self._refuse_a_second(own)
        if not started or asked is None or own is None or asked <= started:
            return None
        if started < 2:
            self._journal.event("led", ranks=asked)
            self._ending.end("rendezvous", f"the command starts 1 of the {asked} ranks that its group waits for")
            return None
        self._journal.event("led", ranks=asked)
        return own % started, started

    def _refuse_a_second(self, rank: int) -> None:
        """End the rehearsal where two ranks of a launcher join under one number: each would wait for the others."""
        if not self._launched_as.isdigit():
            return
        launched_as = int(self._launched_as)
        self._joined += 1
        # By the launcher's number: a rank that is started again has another process, and either may be the first.
        if self._chosen("ranks.json", f"{self._joined}:{rank}", lambda: launched_as) == launched_as:
            return
        self._journal.event("led", rank=rank)
        self._ending.end("rendezvous", f"two ranks join the group as rank {rank}, so the group is never complete")

    def started(self) -> int:
        """Return how many processes were started as ranks; 0 when it is not known."""
        expected = int(self._journal.plan.get("job", {}).get("ranks_expected", 0))
        spawned = "" if self._launched else os.environ.get(SPAWNED_VARIABLE, "")
        # The one process that ranks are compared with has no launcher, and is expected all the same.
        return int(spawned) if spawned.isdigit() else expected


def _number_in(url: str, name: str, variable: str) -> Optional[int]:
    """Return a number in an address, or in the environment where it is not there; None where neither is one."""
    text = (parse_qs(urlparse(url).query).get(name) or [os.environ.get(variable, "")])[0]
    return int(text) if text.isdigit() else None


def _is_here(hostname: str) -> bool:
    """Return whether a host is this machine, without a query of the network for its address, which may take long."""
    if hostname in ("localhost", "", "::1", socket.gethostname()):
        return True
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, hostname)
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.bind((hostname, 0))
            return True
        except OSError:
            continue
    return False
