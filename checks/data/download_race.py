"""Every rank downloads or extracts to the same path at once.

What it finds
    A dataset with `download=True` or of PyTorch Geometric, one that the project derives from theirs or DGL's, a call or
    a shell's command that fetches or extracts, `load_dataset` that is told to download again, or a function of the
    project that writes what it requested, reached by all ranks without one of them going first; also a dataset that
    only the first rank downloads while the others open it. In a run: data that several ranks fetch, or write where it
    is missing and then read, with no collective between one rank's write and what the other does.

Why it is bad
    The ranks overwrite each other's files: a rank reads a file that another is still writing, checksums fail now and
    then, an archive is extracted while it is being replaced. It also sends the server one request per rank.

Example
    dataset = torchvision.datasets.CIFAR10("data", download=True)

Remedy
    Let rank 0 (the first rank of each node, where disks are not shared) download, then a barrier, then let all ranks
    open what is there: if rank == 0: CIFAR10("data", download=True), dist.barrier(), CIFAR10("data").

When it is wrong
    If the files are in place before the job starts, or every rank has its own disk.

References
    https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.barrier
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

from ddpdoctor.check import Check, Script
from ddpdoctor.files import regex
from ddpdoctor.finding import Finding, Location, Severity
from ddpdoctor.source.events import ContextAround, Event
from ddpdoctor.source.interpreter.values import ALL_RANKS, NONE, External, PerRank, Value, constant, is_varying, tags_of
from ddpdoctor.source.projection import Projection, whole_projection
from ddpdoctor.source.queries.divergence import BARRIERS, function_around
from ddpdoctor.source.queries.job_kind import comes_before_ranks, hints_at_ranks, is_distributed
from ddpdoctor.source.queries.shell_commands import command_line
from ddpdoctor.source.script.module import descend, last_name, origins_of
from ddpdoctor.source.vocabulary import PREPARING_DATASETS

CHECK = Check(
    code="DDP109",
    name="download-race",
    stands_for="download-race",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.WARNING),
    needs=frozenset({"ranks", "files", "accesses", "collectives"}),
    subjects=("job",),
    triggers=(
        "download",
        "urlretrieve",
        "extractall",
        "unpack_archive",
        "torchtext",
        "fetch_",
        "hub",
        "torch_geometric",
        "ogb",
        *("requests", "urlopen", "wget", "curl", "gdown", "unzip", "tar", "clone", "dgl"),
    ),
)
REMEDY = "Let rank 0 do it first, then dist.barrier(), then let every rank open what is there."


def in_source(script: Script) -> Iterator[Finding]:
    """Report downloads that all ranks do at the same time, one finding for a directory."""
    for what, downloads in by_directory(shared_downloads(whole_projection(script))):
        yield CHECK.finding(
            _SENTENCES.get(what, f"every rank {what} to the same path at once"),
            remedy=REMEDY,
            locations=map(_place, downloads),
            because=("no rank test or barrier lets one rank go first", downloads[0]),
        )


_SENTENCES = {
    "looks": "the other ranks look for these data while the first one downloads them",
    "rebuilds": "each rank deletes these data and prepares them again while others already read them",
}

in_run = CHECK.judged_by("diagnosis.files", "judge_paths", REMEDY, CHECK.stands_for)


_DATASETS = regex(r"(torchvision|torchaudio|torchtext)\.datasets\.")
# Data sets without `download=`; all of them keep their files in one directory unless they are given a root.
_ALWAYS_FETCH = "torchtext.datasets."
# They download and process in their constructor what is not there, without a lock; the rest are made of nothing.
_GRAPHS = regex(
    r"torch_geometric\.datasets\.(?!Fake|Explainer|Random|BA|StochasticBlock|InfectionDataset|motif_|graph_)[A-Z]"
    r"|ogb\.\w+\.(Pyg|Dgl)?\w*Dataset$"
    rf"|({'|'.join(map(re.escape, PREPARING_DATASETS))})\.\w+$"
)
_FETCHERS = frozenset(
    {"urllib.request.urlretrieve", "wget.download", "gdown.download", "nltk.download", "shutil.unpack_archive"}
    | {
        f"torchvision.datasets.utils.{name}"
        for name in ("download_url", "download_and_extract_archive", "extract_archive")
    }
)
# Functions that return what the network sends.
_ANSWERS = frozenset({"requests.get", "urllib.request.urlopen", "httpx.get", "httpx.stream"})
# Commands of a shell that write what they fetch or unpack.
_COMMANDS = regex(
    r"(?:^|&&|;)\s*(?:sudo\s+)?(?:(?P<downloads>(?:wget|gdown|aria2c|git\s+clone)\b|curl\s.*-(?:o|O|-output)\b)"
    r"|(?P<extracts>(?:unzip|gunzip)\b|tar\s+-{0,2}[a-z]*x))"
)
_OPEN = "builtins.open"
# It fetches and unpacks the repository, unless its source is local.
_HUB = "torch.hub.load"
# It deletes what it has prepared before and prepares it again, if it is told to; its lock does not keep readers out.
_PREPARES = "datasets.load_dataset"
# They download unless `download_if_missing=False`, and remove the archive when they have read it.
_BY_FUNCTION = regex(r"sklearn\.datasets\.fetch_")
# Words in a context manager that may let the ranks in one after the other.
_IN_TURN = regex(r"first|lock|zero|turn|main|rank", re.IGNORECASE)
_ON_DEVICE = ("torch.cuda.device", "torch.device", "torch.autocast", "torch.cuda.amp.")


def _place(event: Event) -> Location:
    """Return where a download is; of a function of the project that is given the path, where that is called."""
    around = function_around(event.module, event.node)
    if event.name != _OPEN or isinstance(around, (ast.Lambda, ast.Module)) or len(event.chain) < 2:
        return event.location
    path = event.node.args[0] if isinstance(event.node, ast.Call) and event.node.args else None
    given = isinstance(around, ast.FunctionDef) and last_name(path or around) in {
        one.arg for one in (*around.args.args, *around.args.kwonlyargs)
    }
    return Location(file=event.chain[1].file, line=event.chain[1].line) if given else event.location


def shared_downloads(projection: Projection) -> Iterator[tuple[Event, str]]:
    """Downloads of a distributed job to one path that all ranks come to, none of them before the others.

    With what they do: ``looks`` where only the first rank downloads, and the others look for the files meanwhile.
    """
    if not is_distributed(projection):
        return
    events = [event for event in projection.in_course("object", "call", "training") if _fetches(event)]
    prepared = [event for event in projection.events if event.in_parent and not event.conditions and _fetches(event)]
    seen: set[ast.AST] = set()
    for event in events:
        if event.ranks != ALL_RANKS or event.guards or event.node in seen or _own_path(event):
            continue
        if hints_at_ranks(event) or comes_before_ranks(projection, event):
            continue
        if any(map(lets_in_by_turns, event.contexts)) or _asks_first(event):
            continue
        if _rank_by_rank(projection, event) or _done_before(events, event):
            continue
        if any(one.name == event.name and _is_same_data(one, event) for one in prepared):
            continue
        seen.add(event.node)
        command = _command(event)
        extracts = event.name.endswith(("extractall", "unpack_archive", "extract_archive"))
        extracts = extracts or (command is not None and command["extracts"] is not None)
        rebuilds = "rebuilds" if event.name == _PREPARES else "downloads"
        yield event, "extracts" if extracts else "looks" if _is_by_first(event) else rebuilds


def _asks_first(event: Event) -> bool:
    """Return whether somebody is asked before, whatever holds: a rank has no terminal, and ends there."""
    for module, test in event.undecided:
        names = {node.id for node in descend(test) if isinstance(node, ast.Name)}
        assigned = list(module.index.within(module.body_around(test), ast.Assign))
        targets = [(target, one.value) for one in assigned for target in one.targets]
        given = [value for target, value in targets if isinstance(target, ast.Name) and target.id in names]
        asked = [last_name(one.func) == "input" for one in given if isinstance(one, ast.Call)]
        if asked and all(asked) and len(asked) == len(given):
            return True
    return False


def lets_in_by_turns(context: ContextAround) -> bool:
    """Return whether a context manager may let the ranks in one after the other, by its words; a device does not."""
    node = context.node
    if isinstance(node, ast.Call) and context.module.resolve(node.func).startswith(_ON_DEVICE):
        return False
    return _IN_TURN.search(context.module.excerpt(node, 200)) is not None


def by_directory(downloads: Iterable[tuple[Event, str]]) -> Iterator[tuple[str, list[Event]]]:
    """Downloads of one function into one directory together: the training and the test part of a data set."""
    found: dict[tuple[str, str, str, str], list[Event]] = {}
    for event, what in downloads:
        where = "" if event.name.startswith(_ALWAYS_FETCH) else str(event.ordinal)
        where = event.function if event.name == _OPEN else _directory(event) or where
        found.setdefault((str(event.module.path), event.name, what, where), []).append(event)
    return ((what, events) for (_, _, what, _), events in found.items())


def _is_same_data(one: Event, other: Event) -> bool:
    """Return whether two calls of one function fetch to one directory; graphs take it in any place of the arguments."""
    return _GRAPHS.match(one.name) is not None or _directory(one) == _directory(other)


def _directory(event: Event) -> str:
    """Return the source of the argument that says where to; empty when there is none."""
    call = event.node
    if not isinstance(call, ast.Call):
        return ""
    first = [] if event.name.startswith(_ALWAYS_FETCH) else call.args[:1]
    roots = [entry.value for entry in call.keywords if entry.arg == "root"] or first
    return ast.unparse(roots[0]) if roots else ""


def _fetches(event: Event) -> bool:
    if _BY_FUNCTION.match(event.name):
        return event.kind == "call" and constant(event.named.get("download_if_missing", NONE)) is not False
    if event.name == _PREPARES:
        forced = _is_forced(event.named.get("download_mode", NONE))
        return forced and constant(event.named.get("streaming", NONE)) is not True
    if event.name == _HUB:
        return event.complete and constant(event.argument("source", 2) or NONE) in (None, "github")
    if event.kind != "object":
        own = event.name == _OPEN and _writes_an_answer(event)
        return own or event.name in _FETCHERS or event.name == "extractall" or _command(event) is not None
    if event.name.startswith(_ALWAYS_FETCH) or _GRAPHS.match(event.name):
        return True
    asked = event.named.get("download", NONE)
    # ``download=not os.path.exists(...)`` is true on every rank that looks before the first has finished.
    looks = any(kind == "files" for kind, _ in tags_of(asked))
    return _DATASETS.match(event.name) is not None and (constant(asked) is True or looks or _is_by_first(event))


def _is_forced(mode: Value) -> bool:
    """Return whether a mode of downloading says that what is there is to be made again."""
    name = mode.name if isinstance(mode, External) else constant(mode)
    return isinstance(name, str) and name.rpartition(".")[2].lower() == "force_redownload"


def _command(event: Event) -> re.Match[str] | None:
    """Return the command by which a shell downloads or extracts, as far as the source shows it."""
    return _COMMANDS.search(command_line(event))


def _writes_an_answer(event: Event) -> bool:
    """Return whether a file is opened in which the same function writes what the network has sent."""
    mode = constant(event.argument("mode", 1) or NONE)
    around = function_around(event.module, event.node)
    if not isinstance(mode, str) or mode[:1] not in ("w", "x") or not isinstance(around, ast.FunctionDef):
        return False
    calls = [node for node in descend(around) if isinstance(node, ast.Call)]
    asked = {node for node in calls if event.module.resolve(node.func) in _ANSWERS}
    return bool(asked) and any(
        asked & set(origins_of(argument, around)) and event.node in set(origins_of(file, around))
        for call in calls
        for file, argument in _written(call)
    )


def _written(call: ast.Call) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield a file and what a call writes to it: ``file.write(data)``, ``dump(data, file)``."""
    if last_name(call.func) == "write" and isinstance(call.func, ast.Attribute) and call.args:
        yield call.func.value, call.args[0]
    elif last_name(call.func) in ("copyfileobj", "dump") and len(call.args) > 1:
        yield call.args[1], call.args[0]


def _is_by_first(event: Event) -> bool:
    """Return whether the first ranks are told to download, and the others to open what is there."""
    asked = event.named.get("download", NONE)
    return isinstance(asked, PerRank) and {constant(value) for value in asked.values} == {True, False}


def _own_path(event: Event) -> bool:
    told = (value for name, value in event.named.items() if name != "download")
    return any(is_varying(value) for value in (*event.positional, *told))


def _rank_by_rank(projection: Projection, event: Event) -> bool:
    """Return whether some ranks wait in a barrier of their own before, as where rank 0 goes first."""
    return any(
        barrier.name in BARRIERS and barrier.ranks != ALL_RANKS and barrier.ordinal < event.ordinal
        for barrier in projection.in_course("collective")
    )


def _done_before(events: list[Event], event: Event) -> bool:
    """Return whether fewer ranks did the same before, so that the others find everything in place."""
    return any(
        earlier.name == event.name and earlier.ranks != ALL_RANKS and earlier.ordinal < event.ordinal
        for earlier in events
    )
