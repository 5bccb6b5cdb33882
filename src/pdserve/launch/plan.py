"""From a configuration and a machine to the engines' command lines. Pure: the same input always gives the same commands.

Every vLLM flag and variable that pdserve sets is set here, next to its reason. What a user writes under `args` and `env` wins
over it, except where pdserve could not reach or prove the engine any more; that is a ConfigError which names the right key.
"""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.config import http_url, reachable_host
from pdserve.core import EngineAddress, EngineName, Role
from pdserve.errors import ConfigError
from pdserve.launch.flags import check_args, check_env, merge_args, render_arg
from pdserve.launch.hardware import GIB
from pdserve.vllm_plugin import DELAY_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from pdserve.config import ArgValue, Config, RoleConfig
    from pdserve.launch.hardware import Hardware
    from pdserve.launch.install import EngineInstall
    from pdserve.launch.ports import PortPlan

CPU_CONTEXT_TOKENS = 2048
"""On a core or two a prompt of this length takes seconds; a longer context would only reserve KV cache."""
CPU_MAX_SEQS = 16
"""More at once would only make each slower; vLLM's own limit is in the hundreds and sizes buffers by it."""
CPU_MAX_KV_GIB = 4
NIXL_PROGRESS_DELAY_US = 1000
"""The shortest that NIXL can sleep. Two idle engines took two cores without it; pdserve/vllm_plugin.py tells why."""
CPU_KV_SHARE = 1 / 8
"""Of the machine's memory, for the KV caches of all engines. Weights, Python and the page cache need the rest."""
SHARED_GPU_SHARE = 0.6
"""Of a GPU's memory, for all engines on it: 0.30 each for two. CUDA contexts and UCX take theirs on top, once an engine."""
GPU_BLOCK_SIZE = 128
"""With vLLM's default of 16 a 4,000-token prompt moved as 5,000 descriptors: 21 ms, and D stood still for 13 ms while it posted
them. With 128 it took 8.8 ms, and D's p99 ITL fell from 17.8 to 9.2 ms (two H200, vLLM 0.26)."""
SHARED_GPU_NOTE = (
    "Prefill and decode share one GPU: they take turns on it, and KV moved at 5 GB/s under load (one H200) where two GPUs "
    "moved 25; `pdserve verify` tells what this host does."
)
VLLM_LEASE_S = 30.0
"""vLLM's own `kv_lease_duration` (nixl/base_scheduler.py in 0.32)."""


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """One engine, ready to be started."""

    address: EngineAddress
    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    """What is added to pdserve's own environment."""
    side_channel_host: str
    side_channel_port: int


@dataclass(frozen=True, slots=True)
class _Seat:
    """One engine before it has ports: who it is and what the user wants for it."""

    name: EngineName
    role: Role
    args: Mapping[str, ArgValue]
    env: Mapping[str, str]

    @property
    def num_dp_ranks(self) -> int:
        return self._parallel("data-parallel-size")

    @property
    def num_ranks(self) -> int:
        """How many cores or GPUs it wants."""
        return self.num_dp_ranks * self._parallel("tensor-parallel-size") * self._parallel("pipeline-parallel-size")

    def _parallel(self, flag: str) -> int:
        value = self.args.get(flag, 1)
        try:
            number = int(str(value))
        except ValueError:
            number = 0
        if number < 1:
            raise ConfigError(f"{self.role}: {flag} = {value!r}: a whole number from 1 up is needed")
        return number


def plan_engines(
    config: Config,
    hardware: Hardware,
    install: EngineInstall,
    *,
    model_path: Path,
    context_limit: int | None,
    served_name: str,
    ports: PortPlan,
    preloaded: str = "",
    library_path: str = "",
) -> tuple[EngineCommand, ...]:
    """The commands, prefill engines first.

    `preloaded` and `library_path` are the LD_PRELOAD and LD_LIBRARY_PATH that pdserve itself was started with.

    Raises ConfigError for settings that cannot be honoured, and for a machine with too few GPUs.
    """
    seats = _seats(config)
    if uses_gpus(hardware, install):
        profiles = _gpu_profiles(seats, hardware)
    else:
        libraries = {**_preload(install.libiomp5, preloaded), **_library_path(install.library_path, library_path)}
        profiles = _cpu_profiles(seats, hardware, libraries=libraries, limit=context_limit)
    host = config.engines.host
    return tuple(
        _command(
            seat,
            profile,
            prefix=install.argv(model_path),
            flags={"served-model-name": served_name, "host": host, "port": port},
            url=http_url(host, port),
            # vLLM advertises the side channel's host as it is: a D that is told 0.0.0.0 connects to itself.
            side_channel=(reachable_host(host), side_channel_port),
            lease_s=config.timeouts.kv_lease,
        )
        for seat, profile, port, side_channel_port in zip(seats, profiles, ports.http, ports.side_channel, strict=True)
    )


def uses_gpus(hardware: Hardware, install: EngineInstall) -> bool:
    """Whether engines will run on GPUs: there are some, and this vLLM is not a build for CPUs."""
    return bool(hardware.gpus) and not install.is_cpu_build


def side_channel_widths(config: Config) -> tuple[int, ...]:
    """How many side channel ports in a row each engine takes, prefill engines first: rank r listens on its port plus r."""
    return tuple(seat.num_dp_ranks for seat in _seats(config))


def planning_notes(config: Config, hardware: Hardware, install: EngineInstall) -> tuple[str, ...]:
    """What a person should know of the plan before it runs, in sentences."""
    seats = _seats(config)
    num_ranks = sum(seat.num_ranks for seat in seats)
    if not uses_gpus(hardware, install):
        if num_ranks > len(hardware.cores):
            return (f"{num_ranks} engines share {len(hardware.cores)} core(s): expect each to be slower for it.",)
        return ()
    if len(hardware.gpus) == 1 and len({seat.role for seat in seats}) > 1:
        return (SHARED_GPU_NOTE,)
    return ()


# Who


def _seats(config: Config) -> tuple[_Seat, ...]:
    if config.decode.count == 0:
        raise ConfigError("decode.count = 0: a deployment without a decode engine answers nothing; use 1 or more")
    return (*_role_seats(config, Role.PREFILL, config.prefill), *_role_seats(config, Role.DECODE, config.decode))


def _role_seats(config: Config, role: Role, section: RoleConfig) -> Iterator[_Seat]:
    shared = check_args(config.engines.args, "engines.args")
    args = merge_args(shared, check_args(section.args, f"{role}.args"))
    env = {**check_env(config.engines.env, "engines.env"), **check_env(section.env, f"{role}.env")}
    for index in range(section.count):
        yield _Seat(EngineName(f"{role}-{index}"), role, args, env)


# What


@dataclass(frozen=True, slots=True)
class _Profile:
    """What a kind of machine asks for."""

    args: Mapping[str, ArgValue]
    env: Mapping[str, str]
    connector: Mapping[str, object]


def _command(
    seat: _Seat,
    profile: _Profile,
    *,
    prefix: Sequence[str],
    flags: Mapping[str, ArgValue],
    url: str,
    side_channel: tuple[str, int],
    lease_s: float,
) -> EngineCommand:
    host, port = side_channel
    env = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
        "HF_HUB_OFFLINE": "1",  # The model is a folder by now; without this an engine waits for a hub that it can't reach.
        "VLLM_NO_USAGE_STATS": "1",  # Whoever runs pdserve did not agree to send anything anywhere.
        "PYTHONSAFEPATH": "1",  # `python -m` would import `vllm` from the working directory: a checkout, for who works on it.
        **profile.env,
        **seat.env,
    }
    args = merge_args(
        {
            **flags,
            **profile.args,
            "enable-prompt-tokens-details": True,  # Without it usage holds no cached_tokens, the proof for each request.
            "kv-transfer-config": _connector(seat.role, profile, lease_s),
        },
        seat.args,
    )
    return EngineCommand(
        address=EngineAddress(seat.name, seat.role, url),
        argv=(*prefix, *(word for flag, value in args.items() for word in render_arg(flag, value))),
        env=tuple(env.items()),
        side_channel_host=env["VLLM_NIXL_SIDE_CHANNEL_HOST"],
        side_channel_port=port,
    )


def _connector(role: Role, profile: _Profile, lease_s: float) -> dict[str, object]:
    connector: dict[str, object] = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_producer" if role is Role.PREFILL else "kv_consumer",
        # vLLM's default since 0.27. The other choice computes lost KV again without a word, and the proof would be gone.
        "kv_load_failure_policy": "fail",
        **profile.connector,
    }
    if lease_s != VLLM_LEASE_S:
        # vLLM wants whole seconds. Rounded up: blocks that stay too long cost room, blocks that go too early give wrong text.
        connector["kv_connector_extra_config"] = {"kv_lease_duration": math.ceil(lease_s)}
    return connector


def _cpu_profiles(
    seats: Sequence[_Seat], hardware: Hardware, *, libraries: Mapping[str, str], limit: int | None
) -> list[_Profile]:
    args: dict[str, ArgValue] = {
        "dtype": "bfloat16",
        "enforce-eager": True,  # Compiling takes 50 s more at the start and gains nothing here.
        "max-num-seqs": CPU_MAX_SEQS,
    }
    if limit is not None:
        args["max-model-len"] = min(CPU_CONTEXT_TOKENS, limit)
    env = {
        # enforce-eager does not reach what runs on the side: `logprobs` compiled for more than a minute, 0.3 s with this.
        "TORCHDYNAMO_DISABLE": "1",
        "UCX_TLS": "tcp,sm,self",
        DELAY_VARIABLE: str(NIXL_PROGRESS_DELAY_US),
        # vLLM sets it just before it imports NIXL, and warns where the plugin has done that already (nixl_utils.py in 0.32).
        "UCX_RCACHE_MAX_UNRELEASED": "1024",
        **libraries,
    }
    kv_space = {"VLLM_CPU_KVCACHE_SPACE": str(_cpu_kv_gib(hardware.memory_bytes, len(seats)))}
    return [
        _Profile(
            args=args,
            env={
                "VLLM_CPU_OMP_THREADS_BIND": "|".join(str(core) for core in cores),
                # This variable would silently win over either flag (platforms/cpu.py in 0.32).
                **({} if seat.args.keys() & {"kv-cache-memory-bytes", "gpu-memory-utilization"} else kv_space),
                **env,
            },
            connector={"kv_buffer_device": "cpu"},
        )
        for seat, cores in zip(seats, deal(hardware.cores, [seat.num_ranks for seat in seats]), strict=True)
    ]


def _cpu_kv_gib(memory_bytes: int, num_engines: int) -> int:
    """Whole GiB for each engine: vLLM reads the variable as an integer."""
    return min(CPU_MAX_KV_GIB, max(1, int(memory_bytes * CPU_KV_SHARE / num_engines / GIB)))


def _preload(libiomp5: Path | None, preloaded: str) -> dict[str, str]:
    """Intel's OpenMP in front of what is preloaded anyway. Without it a first request took 21 s on two cores, with it 1.7 s."""
    if libiomp5 is None or any(name in preloaded for name in ("libgomp", "libomp", "libiomp")):
        return {}  # Two OpenMP libraries in one process stop vLLM (OMPProcessManager in utils/ompmultiprocessing.py, 0.32).
    return {"LD_PRELOAD": f"{libiomp5}:{preloaded}" if preloaded else str(libiomp5)}


def _library_path(folder: Path | None, inherited: str) -> dict[str, str]:
    """For what vllm-cpu needs of the system and a small system has not: libnuma (`_C.abi3.so` in 0.32)."""
    if folder is None:
        return {}
    return {"LD_LIBRARY_PATH": f"{folder}:{inherited}" if inherited else str(folder)}


def _gpu_profiles(seats: Sequence[_Seat], hardware: Hardware) -> list[_Profile]:
    # UCX is left as it is: by itself it chose cuda_ipc over NVLink, 25 GB/s between two H200, and a list of transports would
    # rule out InfiniBand.
    places = _place_on_gpus(seats, [gpu.index for gpu in hardware.gpus])
    return [_gpu_profile(place, num_sharing=_num_sharing(place, places)) for place in places]


def _gpu_profile(place: Sequence[int], *, num_sharing: int) -> _Profile:
    args: dict[str, ArgValue] = {"block-size": GPU_BLOCK_SIZE}
    if num_sharing > 1:
        # CUDA graphs take memory outside the share; and rather a shorter context than no start.
        share = math.floor(SHARED_GPU_SHARE / num_sharing * 100) / 100
        args |= {"gpu-memory-utilization": share, "enforce-eager": True, "max-model-len": "auto"}
    env = {
        "CUDA_VISIBLE_DEVICES": ",".join(str(index) for index in place),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # nvidia-smi's order. CUDA's own puts the fastest first.
    }
    if num_sharing > 1:
        # Without it UCX emulated the read between two processes on one H200 over tcp/lo: 235 MB took 2.7 s under load, and
        # 43 ms with it (NIXL 1.3, vLLM 0.26).
        env["UCX_CUDA_IPC_ENABLE_GET_ZCOPY"] = "on"
    return _Profile(args=args, env=env, connector={})


def _num_sharing(place: Sequence[int], places: Sequence[Sequence[int]]) -> int:
    """How many engines use the fullest of these GPUs."""
    return max(sum(index in other for other in places) for index in place)


def _place_on_gpus(seats: Sequence[_Seat], gpus: Sequence[int]) -> list[tuple[int, ...]]:
    """GPUs of its own for each engine; where there are too few, at least none that prefill and decode share."""
    sizes = [seat.num_ranks for seat in seats]
    num_prefill = sum(seat.role is Role.PREFILL for seat in seats)
    if sum(sizes) <= len(gpus) or len(gpus) == 1 or num_prefill == 0:
        return _deal_gpus(seats, gpus)
    # UCX is at its slowest between two processes on one GPU (`planning_notes`), and only P and D move KV to each other.
    num_gpus = round(len(gpus) * sum(sizes[:num_prefill]) / sum(sizes))
    cut = min(max(1, num_gpus), len(gpus) - 1)
    return _deal_gpus(seats[:num_prefill], gpus[:cut]) + _deal_gpus(seats[num_prefill:], gpus[cut:])


def _deal_gpus(seats: Sequence[_Seat], gpus: Sequence[int]) -> list[tuple[int, ...]]:
    for seat in seats:
        if seat.num_ranks > len(gpus):
            raise ConfigError(
                f"{seat.name} wants {seat.num_ranks} GPUs (tensor, pipeline and data parallel sizes multiplied), and there "
                f"are {len(gpus)} for {seat.role}; lower the sizes in {seat.role}.args or the counts"
            )
    return deal(gpus, [seat.num_ranks for seat in seats])


def deal(items: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Neighbouring items for each, going round when they run out."""
    hands: list[tuple[int, ...]] = []
    start = 0
    for size in sizes:
        hands.append(tuple(items[(start + offset) % len(items)] for offset in range(size)))
        start += size
    return hands


def parse_context_limit(config_json: bytes) -> int | None:
    """The longest context that a model's config.json allows, by the names that vLLM looks for; None when it says none."""
    try:
        config = json.loads(config_json)
    except ValueError:
        return None
    if not isinstance(config, dict):
        return None
    text = config.get("text_config")
    scope = {**config, **text} if isinstance(text, dict) else config
    limits = [scope.get(name) for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")]
    return min((limit for limit in limits if isinstance(limit, int)), default=None)


def render_command(command: EngineCommand) -> str:
    """The command as a person can paste it into a shell, environment first, a flag a line."""
    lines = ["env", *(shlex.quote(f"{name}={value}") for name, value in command.env), shlex.quote(command.argv[0])]
    for word in command.argv[1:]:
        if word.startswith("--"):
            lines.append(shlex.quote(word))
        else:
            lines[-1] += f" {shlex.quote(word)}"
    return " \\\n  ".join(lines)
