"""What the links of a GPU carry by their standards, in bytes per second and one direction."""

from __future__ import annotations

_PCIE_LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""One lane of each generation, after line coding."""

_NVLINK_BYTES_PER_S = {1: 20e9, 2: 25e9, 3: 25e9, 4: 25e9, 5: 50e9}
"""One link of each version."""


def pcie_bytes_per_s(generation: int | None, width: int | None) -> float | None:
    """Return a PCIe link of so many lanes; None where the generation or the width is not known."""
    lane = None if generation is None else _PCIE_LANE_BYTES_PER_S.get(generation)
    return None if lane is None or not width else lane * width


def nvlink_bytes_per_s(active_links: int, megabytes_per_link: int | None, version: int | None) -> float | None:
    """The active NVLinks of a GPU together: by the speed that the driver reports for one, else by their version."""
    link = megabytes_per_link * 1e6 if megabytes_per_link else _NVLINK_BYTES_PER_S.get(version or 0)
    return None if link is None else link * active_links
