"""What a comparison of the ranks with one process, or with another launch, comes to in words."""

from __future__ import annotations

from ddpdoctor.diagnosis.wording import count
from ddpdoctor.equivalence_section import COUNTED_TWICE, OWN_GRADIENTS, EquivalenceSection
from ddpdoctor.finding import rank_list


def sentence(section: EquivalenceSection) -> str:
    """Return the one sentence that a report has for the comparison."""
    ranks = f"{section.ranks} ranks" if section.ranks else "the ranks"
    if section.status == "inconclusive":
        return f"whether {ranks} train what {_other(section)} is not known: {section.reason}"
    if section.status == "differs":
        return difference(section)
    whole = count(section.parameters, "parameter")
    if section.zero:
        steps, where = count(section.steps, "optimizer step"), "the other launch" if section.against else "one process"
        return f"in {steps} {whole} of {ranks} have a gradient of zero, and so they have in {where}: nothing trains"
    told = f"{ranks} compute the gradient that {_other(section)} on the same batches: {section.equal} of {whole}"
    told += f" within {section.within:.0e} in {count(section.steps, 'optimizer step')}"
    if section.in_turn:
        told += ", with the ranks' batches one after the other"
    if section.share < 1:
        told += f"; {section.share:.2%} of the elements were compared, evenly spread over each parameter"
    if section.beside:
        more = f" and {len(section.beside) - 3} more" if len(section.beside) > 3 else ""
        told += f"; after the first step {', '.join(section.beside[:3])}{more} has other values"
    if section.statistics_by_rank:
        told += "; the statistics of each batch norm are those of a rank's own samples"
    return told


def _other(section: EquivalenceSection) -> str:
    return f"`{section.against}` does" if section.against else "one process would"


def difference(section: EquivalenceSection) -> str:
    """Return how the gradients differ."""
    return _difference(section) + (", before they are clipped" if section.unclipped else "")


def _difference(section: EquivalenceSection) -> str:
    ranks, times = section.ranks, f"{section.factor or 0:.2f} × the gradient"  # noqa: RUF001
    would, norms = _other(section), ""
    if section.against:
        mine, others = section.norms
        norms = f"; the gradient norms of the first step are {mine:.3g} and {others:.3g}"
    of_modules = f" of {', '.join(section.modules[:4])}" if section.modules else ""
    of_modules += f" and {len(section.modules) - 4} more" if len(section.modules) > 4 else ""
    if section.kind == "scaled":
        told = f"{ranks} ranks compute {times} that {would} on the same batches{norms}"
        twice = ": the loss is divided by a count of all ranks, and averaged over the ranks on top"
        return f"{told}{twice}" if _counts(section) else told
    if section.kind == "part":
        return f"{ranks} ranks compute {times}{of_modules} that {would}, and the same of the rest{norms}"
    if section.kind == "other":
        each = ", ".join(f"{factor:.2f} × of {name}" for name, factor in section.factors[:3])  # noqa: RUF001
        return f"{ranks} ranks compute another gradient{of_modules} than {would} on the same batches: {each}{norms}"
    if section.kind == "cut":
        what = f"{section.places[0][0]} carries no gradient to the samples of other ranks"
        if section.factor is None:
            return f"{what}: the gradient{of_modules} is another than in one process"
        return f"{what}: {ranks} ranks compute {times}{of_modules} that {would}"
    if section.kind == "weighted":
        shares = ", ".join(f"{share:.0%}" for share in section.weights)
        due = ", ".join(f"{share:.0%}" for share in section.due)
        told = f"the ranks' samples have shares of {shares} in the gradient, and of {due} in one process"
        counts = ", ".join(map(str, section.counts))
        if any(name == "own-count" for name, _, _ in section.places):
            told = f"the loss is divided by a count of each rank's own: {told}"
        elif section.places:
            numbers = f" ({counts})" if counts else ""
            own = f"a term of the loss is divided by a count of each rank's own{numbers}, and averaged over the ranks: "
            return f"{own}in it {told}"
        return f"{told}, for they have {counts} tokens or samples that count" if counts else told
    if section.kind == "one-rank":
        does = "computes" if len(section.at) == 1 else "compute"
        return f"{rank_list(section.at)} {does} another loss than one process would on the same batches"
    if section.kind == "own-factors":
        shown = ", ".join(f"{factor:.2f} on rank {rank}" for rank, factor in enumerate(section.by_rank[:4]))
        return (
            f"each rank multiplies what it holds of the gradient by a factor of its own ({shown}, as a multiple of "
            "what one process has): the parts no longer make one gradient"
        )
    if section.kind == "rank-constant":
        return "the loss has weights of classes that each rank takes from data of its own"
    if section.kind == "clipped":
        return f"{section.places[0][0]} clips the gradients of each rank by a norm of its own, before they are averaged"
    return f"{OWN_GRADIENTS}{of_modules} of its own, which is not averaged"


def _counts(section: EquivalenceSection) -> bool:
    return any(name == "divisor" for name, _, _ in section.places)


def remedy(section: EquivalenceSection) -> str:
    """Return what to do about a difference."""
    if section.against:
        return "Compare each of the two with one process, by --equivalence, which says what is wrong with it."
    if section.kind in ("scaled", "part"):
        if section.factor == 0:
            return "Let the loss of every rank depend on these modules, through the forward of the DDP model."
        if _counts(section):
            return COUNTED_TWICE
        much = (section.factor or 0) > 1
        undone = "multiplies by the world size, or a reduction that sums" if much else "divides by the world size"
        return f"DDP averages over the ranks: remove what else {undone}; if it is to be so, say so in a comment."
    return _REMEDIES[section.kind]


_REMEDIES = {
    "cut": "Gather with torch.distributed.nn.functional.all_gather, which carries gradients back to every rank.",
    "weighted": (
        "Add up the loss, all-reduce the number of tokens or samples that count, and use"
        " `loss = total * world_size / count`: DDP's mean over the ranks is then the mean over all."
    ),
    "one-rank": "Let every rank compute the whole loss: DDP takes the mean of what each rank has.",
    "rank-constant": "Compute the weights from the data of all ranks, or all-reduce the counts that they are made of.",
    "clipped": "Clip once, after the backward that synchronises the gradients and before the optimizer's step.",
    "own-factors": (
        "All-reduce what the factor is made of, as the sum of the squares of the rank's shards, before it is used; "
        "torch.nn.utils.clip_grad_norm_ does so for sharded parameters."
    ),
    "unsynchronised": (
        "Call the DDP object and not what it wraps, and leave no_sync before the forward of the last pass of a step."
    ),
}
