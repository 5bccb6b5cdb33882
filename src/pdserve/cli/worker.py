"""`pdserve gateway-worker`: one of the processes of `pdserve gateway --workers N`, which starts it; of no use to people."""

from __future__ import annotations

import logging
import socket

import click

from pdserve.cli.collector import calm_collector
from pdserve.cli.open_files import max_clients, raise_limit
from pdserve.cli.options import environment


@click.command(hidden=True)
@click.argument("index", type=int)
@click.argument("control", type=int)
def worker(index: int, control: int) -> None:
    """Serve what the gateway's front hands over; CONTROL is the descriptor of the link to it."""
    import uvloop  # noqa: PLC0415

    from pdserve.gateway.workers.worker import serve_worker  # noqa: PLC0415

    log_format = f"%(asctime)s %(levelname)s %(name)s [worker {index}]: %(message)s"
    logging.basicConfig(level=logging.INFO, format=log_format)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    calm_collector()
    sock = socket.socket(fileno=control)
    uvloop.run(serve_worker(sock, environment(), max_clients=max_clients(raise_limit())))
