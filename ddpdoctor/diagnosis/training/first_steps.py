"""The first optimizer steps of processes that are compared, as these have written them."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ddpdoctor.diagnosis.training.vectors import Vector, minus

SAME_NORM = 0.01
"""Norms that differ by no more were made the same by DDP: what clips before the reduction is told by them."""


class Gradient(msgspec.Struct, frozen=True):
    """What a process got for a parameter."""

    wrap: int
    name: str
    values: Vector | None
    """At the optimizer; None where there is none."""
    local: Vector | None
    """What backward added to it; None where that was not recorded."""
    piece: int = 0
    """So many elements each rank holds, one after the other; 0 where it is not divided so."""
    stride: int = 1
    """One of so many elements is in the values."""


class Step(msgspec.Struct, frozen=True):
    """What an optimizer got in one step of one process."""

    optimizer: int
    ordinal: int
    gradients: tuple[Gradient, ...]
    clips: tuple[Mapping[str, Any], ...] = ()
    """File, line, name, norm before and the most that it may have, whether torch takes that norm, and of how many
    gradients."""
    losses: tuple[Sequence[Any], ...] = ()
    """File, line, digest of the weights of classes, targets that count."""
    scalings: Mapping[tuple[str, str, int], float] = {}
    """By which numbers losses are multiplied or divided: ``mul`` or ``div``, file and line, …"""
    scaled_back: tuple[tuple[str, float], ...] = ()
    """… which of these operations a backward has, …"""
    counted: Mapping[tuple[str, str, int], tuple[str, int]] = {}
    """… and where the number of a scaling was all-reduced."""
    rescaled: tuple[tuple[str, int], ...] = ()
    """Lines that multiply gradients after a backward."""
    entered: Mapping[str, tuple[str, int]] = {}
    """Digests of data that entered the loss and that no process is given, and where."""
    state: str = ""
    """A digest of the parameters before the step."""
    unmatched_draws: int = 0
    random: str = ""
    random_moved: bool = False
    facts: Mapping[str, bool] = {}
    norm: float = 0.0
    """Of all gradients."""
    drawn: str = ""
    """A digest of the first samples that the process itself read."""
    share: float = 1.0
    """Of the elements of all gradients that was kept."""
    beside: Mapping[str, Vector] = {}
    """What buffers and the optimizer hold after the step, a part of each, by what it is."""


class Runs(msgspec.Struct, frozen=True):
    """The first steps, in each way in which they were made."""

    ranks: tuple[tuple[Step, ...], ...]
    """By rank, …"""
    one: tuple[Step, ...]
    """… in one process on the samples of all of them, …"""
    again: tuple[tuple[Step, ...], ...] = ()
    """… by rank once more, with parameters that differ in their last places, …"""
    alone: tuple[tuple[Step, ...], ...] = ()
    """… and in one process on the samples of each."""
    cuts: tuple[tuple[str, str, int], ...] = ()
    """Kind, file and line of gathers that cut a graph in the ranks."""
    has_loaders: bool = True
    in_turn: bool = False
    """One process got the batches one after the other; then there are no runs on the samples of one rank."""
    others: tuple[tuple[Step, ...], ...] = ()
    """The other ranks of another launch, whose first stands in place of one process, …"""
    against: str = ""
    """… and its command."""


def read_step(head: Mapping[str, Any], numbers: array[float]) -> Step:
    """Return a step as a process wrote it; raises ValueError and KeyError where it is damaged."""
    gradients, at = [], 0
    for row in head["parameters"]:
        found: list[Vector | None] = []
        for there in (row["gradient"], row["local"]):
            found.append(numbers[at : at + row["kept"]] if there else None)
            at += row["kept"] if there else 0
        values, local = found
        piece, stride = int(row["piece"]), int(row["stride"])
        gradients.append(Gradient(int(row["wrap"]), str(row["name"]), values, local, piece, stride))
    if at != len(numbers):
        raise ValueError("a step has other numbers than its head says")
    kept = [row for row in head["parameters"] if row["kept"]]
    return Step(
        optimizer=int(head["optimizer"]),
        ordinal=int(head["ordinal"]),
        gradients=tuple(gradients),
        clips=tuple(head["clips"]),
        losses=tuple(head["losses"]),
        scalings={(str(kind), str(file), int(line)): float(by) for kind, file, line, by in head["scalings"]},
        scaled_back=tuple((str(kind), float(by)) for kind, by in head["scaled_back"]),
        counted={
            (str(kind), str(file), int(line)): (str(at), int(row)) for kind, file, line, at, row in head["counted"]
        },
        rescaled=tuple((str(file), int(line)) for file, line in head["rescaled"]),
        entered={str(digest): (str(file), int(line)) for digest, file, line in head["entered"]},
        state=str(head["state"]),
        unmatched_draws=int(head["unmatched_draws"]),
        random=str(head["random"]),
        random_moved=bool(head["random_moved"]),
        facts=head["facts"],
        norm=float(head["norm"]),
        drawn=str(head["drawn"]),
        share=sum(row["kept"] for row in kept) / max(1, sum(math.prod(row["shape"]) for row in kept)) if kept else 1.0,
    )


def unclipped(runs: Runs, count: int) -> Runs:
    """Return the runs with the gradients of so many steps as they were before calls clipped all of them.

    What is clipped to one norm shows no longer by which factor, and in which shares, it differs.
    """
    sides = (*runs.ranks, runs.one, *runs.again, *runs.alone, *runs.others)
    steps = [step for side in sides for step in side[:count]]
    if not all(step.clips and all(_clips_all(step, clip) for clip in step.clips) for step in steps):
        return runs
    if len({tuple(clip["most"] for clip in step.clips) for step in steps}) > 1 or all(map(_is_short, steps)):
        return runs
    for number in range(count):
        norms = [float(side[number].clips[0]["norm"]) for side in runs.ranks]
        if max(norms) - min(norms) > SAME_NORM * max(norms):
            return runs

    def whole(side: tuple[Step, ...]) -> tuple[Step, ...]:
        return tuple(_times(step, _excess(step)) if number < count else step for number, step in enumerate(side))

    several = {name: tuple(map(whole, getattr(runs, name))) for name in ("ranks", "again", "alone", "others")}
    return msgspec.structs.replace(runs, one=whole(runs.one), **several)


def _clips_all(step: Step, clip: Mapping[str, Any]) -> bool:
    all_of_them = clip.get("gradients") == sum(one.values is not None for one in step.gradients)
    return all_of_them and bool(clip.get("is_2_norm"))


def _is_short(step: Step) -> bool:
    return _excess(step) <= 1


def _excess(step: Step) -> float:
    """Return how many times too long the gradients of a step were."""
    over = (max(1.0, (float(clip["norm"]) + 1e-6) / float(clip["most"])) for clip in step.clips if clip["most"])
    return math.prod(over)


def _times(step: Step, factor: float) -> Step:
    made = [
        one if one.values is None else msgspec.structs.replace(one, values=minus(None, one.values, -factor))
        for one in step.gradients
    ]
    return msgspec.structs.replace(step, gradients=tuple(made))
