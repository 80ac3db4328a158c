"""The files of a run directory and the shape of what is in them; stdlib only, shared by writer and reader.

``job.json``                 what was asked for; written by the launcher before the ranks start
``events-PID.jsonl``         one JSON object a line, appended with one ``write`` each, so that a kill loses none
``collectives-PID.ring``     of a rehearsal: a head of ``HEAD_BYTES`` with the heartbeat, then rows of ``ROW_BYTES``
``steps-PID.ring``           of a live run: a head with the pulse, then one row a step; see "Numbered rings" below
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
``rank-N.out``               what the ranks printed

All rings are written with ``pwrite`` and read with ``pread``, and never mapped: a file that is truncated or deleted
under the job, or a disk that is full, costs rows and nothing else, and a mapped one the life of who touches it.

A row of a rehearsal's ring begins with its number, from 1; a slot that holds another number has lost its row. Strings
that repeat (call chains, signatures, groups) are events that are written before the first row that refers to them.

**Numbered rings**: a row is its number (signed 64 bit, from 0), its fields (signed
64 bit each) and the CRC-32 of both; row *n* lies in slot *n* modulo the number of slots. A slot whose checksum fits
holds the row that it names, whatever else happened to the file. A row may be written again with the same number: a call
when it is over. The head is written anew with each pulse, except for the request at ``NUMBERED_COMMAND_OFFSET``, which
is the reader's.
"""

from __future__ import annotations

import struct

VERSION = 1
"""Version of everything in a run directory; a reader refuses newer ones."""

MAGIC = b"DDPDRING"
HEAD_BYTES = 4096
RING_ROWS = 1 << 16

ROW = struct.Struct("<QQQIIIIiiI12x")
"""Number of the row from 1, started_ns, completed_ns (0 while incomplete), group, sequence, signature, site, step,
forward_site, checksum. Of 64 bytes, so that none lies on two pages: those are written one after the other."""
ROW_BYTES = ROW.size
CHECKED = struct.Struct("<QQIIIIii")
"""What the CRC-32 is of: the row without the checksum and ``completed_ns``, which comes later. A reader may meet a row
that is half written, and would take a zero for the first signature and the first site."""
COMPLETED = struct.Struct("<Q")
COMPLETED_OFFSET = 16
"""In a row."""

IDENTITY = struct.Struct("<8sIIIIQ")
"""At offset 0: magic, version, row bytes, ring rows, process id, creation time in ns."""
COUNT = struct.Struct("<Q")
COUNT_OFFSET = 64
"""Rows ever written, as of the newest heartbeat."""
COMMAND = struct.Struct("<I")
COMMAND_OFFSET = 72
"""Number of the newest request for stacks, written by the supervisor."""
LOST = struct.Struct("<Q")
LOST_OFFSET = 80
"""Events that the process could not write."""
POLLING = struct.Struct("<QQ")
POLLING_OFFSET = 88
"""Since when the main thread has done nothing but ask for a file, in vain (0: it has not), and when it asked
last."""
HEARTBEAT = struct.Struct("<QQQqIIIIIxxxxQQ")
HEARTBEAT_OFFSET = 128
"""heartbeat_ns, main thread's CPU time in ns, hash of the main thread's stack, row that the main thread waits in (-1:
none), milliseconds for which the stack has not changed, training forwards, backwards, optimizer steps, stack requests
answered, end of the sleep that the main thread is in (0: none), bytes that the ring's own calls of the system moved."""

STEPS_MAGIC = b"DDPDSTEP"
CALLS_MAGIC = b"DDPDCALL"
NUMBERED_ROWS = 4096
"""Slots of a numbered ring."""
STEP_FIELDS = (
    "step",
    "started_at_ns",
    "ended_at_ns",
    "data_wait_ns",
    "forward_ns",
    "backward_ns",
    "explicit_ns",
    "optimizer_ns",
    "exposed_ns",
    "window_ns",
    "ready_at_ns",
    "reduced_at_ns",
    "reduced_bytes",
    "buckets",
    "explicit_calls",
    "explicit_bytes",
    "samples",
    "batches",
    "micro_batches",
    "synchronised",
    "device_forward_ns",
    "device_backward_ns",
    "device_optimizer_ns",
)
"""As in ``measured.StepTrack``."""
CALL_FIELDS = ("kind", "group", "sequence", "step", "entered_at_ns", "left_at_ns", "size_bytes", "site")
"""As in ``measured.CallTrack``; kind is an index into ``CALL_KINDS``; the sequence of a
point-to-point call is -2 less its peer, or -1; group and site are the process's own numbers."""
CALL_KINDS = (
    "buffers",
    "all_reduce",
    "all_reduce_coalesced",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_coalesced",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "monitored_barrier",
    "send",
    "recv",
    "isend",
    "irecv",
    "batch_isend_irecv",
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
    "reduction",
)
"""What is waited in: explicit collectives as users spell them, DDP's broadcast of buffers, and (in a pulse only) the
reduction of gradients at the end of a backward."""
PHASES = (
    "starting",
    "data_wait",
    "forward",
    "backward",
    "explicit",
    "optimizer",
    "evaluation",
    "saving",
    "other",
    "finished",
)
"""As ``measured.Phase``."""

PULSE = struct.Struct("<21q")
PULSE_FIELDS = (
    "beat_at_ns",
    "phase",
    "phase_since_ns",
    "step",
    "kind",
    "sequence",
    "enqueued",
    "completed",
    "site",
    "main_cpu_ns",
    "unchanged_ms",
    "stack_hash",
    "forwards",
    "backwards",
    "optimizer_steps",
    "answered",
    "sleeps_until_ns",
    "lost_events",
    "lost_rows",
    "blocked",
    "own_bytes",
)
"""``kind`` is -1 outside of any collective; ``answered`` is the newest request that was served; ``blocked`` is 1
while a collective is under way and the training thread does nothing, in a place that is not Python's own;
``own_bytes`` are those that the probe itself has read and written by now; the rest is as in ``measured.Pulse``."""
PULSE_OFFSET = 64
"""In a numbered ring's head, behind the identity; a CRC-32 of the pulse follows it."""
NEXT = struct.Struct("<Q")
NEXT_OFFSET = 40
"""In a numbered ring's head, behind the identity: number of the first row that was not written yet."""
NUMBERED_COMMAND_OFFSET = 1024
"""Number of the newest request for stacks and collectives, written by the reader."""

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


def events_name(pid: int) -> str:
    """Name of the event file of one process."""
    return f"events-{pid}.jsonl"


def ring_name(pid: int) -> str:
    """Name of the ring of one process."""
    return f"collectives-{pid}.ring"


def stacks_name(pid: int) -> str:
    """Name of the file that ``faulthandler`` writes for one process."""
    return f"stacks-{pid}.txt"


def last_words_name(pid: int) -> str:
    """Name of the file that ``faulthandler`` writes when one process crashes."""
    return f"last-words-{pid}.txt"


def indices_name(pid: int, number: int) -> str:
    """Name of the file that holds the sample indices of one pass."""
    return f"indices-{pid}-{number}.bin"


def steps_name(pid: int) -> str:
    """Name of the ring of steps of one process."""
    return f"steps-{pid}.ring"


def calls_name(pid: int) -> str:
    """Name of the ring of explicit collectives of one process."""
    return f"calls-{pid}.ring"


def numbered_row(fields: int) -> struct.Struct:
    """Return the row of a numbered ring, without its checksum."""
    return struct.Struct(f"<{fields + 1}q")
