"""What a job does with its machine: variables, addresses, threads, memory, the GPU of each rank, forked processes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from ddpdoctor.check import NotStated, Verdict
from ddpdoctor.checks.launch.unsafe_environment import READ_AT_IMPORT, effects_on_nccl
from ddpdoctor.diagnosis.failures import failed_initialisations, named_failures
from ddpdoctor.diagnosis.wording import count, rank_list, site_location, verb
from ddpdoctor.files import regex
from ddpdoctor.finding import Location, grouped
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.collectives import Wait
from ddpdoctor.record.streams.setup import CpuThreads, DeviceChoice, DeviceUse, ForkedUse, Setting
from ddpdoctor.record.streams.training import Loader

Row = TypeVar("Row", Setting, Wait, DeviceChoice, DeviceUse, ForkedUse)
_SEGFAULTING_TORCH = ("2.13.",)


def unsafe_variables(record: RunRecord) -> Iterator[Verdict]:
    """Yield the variables, set from outside or by the script, that harm a job with this backend and torch."""
    values = dict(record.job.environment)
    places: dict[str, Location | None] = {}
    for setting in record.settings:
        if setting.imported and setting.name in READ_AT_IMPORT:
            continue
        if setting.removed:
            values.pop(setting.name, None)
            continue
        values[setting.name] = setting.value
        places[setting.name] = site_location(record.site(setting.site))
    backends = " ".join(
        [record.job.backend, *(group.backend for group in record.groups), *(wait.backend for wait in record.waits)]
    )
    for name, effect in _effects(record, values, backends):
        place = places.get(name)
        how = "the script sets it here"
        if name not in places:
            how = "it was set before the job was started"
        elif place is None:
            by = "by the launcher, or by a process of the script"
            how = f"it was set between the start of the job and that of this rank: {by}"
        # A variable may be one that only other machines of the job have.
        elsewhere = (node.environment[name] for node in record.nodes if name in node.environment)
        what = f"{name} from the environment of the job" if place is None else "the line that sets it"
        yield Verdict(
            sentence=f"{name}={values.get(name) or next(elsewhere, '')}: {effect}",
            remedy=f"Remove {what}.",
            locations=place,
            because=(how, place),
        )


def _machines(record: RunRecord, name: str, value: str) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield the machines that ranks run on, the variable's value there, and the network interfaces there."""
    if not record.nodes:
        yield "this machine", value, record.job.interfaces
    for node in record.nodes:
        outside = node.environment.get(name, value)
        host = node.host if len(record.nodes) > 1 else "this machine"
        yield host, value if value != record.job.environment.get(name, "") else outside, node.interfaces


def _effects(record: RunRecord, values: Mapping[str, str], backends: str) -> Iterator[tuple[str, str]]:
    detail = values.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL"
    if detail and "gloo" in backends and record.job.torch_version.startswith(_SEGFAULTING_TORCH):
        yield "TORCH_DISTRIBUTED_DEBUG", "with it, constructing DDP on gloo crashes (torch 2.13)"
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if name[:4].lower() not in backends:
            continue
        for host, own, interfaces in _machines(record, name, values.get(name, "")):
            if not _is_there(own, interfaces):
                yield name, f"{host} has no such network interface (it has {', '.join(interfaces)})"
                break
    if "nccl" in backends:
        yield from effects_on_nccl(values)


def _is_there(wanted: str, interfaces: tuple[str, ...]) -> bool:
    """Return whether a list of interface names fits this machine; ``=`` asks for whole names, ``^`` excludes."""
    if not wanted or not interfaces or wanted.startswith("^"):
        return True
    names = [name.strip().partition(":")[0] for name in wanted.removeprefix("=").split(",")]
    exact = wanted.startswith("=")
    return any(there == name if exact else there.startswith(name) for name in names for there in interfaces)


# Whether ranks destroyed the process groups that they made.


def judge_ends(record: RunRecord) -> Iterator[Verdict]:
    """Yield a verdict for each line that initialises the job, where every rank ran to the end of the script by itself.

    A group that a library makes is the library's to destroy.
    """
    if not record.ranks or not all(rank.end == "finished" and rank.main_finished for rank in record.ranks):
        return
    made = [wait for wait in record.waits if wait.kind == "init_process_group" and wait.direct and not wait.error]
    destroyed = {wait.rank for wait in record.waits if wait.kind == "destroy_process_group"}
    for site in sorted({wait.site for wait in made}):
        ranks = {wait.rank for wait in made if wait.site == site}
        location = site_location(record.site(site))
        left = ranks - destroyed
        if location is not None and not left:
            yield Verdict(wrong=False, sentence="every rank destroyed its process group", locations=location)
        elif location is not None and left == ranks:
            ended = f"{rank_list(left)} ran to the end of the script without destroy_process_group"
            yield Verdict(
                sentence="this process group is never destroyed",
                locations=location,
                ranks=tuple(sorted(left)),
                because=(ended, location),
            )


# How many threads the ranks of one node of the job run, before they run: torch's own, and the loaders' workers.

TOO_MANY_PER_CORE = 2
THREADS_VARIABLE = "OMP_NUM_THREADS"


def crowded_node(record: RunRecord) -> Iterator[Verdict]:
    """Yield the threads of a node that has far too few cores for them, of the rank that wants least of it.

    Raises NotStated where no one has said what the node is and it matters.
    """
    machine = record.job.machine
    needs = [_need(record, row) for row in record.cpu_threads]
    if not needs:
        return
    threads, by_default, loader = min(needs, key=lambda need: need[0] + _workers(need[2]))
    workers = _workers(loader)
    if threads + workers <= 1 and not by_default:
        return
    told = {"cores": machine.cores, "ranks-per-node": machine.ranks_per_node}
    if not all(told.values()):
        keys = " and ".join(f"`{name}`" for name, number in told.items() if not number)
        raise NotStated(f"the nodes of the job are not known: state {keys} in [tool.ddpdoctor.job]")
    ranks, cores = machine.ranks_per_node, machine.cores
    total = ranks * (threads + workers)
    if total <= TOO_MANY_PER_CORE * cores:
        return
    least = "at least " if by_default else ""
    loading = f" and {count(workers, 'worker')} of the training loader" if workers else ""
    unset = ": OMP_NUM_THREADS is not set, as torchrun would" if by_default else ""
    location = site_location(record.site(loader.site if loader is not None and workers else -1))
    yield Verdict(
        sentence=f"a node with {count(ranks, 'rank')} runs {least}{total:,} threads on {count(cores, 'core')}",
        remedy=f"Use fewer workers or threads per rank: there are {cores / ranks:.3g} cores for each.",
        locations=location,
        because=(
            f"each rank has {least}{count(threads, 'thread')} for torch's computation{loading}{unset}",
            location,
            {"threads": threads, "workers": workers, "ranks": ranks, "cores": cores},
        ),
    )


def _workers(loader: Loader | None) -> int:
    return 0 if loader is None else loader.workers


def _need(record: RunRecord, row: CpuThreads) -> tuple[int, bool, Loader | None]:
    """Return the threads of one rank, whether no one chose so many, and the loader from which it surely draws."""
    machine = record.job.machine
    training = {entry.loader for entry in record.passes if entry.rank == row.rank and entry.backwards}
    loaders = [entry for entry in record.loaders if entry.rank == row.rank and entry.loader in training]
    chosen = row.chosen or any(setting.name == THREADS_VARIABLE for setting in record.settings)
    # A rank that trains on a GPU hardly uses the threads that no one asked for, and launchers set them to one.
    by_default = not chosen and machine.spreads_threads and not machine.may_use_gpus
    # torch takes one for each core without its hyper-threads, of which a core has two at most.
    threads = max(1, machine.cores // 2) if by_default else row.threads
    return threads, by_default, max(loaders, key=lambda loader: loader.workers, default=None)


# Whether the ranks met where their launcher told them to.

_TOLD_BY_LAUNCHER = frozenset({"MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"})
# torch's store and its libuv backend word a taken port differently.
_IN_USE = regex(r"EADDRINUSE|address already in use", re.IGNORECASE)
# Names of this machine: a launcher and a script that use two of them meet all the same.
_HERE = frozenset({"localhost", "127.0.0.1", "::1"})
_PORT = regex(r"port: ?(\d+)|:(\d{2,5})\b")


def misled_ranks(record: RunRecord) -> Iterator[Verdict]:
    """Yield what leads the ranks away from their launcher's place of meeting, and ports that were in use."""
    settings = (
        one
        for one in record.settings
        if one.name in _TOLD_BY_LAUNCHER and one.launched and not one.joined
        if one.previous and one.previous != one.value and not {one.previous, one.value} <= _HERE
    )
    followed = _what_followed(record)
    for (first, *_), place, ranks in _by_line(record, settings, lambda one: one.name):
        yield Verdict(
            sentence=f"{first.name} is set to {first.value!r} over the launcher's {first.previous!r}",
            locations=place,
            ranks=ranks,
            because=(followed, place),
            remedy=f'Remove the line, or write os.environ.setdefault("{first.name}", ...), which keeps what is there.',
        )
    elsewhere = (wait for wait in record.waits if wait.meets_elsewhere)
    for (wait, *_), place, ranks in _by_line(record, elsewhere, lambda one: one.meets_elsewhere):
        yield Verdict(
            sentence=f"the launcher's ranks have their rendezvous at {wait.meets_elsewhere}, an address of the script",
            locations=place,
            ranks=ranks,
            because=(followed, place),
            remedy="Omit init_method: the launcher's MASTER_ADDR and MASTER_PORT are then used.",
        )
    yield from _taken(record)
    yield from _too_many(record)
    yield from _ports_in_use(record)


def _by_line(
    record: RunRecord, rows: Iterable[Row], about: Callable[[Row], object] = lambda row: None
) -> Iterator[tuple[list[Row], Location | None, tuple[int, ...]]]:
    """Yield the rows of each line, those about the same thing together, with the line and their ranks."""
    for found in grouped(rows, lambda row: (about(row), row.site)).values():
        place = site_location(record.site(found[0].site))
        yield found, place, tuple(sorted({row.rank for row in found if row.rank >= 0}))


def _taken(record: RunRecord) -> Iterator[Verdict]:
    """Numbers under which several ranks of a launcher join."""
    for waits, place, ranks in _by_line(record, (wait for wait in record.waits if wait.rank_taken >= 0)):
        numbers = sorted({wait.rank_taken for wait in waits})
        taken = f"each of {rank_list(numbers)}" if len(numbers) > 1 else rank_list(numbers)
        yield Verdict(
            sentence=f"several ranks join the group as {taken}, whatever rank the launcher gave them",
            locations=place,
            ranks=ranks,
            because=("no other rank joins as the remaining ones: init_process_group waits until its timeout", place),
            remedy='Omit rank and world_size, or take them from the environment: int(os.environ["RANK"]).',
        )


def _too_many(record: RunRecord) -> Iterator[Verdict]:
    """Groups for more ranks than a launcher starts, in the job as in its rehearsal."""
    started = record.job.ranks_of_job or record.job.ranks_expected
    if not any(part.startswith("--nproc-per-node") for part in record.job.command):
        return  # Without a launcher the script knows its other nodes, and their ranks are started there.
    more = (wait for wait in record.waits if wait.ranks_asked > started)
    for waits, place, ranks in _by_line(record, more, lambda one: one.ranks_asked):
        asked = waits[0].ranks_asked
        missing = f"rank {started}" if asked == started + 1 else f"ranks {started} to {asked - 1}"
        waits_for = "init_process_group would wait for them until its timeout; here it was created for those present"
        yield Verdict(
            sentence=f"the group is created for {asked} ranks and the launcher starts {started}: {missing} never "
            "arrive",
            locations=place,
            ranks=ranks,
            because=(waits_for, place),
            remedy="Omit world_size, or take it from the launcher's environment.",
        )


def _what_followed(record: RunRecord) -> str:
    waits = [wait for wait in record.waits if wait.kind == "init_process_group"]
    if any(wait.led_from for wait in waits):
        return (
            "no rank of a launcher opens a store itself: init_process_group would wait there until its timeout; "
            "the rehearsal redirected the ranks to the launcher's store"
        )
    if any(wait.error for wait in waits):
        return "init_process_group failed"
    if waits and not any(wait.ended_ns for wait in waits):
        return "init_process_group never returned: nothing listens there"
    return "init_process_group returned here; with another launcher, or on another machine, nothing listens there"


def _ports_in_use(record: RunRecord) -> Iterator[Verdict]:
    places: dict[Location | None, tuple[str, tuple[int, ...]]] = {}
    for wait, place in failed_initialisations(record):
        if _IN_USE.search(wait.error):
            places.setdefault(place, (wait.error, (wait.rank,) if wait.rank >= 0 else ()))
    for failure in named_failures(record, "port-in-use"):
        places.setdefault(failure.location, (failure.message, failure.ranks))
    for place, (message, ranks) in places.items():
        found = _PORT.search(message)
        port = f"port {found[1] or found[2]}" if found else "the rendezvous port"
        yield Verdict(
            sentence=f"{port} is in use: the rendezvous fails",
            locations=place,
            ranks=ranks,
            because=(f"the initialisation failed: {message[:160]}", place),
            remedy="Take a free port for each job: leave the choice to torchrun, or bind to port 0 and pass on the "
            "port that the system assigns.",
        )


# Ranks that get too little of their machine: of its cores, or of its shared memory.

WATCHED_AT_LEAST_NS = 20_000_000_000
WAITED_SHARE = 0.2
"""Share of the time in which a main thread could run and no core was free."""
THREADS_PER_CORE = 1.5
FULL_BELOW_SHARE = 0.1
FULL_BELOW_BYTES = 256 << 20


def core_pressure(record: RunRecord) -> Iterator[Verdict]:
    """Yield the ranks whose main threads wait for a core, where the job itself runs more threads than there are cores.

    What other programs do to the cores is not the job's, and neither is a short moment.
    """
    watched = [use for use in record.host_uses if use.watched_ns >= WATCHED_AT_LEAST_NS and use.cores]
    waiting = [use for use in watched if use.main_waited_ns >= WAITED_SHARE * use.watched_ns]
    busy, cores = sum(use.busy_threads for use in watched), max((use.cores for use in watched), default=0)
    if not waiting or busy < THREADS_PER_CORE * cores:
        return
    ranks = tuple(use.rank for use in waiting)
    share = sum(use.main_waited_ns / use.watched_ns for use in waiting) / len(waiting)
    yield Verdict(
        sentence=f"{rank_list(ranks)} {verb(ranks, 'waits', 'wait')} {100 * share:.0f}% of the time for a free core",
        remedy="Use fewer workers or threads per rank: cores over ranks, less one.",
        ranks=ranks,
        because=(f"the job keeps {busy} threads busy on {cores} cores", None),
    )


def full_shared_memory(record: RunRecord) -> Iterator[Verdict]:
    """Yield the ranks whose workers ran out of shared memory, and those that use one that is almost full."""
    for failure in named_failures(record, "shared-memory"):
        yield Verdict(
            sentence=f"the loader workers of {rank_list(failure.ranks)} ran out of shared memory (/dev/shm)",
            locations=failure.location,
            ranks=failure.ranks,
            because=(f"{failure.type}: {failure.message}", failure.location),
        )
    full = [
        use
        for use in record.host_uses
        if use.maps_shared_memory
        and use.shared_memory_free_bytes < min(FULL_BELOW_BYTES, FULL_BELOW_SHARE * use.shared_memory_bytes)
    ]
    if full:
        least = min(full, key=lambda use: use.shared_memory_free_bytes)
        free, size = least.shared_memory_free_bytes >> 20, least.shared_memory_bytes >> 20
        yield Verdict(
            sentence=f"the shared memory (/dev/shm) of {rank_list(use.rank for use in full)} is almost full",
            ranks=tuple(use.rank for use in full),
            because=(f"{free:,} MiB of {size:,} MiB were free", None),
        )


def shared_first_gpu(record: RunRecord) -> Iterator[Verdict]:
    """Yield the uses of GPU 0 by several ranks of one node, none of which chooses a GPU.

    Refuted where each has its own. Processes that see one GPU each are left out: there GPU 0 is another in each.
    """
    name = "CUDA_VISIBLE_DEVICES"
    told = [setting.value for setting in record.settings if setting.name == name and not setting.removed]
    if any("," not in value for value in (*told, record.job.environment.get(name, ","))):
        return
    uses = grouped((use for use in record.device_uses if not use.forked), lambda use: use.rank)
    for node in grouped(record.ranks, lambda rank: rank.node).values():
        ranks = tuple(rank.rank for rank in node)
        own = [uses.get(rank, []) for rank in ranks]
        if len(ranks) < 2 or not all(own):
            continue
        first = [found[0] for found in own]
        location = site_location(record.site(first[0].site))
        on_first = all(use.index == 0 and not use.was_set for found in own for use in found)
        if location is not None and on_first and all(use.how == "current" for use in first):
            yield Verdict(
                sentence=f"{rank_list(ranks)} of one node all use GPU 0: no process selects its own",
                locations=location,
                ranks=ranks,
                because=tuple(
                    (f"rank {use.rank} put its first tensor on the current GPU, {use.index}", location) for use in first
                ),
            )
        elif len({use.index for use in first}) == len(first):
            current = (use.site for found in own for use in found if use.how == "current")
            for place in dict.fromkeys(site_location(record.site(site)) for site in current):
                yield Verdict(
                    wrong=False, sentence="each rank of the node had its own current GPU here", locations=place
                )


def barriers_before_choice(record: RunRecord) -> Iterator[Verdict]:
    """Yield the barriers of NCCL jobs that come before the process chooses the GPU on which they are to run."""
    asked = [wait for wait in record.waits if wait.kind == "init_process_group" and not wait.error]
    if not asked or any(wait.named_device for wait in asked) or not all("nccl" in wait.backend for wait in asked):
        return
    choosing = {choice.rank for choice in record.device_choices if choice.chosen}
    early = (choice for choice in record.device_choices if not choice.chosen and choice.rank in choosing)
    for _, place, ranks in _by_line(record, early):
        yield Verdict(
            sentence="this barrier runs on the current GPU, and the process selects its GPU only afterwards",
            locations=place,
            ranks=ranks,
        )


# Forked processes that use what does not survive a fork.


def broken_forks(record: RunRecord) -> Iterator[Verdict]:
    """Yield what forked processes did, or died of, once for each line."""
    used = [(failure.message, failure.location, failure.ranks) for failure in named_failures(record, "cuda-after-fork")]
    forked = sorted((use for use in record.device_uses if use.forked), key=lambda use: use.site)
    did = "the forked process put a tensor on a GPU here, as had its parent before the fork"
    for how, place, ranks in (*used, *((did, place, ranks) for _, place, ranks in _by_line(record, forked))):
        yield Verdict(
            sentence=f"a forked process of {rank_list(ranks)} uses CUDA, which its parent has initialised",
            locations=place,
            ranks=ranks,
            because=(how, place),
        )
    for uses, place, ranks in _by_line(record, sorted(record.forked_uses, key=lambda use: use.site)):
        yield Verdict(
            sentence=f"a forked process of {rank_list(ranks)} calls {uses[0].kind}, and the process group does not "
            "survive a fork",
            locations=place,
            ranks=ranks,
            because=("the forked process reached this call", place),
            remedy="Call collectives in the ranks' own processes only.",
        )
