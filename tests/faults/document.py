"""The generated parts of docs/operations.md: `PYTHONPATH=tests python -m faults.document` writes them anew.

What stands between `<!-- NAME: generated -->` and `<!-- end of NAME -->` is made here; a test holds the file to it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from faults.table import DECODE_ROWS, PREFILL_ROWS, ROWS, UNSEEN, Right, Told
from pdserve.core import PrefillPlace
from pdserve.errors import Reason
from pdserve.sim.faults import FAULTS
from pdserve.telemetry.metrics import ALL

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from faults.table import Outcome, Row, Seen

PATH = Path(__file__).parents[2] / "docs" / "operations.md"

REASONS = {
    Reason.MALFORMED_HTTP: (400, "the bytes are no HTTP request, or one that two parsers may read differently"),
    Reason.MALFORMED_JSON: (400, "the body is no JSON object"),
    Reason.INVALID_FIELD: (400, "a field is missing or cannot mean anything"),
    Reason.UNAUTHORIZED: (401, "no API key, or one that is not known"),
    Reason.FORBIDDEN: (403, "a web page asked the admin listener"),
    Reason.NOT_FOUND: (404, "nothing is served at that path"),
    Reason.METHOD_NOT_ALLOWED: (405, "the path takes another method"),
    Reason.REQUEST_TIMEOUT: (408, "the request's head or body did not come in time"),
    Reason.BODY_TOO_LARGE: (413, "more than `gateway.max_body_bytes`"),
    Reason.HEADERS_TOO_LARGE: (431, "more or longer headers than the gateway takes"),
    Reason.QUEUE_FULL: (429, "`admission.max_queued` requests wait already"),
    Reason.QUEUE_TIMEOUT: (429, "no turn came within `admission.max_wait`"),
    Reason.NO_ENGINE: (503, "no decode engine takes traffic now"),
    Reason.DEADLINE: (504, "the whole request took longer than `timeouts.total`"),
    Reason.SHUTTING_DOWN: (503, "the gateway stops, and the request did not end within `timeouts.shutdown`"),
    Reason.OUT_OF_SOCKETS: (503, "the gateway has no socket left, for one more client or for an engine"),
    Reason.CONNECT_TIMEOUT: (504, "no connection to an engine within `timeouts.connect`"),
    Reason.PREFILL_TIMEOUT: (504, "P's whole answer took longer than `timeouts.prefill`"),
    Reason.FIRST_BYTE_TIMEOUT: (
        504,
        "D's first byte took longer than `timeouts.first_byte`, or a whole answer than `timeouts.whole_answer`",
    ),
    Reason.SILENCE_TIMEOUT: (504, "nothing came from D for `timeouts.silence` in the middle of its answer"),
    Reason.ENGINE_UNREACHABLE: (502, "an engine refused the connection, or ended it before it answered"),
    Reason.ENGINE_TIMEOUT: (
        504,
        "one of pdserve's own questions to an engine, or one passed through, was not answered",
    ),
    Reason.ENGINE_PROTOCOL: (502, "an engine answered something that is no HTTP, no JSON or no answer"),
    Reason.ENGINE_STATUS: (None, "the engine's own error, with its status and body"),
    Reason.ENGINE_BROKE_OFF: (502, "the connection to D ended in the middle of its answer, or the answer has no end"),
    Reason.WRONG_CONTEXT: (502, "D counted other prompt tokens than P: its answer would continue another prompt"),
    Reason.STALE_HANDOFF: (
        502,
        "P's lease may have ended before D read the KV: its answer may continue another prompt",
    ),
    Reason.CLIENT_STALLED: (None, "the client read nothing for `timeouts.silence`; it is hung up on"),
    Reason.INTERNAL: (500, "a fault in the gateway; its log tells more"),
}


def generated() -> Mapping[str, list[str]]:
    """The lines of each part."""
    return {
        "fault names": _names_table(),
        "faults of P": _fault_table(PREFILL_ROWS),
        "faults of D": _fault_table(DECODE_ROWS),
        "reasons": [
            "| reason | status | means |",
            "|---|---|---|",
            *(f"| `{reason}` | {status or 'its own'} | {means} |" for reason, (status, means) in REASONS.items()),
        ],
        "metrics": [
            "| metric | labels | counts |",
            "|---|---|---|",
            *(f"| `{one.name}` | {_names(one.labels)} | {one.help} |" for one in ALL),
        ],
    }


def part(text: str, name: str) -> list[str]:
    """What stands in the document under a name."""
    found = re.search(rf"<!-- {name}: generated -->\n(.*?)<!-- end of {name} -->", text, re.DOTALL)
    assert found is not None, f"the document has no part {name!r}"
    return found[1].splitlines()


def _fault_table(rows: Iterable[Row]) -> list[str]:
    """Faults that come to the same share a line."""
    lines: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        labels = ",".join(f'{name}="{value}"' for name, value in row.shown_labels)
        cells = (
            _shown(row.once),
            "the same" if row.always == row.once else _shown(row.always),
            _shown(row.other),
            row.does,
            "free at the lease's end" if row.waits_for_lease else "free at once",
            f"`{row.metric.name}{{{labels}}}`",
        )
        lines.setdefault(cells, []).append(f"`{row.fault}`")
    return [
        "| fault | the client gets | if it strikes always | with a second P and D | what pdserve does | P's blocks | metric |",
        "|---|---|---|---|---|---|---|",
        *(f"| {', '.join(faults)} | {' | '.join(cells)} |" for cells, faults in lines.items()),
    ]


def _names_table() -> list[str]:
    """What the stand-in says of each fault."""
    used = {row.fault.partition(":")[0] for row in ROWS} | {name for names in UNSEEN.values() for name in names}
    lines = [
        f"| `{name}` | {' '.join((fault.__doc__ or '').split())} |"
        for name, (fault, _) in FAULTS.items()
        if name in used
    ]
    return ["| fault | what goes wrong |", "|---|---|", *lines]


def _shown(seen: Seen) -> str:
    if seen.whole == seen.stream and not seen.unlike:
        return _told(seen.whole)
    unlike = "".join(f"; {shape}: {_told(outcome)}" for shape, outcome in seen.unlike)
    return f"whole: {_told(seen.whole)}; streamed: {_told(seen.stream)}{unlike}"


def _told(outcome: Outcome) -> str:
    if isinstance(outcome, Told) and outcome.reason is Reason.ENGINE_STATUS:
        return f"the engine's own error, `{outcome.reason}`"
    if not isinstance(outcome, Right):
        return str(outcome)
    return "right answer" if outcome.place is PrefillPlace.REMOTE else "right answer, prompt computed by D"


def _names(labels: Iterable[str]) -> str:
    return ", ".join(f"`{label}`" for label in labels) or "none"


def main() -> None:
    """Write the parts into the document."""
    text = PATH.read_text(encoding="utf-8")
    for name, lines in generated().items():
        start, end = f"<!-- {name}: generated -->\n", f"<!-- end of {name} -->"
        before, _, rest = text.partition(start)
        _, _, after = rest.partition(end)
        text = before + start + "".join(f"{line}\n" for line in lines) + end + after
    PATH.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
