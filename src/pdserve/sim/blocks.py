"""KV blocks: who holds which, what they contain, what may be reused, and until when P keeps them for D.

Pure: no clock, no I/O. A block remembers the tokens that were written into it and keeps them until somebody else writes, as
memory does: whoever reads a block after it was freed gets the new owner's tokens. Rules as in vLLM 0.32
(v1/core/block_pool.py; distributed/kv_transfer/kv_connector/v1/nixl/{base,pull}_worker.py).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

NEVER_WRITTEN = -1


@dataclass(eq=False, slots=True)
class Block:
    """One block of KV memory."""

    block_id: int
    tokens: list[int]
    key: bytes | None = None
    """Set while the block is full and can be found by prefix."""
    num_owners: int = 0


class BlockPool:
    """All blocks of one engine."""

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        # vLLM's block 0 is a placeholder that nobody gets; ids start at 1 and usage counts without it.
        self.block_size = block_size
        self._blocks = {index: Block(index, [NEVER_WRITTEN] * block_size) for index in range(1, num_blocks + 1)}
        self._free = OrderedDict(self._blocks)
        self._cached: dict[bytes, Block] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks there are."""
        return len(self._blocks)

    @property
    def num_free(self) -> int:
        """Blocks that nobody owns; some of them may still be found by prefix."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """The owned fraction, 0 to 1."""
        return 1.0 - self.num_free / self.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks that many tokens fill."""
        return -(-num_tokens // self.block_size)

    def find_prefix(self, tokens: Sequence[int], salt: str | None) -> list[Block]:
        """The cached blocks that a prompt starts with. Never all of it: its last token is always computed."""
        found: list[Block] = []
        for key in self._keys(tokens[:-1], salt):
            block = self._cached.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def try_allocate(self, num_tokens: int, prefix: Sequence[Block] = ()) -> list[Block] | None:
        """Own `prefix` and as many further blocks as `num_tokens` need; None when there are too few."""
        num_new = self.blocks_for(num_tokens) - len(prefix)
        num_revived = sum(block.num_owners == 0 for block in prefix)
        if num_new + num_revived > self.num_free:
            return None
        for block in prefix:
            self._free.pop(block.block_id, None)
            block.num_owners += 1
        return [*prefix, *(self._take_new() for _ in range(num_new))]

    def try_extend(self, blocks: list[Block], num_tokens: int) -> bool:
        """Own further blocks, until `blocks` hold `num_tokens`; False when there are too few."""
        num_new = self.blocks_for(num_tokens) - len(blocks)
        if num_new > self.num_free:
            return False
        blocks.extend(self._take_new() for _ in range(num_new))
        return True

    def write(self, blocks: Sequence[Block], start: int, tokens: Iterable[int]) -> None:
        """Put tokens where a sequence that owns `blocks` has its positions from `start` on."""
        for position, token in enumerate(tokens, start):
            blocks[position // self.block_size].tokens[position % self.block_size] = token

    def read(self, blocks: Sequence[Block], num_tokens: int) -> list[int]:
        """What stands in the first positions of a sequence."""
        return [token for block in blocks for token in block.tokens][:num_tokens]

    def contents(self, block_ids: Iterable[int]) -> list[list[int]]:
        """What stands in blocks, whoever owns them. Raises KeyError for ids that no block has."""
        return [list(self._blocks[block_id].tokens) for block_id in block_ids]

    def publish(self, blocks: Sequence[Block], tokens: Sequence[int], salt: str | None) -> None:
        """Let the full blocks of a sequence be found by prefix.

        By what the sequence claims to be, as in vLLM, and not by what the blocks contain: KV that was pulled wrongly spoils
        the cache as well.
        """
        for block, key in zip(blocks, self._keys(tokens, salt), strict=False):
            if block.key is None and key not in self._cached:
                block.key = key
                self._cached[key] = block

    def release(self, blocks: Iterable[Block]) -> None:
        """Give blocks up. Those without a key are reused first, the others in the order in which they became free."""
        for block in reversed(list(blocks)):
            block.num_owners -= 1
            if block.num_owners == 0:
                self._free[block.block_id] = block
                if block.key is None:
                    self._free.move_to_end(block.block_id, last=False)

    def _take_new(self) -> Block:
        _, block = self._free.popitem(last=False)
        if block.key is not None:
            del self._cached[block.key]
            block.key = None
        block.num_owners = 1
        return block

    def _keys(self, tokens: Sequence[int], salt: str | None) -> Iterable[bytes]:
        size = self.block_size
        key = (salt or "").encode()
        for start in range(0, len(tokens) - size + 1, size):
            text = b",".join(b"%d" % token for token in tokens[start : start + size])
            key = hashlib.blake2b(key + b"|" + text, digest_size=16).digest()
            yield key


@dataclass(slots=True)
class _Lease:
    blocks: list[Block]
    expires_at_s: float


@dataclass(slots=True)
class Leases:
    """P's promises: blocks kept for a request that another engine goes on with."""

    pool: BlockPool
    duration_s: float
    _leases: dict[str, _Lease] = field(default_factory=dict)

    @property
    def num_blocks(self) -> int:
        """Blocks kept."""
        return sum(len(lease.blocks) for lease in self._leases.values())

    @property
    def request_ids(self) -> list[str]:
        """The requests that blocks are kept for."""
        return list(self._leases)

    def blocks_of(self, request_id: str) -> list[Block]:
        """What is kept for a request. Raises KeyError."""
        return self._leases[request_id].blocks

    @property
    def next_expiry_s(self) -> float | None:
        """When the first lease ends."""
        return min((lease.expires_at_s for lease in self._leases.values()), default=None)

    def grant(self, request_id: str, blocks: list[Block], now_s: float) -> None:
        """Keep blocks that a finished request owns."""
        self._leases[request_id] = _Lease(blocks, now_s + self.duration_s)

    def extend(self, request_ids: Iterable[str], now_s: float) -> None:
        """A heartbeat: two thirds of a lease from now on, if that is later."""
        for request_id in request_ids:
            lease = self._leases.get(request_id)
            if lease is not None:
                lease.expires_at_s = max(lease.expires_at_s, now_s + self.duration_s * 2 / 3)

    def end(self, request_id: str) -> bool:
        """The other engine needs the blocks no longer. False for a request that is not kept: it may have read too late."""
        lease = self._leases.pop(request_id, None)
        if lease is not None:
            self.pool.release(lease.blocks)
        return lease is not None

    def expire(self, now_s: float) -> list[str]:
        """End the leases that have run out."""
        expired = [request_id for request_id, lease in self._leases.items() if now_s >= lease.expires_at_s]
        for request_id in expired:
            self.pool.release(self._leases.pop(request_id).blocks)
        return expired
