"""KV block accounting: conservation, reuse, prefix cache, leases."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule, run_state_machine_as_test

from pdserve.sim.blocks import NEVER_WRITTEN, BlockPool, Leases

if TYPE_CHECKING:
    from pdserve.sim.blocks import Block

_SIZE = 4
_PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=20)
_SALTS = st.sampled_from([None, "a"])


def _pool(num_blocks: int = 8) -> BlockPool:
    return BlockPool(num_blocks=num_blocks, block_size=_SIZE)


def _fill(pool: BlockPool, tokens: list[int], salt: str | None = None) -> list[Block]:
    """Have a sequence own blocks that contain its tokens."""
    prefix = pool.find_prefix(tokens, salt)
    blocks = pool.try_allocate(len(tokens), prefix)
    assert blocks is not None
    start = len(prefix) * _SIZE
    pool.write(blocks, start, tokens[start:])
    pool.publish(blocks, tokens, salt)
    return blocks


class _Traffic(RuleBasedStateMachine):
    """Random requests on one pool, some of which leave leases behind."""

    sequences: Bundle[list[Block]] = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.pool = _pool()
        self.leases = Leases(self.pool, duration_s=30)
        self.now_s = 0.0
        self.owned: list[list[Block]] = []
        self.num_granted = 0

    @rule(target=sequences, tokens=_PROMPTS, salt=_SALTS)
    def start(self, tokens: list[int], salt: str | None) -> list[Block]:
        prefix = self.pool.find_prefix(tokens, salt)
        num_free = self.pool.num_free
        blocks = self.pool.try_allocate(len(tokens), prefix)
        if blocks is None:
            assert self.pool.num_free == num_free
            return []
        start = len(prefix) * _SIZE
        self.pool.write(blocks, start, tokens[start:])
        self.pool.publish(blocks, tokens, salt)
        assert self.pool.read(blocks, len(tokens)) == tokens
        self.owned.append(blocks)
        return blocks

    @rule(blocks=sequences, num_more=st.integers(1, 10))
    def grow(self, blocks: list[Block], num_more: int) -> None:
        if blocks in self.owned:
            before = list(blocks)
            has_grown = self.pool.try_extend(blocks, len(blocks) * _SIZE + num_more)
            assert has_grown or blocks == before

    @rule(blocks=consumes(sequences))
    def finish(self, blocks: list[Block]) -> None:
        if blocks:
            self.owned.remove(blocks)
            self.pool.release(blocks)

    @rule(blocks=consumes(sequences))
    def hand_off(self, blocks: list[Block]) -> None:
        if blocks:
            self.owned.remove(blocks)
            self.leases.grant(f"r{self.num_granted}", blocks, self.now_s)
            self.num_granted += 1

    @rule(number=st.integers(0, 20))
    def notice(self, number: int) -> None:
        is_kept = f"r{number}" in self.leases.request_ids
        assert self.leases.end(f"r{number}") == is_kept

    @rule(delay_s=st.floats(0, 40))
    def wait(self, delay_s: float) -> None:
        self.now_s += delay_s
        self.leases.expire(self.now_s)

    @invariant()
    def every_block_is_free_or_owned(self) -> None:
        held = [self.leases.blocks_of(request_id) for request_id in self.leases.request_ids]
        owners = [block for blocks in [*self.owned, *held] for block in blocks]
        assert self.pool.num_free + len(set(owners)) == self.pool.num_blocks
        assert sum(block.num_owners for block in set(owners)) == len(owners)
        assert self.pool.usage == pytest.approx(len(set(owners)) / self.pool.num_blocks)

    def teardown(self) -> None:
        for blocks in self.owned:
            self.pool.release(blocks)
        self.leases.expire(self.now_s + 1000)
        assert self.pool.num_free == self.pool.num_blocks


def test_no_order_of_events_loses_a_block() -> None:
    """Random requests, leases, notices and waits: no block is lost, and none is given away twice."""
    run_state_machine_as_test(_Traffic, settings=settings(max_examples=60, stateful_step_count=30, deadline=None))


def test_ids_start_at_one() -> None:
    """Block 0 is vLLM's placeholder: nobody gets it."""
    assert [block.block_id for block in _fill(_pool(), [1] * 9)] == [1, 2, 3]


def test_memory_that_nobody_wrote_is_marked() -> None:
    """Reading beyond what was written does not look like tokens."""
    pool = _pool()
    blocks = pool.try_allocate(2)
    assert blocks is not None
    pool.write(blocks, 0, [5])
    assert pool.read(blocks, 2) == [5, NEVER_WRITTEN]


def test_too_few_blocks_give_none() -> None:
    """Nothing is taken when not all is to be had."""
    pool = _pool(2)
    assert pool.try_allocate(9) is None
    assert pool.num_free == 2


def test_a_prefix_is_found_in_full_blocks_only() -> None:
    """Two full blocks of ten tokens are found, the rest is not."""
    pool = _pool()
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    blocks = _fill(pool, tokens)
    assert pool.find_prefix([*tokens, 11], None) == blocks[:2]


def test_the_last_token_is_never_cached() -> None:
    """A prompt that is cached as a whole still has its last block computed."""
    pool = _pool()
    blocks = _fill(pool, [1, 2, 3, 4, 5, 6, 7, 8])
    assert pool.find_prefix([1, 2, 3, 4, 5, 6, 7, 8], None) == blocks[:1]


def test_another_salt_finds_nothing() -> None:
    """Prefixes are shared within a cache_salt only."""
    pool = _pool()
    _fill(pool, [1, 2, 3, 4, 5], "mine")
    assert pool.find_prefix([1, 2, 3, 4, 5], "yours") == []
    assert len(pool.find_prefix([1, 2, 3, 4, 5], "mine")) == 1


def test_another_beginning_finds_nothing() -> None:
    """A block counts with all that comes before it."""
    pool = _pool()
    _fill(pool, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert pool.find_prefix([9, 2, 3, 4, 5, 6, 7, 8, 9], None) == []


def test_a_freed_prefix_is_found_until_its_block_is_reused() -> None:
    """Freed blocks stay in the cache, and go when there is no other one left."""
    pool = _pool(2)
    pool.release(_fill(pool, [1, 2, 3, 4, 5]))
    assert len(pool.find_prefix([1, 2, 3, 4, 5], None)) == 1
    pool.release(_fill(pool, [7, 7, 7, 7, 7]))
    assert pool.find_prefix([1, 2, 3, 4, 5], None) == []


def test_blocks_without_a_cached_prefix_are_reused_first() -> None:
    """A partial block is of no use to anybody, so it goes before the cached ones."""
    pool = _pool(8)
    blocks = _fill(pool, [1, 2, 3, 4, 5])
    pool.release(blocks)
    again = pool.try_allocate(1)
    assert again == blocks[1:]


def test_a_shared_prefix_is_freed_by_its_last_owner() -> None:
    """Two requests with one beginning share its block."""
    pool = _pool()
    first, second = _fill(pool, [1, 2, 3, 4, 5]), _fill(pool, [1, 2, 3, 4, 6])
    assert first[0] is second[0]
    assert pool.num_free == 5
    pool.release(first)
    assert pool.num_free == 6
    pool.release(second)
    assert pool.num_free == 8


def test_a_freed_block_reads_as_its_next_owner() -> None:
    """Whoever kept a block's id gets the content of whoever has the block now."""
    pool = _pool(1)
    blocks = _fill(pool, [1, 2, 3])
    ids = [block.block_id for block in blocks]
    pool.release(blocks)
    assert pool.contents(ids) == [[1, 2, 3, NEVER_WRITTEN]]
    _fill(pool, [7, 7])
    assert pool.contents(ids) == [[7, 7, 3, NEVER_WRITTEN]]


def test_unknown_blocks_cannot_be_read() -> None:
    """An id that no block has is an error."""
    with pytest.raises(KeyError):
        _pool().contents([99])


def test_a_lease_ends_by_itself() -> None:
    """Blocks are kept for the lease's time and not longer."""
    pool = _pool()
    leases = Leases(pool, duration_s=30)
    leases.grant("r", _fill(pool, [1, 2, 3]), now_s=100)
    assert leases.next_expiry_s == 130
    assert leases.expire(129.9) == []
    assert pool.usage > 0
    assert leases.expire(130) == ["r"]
    assert pool.usage == 0
    assert leases.next_expiry_s is None


def test_a_heartbeat_adds_two_thirds_of_a_lease() -> None:
    """A heartbeat moves the end to 20 s from now, and never nearer."""
    leases = Leases(_pool(), duration_s=30)
    leases.grant("r", _fill(leases.pool, [1]), now_s=0)
    leases.extend(["r", "unknown"], now_s=5)
    assert leases.next_expiry_s == 30
    leases.extend(["r"], now_s=25)
    assert leases.next_expiry_s == 45


def test_a_notice_frees_at_once_and_only_once() -> None:
    """The first notice frees the blocks; the second one finds nothing."""
    leases = Leases(_pool(), duration_s=30)
    leases.grant("r", _fill(leases.pool, [1]), now_s=0)
    assert leases.num_blocks == 1
    assert leases.end("r")
    assert leases.num_blocks == 0
    assert not leases.end("r")
