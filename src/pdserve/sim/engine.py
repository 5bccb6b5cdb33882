"""The engine behind the stand-in: admission, prefill, decoding, and how each of them fails.

Follows vLLM 0.32's scheduler and NIXL connector, seen from outside: the same requests wait, succeed, hang or kill the engine.
Knows no HTTP and no JSON. Requests do not slow each other down: each has its own prefill and decode times.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from typing import TYPE_CHECKING, NamedTuple

from pdserve.sim.blocks import BlockPool, Leases
from pdserve.sim.clock import LoopClock
from pdserve.sim.form import WORD
from pdserve.sim.handoff import (
    CoreFault,
    KeepForDecode,
    KvRole,
    Pull,
    WaitForever,
    make_handoff,
    notice_target,
    plan_transfer,
    reported_cached_tokens,
)
from pdserve.sim.job import Output, Outputs
from pdserve.sim.metrics import Metrics
from pdserve.sim.scheduler import Scheduler, Sequence, Stage
from pdserve.sim.settings import EngineSettings
from pdserve.sim.side_channel import SideChannel, TransferFailed
from pdserve.sim.tokens import END_OF_TEXT, Continuation, TextStream, encode
from pdserve.sim.transfer import Transfers

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator, Mapping
    from typing import Any

    from pdserve.sim.clock import Clock
    from pdserve.sim.handoff import Params, Plan
    from pdserve.sim.job import Job, Sampling

_OTHER_PEOPLE = "This block belongs to another request by now. "

_logger = logging.getLogger("pdserve.sim")


class EngineDead(Exception):
    """EngineCore is gone; the message is vLLM's (v1/engine/exceptions.py)."""

    def __init__(self) -> None:
        super().__init__("EngineCore encountered an issue. See stack trace (above) for the root cause.")


class GenerationFailed(Exception):
    """One request failed inside the engine; the message is vLLM's (entrypoints/generate/base/serving.py)."""

    def __init__(self) -> None:
        super().__init__("Internal server error")


class _End(NamedTuple):
    reason: str | None = None
    stop: str | int | None = None


def _next_token(model: Continuation, sampling: Sampling, count: int) -> int:
    """The token after `count - 1` others. A form ends the output by itself, whatever min_tokens and ignore_eos say."""
    if not sampling.form:
        return model.next_token(may_end=count > sampling.min_tokens and not sampling.ignores_eos)
    if count > len(sampling.form):
        return END_OF_TEXT
    token = sampling.form[count - 1]
    return model.next_token(may_end=False) if token == WORD else model.take(token)


class Engine:
    """One engine. `start` and `close` it, or use `run_stand_in`, which puts it behind HTTP."""

    def __init__(
        self,
        role: KvRole,
        settings: EngineSettings | None = None,
        *,
        clock: Clock | None = None,
        new_id: Callable[[], str] = lambda: uuid.uuid4().hex,
    ) -> None:
        self.role = role
        self.settings = settings = settings or EngineSettings()
        self.clock = clock or LoopClock()
        self.engine_id = str(uuid.UUID(new_id()))
        self.pool = BlockPool(num_blocks=settings.num_blocks, block_size=settings.block_size)
        self.leases = Leases(self.pool, settings.kv_lease_duration_s)
        self.metrics = Metrics(settings.model, has_connector=role is not KvRole.NONE)
        self.is_dead = False
        self._new_id = new_id
        has_connector = role is not KvRole.NONE
        self._side_channel = SideChannel(self) if has_connector else None
        self._transfers = Transfers(settings, self.clock, self.metrics.nixl) if has_connector else None
        self.side_channel_port = 0
        """Where it listens once it has started."""
        self._watchers: set[asyncio.Event] = set()
        self._scheduler = Scheduler(self.pool, max_num_seqs=settings.max_num_seqs, on_change=self._changed)
        self._runs: dict[asyncio.Task[None], Outputs] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._reaper: asyncio.Task[None] | None = None
        self._publish_gauges()

    # Life and death

    async def start(self) -> None:
        """Open the side channel."""
        if self._side_channel is not None:
            host, port = self.settings.side_channel_host, self.settings.side_channel_port
            self.side_channel_port = await self._side_channel.start(host, port)

    async def close(self) -> None:
        """Stop everything."""
        tasks = [*self._runs, *self._tasks]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._transfers is not None:
            self._transfers.close()
        if self._side_channel is not None:
            await self._side_channel.close()

    def kill(self, reason: str) -> None:
        """End EngineCore: whatever runs fails, and nothing runs ever after."""
        if self.is_dead:
            return
        _logger.error("EngineCore encountered a fatal error: %s", reason)
        self.is_dead = True
        for task, outputs in self._runs.items():
            outputs.put(EngineDead())
            task.cancel()
        for task in self._tasks:
            task.cancel()
        if self._side_channel is not None:
            self._side_channel.abort()  # Its listener is a thread of EngineCore.
        self._changed()

    # What others ask

    @property
    def is_busy(self) -> bool:
        """Whether requests or transfers are under way."""
        return bool(self._runs) or any(task is not self._reaper for task in self._tasks)

    @property
    def num_tasks(self) -> int:
        """Requests and transfers under way."""
        return len(self._runs) + sum(task is not self._reaper for task in self._tasks)

    @property
    def num_running(self) -> int:
        """Requests that are being computed."""
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Requests that wait for room or for KV."""
        return self._scheduler.num_waiting

    async def until(self, predicate: Callable[[], bool]) -> None:
        """Wait until something is true of this engine; looked at whenever its state changes."""
        changed = asyncio.Event()
        self._watchers.add(changed)
        try:
            while not predicate():
                await changed.wait()
                changed.clear()
        finally:
            self._watchers.discard(changed)

    @contextlib.asynccontextmanager
    async def running(self, jobs: Collection[Job]) -> AsyncIterator[Outputs]:
        """Run jobs side by side; leaving the block aborts those that are not done. Raises EngineDead."""
        self.check_alive()
        outputs = Outputs(len(jobs))
        tasks = [self._run(index, job, outputs) for index, job in enumerate(jobs)]
        try:
            yield outputs
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def check_alive(self) -> None:
        """Raises EngineDead."""
        if self.is_dead:
            raise EngineDead

    def refuse(self, params: Mapping[str, Any] | None) -> None:
        """A request ended before it got into the engine: tell P that its blocks may go, if it kept any for it.

        vLLM does so when a completion or chat request is refused, and also when a whole answer's client leaves early
        (_with_kv_transfer_rejection_cleanup in entrypoints/generate/base/serving.py), which may be long after the transfer.
        """
        if self.is_dead or self._transfers is None or not params or not params.get("do_remote_prefill"):
            return
        try:
            target = notice_target(params)
        except CoreFault as fault:
            self.kill(str(fault))
        else:
            self._spawn(self._transfers.give_notice(*target))

    @contextlib.contextmanager
    def without_blocks(self) -> Iterator[None]:
        """Own all free blocks, as other requests would."""
        blocks = self.pool.try_allocate(self.pool.num_free * self.pool.block_size) or []
        try:
            yield
        finally:
            self.pool.release(blocks)
            self._scheduler.schedule()

    def let_lapse(self, request_id: str) -> None:
        """End a lease now and have another request's content in its blocks, as after time and traffic. Raises KeyError."""
        blocks = self.leases.blocks_of(request_id)
        self.leases.end(request_id)
        self.metrics.nixl.expired(1)
        tokens = encode(_OTHER_PEOPLE * len(blocks) * self.pool.block_size)
        self.pool.write(blocks, 0, tokens[: len(blocks) * self.pool.block_size])
        self._scheduler.schedule()

    # The side channel's owner

    def contents(self, block_ids: Collection[int]) -> list[list[int]]:
        return self.pool.contents(block_ids)

    def extend_leases(self, request_ids: Collection[str]) -> None:
        self.leases.extend(request_ids, self.clock.now_s())
        self._changed()

    def take_notice(self, request_id: str) -> None:
        if not self.leases.end(request_id):
            _logger.error("potentially invalid KV blocks of %s were retrieved; they may have expired", request_id)
            self.metrics.nixl.noticed_late()
        self._scheduler.schedule()

    # One job

    def _run(self, index: int, job: Job, outputs: Outputs) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self._generate(index, job, outputs))
        self._runs[task] = outputs
        task.add_done_callback(self._ran)
        return task

    def _ran(self, task: asyncio.Task[None]) -> None:
        outputs = self._runs.pop(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            outputs.put(error)
        self._changed()

    async def _generate(self, index: int, job: Job, outputs: Outputs) -> None:
        sequence = Sequence(
            job=job,
            request_id=f"{job.request_id}-{self._new_id()[:8]}",
            plan=self._plan(job.params),
            arrived_s=self.clock.now_s(),
            tokens=list(job.prompt),
        )
        self._scheduler.arrive(sequence)
        try:
            context = await self._prefill(sequence)
            await self._decode(sequence, context, lambda output: outputs.put((index, output)))
        finally:
            self._scheduler.leave(sequence)

    def _plan(self, params: Params | None) -> Plan:
        try:
            return plan_transfer(params, self.role)
        except CoreFault as fault:
            self.kill(str(fault))
            raise EngineDead from fault

    async def _prefill(self, sequence: Sequence) -> list[int]:
        """Have KV for all tokens in the blocks; what they then contain."""
        plan = sequence.plan
        if sequence.job.comes_late_s:
            await self._come_late(sequence.job, plan)
        if isinstance(plan, Pull):
            assert self._transfers is not None
            async with self._transfers.heartbeats(plan):
                await self._scheduler.admit(sequence)
                if sequence.job.never_loads:
                    self._scheduler.enter(sequence, Stage.LOADING)
                    await asyncio.get_running_loop().create_future()
                await self._load(sequence, plan)
        else:
            await self._scheduler.admit(sequence)
        if isinstance(plan, WaitForever):
            await self._wait_forever(sequence)
        return await self._compute(sequence)

    async def _come_late(self, job: Job, plan: Plan) -> None:
        if self._transfers is not None and job.beats_before_s:
            async with self._transfers.heartbeats(plan):
                await self.clock.sleep(job.beats_before_s)
        await self.clock.sleep(job.comes_late_s)

    async def _compute(self, sequence: Sequence) -> list[int]:
        """Compute what is not in the blocks yet. Even with all of it there, the last token is, to sample from."""
        self._scheduler.enter(sequence, Stage.RUNNING)
        start = min(sequence.num_cached, len(sequence.tokens) - 1)
        await self.clock.sleep(self.settings.timing.prefill_token_s * (len(sequence.tokens) - start))
        self.pool.write(sequence.blocks, start, sequence.tokens[start:])
        self.pool.publish(sequence.blocks, sequence.tokens, sequence.job.cache_salt)
        return self.pool.read(sequence.blocks, len(sequence.tokens))

    async def _decode(self, sequence: Sequence, context: list[int], emit: Callable[[Output], None]) -> None:
        sampling = sequence.job.sampling
        model = self._continue(sequence, context)
        text = TextStream(sampling.stop, includes_stop=sampling.includes_stop)
        num_created = self._book_prefill(sequence)
        reported = reported_cached_tokens(sequence.job.params, sequence.num_cached)
        last_s: float | None = None
        for count in range(1, sampling.max_tokens + 1):
            may_stop = count > sampling.min_tokens
            token = _next_token(model, sampling, count)
            end = self._end_of(sequence, token, count, may_stop=may_stop)
            is_shown = end.stop is None or sampling.includes_stop
            piece, stop = text.add((token,) if is_shown else (), is_last=end.reason is not None, may_stop=may_stop)
            if stop is not None:
                end = _End("stop", stop)
            last_s = self._book_token(last_s)
            # A stop string is found in the API server, which then aborts the request in the engine: no blocks are kept.
            handoff = self._hand_off(sequence, count) if end.reason and stop is None else None
            emit(Output(piece, (token,), reported, num_created, end.reason, end.stop, handoff))
            if end.reason is not None:
                self.metrics.finished(end.reason, self.clock.now_s() - sequence.arrived_s)
                return
            sequence.tokens.append(token)
            model = await self._step(sequence, model)

    def _continue(self, sequence: Sequence, context: list[int]) -> Continuation:
        return Continuation(
            context,
            salt=sequence.job.sampling.salt,
            is_foreign=context != sequence.tokens,
            eos_one_in=self.settings.eos_one_in,
        )

    def _end_of(self, sequence: Sequence, token: int, count: int, *, may_stop: bool) -> _End:
        sampling = sequence.job.sampling
        if token == END_OF_TEXT:
            return _End("stop")
        if may_stop and token in sampling.stop_token_ids:
            return _End("stop", token)
        is_full = count == sampling.max_tokens or len(sequence.tokens) + 1 >= self.settings.max_model_len
        return _End("length") if is_full else _End()

    async def _step(self, sequence: Sequence, model: Continuation) -> Continuation:
        """Compute the last token's KV; when there is no room for it, give up all blocks and wait for new ones."""
        if self.pool.try_extend(sequence.blocks, len(sequence.tokens)):
            await self.clock.sleep(self.settings.timing.decode_step_s)
            self.pool.write(sequence.blocks, len(sequence.tokens) - 1, sequence.tokens[-1:])
            if len(sequence.tokens) % self.pool.block_size == 0:
                self.pool.publish(sequence.blocks, sequence.tokens, sequence.job.cache_salt)
            return model
        # Preemption: what had come from P is gone with the blocks, so that all of it is computed here.
        self.metrics.preempted()
        await self._scheduler.readmit(sequence)
        return self._continue(sequence, await self._compute(sequence))

    def _hand_off(self, sequence: Sequence, num_generated: int) -> Params | None:
        """Keep the blocks for D, when that was asked for."""
        if not isinstance(sequence.plan, KeepForDecode):
            return None
        sequence.is_pinned = True
        self.leases.grant(sequence.request_id, sequence.blocks, self.clock.now_s())
        if self._reaper is None or self._reaper.done():
            self._reaper = self._spawn(self._reap())
        return make_handoff(
            block_ids=[block.block_id for block in sequence.blocks],
            engine_id=self.engine_id,
            request_id=sequence.request_id,
            host=self.settings.side_channel_host,
            port=self.side_channel_port,
            num_tokens=len(sequence.tokens),
            num_cached=sequence.num_cached if num_generated == 1 else None,
        )

    # Transfers, D's side

    async def _load(self, sequence: Sequence, plan: Pull) -> None:
        """Pull. The transfer goes on when the request is aborted: its blocks may be written to until it ends."""
        sequence.num_external = len(sequence.tokens) - sequence.num_local
        self._scheduler.enter(sequence, Stage.LOADING)
        transfer = self._spawn(self._transfer(sequence, plan))
        try:
            await asyncio.shield(transfer)
        except TransferFailed as exc:
            _logger.warning("failed to load KV for %s: %s", sequence.request_id, exc)
            self.metrics.finished("error", self.clock.now_s() - sequence.arrived_s)
            raise GenerationFailed from exc
        except asyncio.CancelledError:
            sequence.is_pinned = True
            transfer.add_done_callback(lambda task: self._unpin(sequence, task))
            raise

    async def _transfer(self, sequence: Sequence, plan: Pull) -> None:
        assert self._transfers is not None
        missing = sequence.blocks[sequence.num_local // self.pool.block_size :]
        try:
            await self._transfers.pull(plan, missing)
        except CoreFault as fault:
            self.kill(str(fault))
            raise EngineDead from fault

    def _unpin(self, sequence: Sequence, transfer: asyncio.Task[None]) -> None:
        if not transfer.cancelled():
            transfer.exception()  # Nobody is left to be told.
        self.pool.release(sequence.blocks)
        self._scheduler.schedule()

    async def _wait_forever(self, sequence: Sequence) -> None:
        """No transfer was started, so none will ever be done; and an abort waits for the end of the transfer."""
        _logger.warning("got invalid KVTransferParams: %s", sequence.job.params)
        sequence.is_pinned = True
        self._scheduler.enter(sequence, Stage.LOADING)
        await asyncio.get_running_loop().create_future()

    # Leases, P's side

    async def _reap(self) -> None:
        while (expiry_s := self.leases.next_expiry_s) is not None:
            await self.clock.sleep(expiry_s - self.clock.now_s())
            expired = self.leases.expire(self.clock.now_s())
            for request_id in expired:
                _logger.warning("releasing expired KV blocks for request %s", request_id)
            self.metrics.nixl.expired(len(expired))
            self._scheduler.schedule()

    # Numbers

    def _book_prefill(self, sequence: Sequence) -> int:
        num_tokens = len(sequence.job.prompt)
        counts = (num_tokens, sequence.num_local, sequence.num_external)
        self.metrics.admitted(*counts)
        self.metrics.first_token(*counts, ttft_s=self.clock.now_s() - sequence.arrived_s)
        return max(0, num_tokens // self.pool.block_size * self.pool.block_size - sequence.num_cached)

    def _book_token(self, last_s: float | None) -> float:
        now_s = self.clock.now_s()
        self.metrics.token(now_s - last_s if last_s is not None else None)
        return now_s

    def _publish_gauges(self) -> None:
        scheduler = self._scheduler
        self.metrics.watch_scheduler(running=lambda: scheduler.num_running, waiting=lambda: scheduler.num_waiting)
        self.metrics.watch_blocks(lambda: self.pool.usage)
        if self.role.is_consumer:
            self.metrics.watch_loads(lambda: scheduler.num_before_load, lambda: scheduler.num_loading)

    # Inside

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._worked)
        return task

    def _worked(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._changed()

    def _changed(self) -> None:
        for watcher in self._watchers:
            watcher.set()
