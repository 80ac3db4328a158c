"""A model runs with parameters or buffers that nothing has initialised.

What it finds
    In a rehearsal: parameters and buffers that `Module.to_empty` emptied (`skip_init` calls it, too), into which
    nothing was written, and which a forward reads. Writes of every kind count: `reset_parameters`, `torch.nn.init`,
    `.data`, a checkpoint that is loaded or assigned, a broadcast from another rank.

Why it is bad
    A model that is built on the meta device has shapes and no values, and to_empty gives it memory without writing to
    it. What is there may be zeros, large numbers, NaN or the weights of another model: in each run something else, and
    on each rank, where it is sharded, something else. Training starts from it without an error.

Example
    with torch.device("meta"):
        model = Transformer()
    model.to_empty(device="cuda")
    model.reset_parameters()              # of the embeddings and the head: the layers are left out

Remedy
    Call reset_parameters of every module that has one, and initialise what has none: for part in model.modules():
    if hasattr(part, "reset_parameters"): part.reset_parameters(). Or load a checkpoint that has every name. Buffers
    that a constructor computes (tables of positions, masks) have to be computed again.

When it is wrong
    In a model that is compiled, or in the older wrapper of FSDP, what a forward reads cannot be seen: everything in it
    that was never written is reported. So are parameters that a module initialises by itself in its first forward.
    Tensors that are emptied by other means than to_empty are not looked at.

References
    https://docs.pytorch.org/docs/stable/meta.html
"""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.check import Check, TooLittleEvidence
from ddpdoctor.diagnosis.divergence.unused_parameters import folded
from ddpdoctor.diagnosis.wording import site_location
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.training import Uninitialised

CHECK = Check(
    code="DDP225",
    name="uninitialised-parameters",
    severity={"rehearsal": Severity.ERROR},
    needs=frozenset({"uninitialised"}),
)


def in_run(record: RunRecord) -> Iterator[Finding]:
    """Report what each call of ``to_empty`` left, on all ranks together, with the figures of one of them."""
    pretended = next((one for one in record.job.pretended if "weights" in one), "")
    if record.uninitialised and pretended:
        raise TooLittleEvidence(f"{pretended} may initialise what to_empty() leaves, and were pretended")
    for site in dict.fromkeys(row.site for row in record.uninitialised):
        rows = [row for row in record.uninitialised if row.site == site]
        ranks = sorted({row.rank for row in rows})
        names, buffers = {row.name for row in rows}, len({row.name for row in rows if row.buffer})
        # Of a flat parameter each rank has other pieces.
        first, count = max(rows, key=lambda row: row.unwritten), len(names)
        kinds = ((count - buffers, "parameter"), (buffers, "buffer"))
        what = " and ".join(f"{n:,} {kind}{'s' if n > 1 else ''}" for n, kind in kinds if n)
        was, them = ("was", "it") if count == 1 else ("were", "them")
        emptied, forward = record.site(site), record.site(first.forward_site)
        written = first.emptied - first.unwritten
        are = f"{written:,} of them {'is' if written == 1 else 'are'}" if written else "none of them is"
        yield CHECK.finding(
            f"{what} of {first.model_class} {was} never initialised, and the forward uses {them} with what "
            f"to_empty() found in memory: {', '.join(folded(names))}",
            basis=record.job.kind,
            remedy=_remedy(rows),
            locations=(site_location(emptied), site_location(forward)),
            ranks=() if ranks == list(record.rank_numbers()) else tuple(ranks),
            because=(
                (
                    f"to_empty() gives memory to {first.emptied:,} parameters and buffers, and no values",
                    site_location(emptied),
                    {"emptied": first.emptied},
                    first.rank,
                ),
                (
                    f"from there to the forward {are} written to",
                    site_location(forward),
                    {"written": written, "read": count},
                    first.rank,
                ),
            ),
        )


def _remedy(rows: list[Uninitialised]) -> str:
    """Return what to do about parameters that can be reset, those that cannot, and buffers."""
    model = rows[0].receiver or "model"
    bare = sorted({row.owner_class for row in rows if not row.buffer and not row.resets})
    buffers = folded({row.name for row in rows if row.buffer})
    steps = []
    if any(row.resets and not row.buffer for row in rows):
        steps.append(
            f"reset every module after to_empty(): for part in {model}.modules(): "
            'if hasattr(part, "reset_parameters"): part.reset_parameters()'
        )
    if bare:
        have = "has" if len(bare) == 1 else "have"
        steps.append(f"initialise the parameters of {', '.join(bare)}, which {have} no reset_parameters")
    if buffers:
        steps.append(f"compute {', '.join(buffers)} after to_empty() as the constructor does")
    text = "; ".join(steps)
    return f"{text[0].upper()}{text[1:]}. Or load a checkpoint that has every name."
