"""`pdserve sim engine`: the stand-in engine, for trying out a gateway without a model and for learning how P/D works."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import click

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from pdserve.sim.stand_in import StandIn

_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer", "both": "kv_both", "none": "none"}


@click.group()
def sim() -> None:
    """Run without engines."""


@sim.command()
@click.option("--role", type=click.Choice(list(_ROLES)), default="both", show_default=True, help="none: no connector.")
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=click.IntRange(0, 65535), default=8100, show_default=True, help="0 chooses one.")
@click.option("--side-channel-port", type=click.IntRange(0, 65535), default=0, help="0 chooses one [default: 0].")
@click.option("--model", default="stand-in", show_default=True, help="The name that it answers to.")
@click.option("--block-size", type=click.IntRange(1), default=16, show_default=True, help="Tokens in a KV block.")
@click.option("--num-blocks", type=click.IntRange(1), default=1024, show_default=True, help="KV blocks in all.")
@click.option(
    "--kv-lease", "kv_lease_s", type=click.FloatRange(min=0), default=30.0, show_default=True, help="Seconds."
)
@click.option("--prefill-rate", type=click.FloatRange(min=0), default=0.0, help="Prompt tokens a second; 0: at once.")
@click.option("--itl", "itl_s", type=click.FloatRange(min=0), default=0.0, help="Seconds between two tokens.")
@click.option("--transfer", "transfer_s", type=click.FloatRange(min=0), default=0.0, help="Seconds for pulling KV.")
@click.option("--fault", "faults", multiple=True, metavar="NAME[:VALUE]", help="What goes wrong with every request.")
def engine(
    role: str,
    host: str,
    port: int,
    side_channel_port: int,
    model: str,
    block_size: int,
    num_blocks: int,
    kv_lease_s: float,
    prefill_rate: float,
    itl_s: float,
    transfer_s: float,
    faults: tuple[str, ...],
) -> None:
    """Speak vLLM's wire protocol without a model.

    It hands KV over as vLLM with a NixlConnector does, with block accounting, leases and the same metrics, and it fails
    as vLLM fails: an engine that gets no handoff answers 200 all the same. Two of them make a pair for `pdserve gateway`.
    """
    import uvloop  # noqa: PLC0415

    from pdserve.sim.faults import parse_fault  # noqa: PLC0415
    from pdserve.sim.settings import EngineSettings, Timing  # noqa: PLC0415
    from pdserve.sim.stand_in import serve_stand_in  # noqa: PLC0415

    if block_size * num_blocks < 2:  # noqa: PLR2004 - a prompt token and an output token
        raise ConfigError("--block-size times --num-blocks leaves no room for a request")
    timing = Timing(
        prefill_token_s=1 / prefill_rate if prefill_rate else 0.0, decode_step_s=itl_s, transfer_s=transfer_s
    )
    settings = EngineSettings(
        model=model,
        max_model_len=min(8192, block_size * num_blocks),
        block_size=block_size,
        num_blocks=num_blocks,
        kv_lease_duration_s=kv_lease_s,
        side_channel_host=host,
        side_channel_port=side_channel_port,
        timing=timing,
    )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    serving = serve_stand_in(
        _ROLES[role],
        settings,
        host=host,
        port=port,
        faults=[parse_fault(fault) for fault in faults],
        on_ready=_announce,
    )
    uvloop.run(serving)


def _announce(stand_in: StandIn) -> None:
    click.echo(f"stand-in engine on {stand_in.url}")
