"""Training scripts with a fault in how they resume, what must be said of each, and the correct twin of each fault.

The right line of a script is the one that ends in ``# here``, or the one that loads.
"""

from __future__ import annotations

from collections.abc import Mapping

from tests.resume.first_step import FIRST_STEP, FIRST_STEP_TWINS
from tests.resume.frameworks import BY_ITSELF_SHARDED, FRAMEWORK_FAULTS, FRAMEWORKS, SHARDED
from tests.resume.job import RIGHT, Case, case_of, script_of
from tests.resume.signals import IN_THE_EPOCH, SIGNALLED, SIGNALLED_TWINS

_IN_PLACE = (
    RIGHT["SAVE"]
    .replace("torch.save({", "torch.save({  # here")
    .replace('"last.new")\nos.replace("last.new", "last.pt")', '"last.pt")')
)


_WITHOUT = {
    "optimizer": '"optimizer": optimizer.state_dict(), ',
    "scheduler": '"scheduler": scheduler.state_dict(),',
    "ema": '"ema": ema, ',
}


def _saves_without(name: str) -> str:
    return RIGHT["SAVE"].replace(_WITHOUT[name], "").replace("torch.save({", "torch.save({  # here")


FAULTS: Mapping[str, Case] = {
    "the sampler starts from epoch 0": case_of("order of epoch 0", EPOCH="sampler.set_epoch(epoch - start_epoch)"),
    "the finished epoch is run again": case_of(
        "is run again", COUNT='start_epoch = state["epoch"]\nglobal_step = state["global_step"]'
    ),
    "the finished epoch is run again, and every second one saved": case_of(
        "`epoch` counts the same again",
        SAMPLER="DistributedSampler(Samples(), shuffle=False)",
        EPOCH="pass",
        SAVE="if epoch % 2: return" + RIGHT["SAVE"],
        COUNT='start_epoch = state["epoch"]\nglobal_step = state["global_step"]',
    ),
    "an epoch is left out": case_of(
        "left out", COUNT='start_epoch = state["epoch"] + 2\nglobal_step = state["global_step"]'
    ),
    "epochs from the start": case_of("order of epoch 0", COUNT='global_step = state["global_step"]'),
    "the step counter starts at 0": case_of("`global_step`", COUNT='start_epoch = state["epoch"] + 1'),
    "the step counter is off by one": case_of(
        "`global_step`", COUNT='start_epoch = state["epoch"] + 1\nglobal_step = state["global_step"] + 1'
    ),
    "the schedule is not loaded": case_of("learning rate", SCHEDULER="pass"),
    "the schedule is not saved": case_of(
        "learning rate",
        "not saved",
        'checkpoint: `"scheduler": scheduler.state_dict()`',
        at="# here",
        SAVE=_saves_without("scheduler"),
        SCHEDULER="pass",
    ),
    "the schedule steps once more": case_of(
        "learning rate", SCHEDULER='scheduler.load_state_dict(state["scheduler"])\nscheduler.step()'
    ),
    "the optimizer is not loaded": case_of(
        "optimizer", 'made: `optimizer.load_state_dict(state["optimizer"])`', OPTIMIZER="pass"
    ),
    "the optimizer is not saved": case_of(
        "optimizer", "not saved", at="# here", SAVE=_saves_without("optimizer"), OPTIMIZER="pass"
    ),
    "the optimizer is loaded on rank 0 only": case_of(
        "optimizer", "rank 1", OPTIMIZER='if rank == 0: optimizer.load_state_dict(state["optimizer"])'
    ),
    "the weights are not loaded": case_of("weights", MODEL="pass"),
    "the weights are loaded under other names": case_of(
        "weights", MODEL='net.load_state_dict({"module." + k: v for k, v in state["model"].items()}, strict=False)'
    ),
    "the weights are those of the average": case_of("weights", MODEL='net.load_state_dict(state["ema"])'),
    "half of the weights are loaded": case_of(
        "weights", MODEL='net.load_state_dict({k: v for k, v in state["model"].items() if k[0] == "0"}, strict=False)'
    ),
    "the average is not loaded": case_of("`ema`", EMA="pass"),
    "the average starts from the weights": case_of("`ema`", EMA='[ema[n].copy_(v) for n, v in state["model"].items()]'),
    "rank 0 alone knows the epoch": case_of(
        "rank 1",
        COUNT='global_step = state["global_step"]\nif rank == 0: start_epoch = state["epoch"] + 1',
        RESUME="if args.resume: load(args.resume)\nargs.epochs += start_epoch",
    ),
    "shuffled by the clock": case_of(
        "order", SAMPLER="DistributedSampler(Samples(), shuffle=True, seed=int(bool(args.resume)))"
    ),
    "no set_epoch after a restart": case_of("order of epoch 0", EPOCH="if not args.resume: sampler.set_epoch(epoch)"),
    "the momenta are emptied": case_of(
        "optimizer", OPTIMIZER='optimizer.load_state_dict(state["optimizer"])\noptimizer.state.clear()'
    ),
    "another learning rate": case_of(
        "learning rate",
        SCHEDULER='scheduler.load_state_dict(state["scheduler"])\nfor g in optimizer.param_groups: g["lr"] = 0.01',
    ),
    "an older file is loaded": case_of(
        "weights",
        SAVE=RIGHT["SAVE"] + '\nif epoch == 0: __import__("shutil").copy("last.pt", "first.pt")',
        STEP="if args.resume == '' and global_step == 1 and rank == 0: "
        'torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), '
        '"scheduler": scheduler.state_dict(), "ema": ema, "epoch": -1, "global_step": 0}, "zero.pt")',
        RESUME='if args.resume: load("zero.pt")',
    ),
    "torn: saved over the only file": case_of("over the only", at="# here", SAVE=_IN_PLACE),
    "torn: a hard link is no copy": case_of(
        "over the only",
        at="# here",
        SAVE='if os.path.exists("last.pt") and not os.path.exists("old.pt"): os.link("last.pt", "old.pt")' + _IN_PLACE,
    ),
    "torn: into an open file": case_of(
        "over the only",
        at="# here",
        SAVE='file = open("last.pt", "wb")' + _IN_PLACE.replace('"last.pt"', "file") + "file.close()",
    ),
}
_LATE = """
if args.resume:
    F.mse_loss(model(torch.randn(4, 8)), torch.randn(4, 3)).backward()
    optimizer.step()
    load(args.resume)
"""
_BY_ITSELF = {"OPTION": "pass"}
_EACH_EPOCH = (
    RIGHT["SAVE"]
    .replace("torch.save({", "torch.save({  # here")
    .replace('"last.new")\nos.replace("last.new", "last.pt")', 'f"epoch-{epoch}.pt")')
)
_NEWEST = '\nfiles = sorted(name for name in os.listdir(".") if name.startswith("epoch-"))\n'
_FALLS_BACK = """
for name in reversed(files):
    try:
        load(name)
        break
    except Exception as error:
        print("not whole:", name, error)
"""
TORN_FAULTS: Mapping[str, Case] = {
    "torn write: the only file": case_of("fails on the torn file", "no other", at="# here", torn=True, SAVE=_IN_PLACE),
    "torn write: the newest of several, without a fallback": case_of(
        "fails on the torn file",
        "is whole",
        at="# here",
        torn=True,
        **_BY_ITSELF,
        SAVE=_EACH_EPOCH,
        RESUME=_NEWEST + "if files: load(files[-1])",
    ),
    "torn write: it begins again": case_of(
        "begins again from the first step",
        at="# here",
        torn=True,
        **_BY_ITSELF,
        SAVE=_IN_PLACE,
        RESUME='try:\n    load("last.pt")\nexcept Exception as error:\n    print("no checkpoint", error)',
    ),
    "torn write: parts of two checkpoints": case_of(
        "taken for whole",
        "the weights are those after step 12",
        at="# here",
        torn=True,
        **_BY_ITSELF,
        SAVE='torch.save(net.state_dict(), "weights.pt")\n'
        + RIGHT["SAVE"].replace("torch.save({", "torch.save({  # here"),
        MODEL='net.load_state_dict(torch.load("weights.pt"))',
        RESUME='if os.path.exists("last.pt"): load("last.pt")',
    ),
    "torn write: the good one is deleted": case_of(
        "deletes the last whole checkpoint",
        at="# here",
        torn=True,
        **_BY_ITSELF,
        SAVE=_EACH_EPOCH,
        RESUME=_NEWEST
        + "for name in files[:-1]:\n    if rank == 0: os.remove(name)\n"
        + "try:\n    if files: load(files[-1])\nexcept Exception as error:\n    print(error)",
    ),
    "torn write: the older one is deleted before the new one is there": case_of(
        "fails on the torn file",
        at="# here",
        torn=True,
        **_BY_ITSELF,
        SAVE='for name in os.listdir("."):\n    if name.startswith("epoch-"): os.remove(name)' + _EACH_EPOCH,
        RESUME=_NEWEST + "if files: load(files[-1])",
    ),
}
_ALONE = {
    "SAVE": 'torch.save(net.state_dict(), "last.new")\nos.replace("last.new", "last.pt")',
    "MODEL": "net.load_state_dict(state)",
    **dict.fromkeys(("OPTIMIZER", "SCHEDULER", "EMA", "COUNT"), "pass"),
}
_BY_SGD = ("torch.optim.AdamW(model.parameters(), lr=0.01)", "torch.optim.SGD(model.parameters(), lr=0.01)")
_NO_SCHEDULE = ("scheduler.step()", "pass")
FAILING: Mapping[str, Case] = {
    "fails: an object is in the file": case_of(
        "torch.load refuses argparse.Namespace",
        "weights_only=False",
        LOAD='state = torch.load(path, map_location="cpu")  # load',
        SAVE=RIGHT["SAVE"].replace('"ema": ema', '"ema": ema, "args": args'),
    ),
    "fails: another shape": case_of(
        "fails on every rank",
        "size mismatch",
        at="net.load",
        RESUME="if args.resume: net[2] = nn.Linear(8, 4)\nif args.resume: load(args.resume)",
    ),
    "fails: rank 1 loads nothing": case_of(
        "fails on rank 1",
        "Missing key",
        at="net.load",
        MODEL='net.load_state_dict(state["model"] if rank == 0 else {})',
    ),
    "weights alone": case_of(
        "optimizer",
        "not saved",
        "learning rate",
        at="# here",
        resume_with=None,
        torn=False,
        **{**_ALONE, "SAVE": _ALONE["SAVE"].replace("\n", "  # here\n", 1)},
    ),
    "weights alone: the epoch begins at 0": Case(
        script=script_of(**_ALONE).replace(*_BY_SGD).replace(*_NO_SCHEDULE), words=("order of epoch 0",)
    ),
}
_SHARED_OUT = script_of().replace("Samples(), 4", "Samples(), 8 // dist.get_world_size()")
OTHER_RANKS: Mapping[str, Case] = {
    "other ranks: the batch of a rank is fixed": Case(
        script=script_of(), ranks=4, words=("takes 16 samples in the place of 8",)
    ),
    "other ranks: fewer": Case(script=script_of(), ranks=1, words=("takes 4 samples in the place of 8",)),
    "other ranks: the schedule counts steps": Case(
        script=script_of(STEP="scheduler.step()").replace("    scheduler.step()\n    if rank", "    if rank"),
        ranks=4,
        words=("counts steps",),
    ),
    "other ranks: batches are skipped by their number": Case(
        script=IN_THE_EPOCH.replace("Samples(), 4", "Samples(), 8 // dist.get_world_size()")
        .replace('"batch": batch + 1', '"batch": 2')
        .replace("batch < skip", "batch < skip - 1"),
        ranks=4,
        words=("seen again",),
    ),
    "other ranks: too many batches are skipped": Case(script=IN_THE_EPOCH, ranks=4, words=("never seen",)),
    "other ranks: a file for each rank": Case(
        script=script_of(SAVE=RIGHT["SAVE"], RESUME='if args.resume: load(args.resume.replace("last", f"last{rank}"))')
        .replace("if rank == 0: save(epoch)", "save(epoch)")
        .replace('"last.new"', 'f"last{rank}.new"')
        .replace('"last.pt")\n', 'f"last{rank}.pt")\n'),
        ranks=3,
        resume_with="--resume last.pt",
        words=("fails", "last2.pt"),
    ),
}
OTHER_RANKS_TWINS: Mapping[str, Case] = {
    **{name: Case(script=script) for name, script in FRAMEWORKS.items()},
    "an object is in the file, and it is allowed": case_of(
        SAVE=RIGHT["SAVE"].replace('"ema": ema', '"ema": ema, "args": args')
    ),
    "weights alone, where nothing else is needed": Case(
        script=script_of(**{**_ALONE, "COUNT": "start_epoch = args.start"})
        .replace(*_BY_SGD)
        .replace(*_NO_SCHEDULE)
        .replace(
            '"--epochs", type=int, default=6)',
            '"--epochs", type=int, default=6)\nparser.add_argument("--start", type=int, default=0)',
        ),
        resume_with="--resume last.pt --start 2",
    ),
    "other ranks: the batch is shared out": Case(script=_SHARED_OUT, ranks=4),
    "other ranks: the batch is shared out, in the middle of an epoch": Case(
        script=IN_THE_EPOCH.replace("Samples(), 4", "Samples(), 8 // dist.get_world_size()"), ranks=4
    ),
}
TWINS: Mapping[str, Case] = {
    **OTHER_RANKS_TWINS,
    "in the middle of an epoch": Case(script=IN_THE_EPOCH),
    "torn write: a sharded one, and the user names a whole one": Case(script=SHARDED, torn=True),
    "torn write: a sharded one, the newest that is whole": Case(
        script=BY_ITSELF_SHARDED.replace(
            "if args.resume:",
            'whole = [d for d in os.listdir(".") if os.path.exists(d + "/.metadata")]\n'
            'args.resume = max(whole, default="")\nif args.resume:',
        ),
        torn=True,
    ),
    "torn write: another name, then os.replace": case_of(torn=True),
    "torn write: it falls back to the one before": case_of(
        torn=True, **_BY_ITSELF, SAVE=_EACH_EPOCH, RESUME=_NEWEST + _FALLS_BACK
    ),
    "torn write: an option, and the user names a whole one": case_of(torn=True, SAVE=_EACH_EPOCH),
    "torn write: two in turn, the newest whole one": case_of(
        torn=True,
        **_BY_ITSELF,
        SAVE=_EACH_EPOCH.replace('f"epoch-{epoch}.pt"', 'f"epoch-{epoch % 2}.pt"'),
        RESUME=_NEWEST.replace("sorted(", "sorted((").replace('"epoch-"))', '"epoch-")), key=os.path.getmtime)')
        + _FALLS_BACK,
    ),
    "as it should be": case_of(),
    "by itself, where there is a file": case_of(OPTION="pass", RESUME='if os.path.exists("last.pt"): load("last.pt")'),
    "a flag": case_of(
        OPTION='parser.add_argument("--resume", action="store_true")', RESUME='if args.resume: load("last.pt")'
    ),
    "another option": case_of(
        OPTION='parser.add_argument("--resume_from", default=None)',
        RESUME="if args.resume_from: load(args.resume_from)",
    ),
    "an option that is given": case_of(
        OPTION='parser.add_argument("--snapshot", default="")',
        RESUME="if args.snapshot: load(args.snapshot)",
        resume_with="--snapshot last.pt",
    ),
    "no shuffling and no set_epoch": case_of(SAMPLER="DistributedSampler(Samples(), shuffle=False)", EPOCH="pass"),
    "loaded into the wrapper": case_of(
        SAVE=RIGHT["SAVE"].replace("net.state_dict()", "model.state_dict()"),
        MODEL='model.load_state_dict(state["model"])',
    ),
    "dropout, whose numbers are not restored": case_of(
        STEP="torch.dropout(x, 0.5, True)",
    ),
    "epochs counted from the next": case_of(
        SAVE=RIGHT["SAVE"].replace('"epoch": epoch', '"epoch": epoch + 1'),
        COUNT='start_epoch = state["epoch"]\nglobal_step = state["global_step"]',
    ),
    "a schedule that is made anew": case_of(
        SAVE=RIGHT["SAVE"].replace(_WITHOUT["scheduler"], ""),
        SCHEDULER="for g in optimizer.param_groups: g['lr'] = 0.01\nstart = state['epoch'] + 1\n"
        "global scheduler\nfor g in optimizer.param_groups: g['initial_lr'] = 0.01\n"
        "scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.7**epoch)\n"
        "for _ in range(start): scheduler.step()",
    ),
    "two files": case_of(
        SAVE=RIGHT["SAVE"] + '\ntorch.save({"model": net.state_dict()}, "best.pt")',
    ),
    "a file for each epoch": case_of(
        SAVE=RIGHT["SAVE"].replace('os.replace("last.new", "last.pt")', 'os.replace("last.new", f"epoch-{epoch}.pt")'),
    ),
    "the time beside it": case_of(SAVE=RIGHT["SAVE"].replace('"ema": ema', '"ema": ema, "time": time.time()')),
    "losses beside it": case_of(
        SAVE=RIGHT["SAVE"].replace('"ema": ema', '"ema": ema, "loss": float(loss)'),
    ),
    "a checkpoint in each third step": case_of(
        STEP='if global_step % 3 == 0 and rank == 0: torch.save({"model": net.state_dict()}, "weights.pt")',
    ),
    "no seed": Case(script=script_of().replace("torch.manual_seed(3)", "torch.manual_seed(time.time_ns() % 2**31)")),
    "random numbers that are saved and loaded": case_of(
        SAVE=RIGHT["SAVE"].replace('"ema": ema', '"ema": ema, "rng": torch.get_rng_state()'),
        COUNT=RIGHT["COUNT"] + '\ntorch.set_rng_state(state["rng"])',
    ),
    "torn: two files in turn": case_of(SAVE=_IN_PLACE.replace('"last.pt"', 'f"{epoch % 2}.pt"')),
    "torn: a copy beside it": case_of(
        SAVE='if os.path.exists("last.pt"): __import__("shutil").copy2("last.pt", "old.pt")' + _IN_PLACE
    ),
    "torn: a copy in a folder": case_of(
        SAVE='os.makedirs("kept", exist_ok=True)\n'
        'if os.path.exists("last.pt"): __import__("shutil").copy("last.pt", "kept/old")' + _IN_PLACE
    ),
}
INCONCLUSIVE: Mapping[str, Case] = {
    "no checkpoint": Case(script=script_of(SAVE="pass", RESUME="pass"), inconclusive="no checkpoint"),
    "weights before the first step, and no more": Case(
        script=script_of(**{**_ALONE, "RESUME": RIGHT["RESUME"] + "\nif rank == 0: save(0)"}).replace(
            "    if rank == 0: save(epoch)\n", ""
        ),
        inconclusive="no checkpoint",
    ),
    "nothing is loaded": Case(script=script_of(RESUME="pass"), inconclusive="loaded nothing"),
    **{
        f"saved over the only file, and {name}": Case(
            script=script_of(SAVE=_IN_PLACE, RESUME=resume), words=("over the only",), inconclusive=reason
        )
        for name, resume, reason in (
            ("nothing is loaded", "pass", "loaded nothing"),
            ("the restart fails elsewhere", 'if args.resume: open("/nowhere")', "the script failed"),
            ("it trains before it loads", _LATE, "trained before it loaded"),
        )
    },
    "the restart fails elsewhere": Case(
        script=script_of(RESUME='if args.resume: open("/nowhere")'), inconclusive="the script failed"
    ),
    "it trains before it loads": Case(script=script_of(RESUME=_LATE), inconclusive="trained before it loaded"),
}
CASES: Mapping[str, Case] = {
    **FAULTS,
    **FIRST_STEP,
    **FAILING,
    **FRAMEWORK_FAULTS,
    **TORN_FAULTS,
    **SIGNALLED,
    **SIGNALLED_TWINS,
    **OTHER_RANKS,
    **TWINS,
    **FIRST_STEP_TWINS,
    **INCONCLUSIVE,
}
