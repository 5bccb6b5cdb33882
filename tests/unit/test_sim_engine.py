"""The stand-in's engine, without HTTP; time moves by hand."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.errors import ConfigError
from pdserve.sim.clock import ManualClock
from pdserve.sim.engine import Engine, EngineDead, GenerationFailed
from pdserve.sim.handoff import KvRole
from pdserve.sim.job import Job, Output, Sampling
from pdserve.sim.settings import EngineSettings, Timing
from pdserve.sim.tokens import decode, encode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_SMALL = EngineSettings(block_size=4, num_blocks=32, max_model_len=128, handshake_timeout_s=0.05)
_PROMPT = tuple(encode("the quick brown fox jumps over the lazy dog"))
_KEEP = {"do_remote_decode": True}


@contextlib.asynccontextmanager
async def _engine(
    role: KvRole, settings: EngineSettings = _SMALL, clock: ManualClock | None = None
) -> AsyncIterator[Engine]:
    engine = Engine(role, settings, clock=clock)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


@contextlib.asynccontextmanager
async def _pair(
    settings: EngineSettings = _SMALL, clock: ManualClock | None = None
) -> AsyncIterator[tuple[Engine, Engine]]:
    async with (
        _engine(KvRole.PRODUCER, settings, clock) as prefill,
        _engine(KvRole.CONSUMER, settings, clock) as decode_engine,
    ):
        yield prefill, decode_engine


def _job(prompt: tuple[int, ...] = _PROMPT, params: dict[str, Any] | None = None, **sampling: Any) -> Job:
    return Job(request_id="r", prompt=prompt, params=params, sampling=Sampling(**sampling))


async def _run(engine: Engine, job: Job) -> list[Output]:
    async with engine.running([job]) as outputs:
        return [output async for _, output in outputs]


async def _prefill(engine: Engine, prompt: tuple[int, ...] = _PROMPT) -> dict[str, Any]:
    """A P leg; its handoff."""
    (output,) = await _run(engine, _job(prompt, _KEEP, max_tokens=1))
    assert output.handoff is not None
    return output.handoff


def _text(outputs: list[Output]) -> str:
    return "".join(output.text for output in outputs)


def _source(engine: Engine, source: str) -> float:
    return engine.metrics.value("vllm:prompt_tokens_by_source_total", source=source)


async def test_one_token_a_piece_and_nothing_left_behind() -> None:
    """A request ends by its limit, word by word, and its blocks are free."""
    async with _engine(KvRole.NONE) as engine:
        outputs = await _run(engine, _job(max_tokens=5))
        assert [output.finish_reason for output in outputs] == [None, None, None, None, "length"]
        assert all(output.text.startswith(" ") for output in outputs)
        assert engine.pool.usage == 0


async def test_the_engine_alone_answers_the_same_twice() -> None:
    """The second time from its own prefix cache: same text, cached tokens counted in whole blocks."""
    async with _engine(KvRole.NONE) as engine:
        first, second = await _run(engine, _job()), await _run(engine, _job())
        assert _text(first) == _text(second)
        assert (first[0].num_cached, second[0].num_cached) == (0, 8)
        assert (first[0].num_created, second[0].num_created) == (8, 0)
        assert (_source(engine, "local_compute"), _source(engine, "local_cache_hit")) == (10, 8)


async def test_prefill_and_decode_apart_say_what_one_engine_says() -> None:
    """D continues P's KV as one engine alone would, computes no prompt token, and P's blocks are freed by D's notice."""
    async with _pair() as (p, d), _engine(KvRole.NONE) as alone:
        handoff = await _prefill(p)
        assert p.pool.usage > 0
        handoff.pop("remote_prefill_cached_tokens")
        outputs = await _run(d, _job(params=handoff))
        assert _text(outputs) == _text(await _run(alone, _job()))
        assert outputs[0].num_cached == len(_PROMPT)
        assert _source(d, "external_kv_transfer") == len(_PROMPT)
        assert _source(d, "local_compute") == 0
        assert p.pool.usage == d.pool.usage == 0
        assert d.metrics.value("vllm:nixl_xfer_time_seconds_count") == 1


async def test_d_pulls_only_what_it_has_not() -> None:
    """With the beginning in its own cache D reads the last blocks only."""
    async with _pair() as (p, d):
        alone = await _run(d, _job())
        handoff = await _prefill(p)
        outputs = await _run(d, _job(params=handoff))
        assert _text(outputs) == _text(alone)
        assert (_source(d, "local_cache_hit"), _source(d, "external_kv_transfer")) == (8, 1)
        assert d.metrics.value("vllm:nixl_num_descriptors_sum") == 30


async def test_the_handoff_says_what_p_computed() -> None:
    """Its tokens are the prompt's; more than one generated token adds to them, and then P's cache hits are not told."""
    async with _engine(KvRole.PRODUCER) as p:
        handoff = await _prefill(p)
        assert handoff["remote_num_tokens"] == len(_PROMPT)
        assert handoff["remote_block_ids"] == [[1, 2, 3]]
        outputs = await _run(p, _job(params=_KEEP, max_tokens=3))
        assert outputs[-1].handoff is not None
        assert outputs[-1].handoff["remote_num_tokens"] == len(_PROMPT) + 2
        assert "remote_prefill_cached_tokens" not in outputs[-1].handoff


async def test_without_a_connector_there_is_no_handoff() -> None:
    """P without --kv-transfer-config answers, and keeps nothing."""
    async with _engine(KvRole.NONE) as engine:
        (output,) = await _run(engine, _job(params=_KEEP, max_tokens=1))
        assert output.handoff is None
        assert engine.pool.usage == 0


async def test_the_lease_ends() -> None:
    """Nobody comes: P's blocks are free after the lease, and it counts that."""
    clock = ManualClock()
    async with _engine(KvRole.PRODUCER, clock=clock) as p:
        await _prefill(p)
        await clock.advance(29)
        assert p.leases.num_blocks == 3
        await clock.advance(1)
        assert p.leases.num_blocks == 0
        assert p.pool.usage == 0
        assert p.metrics.value("vllm:nixl_num_kv_expired_reqs_total") == 1


async def test_a_stale_handoff_continues_somebody_else() -> None:
    """After the lease and other traffic D answers in full, in another request's context, and only P counts the late notice."""
    clock = ManualClock()
    settings = dataclasses.replace(_SMALL, num_blocks=4, max_model_len=16)
    async with _pair(settings, clock) as (p, d):
        handoff = await _prefill(p)
        await clock.advance(31)
        for word in ("red", "blue"):
            await _run(p, _job(tuple(encode(f"{word} {word} {word} {word} {word} {word}")), max_tokens=1))
        outputs = await _run(d, _job(params=handoff, max_tokens=4))
        assert outputs[-1].finish_reason == "length"
        assert _text(outputs).isupper()
        assert p.metrics.value("vllm:nixl_num_notifications_after_expiry_total") == 1


async def test_a_lapsed_lease_can_be_forced() -> None:
    """`let_lapse` makes the same of a fresh handoff."""
    async with _pair() as (p, d):
        handoff = await _prefill(p)
        p.let_lapse(handoff["remote_request_id"])
        assert p.pool.usage == 0
        assert _text(await _run(d, _job(params=handoff))).isupper()


async def test_heartbeats_keep_the_lease_while_d_is_busy() -> None:
    """A request that waits on D for longer than the lease still gets its KV."""
    clock = ManualClock()
    settings = dataclasses.replace(_SMALL, max_num_seqs=1, timing=Timing(decode_step_s=10))
    async with _pair(settings, clock) as (p, d):
        long = asyncio.ensure_future(_run(d, _job(tuple(encode("red house")), max_tokens=10)))
        await d.until(lambda: d.num_running == 1)
        handoff = await _prefill(p)
        waiting = asyncio.ensure_future(_run(d, _job(params=handoff, max_tokens=1)))
        await d.until(lambda: d.num_waiting == 1)
        for _ in range(17):
            await clock.advance(5)
            await p.until(lambda: p.leases.next_expiry_s == max(30, clock.now_s() + 20))
        await clock.advance(5)
        await long
        assert not _text(await waiting).isupper()
        assert p.metrics.value("vllm:nixl_num_kv_expired_reqs_total") == 0


async def test_a_half_handoff_hangs_and_its_blocks_are_lost() -> None:
    """Without P's port D waits for a transfer that was never started; an abort does not give the blocks back."""
    async with _pair() as (p, d):
        handoff = await _prefill(p)
        del handoff["remote_port"]
        request = asyncio.ensure_future(_run(d, _job(params=handoff)))
        await d.until(lambda: d.pool.usage > 0)
        request.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await request
        assert d.num_waiting == 0
        assert d.pool.usage > 0
        assert not d.is_dead


async def test_a_prompt_longer_than_the_handoff_kills_the_core() -> None:
    """D needs more blocks than P names: an assertion, and all that runs there fails."""
    async with _pair() as (p, d):
        handoff = await _prefill(p)
        bystander = asyncio.ensure_future(_run(d, _job(max_tokens=10, prompt=_PROMPT[:2])))
        with pytest.raises(EngineDead):
            await _run(d, _job(_PROMPT * 2, handoff))
        with pytest.raises(EngineDead):
            await bystander
        with pytest.raises(EngineDead):
            await _run(d, _job())


async def test_a_prompt_shorter_than_the_handoff_reads_its_end() -> None:
    """D takes the last blocks, whatever they are: 200, and the wrong context."""
    async with _pair() as (p, d):
        handoff = await _prefill(p, _PROMPT * 2)
        assert _text(await _run(d, _job(params=handoff))).isupper()


@pytest.mark.parametrize("change", [{"remote_port": 9}, {"remote_engine_id": "other"}, {"remote_engine_id": None}])
async def test_p_that_is_not_there_fails_the_request(change: dict[str, Any]) -> None:
    """Nobody listens, or somebody else: the request fails, is counted, and the engine goes on."""
    async with _pair() as (p, d):
        handoff = await _prefill(p)
        with pytest.raises(GenerationFailed):
            await _run(d, _job(params=handoff | change))
        assert d.metrics.value("vllm:nixl_num_failed_transfers_total") == 1
        assert d.metrics.value("vllm:request_success_total", finished_reason="error") == 1
        assert d.pool.usage == 0
        assert await _run(d, _job())


async def test_blocks_that_p_does_not_have_fail_the_request() -> None:
    """An id beyond P's memory is a failed transfer."""
    async with _pair() as (p, d):
        handoff = await _prefill(p)
        with pytest.raises(GenerationFailed):
            await _run(d, _job(params=handoff | {"remote_block_ids": [[1, 2, 99]]}))


async def test_a_refused_request_frees_p() -> None:
    """The release recipe: D hears of the handoff, refuses, and tells P."""
    async with _pair() as (p, d):
        handoff = await _prefill(p)
        d.refuse(handoff)
        await p.until(lambda: p.pool.usage == 0)
        assert p.metrics.value("vllm:nixl_num_kv_expired_reqs_total") == 0


async def test_refusing_a_half_handoff_kills_the_core() -> None:
    """As in vLLM, where the key is looked up without a look."""
    async with _pair() as (p, d):
        handoff = await _prefill(p)
        del handoff["remote_request_id"]
        d.refuse(handoff)
        assert d.is_dead


async def test_an_aborted_pull_frees_both_sides() -> None:
    """The transfer ends first, then D's blocks become free; P gets its notice."""
    clock = ManualClock()
    async with _pair(dataclasses.replace(_SMALL, timing=Timing(transfer_s=1)), clock) as (p, d):
        handoff = await _prefill(p)
        request = asyncio.ensure_future(_run(d, _job(params=handoff)))
        await d.until(lambda: d.pool.usage > 0)
        request.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await request
        assert d.pool.usage > 0
        while d.pool.usage:
            await clock.advance(1)  # The transfer begins when the handshake, over a real socket, is done.
        assert p.pool.usage == 0


async def test_an_abort_frees_the_blocks() -> None:
    """Leaving the block ends what runs in it."""
    async with _engine(KvRole.NONE) as engine:
        async with engine.running([_job(max_tokens=100)]) as outputs:
            async for _, output in outputs:
                assert engine.pool.usage > 0
                assert output.finish_reason is None
                break
        assert engine.pool.usage == 0
        assert engine.num_running == 0


async def test_requests_wait_for_a_seat() -> None:
    """No more run at once than there are seats; the others wait their turn."""
    clock = ManualClock()
    settings = dataclasses.replace(_SMALL, max_num_seqs=2, timing=Timing(decode_step_s=1))
    async with _engine(KvRole.NONE, settings, clock) as engine:
        runs = [asyncio.ensure_future(_run(engine, _job(max_tokens=3))) for _ in range(5)]
        await engine.until(lambda: engine.num_running == 2)
        assert engine.num_waiting == 3
        await clock.advance(10)
        await asyncio.gather(*runs)


async def test_requests_wait_for_blocks() -> None:
    """A prompt that does not fit waits until another one's blocks are free."""
    clock = ManualClock()
    settings = dataclasses.replace(_SMALL, num_blocks=4, max_model_len=16, timing=Timing(decode_step_s=1))
    async with _engine(KvRole.NONE, settings, clock) as engine:
        first = asyncio.ensure_future(_run(engine, _job(max_tokens=3)))
        await engine.until(lambda: engine.num_running == 1)
        second = asyncio.ensure_future(_run(engine, _job(_PROMPT[::-1], max_tokens=3)))
        await engine.until(lambda: engine.num_waiting == 1)
        await clock.advance(10)
        assert len(await first) == len(await second) == 3


async def test_running_out_of_blocks_preempts() -> None:
    """Two requests outgrow the memory: one gives up its blocks, starts again and still says the same."""
    settings = dataclasses.replace(_SMALL, num_blocks=8, max_model_len=32)
    async with _engine(KvRole.NONE, settings) as engine:
        prompts = [_PROMPT, _PROMPT[::-1]]
        alone = [_text(await _run(engine, _job(prompt, max_tokens=20))) for prompt in prompts]
        together = await asyncio.gather(*(_run(engine, _job(prompt, max_tokens=20)) for prompt in prompts))
        assert [_text(outputs) for outputs in together] == alone
        assert engine.metrics.value("vllm:num_preemptions_total") > 0
        assert engine.pool.usage == 0


async def test_times_are_as_set() -> None:
    """Prefill takes its time per computed token, each further token its own."""
    clock = ManualClock()
    settings = dataclasses.replace(_SMALL, timing=Timing(prefill_token_s=0.5, decode_step_s=2))
    async with _engine(KvRole.NONE, settings, clock) as engine:
        run = asyncio.ensure_future(_run(engine, _job(max_tokens=3)))
        await engine.until(lambda: engine.num_running == 1)
        await clock.advance(100)
        await run
        assert engine.metrics.value("vllm:time_to_first_token_seconds_sum") == pytest.approx(4.5)
        assert engine.metrics.value("vllm:e2e_request_latency_seconds_sum") == pytest.approx(8.5)


async def test_a_stop_string_keeps_no_blocks() -> None:
    """It is found outside the engine, which only sees an abort: no handoff."""
    async with _engine(KvRole.PRODUCER) as p:
        word = _text(await _run(p, _job(max_tokens=1)))
        (output,) = await _run(p, _job(params=_KEEP, max_tokens=1, stop=(word,)))
        assert (output.text, output.finish_reason, output.stop_reason) == ("", "stop", word)
        assert output.handoff is None
        assert p.pool.usage == 0


async def test_a_stop_token_ends_the_text_before_it() -> None:
    """The token counts, its text does not show."""
    async with _engine(KvRole.NONE) as engine:
        first, second = (await _run(engine, _job(max_tokens=2)))[:2]
        outputs = await _run(engine, _job(stop_token_ids=second.tokens))
        assert _text(outputs) == first.text
        assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", second.tokens[0])


async def test_the_model_may_end_by_itself() -> None:
    """End of text is a stop without a reason; min_tokens and ignore_eos put it off."""
    async with _engine(KvRole.NONE, dataclasses.replace(_SMALL, eos_one_in=1)) as engine:
        (output,) = await _run(engine, _job())
        assert (output.text, output.finish_reason, output.stop_reason) == ("", "stop", None)
        assert len(await _run(engine, _job(min_tokens=3))) == 4
        assert len(await _run(engine, _job(ignores_eos=True))) == 16


async def test_the_context_ends_at_the_models_limit() -> None:
    """Generation stops where the model's context does."""
    async with _engine(KvRole.NONE) as engine:
        outputs = await _run(engine, _job(max_tokens=1000))
        assert len(outputs) == _SMALL.max_model_len - len(_PROMPT)
        assert outputs[-1].finish_reason == "length"


async def test_a_killed_core_fails_all_that_runs() -> None:
    """And the side channel with it, for its listener lives there."""
    async with _pair() as (p, d):
        handoff = await _prefill(p)
        run = asyncio.ensure_future(_run(p, _job(max_tokens=100)))
        await p.until(lambda: p.num_running == 1)
        p.kill("by hand")
        with pytest.raises(EngineDead):
            await run
        with pytest.raises(GenerationFailed):
            await _run(d, _job(params=handoff))


def test_too_few_blocks_are_refused() -> None:
    """An engine that could not hold one sequence does not start, as vLLM's does not."""
    with pytest.raises(ConfigError, match="hold no sequence"):
        EngineSettings(num_blocks=1)


def test_tokens_of_outputs_decode_to_their_text() -> None:
    """A sanity check of the helpers above."""
    assert decode(_PROMPT) == "the quick brown fox jumps over the lazy dog"
