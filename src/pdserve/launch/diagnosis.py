"""From the end of an engine's log, and the way it ended, to the likely cause in words and what to do about it.

Pure but for `log_tail`. The texts are those of vLLM 0.32 and of what it is built on; each stands in one row of a table, and the
first row that matches is the answer, so causes stand before what they lead to.
"""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

MAX_TAIL_BYTES = 512 * 1024
"""A log may have grown for weeks; its end is enough."""


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """How a process ended: with a code of its own, or by a signal."""

    code: int | None = None
    signal: int | None = None

    @classmethod
    def of(cls, wait_status: int) -> Self:
        """From what `os.waitpid` gives."""
        code = os.waitstatus_to_exitcode(wait_status)
        return cls(code=code) if code >= 0 else cls(signal=-code)

    def __str__(self) -> str:
        if self.signal is None:
            return f"exited with status {self.code}"
        return f"was ended by {_signal_name(self.signal)}"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What probably went wrong, and what to do."""

    cause: str
    advice: str

    def __str__(self) -> str:
        return f"{self.cause}. {self.advice}"


@dataclass(frozen=True, slots=True)
class _Rule:
    """What to look for in a log. Named groups of the pattern fill the braces in the words."""

    pattern: re.Pattern[str]
    cause: str
    advice: str


def _rule(pattern: str, cause: str, advice: str) -> _Rule:
    return _Rule(re.compile(pattern), cause, advice)


_MEMORY_ADVICE = "Close what else runs, take a smaller model, or start fewer engines"
_GPU_MEMORY_ADVICE = (
    "Stop other programs on the GPU (nvidia-smi shows them), or set gpu-memory-utilization in engines.args lower"
)
_ENVIRONMENT_ADVICE = "Install vLLM afresh into an environment of its own and name its Python in engines.python"
_CPU_FEATURES = (
    "This CPU lacks an instruction that vLLM was compiled for",
    "vLLM's builds for CPUs need AVX2, and AVX-512 for most of their speed: see `lscpu`; take another machine or build it here",
)
_KILLED = (
    "A process of the engine was killed, most likely by the kernel because memory ran out",
    f"`dmesg` shows whether. {_MEMORY_ADVICE}, or set VLLM_CPU_KVCACHE_SPACE in engines.env lower",
)
_SEGFAULT = (
    "A process of the engine crashed in native code",
    "The log may name the library above its last lines. A mix of builds is the usual reason: see that torch, vLLM and NIXL fit",
)
_BUS_ERROR = (
    "Shared memory ran out",
    "Make /dev/shm larger: in a container by --shm-size=1g or --ipc=host",
)

_LOG_RULES = (
    # Command line
    _rule(r"error: unrecognized arguments: (?P<args>.+)", "vLLM does not know {args}", "Correct or remove it in args"),
    _rule(
        r"error: argument (?P<flag>\S+?): (?P<what>.+)",
        "vLLM refuses the value of {flag}: {what}",
        "Correct it in args",
    ),
    _rule(
        r"error: ambiguous option: (?P<what>.+)",
        "A flag is not spelled out: {what}",
        "Write the whole name of the flag in args",
    ),
    _rule(
        r"User-specified max_model_len \((?P<asked>\d+)\) is greater than the derived max_model_len \((?P<limit>.+?)\)",
        "max-model-len is {asked}, longer than the model allows ({limit})",
        "Set max-model-len in engines.args lower, or leave it out",
    ),
    _rule(
        r"Unsupported connector type: (?P<name>\S+)",
        "This vLLM has no connector called {name}",
        "Correct kv_connector in args",
    ),
    # Ports
    _rule(
        r"ZMQError: Address already in use \(addr='tcp://(?P<address>[^']+)'\)",
        "The side channel's port is taken: {address}",
        "Set engines.first_side_channel_port to a free range, or stop what listens there",
    ),
    _rule(
        r"ZMQError: (?P<what>Cannot assign requested address|No such device) \(addr='tcp://(?P<address>[^']+)'\)",
        "{address} is not an address of this machine, so the side channel cannot listen there",
        "Correct engines.host, or VLLM_NIXL_SIDE_CHANNEL_HOST in env",
    ),
    _rule(
        r"(?i)Address already in use",
        "The engine's HTTP port is taken: {port}",
        "Set engines.first_port to a free one, or stop what listens there",
    ),
    _rule(
        r"Cannot assign requested address",
        "The engine cannot listen on an address that this machine has not",
        "Correct engines.host",
    ),
    # Memory
    _rule(
        r"Insufficient space in (?P<path>\S+) for .+?: (?P<needed>\d+) MiB required, (?P<free>\d+) MiB free",
        "{path} is too small: {needed} MiB needed, {free} MiB free",
        "In a container start it with --shm-size=1g or --ipc=host; else mount a larger tmpfs there",
    ),
    _rule(
        r"Free memory on device .*?\((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) on startup is less than desired GPU memory "
        r"utilization \((?P<share>[\d.]+), (?P<wanted>[\d.]+) GiB\)",
        "The GPU has {free} of {total} GiB free, and the engine wants {wanted} GiB",
        _GPU_MEMORY_ADVICE,
    ),
    _rule(
        r"model's max seq len \((?P<length>\d+)\), \((?P<needed>[\d.]+) GiB KV cache is needed, "
        r"which is larger than the available KV cache memory \((?P<free>[\d.]+) GiB\)"
        r"(?:.+?estimated maximum model length is (?P<fits>\d+))?",
        "The KV cache has {free} GiB, and one request of {length} tokens needs {needed} GiB",
        "Set max-model-len in engines.args lower (fits: {fits}), or give more: gpu-memory-utilization, VLLM_CPU_KVCACHE_SPACE",
    ),
    _rule(
        r"No available memory for the cache blocks",
        "Nothing is left for the KV cache once the model is loaded",
        "Set gpu-memory-utilization in engines.args higher, or take a smaller model",
    ),
    _rule(
        r"Available memory on node \d+ \((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) on (?:kv cache allocation|startup) is less "
        r"than .*?\(?(?P<wanted>[\d.]+)(?:/[\d.]+)? GiB\)",
        "The machine has {free} of {total} GiB free, and the engine wants {wanted} GiB",
        f"Set VLLM_CPU_KVCACHE_SPACE in engines.env lower. {_MEMORY_ADVICE}",
    ),
    _rule(r"CUDA out of memory|torch\.(?:cuda\.)?OutOfMemoryError", "The GPU's memory ran out", _GPU_MEMORY_ADVICE),
    _rule(
        r"(?:MemoryError|Cannot allocate memory|DefaultCPUAllocator: can't allocate memory)",
        "The machine's memory ran out",
        _MEMORY_ADVICE,
    ),
    _rule(
        r"No space left on device(?:: '(?P<path>[^']+)')?",
        "A disk is full, or /dev/shm is",
        "`df -h` shows which; in a container start it with --shm-size=1g or --ipc=host",
    ),
    _rule(
        r"(?<!`)OSError: \[Errno 24\]",
        "The limit of open files was reached",
        "Raise it before starting pdserve: ulimit -n 65535",
    ),
    # Model
    _rule(
        r"PermissionError: \[Errno 13\] Permission denied: '(?P<path>[^']+)'",
        "{path} may not be read or written by this user",
        "Change its permissions, or run pdserve as its owner",
    ),
    _rule(
        r"Repo id must be in the form .+?: '(?P<path>[^']+)'",
        "There is no model at {path}",
        "Set `model` to a folder with config.json and the weights",
    ),
    _rule(
        r"Invalid repository ID or local directory specified: '(?P<path>[^']+)'",
        "{path} is not the folder of a model: it has no config.json",
        "Set `model` to a folder with config.json and the weights",
    ),
    _rule(
        r"Cannot find any model weights with `(?P<path>[^`]+)`",
        "{path} has no weights",
        "Fetch the model again: its folder needs *.safetensors",
    ),
    _rule(
        r"SafetensorError: (?P<what>.+)|safetensors_rust\.\w+: (?P<other>.+)",
        "The model's weights are damaged",
        "Fetch the model again; a download was cut short perhaps",
    ),
    _rule(
        r"Model architectures \[(?P<names>[^\]]+)\] are not supported",
        "This vLLM cannot run the model's architecture ({names})",
        "Take another model, or a vLLM that knows it",
    ),
    _rule(
        r"model type `(?P<name>[^`]+)` but Transformers does not recognize",
        "The installed transformers does not know the model's type ({name})",
        "Take another model, or newer transformers",
    ),
    _rule(
        r"`trust_remote_code=True`",
        "The model brings code of its own",
        "If you trust it, set trust-remote-code = true in engines.args",
    ),
    _rule(
        r"OfflineModeIsEnabled|LocalEntryNotFoundError|outgoing traffic has been disabled",
        "The engine wanted something from a model hub, and pdserve starts engines offline",
        "Fetch it beforehand, or set HF_HUB_OFFLINE = '0' in engines.env",
    ),
    # GPU
    _rule(
        r"Bfloat16 is only supported on GPUs with compute capability of at least 8\.0",
        "This GPU cannot compute in bfloat16",
        "Set dtype = 'half' in engines.args",
    ),
    _rule(
        r"No valid attention backend found for (?P<device>.+?) with",
        "No attention backend of vLLM fits the model and the flags on {device}",
        "Try block-size = 16 in engines.args: pdserve's 128 moves KV faster, and some backends cannot take it",
    ),
    _rule(
        r"driver on your system is too old|CUDA driver version is insufficient|no kernel image is available",
        "vLLM was built for another CUDA than this driver or GPU knows",
        "Update the driver, or install the vLLM that was built for its CUDA version",
    ),
    _rule(
        r"Failed to infer device type|no CUDA-capable device|No CUDA GPUs are available",
        "vLLM found no device that it could run on",
        "This vLLM is for GPUs: see that nvidia-smi lists one here, or install a build for CPUs (pdserve[cpu])",
    ),
    # Libraries
    _rule(
        r"PackageNotFoundError: No package metadata was found for vllm",
        "This build of vLLM is called otherwise, and its `vllm` command does not run",
        "Leave engines.command out: pdserve starts the server as a module",
    ),
    _rule(
        r"(?P<what>lib(?:cudart|cuda|nvrtc|cublas|nccl)[\w.-]*\.so[\d.]*): cannot open shared object file",
        "{what} is missing: a package was built for another CUDA than the one installed",
        f"vLLM, torch and NIXL must be for one CUDA version (nixl-cu12 or nixl-cu13). {_ENVIRONMENT_ADVICE}",
    ),
    _rule(
        r"NIXL is not available",
        "vLLM cannot import NIXL, which moves the KV cache",
        "In the engine's environment: pip install nixl, on CUDA 13 nixl-cu13; `python -c 'import nixl'` there says more",
    ),
    _rule(
        r"no usable transports/devices \(asked (?P<asked>\S+)",
        "UCX, which NIXL moves KV with, has none of the transports {asked}",
        "Correct UCX_TLS in env",
    ),
    _rule(
        r"NIXL_ERR_BACKEND",
        "NIXL could not set up its transport",
        "UCX_LOG_LEVEL = 'info' in engines.env makes it tell more",
    ),
    _rule(
        r"No module named '(?P<name>vllm[\w.]*)'",
        "The engine's Python has no {name}",
        'Install vLLM there, or let engines.python name a Python that has it; without a GPU: pip install "pdserve[cpu]"',
    ),
    _rule(
        r"operator torchvision::nms does not exist",
        "torchvision does not fit torch",
        "In the engine's environment: pip uninstall torchvision torchaudio; vLLM serves text without them",
    ),
    _rule(
        r"(?:undefined symbol|Failed to import from vllm\._C\w*): (?P<what>.+)",
        "vLLM's compiled part does not fit the installed torch",
        _ENVIRONMENT_ADVICE,
    ),
    _rule(
        r"(?:ImportError|ModuleNotFoundError): (?P<what>.+)",
        "A Python package is missing or broken: {what}",
        _ENVIRONMENT_ADVICE,
    ),
    _rule(r"(?i)illegal instruction|(?:core proc\(s\): \{.*?|exit code): -4\b", *_CPU_FEATURES),
    _rule(r"(?:core proc\(s\): \{.*?|exit code): -7\b", *_BUS_ERROR),
    _rule(r"(?:core proc\(s\): \{.*?|exit code): -9\b", *_KILLED),
    _rule(r"(?:core proc\(s\): \{.*?|exit code): -11\b|Segmentation fault", *_SEGFAULT),
    _rule(
        r"object '(?P<path>[^']+)' from LD_PRELOAD cannot be preloaded",
        "{path} is to be preloaded and cannot be",
        "Correct LD_PRELOAD in engines.env; Intel's OpenMP comes with: pip install intel-openmp",
    ),
    _rule(
        r"\[pdserve\] cannot run (?P<what>.+)",
        "The engine's program cannot be run: {what}",
        "Correct engines.command or engines.python",
    ),
)

_SIGNAL_RULES = {
    signal.SIGILL: _CPU_FEATURES,
    signal.SIGBUS: _BUS_ERROR,
    signal.SIGKILL: _KILLED,
    signal.SIGSEGV: _SEGFAULT,
    signal.SIGABRT: _SEGFAULT,
}

_ERROR = re.compile(
    r"^(?:\(\w+ pid=\d+\) )?(?:ERROR [\d :-]+\[[^\]]+\] )?(?P<error>[\w.]*(?:Error|Exception): .*)$", re.MULTILINE
)
_FRAME = re.compile(
    r"(?:\(\w+ pid=\d+\) )?(?:ERROR [\d :-]+\[[^\]]+\] ?)?"
    r"(?: {4}|  File \"|Traceback \(|The above exception was|During handling of|usage: |$)"
)
_UNKNOWN_ADVICE = "`pdserve up --dry-run` prints the command, to be run by hand"


def diagnose(tail: str, status: ExitStatus | None, argv: Sequence[str] = ()) -> Diagnosis:
    """The likely cause of an engine's end, or of its silence when it still runs (`status` is None)."""
    for rule in _LOG_RULES:
        if match := rule.pattern.search(tail):
            words = {
                "port": _port_in(argv),
                **{name: (value or "").strip() for name, value in match.groupdict().items()},
            }
            return Diagnosis(rule.cause.format_map(words), rule.advice.format_map(words))
    if status is not None and status.signal in _SIGNAL_RULES:
        return Diagnosis(*_SIGNAL_RULES[signal.Signals(status.signal)])
    return _unknown(tail)


def log_tail(path: Path, num_lines: int) -> str:
    """The last lines of a log. Empty when there is no such file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - MAX_TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.splitlines()[-num_lines:])


def without_frames(text: str) -> str:
    """The same lines less the frames of tracebacks and the usage text: a vLLM that fails ends in those of three processes."""
    return "\n".join(line for line in text.splitlines() if not _FRAME.match(line))


def _unknown(tail: str) -> Diagnosis:
    """No row fits: the last error that the log names, less those that only tell of another one."""
    errors = [match["error"] for match in _ERROR.finditer(tail) if "See root cause above" not in match["error"]]
    if errors:
        return Diagnosis(
            f"Not one that pdserve knows. The last error in its log is: {errors[-1][:300]}", _UNKNOWN_ADVICE
        )
    return Diagnosis("Not known: its log names no error", _UNKNOWN_ADVICE)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # A real-time signal
        return f"signal {number}"


def _port_in(argv: Sequence[str]) -> str:
    return argv[argv.index("--port") + 1] if "--port" in argv[:-1] else "unknown"
