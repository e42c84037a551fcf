"""Works one after another in one parallel region, as compiled code runs them.

A thread takes chunks of the work that is on. The one that ends the last chunk begins the next work; works for one
thread it computes on the way. So a thread waits for chunks that others have, not for the others: one that has lost its
processor between two works delays nobody.

A thread that finds no chunk left waits. Meanwhile it has its processor fetch what the next work reads first: weights
come from memory while norms are computed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from quant.kernels.jit import (
    LINE,
    acquired,
    allocated,
    array_at,
    atomic_add,
    call_kernel,
    call_openmp,
    callback,
    give_way,
    inlined,
    nanoseconds,
    on_stack,
    pause,
    prefetch,
    publish,
    release,
)
from quant.kernels.late import types
from quant.kernels.records import place_in, shared_record_at

_CHUNKS = 4  # that a thread takes, if there is enough to do
_FETCHED = 1 << 17  # bytes that a waiting thread fetches, at most: some microseconds
_AHEAD = 24  # works among which it looks for one that says what it reads
_PAUSES = 512  # after which a thread that waits gives way: the one that it waits for may need its processor


class Block(NamedTuple):
    """A work as compiled code sees it.

    kernel, parameters, take  addresses: of the kernel, of the record of its parameters, and of `take_works`
    units, parts  how many units it has, and into how many parts it is worth cutting them
    scratch       bytes of memory that each of its threads has for itself
    reads, n_read  what it reads in the order of its units: the word of its parameters that is the address, and how many
                  bytes; 0 bytes: nobody knows
    chunks, shrinks  while it runs: how many chunks it has, and by how many shares of it each is smaller than the one
                  before; with a chunk for each thread they are equal
    next, done    the first chunk that nobody has taken, and how many units are computed
    status        what a kernel returned that was not 0
    """

    kernel: int
    parameters: int
    take: int
    units: int
    parts: int
    scratch: int
    reads: int
    n_read: int
    chunks: int
    shrinks: int
    next: int
    done: int
    status: int


class Region(NamedTuple):
    """Works that run one after another.

    works, n_works where their addresses are, and how many
    n_threads      how many threads there are
    times          where the time after each work goes, in ns; 0: nowhere
    ran            how many ran before one failed
    waiting        how many threads wait for the work that is on
    on             the number of the work that is on; `n_works` when all are done, or one has failed. It lies in a line
                   of the cache of its own
    """

    works: int
    n_works: int
    n_threads: int
    times: int
    ran: int
    waiting: int
    unused: tuple[int, int]
    on: int


_NEXT, _DONE = 8 * place_in(Block, "next"), 8 * place_in(Block, "done")
_WAITING, _ON = 8 * place_in(Region, "waiting"), 8 * place_in(Region, "on")


@inlined
def _chunks_of(block: Any, n_threads: int) -> Any:
    """Into how many chunks a work is cut for n_threads threads."""
    return 1 if n_threads == 1 else max(1, min(block.parts, n_threads * _CHUNKS))


@inlined
def _shrinks(chunks: int, n_threads: int) -> Any:
    """By how many shares of a work a chunk is smaller than the one before: 1, so that threads end together."""
    return 1 if chunks > n_threads else 0


@inlined
def _first_of(block: Any, chunks: int, shrinks: int, i: int) -> Any:
    """The first unit of chunk i of so many. Of n chunks that shrink, chunk i has n - i of n (n + 1) / 2 shares."""
    if shrinks == 0:
        return block.units * i // chunks
    return block.units * (i * (2 * chunks + 1 - i)) // (chunks * (chunks + 1))


@inlined
def begin_work(work: int, n_threads: int) -> None:
    """Cuts the work at an address into chunks for n_threads threads."""
    block = shared_record_at(work, Block)
    block.chunks = _chunks_of(block, n_threads)
    block.shrinks = _shrinks(block.chunks, n_threads)
    block.next = 0
    block.done = 0
    block.status = 0


@inlined
def _scratch(memory: int, n_bytes: int) -> Any:
    """The address of the first cache line that begins in n_bytes of memory; its first word is 0 if there is one."""
    address = (memory + LINE - 1) // LINE * LINE
    if n_bytes > 0:
        array_at(address, types.int64, 1)[0] = 0
    return address


@inlined
def take_chunks(work: int) -> Any:
    """Computes chunks of the work at an address until nobody has to take one. Returns whether the last one of all was
    among them."""
    block = shared_record_at(work, Block)
    chunks, shrinks = block.chunks, block.shrinks
    i = atomic_add(types.int64(work + _NEXT), types.int64(1))
    if i >= chunks:
        return False
    memory, taken = allocated(block.scratch), types.int64(0)
    scratch = _scratch(memory, block.scratch)
    while i < chunks:
        begin, end = _first_of(block, chunks, shrinks, i), _first_of(block, chunks, shrinks, i + 1)
        if begin < end:
            status = call_kernel(block.kernel, block.parameters, begin, end, scratch)
            if status != 0:
                block.status = status
            taken += end - begin
        i = atomic_add(types.int64(work + _NEXT), types.int64(1))
    release(memory)
    return taken > 0 and atomic_add(types.int64(work + _DONE), taken) + taken == block.units


@inlined
def _run_alone(work: int) -> None:
    """Computes all of the work at an address."""
    block = shared_record_at(work, Block)
    if block.scratch == 0:
        block.status = call_kernel(block.kernel, block.parameters, types.int64(0), block.units, types.int64(0))
        return
    memory = allocated(block.scratch)
    scratch = _scratch(memory, block.scratch)
    block.status = call_kernel(block.kernel, block.parameters, types.int64(0), block.units, scratch)
    release(memory)


@inlined
def _has_ended(region: Any, i: int) -> Any:
    """Notes that work i has ended. Returns whether it failed."""
    if shared_record_at(array_at(region.works, types.int64, region.n_works)[i], Block).status != 0:
        return True
    region.ran = i + 1
    if region.times != 0:
        array_at(region.times, types.int64, region.n_works)[i] = nanoseconds()
    return False


@inlined
def _go_on(region_at: int, i: int) -> None:
    """Computes works from number i on as long as each is for one thread, and begins the next one."""
    region = shared_record_at(region_at, Region)
    works = array_at(region.works, types.int64, region.n_works)
    while i < region.n_works:
        begin_work(works[i], region.n_threads)
        if region.n_threads > 1 and shared_record_at(works[i], Block).parts != 1:
            break
        _run_alone(works[i])
        i = region.n_works if _has_ended(region, i) else i + 1
    region.waiting = 0
    publish(types.int64(region_at + _ON), types.int64(i))


@inlined
def _fetch(region_at: int, i: int) -> None:
    """Fetches what the next work after number i that says what it reads will read first. Its first chunk is of the
    thread that begins it; each of those that wait fetches for another one."""
    region = shared_record_at(region_at, Region)
    works = array_at(region.works, types.int64, region.n_works)
    turn = 1 + atomic_add(types.int64(region_at + _WAITING), types.int64(1))
    for j in range(i + 1, min(i + _AHEAD, region.n_works)):
        block = shared_record_at(works[j], Block)
        if block.n_read != 0:
            chunks = _chunks_of(block, region.n_threads)
            first = _first_of(block, chunks, _shrinks(chunks, region.n_threads), min(turn, chunks))
            begin = first * (block.n_read // block.units)
            address = array_at(block.parameters, types.int64, block.reads + 1)[block.reads]
            for at in range(begin, min(begin + _FETCHED, block.n_read), LINE):
                prefetch(types.int64(address + at))
                if at // LINE % 8 == 0 and acquired(types.int64(region_at + _ON)) != i:
                    return
            return


@inlined
def _wait(region_at: int, i: int) -> Any:
    """Waits as long as work i is on. Returns the number of the next one."""
    _fetch(region_at, i)
    pauses, on = 0, acquired(types.int64(region_at + _ON))
    while on == i:
        pause()
        pauses += 1
        if pauses % _PAUSES == 0:
            give_way()
        on = acquired(types.int64(region_at + _ON))
    return on


@callback(types.void(types.int64))
def take_works(region_at: int) -> None:
    """What each thread of a region does."""
    region = shared_record_at(region_at, Region)
    works, count = array_at(region.works, types.int64, region.n_works), region.n_works
    i = acquired(types.int64(region_at + _ON))
    while i < count:
        if take_chunks(works[i]):
            _go_on(region_at, count if _has_ended(region, i) else i + 1)
            i = acquired(types.int64(region_at + _ON))
        else:
            i = _wait(region_at, i)


@inlined
def run_works(works: int, count: int, n_threads: int, openmp: int, times: int) -> int:
    """Runs the works at `count` addresses in order, none of them twice; returns how many ran before one failed.

    works   where the addresses are
    openmp  the address of GOMP_parallel of the team; 0: this thread runs them alone
    times   where the time after each work goes, in ns; 0: nowhere
    """
    region_at = (on_stack(32) + LINE - 1) // LINE * LINE
    region = shared_record_at(region_at, Region)
    region.works = works
    region.n_works = count
    region.n_threads = n_threads if openmp != 0 else 1
    region.times = times
    region.ran = 0
    _go_on(region_at, 0)
    if region.on < count:
        first = shared_record_at(array_at(works, types.int64, count)[region.on], Block)
        call_openmp(openmp, first.take, region_at, n_threads)
    ran: int = region.ran
    return ran


@callback(types.int64(types.int64, types.int64, types.int64, types.int64, types.int64))
def run(works: int, count: int, n_threads: int, openmp: int, times: int) -> Any:
    """`run_works`, as a C function."""
    return run_works(works, count, n_threads, openmp, times)
