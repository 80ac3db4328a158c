"""The GPUs of this node as part of a run's record: sampled, and with the ranks that use them."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from ddpdoctor.record.model import Rank, RunRecord, StreamState
from ddpdoctor.record.streams.measured import Gpu, GpuSample, reasons_in_words
from ddpdoctor.record.writer import epoch_ns

# Samples the GPUs of this node once a second, beside the job and beside the monitor.

# Asks the NVIDIA driver about its GPUs, through its own management library and the binding `nvidia-ml-py`.

_MIG_ON = 1
_MAXIMUM_NVLINKS = 36
_XID_WAIT_MS = 1


class NoGpus(Exception):
    """There is nothing to sample; the argument says why, as a sentence without a full stop."""


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU, or an instance of one that MIG divided, as the driver knows it."""

    index: int
    handle: Any
    whole: Any
    """The GPU that it is part of, which has the temperature, the power and the clocks; itself where it is not divided.
    """


class Driver:
    """The driver's library, opened for this process. Raises ``NoGpus`` where there is none, or no GPU."""

    def __init__(self) -> None:
        try:
            import pynvml
        except ImportError:
            raise NoGpus("the package nvidia-ml-py is not installed, so GPUs were not sampled") from None
        self._nvml: Any = pynvml
        self._lost = False
        try:
            pynvml.nvmlInit()
            count = int(pynvml.nvmlDeviceGetCount())
        except pynvml.NVMLError as error:
            raise NoGpus(_reason(pynvml, error)) from None
        except Exception as error:
            raise NoGpus(f"the NVIDIA driver could not be queried: {error}") from None
        self.unreachable: list[int] = []
        """GPUs that the driver counts and cannot reach, or not for this user."""
        self.devices = tuple(device for index in range(count) for device in self._devices_of(index))
        """GPUs in the order in which the driver counts them."""
        if not self.devices:
            raise NoGpus("the NVIDIA driver shows no GPU to this user")
        self._xids: dict[str, int] = {}
        self._events = self._event_set()

    def describe(self, device: Device) -> Gpu:
        """Return what does not change while a job runs."""
        memory = self._ask("nvmlDeviceGetMemoryInfo", device.handle)
        return Gpu(
            index=device.index,
            uuid=self._ask("nvmlDeviceGetUUID", device.handle) or "",
            name=self._ask("nvmlDeviceGetName", device.handle) or "",
            memory_total_bytes=None if memory is None else int(memory.total),
            power_limit_w=self._watts("nvmlDeviceGetEnforcedPowerLimit", device),
            default_power_limit_w=self._watts("nvmlDeviceGetPowerManagementDefaultLimit", device),
            maximum_sm_clock_mhz=self._ask("nvmlDeviceGetMaxClockInfo", device.whole, self._nvml.NVML_CLOCK_SM),
            nvlink_bytes_per_s=self._nvlink(device),
            pcie_bytes_per_s=pcie_bytes_per_s(
                self._ask("nvmlDeviceGetMaxPcieLinkGeneration", device.whole),
                self._ask("nvmlDeviceGetMaxPcieLinkWidth", device.whole),
            ),
        )

    def look(self, device: Device, *, with_processes: bool) -> GpuSample:
        """One sample; the processes on the GPU are asked for only when wanted, for that takes the driver longest."""
        self._lost = False
        utilisation = self._ask("nvmlDeviceGetUtilizationRates", device.handle)
        memory = self._ask("nvmlDeviceGetMemoryInfo", device.handle)
        temperature = self._ask("nvmlDeviceGetTemperature", device.whole, self._nvml.NVML_TEMPERATURE_GPU)
        reasons = self._first(
            ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"), device.whole
        )
        return GpuSample(
            taken_at_ns=epoch_ns(),
            utilisation_percent=None if utilisation is None else float(utilisation.gpu),
            memory_used_bytes=None if memory is None else int(memory.used),
            temperature_c=None if temperature is None else float(temperature),
            power_w=self._watts("nvmlDeviceGetPowerUsage", device),
            sm_clock_mhz=self._ask("nvmlDeviceGetClockInfo", device.whole, self._nvml.NVML_CLOCK_SM),
            throttle_reasons=reasons_in_words(reasons or 0),
            ecc_errors=self._ask(
                "nvmlDeviceGetTotalEccErrors",
                device.whole,
                self._nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                self._nvml.NVML_VOLATILE_ECC,
            ),
            xid=self._xids.get(self._identity(device)),
            processes=self._processes(device) if with_processes else (),
            lost=self._lost,
        )

    def collect_events(self) -> None:
        """Take in the critical events (Xid) since the last call; they are part of the samples from then on."""
        while self._events is not None:
            try:
                event = self._nvml.nvmlEventSetWait(self._events, _XID_WAIT_MS)
                if event.eventType == self._nvml.nvmlEventTypeXidCriticalError:
                    self._xids[str(self._nvml.nvmlDeviceGetUUID(event.device))] = int(event.eventData)
            except self._nvml.NVMLError_Timeout:
                return
            except Exception:
                # A GPU that is gone, or a driver without events: what was seen stays, and no one asks again.
                self._events = None

    def _devices_of(self, index: int) -> list[Device]:
        try:
            whole = self._nvml.nvmlDeviceGetHandleByIndex(index)
        except Exception:  # not permitted to this user, or lost before we came
            self.unreachable.append(index)
            return []
        mode = self._ask("nvmlDeviceGetMigMode", whole)
        if mode is None or mode[0] != _MIG_ON:
            return [Device(index=index, handle=whole, whole=whole)]
        count = self._ask("nvmlDeviceGetMaxMigDeviceCount", whole) or 0
        parts = [self._ask("nvmlDeviceGetMigDeviceHandleByIndex", whole, part) for part in range(count)]
        return [Device(index=index, handle=part, whole=whole) for part in parts if part is not None]

    def _event_set(self) -> Any:
        """Return where the driver puts critical events of all GPUs; None where it has none for this user."""
        try:
            events = self._nvml.nvmlEventSetCreate()
            for device in self.devices:
                self._nvml.nvmlDeviceRegisterEvents(device.whole, self._nvml.nvmlEventTypeXidCriticalError, events)
        except Exception:
            return None
        return events

    def _identity(self, device: Device) -> str:
        return str(self._ask("nvmlDeviceGetUUID", device.whole) or "") if self._xids else ""

    def _watts(self, name: str, device: Device) -> float | None:
        milliwatts = self._ask(name, device.whole)
        return None if milliwatts is None else milliwatts / 1000

    def _nvlink(self, device: Device) -> float | None:
        """Bytes per second of all active links in one direction."""
        active, version = 0, None
        for link in range(_MAXIMUM_NVLINKS):
            state = self._ask("nvmlDeviceGetNvLinkState", device.whole, link)
            if state is None:
                break
            if state:
                active += 1
                version = version or self._ask("nvmlDeviceGetNvLinkVersion", device.whole, link)
        if not active:
            return None
        return nvlink_bytes_per_s(active, self._megabytes_per_link(device), version)

    def _megabytes_per_link(self, device: Device) -> int | None:
        values = self._ask("nvmlDeviceGetFieldValues", device.whole, [self._nvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON])
        if values is None or values[0].nvmlReturn != self._nvml.NVML_SUCCESS:
            return None
        return int(values[0].value.uiVal)

    def _processes(self, device: Device) -> tuple[tuple[int, int], ...]:
        names = ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2")
        found = self._first(names, device.handle) or ()
        return tuple((int(process.pid), int(process.usedGpuMemory or 0)) for process in found)

    def _first(self, names: tuple[str, ...], *arguments: Any) -> Any:
        """Return what the first of several functions says that this driver has."""
        for name in names:
            answer = self._ask(name, *arguments)
            if answer is not None:
                return answer
        return None

    def _ask(self, name: str, *arguments: Any) -> Any:
        """Return what one function of the library says; None where library, GPU or the user's rights lack it."""
        try:
            return getattr(self._nvml, name)(*arguments)
        except self._nvml.NVMLError as error:
            is_lost = error.value in (self._nvml.NVML_ERROR_GPU_IS_LOST, self._nvml.NVML_ERROR_RESET_REQUIRED)
            self._lost = self._lost or is_lost
        except Exception:  # a binding older or newer than the driver: what it cannot translate is not known
            pass
        return None


def _reason(nvml: Any, error: Any) -> str:
    """Why the driver could not be asked, as a sentence without a full stop."""
    known = {
        nvml.NVML_ERROR_LIBRARY_NOT_FOUND: "there is no NVIDIA driver (libnvidia-ml.so.1 was not found)",
        nvml.NVML_ERROR_DRIVER_NOT_LOADED: "the NVIDIA driver is installed but not loaded",
        nvml.NVML_ERROR_NO_PERMISSION: "the NVIDIA driver does not permit this user to query its GPUs",
        nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "the NVIDIA driver was updated while loaded: reboot",
        nvml.NVML_ERROR_FUNCTION_NOT_FOUND: "the NVIDIA driver is too old",
    }
    return known.get(error.value, f"the NVIDIA driver could not be queried: {error}")


_PCIE_LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""One lane of each generation, after line coding."""

_NVLINK_BYTES_PER_S = {1: 20e9, 2: 25e9, 3: 25e9, 4: 25e9, 5: 50e9}
"""One link of each version."""


def pcie_bytes_per_s(generation: int | None, width: int | None) -> float | None:
    """Return a PCIe link of so many lanes; None where the generation or the width is not known."""
    lane = None if generation is None else _PCIE_LANE_BYTES_PER_S.get(generation)
    return None if lane is None or not width else lane * width


def nvlink_bytes_per_s(active_links: int, megabytes_per_link: int | None, version: int | None) -> float | None:
    """Return the active NVLinks of a GPU together: by the speed that the driver reports, else by their version."""
    link = megabytes_per_link * 1e6 if megabytes_per_link else _NVLINK_BYTES_PER_S.get(version or 0)
    return None if link is None else link * active_links


SAMPLE_EVERY_S = 1.0
KEPT_SAMPLES = 900
"""A quarter of an hour."""
PROCESSES_EVERY_SAMPLES = 5
SILENT_AFTER_S = 5.0
"""A driver that has not answered for so long is said to be silent."""


class GpuSampler:
    """Keeps the newest samples of every GPU of this node; any method may be called at any time and returns at once."""

    def __init__(self, sample_every_s: float = SAMPLE_EVERY_S, silent_after_s: float = SILENT_AFTER_S) -> None:
        self._sample_every_s = sample_every_s
        self._silent_after_s = silent_after_s
        self._lock = threading.Lock()
        self._described: tuple[Gpu, ...] = ()
        self._samples: tuple[deque[GpuSample], ...] = ()
        self._note = ""
        self._asking_since_s: float | None = None
        self._ended = threading.Event()

    def start(self) -> None:
        """Begin to sample; the thread ends with ``close`` or with the process."""
        threading.Thread(target=self._run, name="ddpdoctor-gpus", daemon=True).start()

    def gpus(self) -> tuple[Gpu, ...]:
        """Return the GPUs with their samples, without the ranks that use them; empty where there are none."""
        with self._lock:
            return tuple(
                msgspec.structs.replace(gpu, samples=tuple(samples))
                for gpu, samples in zip(self._described, self._samples, strict=True)
            )

    def note(self) -> str:
        """Why there are no figures, or no new ones, as a sentence without a full stop; empty when all is well."""
        with self._lock:
            since_s = self._asking_since_s
            if self._note or since_s is None:
                return self._note
        silent_s = time.monotonic() - since_s
        if silent_s < self._silent_after_s:
            return ""
        return f"the NVIDIA driver has not answered for {silent_s:.0f} s"

    def close(self) -> None:
        """Stop sampling; does not wait for a driver that hangs."""
        self._ended.set()

    def _run(self) -> None:
        try:
            self._sample()
        except NoGpus as reason:
            self._stop_asking(str(reason))
        except Exception as error:
            self._stop_asking(f"sampling the GPUs failed: {error}")

    def _stop_asking(self, note: str) -> None:
        with self._lock:
            self._note, self._asking_since_s = note, None

    def _sample(self) -> None:
        with self._lock:
            self._asking_since_s = time.monotonic()
        driver = Driver()
        described = tuple(driver.describe(device) for device in driver.devices)
        with self._lock:
            self._described = described
            self._samples = tuple(deque(maxlen=KEPT_SAMPLES) for _ in described)
            if driver.unreachable:
                indices = ", ".join(map(str, driver.unreachable))
                self._note = f"the NVIDIA driver also counts GPU {indices}, but cannot reach it"
        processes: tuple[tuple[tuple[int, int], ...], ...] = ((),) * len(described)
        rounds = 0
        while not self._ended.is_set():
            with self._lock:
                self._asking_since_s = time.monotonic()
            driver.collect_events()
            with_processes = rounds % PROCESSES_EVERY_SAMPLES == 0
            taken = [driver.look(device, with_processes=with_processes) for device in driver.devices]
            if with_processes:
                processes = tuple(sample.processes for sample in taken)
            with self._lock:
                self._asking_since_s = None
                for samples, sample, known in zip(self._samples, taken, processes, strict=True):
                    samples.append(msgspec.structs.replace(sample, processes=known))
            rounds += 1
            self._ended.wait(self._sample_every_s)


_NO_GPUS_WITHOUT = "no GPU was sampled"


class NodeGpus(GpuSampler):
    """Samples from its making until it is closed, and adds what it has to records."""

    def __init__(self) -> None:
        super().__init__()
        self._environments: dict[int, Mapping[str, str]] = {}
        self._host = socket.gethostname()
        self.start()

    def added_to(self, record: RunRecord) -> RunRecord:
        """Return the record with the newest samples; returns at once, whatever the driver does."""
        gpus = self.gpus()
        if not gpus:
            state = StreamState("absent", self.note() or _NO_GPUS_WITHOUT)
            return msgspec.structs.replace(record, streams={**record.streams, "gpus": state})
        here = [self._process(rank) for rank in record.ranks if rank.host in ("", self._host)]
        return msgspec.structs.replace(
            record, gpus=with_ranks(gpus, here), streams={**record.streams, "gpus": StreamState("complete")}
        )

    def _process(self, rank: Rank) -> RankProcess:
        environment = self._environment(rank.pid)
        return RankProcess(
            rank=rank.rank,
            pid=rank.pid,
            local_rank=rank.local_rank,
            visible=environment.get("CUDA_VISIBLE_DEVICES"),
            order=environment.get("CUDA_DEVICE_ORDER", ""),
        )

    def _environment(self, pid: int) -> Mapping[str, str]:
        """Environment of a process, read once: a rank that has ended still counts on its GPU."""
        if pid not in self._environments:
            found = environment_of(pid) if pid else None
            if found is None:
                return {}
            self._environments[pid] = found
        return self._environments[pid]


# Which GPU each rank of this node uses: from the processes on the GPUs, else from what the ranks' environment shows.
#
# ``CUDA_VISIBLE_DEVICES`` names GPUs by index, by UUID or the beginning of one, or by the UUID of a MIG instance.
# Indices count as ``CUDA_DEVICE_ORDER`` says: by PCI bus, as the driver does, or fastest first, which is the same order
# where all GPUs are of one model and is not known where they are not.


class RankProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A rank of this node, by what decides on its GPU."""

    rank: int
    pid: int = 0
    local_rank: int | None = None
    visible: str | None = None
    """Its ``CUDA_VISIBLE_DEVICES``; None when that is not set."""
    order: str = ""
    """Its ``CUDA_DEVICE_ORDER``."""


def with_ranks(gpus: tuple[Gpu, ...], ranks: Iterable[RankProcess]) -> tuple[Gpu, ...]:
    """Return the GPUs with the ranks that use them; a rank with an unknown GPU is on none."""
    users: dict[int, list[int]] = {}
    for rank in ranks:
        position = _position(gpus, rank)
        if position is not None:
            users.setdefault(position, []).append(rank.rank)
    return tuple(
        msgspec.structs.replace(gpu, ranks=tuple(sorted(users.get(position, ())))) for position, gpu in enumerate(gpus)
    )


def environment_of(pid: int) -> Mapping[str, str] | None:
    """Environment that a process of this user was started with; None where it cannot be read."""
    try:
        content = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    pairs = (entry.decode("utf-8", "replace").partition("=") for entry in content.split(b"\0") if entry)
    return {name: value for name, _, value in pairs}


def _position(gpus: tuple[Gpu, ...], rank: RankProcess) -> int | None:
    """Position of the GPU of a rank.

    A process can hold a little memory on a GPU that is not its own, so of several that it is on the one that its
    environment names counts, and else the one that holds most.
    """
    named = _named(gpus, rank)
    held = _held(gpus, rank.pid) if rank.pid else {}
    return named if not held or named in held else max(held, key=lambda position: held[position])


def _held(gpus: tuple[Gpu, ...], pid: int) -> dict[int, int]:
    """Bytes that a process holds, by position of the GPU."""
    newest = {position: gpu.samples[-1].processes for position, gpu in enumerate(gpus) if gpu.samples}
    return {position: size for position, processes in newest.items() for process, size in processes if process == pid}


def _named(gpus: tuple[Gpu, ...], rank: RankProcess) -> int | None:
    """Position of the GPU that a rank's environment and local rank name together."""
    seen = visible_positions(gpus, rank.visible, rank.order)
    if seen is None:
        return None
    number = 0 if len(seen) == 1 else rank.local_rank
    return seen[number] if number is not None and 0 <= number < len(seen) else None


def visible_positions(gpus: tuple[Gpu, ...], visible: str | None, order: str) -> tuple[int, ...] | None:
    """Positions of the GPUs that a process sees, in its own order; None when that is not known.

    As in CUDA the first entry that names no GPU ends the list, and a list that names one twice shows none.
    """
    by_index = _counted(gpus, order)
    if visible is None:
        return by_index
    found: list[int] = []
    for entry in visible.split(","):
        word = entry.strip()
        if word.lstrip("+-").isdigit():
            if by_index is None:
                return None
            position = by_index[int(word)] if 0 <= int(word) < len(by_index) else None
        else:
            position = _by_uuid(gpus, word)
        if position is None:
            break
        found.append(position)
    return tuple(found) if len(set(found)) == len(found) else ()


def _counted(gpus: tuple[Gpu, ...], order: str) -> tuple[int, ...] | None:
    """Positions in the order of CUDA's indices; None when that is not known."""
    divided = any(gpu.uuid.startswith("MIG-") for gpu in gpus)
    if divided or (order != "PCI_BUS_ID" and len({gpu.name for gpu in gpus}) > 1):
        return None
    return tuple(sorted(range(len(gpus)), key=lambda position: gpus[position].index))


def _by_uuid(gpus: tuple[Gpu, ...], word: str) -> int | None:
    """Position of the one GPU whose UUID begins so."""
    if not word.upper().startswith(("GPU-", "MIG-")):
        return None
    found = [position for position, gpu in enumerate(gpus) if gpu.uuid.lower().startswith(word.lower())]
    return found[0] if len(found) == 1 else None
