"""What one request looks like in a terminal: its phases as bars, the handoff's fields, the evidence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from pdserve.cli.style import bar
from pdserve.verify.compare import Agreement

if TYPE_CHECKING:
    from rich.console import Console

    from pdserve.protocol.admin import RequestRecord
    from pdserve.verify.check import Delta, Report

_MIB = 1024 * 1024


def draw_request(console: Console, record: RequestRecord) -> None:
    """Client, gateway, P and D, one line a phase, on one time scale."""
    steps = _steps(record)
    total_s = sum(seconds for _, _, seconds, _ in steps)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, justify="right")
    table.add_column()
    table.add_row("client", Text("█" * 40, style="dim"), f"{total_s * 1e3:.1f} ms", "the whole request")
    start_s = 0.0
    for who, style, seconds, what in steps:
        table.add_row(who, Text(bar(seconds, total_s, start=start_s), style=style), f"{seconds * 1e3:.1f} ms", what)
        start_s += seconds
    console.print(table)


def _steps(record: RequestRecord) -> list[tuple[str, str, float, str]]:
    phases = record.phases
    prompt = f"{record.num_prompt_tokens} prompt tokens" if record.num_prompt_tokens is not None else "the prompt"
    more = "" if record.num_output_tokens is None else f"{record.num_output_tokens - 1} more tokens"
    steps = (
        ("gateway", "cyan", phases.queue_s, "split the body, choose P and D"),
        (record.prefill or "", "magenta", phases.prefill_s, f"compute {prompt}; answer with the handoff"),
        ("gateway", "cyan", phases.handoff_s, "check the handoff, send it to D"),
        (record.decode or "", "green", phases.first_token_s, "pull the KV from P, first token"),
        (record.decode or "", "green", phases.stream_s, more),
        (record.decode or "", "green", phases.decode_s, "pull the KV from P, all tokens"),
    )
    return [(who, style, seconds, what) for who, style, seconds, what in steps if seconds is not None]


def draw_handoff(console: Console, record: RequestRecord) -> None:
    """What P gave the gateway, and the gateway D."""
    if record.handoff is None:
        console.print(f"no handoff: {record.cause}", style="yellow", markup=False)
        return
    handoff = record.handoff
    table = _pairs_table()
    table.add_row("remote_engine_id", handoff.remote_engine_id)
    table.add_row("remote_request_id", handoff.remote_request_id)
    table.add_row("side channel", f"{handoff.remote_host}:{handoff.remote_port}")
    blocks = "block" if handoff.num_blocks == 1 else "blocks"
    tokens = "" if handoff.num_tokens is None else f", {handoff.num_tokens} tokens"
    table.add_row("remote_block_ids", f"{handoff.num_blocks} {blocks}{tokens}")
    console.print(table)


def draw_evidence(console: Console, report: Report) -> None:
    """Each party's account of the request."""
    table = _pairs_table()
    for label, text in evidence_rows(report):
        table.add_row(label, Text(text))
    console.print(table)


def draw_verdict(console: Console, report: Report) -> None:
    """The one thing that the exit status says too."""
    verdict = "[bold green]KV moved.[/bold green]" if report.has_moved else "[bold red]KV did not move.[/bold red]"
    console.print(f"\n{verdict}", end=" ")
    console.print(report.sentence, markup=False)


def evidence_rows(report: Report) -> list[tuple[str, str]]:
    """The same as label and text."""
    rows: list[tuple[str, str]] = []
    record = report.record
    if record is not None and record.num_remote_tokens is not None:
        rows.append(
            (
                "usage of this request",
                f"{record.num_remote_tokens} of {record.num_prompt_tokens} prompt tokens not computed by D",
            )
        )
    rows += [(f"counters of {delta.engine.name}", _computed(delta)) for delta in report.prefill]
    for delta in report.decode:
        rows += [(f"counters of {delta.engine.name}", _sources(delta)), ("transfers", _transfers(delta))]
    if report.comparison is not None:
        rows.append(("D alone, same prompt", _agreement(report)))
    return rows


def _computed(delta: Delta) -> str:
    counters = delta.counters
    cached = (
        f", {counters.num_prompt_tokens_local_cache} from its prefix cache"
        if counters.num_prompt_tokens_local_cache
        else ""
    )
    return f"{counters.num_prompt_tokens_local} prompt tokens computed here{cached}"


def _sources(delta: Delta) -> str:
    return f"{delta.counters.num_prompt_tokens_remote} prompt tokens came from outside, " + _computed(delta)


def _transfers(delta: Delta) -> str:
    counters = delta.counters
    if counters.num_transfers == 0:
        return "none"
    mib = counters.transfer_bytes / _MIB
    rate = f", {mib / counters.transfer_s:.1f} MiB/s" if counters.transfer_s > 0 else ""
    failed = f", {counters.num_failed_transfers} failed" if counters.num_failed_transfers else ""
    return f"{counters.num_transfers}, {mib:.2f} MiB in {counters.transfer_s * 1e3:.2f} ms{rate}{failed}"


def _agreement(report: Report) -> str:
    assert report.comparison is not None
    if report.comparison.agreement is Agreement.EQUAL:
        return "the same answer, token by token"
    return f"{report.comparison.agreement}: {report.comparison.explanation}"


def _pairs_table() -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    return table
