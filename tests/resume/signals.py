"""Scripts that handle a signal by which schedulers end a job, what must be said of them, and correct twins."""

from __future__ import annotations

from collections.abc import Mapping

from tests.resume.job import RIGHT, Case, script_of

IN_THE_EPOCH = script_of(
    SAVE=RIGHT["SAVE"].replace('"epoch": epoch', '"epoch": epoch, "batch": batch + 1'),
    COUNT='start_epoch = state["epoch"]\nglobal_step = state["global_step"]\nglobal skip\nskip = state["batch"]',
    STEP="if global_step % 3 == 0 and rank == 0: save(epoch)",
    RESUME="skip = 0\nif args.resume: load(args.resume)",
)
IN_THE_EPOCH = IN_THE_EPOCH.replace("    if rank == 0: save(epoch)\n", "", 1).replace(
    "for x, y in loader:",
    "for batch, (x, y) in enumerate(loader):\n        if epoch == start_epoch and batch < skip: continue",
)

_HANDLER = (
    "def told(number, frame):\n    global stop\n    stop = True\nsignal.signal(signal.SIGTERM, told)\nstop = False\n"
)
_HEAD = "import argparse, os, signal, sys,"


def _told(script: str, leaves: str = "", handler: str = _HANDLER) -> str:
    """Return a script that handles SIGTERM, and leaves after a step where it was told to."""
    script = script.replace("import argparse, os,", _HEAD).replace("def load(path):", f"{handler}\ndef load(path):")
    lines = f"        if stop:\n            {leaves}\n" if leaves else ""
    return script.replace("    scheduler.step()\n    if rank", f"{lines}    scheduler.step()\n    if rank").replace(
        "    scheduler.step()\n    dist.barrier", f"{lines}    scheduler.step()\n    dist.barrier"
    )


_OPTIONAL = script_of(
    OPTIMIZER='if "optimizer" in state: optimizer.load_state_dict(state["optimizer"])', SAVE=RIGHT["SAVE"]
)
_BY_LOOKING = {"OPTION": "pass", "RESUME": 'if os.path.exists("last.pt"): load("last.pt")'}
SIGNALLED: Mapping[str, Case] = {
    "signal: the rest of the epoch is left out": Case(
        script=_told(script_of(), "if rank == 0: save(epoch)\n            sys.exit(0)"),
        words=("SIGTERM", "never seen"),
    ),
    "signal: the epoch begins again": Case(
        script=_told(script_of(), "if rank == 0: save(epoch - 1)\n            break").replace(
            "    scheduler.step()\n    if rank == 0", "    if stop: break\n    scheduler.step()\n    if rank == 0"
        ),
        words=("SIGTERM", "from the beginning of the epoch"),
    ),
    "signal: another file, which nothing looks for": Case(
        script=_told(
            script_of(**_BY_LOOKING),
            'if rank == 0: torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), '
            '"epoch": epoch}, "preempted.pt")\n            sys.exit(0)',
        ),
        words=("is not what the restart loads",),
    ),
    "signal: the optimizer is left out": Case(
        script=_told(
            _OPTIONAL,
            handler="def told(number, frame):\n"
            '    if rank == 0: torch.save({"model": net.state_dict(), "scheduler": scheduler.state_dict(), '
            '"ema": ema, "epoch": epoch, "global_step": global_step}, "last.pt")\n'
            "    sys.exit(0)\nsignal.signal(signal.SIGTERM, told)",
        ),
        words=("optimizer", "is not saved"),
    ),
    "signal: a file that cannot be loaded": Case(
        script=_told(
            script_of(),
            handler='def told(number, frame):\n    if rank == 0: torch.save({"model": net.state_dict()}, "last.pt")\n'
            "    sys.exit(0)\nsignal.signal(signal.SIGUSR1, told)",
        ),
        words=("SIGUSR1", "the restart fails", "KeyError"),
    ),
    "signal: the step is not counted yet": Case(
        script=_told(
            IN_THE_EPOCH.replace("batch + 1", "counted").replace("skip = 0", "skip = counted = 0"),
            handler="def told(number, frame):\n    if rank == 0: save(epoch)\n    sys.exit(0)\n"
            "signal.signal(signal.SIGTERM, told)",
        ).replace("        global_step += 1\n", "        global_step += 1\n        counted = batch + 1\n"),
        words=("trained on already", "between two steps"),
    ),
    "signal: one rank leaves while the other waits for it": Case(
        script=_told(script_of(), "if rank != 0: sys.exit(0)\n            dist.barrier()\n            save(epoch - 1)"),
        words=("breaks off before it has saved",),
    ),
}
SIGNALLED_TWINS: Mapping[str, Case] = {
    "signal: the place in the epoch is saved": Case(
        script=_told(IN_THE_EPOCH, "if rank == 0: save(epoch)\n            break").replace(
            "    scheduler.step()\n", "    if stop: break\n    scheduler.step()\n"
        )
    ),
    "signal: at the end of the epoch": Case(
        script=_told(script_of()).replace("    dist.barrier()\n", "    dist.barrier()\n    if stop: sys.exit(0)\n")
    ),
    "signal: it only says so": Case(
        script=_told(
            script_of(),
            handler='def told(number, frame): print("so long", flush=True)\nsignal.signal(signal.SIGTERM, told)',
        )
    ),
    "signal: it leaves, and the newest epoch stands": Case(
        script=_told(script_of(), handler="def told(number, frame): sys.exit(0)\nsignal.signal(signal.SIGTERM, told)")
    ),
    "signal: in the handler, and away": Case(
        script=_told(
            IN_THE_EPOCH.replace("batch + 1", "batch + 1"),
            handler="class Stops:\n    def __call__(self, number, frame):\n        if rank == 0: save(epoch)\n"
            "        os._exit(0)\nsignal.signal(signal.SIGUSR1, Stops())",
        )
    ),
    "signal: all ranks agree on it": Case(
        script=_told(
            IN_THE_EPOCH,
            "if rank == 0: save(epoch)\n            dist.barrier()\n            dist.destroy_process_group()\n"
            "            sys.exit(0)",
        ).replace("        if stop:", "        dist.all_reduce(said := torch.tensor(int(stop)))\n        if said > 0:")
    ),
}
