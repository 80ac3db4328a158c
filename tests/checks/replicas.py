"""Records of wraps that are trained step by step, built by hand: forwards, backwards, optimizer steps, digests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ddpdoctor.record.model import Forward, RunRecord, TensorInfo, Wrap
from ddpdoctor.record.streams.training import Backward, Loader, OptimizerStep, Pass, StepDigest, Unreduced
from tests.diagnosis.jobs import JobBuilder

WRAP_LINE, FORWARD_LINE, BACKWARD_LINE, STEP_LINE, LOADER_LINE = 30, 40, 50, 60, 20
NAMES = ("body.weight", "head.weight")
ELEMENTS = 1_000


class Replicas(JobBuilder):
    """A job of two ranks that trains; every method lets all ranks do the same, with what differs given by rank."""

    def __init__(self, ranks: int = 2, wrapped: bool = True, **job: Any) -> None:
        super().__init__(ranks, **job)
        self.rows: dict[str, list[Any]] = {}
        self.gradients: dict[str, str] = {}
        self.wrap = 0 if wrapped else -1
        self.ordinal = 0
        self.holds_gradients = False
        if wrapped:
            for rank in self.ranks:
                self.add("wraps", self.wrapped(rank))

    def wrapped(self, rank: int, **fields: Any) -> Wrap:
        """A wrap of two parameters of 500 elements each."""
        tensors = (
            TensorInfo(name=name, shape=(500,), dtype="float32", size_bytes=2_000, requires_grad=True) for name in NAMES
        )
        options: dict[str, Any] = {"find_unused_parameters": False, "static_graph": False}
        values = {
            "wrap": 0,
            "site": self.site(WRAP_LINE),
            "module_class": "Net",
            "options": options,
            "parameters": tuple(tensors),
            "ranks": self.ranks,
        }
        return Wrap(rank=rank, **{**values, **fields})

    def add(self, stream: str, *rows: Any) -> None:
        """Put rows into a stream."""
        self.rows.setdefault(stream, []).extend(rows)

    def forward(self, *, synchronised: bool = True) -> None:
        """A training forward."""
        for rank in self.ranks:
            fields: dict[str, Any] = {"synchronised": synchronised, "time_ns": self.tick()}
            site = self.site(FORWARD_LINE)
            self.add("forwards", Forward(rank=rank, wrap=0, site=site, step=1, gradients=True, training=True, **fields))

    def backward(self, why: Any = "", *, inside_no_sync: bool = False) -> None:
        """A backward that DDP reduces, or the reason why it does not."""
        for rank in self.ranks:
            reached = (0,) if self.wrap == 0 else ()
            self.add(
                "backwards",
                Backward(
                    rank=rank,
                    site=self.site(BACKWARD_LINE),
                    wraps=reached,
                    synchronised=() if why else reached,
                    unreduced=(Unreduced(wrap=0, why=why),) if why else (),
                    accumulated=reached if self.holds_gradients else (),
                    inside_no_sync=reached if inside_no_sync else (),
                    time_ns=self.tick(),
                ),
            )
        self.holds_gradients = True

    def optimizer_step(
        self,
        gradients: Iterable[str] = (),
        parameters: Iterable[str] = (),
        *,
        cleared: bool = True,
        rates: tuple[float, ...] = (0.1, 0.1),
    ) -> None:
        """A step; the gradients and the parameters that are named differ between the ranks around it."""
        self.ordinal += 1
        self.digests("gradient_digests", self.ordinal, gradients)
        for rank in self.ranks:
            step = OptimizerStep(
                rank=rank,
                optimizer=0,
                ordinal=self.ordinal,
                site=self.site(STEP_LINE),
                wraps=(self.wrap,),
                elements=ELEMENTS,
                learning_rates=(rates[rank],),
                time_ns=self.tick(),
            )
            self.add("optimizer_steps", step)
        self.digests("parameter_digests", self.ordinal, parameters)
        self.holds_gradients = self.holds_gradients and not cleared

    def digests(self, stream: str, step: int, unequal: Iterable[str] = ()) -> None:
        """Digests on all ranks; the tensors that are named differ."""
        differ = set(unequal)
        for rank in self.ranks:
            digests = {name: f"{step} {rank if name in differ else ''}" for name in NAMES}
            self.add(stream, StepDigest(rank=rank, optimizer=0, step=step, wrap=self.wrap, digests=digests))

    def pass_ends(self, end: Any, yielded: int, true_length: int | None = None) -> None:
        """A pass over the loader ends."""
        for rank in self.ranks:
            fields: dict[str, Any] = {"yielded": yielded, "true_length": true_length, "backwards": yielded}
            whole = Pass(rank=rank, loader=0, ordinal=0, end=end, ended_ns=self.tick(), **fields)
            self.add("passes", whole)

    def loader(self, **fields: Any) -> None:
        """A loader that gives every rank its own part."""
        for rank in self.ranks:
            values = {"site": self.site(LOADER_LINE), "sampler_shards": True, "batch_size": 8, **fields}
            self.add("loaders", Loader(rank=rank, loader=0, **values))

    def seen(self, **streams: Any) -> RunRecord:
        """The record, with further streams or in place of those built."""
        return self.record(**{**{name: tuple(rows) for name, rows in self.rows.items()}, **streams})
