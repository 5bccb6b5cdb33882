"""Freeing a handoff's blocks on P, through one D: a request that D refuses, on whose way out it tells P.

vLLM has no call for it. Whoever releases decides through which D, and what it means that none took it.
"""

from __future__ import annotations

import logging
import secrets
from typing import TYPE_CHECKING

from pdserve.errors import EngineError, OutOfSockets
from pdserve.protocol import nixl
from pdserve.protocol.openai import Api

if TYPE_CHECKING:
    from pdserve.engine.transport import EngineClient
    from pdserve.http.server import Headers
    from pdserve.protocol.nixl import Handoff

_REFUSED_FOR_ITS_MODEL = 404
"""That refusal is what frees the blocks."""
_logger = logging.getLogger("pdserve.pool")


async def try_release(decode: EngineClient, handoff: Handoff, *, headers: Headers, timeout_s: float) -> bool:
    """Whether P was told. Never raises: what is not released ends with P's lease."""
    try:
        answer = await decode.post(
            Api.COMPLETIONS,
            nixl.release_body(handoff),
            request_id=f"pdserve-release-{secrets.token_hex(16)}".encode(),
            timeout_s=timeout_s,
            headers=headers,
        )
    except (EngineError, OutOfSockets) as exc:
        _logger.info("release through %s failed: %s", decode.address, exc)
        return False
    return answer.status == _REFUSED_FOR_ITS_MODEL
