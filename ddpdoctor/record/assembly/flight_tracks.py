"""Makes collective tracks of what the ranks of a live run wrote of torch's flight recorder."""

from __future__ import annotations

from array import array

from ddpdoctor.record.events import Flight

MOST_KEPT = 2_000
"""As many as torch's own recorder holds."""
MOST_HELD = 20 * MOST_KEPT
"""More are not held of a process, though what is compared with others must not be forgotten meanwhile: 17 MB."""
COLUMNS = ("record", "group", "sequence", "signature", "site", "started_ns", "over")


class FlightTracks:
    """The entries of each process, in the process's own numbers.

    Where a recorder overflowed between two dumps its earlier entries are dropped: the rest must be without a gap.
    """

    def __init__(self) -> None:
        self._entries: dict[int, dict[tuple[int, int], dict[str, int]]] = {}
        """By process, then by recorder and number in it."""
        self.newest_ns: dict[int, int] = {}
        """When each process wrote its newest dump."""
        self._columns: dict[int, dict[str, array[int]]] = {}
        """Of each process, until it writes more."""

    def take(self, pid: int, event: Flight) -> None:
        """Take in one dump."""
        recorder, time_ns = event.recorder, event.time_ns
        entries = self._entries.setdefault(pid, {})
        self._columns.pop(pid, None)
        self.newest_ns[pid] = max(time_ns, self.newest_ns.get(pid, 0))
        if not event.continues:
            for key in [key for key in entries if key[0] == recorder]:
                del entries[key]
        for number in event.completed:
            if (recorder, number) in entries:
                entries[recorder, number]["completed_ns"] = time_ns
        for row in event.rows:
            entry = dict(zip(COLUMNS, row, strict=True))
            entry["completed_ns"] = time_ns if entry.pop("over") else 0
            entries[recorder, entry["record"]] = entry
        if len(entries) > MOST_HELD:
            self._forget(pid)

    def processes(self) -> set[int]:
        """Processes of which something is known."""
        return {pid for pid, entries in self._entries.items() if entries}

    def columns(self, pid: int) -> dict[str, array[int]]:
        """Return the columns of a track, in the order of their start, in the process's own numbers; not to be
        changed.
        """
        if pid not in self._columns:
            self._columns[pid] = self._made(pid)
        return dict(self._columns[pid])

    def keep_newest(self) -> None:
        """Forget all but the newest ``MOST_KEPT`` entries of each process."""
        for pid, entries in self._entries.items():
            if len(entries) > MOST_KEPT:
                self._forget(pid)

    def forget(self, pid: int) -> None:
        """Forget all entries of a process."""
        for table in (self._entries, self._columns, self.newest_ns):
            table.pop(pid, None)

    def _forget(self, pid: int) -> None:
        entries = self._entries[pid]
        self._entries[pid] = {key: entries[key] for _, key in self._in_order(pid)[-MOST_KEPT:]}
        self._columns.pop(pid, None)

    def _in_order(self, pid: int) -> list[tuple[int, tuple[int, int]]]:
        """When each entry began, and its key: by time, and in each recorder by number.

        A stamp may come late: seen 0.2 s behind the stamps of later entries (torch 2.13, PowerSGD's hook, which calls
        from two threads, on a loaded machine). Collectives in another order would be paired with the wrong ones.
        """
        entries, ordered, next_ns = self._entries[pid], list[tuple[int, tuple[int, int]]](), dict[int, int]()
        for key in sorted(entries, reverse=True):
            started_ns = entries[key]["started_ns"]
            next_ns[key[0]] = min(started_ns, next_ns.get(key[0], started_ns))
            ordered.append((next_ns[key[0]], key))
        return sorted(ordered)

    def _made(self, pid: int) -> dict[str, array[int]]:
        ordered = self._in_order(pid)
        entries = [self._entries[pid][key] for _, key in ordered]
        columns = {
            name: array("q", [entry[name] for entry in entries])
            for name in ("group", "sequence", "signature", "site", "completed_ns")
        }
        return columns | {
            "started_ns": array("q", [started_ns for started_ns, _ in ordered]),
            "step": array("q", [0] * len(entries)),
            "forward_site": array("q", [-1] * len(entries)),
        }

    def oldest_open(self, pid: int) -> int:
        """Position of the first entry that is not over; -1 when there is none."""
        if pid not in self._entries:
            return -1
        completed = self.columns(pid)["completed_ns"]
        return completed.index(0) if 0 in completed else -1
