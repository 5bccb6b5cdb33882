"""Who is in the engine, who waits for room and who has blocks: first come, first served, as vLLM's default policy."""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdserve.sim.handoff import Pull

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.sim.blocks import Block, BlockPool
    from pdserve.sim.handoff import Plan
    from pdserve.sim.job import Job


class Stage(enum.Enum):
    """Where a sequence is."""

    QUEUED = enum.auto()
    LOADING = enum.auto()
    RUNNING = enum.auto()


@dataclass(eq=False, slots=True)
class Sequence:
    """A job under way."""

    job: Job
    request_id: str
    plan: Plan
    arrived_s: float
    tokens: list[int]
    """The prompt and what was generated: what the request claims its blocks contain."""
    blocks: list[Block] = field(default_factory=list)
    stage: Stage = Stage.QUEUED
    num_local: int = 0
    num_external: int = 0
    is_pinned: bool = False
    """Somebody else decides when the blocks become free."""

    @property
    def num_cached(self) -> int:
        """Prompt tokens that were not computed here."""
        return self.num_local + self.num_external


class Scheduler:
    """Seats sequences as long as there are seats and blocks."""

    def __init__(self, pool: BlockPool, *, max_num_seqs: int, on_change: Callable[[], None]) -> None:
        self._pool = pool
        self._max_num_seqs = max_num_seqs
        self._on_change = on_change
        self._queue: deque[tuple[Sequence, asyncio.Future[None]]] = deque()
        self._sequences: set[Sequence] = set()

    @property
    def num_running(self) -> int:
        """Sequences that are being computed."""
        return self._count(Stage.RUNNING)

    @property
    def num_loading(self) -> int:
        """Sequences whose KV is on its way."""
        return self._count(Stage.LOADING)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for room or for KV."""
        return len(self._sequences) - self.num_running

    @property
    def num_before_load(self) -> int:
        """Sequences whose KV is to come from another engine, and which have no room for it yet."""
        return sum(isinstance(item.plan, Pull) and item.stage is Stage.QUEUED for item in self._sequences)

    def arrive(self, sequence: Sequence) -> None:
        """A sequence came in."""
        self._sequences.add(sequence)
        self._on_change()

    def leave(self, sequence: Sequence) -> None:
        """A sequence is done with; its blocks become free unless they are pinned."""
        self._sequences.discard(sequence)
        if not sequence.is_pinned:
            self._pool.release(sequence.blocks)
        self.schedule()

    def enter(self, sequence: Sequence, stage: Stage) -> None:
        """A sequence goes on to another stage."""
        sequence.stage = stage
        self._on_change()

    async def admit(self, sequence: Sequence) -> None:
        """Wait for a seat and for blocks that hold all tokens."""
        admitted = asyncio.get_running_loop().create_future()
        self._queue.append((sequence, admitted))
        self.schedule()
        try:
            await admitted
        finally:
            if not sequence.blocks:
                self._queue.remove((sequence, admitted))

    async def readmit(self, sequence: Sequence) -> None:
        """Take a sequence's blocks, and wait for new ones behind all who wait already."""
        blocks, sequence.blocks = sequence.blocks, []
        sequence.num_external = 0
        sequence.stage = Stage.QUEUED
        self._pool.release(blocks)
        await self.admit(sequence)

    def schedule(self) -> None:
        """Seat whoever can be seated now."""
        while self._queue and self._num_seated < self._max_num_seqs:
            sequence, admitted = self._queue[0]
            if not self._try_seat(sequence):
                break
            self._queue.popleft()
            if not admitted.done():
                admitted.set_result(None)
        self._on_change()

    def _try_seat(self, sequence: Sequence) -> bool:
        prefix = self._pool.find_prefix(sequence.tokens, sequence.job.cache_salt)
        blocks = self._pool.try_allocate(len(sequence.tokens), prefix)
        if blocks is None:
            return False
        sequence.blocks = blocks
        sequence.num_local = len(prefix) * self._pool.block_size
        return True

    @property
    def _num_seated(self) -> int:
        return sum(bool(sequence.blocks) for sequence in self._sequences)

    def _count(self, stage: Stage) -> int:
        return sum(sequence.stage is stage for sequence in self._sequences)
