"""A small job that meets some trouble, gets over it and trains to its end; run by the recorder of quiet logs.

The first argument names the trouble, the second how the job prints its progress.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import faulthandler
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import traceback
import urllib.request
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

RANK = int(os.environ.get("RANK", "0"))
STEPS, TROUBLE_AT = 12, 4
LOG = logging.getLogger("trainer")


class Loose:
    """Something whose end raises an exception that no one can catch."""

    def __del__(self) -> None:
        raise RuntimeError("the CUDA stream was destroyed before")


def tensorboard_is_missing() -> None:
    """An optional package is not there."""
    try:
        import no_such_tensorboard  # type: ignore[import-not-found]  # noqa: F401
    except ImportError:
        traceback.print_exc()
        print("tensorboard is not installed, metrics go to stdout only")


def sample_is_broken() -> None:
    """A sample is skipped, with its traceback."""
    try:
        {"a": 1}["label"]
    except KeyError:
        LOG.exception("sample 318 is broken, skipping it")


def download_is_retried() -> None:
    """A server does not answer, twice."""
    for attempt in range(3):
        try:
            urllib.request.urlopen("http://127.0.0.1:9/weights", timeout=1)
        except OSError as error:
            LOG.warning("download failed (attempt %d of 3): %r, retrying", attempt + 1, error)


def memory_runs_out_once() -> None:
    """The batch is halved after an out-of-memory error."""
    try:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 79.15 GiB in total.")
    except torch.OutOfMemoryError as error:
        traceback.print_exc()
        print(f"ran out of memory: {error}; going on with a batch of 16")


def checkpoint_is_missing() -> None:
    """There is nothing to resume from."""
    try:
        torch.load("/nowhere/last.ckpt")
    except FileNotFoundError as error:
        print(f"ERROR: cannot resume: {error}. Training from scratch.")


def exceptions_are_chained() -> None:
    """An exception is raised from another, and both are printed."""
    try:
        try:
            int("nan")
        except ValueError as error:
            raise RuntimeError("metric could not be parsed") from error
    except RuntimeError:
        traceback.print_exc()


def thread_dies() -> None:
    """A thread that only writes metrics ends by an exception, which the hook of threads prints."""
    thread = threading.Thread(target=lambda: [][1], name="metrics")
    thread.start()
    thread.join()


def task_is_lost() -> None:
    """An exception of a task that no one awaited."""

    async def upload() -> None:
        raise ConnectionResetError("upload of metrics failed")

    async def main() -> None:
        task = asyncio.get_running_loop().create_task(upload())
        await asyncio.sleep(0.01)
        del task

    asyncio.run(main())


def finaliser_raises() -> None:
    """Python ignores what a finaliser raises, and prints it."""
    loose = Loose()
    del loose


def child_is_killed() -> None:
    """A child process is killed, and its work is done again."""
    for command in ("kill -9 $$", "exit 3", "true"):
        code = subprocess.run(("sh", "-c", command)).returncode
        print(f"unpacking shard 7: exit code {code}")


def stacks_are_dumped() -> None:
    """A watchdog of the user's prints where all threads are."""
    faulthandler.dump_traceback(all_threads=True)


def signal_is_handled() -> None:
    """The scheduler announces the end of its time; a checkpoint is written and the job goes on."""
    signal.signal(signal.SIGUSR1, lambda number, _: print(f"received signal {number}, saving a checkpoint"))
    os.kill(os.getpid(), signal.SIGUSR1)


def interrupt_is_caught() -> None:
    """An evaluation is interrupted, and the training goes on."""
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        traceback.print_exc()
        print("evaluation interrupted, going on with training")


def warnings_are_many() -> None:
    """Warnings with the words of failures."""
    warnings.warn("Detected call of `lr_scheduler.step()` before `optimizer.step()`", UserWarning, stacklevel=1)
    warnings.warn("the error rate of the decoder exceeded 40%; NCCL error handling is on", UserWarning, stacklevel=1)
    LOG.warning("Found NaN gradient norm, skipping this step (signal lost)")


def errors_are_logged() -> None:
    """A logger's errors without an exception."""
    LOG.error("validation failed: loss 9.31 is above 5.0 (exit code 1 of the metric script)")
    LOG.critical("disk almost full: 97%% used, old checkpoints were removed")


def assertion_fails_in_a_test() -> None:
    """A self-check of the pipeline fails, and says so."""
    try:
        assert torch.tensor(1.0).isnan(), "augmentation changed nothing"
    except AssertionError:
        print("".join(traceback.format_exc()))


def group_is_refused() -> None:
    """A group cannot be made with a backend that is not built in."""
    try:
        dist.new_group(backend="nccl") if RANK == 0 else None
        raise RuntimeError("Distributed package doesn't have NCCL built in")
    except RuntimeError as error:
        print(f"no NCCL here ({error}), metrics are reduced by gloo")


def port_is_taken() -> None:
    """The metrics server finds its port taken, and takes another one."""
    import socket

    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        try:
            second.bind(first.getsockname())
        except OSError as error:
            LOG.warning("metrics server: %s, trying the next port", error)


def hub_is_offline() -> None:
    """A library retries over a lost connection, with a long traceback."""
    try:
        try:
            raise ConnectionError("HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded")
        except ConnectionError as error:
            raise OSError("We couldn't connect to the hub to load this file") from error
    except OSError:
        LOG.warning("using the cached tokenizer", exc_info=True)


def nothing() -> None:
    """No trouble."""


def loader_fails_once() -> None:
    """The workers of a loader fail, and a loader without workers takes their place."""
    loader = DataLoader(list(range(4)), num_workers=1, collate_fn=_broken)
    try:
        next(iter(loader))
    except ValueError:
        LOG.exception("loader with workers failed; loading in the main process")


def _broken(batch: list[int]) -> list[int]:
    raise ValueError(f"cannot collate {batch}")


def dies_in_the_first_attempt() -> None:
    """The first attempt of an elastic job fails."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and RANK == 1:
        raise ConnectionError("lost the data server")


def is_killed_in_the_first_attempt() -> None:
    """A rank of the first attempt of an elastic job is killed."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and RANK == 0:
        os.kill(os.getpid(), signal.SIGKILL)


def destroys_twice() -> None:
    """Raises at the end, where the process group is gone already; after the last step."""


def plain(step: int, loss: float) -> None:
    """As scripts print."""
    print(f"[rank {RANK}] step {step}/{STEPS} loss {loss:.4f}", flush=True)


def bar(step: int, loss: float) -> None:
    """As tqdm."""
    end = "\n" if step == STEPS else ""
    filled = "#" * (step * 10 // STEPS)
    line = f"\rEpoch 0: {step * 100 // STEPS:3d}%|{filled:<10}| {step}/{STEPS} [00:0{step % 10}<00:01, 7.41it/s, "
    sys.stderr.write(f"{line}loss={loss:.3f}]{end}")
    sys.stderr.flush()


def dictionary(step: int, loss: float) -> None:
    """As the trainer of transformers."""
    if RANK == 0:
        print({"loss": round(loss, 4), "grad_norm": 0.71, "learning_rate": 1e-05, "epoch": step / STEPS}, flush=True)


def logger(step: int, loss: float) -> None:
    """As a logger."""
    LOG.info("Epoch [1][%d/%d] lr: 1.000e-02, eta: 0:00:0%d, loss: %.4f", step, STEPS, step % 10, loss)


def objects(step: int, loss: float) -> None:
    """As a structured logger."""
    print(json.dumps({"level": "info", "rank": RANK, "step": step, "message": f"loss {loss:.4f}"}), flush=True)


STYLES: dict[str, Callable[[int, float], None]] = {
    "plain": plain, "bar": bar, "dictionary": dictionary, "logger": logger, "objects": objects,
}  # fmt: skip


def main() -> None:
    """Train, meet the trouble on the way, and end well."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s - %(name)s - %(levelname)s - %(message)s")
    trouble, report = globals()[sys.argv[1]], STYLES[sys.argv[2]]
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 1), find_unused_parameters=trouble is warnings_are_many)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.randn(STEPS, 4), torch.randn(STEPS, 1)), batch_size=1)
    for step, (inputs, targets) in enumerate(loader, 1):
        loss = (model(inputs) - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        report(step, loss.item())
        if step == TROUBLE_AT:
            trouble()
    if RANK == 0:
        torch.save(model.state_dict(), Path("model.pt"))
    dist.barrier()
    dist.destroy_process_group()
    if trouble is destroys_twice:
        with contextlib.suppress(KeyboardInterrupt):
            try:
                dist.destroy_process_group()
            except (AssertionError, ValueError):
                traceback.print_exc()
        print("training finished", flush=True)


if __name__ == "__main__":
    main()
