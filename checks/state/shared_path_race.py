"""Every rank creates, deletes or renames the same file or directory, or polls for it.

What it finds
    os.makedirs and mkdir without exist_ok, shutil.rmtree, os.remove, unlink, os.rename and os.replace that all ranks
    reach at once with a path that does not depend on the rank; a file that all ranks write where it is missing and read
    where it exists; and a loop that sleeps until a file exists which another rank writes in place. Downloads and other
    data preparation have their own check, download-race. In a run: a rank that fails with what another did to the path,
    deletes what another has made, or waits for a file in this way.

Why it is bad
    The ranks get there at nearly the same time. `if not os.path.exists(path): os.makedirs(path)` lets two of them pass,
    and the slower one fails with FileExistsError; a delete fails on the second rank, or removes what the first has just
    written. It fails now and then, more often on a shared file system. A file that is waited for exists from its first
    byte: the others read half of it, or the one that an earlier run left, and do not wait at all.

Example
    if not os.path.exists(output):
        os.makedirs(output)

Remedy
    os.makedirs(path, exist_ok=True); or do it on rank 0 and call dist.barrier() before the others continue, also
    instead of polling.

When it is wrong
    If each process has its own disk.

References
    https://docs.python.org/3/library/os.html#os.makedirs
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator

import msgspec

from ddpdoctor.check import Check, RunRecord, Script, TooLittleEvidence, Verdict
from ddpdoctor.files import regex
from ddpdoctor.finding import Finding, Location, Refuted, Severity
from ddpdoctor.source.events import LONGEST_CONDITION, Event
from ddpdoctor.source.interpreter.values import ALL_RANKS, constant, is_varying, tags_of
from ddpdoctor.source.projection import Projection, whole_projection
from ddpdoctor.source.queries.divergence import function_around, is_in_turns
from ddpdoctor.source.queries.files import (
    ASKS_FOR_A_FILE,
    FIGURES,
    OPENERS,
    FileUse,
    changed_node,
    changed_path,
    directory_of,
    is_one_path,
    is_stamped,
    reads,
    shown_path,
    writes,
)
from ddpdoctor.source.queries.job_kind import (
    comes_before_ranks,
    is_distributed,
    is_of_a_mode_that_ends,
    is_of_one_process,
    joins_in_own_course,
    noted,
    on_every_rank,
)
from ddpdoctor.source.script.module import Module, descend, last_name, made_from
from ddpdoctor.source.script.script import calls_any, uses_any, uses_part
from ddpdoctor.source.torch_model.recorded_calls import FILE_CALLS, FILE_METHODS

CHECK = Check(
    code="DDP608",
    name="shared-path-race",
    stands_for="path-race",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.WARNING),
    needs=frozenset({"ranks", "files", "accesses"}),
    subjects=("job",),
    triggers=(
        *("mkdir", "makedirs", "rmtree", "remove", "unlink", "rmdir", "rename", "replace", "sleep", "open"),
        *("symlink", "savefig", "FileHandler", "filemode"),
    ),
)

_REMEDY = "Do it on rank 0 only, with dist.barrier() before the other ranks continue; os.makedirs takes exist_ok=True."


def in_source(script: Script) -> Iterator[Finding]:
    """Report creations, deletions and renames that all ranks make under one path, and loops that wait for a file."""
    yield from CHECK.suspected(shared_paths(whole_projection(script)))
    for use, kept in rewritten_files(whole_projection(script)):
        yield CHECK.finding(
            f"every rank writes {use.shown}"
            + (" where it is missing, and reads what another rank has begun to write" if kept else _OVERWRITING),
            remedy="Look and write on rank 0 first, then call dist.barrier() before the other ranks look."
            if kept
            else "Write it on rank 0 only.",
            locations=(kept.wrote, use.event.location) if kept else use.event.location,
            because=(("it is read here where it exists", kept.read),) if kept else (),
            severity=None if kept else Severity.ADVICE,
        )
    yield from CHECK.suspected(polled_files(whole_projection(script)))


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report paths at which ranks come into each other's way; refute lines at which each path has one rank.

    Before there is a process group no collective orders the ranks, and what counts is that one of them dies.
    """
    from ddpdoctor.diagnosis.files import judge_paths

    collectives = record.stream("collectives")
    for found in CHECK.judged(record.job.kind, judge_paths(record, CHECK.stands_for), _REMEDY):
        if collectives.state == "complete" or (isinstance(found, Finding) and found.severity is Severity.ERROR):
            yield found
    if collectives.state != "complete":
        raise TooLittleEvidence(f"not all collectives were recorded ({collectives.reason})")


_WRITERS = frozenset({"torch.utils.tensorboard.SummaryWriter", "tensorboardX.SummaryWriter"})
"""They make the directory that they are given, unless it is there."""


def polled_files(projection: Projection) -> Iterator[Verdict]:
    """Loops ``while not exists(path): sleep`` for a file that some rank of the same job writes under that path."""
    script = projection.machine.script
    if not calls_any(script, ("sleep",)) or not calls_any(script, ("exists", "is_file")):
        return
    moves = (name for module in script.modules for _, name in module.calls())
    if uses_any(script, ("filelock", "FileLock")) or not {"os.replace", "os.rename"}.isdisjoint(moves):
        return
    written = [use for use in writes(projection) if use.event.guards]
    for module in script.modules if written else ():
        for node in module.index.of(ast.While):
            path = _waited_for(node)
            write = next((use for use in written if _is_that_file(use, module, node, path)), None) if path else None
            if write is not None:
                yield _polled(path, module.head_location(node), write, own_name=_is_own_name(script, write))


def _polled(path: str, loop: Location, write: FileUse, *, own_name: bool) -> Verdict:
    """Return what is wrong with a wait for a path; ``own_name``: by a random number, time or process of a rank."""
    if own_name:
        return Verdict(
            sentence=f"ranks wait until {path} exists, a name that each of them makes for itself: only rank 0's own is "
            "ever there",
            remedy="Make the name on rank 0 and hand it to the others with dist.broadcast_object_list; then wait in "
            "dist.barrier().",
            locations=loop,
            because=("another rank writes its own here", write.event.location),
        )
    return Verdict(
        sentence=f"ranks wait until {path} exists, which it does from its first byte or since an earlier run",
        remedy="Wait in dist.barrier() on all ranks instead; or write under another name, then os.replace() it.",
        locations=loop,
        because=("another rank writes it here, in place", write.event.location),
    )


def _is_own_name(script: Script, write: FileUse) -> bool:
    """Return whether the path is another one on each rank, and not by what they find on their disks alike."""
    kinds = {kind for kind, _ in tags_of(write.path)}
    seeded = kinds == {"random"} and uses_part(script, ("seed",))
    return is_varying(write.path) and "files" not in kinds and not seeded


def _waited_for(loop: ast.While) -> str:
    """Return the source of the path that a loop asks for, if it does nothing but sleep meanwhile."""
    test = loop.test
    if not isinstance(test, ast.UnaryOp) or not isinstance(test.op, ast.Not) or not isinstance(test.operand, ast.Call):
        return ""
    sleeps = any(last_name(node.func) == "sleep" for node in descend(loop) if isinstance(node, ast.Call))
    call = test.operand
    if not sleeps or last_name(call.func) not in ASKS_FOR_A_FILE:
        return ""
    if call.args:
        return ast.unparse(call.args[0])
    return ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""


def _is_that_file(use: FileUse, module: Module, loop: ast.While, path: str) -> bool:
    same_function = function_around(use.event.module, use.event.node) is function_around(module, loop)
    return use.event.module is module and same_function and use.source == path


_PREPARATION = regex(
    r"download|extract|untar|unzip|unpack|tokeni[sz](?!er)|preprocess|urlretrieve|gdown|cache|prepare_data(?!_?loader)",
    re.IGNORECASE,
)
_OVERWRITING = ", overwriting what the others wrote"
_CREATES = frozenset({"mkdir", "makedirs", "symlink", "symlink_to"})
_REWRITES = FIGURES | OPENERS.keys() | {"shutil.copy", "shutil.copy2", "shutil.copyfile"}
_PER_PROCESS = regex(r"rank|getpid|tmp|temp|hostname|node", re.IGNORECASE)
_OWN_TEMPORARY = regex(r"""(?<=['"])(\.{1,2}/)?(tmp|temp)/""")
"""A directory of that name where the job was started, which all ranks have."""


def _is_per_process(source: str) -> bool:
    return _PER_PROCESS.search(_OWN_TEMPORARY.sub("", source)) is not None


def shared_paths(projection: Projection) -> Iterator[Verdict]:
    """Creations, deletions and renames that all ranks of a job make at once under the same path.

    What belongs to a download, an extraction or other preparation of data is left out.
    """
    if not is_distributed(projection):
        return
    joined = joins_in_own_course(projection)
    seen: set[ast.AST] = set()
    made: list[Event] = []
    for event in noted(projection, *FILE_CALLS, *FILE_METHODS, *_WRITERS):
        if event.ranks == ALL_RANKS and (event.name.rpartition(".")[2] in _CREATES or event.name in _WRITERS):
            made.append(event)
        if event.name in _WRITERS:
            continue
        if event.node in seen or not event.complete or not on_every_rank(event) or not (joined or event.root):
            continue
        path = changed_path(event)
        if path is None or not (is_one_path(path) or is_stamped(path)) or _is_tried(event.module, event.node):
            continue
        if _is_preparation(event, changed_node(event)):
            continue
        by_one = is_of_one_process(projection, event) or comes_before_ranks(projection, event)
        by_one = by_one or is_in_turns(projection, event)
        doing = _judge(event) if not by_one and not _is_there(projection, event, made) else None
        if doing is None or _is_per_process(_source(event)):
            continue
        seen.add(event.node)
        verb, is_failing = doing
        one = is_one_path(path)
        failing = ", and all but the fastest one fail" if one else ", and fails where another did in the same second"
        remedy = "Do it on rank 0 only, with dist.barrier() before the other ranks continue."
        if verb == "creates" and "symlink" not in event.name and one:
            remedy = "Give it exist_ok=True, or do it on rank 0 with a barrier after it."
        yield Verdict(
            sentence=f"every rank {verb} {shown_path(_source(event), path)}{failing if is_failing else ''}",
            remedy=remedy,
            locations=event.location,
            # Something that the script does instead of training takes one process.
            severity=Severity.ADVICE if is_of_a_mode_that_ends(projection, event) else None,
            because=("there is no rank test around this call or its callers", event),
        )


def rewritten_files(projection: Projection) -> Iterator[tuple[FileUse, Kept | None]]:
    """Small files that every rank writes from their beginning under one path: settings, lists, results, pictures.

    With where it is read again, if it is made for that where it is missing.
    """
    if not is_distributed(projection):
        return
    joined = joins_in_own_course(projection)
    seen: set[object] = set()
    by_some: set[ast.AST] = set()
    for use in writes(projection):
        event = use.event
        if not (joined or event.root) or event.name not in _REWRITES or not on_every_rank(event) or not event.complete:
            by_some |= {event.node} if event.ranks != ALL_RANKS else set()
            continue
        if _is_per_process(use.source) or is_in_turns(projection, event) or not is_one_path(use.path):
            continue
        if is_of_one_process(projection, event) or is_of_a_mode_that_ends(projection, event):
            continue
        kept = _kept(projection, use)
        told = event.node if kept is None else kept.wrote
        if kept is None and _is_preparation(event, use.node):
            continue
        if told not in seen and not (kept and (event.node in by_some or _is_by_turns(event))):
            seen.add(told)
            yield use, kept


def _is_by_turns(event: Event) -> bool:
    from ddpdoctor.checks.data.download_race import lets_in_by_turns

    return any(map(lets_in_by_turns, event.contexts))


class Kept(msgspec.Struct, frozen=True):
    """A file that is made where it is missing, and read where it exists."""

    wrote: Location
    read: Location


def _kept(projection: Projection, use: FileUse) -> Kept | None:
    """Return where a file is written because it is missing, and read otherwise: no rank waits for the writing ones."""
    modules = {str(module.path): module for module in projection.machine.script.modules}
    write = use.event
    within = ((frame, modules[frame.file]) for frame in write.chain if frame.file in modules)
    found = [(frame, module, asked) for frame, module in within for asked in _asking(module, frame.line)]
    if not found:
        return None
    from ddpdoctor.checks.state.lone_shard_saved import name_of

    name = name_of(projection, use)
    waits = [one.ordinal for one in projection.in_course("collective") if one.ordinal > write.ordinal]
    for read in reads(projection) if name else ():
        after = write.ordinal < read.event.ordinal < min(waits, default=sys.maxsize)
        if not on_every_rank(read.event) or name_of(projection, read) != name:
            continue
        for frame, module, asked in found:
            there = {_arm(asked, line) for line in read.event.lines_in(module)}
            about = isinstance(asked, ast.If) and read.source in module.excerpt(asked.test, LONGEST_CONDITION)
            if there & _OTHER_ARM[_arm(asked, frame.line)] or (after and about):
                wrote = write.location if frame == write.chain[0] else Location(file=frame.file, line=frame.line)
                return Kept(wrote=wrote, read=read.event.location)
    return None


# The body, what comes otherwise, and what is behind it: where the file is read if it is written in one of them.
_OTHER_ARM = ({1}, {0}, {0})


def _arm(asked: ast.If | ast.Try, line: int) -> int:
    """Return in which of them a line is; -1 for none."""
    if line < asked.body[0].lineno:
        return -1
    return 2 if line > (asked.end_lineno or line) else int(line > (asked.body[-1].end_lineno or line))


def _asking(module: Module, line: int) -> Iterator[ast.If | ast.Try]:
    """Yield what finds out that a file is missing, around a line, or before it where it leaves if the file is there."""
    for tried in module.index.of(ast.Try):
        if any(one.lineno <= line <= (one.end_lineno or line) for one in tried.handlers):
            yield tried
    for asked in module.index.of(ast.If):
        if not asked.lineno <= line or not _asks(module, asked.test):
            continue
        last, body = asked.body[-1], module.body_around(asked)
        while isinstance(last, ast.With):
            last = last.body[-1]
        leaves = isinstance(last, ast.Return) and line <= (getattr(body, "end_lineno", 0) or line)
        if leaves or line <= (asked.end_lineno or line):
            yield asked


def _asks(module: Module, test: ast.expr) -> bool:
    """Return whether a condition asks for a file, or is a variable that holds the answer."""
    parts = [test, *module.assigned(module.body_around(test), test)] if isinstance(test, ast.Name) else [test]
    return any(
        isinstance(one, ast.Call) and last_name(one.func) in ASKS_FOR_A_FILE for part in parts for one in descend(part)
    )


def _judge(event: Event) -> tuple[str, bool] | None:
    """Return what a call does to a path, and whether it fails when another rank was faster; None for no harm."""
    last = event.name.rpartition(".")[2]
    if last in _CREATES:
        position = 1 if event.name == "os.makedirs" else -1
        exist_ok = event.argument("exist_ok", 2 if position == 1 else -1)
        tolerated = exist_ok is not None and constant(exist_ok) is not False
        return None if tolerated else ("creates", True)
    if last in {"rename", "replace"}:
        return "renames", True
    tolerant = event.argument("ignore_errors", 1) if last == "rmtree" else event.named.get("missing_ok")
    if tolerant is not None and last != "rmtree" and constant(tolerant) is not False:
        return None
    return "deletes", tolerant is None or constant(tolerant) is False


def _source(event: Event) -> str:
    where = changed_node(event)
    return event.module.excerpt(where, 60) if where is not None else ""


def _is_there(projection: Projection, event: Event, made: list[Event]) -> bool:
    """Return whether a directory that is made where it is missing was made before, here or by a caller that hands on
    its path.

    The first call is then the one that fails, if it does; behind it the directory is there on every rank.
    """
    tests = [ast.unparse(test) for module, test in event.undecided if module is event.module]
    if not any(word in text for text in tests for word in ("exists", "isdir", "is_dir")):
        return False
    modules = {str(module.path): module for module in projection.machine.script.modules}
    module, path = event.module, _source(event)
    function = function_around(module, event.node)
    if any(_makes_first(one, event, module, path) and function_around(module, one.node) is function for one in made):
        return True
    for frame in event.chain[1:]:
        caller = modules.get(frame.file)
        given = _handed_over(caller, frame.line, function, path) if caller is not None else None
        if caller is None or given is None:
            return False
        module, path = caller, caller.excerpt(given, 60)
        if any(_makes_first(one, event, module, path) for one in made):
            return True
        function = function_around(module, given)
    return False


def _makes_first(one: Event, event: Event, module: Module, path: str) -> bool:
    """Return whether a call before makes a directory, or one in it, and so those around that."""
    if one.ordinal >= event.ordinal or one.module is not module:
        return False
    where = changed_node(one)
    while where is not None and module.excerpt(where, 60) != path:
        where = directory_of(where) if one.name in {"os.makedirs", *_WRITERS} else None
    return where is not None


def _handed_over(module: Module, line: int, function: ast.AST | None, name: str) -> ast.expr | None:
    """Return what a call in a line gives to a parameter of a function."""
    if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return None
    names = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
    for call in module.index.of(ast.Call):
        if call.lineno != line or last_name(call.func) != function.name:
            continue
        by_name = next((entry.value for entry in call.keywords if entry.arg == name), None)
        position = names.index(name) if name in names else len(call.args)
        return by_name or (call.args[position] if position < len(call.args) else None)
    return None


def _is_preparation(event: Event, path: ast.expr | None) -> bool:
    """Return whether the function around a call or its path prepares data for all ranks, by their names.

    So does a call of that function which is given the path or a part of it, or nothing that shows what it is about.
    """
    if _PREPARATION.search(event.function) or (path is not None and _PREPARATION.search(event.module.excerpt(path))):
        return True
    around = function_around(event.module, event.node)
    if around is event.module.tree:
        return False
    calls = [node for node in descend(around) if isinstance(node, ast.Call) and _prepares(event.module, node)]
    if not calls or path is None:
        return bool(calls)
    told = {ast.unparse(node) for node in made_from(path, around) if isinstance(node, (ast.Name, ast.Attribute))}
    return any(not given or given & told for given in map(_given, calls))


def _given(call: ast.Call) -> set[str]:
    """Return the variables and attributes that a call is given; of ``options.out`` the whole, not ``options``."""
    pending: list[ast.AST] = [*call.args, *(entry.value for entry in call.keywords)]
    found: set[str] = set()
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.Name, ast.Attribute)):
            found.add(ast.unparse(node))
        else:
            pending += ast.iter_child_nodes(node)
    return found


def _prepares(module: Module, call: ast.Call) -> bool:
    """Return whether a call prepares data, by its name; torch.cuda.empty_cache does not."""
    full = module.resolve(call.func)
    of_torch = full.startswith("torch.") and not full.startswith("torch.hub.")
    return not of_torch and _PREPARATION.search(ast.unparse(call.func)) is not None


def _is_tried(module: Module, node: ast.AST) -> bool:
    """Return whether a failure of a call is expected: it stands in a ``try`` or under ``suppress``."""
    for around in module.ancestors(node):
        if isinstance(around, ast.Try) and around.handlers:
            return True
        if isinstance(around, ast.With) and "suppress" in ast.unparse(around.items[0].context_expr):
            return True
        if isinstance(around, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return False
    return False
