"""The lines in the engines' logs that tell of a handoff, for whoever wants to see it in vLLM's own words."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_MARKS = {
    "compatibility": re.compile(r"NIXL compatibility check passed"),
    "transfers": re.compile(r"KV Transfer metrics: .*Num successful transfers=\d+"),
    "answered": re.compile(r'"POST /v1/(chat/)?completions HTTP/1\.1" 200'),
}
"""As vLLM 0.26 to 0.32 write them; the transfers' line comes every ten seconds while there were any."""

_PREFIX = re.compile(r"^.*?\bINFO\b:?\s*(?:\d\d-\d\d \d\d:\d\d:\d\d )?(?:\[[^]]*\] )?")


def telling_lines(paths: Iterable[Path]) -> dict[str, dict[str, str]]:
    """Engine name (the file's stem) to mark to the last line that bears it, without vLLM's prefix."""
    return {path.stem: _last_lines(path) for path in paths}


def _last_lines(path: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return found  # A log that is gone proves nothing either way; the counters do.
    for line in lines:
        for name, mark in _MARKS.items():
            if mark.search(line):
                found[name] = _PREFIX.sub("", line).strip()
    return found
