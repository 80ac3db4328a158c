"""The training that is rehearsed: a small DDP job on two ranks that does, in its second step, what the table asks for.

Usage: train.py WORLD, a JSON file: "socket", where every row's beginning and end is told and answered, and "ways". What
a row did is told with the exception that it met, and with whether its folder is another one afterwards.
"""

import hashlib
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import torch
import torch.distributed as dist
from model import Net
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WORLD = json.loads(Path(sys.argv[1]).read_text()) if __name__ == "__main__" else {}


def tell(**message):
    """Tell the table something, and wait for its answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.connect(WORLD["socket"])
        line.sendall(json.dumps(message).encode() + b"\n")
        return line.makefile().readline()


def run(command, **options):
    """Run a program; raises when it fails."""
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **options)


def names_for(way):
    """What a row's code finds ready beside the usual modules."""
    count = itertools.count()

    def fresh():
        name = os.path.abspath(f"fresh_{next(count)}")
        Path(name).write_text("n")
        return name

    def zipped(path):
        name = f"zipped_{next(count)}.zip"
        with zipfile.ZipFile(name, "w") as archive:
            archive.writestr(path.lstrip("/"), "n")
        return name

    return {
        "P": os.path.join(way["at"], "old" + way["suffix"]),
        "FROM": os.path.join(way["at"], "source.txt"),
        "EMPTY": os.path.join(way["at"], "empty"),
        "TOKEN": WORLD["token"],
        "HELPER": WORLD["helper"],
        "O": WORLD.get("outside", {}),
        "MARK": os.path.join(WORLD.get("outside", {}).get("marks", ""), way["slug"]),
        "PYTHON": sys.executable,
        "Path": Path,
        "dist": dist,
        "fresh": fresh,
        "made": lambda path: tell(kind="made", path=str(path)),
        "os": os,
        "rank": dist.get_rank(),
        "run": run,
        "shutil": shutil,
        "subprocess": subprocess,
        "sys": sys,
        "tell": tell,
        "torch": torch,
        "zipped": zipped,
    }


def look(folder):
    """A digest of a folder: names, kinds, modes, times and content."""
    digest = hashlib.sha256()
    for path in sorted(Path(folder).rglob("*")):
        status = path.lstat()
        digest.update(os.fsencode(path))
        digest.update(f"{status.st_mode} {status.st_mtime_ns} {status.st_nlink} {status.st_uid}".encode())
        if path.is_symlink():
            digest.update(os.fsencode(os.readlink(path)))
        elif path.is_file():
            digest.update(path.read_bytes() + repr(attributes(path)).encode())
    return digest.hexdigest()


def attributes(path):
    return [(name, os.getxattr(path, name)) for name in os.listxattr(path)]


def perform(way):
    """Do what a row says, in its folder; what ends a rank goes on upwards in the rank itself."""
    tell(kind="begun", way=way["slug"])
    before, here, ended, said = look(way["at"]), os.getcwd(), None, ""
    os.chdir(way["at"])
    try:
        exec(compile(way["body"], way["slug"], "exec"), names_for(way))
    except SystemExit as ending:
        ended, said = ending, "refused"
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
    os.chdir(here)
    tell(kind="done", way=way["slug"], said=said, effect=look(way["at"]) != before)
    if ended is not None:
        raise ended


def in_a_fork(way):
    """Let a process of its own do it, so that no row ends the next one."""
    child = os.fork()
    if child == 0:
        try:
            perform(way)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    tell(kind="ended", way=way["slug"], status=status)


def do_what_is_asked(rank):
    for way in WORLD["ways"]:
        if way["ranks"] == "both":
            dist.barrier()
            perform(way)
            dist.barrier()
        elif rank == 0:
            (in_a_fork if way["ranks"] == "forked" else perform)(way)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for step, (inputs, targets) in enumerate(loader):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            if (epoch, step) == (0, 1):
                do_what_is_asked(rank)
        if rank == 0:
            os.makedirs("runs", exist_ok=True)
            torch.save(model.module.state_dict(), f"runs/epoch_{epoch}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
