"""The ranks' replicas of one model are no longer the same.

What it finds
    Parameters that DDP manages and that differ between ranks, although their gradients were averaged: after a
    synchronised optimizer step, or before the first one. The first parameter and step are named. Parameters that DDP
    ignores, wraps with a communication hook and steps under no_sync() are excluded, and where a more specific check
    knows the reason, only that one reports. Of a job that averages by its own code, the parameters whose gradients are
    the same on all ranks: they may differ from the start, since nothing has broadcast them; likewise the replicas of
    shards that a mesh keeps. Buffers too, but the statistics of norms, where DDP does not broadcast them (warning), or
    sends rank 0's over what the others have made of theirs (advice), and a ReduceLROnPlateau that the ranks step with
    different values, which leads there in some epoch that a rehearsal does not reach. In a live run digests of all
    parameters are compared every 100 steps, and of three ranks or more the odd one is named. In the source: the same of
    a loss that each rank takes from its own part of the data, or that one rank alone has evaluated, or a learning rate,
    or a number that changes gradients or parameters, that each rank makes of its own batches or clock; and a scheduler
    or an optimizer that steps, a learning rate that is set, parameters that are frozen, weights that are loaded after
    the wrap, or gradients or parameters that are changed in place, on some ranks only; or such a change, a rate or a
    schedule by the number of the rank, or decided by its own batches; and replicas of shards, or models along a
    dimension of a mesh that nothing uses, that are made after seeds of the ranks' own.

Why it is bad
    DDP averages gradients and never compares weights, and no more does an average by hand. With different weights, the
    averaged gradient fits none of the replicas: training degrades, and rank 0 saves a model that was never trained as
    such.

Example
    model = DistributedDataParallel(net)
    if rank == 0:
        model.module.load_state_dict(torch.load("last.pt"))     # after the wrap: the others never get it

Remedy
    Load and initialise before the wrap, or on every rank; without a wrap, broadcast rank 0's parameters. Give all ranks
    the same learning rate, averaging the loss that a scheduler is stepped with, and change gradients after backward in
    the same way everywhere.

When it is wrong
    If the ranks are meant to diverge for a while (local SGD) in a way that was not recognised.

References
    https://docs.pytorch.org/docs/stable/notes/ddp.html#internal-design
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from ddpdoctor.check import AVERAGING, Check, RunRecord, Script, TooLittleEvidence, Via
from ddpdoctor.finding import Finding, Refuted, Severity
from ddpdoctor.source.events import Event, Guard, Skip
from ddpdoctor.source.interpreter.values import (
    ALL_RANKS,
    DRAWN,
    NONE,
    RANKS,
    REDUCED,
    Const,
    ExternalObject,
    Instance,
    PerRank,
    Value,
    constant,
    options_of,
    tags_of,
)
from ddpdoctor.source.projection import Projection, whole_projection
from ddpdoctor.source.queries.divergence import guard_of
from ddpdoctor.source.queries.job_kind import is_distributed
from ddpdoctor.source.queries.wrapped_models import (
    PARAMETERS,
    averages_by_hand,
    has_no_tensors,
    holders,
    innermost_loop,
    is_ddp,
    is_optimizer,
    numbers_of,
    reaches_unread,
    stepped,
    steps,
    training_events,
    value_of_root,
)
from ddpdoctor.source.ranks.random_numbers import differs
from ddpdoctor.source.script.module import Module, descend, last_name
from ddpdoctor.source.script.script import uses_part
from ddpdoctor.source.torch_model.recorded_calls import (
    CHANGED,
    DRAWN_ANEW,
    GROUP_SETTINGS,
    SET_PARAM_GROUP,
    SET_REQUIRES_GRAD,
    differ_by_rank,
    is_in_place,
    is_own,
)

CHECK = Check(
    code="DDP208",
    name="diverged-replicas",
    severity={"source": Severity.WARNING, "rehearsal": Severity.ERROR, "run": Severity.ERROR},
    needs=AVERAGING | {"collectives", "parameter_digests", "training_states"},
    needs_live=frozenset({"wraps", "replica_digests"}),
    subjects=("training",),
    triggers=(
        "DistributedDataParallel",
        "ReduceLROnPlateau",
        "ccelerat",
        "Fabric",
        "auto_model",
        "device_mesh",
        "DeviceMesh",
    ),
)
_DRIFTED = (
    "Look for code that changes parameters, optimizer state or the learning rate on some ranks only; where there is "
    "none, suspect the memory of the odd rank's GPU, or a kernel that is not deterministic."
)


def in_source(script: Script) -> Iterator[Finding | Refuted]:
    """Report what ranks change apart, by a plateau of their own or because only some come there, or begin apart."""
    yield from lone_changes(whole_projection(script))
    yield from own_plateaus(whole_projection(script))
    yield from own_settings(whole_projection(script))
    yield from own_numbers(whole_projection(script))
    yield from own_decisions(whole_projection(script))
    if uses_part(script, ("DeviceMesh", "device_mesh")):
        from ddpdoctor.checks.gradients.begin_apart_source import begin_apart

        yield from CHECK.judged("source", begin_apart(whole_projection(script)))


_LONE = {
    "schedule": ("the learning-rate scheduler steps on {ranks} only, so the ranks train with different rates", "Step"),
    "step": ("the optimizer steps on {ranks} only, so the parameters of the others stay what they were", "Step"),
    "setting": ("a setting of the optimizer changes on {ranks} only, so equal gradients change models apart", "Set it"),
    "freeze": (
        "parameters are frozen or unfrozen on {ranks} only: DDP fails when it compares the models, or ranks wait for "
        "gradients that others do not send",
        "Freeze the same parameters",
    ),
    "load": ("weights are loaded on {ranks} only, after DDP made the replicas alike", "Load"),
    "gradients": (
        "gradients are changed on {ranks} only, after DDP made them the same: the ranks take different steps",
        "Change them",
    ),
    "parameters": ("parameters are changed on {ranks} only, after DDP made the replicas alike", "Change them"),
}
_CLIPS = frozenset({"clip_grad_norm_", "clip_grad_value_"})
# Of a scheduler they change nothing that it gives: who prints, and where a resumed one stands.
_NO_RATE = frozenset({"optimizer", "verbose", "last_epoch"})


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report the first moment at which replicas differ."""
    from ddpdoctor.checks.gradients.diverged_run import (
        diverged_replicas,
        hand_kept_replicas,
        own_buffers,
        plateaus_apart,
        sharded_replicas,
    )
    from ddpdoctor.diagnosis.training.replicas import drifted_digests

    if record.job.kind == "run":
        if not record.replica_digests:
            raise TooLittleEvidence("parameters are compared every 100 steps of the optimizers, and there were fewer")
        yield from CHECK.judged("run", drifted_digests(record), _DRIFTED)
        return
    by_plateaus = plateaus_apart(record, OWN_PLATEAU, REDUCED_PLATEAU)
    of_wraps = (*diverged_replicas(record), *own_buffers(record))
    by_hand = (*hand_kept_replicas(record), *sharded_replicas(record))
    yield from CHECK.judged(record.job.kind, (*of_wraps, *by_hand, *by_plateaus))


OWN_PLATEAU = (
    "each rank lowers its learning rate by its own loss: "
    "once the rates differ, equal gradients lead to different models"
)
REDUCED_PLATEAU = (
    "Average the value over the ranks with dist.all_reduce, on all ranks, before passing it to the scheduler."
)
_LONE_SCORE = (
    "only some ranks step the plateau with a score that they computed, and the others with a constant: "
    "once the rates differ, equal gradients lead to different models"
)
_SCORE_SENT = (
    "Send the score to every rank with dist.broadcast, or broadcast_object_list, before passing it to the scheduler."
)
PLATEAU = "torch.optim.lr_scheduler.ReduceLROnPlateau"
# Words of scripts whose metrics may be reduced where it cannot be read.
_REDUCERS = ("torchmetrics", "all_avg", "dist_mean")


def own_plateaus(projection: Projection) -> Iterator[Finding]:
    """Steps of a ``ReduceLROnPlateau`` on every rank with a value of the rank's own batches, each once."""
    script = projection.machine.script
    if (
        not uses_part(script, (PLATEAU.rpartition(".")[2],))
        or not is_distributed(projection)
        or uses_part(script, _REDUCERS)
    ):
        return
    from ddpdoctor.source.queries.rank_logging import communicates, is_local, is_of_whole_set

    seen: set[ast.AST] = set()
    for event in training_events(projection, "step"):
        options = () if event.receiver is None else options_of(event.receiver)
        metric = event.argument("metrics", 0)
        if (
            event.node in seen
            or event.ranks != ALL_RANKS
            or metric is None
            or not (is_local(metric) or REDUCED in tags_of(metric) or _is_of_some(metric))
        ):
            continue
        is_plateau = bool(options) and all(isinstance(one, ExternalObject) and one.name == PLATEAU for one in options)
        of_some = _is_of_some(metric)
        alike = not of_some and is_of_whole_set(projection, metric)
        agreed = alike or communicates(projection, event) or _may_be_agreed(projection, event, event.module, event.node)
        if is_plateau and not agreed:
            seen.add(event.node)
            yield CHECK.finding(
                _LONE_SCORE if of_some else OWN_PLATEAU,
                remedy=_SCORE_SENT if of_some else REDUCED_PLATEAU,
                locations=event.location,
                because=(_why(metric, "batches"), event),
            )


def own_settings(projection: Projection) -> Iterator[Finding]:
    """What every rank makes of its own batches, clock or part of the data: settings of optimizers, and the numbers by
    which gradients or parameters are changed; each once.
    """
    if uses_part(projection.machine.script, _REDUCERS):
        return
    seen: set[ast.AST] = set()
    for event in projection.in_course("call", "training"):
        if event.node in seen or event.ranks != ALL_RANKS:
            continue
        given = event.positional[1:] if event.name == SET_PARAM_GROUP else (*event.positional, *event.named.values())
        value = next((one for one in given if is_own(one) or _is_of_some(one)), None)
        if event.name != SET_PARAM_GROUP and any(DRAWN in tags_of(one) for one in given):
            continue  # Numbers that are drawn are told of by themselves.
        what = _what(projection, event) if value is not None else ""
        if value is None or what not in _SET:
            continue
        from ddpdoctor.source.queries.rank_logging import communicates, is_of_whole_set

        seen.add(event.node)
        agreed = communicates(projection, event) or _may_be_agreed(projection, event, event.module, event.node)
        by_hand = what != "setting" and averages_by_hand(projection.machine.script)
        if not is_of_whole_set(projection, value) and not agreed and not by_hand:
            does, this = _SET[what]
            key = f"`{constant(event.positional[0])}`" if what == "setting" else ""
            yield CHECK.finding(
                f"each rank {does.format(key)} by what it alone has: equal gradients lead to different models",
                remedy=f"Make {this.format(key)} of the number of the step, or of a value that dist.all_reduce has "
                "made the same on all ranks.",
                locations=event.location,
                because=(_why(value), event),
            )


# Which changes of a replica are made by a number, and what makes them the same on all ranks.
_SET = {
    "setting": ("sets {} of its optimizer", "{}"),
    "gradients": ("changes the gradients", "that number"),
    "parameters": ("changes the parameters", "that number"),
}


def _why(value: Value, origin: str = "batches or clock") -> str:
    """Return why a value is not the same on all ranks."""
    if _is_of_some(value):
        return "what some ranks alone have computed decides this value"
    if REDUCED in tags_of(value):
        return "dist.reduce makes this value whole on one rank alone"
    return f"this value comes from the rank's own {origin}, and was not reduced"


def _is_of_some(value: Value) -> bool:
    """Return whether a value is a constant on some ranks, and computed on the others."""
    lanes = value.values if isinstance(value, PerRank) and not value.guessed else ()
    known = [isinstance(one, Const) for one in lanes]
    return any(known) and not all(known)


def _leaves(module: Module, test: ast.AST) -> bool:
    """Return whether what a condition decides ends in a jump out of a loop: what the others wait in comes after it.

    Who goes on with the next turn, or returns from a function that is called in one, meets them there.
    """
    branch = module.parents.get(test)
    last = branch.body[-1] if isinstance(branch, ast.If) else None
    if isinstance(last, ast.Return):
        return any(isinstance(one, (ast.For, ast.While)) for one in module.in_function(test))
    return isinstance(last, (ast.Break, ast.Raise))


# What each rank may do or not, by what it alone has.
_DECIDED = {
    "step": "its optimizer steps",
    "schedule": "its scheduler steps",
    "setting": "a setting of its optimizer changes",
    "gradients": "gradients are changed",
    "parameters": "parameters are changed",
}


def own_decisions(projection: Projection) -> Iterator[Finding]:
    """Changes of a replica that each rank makes or not by its own batches or clock, where no rank waits for it."""
    if uses_part(projection.machine.script, _REDUCERS):
        return
    waited_for = list(projection.in_course("backward", "collective", "ddp-forward"))
    told = {test for event in waited_for for _, test in event.undecided}
    told |= {skip.test for event in waited_for for skip in event.skips}
    seen: set[ast.AST] = set()
    # A step that is left out is told before what is left out with it.
    for event in sorted(projection.in_course("call", "training"), key=lambda one: one.name != "step"):
        if event.ranks != ALL_RANKS or event.node in seen or not (event.deciding or event.skips):
            continue
        later = any(one.ordinal > event.ordinal and innermost_loop(one) is innermost_loop(event) for one in waited_for)
        around = [Skip(*condition, value) for condition, value in zip(event.undecided, event.deciding, strict=False)]
        for skip in (*around, *event.skips):
            module, test, value, _ = skip
            what = _DECIDED.get(_what(projection, event)) if test not in told and is_own(value) else None
            if what is None or (skip not in event.skips and later and _leaves(module, test)):
                continue  # Ranks that leave miss what the others wait in, of which another check speaks.
            if (skip in event.skips and event.name == "zero_grad") or _may_be_agreed(projection, event, module, test):
                continue  # What was not cleared is cleared before the next backward, mostly.
            from ddpdoctor.source.queries.rank_logging import communicates, is_of_whole_set

            if is_of_whole_set(projection, value) or communicates(projection, event):
                continue
            seen.add(event.node)
            told.add(test)
            condition, left = module.excerpt(test, 60), skip.holds and skip in event.skips
            yield CHECK.finding(
                f"each rank decides by what it alone has whether {what}: equal gradients lead to different models",
                remedy="Decide alike on every rank: average what the condition asks with dist.all_reduce before it, on "
                "all ranks.",
                locations=event.location,
                because=(
                    (f"`{condition}` decides: {_why(value)}", module.location(test)),
                    (f"only ranks for which it {'does not hold' if left else 'holds'} come here", event),
                ),
            )
            break


def _may_be_agreed(projection: Projection, event: Event, module: Module, node: ast.AST) -> bool:
    """Return whether ranks may agree on what they have, or one of them hand it on to the others after an event."""
    if any(one.ordinal > event.ordinal for one in projection.in_course("collective") if _hands_on(one)):
        return True
    from ddpdoctor.source.queries.origins import may_be_agreed

    return may_be_agreed(projection.machine.script.modules, module, node)


def own_numbers(projection: Projection) -> Iterator[Finding]:
    """What a rank makes of its number that the replicas have to have alike: a rate, a schedule, a clip, a weight."""
    wraps = list(projection.in_course("wrap"))
    handed_on = max((one.ordinal for one in projection.in_course("collective") if _hands_on(one)), default=0)
    if not wraps or any(wrap.ranks != ALL_RANKS or "process_group" in wrap.named for wrap in wraps):
        return
    seen = set[ast.AST]()
    for event in projection.in_course("object", "call", "training"):
        body = event.module.body_around(event.node) if event.name == DRAWN_ANEW else event.node
        what = _numbered(projection, event) if event.ranks == ALL_RANKS and body not in seen else ""
        if not what or event.ordinal < handed_on or not _is_trained_after(projection, event):
            continue
        if what == "the parameters" and (event.ordinal < wraps[0].ordinal or _may_be_alike(projection, wraps)):
            continue
        seen.add(body)
        step = next((one for one in steps(projection) if one.ordinal > event.ordinal or one.loops), event)
        is_drawn = event.name == DRAWN_ANEW or not any(map(differ_by_rank, (*event.positional, *event.named.values())))
        by_number = f"gives {what} another number, by its rank"
        how = f"changes {what} by random numbers of its own" if is_drawn else by_number
        drawn = "Draw them before DDP wraps the model, or from one seed on all ranks."
        yield CHECK.finding(
            f"each rank {how}: equal gradients lead to different models",
            remedy=drawn if is_drawn else "Give every rank the same number.",
            locations=event.location,
            severity=Severity.ERROR,
            because=(
                ("each rank draws its own here" if is_drawn else "this number depends on the rank", event),
                ("the ranks step apart here", step.location),
                ("DDP makes the replicas alike here", wraps[0].location),
            ),
        )


def _numbered(projection: Projection, event: Event) -> str:
    """Return what an event gives a number that is another one on each rank; empty where it gives none."""
    if event.name == SET_PARAM_GROUP:
        key = constant(event.positional[0])
        return f"`{key}` of its optimizer" if differ_by_rank(event.positional[1]) and _what(projection, event) else ""
    if event.name.startswith("torch.optim.") and event.complete:
        made = ExternalObject(event.ordinal, event.name)
        if has_no_tensors(made):
            moved = numbers_of(event.argument("optimizer", 0))
            given = (*event.positional[1:], *(one for name, one in event.named.items() if name not in _NO_RATE))
            return "its scheduler" if any(map(differ_by_rank, given)) and moved & _stepped_by_all(projection) else ""
        rates = {name: one for name, one in event.named.items() if name in GROUP_SETTINGS}
        rates.update({"lr": event.positional[1]} if len(event.positional) > 1 else {})
        key = next((name for name, one in rates.items() if differ_by_rank(one)), "")
        return f"`{key}` of its optimizer" if key and _holds_replica(projection, [made]) else ""
    numbers = (*event.positional, *event.named.values())
    own = any(differ_by_rank(one) or DRAWN in tags_of(one) for one in numbers)
    if event.name == DRAWN_ANEW:
        own = differs(event.named["state"])
    changed = _what(projection, event) if own else ""
    return f"the {changed}" if changed in ("gradients", "parameters") else ""


def lone_changes(projection: Projection) -> Iterator[Finding]:
    """Steps of schedulers and optimizers, settings, frozen parameters and loaded weights of some ranks of a job.

    What the other ranks change as well, elsewhere, is none; nor is what a broadcast may bring to them afterwards.
    """
    wraps = [wrap for wrap in projection.in_course("wrap") if wrap.ranks == ALL_RANKS]
    if not wraps or not any(projection.in_course("backward")):
        return
    candidates = projection.in_course("call", "training")
    changes = [(event, what) for event in candidates if (what := _what(projection, event))]
    handed_on = [event.ordinal for event in projection.in_course("collective") if _hands_on(event)]
    seen: set[ast.AST] = set()
    shown = next((one for one in steps(projection) if one.ranks == ALL_RANKS), None)
    for event, what in changes:
        guard = guard_of(projection, event)
        if event.node in seen or event.ranks in (0, ALL_RANKS) or guard is None or guard.guessed:
            continue
        others = (other for other, as_well in changes if as_well == what and other.receiver == event.receiver)
        in_turn = any(other.ranks & ~event.ranks and not other.ranks & event.ranks for other in others)
        if in_turn or any(at > event.ordinal for at in handed_on):
            continue
        backwards = (one for one in projection.in_course("backward") if one.ranks == event.ranks)
        if what == "gradients" and any(one.guards == event.guards for one in backwards):
            continue  # These ranks train alone, of which other checks speak.
        if not _is_trained_after(projection, event):
            continue  # As where the first rank loads the best weights to test them.
        wrap = next((wrap for wrap in wraps if wrap.ordinal < event.ordinal), None)
        if wrap is not None and what == "load" and _is_wrapped_later(wraps, event):
            wrap = None  # A second model beside the trained one, as to test what was saved.
        if what == "parameters" and _may_be_alike(projection, wraps):
            continue
        if what not in ("load", "parameters") or wrap:  # The constructor of DDP gives the first rank's weights to all.
            seen.add(event.node)
            apart = wrap if what in ("load", "parameters") else None
            yield _lone_change(event, guard, _LONE[what], shown, apart)


def _is_wrapped_later(wraps: Sequence[Event], event: Event) -> bool:
    """Return whether the wrap that makes alike what an event changes comes after it."""
    changed = set(numbers_of(event.receiver))
    ordinals = [one.ordinal for one in wraps if changed & set(numbers_of(one.argument("module", 0)))]
    return bool(ordinals) and min(ordinals) > event.ordinal


def _may_be_alike(projection: Projection, wraps: Sequence[Event]) -> bool:
    """Return whether a call that was not followed is given a model, and may hand one rank's parameters to all."""
    models = [
        *(wrap.argument("module", 0) for wrap in wraps),
        *(ExternalObject(one.ordinal, one.name) for one in wraps),
    ]
    return any(isinstance(one, (Instance, ExternalObject)) and reaches_unread(projection, one) for one in models)


def _hands_on(collective: Event) -> bool:
    return collective.name.startswith("broadcast")


def _lone_change(event: Event, guard: Guard, told: tuple[str, str], step: Event | None, wrap: Event | None) -> Finding:
    """Return the finding, with where a run shows the replicas apart: where every rank steps an optimizer, or where DDP
    made them alike.
    """
    from ddpdoctor.diagnosis.wording import rank_list

    title, verb = told
    ranks = rank_list(rank for rank in RANKS if event.ranks >> rank & 1)
    condition = guard.module.excerpt(guard.node, 60)
    kept_out = f"of {len(RANKS)} ranks only {ranks} comes here, by `{condition}`"
    elsewhere = step is not None and step.node is not event.node
    return CHECK.finding(
        title.format(ranks=ranks),
        remedy=f"{verb} on every rank: move it out of `if {condition}`.",
        locations=event.location,
        severity=Severity.ERROR,
        because=(
            (kept_out, Via(guard.location, event.chain)),
            *((("every rank steps the optimizer here", step.location),) if step is not None and elsewhere else ()),
            *((("DDP makes the replicas alike here", wrap.location),) if wrap is not None else ()),
        ),
    )


def _is_trained_after(projection: Projection, event: Event) -> bool:
    """Return whether a backward comes after an event, or stands in a loop with it."""
    around = {loop.node for loop in event.loops}
    return any(
        backward.ordinal > event.ordinal or any(loop.node in around for loop in backward.loops)
        for backward in projection.in_course("backward")
    )


def _what(projection: Projection, event: Event) -> str:
    """Return which state of the replicas an event changes, as ``_LONE`` has it; empty for what may not be theirs."""
    options = list(options_of(event.receiver)) if event.receiver is not None else []
    if event.name in ("requires_grad_", SET_REQUIRES_GRAD):
        return "freeze" if _is_replicated(projection, event) else ""
    if event.name == SET_PARAM_GROUP:
        numbers = {number for kind, number in tags_of(event.receiver or NONE) if kind == "param-groups"}
        return "setting" if numbers & _stepped_by_all(projection) else ""
    if event.name == "step" and options and all(isinstance(one, ExternalObject) for one in options):
        if not all(map(has_no_tensors, options)):
            return "step" if all(map(is_optimizer, options)) and _holds_replica(projection, options) else ""
        made = (projection.machine.object(one) for one in options)
        moved = {number for one in made if one is not None for number in numbers_of(one.argument("optimizer", 0))}
        return "schedule" if moved & _stepped_by_all(projection) else ""
    if event.name == "load_state_dict" and options:
        return "load" if all(_is_of_replica(projection, one) for one in options) else ""
    if event.name == "zero_grad" and options:
        held = _holds_replica(projection, options) or all(_is_of_replica(projection, one) for one in options)
        return "gradients" if held else ""
    function = event.name.rpartition(".")[2] if event.name.startswith("torch.nn.") else ""
    if event.name in (CHANGED, DRAWN_ANEW) or function in _CLIPS or (function and is_in_place(function)):
        of_gradients = function in _CLIPS or ".grad" in ast.unparse(event.node)
        of_module = event.name == DRAWN_ANEW and (
            event.receiver is None or "reset_parameters" in ast.unparse(event.node)
        )
        if of_gradients or function or of_module or _is_parameter(event):
            return ("gradients" if of_gradients else "parameters") if _is_replicated(projection, event) else ""
    return ""


def _stepped_by_all(projection: Projection) -> frozenset[int]:
    """Return the numbers of the optimizers that every rank steps somewhere."""
    return frozenset(number for step in steps(projection) if step.ranks == ALL_RANKS for number in stepped(step))


def _holds_replica(projection: Projection, options: Sequence[Value]) -> bool:
    """Return whether an optimizer holds the parameters of a model in a DDP object."""
    made = [one for option in options if (one := projection.machine.object(option)) is not None]
    held = [value for one in made for value in holders(projection, one)]
    return bool(held) and all(_is_of_replica(projection, option) for value in held for option in options_of(value))


def _is_of_replica(projection: Projection, option: Value) -> bool:
    known = isinstance(option, (ExternalObject, Instance))
    return known and (is_ddp(option) or option.number in projection.machine.wrapped)  # type: ignore[union-attr]


def _is_replicated(projection: Projection, event: Event) -> bool:
    """Return whether an event changes parameters of a model in a DDP object: of ``net`` in ``net[0].parameters()``."""
    from ddpdoctor.source.queries.origins import gone_through

    node = event.node.func if isinstance(event.node, ast.Call) else event.node
    owner: ast.expr | None = node.value if isinstance(node, ast.Attribute) else None
    if isinstance(event.node, ast.Call) and (event.name.startswith("torch.") or event.receiver is None):
        owner = event.node.args[0] if event.node.args else None
    for loop in reversed(event.loops):
        if owner is not None and isinstance(loop.node, ast.For):
            owner = gone_through(loop.node, _holding(owner)) or owner
    if owner is not None and _is_copy(event, owner):
        return False
    held = list(value_of_root(projection, event, owner)) if owner is not None else []
    return bool(held) and all(_is_of_replica(projection, option) for option in held)


def _is_parameter(event: Event) -> bool:
    """Return whether what an event changes is out of ``parameters()``, or has a name of torch's own parameters."""
    from ddpdoctor.source.queries.origins import gone_through

    node = event.node.func if isinstance(event.node, ast.Call) else event.node
    owner = _holding(node.value) if isinstance(node, ast.Attribute) else None
    if isinstance(owner, ast.Attribute):
        return owner.attr in ("weight", "bias")
    loops = (loop.node for loop in event.loops if isinstance(loop.node, ast.For))
    over = [part for loop in loops if owner is not None and (part := gone_through(loop, owner)) is not None]
    calls = (inner for part in over for inner in descend(part) if isinstance(inner, ast.Call))
    return any(last_name(call.func) in PARAMETERS for call in calls)


def _holding(node: ast.expr) -> ast.expr:
    """Return the parameter of ``parameter.grad`` or ``parameter.data``."""
    while isinstance(node, ast.Attribute) and node.attr in ("grad", "data"):
        node = node.value
    return node


def _is_copy(event: Event, owner: ast.expr) -> bool:
    """Return whether the function around an event makes a copy of what it freezes: ``self.ema = deepcopy(model)``."""
    text = ast.unparse(owner)
    for made in event.module.index.within(event.module.body_around(event.node), ast.Assign):
        copies = any(isinstance(one, ast.Call) and last_name(one.func) == "deepcopy" for one in descend(made.value))
        if copies and any(text.startswith(ast.unparse(target)) for target in made.targets):
            return True
    return False
