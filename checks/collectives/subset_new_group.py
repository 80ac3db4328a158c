"""A process group is created on some ranks only.

What it finds
    A call of `new_group` that a rank test keeps from some ranks. As a warning: a collective that a rank calls on a
    group of which it is not a member, in the source where the group leaves one out however many there are.

Why it is bad
    Every rank of the job has to call `new_group`, members or not, and in the same order: the ranks agree on the new
    group through the store. The ranks that call it wait there, in no collective, so that neither the flight recorder
    nor the watchdog of NCCL names it. A collective on a group of which the caller is not a member only warns: the
    tensor of that rank stays unchanged.

Example
    if rank in (0, 1):
        pair = dist.new_group([0, 1])       # ranks 2.. never come here

Remedy
    Call new_group on every rank and use the group on its members only; or pass use_local_synchronization=True, with
    which only members take part.

When it is wrong
    The warning, where the rank does not use the result.

References
    https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.new_group
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddpdoctor.check import Check, RunRecord, Script
from ddpdoctor.finding import Finding, Refuted, Severity
from ddpdoctor.source.events import Event, Placed
from ddpdoctor.source.interpreter.values import ALL_RANKS, ExternalObject, is_varying
from ddpdoctor.source.projection import Projection, whole_projection
from ddpdoctor.source.queries.divergence import finding_of, function_around, nodes_of, partings_by
from ddpdoctor.source.queries.shown_numbers import call_chain
from ddpdoctor.source.queries.wrapped_models import innermost_loop
from ddpdoctor.source.ranks.ranks import rank_names, size_names
from ddpdoctor.source.script.module import argument_of, descend, last_name, made_from

CHECK = Check(
    code="DDP309",
    name="subset-new-group",
    stands_for="subset-group",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.ERROR),
    needs=frozenset({"ranks", "groups", "waits", "outsider_calls"}),
    subjects=("collectives",),
    triggers=("new_group",),
)
_REMEDY = "Move new_group out of the rank test, so that every rank calls it, or pass use_local_synchronization=True."
_MEMBERS_ONLY = "Call it on members of the group only, or on a group that holds every rank that needs the result."


def in_source(script: Script) -> Iterator[Finding]:
    """Report groups that a rank test lets only some ranks make."""
    for parting in partings_by(whole_projection(script), "group"):
        yield finding_of(CHECK, parting, _REMEDY)
    for made, sentence, reason in apart(whole_projection(script)):
        yield CHECK.finding(sentence, remedy=_ALL_LISTS, locations=made.location, because=(reason, made))
    for made in repeated_groups(whole_projection(script)):
        yield CHECK.finding(
            "every iteration of this loop creates a new process group of the same ranks, and none is ever destroyed",
            remedy="Make the group once, before the loop.",
            locations=made.location,
            severity=Severity.WARNING,
        )
    for event, made in outsiders(whole_projection(script)):
        yield CHECK.finding(
            f"every rank calls {event.name} on a group without some of them, which has no effect there",
            remedy=_MEMBERS_ONLY,
            locations=event.location,
            because=("the group is made here, of some of the ranks", made.location),
            severity=Severity.WARNING,
        )


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report the ranks that wait for others in new_group, and collectives of ranks that are no members."""
    from ddpdoctor.diagnosis.divergence_kind import diverged
    from ddpdoctor.diagnosis.wording import place, rank_list, site_location, verb

    yield from diverged(CHECK, record, lambda _: _REMEDY)
    by_call: dict[tuple[str, int], set[int]] = {}
    for call in record.outsider_calls:
        by_call.setdefault((call.operation, call.site), set()).add(call.rank)
    for (operation, number), ranks in by_call.items():
        site = record.site(number)
        location = site_location(site)
        yield CHECK.finding(
            f"{rank_list(ranks)} {verb(ranks, 'calls', 'call')} {operation} at {place(site.innermost)} on a group "
            f"without {verb(ranks, 'it', 'them')}, which has no effect there",
            basis=record.job.kind,
            remedy=_MEMBERS_ONLY,
            locations=location,
            ranks=tuple(sorted(ranks)),
            severity=Severity.WARNING,
        )


# Process groups that each rank makes for itself.

_NAMED = (ast.Name, ast.Attribute)
_ALL_LISTS = (
    "Let every rank go through the lists of all groups and call new_group for each, and keep the group that holds it; "
    "or pass use_local_synchronization=True."
)


def apart(projection: Projection) -> Iterator[tuple[Event, str, str]]:
    """Calls of ``new_group`` that each rank makes for its own group only, with what is wrong and how it is known.

    That all make one does not help: the name of a group, under which its members meet, counts the calls. Groups of
    other ranks by one name find each other's addresses; of 4 ranks in two pairs, made so, 3 of 4 starts hung.
    """
    seen = {parting.event.node for parting in partings_by(projection, "group")}
    for made in projection.in_course("collective"):
        if made.name != "new_group" or made.node in seen:
            continue
        seen.add(made.node)
        alone, loops = projection.machine.groups.get(made.node, (False, []))
        if (alone and not _is_made_in_each_arm(made)) or any(loop.broken and loop.own is None for loop in loops):
            who = "only the ranks that a test of their own number lets through call new_group"
            yield made, who, "whether a rank comes here, or goes on to the next turn, depends on its number"
        elif _is_own(projection, made):
            who = "each rank calls new_group with ranks of its own, and the others with other ones"
            yield made, who, "these ranks are made from the number of the rank that calls it"


def _is_made_in_each_arm(made: Event) -> bool:
    """Return whether each arm of a condition around a call of ``new_group`` makes the same group."""
    wanted = ast.dump(argument_of(made.node, "ranks", 0) or ast.Constant(None))
    for around in made.module.in_function(made.node):
        if isinstance(around, ast.If) and around.orelse:
            other = around.body if any(made.node in descend(one) for one in around.orelse) else around.orelse
            calls = (node for one in other for node in descend(one) if isinstance(node, ast.Call))
            groups = (call for call in calls if last_name(call.func) == "new_group")
            if any(ast.dump(argument_of(one, "ranks", 0) or ast.Constant(None)) == wanted for one in groups):
                return True
    return False


def _is_own(projection: Projection, made: Event) -> bool:
    """Return whether the members of a group are made from the number of the rank that makes it."""
    given, members = made.argument("ranks", 0), argument_of(made.node, "ranks", 0)
    if given is None or members is None or len(getattr(members, "elts", (0, 0))) == 1:
        return False  # A rank alone has nobody to meet.
    if is_varying(given):
        return True
    body = made.module.body_around(made.node)
    over = [node.target for node in descend(body) if isinstance(node, (ast.For, ast.comprehension))]
    others = {last_name(node) for target in over for node in descend(target)}
    asked = rank_names(projection.machine.store) - others
    return any(last_name(part) in asked for part in made_from(members, body) if isinstance(part, _NAMED))


# Process groups that a loop makes anew in every turn.


def repeated_groups(projection: Projection) -> Iterator[Event]:
    """Calls of ``new_group`` in a loop, of ranks that do not depend on its turn, whose group the same turn uses."""
    seen: set[ast.AST] = set()
    collectives = list(projection.in_course("collective"))
    for made in collectives:
        loop = innermost_loop(made)
        if made.name != "new_group" or made.node in seen or not isinstance(loop, ast.For) or made.conditions:
            continue
        around = made.module.parents.get(made.node)
        if not isinstance(around, ast.Assign) or not isinstance(around.targets[0], ast.Name):
            continue
        turns = {node.id for node in descend(loop.target) if isinstance(node, ast.Name)}
        body = made.module.body_around(made.node)
        depends = any(isinstance(node, ast.Name) and node.id in turns for node in made_from(made.node, body))
        used = any(innermost_loop(event) is loop and "group" in event.named for event in collectives)
        if used and not depends:
            seen.add(made.node)
            yield made


# Collectives that ranks call on a group which leaves them out.

_JUMPS = (ast.Return, ast.Continue, ast.Break, ast.Raise)


def outsiders(projection: Projection) -> Iterator[tuple[Event, Event]]:
    """Collectives with a result that every rank calls on a group of some of them, with where that is made."""
    made = {event.node: event for event in projection.of_kind("collective") if event.name == "new_group"}
    seen: set[ast.AST] = set()
    for event in projection.in_course("collective") if made else ():
        group = event.named.get("group")
        if not isinstance(group, ExternalObject) or event.ranks != ALL_RANKS or event.undecided or event.node in seen:
            continue
        maker = made.get(projection.machine.maker_of(group.number))  # type: ignore[call-overload]
        if maker is None or not event.positional or not _leaves_out(projection, maker):
            continue
        if not any(map(_may_be_left, call_chain(projection.machine.script, event))):
            seen.add(event.node)
            yield event, maker


def _may_be_left(place: Placed) -> bool:
    """Return whether a function may be left before a call in it, by a condition that is not known."""
    jumps = (one for one in nodes_of(function_around(place.module, place.node)) if isinstance(one, _JUMPS))
    return any(one.lineno < getattr(place.node, "lineno", 0) for one in jumps)


def _leaves_out(projection: Projection, made: Event) -> bool:
    """Return whether a group lacks a rank, however many there are, by what it is made of."""
    ranks = argument_of(made.node, "ranks", 0)
    function = function_around(made.module, made.node)
    if isinstance(ranks, ast.Name):
        assigned = made.module.assigning(function, ranks.id)
        ranks = assigned[0].value if len(assigned) == 1 else None
    if isinstance(ranks, ast.ListComp) and isinstance(ranks.elt, ast.Name) and not ranks.generators[0].ifs:
        ranks = ranks.generators[0].iter if ranks.elt.id == last_name(ranks.generators[0].target) else None
    while isinstance(ranks, ast.Call) and last_name(ranks.func) in ("list", "tuple", "sorted") and ranks.args:
        ranks = ranks.args[0]
    if isinstance(ranks, (ast.List, ast.Tuple)):
        return len(ranks.elts) == 1 and isinstance(ranks.elts[0], ast.Constant)
    if not isinstance(ranks, ast.Call) or last_name(ranks.func) != "range" or not ranks.args:
        return False
    start, stop, step = [*([ast.Constant(0)] if len(ranks.args) == 1 else []), *ranks.args, ast.Constant(1)][:3]
    fewer = isinstance(stop, ast.BinOp) and isinstance(stop.op, ast.Sub) and isinstance(stop.right, ast.Constant)
    of_size = last_name(getattr(getattr(stop, "left", None), "func", getattr(stop, "left", stop)))
    above = [one.value for one in (start, step) if isinstance(one, ast.Constant) and isinstance(one.value, int)]
    less = fewer and of_size in size_names(projection.machine.store)
    return len(above) == 2 and (above[0] > 0 or above[1] > 1 or less)
