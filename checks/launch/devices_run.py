"""Whether each rank works on its own GPU and chose it in time, and what forked processes use of their parent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from ddpdoctor.check import Verdict
from ddpdoctor.diagnosis.failures import named_failures
from ddpdoctor.diagnosis.wording import rank_list, site_location, verb
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.setup import DeviceUse

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
    if _sees_one_gpu(record):
        return
    uses: dict[int, list[DeviceUse]] = {rank: [] for rank in record.rank_numbers()}
    for use in record.device_uses:
        if not use.forked:
            uses.setdefault(use.rank, []).append(use)
    nodes: dict[int, list[int]] = {}
    for rank in record.ranks:
        nodes.setdefault(rank.node, []).append(rank.rank)
    for ranks in nodes.values():
        own = [uses[rank] for rank in ranks]
        if len(ranks) < 2 or not all(own):
            continue
        first = [found[0] for found in own]
        location = site_location(record.site(first[0].site))
        on_first = all(use.index == 0 and not use.was_set for found in own for use in found)
        if location is not None and on_first and all(use.how == "current" for use in first):
            yield Verdict(
                sentence=f"{rank_list(ranks)} of one node all use GPU 0: no process selects its own",
                locations=location,
                ranks=tuple(ranks),
                because=tuple(
                    (f"rank {use.rank} put its first tensor on the current GPU, {use.index}", location) for use in first
                ),
            )
        elif len({use.index for use in first}) == len(first):
            yield from _apart(record, [use for found in own for use in found])


def barriers_before_choice(record: RunRecord) -> Iterator[Verdict]:
    """Yield the barriers of NCCL jobs that come before the process chooses the GPU on which they are to run."""
    asked = [wait for wait in record.waits if wait.kind == "init_process_group" and not wait.error]
    if not asked or any(wait.named_device for wait in asked) or not all("nccl" in wait.backend for wait in asked):
        return
    choices: dict[int, Literal[True]] = {choice.rank: True for choice in record.device_choices if choice.chosen}
    early: dict[int, list[int]] = {}
    for choice in record.device_choices:
        if not choice.chosen and choice.rank in choices:
            early.setdefault(choice.site, []).append(choice.rank)
    for site, ranks in early.items():
        yield Verdict(
            sentence="this barrier runs on the current GPU, and the process selects its GPU only afterwards",
            locations=site_location(record.site(site)),
            ranks=tuple(sorted(set(ranks))),
        )


def _apart(record: RunRecord, uses: Sequence[DeviceUse]) -> Iterator[Verdict]:
    for place in dict.fromkeys(site_location(record.site(use.site)) for use in uses if use.how == "current"):
        yield Verdict(wrong=False, sentence="each rank of the node had its own current GPU here", locations=place)


def _sees_one_gpu(record: RunRecord) -> bool:
    name = "CUDA_VISIBLE_DEVICES"
    told = [setting.value for setting in record.settings if setting.name == name and not setting.removed]
    outside = record.job.environment.get(name)
    return any(value.count(",") == 0 for value in (*told, *(() if outside is None else (outside,))))


# Forked processes that use what does not survive a fork.


def broken_forks(record: RunRecord) -> Iterator[Verdict]:
    """Yield what forked processes did, or died of, once for each line."""
    for failure in named_failures(record, "cuda-after-fork"):
        yield Verdict(
            sentence=f"a forked process of {rank_list(failure.ranks)} uses CUDA, which its parent has initialised",
            locations=failure.location,
            ranks=failure.ranks,
            because=(failure.message, failure.location),
        )
    forked = [use for use in record.device_uses if use.forked]
    for site in sorted({use.site for use in forked}):
        ranks = tuple(sorted({use.rank for use in forked if use.site == site}))
        place = site_location(record.site(site))
        yield Verdict(
            sentence=f"a forked process of {rank_list(ranks)} uses CUDA, which its parent has initialised",
            locations=place,
            ranks=ranks,
            because=("the forked process put a tensor on a GPU here, as had its parent before the fork", place),
        )
    for site in sorted({use.site for use in record.forked_uses}):
        uses = [use for use in record.forked_uses if use.site == site]
        ranks = tuple(sorted({use.rank for use in uses}))
        place = site_location(record.site(site))
        yield Verdict(
            sentence=f"a forked process of {rank_list(ranks)} calls {uses[0].kind}, and the process group does not "
            "survive a fork",
            locations=place,
            ranks=ranks,
            because=("the forked process reached this call", place),
            remedy="Call collectives in the ranks' own processes only.",
        )
