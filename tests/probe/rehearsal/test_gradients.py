"""The gradient checks on real ranks: many defects in few rehearsals, and their correct twins without a word."""

from __future__ import annotations

import textwrap
from pathlib import Path

from ddpdoctor.examination import Examination
from tests.forks import examine

from .conftest import HEAD

FRAME = """
import contextlib
import copy
from torch.utils.checkpoint import checkpoint

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    def rehearse_line(self, x):
        return self(x)

class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.layer = nn.Linear(4, 4), nn.Linear(4, 4)
    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x

class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 1), nn.Linear(4, 1)
    def forward(self, x):
        return self.a(x), self.b(x)

def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, **options})

def update(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    data = TensorDataset(torch.randn(SAMPLES, 4))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    SETUP
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for i, (x,) in enumerate(loader):
            STEP
    AFTER
    dist.destroy_process_group()

main()
"""

SILENT = (
    """
    needless = DDP(Net(), find_unused_parameters=True)  # DDP202
    o_needless = sgd(needless)
    bypassed = DDP(Net())
    o_bypassed = sgd(bypassed)
    unwrapped = DDP(Net()).module
    o_unwrapped = sgd(unwrapped)
    again = DDP(Net())
    o_again = sgd(again)
    never = DDP(Net())
    o_never = sgd(never)
    late = DDP(Net())
    o_late = sgd(late)
    taken = DDP(Net())
    o_taken = sgd(taken)
    headed = Net()
    o_headed = torch.optim.SGD(headed.parameters(), lr=0.1)  # DDP206
    headed[2] = nn.Linear(8, 1)
    headed = DDP(headed)
    copied = Net()
    o_copied = torch.optim.SGD(copied.parameters(), lr=0.1)  # DDP206
    copied = DDP(copy.deepcopy(copied))
    """,
    """
    update(o_needless, needless(x).mean())
    update(o_bypassed, bypassed.module(x).mean())
    o_unwrapped.zero_grad()
    unwrapped(x).mean().backward()  # DDP207
    o_unwrapped.step()
    loss = again(x).pow(2).mean()
    o_again.zero_grad()
    loss.backward(retain_graph=True)
    loss.backward()  # DDP220
    o_again.step()
    with never.no_sync():  # DDP217
        o_never.zero_grad()
        never(x).mean().backward()
        o_never.step()
    loss = late(x).mean()
    o_late.zero_grad()
    with late.no_sync():  # DDP217
        loss.backward()
    o_late.step()
    loss = taken(x).pow(2).mean()
    for p, g in zip(taken.parameters(), torch.autograd.grad(loss, list(taken.parameters()))):  # DDP220
        p.grad = g
    o_taken.step()
    update(o_headed, headed(x).mean())
    update(o_copied, copied(x).mean())
    """,
    "",
)
PARTED = (
    """
    summed = DDP(Net())
    o_summed = sgd(summed)
    twice = DDP(DDP(Net()))  # DDP218
    o_twice = sgd(twice)
    thawing = Net()
    thawing[0].requires_grad_(False)
    thawed = DDP(thawing)  # DDP213
    thawing[0].requires_grad_(True)
    o_thawed = sgd(thawed)
    moved = DDP(Net())  # DDP208
    if rank == 0:
        with torch.no_grad():
            moved.module[0].weight.add_(1.0)
    o_moved = sgd(moved)
    norm = DDP(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))  # DDP205
    o_norm = sgd(norm)
    torch.manual_seed(0)
    unwrapped = Net()
    o_unwrapped = sgd(unwrapped)
    resumed = DDP(Net())
    o_resumed = sgd(resumed, momentum=0.9)
    grown = Net()
    o_grown = sgd(grown)
    grown.append(nn.Linear(1, 1))
    grown = DDP(grown)
    if rank == 0:
        state = o_resumed.state_dict()
        state["param_groups"][0]["momentum"] = 0.5
        o_resumed.load_state_dict(state)  # DDP221
    """,
    """
    summed(x).mean().backward()  # DDP204
    if (i + 1) % 2 == 0:
        o_summed.step()  # DDP216
        o_summed.zero_grad()
    update(o_twice, twice(x).mean())
    update(o_thawed, thawed(x).mean())
    update(o_moved, moved(x).mean())
    update(o_norm, norm(x).mean())
    o_unwrapped.zero_grad()
    unwrapped(x).mean().backward()  # DDP214
    o_unwrapped.step()
    update(o_resumed, resumed(x).mean())
    update(o_grown, grown(x).mean())
    if i == 500:
        o_grown.add_param_group({"params": list(grown.module[3].parameters())})
    """,
    """
    freezing = Net()
    frozen = DDP(freezing)  # DDP213
    freezing[0].requires_grad_(False)
    converted = DDP(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))  # DDP219
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(converted)
    for model in (frozen, frozen, converted):
        with contextlib.suppress(RuntimeError, ValueError):
            model(x).mean().backward()
    summed.rehearse_line(x)  # DDP215
    """,
)
CORRECT = (
    """
    accumulated, searched, heads = DDP(Net()), DDP(Heads(), find_unused_parameters=True), DDP(Heads())
    generator, critic, attacked, split = DDP(nn.Linear(4, 4)), DDP(Net()), DDP(Net()), DDP(Net())
    probed = DDP(Net())
    o_probed = sgd(probed.module[2])
    adapted = Net()
    o_adapted = [sgd(adapted)]
    adapted.append(nn.Linear(1, 1))
    adapted = DDP(adapted)
    o_adapted += [sgd(adapted.module[3])]
    nudged = Net()
    o_nudged = sgd(nudged)
    nudged[2] = nn.Linear(8, 1)
    nudged = DDP(nudged)
    half_frozen = Net()
    half_frozen[0].requires_grad_(False)
    tuned = DDP(half_frozen)
    checkpointed = DDP(Shared(), static_graph=True)
    rewrapped = DDP(DDP(Net()).module)
    o_rewrapped = sgd(rewrapped)
    torch.manual_seed(5)
    by_hand, interval = Net(), DDP(Net())
    o_accumulated, o_searched, o_heads = sgd(accumulated), sgd(searched), sgd(heads)
    o_generator, o_critic, o_attacked, o_tuned = sgd(generator), sgd(critic), sgd(attacked), sgd(tuned)
    o_split = [sgd(split.module[0]), sgd(split.module[2])]
    o_by_hand, o_interval, o_checkpointed = sgd(by_hand), sgd(interval), sgd(checkpointed)
    schedule = torch.optim.lr_scheduler.StepLR(o_accumulated, 1, 0.5)
    o_accumulated.load_state_dict(o_accumulated.state_dict())
    schedule.load_state_dict(schedule.state_dict())
    """,
    """
    last = (i + 1) % 2 == 0
    with contextlib.nullcontext() if last else accumulated.no_sync():
        accumulated(x).mean().backward()
    if last:
        o_accumulated.step()
        o_accumulated.zero_grad()
        schedule.step()
    update(o_searched, searched(x)[i % 2].mean())
    update(o_rewrapped, rewrapped(x).mean())
    a, b = heads(x)
    o_heads.zero_grad()
    a.mean().backward()
    b.mean().backward()
    o_heads.step()
    critic.requires_grad_(False)
    update(o_generator, critic(generator(x)).mean())
    critic.requires_grad_(True)
    update(o_critic, critic(x).mean() - critic(generator(x).detach()).mean())
    noisy = x.clone().requires_grad_(True)
    attacked.module(noisy).sum().backward()
    inputs = x.clone().requires_grad_(True)
    out = attacked(inputs)
    (slope,) = torch.autograd.grad(out.sum(), inputs, create_graph=True)
    update(o_attacked, out.mean() + slope.pow(2).mean())
    update(o_tuned, tuned(x).mean())
    update(o_checkpointed, checkpointed(x).mean())
    for optimizer in o_split:
        optimizer.zero_grad()
    split(x).mean().backward()
    for optimizer in o_split:
        optimizer.step()
    update(o_probed, probed(x).mean())
    o_adapted[1].zero_grad()
    update(o_adapted[0], adapted(x).mean())
    o_adapted[1].step()
    nudged.zero_grad()
    nudged(x).mean().backward()
    o_nudged.step()
    with torch.no_grad():
        for p in nudged.module[2].parameters():
            p -= 0.1 * p.grad
    o_by_hand.zero_grad()
    by_hand(x).mean().backward()
    for p in by_hand.parameters():
        dist.all_reduce(p.grad)
    o_by_hand.step()
    with interval.no_sync():
        update(o_interval, interval(x).mean())
    if i == 500:
        for p in interval.parameters():
            dist.all_reduce(p.data)
            p.data /= 2
    """,
    "",
)


def examined(
    parts: tuple[str, str, str], directory: Path, samples: int = 200, batch: int = 20
) -> tuple[Examination, list[str]]:
    text = FRAME.replace("SAMPLES", str(samples)).replace("BATCH", str(batch))
    for name, part, depth in zip(("SETUP", "STEP", "AFTER"), parts, (4, 12, 4), strict=True):
        body = textwrap.dedent(part).strip()
        text = text.replace(name, body.replace("\n", "\n" + " " * depth))
    script = directory / "train.py"
    script.write_text(HEAD + text)
    return examine(script), script.read_text().splitlines()


def marked(lines: list[str]) -> set[tuple[str, int]]:
    """Code and line of each line that says which check has to speak about it."""
    comments = ((line.rpartition("# ")[2], number) for number, line in enumerate(lines, 1))
    return {(comment, number) for comment, number in comments if comment.startswith("DDP")}


def heard(examination: Examination) -> set[tuple[str, int]]:
    """Code and line of what the run said of gradients."""
    return {
        (finding.code, finding.locations[0].line)
        for finding in examination.findings
        if finding.code.startswith("DDP2") and "rehearsal" in finding.basis
    }


def test_what_goes_wrong_without_a_word_is_proved(tmp_path: Path) -> None:
    examination, lines = examined(SILENT, tmp_path)
    bypass = ("DDP207", next(number for number, line in enumerate(lines, 1) if line.strip() == "loss.backward()"))
    assert heard(examination) == marked(lines) | {bypass}
    assert examination.rehearsal.status == "completed"


def test_replicas_that_part_and_models_that_change_are_proved(tmp_path: Path) -> None:
    examination, lines = examined(PARTED, tmp_path, samples=24, batch=4)
    assert heard(examination) == marked(lines)


def test_a_large_module_beside_the_script_hides_no_call(tmp_path: Path) -> None:
    # 2.2 MB were as much as was searched for calls that may yet give an optimizer what it lacks.
    (tmp_path / "table.py").write_text(f'NUMBERS = """{"1234567 " * 275_000}"""\n', encoding="utf-8")
    setup = """
    import table
    grown = Net()
    o_grown = sgd(grown)
    grown.append(nn.Linear(1, 1))
    grown = DDP(grown)
    """
    step = """
    update(o_grown, grown(x).mean())
    if i == 500:
        o_grown.add_param_group({"params": list(grown.module[3].parameters())})
    """
    assert heard(examined((setup, step, ""), tmp_path, samples=24, batch=4)[0]) == set()


def test_correct_twins_are_silent(tmp_path: Path) -> None:
    examination, _ = examined(CORRECT, tmp_path)
    assert heard(examination) == set()
    assert examination.rehearsal.status == "completed"
    assert not [finding.title for finding in examination.findings if finding.severity.value != "advice"]


def test_a_gradient_that_comes_twice_is_named(tmp_path: Path) -> None:
    setup = "model = DDP(Shared())\noptimizer = sgd(model)"
    examination, _ = examined((setup, "update(optimizer, model(x).mean())", ""), tmp_path)
    (finding,) = [finding for finding in examination.findings if "rehearsal" in finding.basis]
    assert finding.code == "DDP210"
    assert finding.title == "the gradient of layer.bias arrived twice in one backward: reentrant checkpoints share it"


PARTS = (
    """
    class Fork(Heads):
        def forward(self, x, way):
            return self.b(x) if way else self.a(x)
    torch.manual_seed(3)
    apart, middle = DDP(Fork(), find_unused_parameters=True), DDP(Fork(), find_unused_parameters=True)
    flagged, lone = DDP(Fork(), find_unused_parameters=True), DDP(Fork(), find_unused_parameters=True)
    within, idle = DDP(Fork(), find_unused_parameters=True), nn.ModuleList([Fork(), Fork()])
    idle = DDP(idle[0], find_unused_parameters=True)  # DDP201
    models = [apart, middle, flagged, lone, within, idle]
    optimizers = [sgd(model) for model in models]
    """,
    """
    last = (i + 1) % 2 == 0
    flagged.require_backward_grad_sync = last
    with contextlib.ExitStack() as local:
        for model in models if not last else ():
            if model is not flagged:
                local.enter_context(model.no_sync())
        apart(x, int(last)).mean().backward()
        if not last:
            middle(x, 1).mean().backward()
        middle(x, 0).mean().backward()
        flagged(x, int(last)).mean().backward()
        lone(x, int(rank == 1 and not last)).mean().backward()
        if last:
            with within.no_sync():
                within(x, 1).mean().backward()
        within(x, 0).mean().backward()
        idle(x, 0).mean().backward()
    if last:
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    """,
    "",
)


def test_what_a_pass_without_synchronisation_uses_is_used(tmp_path: Path) -> None:
    """DDP's search remembers what was used under no_sync, and averages it in the pass that synchronises."""
    examination, lines = examined(PARTS, tmp_path)
    assert heard(examination) == marked(lines)


BUFFERS = (
    """
    class Held(nn.Module):
        def __init__(self, change):
            super().__init__()
            self.layer, self.change = nn.Linear(4, 4), change
            self.register_buffer("kept", torch.zeros(4))
        def forward(self, x):
            y = self.layer(x) + self.kept
            with torch.no_grad():
                self.change(self, x)
            return y
    def average(held, x):
        held.kept.mul_(0.9).add_(x.mean(0), alpha=0.1)
    def assign(held, x):
        held.kept = 0.9 * held.kept + 0.1 * x.mean(0)
    def drift(held, x):
        held.kept.lerp_(x.std(0), 0.01)
    def largest(held, x):
        held.kept = torch.maximum(held.kept, x.abs().amax(0))
    def queue(held, x):
        held.kept[:-1] = held.kept[1:].clone()
        held.kept[-1] = x[0, 0]
    def usage(held, x):
        held.kept += torch.bincount(x.argmax(1), minlength=4)
    def reduced(held, x):
        mean = x.mean(0)
        dist.all_reduce(mean)
        held.kept.mul_(0.9).add_(mean / dist.get_world_size(), alpha=0.1)
    def count(held, x):
        held.kept += 1
    torch.manual_seed(7)
    models = []
    models.append(DDP(Held(average)))  # DDP208
    models.append(DDP(Held(assign)))  # DDP208
    models.append(DDP(nn.Sequential(nn.Linear(4, 4), Held(drift))))  # DDP208
    models.append(DDP(Held(largest)))  # DDP208
    models.append(DDP(Held(queue)))  # DDP208
    models.append(DDP(Held(usage)))  # DDP208
    models.append(DDP(Held(reduced)))
    models.append(DDP(Held(count)))
    models.append(DDP(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))))
    optimizers = [sgd(model) for model in models]
    torch.manual_seed(rank)
    """,
    """
    for model, optimizer in zip(models, optimizers):
        update(optimizer, model(x).mean())
    """,
    "",
)


def test_what_other_ranks_than_the_first_add_to_a_buffer_is_lost(tmp_path: Path) -> None:
    examination, lines = examined(BUFFERS, tmp_path)
    assert {entry for entry in heard(examination) if entry[0] == "DDP208"} == marked(lines)
    assert not [finding.title for finding in examination.findings if finding.severity.value != "advice"]
