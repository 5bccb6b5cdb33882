"""What is said of an engine that failed. The logs are vLLM 0.32's own, made to fail on purpose; their paths are changed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from pdserve.launch.diagnosis import ExitStatus, diagnose, log_tail, without_frames

_LOGS = Path(__file__).parent / "logs"
_FAILED = ExitStatus(code=1)


def _log(name: str) -> str:
    return log_tail(_LOGS / f"{name}.log", 1000)


@pytest.mark.parametrize(
    ("log", "cause", "advice"),
    [
        ("unknown_flag", "vLLM does not know --max-model-length --frobnicate 3", "args"),
        ("bad_value", "refuses the value of --max-model-len: invalid human_readable_int_or_auto value: 'abc'", "args"),
        ("bad_choice", "refuses the value of --dtype: invalid choice: 'bf17'", "args"),
        ("len_too_long", "100000, longer than the model allows (max_position_embeddings=8192", "max-model-len"),
        ("bad_connector", "no connector called NoSuchConnector", "kv_connector"),
        ("http_port", "HTTP port is taken: 8107", "engines.first_port"),
        ("bad_host", "an address that this machine has not", "engines.host"),
        ("side_channel_port", "side channel's port is taken: 127.0.0.1:25601", "engines.first_side_channel_port"),
        ("missing_model", "no model at /models/nosuch", "config.json"),
        ("empty_folder", "/models/empty is not the folder of a model", "config.json"),
        ("no_weights", "/models/noweights has no weights", "safetensors"),
        ("kv_huge", "has 10.1 of 11.96 GiB free, and the engine wants 1000.0 GiB", "VLLM_CPU_KVCACHE_SPACE"),
        ("kv_small", "one request of 8192 tokens needs 0.18 GiB", "fits: 640"),
        ("no_nixl", "cannot import NIXL", "pip install nixl"),
        ("ucx_tls", "none of the transports nosuch", "UCX_TLS"),
        ("bad_preload", "/nosuch/libiomp5.so is to be preloaded", "intel-openmp"),
    ],
)
def test_real_failures_are_told_in_words(log: str, cause: str, advice: str) -> None:
    """Each names what was wrong, with the values, and the key to change."""
    diagnosis = diagnose(_log(log), _FAILED, ["vllm", "--port", "8107"])
    assert cause in diagnosis.cause
    assert advice in diagnosis.advice


def test_a_healthy_engine_gives_no_cause() -> None:
    """Its log has warnings that read like errors: of open files, of remote code, of packages that it can do without."""
    assert diagnose(_log("healthy"), ExitStatus(code=0)).cause == "Not known: its log names no error"


_GPU_IS_FULL = (  # v1/worker/utils.py
    "ValueError: Free memory on device cuda:0 (3.1/79.2 GiB) on startup is less than desired GPU memory utilization "
    "(0.3, 23.76 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
)
_MEMORY_IS_FULL = (  # v1/worker/cpu_worker.py, when no size is given
    "ValueError: Available memory on node 0 (2.5/8.0 GiB) on startup is less than desired CPU memory utilization "
    "(0.92, 7.36 GiB). On the CPU backend, the `--gpu-memory-utilization` flag controls the fraction"
)
_SHM_IS_SMALL = (  # distributed/device_communicators/shm_broadcast.py
    "RuntimeError: Insufficient space in /dev/shm for shared memory ring buffer: 240 MiB required, 64 MiB free. "
    "Increase /dev/shm (e.g. --shm-size or --ipc=host)."
)


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        (_GPU_IS_FULL, "The GPU has 3.1 of 79.2 GiB free, and the engine wants 23.76 GiB"),
        # v1/core/kv_cache_utils.py
        ("ValueError: No available memory for the cache blocks. Try increasing", "Nothing is left for the KV cache"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "The GPU's memory ran out"),
        (_MEMORY_IS_FULL, "The machine has 2.5 of 8.0 GiB free, and the engine wants 7.36 GiB"),
        (_SHM_IS_SMALL, "shm is too small: 240 MiB needed, 64 MiB free"),
        # v1/executor/multiproc_executor.py and v1/engine/utils.py
        ("Worker proc VllmWorker-0 died unexpectedly (exit code: -9), shutting down executor.", "memory ran out"),
        (
            "RuntimeError: Engine core initialization failed. Failed core proc(s): {'EngineCore': -4}",
            "lacks an instruction",
        ),
        ("RuntimeError: Engine core initialization failed. Failed core proc(s): {'EngineCore': -11}", "native code"),
        # platforms/cuda.py
        (
            "ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0. Your Tesla T4 GPU has",
            "cannot compute in bfloat16",
        ),
        ("ValueError: No valid attention backend found for cuda with AttentionSelectorConfig(", "attention backend"),
        # config/device.py
        ("RuntimeError: Failed to infer device type, please set the environment variable", "no device"),
        (
            "importlib.metadata.PackageNotFoundError: No package metadata was found for vllm",
            "`vllm` command does not run",
        ),
        (
            "ImportError: libcudart.so.13: cannot open shared object file: No such file or directory",
            "libcudart.so.13 is missing",
        ),
        ("ModuleNotFoundError: No module named 'vllm'", "Python has no vllm"),
        ("RuntimeError: operator torchvision::nms does not exist", "torchvision does not fit torch"),
        ("ImportError: /venv/vllm/_C.abi3.so: undefined symbol: _ZN3c10", "compiled part does not fit"),
        ("ModuleNotFoundError: No module named 'tiktoken'", "missing or broken: No module named 'tiktoken'"),
        (
            "PermissionError: [Errno 13] Permission denied: '/models/secret/config.json'",
            "/models/secret/config.json may not",
        ),
        ("OSError: [Errno 24] Too many open files", "limit of open files"),
        ("OSError: [Errno 28] No space left on device: '/root/x'", "disk is full"),
        ("ValueError: Model architectures ['FooForCausalLM'] are not supported for now.", "('FooForCausalLM')"),
        ("[pdserve] cannot run vllm: No such file or directory", "cannot be run: vllm: No such file or directory"),
    ],
)
def test_messages_of_machines_that_are_not_at_hand(line: str, cause: str) -> None:
    """Taken from the sources of vLLM 0.32 and its libraries, among the lines that usually surround them."""
    log = f"(APIServer pid=1) INFO 01-15 10:00:00 [utils.py:1] started\n{line}\nRuntimeError: See root cause above."
    assert cause in diagnose(log, _FAILED).cause


@pytest.mark.parametrize(
    ("number", "cause"),
    [
        (signal.SIGKILL, "memory ran out"),
        (signal.SIGILL, "lacks an instruction"),
        (signal.SIGBUS, "Shared memory"),
        (signal.SIGSEGV, "native code"),
    ],
)
def test_a_signal_is_a_hint_when_the_log_is_silent(number: signal.Signals, cause: str) -> None:
    """Nothing in the log explains it, so the signal has to."""
    assert cause in diagnose("INFO all is well", ExitStatus(signal=number)).cause


def test_what_the_log_says_beats_the_signal() -> None:
    """An engine that is killed after it failed still failed for its own reason."""
    assert "HTTP port" in diagnose(_log("http_port"), ExitStatus(signal=signal.SIGKILL)).cause


def test_an_engine_that_hangs_is_diagnosed_without_an_exit() -> None:
    """With its side channel's port taken vLLM 0.32 neither serves nor ends, and does not even heed SIGTERM."""
    assert "side channel" in diagnose(_log("side_channel_port"), None).cause


def test_an_unknown_error_is_quoted() -> None:
    """The last one that does not point to another."""
    log = "ValueError: first\nSomethingError: the real one\nRuntimeError: It failed. See root cause above."
    diagnosis = diagnose(log, _FAILED)
    assert "SomethingError: the real one" in diagnosis.cause
    assert "--dry-run" in diagnosis.advice


def test_exit_statuses_read_as_sentences() -> None:
    """After the engine's name."""
    assert str(ExitStatus.of(2 << 8)) == "exited with status 2"
    assert str(ExitStatus.of(signal.SIGKILL)) == "was ended by SIGKILL"
    assert str(ExitStatus(signal=40)) == "was ended by signal 40"


def test_frames_and_usage_are_left_out_of_what_a_person_sees() -> None:
    """What remains of a failed start fits on a screen and names the error."""
    lines = without_frames(_log("no_weights")).splitlines()
    assert not [line for line in lines if "File" in line or "^^^" in line]
    assert "Cannot find any model weights" in "\n".join(lines)
    assert without_frames(_log("unknown_flag")).splitlines() == [
        "api_server.py: error: unrecognized arguments: --max-model-length --frobnicate 3"
    ]


def test_the_tail_is_the_last_lines(tmp_path: Path) -> None:
    """Bytes that are no text do not stop it, and a missing file is empty."""
    path = tmp_path / "x.log"
    path.write_bytes(b"one\ntwo\xff\nthree\n")
    assert log_tail(path, 2) == "two\ufffd\nthree"
    assert log_tail(tmp_path / "missing.log", 2) == ""


def test_only_the_end_of_a_long_log_is_read(tmp_path: Path) -> None:
    """However long it has grown."""
    path = tmp_path / "x.log"
    path.write_bytes(b"x" * 1_000_000 + b"\nlast\n")
    assert log_tail(path, 5).endswith("\nlast")
    assert len(log_tail(path, 5)) < 600_000
