"""Scripts whose weights are restored, and whose first step is another one all the same; and correct twins."""

from __future__ import annotations

from collections.abc import Mapping

from tests.resume.job import RIGHT, Case, case_of, script_of

_NORMED = "nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))"
_DROPPED = "nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))"
_COUNT = "sampler.set_epoch(epoch)\nif epoch == start_epoch: calls = 0"
_WITH_MEMORY = """
class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
        self.register_buffer("memory", torch.zeros(3), persistent=KEPT)
    def forward(self, x):
        out = super().forward(x)
        self.memory.mul_(0.9).add_(out.detach().mean(0), alpha=0.1)
        return out + USED * self.memory

net = Net()
"""
_TEACHER = "F.mse_loss(model(x), y) + F.mse_loss(net[0](x), F.linear(x, ema['0.weight'], ema['0.bias']))"
_NUMBERS = RIGHT["SAVE"].replace('"ema": ema', '"ema": ema, "rng": torch.get_rng_state()')
_NUMBERS_LOADED = RIGHT["COUNT"] + '\ntorch.set_rng_state(state["rng"])'
_OF_EACH_RANK = RIGHT["SAVE"] + '\ntorch.save({"rng": torch.get_rng_state()}, f"numbers{rank}.pt")'


def _with_memory(kept: bool, used: str) -> Case:
    text = _WITH_MEMORY.replace("KEPT", str(kept)).replace("USED", used)
    return Case(script=script_of().replace(f"net = {RIGHT['NET']}\n", text))


def _streamed(*words: str, save: str = "", load: str = "pass") -> Case:
    script = script_of(
        SAVE=RIGHT["SAVE"].replace('"ema": ema', f'"ema": ema{save}'), SCHEDULER=f"{RIGHT['SCHEDULER']}\n{load}"
    )
    script = script.replace("start_epoch, global_step = 0, 0\n", _STREAM)
    return Case(script=script.replace("for x, y in loader:", "for x, y in stream():"), words=words)


def _iterable(*words: str, load: str) -> Case:
    script = script_of(COUNT=f"{RIGHT['COUNT']}\n{load}", EPOCH="pass").replace("class Samples(Dataset):", _ITERABLE)
    script = script.replace("DataLoader(Samples(), 4, sampler=sampler)", "DataLoader(Read(), 4)")
    return Case(script=script, words=words)


def _seeded_apart(case: Case) -> Case:
    return Case(script=case.script.replace("torch.manual_seed(3)", "torch.manual_seed(3 + rank)"), words=case.words)


def _augmented(case: Case, workers: int) -> Case:
    script = case.script.replace("return self.x[index], ", "return self.x[index] + torch.randn(8), ")
    script = script.replace("sampler=sampler)", f"sampler=sampler, num_workers={workers})")
    return Case(script=script, words=case.words)


def _scaled(*words: str, save: str, load: str) -> Case:
    script = script_of(
        SAVE=RIGHT["SAVE"].replace('"ema": ema', f'"ema": ema{save}'), SCHEDULER=f"{RIGHT['SCHEDULER']}\n{load}"
    )
    script = script.replace("start_epoch, global_step = 0, 0\n", _SCALER)
    script = script.replace("loss.backward()", "scaler.scale(loss).backward()")
    return Case(script=script.replace("optimizer.step()", "scaler.step(optimizer); scaler.update()"), words=words)


_SCALER = """start_epoch, global_step = 0, 0
scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
"""

_STREAM = """start_epoch, global_step = 0, 0
numbers, data = torch.Generator().manual_seed(7), Samples()
def stream():
    for _ in range(8):
        at = torch.randint(0, 64, (4 * dist.get_world_size(),), generator=numbers)[rank :: dist.get_world_size()]
        yield data.x[at], data.y[at]
"""
_ITERABLE = """class Read(torch.utils.data.IterableDataset):
    epoch = 0
    def __iter__(self):
        Read.epoch += 1
        data, order = Samples(), torch.randperm(64, generator=torch.Generator().manual_seed(Read.epoch))
        yield from ((data.x[at], data.y[at]) for at in order[rank :: dist.get_world_size()])

class Samples(Dataset):"""

FIRST_STEP: Mapping[str, Case] = {
    "buffers: strict=False leaves the statistics out": case_of(
        "buffers after the restart",
        "running_mean",
        NET=_NORMED,
        MODEL='net.load_state_dict({k: v for k, v in state["model"].items() if "running" not in k}, strict=False)',
    ),
    "buffers: parameters alone are saved": case_of(
        "buffers after the restart",
        NET=_NORMED,
        SAVE=RIGHT["SAVE"].replace("net.state_dict()", "dict(net.named_parameters())", 1),
        MODEL='net.load_state_dict(state["model"], strict=False)',
    ),
    "gradient: a weight of the loss counts from 0": case_of(
        "first gradient after the restart",
        EPOCH=_COUNT,
        LOSS="F.mse_loss(model(x), y) * min(1.0, 0.1 + 0.05 * calls)",
        STEP="calls += 1",
    ),
    "gradient: a memory that is no part of the state": Case(
        script=_with_memory(False, "3.0").script, words=("first gradient after the restart",)
    ),
    "gradient: a teacher is made of the weights": case_of(
        "first gradient after the restart",
        LOSS=_TEACHER,
        EMA='[ema[n].copy_(v) for n, v in state["model"].items()]',
    ),
    "data: they are drawn from a generator that is made anew": _streamed("the batch of step 1 again"),
    "data: an iterable data set begins anew": _iterable("the batch of step 1 again", load="pass"),
    "random: dropout's are saved, and not loaded": case_of("random numbers", NET=_DROPPED, SAVE=_NUMBERS),
    "random: every rank goes on with those of rank 0": _seeded_apart(
        case_of("random numbers", "rank 1", NET=_DROPPED, SAVE=_NUMBERS, COUNT=_NUMBERS_LOADED)
    ),
    "random: those of the augmentation are saved, and not loaded": _augmented(
        case_of("random numbers", SAVE=_NUMBERS), 0
    ),
    "random: saved, not loaded, and nothing draws any": case_of("`rng`", SAVE=_NUMBERS),
    "random: worker seeds": _augmented(case_of("random numbers", SAVE=_NUMBERS), 2),
    "scaler: not loaded": _scaled("gradient scaler", save=', "scaler": scaler.state_dict()', load="pass"),
    "scaler: not saved": _scaled("gradient scaler", "not saved", save="", load="pass"),
}
FIRST_STEP_TWINS: Mapping[str, Case] = {
    "buffers: all of them": case_of(NET=_NORMED),
    "buffers: a memory that is part of the state": _with_memory(True, "3.0"),
    "buffers: a memory that changes nothing": _with_memory(False, "0.0"),
    "gradient: a weight of the loss by the step": case_of(
        LOSS="F.mse_loss(model(x), y) * min(1.0, 0.1 + 0.05 * global_step)"
    ),
    "gradient: a teacher that is loaded": case_of(LOSS=_TEACHER),
    "data: they are drawn from a generator that is loaded": _streamed(
        save=', "numbers": numbers.get_state()', load='numbers.set_state(state["numbers"])'
    ),
    "data: an iterable data set goes on": _iterable(load="Read.epoch = start_epoch"),
    "random: dropout's, and nobody saves them": case_of(NET=_DROPPED),
    "random: dropout's, which each rank saves and loads": _seeded_apart(
        Case(
            script=script_of(
                NET=_DROPPED,
                SAVE=_OF_EACH_RANK.replace("torch.save({", "if rank == 0: torch.save({", 1).replace(
                    "os.replace", "if rank == 0: os.replace"
                ),
                COUNT=RIGHT["COUNT"] + '\ntorch.set_rng_state(torch.load(f"numbers{rank}.pt")["rng"])',
            ).replace("if rank == 0: save(epoch)", "save(epoch)")
        )
    ),
    "random: worker seeds, and nobody saves them": _augmented(case_of(), 2),
    "random: worker seeds, saved and loaded": _augmented(case_of(SAVE=_NUMBERS, COUNT=_NUMBERS_LOADED), 2),
    "scaler: saved and loaded": _scaled(
        save=', "scaler": scaler.state_dict()', load='scaler.load_state_dict(state["scaler"])'
    ),
}
