"""Ranks read a file that rank 0 is still writing.

What it finds
    A file that one rank writes (torch.save, open for writing, numpy, safetensors, pandas, shutil), followed on all
    ranks by a read of the same path, with no barrier, other collective or construction of DDP between the two. In a
    run: any file that one rank writes and another reads, where no chain of collectives, no lock and no file waited for
    orders the two; an error where the reader fails with it. In the source likewise a directory that one rank makes and
    in which all ranks write at once.

Why it is bad
    The other ranks do not write, so they reach the read first. They find no file, the file of an earlier run, or half
    of a new one: the job fails now and then, or silently continues from different weights on each rank.

Example
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), path)
    model.load_state_dict(torch.load(path, map_location="cpu"))

Remedy
    Put dist.barrier() between the write and the read, on all ranks.

When it is wrong
    Where the ranks wait for each other by other means, such as a lock or a file that is polled.

References
    https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html#save-and-load-checkpoints
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache

from ddpdoctor.check import Check, Script, Verdict
from ddpdoctor.checks.state.load_without_map_location import may_be_one_path
from ddpdoctor.files import regex
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.values import ALL_RANKS, RANKS, Value, constant, is_varying, tags_of
from ddpdoctor.source.projection import Projection, whole_projection
from ddpdoctor.source.queries.files import (
    ASKS_FOR_A_FILE,
    FileUse,
    changed_node,
    changed_path,
    directory_of,
    is_one_file,
    is_one_path,
    opened_to_write,
    reads,
    writes,
)
from ddpdoctor.source.queries.job_kind import hints_at_ranks, in_other_modes, is_distributed, noted
from ddpdoctor.source.ranks.ranks import ranks_text
from ddpdoctor.source.script.module import descend, last_name, made_from

CHECK = Check(
    code="DDP603",
    name="unsynchronised-load",
    stands_for="early-read",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.WARNING),
    needs=frozenset({"ranks", "files", "accesses", "collectives"}),
    subjects=("job",),
    triggers=(
        *("save", "open", "write_text", "write_bytes", "to_csv", "to_parquet", "dump", "shutil", "FileHandler"),
        "memmap",
    ),
)
REMEDY = "Call dist.barrier() on all ranks between the write and the read."


def in_source(script: Script) -> Iterator[Finding]:
    """Report loads that may come before the save of another rank has ended."""
    projection = whole_projection(script)
    yield from CHECK.suspected((*early_loads(projection), *early_writes(projection)), REMEDY)


in_run = CHECK.judged_by("diagnosis.files", "judge_paths", REMEDY, CHECK.stands_for)


_WAITS = regex(r"barrier|synchron|wait_for|wait_all|sync_proc", re.IGNORECASE)


def early_loads(projection: Projection) -> Iterator[Verdict]:
    """Reads on ranks that do not wait for the rank that writes the same path before."""
    if not is_distributed(projection):
        return
    saves = [use for use in writes(projection) if _by_one(use.event.ranks)]
    if not saves or _waits_somewhere_unknown(projection):
        return
    waits = list(projection.in_course("collective", "wrap", "forward", "backward"))
    seen: set[ast.AST] = set()
    for load in reads(projection):
        if load.event.node not in seen and _is_own_name(load.path) and not hints_at_ranks(load.event):
            own = [save for save in saves if save.path == load.path and save.source == load.source]
            if any(load.event.ranks & ~save.event.ranks and not load.event.undecided for save in own):
                seen.add(load.event.node)
                yield _under_own_name(load, own[-1])
        if load.event.node in seen or not may_be_one_path(load.event, load.path):
            continue
        for save in reversed(saves):
            if not load.event.ranks & ~save.event.ranks:
                continue  # Each reader wrote it before, and waits for itself alone.
            if (
                save.event.ordinal < load.event.ordinal
                and save.event.root == load.event.root
                and _same(projection, save, load)
            ):
                apart = in_other_modes(save.event, load.event) or _is_polled(load.event)
                if not apart and not _is_awaited(save.event, load.event, waits):
                    seen.add(load.event.node)
                    who = _does(save.event, "write", "writes")
                    yield Verdict(
                        sentence=f"all ranks read {load.shown}, which {who} just before, and no rank waits for the "
                        "write",
                        locations=(load.event.location, save.event.location),
                        because=(f"only {who} here; there is no collective between this and the read", save.event),
                    )
                break


def _is_own_name(path: Value) -> bool:
    """Return whether every rank has another path: by its clock to less than a second, its process or a random name."""
    return is_varying(path) and not {("clock", 0), ("unique", 0)}.isdisjoint(tags_of(path))


def _under_own_name(load: FileUse, save: FileUse) -> Verdict:
    who = _does(save.event, "write", "writes")
    return Verdict(
        sentence=f"all ranks read {load.shown}, which each of them names for itself, and only {who} it: the others "
        "find no such file",
        remedy="Let one rank choose the name and give it to all with dist.broadcast_object_list, on all ranks.",
        locations=(load.event.location, save.event.location),
        because=(f"{load.shown} is made of this process's own clock, number or random name", load.event),
    )


_MAKES = ("os.makedirs", "os.mkdir", "mkdir")


def early_writes(projection: Projection) -> Iterator[Verdict]:
    """Writes of ranks into a directory that another rank makes before, on ranks that do not wait for it."""
    made = list(noted(projection, *_MAKES)) if is_distributed(projection) else []
    if not any(_by_one(event.ranks) for event in made) or _waits_somewhere_unknown(projection):
        return
    waits = list(projection.in_course("collective", "wrap", "forward", "backward"))
    seen: set[ast.AST] = set()
    for use in opened_to_write(projection):
        event = use.event
        if event.node in seen or event.in_parent or not event.ranks & (event.ranks - 1):
            continue
        before = [one for one in made if one.ordinal < event.ordinal and one.root == event.root and _holds(one, use)]
        makes = 0
        for one in before:
            makes |= one.ranks
        if not before or not _by_one(makes) or not event.ranks & ~makes:
            continue
        if not _is_awaited(before[-1], event, waits):
            seen.add(event.node)
            node = changed_node(before[-1])
            path = before[-1].module.excerpt(node, 60) if node is not None else "it"
            who = _does(before[-1], "make", "makes")
            yield Verdict(
                sentence=f"all ranks write into {path}, which {who} just before, and no rank waits until it is there",
                remedy="Make the directory on every rank, with exist_ok=True, or call dist.barrier() between.",
                locations=(event.location, before[-1].location),
                because=(f"only {who} the directory; there is no collective before it is used", before[-1]),
            )


def _does(event: Event, several: str, one: str) -> str:
    return f"{ranks_text(event.ranks)} {several if event.ranks & (event.ranks - 1) else one}"


def _holds(made: Event, use: FileUse) -> bool:
    """Return whether a call certainly makes the directory in which a file is opened, or one around it."""
    path, node = changed_path(made), changed_node(made)
    if path is None or node is None or use.node is None or not is_one_path(path):
        return False
    folder, file = constant(path), constant(use.path)
    if isinstance(folder, str) and isinstance(file, str):
        return file.startswith(folder.rstrip("/") + "/")
    if made.module is not use.event.module or made.scopes != use.event.scopes:
        return False
    source = ast.unparse(node)
    return any(
        isinstance(part, ast.expr) and (around := directory_of(part)) is not None and ast.unparse(around) == source
        for part in made_from(use.node, use.event.module.body_around(use.event.node))
    )


def _by_one(ranks: int) -> bool:
    """Return whether one rank writes: the first of the job, or of every node."""
    return not ranks & (ranks - 1) or ranks == 0b0101


def _same(projection: Projection, save: FileUse, load: FileUse) -> bool:
    if save.path == load.path and save.event.scopes == load.event.scopes and save.source == load.source:
        return True
    return is_one_file(projection, save, load)


def _is_polled(load: Event) -> bool:
    """Return whether a loop before a read asks whether a file is there: its rank waits by itself."""
    loops = load.module.index.within(load.module.body_around(load.node), ast.While)
    asked = (node for loop in loops if loop.lineno < load.location.line for node in descend(loop.test))
    return any(isinstance(node, ast.Call) and last_name(node.func) in ASKS_FOR_A_FILE for node in asked)


def _is_awaited(save: Event, load: Event, waits: Sequence[Event]) -> bool:
    """Return whether all ranks meet between, or readers, in a branch of their own, have met the writers after it."""
    if any(save.ordinal < wait.ordinal < load.ordinal and wait.ranks == ALL_RANKS for wait in waits):
        return True
    met = [wait for wait in waits if "group" not in wait.named]
    before_load, before_save = (
        [
            sum(wait.ordinal < event.ordinal and wait.ranks >> rank & 1 for wait in met)
            for rank in RANKS
            if of >> rank & 1
        ]
        for event, of in ((load, load.ranks & ~save.ranks), (save, save.ranks))
    )
    return bool(before_load and before_save) and min(before_load) > max(before_save)


@lru_cache(maxsize=16_384)
def _promises_to_wait(name: str) -> bool:
    return _WAITS.search(name) is not None


def _waits_somewhere_unknown(projection: Projection) -> bool:
    """Return whether something is called by a name that promises to wait, and was not seen to be a collective."""
    known = {event.node for event in projection.events if event.kind == "collective"}
    for module in projection.machine.script.modules:
        for last, calls in module.calls_by_name.items():
            if not _promises_to_wait(last) or last in projection.machine.mentions.synchronising:
                continue
            if any(node not in known and not module.resolve(node.func).startswith("torch.") for node in calls):
                return True
    return False
