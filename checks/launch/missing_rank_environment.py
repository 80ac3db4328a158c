"""Ranks that the script spawns read variables that only a launcher sets.

What it finds
    init_process_group with the default env:// rendezvous, in a script that starts its ranks itself with mp.spawn or
    Process, without rank= and world_size= and without RANK and WORLD_SIZE in the environment; or with them, but with no
    MASTER_ADDR and MASTER_PORT anywhere.

Why it is bad
    torchrun sets these variables; processes of mp.spawn start without them. The initialisation fails at once with
    "environment variable RANK expected, but not set", in every rank.

Example
    def worker(rank, world_size):
        dist.init_process_group("nccl")
    mp.spawn(worker, args=(4,), nprocs=4)

Remedy
    Give rank= and world_size=, and set MASTER_ADDR and MASTER_PORT before; or drop the spawning and use torchrun.

When it is wrong
    Where MASTER_ADDR and MASTER_PORT come from the shell or the container; that case is a warning.

References
    https://docs.pytorch.org/docs/stable/distributed.html#environment-variable-initialization
"""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.check import Check, RunRecord, Script
from ddpdoctor.files import regex
from ddpdoctor.finding import Finding, Refuted, Severity
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.queries.rendezvous import missing_environments

CHECK = Check(
    code="DDP510",
    name="missing-rank-environment",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.ERROR),
    needs=frozenset({"waits"}),
    subjects=("job",),
    triggers=("init_process_group",),
    stands_for="no-rank-environment",
)
# What torch reads in this order; it names the first that is not there, and what comes after may be missing as well.
_READ = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# What init_process_group takes as arguments as well.
_PASSED = {"RANK": "rank=", "WORLD_SIZE": "world_size="}
_MISSING = regex(r"environment variable (\w+) expected, but not set")


def in_source(script: Script) -> Iterator[Finding]:
    """Report initialisations of spawned ranks that lack what they read from the environment."""
    launch = script.spawns_ranks
    for event, missing, is_certain in missing_environments(whole_projection(script)):
        are = "is" if len(missing) == 1 else "are"
        yield CHECK.finding(
            f"the ranks are spawned by the script itself, and {' and '.join(missing)} {are} not set",
            remedy=_remedy(missing),
            locations=event.location,
            because=() if launch is None else (("the script starts its ranks here", launch),),
            severity=None if is_certain else Severity.WARNING,
        )


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report initialisations that failed for lack of a variable; refute suspicions about those that succeeded."""
    from ddpdoctor.diagnosis.failures import failed_initialisations
    from ddpdoctor.diagnosis.wording import site_location

    failed = list(failed_initialisations(record))
    for wait, location in failed:
        missing = _MISSING.search(wait.error)
        if missing is None:
            continue
        yield CHECK.finding(
            f"init_process_group fails: {missing[1]} is not set in the ranks' environment",
            basis=record.job.kind,
            remedy=_remedy(_READ[_READ.index(missing[1]) :] if missing[1] in _READ else (missing[1],)),
            locations=location,
            because=(wait.error[:200], location),
        )
    if not failed:
        met = {wait.site for wait in record.waits if wait.kind == "init_process_group" and wait.ended_ns}
        for place in filter(None, (site_location(record.site(site)) for site in sorted(met))):
            yield Refuted(location=place, reason="init_process_group returned: the ranks had what it needs")


def _remedy(missing: tuple[str, ...]) -> str:
    given = [_PASSED[name] for name in missing if name in _PASSED]
    set_before = [name for name in missing if name not in _PASSED]
    steps = []
    if given:
        steps.append(f"Give {' and '.join(given)} to init_process_group")
    if set_before:
        steps.append(f"{'set' if steps else 'Set'} {' and '.join(set_before)} before it")
    return ", and ".join(steps) + "."
