"""verify over stand-in engines: it proves what moved, and is not fooled by a 200."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from typing import TYPE_CHECKING

import httpx
import pytest

from pdserve.core import EngineAddress, EngineName, Role
from pdserve.errors import VerifyFailed
from pdserve.http.listener import Listener, bind
from pdserve.sim.faults import AnswerWithoutHandoff, ErrorStatus, HalfHandoff, IgnoreHandoff
from pdserve.verify.check import DEFAULT_PROMPT, Report, Verifier
from pdserve.verify.compare import Agreement
from split import SETTINGS, Split, split

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdserve.errors import InvalidRequest
    from pdserve.http.server import Headers, Request, Response
    from pdserve.sim.faults import Fault


async def _verify(deployment: Split) -> Report:
    """As `pdserve verify` does in front of pdserve's gateway."""
    verifier = await Verifier.of_pdserve(deployment.gateway.client.url, deployment.gateway.admin.url)
    try:
        return await verifier.verify(DEFAULT_PROMPT, max_tokens=5)
    finally:
        verifier.close()


async def _verify_foreign(deployment: Split, url: str) -> Report:
    """As it does in front of any other gateway."""
    engines = [
        EngineAddress(EngineName("prefill-0"), Role.PREFILL, deployment.prefill.url),
        EngineAddress(EngineName("decode-0"), Role.DECODE, deployment.decode.url),
    ]
    verifier = Verifier(url, engines, None)
    try:
        return await verifier.verify(DEFAULT_PROMPT, max_tokens=5)
    finally:
        verifier.close()


class _ToyProxy:
    """The reference flow, which trusts every 200; `loses` makes it forget what P answered."""

    def __init__(self, deployment: Split, client: httpx.AsyncClient, *, loses: bool, skips_prefill: bool) -> None:
        self._deployment = deployment
        self._client = client
        self._loses = loses
        self._skips_prefill = skips_prefill

    async def handle(self, request: Request, response: Response) -> None:
        decode_url = self._deployment.decode.url
        if request.method == b"GET":
            answer = await self._client.get(decode_url + request.path.decode())
        else:
            fields = json.loads(request.body)
            if not self._skips_prefill:
                fields |= await self._prefill(fields)
            answer = await self._client.post(f"{decode_url}/v1/completions", json=fields)
        response.send(answer.status_code, [(b"content-type", b"application/json")], answer.content)

    async def _prefill(self, fields: dict[str, object]) -> dict[str, object]:
        leg = {name: value for name, value in fields.items() if name != "stream_options"}
        leg |= {"max_tokens": 1, "stream": False, "kv_transfer_params": {"do_remote_decode": True}}
        answer = await self._client.post(f"{self._deployment.prefill.url}/v1/completions", json=leg)
        return {} if self._loses else {"kv_transfer_params": answer.json()["kv_transfer_params"]}

    def render_error(self, error: InvalidRequest) -> tuple[Headers, bytes]:
        return [], str(error).encode()


@contextlib.asynccontextmanager
async def _toy_proxy(deployment: Split, *, loses: bool = False, skips_prefill: bool = False) -> AsyncIterator[str]:
    async with httpx.AsyncClient() as client:
        app = _ToyProxy(deployment, client, loses=loses, skips_prefill=skips_prefill)
        async with Listener(app, bind("127.0.0.1", 0)) as listener:
            yield listener.url


async def test_a_sound_pair_is_proven() -> None:
    """D's usage, D's counters, a transfer, and the same answer from D alone."""
    async with split() as deployment:
        report = await _verify(deployment)
        assert report.has_moved
        assert report.record is not None
        assert report.record.num_remote_tokens == report.num_prompt_tokens
        assert report.decode[0].counters.num_prompt_tokens_remote == report.num_prompt_tokens
        assert report.decode[0].counters.num_transfers == 1
        assert report.prefill[0].counters.num_prompt_tokens_local == report.num_prompt_tokens
        assert report.comparison is not None
        assert report.comparison.agreement is Agreement.EQUAL
        await deployment.settle()


async def test_a_p_without_a_connector_fails() -> None:
    """The sentence names P's missing flag."""
    async with split(prefill_role="none") as deployment:
        report = await _verify(deployment)
        assert not report.has_moved
        assert report.sentence == (
            f"D computed all {report.num_prompt_tokens} prompt tokens itself: prefill engine prefill-0 at "
            f"{deployment.prefill.url}: P's answer held no handoff; is P running with --kv-transfer-config?"
        )


@pytest.mark.parametrize(
    ("fault", "says"),
    [(AnswerWithoutHandoff(), "--kv-transfer-config"), (HalfHandoff("remote_engine_id"), "incomplete")],
)
async def test_a_p_that_gives_no_handoff_fails(fault: Fault, says: str) -> None:
    """Whatever is wrong with P's answer is said."""
    async with split(prefill_faults=[fault]) as deployment:
        report = await _verify(deployment)
        assert not report.has_moved
        assert says in report.sentence


async def test_a_d_that_ignores_the_handoff_fails() -> None:
    """D answers 200 with the right text; its count and its counters give it away."""
    async with split(decode_faults=[IgnoreHandoff()]) as deployment:
        report = await _verify(deployment)
        assert not report.has_moved
        assert f"D computed {report.num_prompt_tokens} of {report.num_prompt_tokens} prompt tokens" in report.sentence


async def test_counters_decide_where_usage_says_nothing() -> None:
    """A D without prompt token details can still be proven by what it counted meanwhile."""
    settings = dataclasses.replace(SETTINGS, enable_prompt_tokens_details=False)
    async with split(settings=settings) as deployment:
        report = await _verify(deployment)
        assert report.has_moved
        assert report.sentence.startswith("D's counters say")


async def test_another_gateway_is_proven_by_counters() -> None:
    """A proxy that does it right passes without knowing of pdserve."""
    async with split() as deployment, _toy_proxy(deployment) as url:
        report = await _verify_foreign(deployment, url)
        assert report.has_moved
        assert report.record is None


async def test_a_gateway_that_loses_the_handoff_fails() -> None:
    """P computed the prompt and D computed it again; every status was 200."""
    async with split() as deployment, _toy_proxy(deployment, loses=True) as url:
        report = await _verify_foreign(deployment, url)
        assert not report.has_moved
        assert "though P computed them too" in report.sentence


async def test_a_gateway_that_never_asks_p_fails() -> None:
    """P never saw the prompt, and the sentence says so."""
    async with split() as deployment, _toy_proxy(deployment, skips_prefill=True) as url:
        report = await _verify_foreign(deployment, url)
        assert not report.has_moved
        assert "P never saw them" in report.sentence


async def test_no_answer_is_no_verdict() -> None:
    """An error from the gateway is shown as it came."""
    async with split() as deployment:
        deployment.decode.faults.inject(ErrorStatus(500), times=None)
        with pytest.raises(VerifyFailed, match="answered 500 to the request"):
            await _verify(deployment)
