"""The epoch does not reach what orders or makes the samples, so that every epoch is the same.

What it finds
    A shuffling sampler that shards by rank, or an own one derived from it, used for more than one training pass without
    `set_epoch`, made anew for each pass, or told the epoch on some ranks only. In a run two passes that draw the same
    indices in the same order. Also a data set that is told the epoch while its loader keeps its workers
    (persistent_workers): they hold copies of it that were made before the first epoch.

Why it is bad
    The sampler derives its shuffle from its seed and its epoch number, which stays 0. Every epoch then shows each rank
    the same samples in the same order, in the same batches; ranks never exchange samples.

Example
    sampler = DistributedSampler(dataset)
    for epoch in range(epochs):
        for batch in loader: ...

Remedy
    Call sampler.set_epoch(epoch) at the start of each epoch. Keep the epoch of a data set in memory that workers
    share, as torch.zeros(1).share_memory_() is, or let the workers start anew.

When it is wrong
    If a fixed order is intended, for instance to overfit a few batches; shuffle=False states that.

References
    https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddpdoctor.check import Check, Script, TooLittleEvidence
from ddpdoctor.checks.data.epochs_source import KEPT_COPIES, ForgottenEpoch, forgotten_epochs
from ddpdoctor.finding import Finding, Location, Severity
from ddpdoctor.fix import Edit, Fix, first_in_body, fix_of
from ddpdoctor.source.events import Event, LoopAround
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.script.module import Module, Scope, last_name

# The fix of a sampler that is never told the epoch.

_COUNTING = frozenset({"range", "trange"})
# Progress bars: they yield what they are given.
_WRAPPING = frozenset({"tqdm", "track"})


def set_epoch_fix(forgotten: ForgottenEpoch, finding: Finding) -> Iterator[Fix]:
    """Call ``set_epoch`` first thing in the loop of epochs.

    Nothing is offered unless the loop counts with one name, and the sampler has one name, is bound to it once, and is
    certainly bound before the loop.
    """
    module, loop = forgotten.epochs.module, forgotten.epochs.node
    if forgotten.sampler.module is not module or not isinstance(loop, ast.For):
        return
    epoch, sampler = counter_of(loop), name_bound_before(module, forgotten.sampler.node, loop)
    if not epoch or not sampler:
        return
    call = f"{sampler}.set_epoch({epoch})"
    edit = first_in_body(module, loop.body, call)
    yield from fix_of(finding, f"call {call} at the start of each epoch", edit, safe=True)


def set_epoch_through(module: Module, loader: ast.AST, around: LoopAround, attribute: str) -> Edit | None:
    """Return the call of ``set_epoch`` on the sampler of a loader with a name; None as ``set_epoch_fix``."""
    loop = around.node
    if around.module is not module or not isinstance(loop, ast.For):
        return None
    epoch, name = counter_of(loop), name_bound_before(module, loader, loop)
    return first_in_body(module, loop.body, f"{name}.{attribute}.set_epoch({epoch})") if epoch and name else None


def counter_of(loop: ast.For) -> str:
    """Return the name that counts the epochs; empty when the loop does not count, or counts in another variable."""
    iterable: ast.expr = loop.iter
    while isinstance(iterable, ast.Call) and last_name(iterable.func) in _WRAPPING and iterable.args:
        iterable = iterable.args[0]
    if isinstance(iterable, ast.Call) and last_name(iterable.func) in _COUNTING and isinstance(loop.target, ast.Name):
        return loop.target.id
    return ""


def name_bound_before(module: Module, node: ast.AST, loop: ast.For) -> str:
    """Return the name that an object is bound to, once, before a loop and in its block or one around it; or empty."""
    statement = module.parents.get(node)
    if not isinstance(statement, ast.Assign) or statement.value is not node or len(statement.targets) != 1:
        return ""
    target = statement.targets[0]
    if not isinstance(target, ast.Name) or not _precedes(module, statement, loop):
        return ""
    scope = _scope(module, loop)
    if _scope(module, statement) is not scope:
        return ""
    bindings = [
        name
        for name in ast.walk(scope)
        if isinstance(name, ast.Name) and name.id == target.id and not isinstance(name.ctx, ast.Load)
    ]
    return target.id if len(bindings) == 1 else ""


def _precedes(module: Module, statement: ast.stmt, loop: ast.For) -> bool:
    """Return whether the statement stands above the loop, or what is around it, in the same list of statements."""
    around = {loop, *module.ancestors(loop)}
    parent = module.parents.get(statement)
    for name in ("body", "orelse", "finalbody"):
        block = getattr(parent, name, None)
        if isinstance(block, list) and statement in block:
            return any(later in around for later in block[block.index(statement) + 1 :])
    return False


def _scope(module: Module, node: ast.AST) -> ast.AST:
    return next((around for around in module.ancestors(node) if isinstance(around, Scope)), module.tree)


CHECK = Check(
    code="DDP102",
    name="missing-set-epoch",
    severity={"source": Severity.WARNING, "rehearsal": Severity.WARNING, "run": Severity.WARNING},
    needs=frozenset({"loaders", "passes"}),
    subjects=("sampler", "training-loader"),
    triggers=("DistributedSampler", "persistent_workers"),
)


def in_source(script: Script) -> Iterator[Finding]:
    """Report loaders under a shuffling DistributedSampler that is never told the epoch.

    Raises TooLittleEvidence for one that code which was not read gets in every epoch.
    """
    unread = ""
    for forgotten in forgotten_epochs(whole_projection(script)):
        if forgotten.unread:
            unread = forgotten.unread
            continue
        loader, sampler, epochs = forgotten.loader, forgotten.sampler, forgotten.epochs
        yield CHECK.finding(
            _title(forgotten),
            remedy="Call sampler.set_epoch(epoch) at the start of every epoch, before the loop over the loader.",
            locations=(loader.location, _made_at(sampler)),
            because=(
                "this loop makes the sampler anew in every turn, of the same data and with the same seed"
                if forgotten.anew
                else "this loop iterates over the loader several times and never sets the sampler's epoch"
                if forgotten.told != "on some ranks"
                else "this loop sets the sampler's epoch under a test that not all ranks pass",
                epochs.module.head_location(epochs.node),
            ),
        )
    if _keeps_workers(script):
        yield from _of_workers(script)
    if unread:
        raise TooLittleEvidence(unread)


def _keeps_workers(script: Script) -> bool:
    return any("persistent_workers" in module.text for module in script.modules)


def _of_workers(script: Script) -> Iterator[Finding]:
    """Report data sets that are told the epoch in the rank's own process while workers keep copies of them."""
    from ddpdoctor.checks.data.workers_source import stale_copies

    for stale in stale_copies(whole_projection(script)):
        setting = stale.setting
        yield CHECK.finding(
            f"the workers of this DataLoader never see `{setting.name}` set anew: they are kept, with the copies of "
            "the data set that they started with",
            remedy=KEPT_COPIES,
            locations=stale.feeding.loader.location,
            because=(
                (
                    f"this sets `{setting.name}` of {stale.reader} in the rank's own process alone, and the items are "
                    "made with it",
                    setting.location,
                ),
                ("this loop has more than one epoch", stale.epochs.module.head_location(stale.epochs.node)),
            ),
        )


def _made_at(sampler: Event) -> Location:
    """Return where a sampler is made; of a class of the project, where that is called."""
    inside = sampler.function.endswith(".__init__") and len(sampler.chain) > 1
    return Location(file=sampler.chain[1].file, line=sampler.chain[1].line) if inside else sampler.location


def _title(forgotten: ForgottenEpoch) -> str:
    if forgotten.told == "on some ranks":
        return (
            "only some ranks tell this DataLoader's DistributedSampler the epoch: from the second on the ranks divide "
            "different orders between them, so that samples are missed and others come several times"
        )
    how = "whose epoch is never set" if forgotten.told == "never" else "that is given the same epoch every time"
    return f"this DataLoader is shuffled by a DistributedSampler {how}, so every epoch has the same order"


def fixes(script: Script, finding: Finding) -> Iterator[Fix]:
    """Offer to tell the sampler the epoch, or to let workers start anew that keep the first."""
    if _keeps_workers(script):
        from ddpdoctor.checks.data.workers_source import new_workers, stale_copies

        for stale in stale_copies(whole_projection(script)):
            if stale.feeding.loader.location == finding.location:
                yield from new_workers(stale, finding)
    for forgotten in forgotten_epochs(whole_projection(script)):
        plain = not (forgotten.unread or forgotten.anew or forgotten.told == "on some ranks")
        if plain and forgotten.loader.location == finding.location:
            yield from set_epoch_fix(forgotten, finding)


in_run = CHECK.judged_by(
    "checks.data.sharding_run",
    "judge_epochs",
    "Call sampler.set_epoch(epoch) at the start of every epoch, before the loop over the loader.",
)
