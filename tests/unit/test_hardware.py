"""What a machine offers: nvidia-smi, control groups and thread siblings, as they are read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pdserve.errors import ConfigError
from pdserve.launch.hardware import (
    GIB,
    MIB,
    CgroupLimits,
    Gpu,
    Hardware,
    limit_cores,
    order_by_core,
    parse_cgroups,
    parse_cpu_list,
    parse_cpu_max,
    parse_gpus,
    parse_memory_limit,
    read_cgroup_limits,
    visible_gpus,
)

if TYPE_CHECKING:
    from pathlib import Path

_TWO_H200 = """\
0, NVIDIA H200, 143771, GPU-5b1f0e0c-6f0f-4d0e-9d51-0c6a5f8c1a11
1, NVIDIA H200, 143771, GPU-c3d5a1f2-11aa-4a77-8a35-77b1a9e6d2f0
"""
_FOUR_GPUS = tuple(Gpu(index, "NVIDIA A100-SXM4-80GB", 80 * GIB, f"GPU-{index}{index}{index}-x") for index in range(4))


def _write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_nvidia_smi_table_becomes_gpus() -> None:
    """Index, name and memory of each GPU come out of nvidia-smi's table."""
    gpus = parse_gpus(_TWO_H200, machine_memory_bytes=0)
    assert [(gpu.index, gpu.name, gpu.memory_bytes) for gpu in gpus] == [
        (0, "NVIDIA H200", 143771 * MIB),
        (1, "NVIDIA H200", 143771 * MIB),
    ]


def test_gpu_that_shares_the_machines_memory_has_all_of_it() -> None:
    """`[N/A]` for the memory means that the GPU uses the machine's."""
    (gpu,) = parse_gpus("0, NVIDIA GB10, [N/A], GPU-1", machine_memory_bytes=128 * GIB)
    assert gpu.memory_bytes == 128 * GIB


def test_a_comma_in_a_gpus_name_stays_in_it() -> None:
    """Only the outer columns are told by their place."""
    (gpu,) = parse_gpus("3, Quadro, made up, 1024, GPU-1", machine_memory_bytes=0)
    assert (gpu.index, gpu.name, gpu.memory_bytes) == (3, "Quadro, made up", 1024 * MIB)


@pytest.mark.parametrize(
    "text", ["", "No devices were found\n", "Failed to initialize NVML: Driver/library version mismatch\n"]
)
def test_messages_instead_of_a_table_mean_no_gpu(text: str) -> None:
    """What is not a row of the table is passed over."""
    assert parse_gpus(text, machine_memory_bytes=0) == ()


@pytest.mark.parametrize(
    ("choice", "indexes"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("-1", []),
        ("2,0", [2, 0]),
        ("1,9,2", [1]),
        ("GPU-33,GPU-111-x", [3, 1]),
        (" 1 , 2 ", [1, 2]),
    ],
)
def test_cuda_visible_devices_is_honoured(choice: str | None, indexes: list[int]) -> None:
    """By index, UUID or its beginning, in the order given, up to the first entry that names no GPU."""
    assert [gpu.index for gpu in visible_gpus(_FOUR_GPUS, choice)] == indexes


def test_a_slice_of_a_gpu_is_refused_with_the_way_out() -> None:
    """MIG slices can't be divided by index; the error names the keys that can take them."""
    with pytest.raises(ConfigError, match=r"prefill\.env and decode\.env"):
        visible_gpus(_FOUR_GPUS, "MIG-4a5e-1")


def test_cpu_lists_of_the_kernel_are_read() -> None:
    """Ranges and single numbers mix."""
    assert parse_cpu_list("0-2,8\n") == {0, 1, 2, 8}
    assert parse_cpu_list("\n") == set()


def test_one_thread_of_each_core_comes_first() -> None:
    """With neighbours as siblings 0 and 2 are different cores, with 0 and 4 as siblings 0 and 1 are."""
    neighbours = {core: frozenset({core & ~1, core | 1}) for core in range(4)}
    assert order_by_core(range(4), neighbours) == (0, 2, 1, 3)
    halves = {core: frozenset({core % 4, core % 4 + 4}) for core in range(8)}
    assert order_by_core(range(8), halves) == (0, 1, 2, 3, 4, 5, 6, 7)


def test_cores_without_known_siblings_keep_their_order() -> None:
    """Where /sys tells nothing every logical CPU counts as a core."""
    assert order_by_core([5, 3, 4], {}) == (3, 4, 5)


@pytest.mark.parametrize(("quota", "num_cores"), [(None, 8), (2.0, 2), (2.9, 2), (0.5, 1), (100.0, 8)])
def test_a_cpu_quota_leaves_whole_cores(quota: float | None, num_cores: int) -> None:
    """A quota of two and a half CPUs is two cores, one of half a CPU still one."""
    assert len(limit_cores(range(8), quota)) == num_cores


def test_cgroup_paths_are_found_by_controller() -> None:
    """Version 1 lists its controllers, version 2 has none."""
    text = "4:memory:/a\n2:cpu,cpuacct:/b\n1:name=systemd:/c\n0::/d\n"
    assert parse_cgroups(text) == {"memory": "/a", "cpu": "/b", "cpuacct": "/b", "name=systemd": "/c", "": "/d"}


def test_unlimited_is_spelled_differently_in_each_version() -> None:
    """`max`, a negative quota and the largest page-aligned number all mean no limit."""
    assert parse_cpu_max("max 100000\n") is None
    assert parse_cpu_max("-1 100000") is None
    assert parse_memory_limit("max\n") is None
    assert parse_memory_limit("9223372036854771712\n") is None


def test_limits_of_version_2_are_the_tightest_on_the_path(tmp_path: Path) -> None:
    """A parent's limit holds for its children."""
    _write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/container\n",
            "sys/fs/cgroup/pod/cpu.max": "200000 100000\n",
            "sys/fs/cgroup/pod/memory.max": f"{8 * GIB}\n",
            "sys/fs/cgroup/pod/container/cpu.max": "max 100000\n",
            "sys/fs/cgroup/pod/container/memory.max": f"{6 * GIB}\n",
        },
    )
    assert read_cgroup_limits(tmp_path) == CgroupLimits(num_cpus=2.0, memory_bytes=6 * GIB)


def test_limits_of_version_1_are_read_from_its_controllers(tmp_path: Path) -> None:
    """A container that is told its path on the host finds its limits at the root of the mount."""
    _write(
        tmp_path,
        {
            "proc/self/cgroup": "3:cpu,cpuacct:/docker/0123\n2:memory:/docker/0123\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "150000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 * GIB}\n",
        },
    )
    assert read_cgroup_limits(tmp_path) == CgroupLimits(num_cpus=1.5, memory_bytes=4 * GIB)


def test_a_machine_without_control_groups_has_no_limits(tmp_path: Path) -> None:
    """Nothing to read is no error."""
    assert read_cgroup_limits(tmp_path) == CgroupLimits(num_cpus=None, memory_bytes=None)


def test_hardware_has_at_least_one_core() -> None:
    """A plan divides by the number of cores."""
    with pytest.raises(AssertionError):
        Hardware(cores=(), gpus=(), memory_bytes=GIB)
