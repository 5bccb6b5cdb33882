"""The proof of one prefill-decode pair: a small request of our own through both, judged by D's count.

The first handoff between two engines costs a handshake, so this is also what warms a pair up before traffic.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from pdserve.core import Evidence, PrefillPlace
from pdserve.engine.release import try_release
from pdserve.errors import EngineError, EngineProtocolError, OutOfSockets
from pdserve.protocol import nixl, openai, usage

if TYPE_CHECKING:
    from pdserve.engine.transport import Answer, EngineClient
    from pdserve.protocol.nixl import Handoff
    from pdserve.protocol.side_channel_hosts import AllowedHosts

_RELEASE_TIMEOUT_S = 5.0


class _Model(msgspec.Struct, frozen=True):
    id: str


class _Models(msgspec.Struct, frozen=True):
    data: list[_Model]


class _Completion(msgspec.Struct, frozen=True):
    usage: msgspec.Raw = msgspec.Raw(b"null")


@dataclass(frozen=True, slots=True)
class PairProof:
    """What one handoff between two engines showed."""

    evidence: Evidence
    handoff: Handoff | None
    total_s: float


async def served_model(engine: EngineClient, *, timeout_s: float = 10.0) -> str:
    """The first model that an engine serves. Raises EngineError."""
    answer = expect_ok(engine, await engine.get("/v1/models", timeout_s=timeout_s))
    models = engine.decoded(answer, _Models).data
    if not models:
        raise EngineProtocolError("/v1/models lists no model", engine=str(engine.address))
    return models[0].id


def expect_ok(engine: EngineClient, answer: Answer) -> Answer:
    """The same answer, if it is a 200. Raises EngineStatus."""
    if answer.status != 200:  # noqa: PLR2004
        raise engine.status_error(answer)
    return answer


async def prove_pair(
    prefill: EngineClient, decode: EngineClient, *, model: str, hosts: AllowedHosts, timeout_s: float
) -> PairProof:
    """Send one short prompt, new each time, through a pair. Raises EngineError when a leg fails outright."""
    started_s = time.monotonic()
    nonce = secrets.token_hex(8)
    request_id = f"pdserve-pair-{nonce}".encode()
    fields = openai.split_request(
        msgspec.json.encode(
            {"model": model, "prompt": f"Pair {nonce}: one, two, three,", "max_tokens": 2, "temperature": 0}
        )
    )
    api = openai.Api.COMPLETIONS
    leg = openai.join(nixl.prefill_fields(api, fields))
    answer = expect_ok(prefill, await prefill.post(api, leg, request_id=request_id, timeout_s=timeout_s))
    try:
        handoff = nixl.parse_handoff(api, answer.body, now_s=time.monotonic())
        hosts.check(handoff.host)
    except nixl.UnusableHandoff as exc:
        return PairProof(Evidence(PrefillPlace.LOCAL, cause=str(exc)), None, time.monotonic() - started_s)
    try:
        nixl.check_reachable(handoff, decode_url=decode.address.url)
    except nixl.UnusableHandoff as exc:
        await try_release(decode, handoff, headers=[], timeout_s=_RELEASE_TIMEOUT_S)
        return PairProof(Evidence(PrefillPlace.LOCAL, cause=str(exc)), None, time.monotonic() - started_s)
    leg = openai.join(nixl.decode_fields(fields, handoff))
    try:
        answer = expect_ok(decode, await decode.post(api, leg, request_id=request_id, timeout_s=timeout_s))
    except (EngineError, OutOfSockets):
        await try_release(decode, handoff, headers=[], timeout_s=_RELEASE_TIMEOUT_S)
        raise
    counts = usage.parse_usage(api, decode.decoded(answer, _Completion).usage)
    return PairProof(usage.judge(counts), handoff, time.monotonic() - started_s)
