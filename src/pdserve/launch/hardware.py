"""What this machine has for engines: cores, GPUs and memory, as far as this process may use them.

Parsing is pure; `probe_hardware` is the rim that reads /sys, /proc and nvidia-smi. Nothing here knows what an engine needs.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

MIB = 1024 * 1024
GIB = 1024 * MIB
GPU_QUERY = ("nvidia-smi", "--query-gpu=index,name,memory.total,uuid", "--format=csv,noheader,nounits")
GPU_QUERY_TIMEOUT_S = 30.0
"""Without its persistence daemon the driver wakes every GPU first: some seconds on a host with eight."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One NVIDIA GPU; `index` as nvidia-smi counts, in the order of the PCI bus."""

    index: int
    name: str
    memory_bytes: int
    uuid: str = ""


@dataclass(frozen=True, slots=True)
class Hardware:
    """What engines can be given."""

    cores: tuple[int, ...]
    """Logical CPUs that may be used, at least one. One thread of each physical core comes first, their siblings after."""
    gpus: tuple[Gpu, ...]
    memory_bytes: int

    def __post_init__(self) -> None:
        assert self.cores, "a process runs on some core"


@dataclass(frozen=True, slots=True)
class CgroupLimits:
    """What the control groups around this process leave it; None where there is no limit."""

    num_cpus: float | None
    memory_bytes: int | None


def probe_hardware(environ: Mapping[str, str], *, root: Path = Path("/")) -> Hardware:
    """Look at the machine. `root` stands in for the file system in tests. Raises ConfigError for GPUs named by slices."""
    limits = read_cgroup_limits(root)
    cores = order_by_core(_allowed_cores(), _read_siblings(root))
    total_bytes = psutil.virtual_memory().total
    memory_bytes = min(total_bytes, limits.memory_bytes or total_bytes)
    gpus = parse_gpus(_query_gpus(environ), machine_memory_bytes=memory_bytes)
    return Hardware(
        cores=limit_cores(cores, limits.num_cpus),
        gpus=visible_gpus(gpus, environ.get("CUDA_VISIBLE_DEVICES")),
        memory_bytes=memory_bytes,
    )


def _allowed_cores() -> Sequence[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return range(os.cpu_count() or 1)  # Not Linux: nothing to bind to, but their number still counts.


# Cores


def order_by_core(cores: Iterable[int], siblings: Mapping[int, frozenset[int]]) -> tuple[int, ...]:
    """One thread of each physical core first: two engines on the two threads of one core would each run at half speed."""
    first: list[int] = []
    later: list[int] = []
    for core in sorted(cores):
        is_shared = not siblings.get(core, frozenset()).isdisjoint(first)
        (later if is_shared else first).append(core)
    return (*first, *later)


def limit_cores(cores: Sequence[int], num_cpus: float | None) -> tuple[int, ...]:
    """As many whole cores as the quota pays for: with more threads than that, all are stopped when the quota is used up."""
    if num_cpus is None:
        return tuple(cores)
    return tuple(cores[: max(1, int(num_cpus))])


def parse_cpu_list(text: str) -> frozenset[int]:
    """The kernel's list format: `0-2,8` is 0, 1, 2 and 8."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        start, _, end = part.partition("-")
        if start:
            cores.update(range(int(start), int(end or start) + 1))
    return frozenset(cores)


def _read_siblings(root: Path) -> dict[int, frozenset[int]]:
    paths = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/topology/thread_siblings_list")
    return {int(path.parts[-3].removeprefix("cpu")): parse_cpu_list(path.read_text()) for path in paths}


# Control groups


def read_cgroup_limits(root: Path) -> CgroupLimits:
    """The tightest limits among this process's groups and their parents, for version 2 and version 1 alike."""
    groups = parse_cgroups(_try_read(root / "proc/self/cgroup") or "")
    mount = root / "sys/fs/cgroup"
    unified = _with_parents(mount, groups.get("", "/"))
    cpu = _with_parents(mount / "cpu", groups.get("cpu", "/"))
    memory = _with_parents(mount / "memory", groups.get("memory", "/"))
    cpus = [parse_cpu_max(_try_read(folder / "cpu.max")) for folder in unified]
    cpus += [_cpu_quota(folder) for folder in cpu]
    sizes = [parse_memory_limit(_try_read(folder / "memory.max")) for folder in unified]
    sizes += [parse_memory_limit(_try_read(folder / "memory.limit_in_bytes")) for folder in memory]
    return CgroupLimits(
        num_cpus=min((limit for limit in cpus if limit is not None), default=None),
        memory_bytes=min((limit for limit in sizes if limit is not None), default=None),
    )


def _cpu_quota(folder: Path) -> float | None:
    """Version 1 spreads over two files what version 2 has in one."""
    quota, period = _try_read(folder / "cpu.cfs_quota_us"), _try_read(folder / "cpu.cfs_period_us")
    return parse_cpu_max(f"{quota} {period}") if quota and period else None


def parse_cgroups(text: str) -> dict[str, str]:
    """/proc/self/cgroup as {controller: path}; version 2 has the one controller ''."""
    groups: dict[str, str] = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        groups.update(dict.fromkeys(controllers.split(","), path))
    return groups


def parse_cpu_max(text: str | None) -> float | None:
    """`150000 100000` is one and a half CPUs. Version 2 writes `max` for no limit, version 1 a negative quota."""
    if text is None:
        return None
    quota, period = text.split()
    return None if quota == "max" or int(quota) <= 0 else int(quota) / int(period)


def parse_memory_limit(text: str | None) -> int | None:
    """Version 1 has no word for no limit; it writes the largest page-aligned number, far beyond any machine."""
    if text is None or text.strip() == "max":
        return None
    limit = int(text)
    return None if limit >= 1 << 60 else limit


def _with_parents(mount: Path, group: str) -> tuple[Path, ...]:
    """The group's folder and those above it. A container may be told its path on the host: then only the root is there."""
    folder = mount / group.strip("/")
    return (folder, *(parent for parent in folder.parents if parent.is_relative_to(mount)))


def _try_read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return None


# GPUs


def parse_gpus(text: str, *, machine_memory_bytes: int) -> tuple[Gpu, ...]:
    """nvidia-smi's table. A GPU that shares the machine's memory (GB10, Jetson) says `[N/A]` for its own."""
    gpus = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) < 4 or not fields[0].isdecimal():  # noqa: PLR2004 - the columns of GPU_QUERY
            continue  # "No devices were found", or a warning of the driver's
        memory = int(fields[-2]) * MIB if fields[-2].isdecimal() else machine_memory_bytes
        gpus.append(Gpu(int(fields[0]), ", ".join(fields[1:-2]), memory, fields[-1]))
    return tuple(gpus)


def visible_gpus(gpus: Sequence[Gpu], choice: str | None) -> tuple[Gpu, ...]:
    """Those that CUDA_VISIBLE_DEVICES leaves, in its order; like CUDA, nothing after an entry that names no GPU."""
    if choice is None:
        return tuple(gpus)
    if "MIG-" in choice:
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES={choice} names slices of a GPU, which pdserve does not divide among engines. Unset it, "
            "and give each role its slice: CUDA_VISIBLE_DEVICES in prefill.env and decode.env of the configuration"
        )
    visible: list[Gpu] = []
    for entry in choice.split(","):
        gpu = next((gpu for gpu in gpus if _is_named(gpu, entry.strip())), None)
        if gpu is None:
            break
        visible.append(gpu)
    return tuple(visible)


def _is_named(gpu: Gpu, entry: str) -> bool:
    """By index or UUID. CUDA takes the beginning of a UUID for the whole."""
    return entry == str(gpu.index) or (entry.startswith("GPU-") and gpu.uuid.startswith(entry))


def _query_gpus(environ: Mapping[str, str]) -> str:
    """Empty when there is no NVIDIA driver, or one that does not answer."""
    try:
        result = subprocess.run(
            GPU_QUERY, env=dict(environ), capture_output=True, text=True, timeout=GPU_QUERY_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout if result.returncode == 0 else ""
