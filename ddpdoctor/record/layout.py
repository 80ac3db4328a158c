"""The files of a run directory and the shape of what is in them; stdlib only, shared by writer and reader.

``job.json``                 what was asked for; written by the launcher before the ranks start
``events-PID.jsonl``         one JSON object a line, appended with one ``write`` each, so that a kill loses none; also
                             what torch's flight recorder held (``flight``), where a hang is suspected
``collectives-PID.ring``     of a rehearsal: a head with the heartbeat, then one row a collective; see "Rings" below
``steps-PID.ring``           of a live run: a head with the heartbeat, then one row a step
``calls-PID.ring``           of a live run: a head, then one row for each explicit collective
``indices-PID-N.bin``        the sorted sample indices of one pass, signed 64-bit, native byte order
``stacks-PID.txt``           what ``faulthandler`` wrote when the rank could not answer itself
``last-words-PID.txt``       of a live run: what ``faulthandler`` wrote when the rank crashed (SIGABRT, SIGSEGV …)
``created-files.log``        files that the ranks made
``head.txt``                 of a live run on several nodes: where the monitor that sees all ranks is
``head.key``                 of a live run on several nodes: its keys, for a monitor that takes the place of a dead one
``attach.key``               of a live run whose monitor listens: what a screen elsewhere needs to be let in
``seeks.txt``                of a live run on several nodes: the rank that is to find out where that monitor is
``nodes.lock``               of a live run: locked by the monitor that talks to those of other nodes
``clock.json``               of a live run on several nodes: how this node's clock differs from that of the first one
``history.sqlite``           of a live run: the snapshots that were shown
``owner.json``               of a rehearsal: the process that made the directory, and its machine
``on-hang.log``              of a live run: what the command of ``--on-hang`` wrote
``files-in-the-overlay.log`` of a rehearsal in an overlay: files that it made or changed there
``launcher.out``             what the launcher printed, and ranks that the script itself started
``output/``                  what the ranks printed, as torch's launcher redirects it
``probe-PID.log``            why the probe did not start in a process

**Rings** are written with ``pwrite`` and read with ``pread``, and never mapped: a file that is truncated or deleted
under the job, or a disk that is full, costs rows and nothing else, and a mapped one the life of who touches it. A row
is its number (signed 64 bit, from 0), its fields (signed 64 bit each) and the CRC-32 of both; row *n* lies in slot *n*
modulo the number of slots. A slot whose checksum fits holds the row that it names, whatever else happened to the file.
A row may be written again with the same number: a call when it is over. The head is written with each heartbeat but
for the request at ``COMMAND_OFFSET``, which is the reader's. Strings that repeat (call chains, signatures, groups) are
events that are written before the first row that refers to them.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

VERSION = 1
"""Version of everything in a run directory; a reader refuses newer ones."""

HEAD_BYTES = 4096
IDENTITY = struct.Struct("<8sIIIIQ")
"""At offset 0: magic, version, row bytes, ring rows, process id, creation time in ns."""
NEXT = struct.Struct("<Q")
NEXT_OFFSET = 40
"""In a head, behind the identity: number of the first row that was not written yet."""
HEARTBEAT_OFFSET = 64
"""In a head: the newest heartbeat, a signed 64-bit number a field, then a CRC-32 of them."""
COMMAND = struct.Struct("<I")
COMMAND_OFFSET = 1024
"""Number of the newest request for stacks and collectives, written by the reader."""
CHECKSUM_BYTES = 4
CORE_TIME = "core time"
"""The gauge of what all threads of a rank compute."""
CORE_WAIT = "waiting for a core"
"""That of what its main thread waits while it could run."""
KERNEL_TIME = "time in the kernel"
"""The part of the core time that the kernel takes, as for page faults."""
PAGE_FAULTS = "page faults"
"""Those that read nothing: a page of memory is touched for the first time since the allocator took it."""


class RingKind(NamedTuple):
    """What the rows and the heartbeat of a ring hold."""

    magic: bytes
    fields: tuple[str, ...]
    rows: int
    """Slots."""
    finished_by: str = ""
    """The field that is 0 in a row which will be written again."""
    heartbeat_fields: tuple[str, ...] = ()
    in_order: bool = False
    """Rows are written one after the other: one that is not there when the next one is was lost."""


COLLECTIVE_ROWS = 1 << 16
COLLECTIVES = RingKind(
    b"DDPDCOLL",
    ("group", "sequence", "signature", "site", "step", "forward_site", "started_ns", "completed_ns"),
    COLLECTIVE_ROWS,
    "completed_ns",
    (
        "beat_at_ns", "main_cpu_ns", "stack_hash", "waiting_row", "unchanged_ms", "forwards", "backwards",
        "optimizer_steps", "answered", "sleeps_until_ns", "lost_events", "polling_since_ns", "polled_at_ns",
        "own_bytes",
    ),
    in_order=True,
)  # fmt: skip
"""Of a rehearsal: a row is written before its collective is entered, which may end the process. In the heartbeat:
``waiting_row`` is the row that the main thread waits in (-1: none); ``polling_since_ns`` since when it has done nothing
but ask for a file, for nothing (0: it has not), and ``polled_at_ns`` when it asked last; the rest is as in a live
run's."""

LIVE_ROWS = 4096
"""Slots of a ring of a live run."""
STEP_FIELDS = (
    "step", "started_at_ns", "ended_at_ns", "data_wait_ns", "forward_ns", "backward_ns", "explicit_ns",
    "optimizer_ns", "exposed_ns", "window_ns", "ready_at_ns", "reduced_at_ns", "reduced_bytes", "buckets",
    "explicit_calls", "explicit_bytes", "samples", "batches", "micro_batches", "synchronised", "device_forward_ns",
    "device_backward_ns", "device_optimizer_ns",
)  # fmt: skip
"""As in ``measured.StepTrack``."""
CALL_FIELDS = ("kind", "group", "sequence", "step", "entered_at_ns", "left_at_ns", "size_bytes", "site")
"""As in ``measured.CallTrack``; kind is an index into ``CALL_KINDS``; the sequence of a
point-to-point call is -2 less its peer, or -1; group and site are the process's own numbers."""
CALL_KINDS = (
    "buffers", "all_reduce", "all_reduce_coalesced", "broadcast", "reduce", "all_gather", "all_gather_into_tensor",
    "all_gather_coalesced", "gather", "scatter", "reduce_scatter", "reduce_scatter_tensor", "all_to_all",
    "all_to_all_single", "barrier", "monitored_barrier", "send", "recv", "isend", "irecv", "batch_isend_irecv",
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
    "recv_object_list", "reduction",
)  # fmt: skip
"""What is waited in: explicit collectives as users spell them, DDP's broadcast of buffers, and (in a heartbeat) the
reduction of gradients at the end of a backward."""
PHASES = (
    "starting", "data_wait", "forward", "backward", "explicit", "optimizer", "evaluation", "saving", "other",
    "finished",
)  # fmt: skip
"""As ``measured.Phase``."""

HEARTBEAT_FIELDS = (
    "beat_at_ns", "phase", "phase_since_ns", "step", "kind", "sequence", "enqueued", "completed", "site",
    "main_cpu_ns", "unchanged_ms", "stack_hash", "forwards", "backwards", "optimizer_steps", "answered",
    "sleeps_until_ns", "lost_events", "lost_rows", "blocked", "own_bytes",
)  # fmt: skip
"""``kind`` is -1 outside of any collective; ``answered`` is the newest request that was served; ``blocked`` is 1
while a collective is under way and the training thread does nothing, in a place that is not Python's own;
``own_bytes`` are those that the probe itself has read and written by now; the rest as in ``measured.RankHeartbeat``."""
STEPS = RingKind(b"DDPDSTEP", STEP_FIELDS, LIVE_ROWS, heartbeat_fields=HEARTBEAT_FIELDS)
CALLS = RingKind(b"DDPDCALL", CALL_FIELDS, LIVE_ROWS, "left_at_ns")

EVENTS_FILE = "events-{}.jsonl"
COLLECTIVES_FILE = "collectives-{}.ring"
STEPS_FILE = "steps-{}.ring"
CALLS_FILE = "calls-{}.ring"
STACKS_FILE = "stacks-{}.txt"
CRASH_DUMP_FILE = "last-words-{}.txt"
INDICES_FILE = "indices-{}-{}.bin"
"""Names of the files of one process, with its number; of the last one with that of the pass as well."""
JOB_FILE = "job.json"
HEAD_FILE = "head.txt"
HEAD_KEY_FILE = "head.key"
ATTACH_FILE = "attach.key"
PLACE_FILE = "nodes.lock"
"""Locked by the monitor that talks to those of other nodes."""
SEEK_FILE = "seeks.txt"
"""Number of the rank that is to find out where the head is."""
CLOCK_FILE = "clock.json"
MOST_HEAD_BYTES = 1024
"""The longest line that one node hands to another, in ``head.txt``."""
RUN_VARIABLE = "DDPDOCTOR_RUN"
"""Environment variable that names the run directory; what makes the boot directory wake up."""


def numbers(fields: int) -> struct.Struct:
    """Return so many signed 64-bit numbers as they lie in a ring."""
    return struct.Struct(f"<{fields}q")
