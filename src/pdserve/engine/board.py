"""What the processes of one gateway tell each other of engines without asking: their legs under way, and new cache salts.

Numbers in memory that all of them see. Each cell is written by one worker alone, in one aligned store, so that no lock is
needed and no reader sees half a number. A gateway of one process has a board of its own. Engines go by their index.
"""

from __future__ import annotations

import mmap
import os
import secrets
import tempfile

_CELL_BYTES = 8
_SEED_BYTES = 16
_LINE_CELLS = 8
"""The seed, and every worker's row, start on a cache line of their own: a worker's counting slows no other one's down."""


class Board:
    """One worker's view."""

    def __init__(self, memory: mmap.mmap | bytearray, *, num_engines: int, worker: int = 0) -> None:
        self.worker = worker
        cells = memoryview(memory).cast("q")
        row = _row_cells(num_engines)
        rows = cells[_LINE_CELLS:]
        start = worker * row
        self.mine = rows[start : start + num_engines]
        """This worker's legs under way, engine by engine: whoever begins one adds 1 here, and takes it off in the end."""
        self._legs = [rows[index::row] for index in range(num_engines)]
        self._my_renewals = rows[start + num_engines : start + 2 * num_engines]
        self._renewals = [rows[num_engines + index :: row] for index in range(num_engines)]
        self._rows = [rows[at : at + num_engines] for at in range(0, len(rows), row)]
        self._seed = bytes(cells[:_LINE_CELLS].cast("B")[:_SEED_BYTES]).hex()

    @classmethod
    def alone(cls, num_engines: int) -> Board:
        """Of a gateway of one process."""
        memory = bytearray(_size(num_engines, 1))
        memory[:_SEED_BYTES] = secrets.token_bytes(_SEED_BYTES)
        return cls(memory, num_engines=num_engines)

    @classmethod
    def shared(cls, descriptor: int, *, num_engines: int, worker: int = 0) -> Board:
        """Of one worker among several, over what `open_shared` made."""
        return cls(mmap.mmap(descriptor, 0), num_engines=num_engines, worker=worker)

    def total(self, engine: int) -> int:
        """Legs that all workers together have under way on an engine."""
        return sum(self._legs[engine])

    def salt(self, engine: int) -> str | None:
        """What every request to an engine must add to its cache salt; None: nothing.

        No other gateway, and none before this one, has the same: the seed is random.
        """
        num_renewals = sum(self._renewals[engine])
        return f"{self._seed}{num_renewals:x}" if num_renewals else None

    def renew_salt(self, engine: int) -> None:
        """From now on a salt that no request has carried, in all workers.

        Each worker counts its own renewals, and the salt has their sum, which only grows: two workers that renew it at once
        may skip a salt, and never go back to the one that their requests carried.
        """
        self._my_renewals[engine] += 1

    def forget(self, worker: int) -> None:
        """A worker is gone, and its legs with it. Its renewals stay: they are part of the salt."""
        row = self._rows[worker]
        for engine in range(len(row)):
            row[engine] = 0


def open_shared(*, num_engines: int, num_workers: int) -> int:
    """Memory for the boards of several workers, as a descriptor for them to inherit. It lies on no disk."""
    size = _size(num_engines, num_workers)
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("pdserve-board")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    os.pwrite(descriptor, secrets.token_bytes(_SEED_BYTES), 0)
    return descriptor


def _row_cells(num_engines: int) -> int:
    """A worker's cells: its legs, its renewals, and what fills the last cache line."""
    return -(-2 * num_engines // _LINE_CELLS) * _LINE_CELLS


def _size(num_engines: int, num_workers: int) -> int:
    return _CELL_BYTES * (_LINE_CELLS + num_workers * _row_cells(num_engines))
