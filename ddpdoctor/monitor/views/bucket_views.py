"""Names the gradient buckets of a run's DDP modules; pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ddpdoctor.monitor.snapshot import BucketView
from ddpdoctor.record.model import RunRecord, Wrap
from ddpdoctor.record.streams.measured import BucketLayout


def bucket_views(record: RunRecord) -> tuple[BucketView, ...]:
    """Return the newest buckets of each DDP module, first ready first.

    They are the first rank's: DDP lets it decide for all. Of modules that the same line wraps one after the other, as
    for each fold of a cross-validation, the newest stands for all.
    """
    layouts = {layout.wrap: layout for layout in record.bucket_layouts if layout.rank == _first_rank(record)}
    wraps = {wrap.wrap: wrap for wrap in record.wraps if wrap.rank == _first_rank(record)}
    newest = {(wraps[number].site, wraps[number].module_class): number for number in sorted(layouts) if number in wraps}
    classes = Counter(wraps[number].module_class for number in newest.values())
    views: list[BucketView] = []
    for number in newest.values():
        name = wraps[number].module_class
        views += _views(layouts[number], wraps[number], name if classes[name] == 1 else f"{name} (wrap {number})")
    return tuple(views)


def _first_rank(record: RunRecord) -> int:
    return min((layout.rank for layout in record.bucket_layouts), default=0)


def _views(layout: BucketLayout, wrap: Wrap, module: str) -> Iterator[BucketView]:
    """One module's buckets; DDP numbers the parameters that want gradients in the order of the module's own."""
    names = [one.name for one in wrap.parameters if one.requires_grad and one.name not in wrap.ignored]
    for order, size_bytes in enumerate(layout.sizes_bytes):
        first = layout.first_parameters[order] if order < len(layout.first_parameters) else -1
        yield BucketView(
            module=module,
            order=order,
            size_bytes=size_bytes,
            parameters=layout.parameter_counts[order] if order < len(layout.parameter_counts) else None,
            first_parameter=names[first] if 0 <= first < len(names) else "",
        )
