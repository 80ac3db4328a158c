"""A link with a delay, where the kernel has no netem: carries frames between two tap devices, each so much later.

``python -m tests.nodes.delay SPACE DEVICE SPACE DEVICE MILLISECONDS`` makes the devices in two network namespaces.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

_SET_INTERFACE = 0x400454CA
_TAP_WITHOUT_HEADER = 0x0002 | 0x1000
_NETWORK = 0x40000000


def _tap(space: str, device: str) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{space}", "rb") as file:
        if libc.setns(file.fileno(), _NETWORK):
            raise OSError(ctypes.get_errno(), space)
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _SET_INTERFACE, struct.pack("16sH", device.encode(), _TAP_WITHOUT_HEADER))
    return descriptor


def carry(left: int, right: int, delay_s: float) -> None:
    """Carry frames both ways until one side is gone."""
    waiting: deque[tuple[float, int, bytes]] = deque()
    while True:
        pause_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 1.0
        readable, _, _ = select.select([left, right], [], [], pause_s)
        for side in readable:
            while True:
                try:
                    frame = os.read(side, 65_536)
                except BlockingIOError:
                    break
                waiting.append((time.monotonic() + delay_s, right if side == left else left, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, side, frame = waiting.popleft()
            try:
                os.write(side, frame)
            except (BlockingIOError, OSError):
                continue  # A link loses what it has no room for.


if __name__ == "__main__":
    first, second = _tap(sys.argv[1], sys.argv[2]), _tap(sys.argv[3], sys.argv[4])
    print("up", flush=True)
    carry(first, second, float(sys.argv[5]) / 1_000)
