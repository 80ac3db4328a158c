"""The files of a run directory and the shape of what is in them; stdlib only, shared by writer and reader.

``job.json``                 what was asked for; written by the launcher before the ranks start
``events-PID.jsonl``         one JSON object a line, appended with one ``write`` each, so that a kill loses none
``collectives-PID.ring``     a head of ``HEAD_BYTES`` with the heartbeat, then rows of ``ROW_BYTES``
``indices-PID-N.bin``        the sorted sample indices of one pass, signed 64-bit, native byte order
``stacks-PID.txt``           what ``faulthandler`` wrote when the rank could not answer itself
``created-files.log``        files that the ranks made
``rank-N.out``               what the ranks printed

A row is committed by the count in the head, which is written after the row; strings that repeat (call chains,
signatures, groups) are events that are written before the first row that refers to them.
"""

from __future__ import annotations

import struct

VERSION = 1
"""Version of everything in a run directory; a reader refuses newer ones."""

MAGIC = b"DDPDRING"
HEAD_BYTES = 4096
RING_ROWS = 1 << 16

ROW = struct.Struct("<QQIIIIii")
"""started_ns, completed_ns (0 while incomplete), group, sequence, signature, site, step, forward_site."""
ROW_BYTES = ROW.size

IDENTITY = struct.Struct("<8sIIIIQ")
"""At offset 0: magic, version, row bytes, ring rows, process id, creation time in ns."""
COUNT = struct.Struct("<Q")
COUNT_OFFSET = 64
"""Rows ever written."""
COMMAND = struct.Struct("<I")
COMMAND_OFFSET = 72
"""Number of the newest request for stacks, written by the supervisor."""
LOST = struct.Struct("<Q")
LOST_OFFSET = 80
"""Events that the process could not write."""
POLLING = struct.Struct("<QQ")
POLLING_OFFSET = 88
"""Since when the main thread has done nothing but ask for a file that is not there (0: it has not), and when it asked
last."""
HEARTBEAT = struct.Struct("<QQQqIIIIIxxxxQ")
HEARTBEAT_OFFSET = 128
"""heartbeat_ns, main thread's CPU time in ns, hash of the main thread's stack, row that the main thread waits in (-1:
none), milliseconds for which the stack has not changed, training forwards, backwards, optimizer steps, stack requests
answered, end of the sleep that the main thread is in (0: none)."""

JOB_FILE = "job.json"
CREATED_FILES_LOG = "created-files.log"
RUN_VARIABLE = "DDPDOCTOR_RUN"
"""Environment variable that names the run directory; what makes the boot directory wake up."""


def events_name(pid: int) -> str:
    """Name of the event file of one process."""
    return f"events-{pid}.jsonl"


def ring_name(pid: int) -> str:
    """Name of the ring of one process."""
    return f"collectives-{pid}.ring"


def stacks_name(pid: int) -> str:
    """Name of the file that ``faulthandler`` writes for one process."""
    return f"stacks-{pid}.txt"


def indices_name(pid: int, number: int) -> str:
    """Name of the file that holds the sample indices of one pass."""
    return f"indices-{pid}-{number}.bin"
