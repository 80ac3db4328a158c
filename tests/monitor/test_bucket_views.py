"""Which gradient buckets are shown, and under which names."""

from __future__ import annotations

from ddpdoctor.monitor.build_snapshot import bucket_views
from ddpdoctor.record.model import Job, RunRecord, TensorInfo, Wrap
from ddpdoctor.record.streams.measured import BucketLayout


def wrap(number: int, site: int, name: str = "Net", rank: int = 0) -> Wrap:
    parameters = tuple(TensorInfo(name=key, requires_grad=key != "frozen") for key in ("frozen", "left out", "a", "b"))
    return Wrap(rank=rank, wrap=number, site=site, module_class=name, parameters=parameters, ignored=("left out",))


def layout(number: int, first: int = 1, rank: int = 0) -> BucketLayout:
    return BucketLayout(
        rank=rank, wrap=number, sizes_bytes=(8, 4), parameter_counts=(1, 1), first_parameters=(first, 1 - first)
    )


def shown(wraps: tuple[Wrap, ...], layouts: tuple[BucketLayout, ...]) -> list[tuple[str, int, str]]:
    record = RunRecord(job=Job(kind="run"), wraps=wraps, bucket_layouts=layouts)
    return [(view.module, view.order, view.first_parameter) for view in bucket_views(record)]


def test_parameters_are_counted_without_those_that_ddp_leaves_alone_and_ranks_are_not_repeated() -> None:
    wraps = (wrap(0, 1), wrap(0, 1, rank=1))
    assert shown(wraps, (layout(0), layout(0, rank=1))) == [("Net", 0, "b"), ("Net", 1, "a")]


def test_the_newest_layout_counts() -> None:
    assert shown((wrap(0, 1),), (layout(0), layout(0, first=0))) == [("Net", 0, "a"), ("Net", 1, "b")]


def test_modules_of_one_class_are_told_apart_and_those_of_one_line_are_one() -> None:
    pair = (wrap(0, 1), wrap(1, 2), wrap(2, 2))
    modules = [module for module, *_ in shown(pair, tuple(layout(number) for number in range(3)))]
    assert modules == ["Net (wrap 0)"] * 2 + ["Net (wrap 2)"] * 2


def test_buckets_that_were_not_rebuilt_have_a_size_only() -> None:
    first = BucketLayout(rank=0, wrap=0, sizes_bytes=(8,))
    record = RunRecord(job=Job(kind="run"), wraps=(wrap(0, 1),), bucket_layouts=(first,))
    (view,) = bucket_views(record)
    assert (view.size_bytes, view.parameters, view.first_parameter) == (8, None, "")


def test_an_index_that_fits_no_parameter_names_none() -> None:
    assert [name for *_, name in shown((wrap(0, 1),), (layout(0, first=7),))] == ["", ""]
