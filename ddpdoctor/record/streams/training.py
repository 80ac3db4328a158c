"""What a record knows of the ranks' training: backwards, steps, what DDP left out, and what the optimizers hold.

Times are nanoseconds since the epoch; sites are indices into ``RunRecord.sites``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from ddpdoctor.record.streams import RowAtLine, RowAtTime, RowOfRank

UnreducedBecause = Literal["no-sync", "bypass", "again", "twice"]
StatefulKind = Literal["optimizer", "scheduler", "scaler"]
NonFiniteKind = Literal["loss", "gradient", "parameter"]


class WrapChange(RowOfRank, frozen=True, kw_only=True):
    """A wrapped module that is no longer what DDP took note of, as seen before a training forward."""

    wrap: int
    site: int = -1
    """Call chain of the forward."""
    added: tuple[str, ...] = ()
    """Parameters that want a gradient and that DDP did not list: added, replaced, or frozen at the wrap."""
    frozen: tuple[str, ...] = ()
    """Parameters that DDP listed and that no longer want a gradient."""
    late_batch_norms: int = 0
    """SyncBatchNorm layers that were not there at the wrap."""


class Unreduced(msgspec.Struct, frozen=True, kw_only=True):
    """Gradients of a wrap that DDP left as they were on their rank."""

    wrap: int
    why: UnreducedBecause
    """The forward ran under ``no_sync``; no forward through DDP led to them; or they came after the reduction, in a
    further backward."""


class Backward(RowAtTime, frozen=True, kw_only=True):
    """A call of backward."""

    wraps: tuple[int, ...] = ()
    """Wraps whose parameters got gradients in it."""
    synchronised: tuple[int, ...] = ()
    """Those of ``wraps`` whose gradients DDP reduced."""
    unreduced: tuple[Unreduced, ...] = ()
    """Those of ``wraps`` whose gradients it did not reduce, and why."""
    accumulated: tuple[int, ...] = ()
    """Those of ``wraps`` that held gradients other than zero before it."""
    inside_no_sync: tuple[int, ...] = ()
    """Those of ``wraps`` that were under ``no_sync`` in it although their forward was not."""


class OptimizerStep(RowAtTime, frozen=True, kw_only=True):
    """A step of an optimizer."""

    optimizer: int
    """Ordinal of the optimizer in its process."""
    ordinal: int = 0
    """n-th step of this optimizer, from 1."""
    wraps: tuple[int, ...] = ()
    """Wraps whose parameters it steps; -1 stands for parameters of no wrapped module."""
    elements: int = 0
    """Elements of the parameters that it steps."""
    learning_rates: tuple[float, ...] = ()
    """One for each parameter group."""
    divided: bool = False
    """Of one of its parameters each rank holds a part, by a mesh."""


class MissingGradient(RowAtLine, frozen=True, kw_only=True):
    """Parameters of a wrap that got no gradient although others of the wrap did."""

    wrap: int
    parameters: tuple[str, ...] = ()
    local: tuple[str, ...] = ()
    """Those of them that got one without synchronisation before: where DDP searches, it averages that."""


class BufferState(RowOfRank, frozen=True, kw_only=True):
    """Digests of a wrap's buffers just before a synchronised training forward, hence before DDP broadcasts them."""

    wrap: int
    forward: int
    """Ordinal of the training forward of this wrap, from 0."""
    digests: Mapping[str, str] = {}


class OwnWrite(RowAtLine, frozen=True, kw_only=True):
    """A line that changed in place, in a training forward, what DDP neither averages nor hands on from rank 0."""

    wrap: int
    name: str


class WrittenBetween(RowOfRank, frozen=True, kw_only=True):
    """Parameters that were not as a step of their optimizer had left them when the next one began."""

    optimizer: int
    step: int
    """The step that left them, from 1."""
    wrap: int
    names: tuple[str, ...] = ()


class StepDigest(RowOfRank, frozen=True, kw_only=True):
    """Digests of what an optimizer holds of one wrap around one of its first steps."""

    optimizer: int
    step: int
    """n-th step of the optimizer, from 1: gradients before it, parameters after it. 0: parameters before the first."""
    wrap: int
    """-1 stands for parameters of no wrapped module."""
    digests: Mapping[str, str] = {}
    """By name; large tensors are sampled, and with many tensors some are left out, alike on every rank."""


class MadeParameters(RowAtLine, frozen=True, kw_only=True):
    """Parameters of an optimizer that are in no wrapped module, which one call chain has made."""

    optimizer: int
    names: Mapping[str, str] = {}
    """Name and model of each, by its name in the digests; empty where no module holds it."""


class ReplicaDigest(RowOfRank, frozen=True, kw_only=True):
    """Digests of the parameters of a DDP module in a live run, after a step."""

    wrap: int
    step: int
    """Steps that the rank's optimizers had made."""
    iterations: int
    """Forwards of the module that had synchronised."""
    digests: Mapping[str, str] = {}
    """By name, of the whole parameter."""


class GradientsTaken(RowAtTime, frozen=True, kw_only=True):
    """Gradients of parameters of wrapped modules that ``torch.autograd.grad`` returned."""

    wraps: tuple[int, ...]


class WrittenAverages(RowOfRank, frozen=True, kw_only=True):
    """Calls in the user's files that could average a model, whether they were reached or not."""

    places: tuple[tuple[str, int], ...]
    """File and line."""


class TrainingState(RowOfRank, frozen=True, kw_only=True):
    """What an optimizer, a scheduler or a gradient scaler held at the first optimizer step."""

    kind: StatefulKind
    number: int
    """Ordinal among objects of its kind in the process."""
    type: str = ""
    digest: str = ""
    loads: tuple[int, ...] = ()
    """Call chains of the calls of ``load_state_dict`` on it, before the first step."""
    late_loads: tuple[int, ...] = ()
    """The same, after the first step: what they changed, only the parameters tell."""
    wraps: tuple[int, ...] = ()
    """Wraps whose parameters it steers, -1 for those of no wrapped module; empty when that is not known."""


class PlateauStep(RowAtLine, frozen=True, kw_only=True):
    """A step of a scheduler that lowers the learning rate where a value that it is given no longer falls."""

    number: int
    """Ordinal of the scheduler among those of the process."""
    value: float


class UnheldParameters(RowOfRank, frozen=True, kw_only=True):
    """Parameters of a wrap that no optimizer holds, though one was built for their model before they were there."""

    wrap: int
    site: int = -1
    """Where the optimizer was made."""
    optimizer_type: str = ""
    parameters: tuple[str, ...] = ()
    """Names of the first of them."""
    count: int = 0
    elements: int = 0
    strangers: int = 0
    """Parameters of the optimizer that are in no wrapped module and have no gradient."""
    steps: int = 0
    """Steps of the optimizer before each of which they had a gradient, and which left them as they were."""


class Uninitialised(RowOfRank, frozen=True, kw_only=True):
    """A tensor that ``to_empty`` left without a value, that nothing wrote, and that a forward then read."""

    name: str
    """From the outermost module, without the names of wrappers."""
    buffer: bool = False
    owner_class: str = ""
    resets: bool = False
    """Its module has a ``reset_parameters``."""
    site: int = -1
    """The newest call of ``to_empty``."""
    receiver: str = ""
    """What the script calls the module there; empty where that is not a name."""
    forward_site: int = -1
    model_class: str = ""
    """Of the outermost module of that forward."""
    emptied: int = 0
    """Tensors in it that ``to_empty`` emptied."""
    unwritten: int = 0
    """Those of them that nothing had written."""


class UnusedSearch(RowOfRank, frozen=True, kw_only=True):
    """What DDP's search for unused parameters had found in the steps of a rank that DDP's logger measured."""

    wrap: int
    looks: int
    """Measured steps so far."""
    found_unused: bool
    """Some parameter was unused in the newest of them, and in none before."""


class UnfollowedForward(RowOfRank, frozen=True, kw_only=True):
    """Training forwards through a DDP module of a live run that the same line ran again before a backward came.

    Only of forwards whose backward would have reduced gradients, and only where a backward followed the last of them.
    """

    wrap: int
    forwards: int
    """Those without a backward of their own."""
    step: int
    """The step that the backward belongs to, by the rank's count."""
    site: int = -1
    """Call chain of the forward."""
    last: bool = False
    """No more of them are written of this module on this rank."""


class NonFinite(RowOfRank, frozen=True, kw_only=True):
    """A loss, a gradient or parameters of a rank that were not finite, where parameters have not been finite since.

    Also one of many backwards in a row of which none was finite. A later row of the same rank, backward and kind knows
    more than the one before.
    """

    kind: NonFiniteKind
    value: str = ""
    """``NaN`` or ``inf``; of gradients, of their sum."""
    backward: int = 0
    """n-th backward of the rank, from 1."""
    step: int = 0
    site: int = -1
    """Call chain of the backward, or of the optimizer's step."""
    parameters: tuple[str, ...] = ()
    """Names of the first that are not finite; of gradients in the order in which a backward comes to them."""
    broken: int = 0
    """Parameters that are not finite."""
    after_step: bool = False
    """They were found so directly after a step of an optimizer."""
    sampled: bool = False
    """The parameter that is looked at after each step is among them."""
    gradients_finite: bool | None = None
    """Whether the gradients that the step used were, where they were still there."""
    learning_rates: tuple[str, ...] = ()
    """Of that step, as numbers or ``inf`` and ``nan``, which JSON has not."""
    pass_ordinal: int = -1
    batch: int = -1
    batch_finite: bool | None = None
    """None where nobody held the newest batch any more."""
    rows: tuple[int, ...] = ()
    """Rows of it that are not finite …"""
    samples: tuple[int, ...] = ()
    """… and their indices in the data set, where these are known."""
    outside: bool = False
    """The graph holds such a value that nothing in it has made."""
    operation: str = ""
    """The first of the graph whose result is not finite, as autograd calls it."""
    in_loss: bool = False
    """It came after the model's forward."""
    near: str = ""
    """The parameter that was used last before it."""
    module: str = ""
    """Name and class of the module that made it, which the next forward has shown."""
    module_class: str = ""
    streak: int = 0
    """So many backwards in a row were not finite, with parameters that are."""


class ResumeStep(RowOfRank, frozen=True, kw_only=True):
    """What a rank held before an optimizer step, and the batches of it, in a rehearsal for ``--resume``."""

    ordinal: int
    """n-th step, from 1."""
    batches: tuple[tuple[int, int, int, tuple[int, ...]], ...] = ()
    """Loader, pass of it, position in that pass, and indices of the samples, which are empty where not known."""
    weights: Mapping[str, str] = {}
    """Digests by wrap and name."""
    buffers: Mapping[str, str] = {}
    """Likewise, of those that are part of a state."""
    inputs: str = ""
    """A digest of the tensors of the batches, and of those that the forwards are given."""
    random: tuple[str, ...] = ()
    """Digests of the states of torch's, Python's and NumPy's own generators as the first of these begins."""
    gradients: tuple[float, ...] = ()
    """Norms of what the optimizer steps with."""
    optimizer: tuple[str, ...] = ()
    """Digests of the state of each optimizer."""
    learning_rates: tuple[str, ...] = ()
    scales: tuple[str, ...] = ()
    """Of gradient scalers that are enabled."""
    handled: int = 0
    """The number of a signal of schedulers that the script handles; 0 for none."""
    time_ns: int = 0


class ResumeSave(RowAtLine, frozen=True, kw_only=True):
    """A dictionary that was given to ``torch.save``, likewise."""

    path: str
    step: int
    """Steps that were made by then."""
    whole: bool = False
    """More than weights is in it: an optimizer, or a count of epochs or steps."""
    weights: bool = False
    """There are tensors in it."""
    optimizer: bool = False
    random: bool = False
    """The state of torch's generator is in it."""
    keys: Mapping[str, str] = {}
    """By key a whole number as it is, and anything else by kind and digest."""
    over_only: bool = False
    """It was written over an earlier one of the job, and no other file of that size was seen."""
    signal: int = 0
    """The signal that the rank had been sent before; a row of its state without batches stands beside it."""


class TensorRead(RowAtTime, frozen=True, kw_only=True):
    """A read of a tensor's value by a line of the user's, in a rehearsal of a job that may run on GPUs."""

    method: str
    """Of ``torch.Tensor``: ``item``, ``__bool__`` …"""


# What the ranks did to files, and how they reached them.

FileAction = Literal[
    "create", "write", "save", "read", "load", "remove", "rename", "mkdir", "refused", "child-process", "held-child"
]
"""``held-child``: a Python that keeps the rules of the rehearsal; ``child-process``: any other program."""
AccessAction = Literal["read", "write", "check", "make", "remove", "move", "lock"]


class FileEvent(RowAtTime, frozen=True, kw_only=True):
    """Something that the ranks did to a file, or a child process that they started."""

    action: FileAction
    path: str
    existed: bool = False
    """The file existed before the run."""
    detail: str = ""
    """What would have happened, when refused; the command of a child process."""


class Access(RowAtTime, frozen=True, kw_only=True):
    """A rank reached a path: what it was about to do there, whatever became of it."""

    action: AccessAction
    """``check``: asked whether it exists. ``make``: of a directory. ``lock``: took a lock, or a file as one."""
    path: str
    found: bool = False
    """There was something under the path."""
    through: str = ""
    """The library that fetches or extracts (``zipfile``, ``urllib``, …) and stands between the user and the call;
    ``flock`` of a lock on an open file."""


PassEnd = Literal["exhausted", "cut", "counted", "abandoned", "open"]


class SampleProbe(msgspec.Struct, frozen=True, kw_only=True):
    """One sample fetched by its index under a fixed seed, so that ranks can be compared."""

    index: int
    """Index into the base data set, beneath any ``Subset``."""
    leaves: tuple[str, ...]
    """The tensors, numbers and strings of the sample in a fixed order, as digests."""


class Loader(RowAtLine, frozen=True, kw_only=True):
    """A DataLoader."""

    loader: int
    """Ordinal in its process."""
    dataset_type: str = ""
    dataset_length: int | None = None
    iterable: bool = False
    sampler_type: str = ""
    own_batches: bool = False
    """It was given a batch sampler, and takes no ``sampler`` beside it."""
    sampler_shards: bool = False
    """The sampler or batch sampler knows ranks (``num_replicas`` and ``rank``)."""
    sampler_rank: int | None = None
    """The rank that the sampler was given."""
    sampler_replicas: int | None = None
    """The number of ranks that the sampler was given."""
    sampler_within: str = ""
    """The class of a sampler beneath it that divides by the same number of ranks."""
    sampler_seed: int | None = None
    """The seed by which the sampler shuffles."""
    sampler_site: int = -1
    """Where the sampler was made."""
    part: int = -1
    """The ``Part`` of its process that is its data set; -1 when the data set is no ``Subset``."""
    sampler_shuffles: bool = False
    batch_size: int | None = None
    workers: int = 0
    persistent: bool = False
    """Its workers are kept between passes."""
    length: int | None = None
    """True number of batches per pass, before any cut; None when it has no length."""
    samples: tuple[SampleProbe, ...] = ()


class Pass(RowAtLine, frozen=True, kw_only=True):
    """One pass over a loader."""

    loader: int
    ordinal: int
    """n-th pass of this loader, from 0."""
    set_epoch: int | None = None
    told_epoch: bool = False
    """A rehearsal saw the sampler's ``set_epoch`` called: an epoch of 0 may then be made of batches that it cut off."""
    true_length: int | None = None
    """Batches that the pass would have had without the cut; None when not known."""
    yielded: int = 0
    end: PassEnd = "open"
    """``counted``, as ``cut``, is an end of ours; its script counts what it draws, and awaits none."""
    by_length: bool = False
    """The script drew as many batches as this rank's own ``len(loader)`` says, to which no other rank agreed."""
    backwards: int = 0
    """Backward calls made while the pass was open."""
    averaged: int | None = None
    """Backwards in which DDP averaged gradients, made on this rank while the pass was open, whatever was drawn; None
    where they were not counted."""
    looped: bool = False
    """A ``for`` statement of the user's outside of a generator drew the batches; counted with ``averaged`` only."""
    ended_ns: int = 0
    """0 while it is open."""
    joined: bool = False
    """A ``join()`` context was open during the pass."""
    stale: tuple[str, ...] = ()
    """Attributes of its data set that items are made with, and that the workers, which are kept, have otherwise."""
    batch_count: int | None = None
    """How many batches the whole pass draws, whatever its length says; None where the next is."""
    index_count: int | None = None
    """How many samples the whole pass draws; None for iterable data sets or when it could not be read to its end."""
    index_digest: str = ""
    """Equal digests are equal index lists, order included."""
    indices: tuple[int, ...] = ()
    """The whole list where it was kept: sorted, Subset indices resolved to the base data set."""
