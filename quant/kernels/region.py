"""Works one after another in one parallel region, as compiled code runs them.

The units of a work are dealt to the threads: each has a queue of chunks, the same ones each time, so that what its
processor's caches hold serves it again. A thread takes its own chunks, then those that others have not begun. The one
that ends the last chunk of all begins the next work; works for one thread it computes on the way. So a thread waits for
chunks that others have, not for the others: one that has lost its processor between two works delays nobody.

A thread that finds no chunk left waits. Meanwhile it has its processor fetch what it reads first of the next work:
weights come from memory while norms are computed.
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
    exchanged,
    give_way,
    inlined,
    nanoseconds,
    on_stack,
    pause,
    prefetch,
    publish,
    release,
    thread_number,
)
from quant.kernels.late import types
from quant.kernels.records import place_in, shared_record_at

_CHUNKS = 4  # that a thread takes, if there is enough to do
_FETCHED = 1 << 17  # bytes that a waiting thread fetches, at most: some microseconds
_AHEAD = 24  # works among which it looks for one that says what it reads
_MANY = 1 << 16  # units, which are small then
_PAUSES = 512  # after which a thread that waits gives way: the one that it waits for may need its processor


class Block(NamedTuple):
    """A work as compiled code sees it.

    kernel, parameters, take  addresses: of the kernel, of the record of its parameters, and of `take_works`
    units, parts  how many units it has, and into how many parts it is worth cutting them
    scratch       bytes of memory that each of its threads has for itself
    reads, n_read  what it reads in the order of its units: the word of its parameters that is the address, and how many
                  bytes; 0 bytes: nobody knows
    queues, chunks  while it runs: to how many threads it is dealt, and how many chunks each of them gets
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
    queues: int
    chunks: int
    status: int


class Region(NamedTuple):
    """Works that run one after another.

    works, n_works where their addresses are, and how many
    n_threads      how many threads there are
    times          where the time after each work goes, in ns; 0: nowhere
    ran            how many ran before one failed
    openmp         the team, as `call_openmp` takes it
    queues         where each thread's queue is, a cache line
    on             the number of the work that is on; `n_works` when all are done, or one has failed
    done           how many of its units are computed. Both lie in a line of the cache of their own
    """

    works: int
    n_works: int
    n_threads: int
    times: int
    ran: int
    openmp: int
    queues: int
    unused: int
    on: int
    done: int


_ON, _DONE = 8 * place_in(Region, "on"), 8 * place_in(Region, "done")
_LATE = 1 << 31  # in place of a chunk: the work has ended
_LOW = (1 << 32) - 1


@inlined
def _queues_of(block: Any, n_threads: int) -> Any:
    """To how many of n_threads threads the units of a work are dealt, and into how many chunks those of one are cut."""
    chunks = max(1, min(_CHUNKS, block.parts // n_threads)) if n_threads > 1 else 1
    return min(n_threads, block.parts), chunks


@inlined
def _first_of(units: int, queues: int, queue: int, chunks: int, i: int) -> Any:
    """The first unit of chunk i of those of a queue. Of n chunks, chunk i has n - i of n (n + 1) / 2 shares: they
    shrink, so that threads end together. Of many units, elements or blocks, it begins with a cache line."""
    begin, end = units * queue // queues, units * (queue + 1) // queues
    first = begin + (end - begin) * (i * (2 * chunks + 1 - i)) // (chunks * (chunks + 1))
    return first if units < _MANY or first == units else first // LINE * LINE


@inlined
def begin_work(work: int, n_threads: int) -> None:
    """Deals the work at an address to n_threads threads."""
    block = shared_record_at(work, Block)
    queues, chunks = _queues_of(block, n_threads)
    if block.queues != queues or block.chunks != chunks or block.status != 0:  # else all threads may go on to have it
        block.queues, block.chunks, block.status = queues, chunks, 0


@inlined
def _scratch(memory: int) -> Any:
    """The address of the first cache line that begins in memory; its first word is 0."""
    address = (memory + LINE - 1) // LINE * LINE
    array_at(address, types.int64, 1)[0] = 0
    return address


@inlined
def _taken(queue: int, number: int, chunks: int) -> Any:
    """Takes the next chunk of a work, by its number in the region, from a queue; `chunks` or more: none is left.

    queue  the address of a number of a work, in the upper half of a word, and of how many of its chunks are taken
    """
    before = acquired(types.int64(queue))
    while True:
        i = before & _LOW if before >> 32 == number else types.int64(0)
        if before >> 32 > number or i >= chunks:
            return types.int64(_LATE)
        found = exchanged(types.int64(queue), before, (types.int64(number) << 32) + i + 1)
        if found == before:
            return i
        before = found


@inlined
def take_chunks(work: int, number: int, queues: int, done: int, me: int, n_threads: int) -> Any:
    """Computes chunks of the work at an address until nobody has to take one: those dealt to this thread, then those
    of others. Returns whether the last one of all was among them.

    number  of the work among those for which the queues serve: 1 or more, and more than that of any before
    queues  the address of a cache line for each thread, which begins with a word of 0
    done    the address of the number of units that are computed
    me      which thread this is
    """
    block = shared_record_at(work, Block)
    units, n_queues, chunks = block.units, block.queues, block.chunks
    memory, scratch, k, is_last = types.int64(0), types.int64(0), types.int64(0), False
    while k < n_threads and not is_last:
        queue = (me + k) % n_threads
        i = _taken(queues + LINE * queue, number, chunks) if queue < n_queues else types.int64(_LATE)
        taken = types.int64(0)
        while i < chunks:
            if memory == 0 and block.scratch != 0:
                memory = allocated(block.scratch)
                scratch = _scratch(memory)
            begin = _first_of(units, n_queues, queue, chunks, i)
            end = _first_of(units, n_queues, queue, chunks, i + 1)
            if begin < end:
                status = call_kernel(block.kernel, block.parameters, begin, end, scratch)
                if status != 0:
                    block.status = status
                taken += end - begin
            i = _taken(queues + LINE * queue, number, chunks)
        is_last = taken > 0 and atomic_add(types.int64(done), taken) + taken == units
        k += 1
    release(memory)
    return is_last


@inlined
def _run_alone(work: int) -> None:
    """Computes all of the work at an address."""
    block = shared_record_at(work, Block)
    if block.scratch == 0:
        block.status = call_kernel(block.kernel, block.parameters, types.int64(0), block.units, types.int64(0))
        return
    memory = allocated(block.scratch)
    scratch = _scratch(memory)
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
    region.done = 0
    publish(types.int64(region_at + _ON), types.int64(i))


@inlined
def _fetch(region_at: int, i: int, me: int) -> None:
    """Fetches what this thread will read first of the next work after number i that says what it reads."""
    region = shared_record_at(region_at, Region)
    works = array_at(region.works, types.int64, region.n_works)
    for j in range(i + 1, min(i + _AHEAD, region.n_works)):
        block = shared_record_at(works[j], Block)
        if block.n_read != 0:
            queues, chunks = _queues_of(block, region.n_threads)
            begin = _first_of(block.units, queues, min(me, queues - 1), chunks, 0) * (block.n_read // block.units)
            address = array_at(block.parameters, types.int64, block.reads + 1)[block.reads]
            for at in range(begin, min(begin + _FETCHED, block.n_read), LINE):
                prefetch(types.int64(address + at))
                if at // LINE % 8 == 0 and acquired(types.int64(region_at + _ON)) != i:
                    return
            return


@inlined
def _wait(region_at: int, i: int, me: int) -> Any:
    """Waits as long as work i is on. Returns the number of the next one."""
    _fetch(region_at, i, me)
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
    me = thread_number(region.openmp) % region.n_threads
    i = acquired(types.int64(region_at + _ON))
    while i < count:
        if take_chunks(works[i], i + 1, region.queues, region_at + _DONE, me, region.n_threads):
            _go_on(region_at, count if _has_ended(region, i) else i + 1)
            i = acquired(types.int64(region_at + _ON))
        else:
            i = _wait(region_at, i, me)


@inlined
def run_works(works: int, count: int, n_threads: int, openmp: int, times: int) -> int:
    """Runs the works at `count` addresses in order, none of them twice; returns how many ran before one failed.

    works   where the addresses are
    openmp  of the team, as `call_openmp` takes it; 0: this thread runs them alone
    times   where the time after each work goes, in ns; 0: nowhere
    """
    region_at = (on_stack(32) + LINE - 1) // LINE * LINE
    region = shared_record_at(region_at, Region)
    region.works = works
    region.n_works = count
    region.n_threads = n_threads if openmp != 0 else 1
    region.times = times
    region.ran = 0
    region.openmp = openmp
    _go_on(region_at, 0)
    if region.on < count:
        memory = allocated((n_threads + 1) * LINE)
        region.queues = (memory + LINE - 1) // LINE * LINE
        for queue in range(n_threads):
            array_at(region.queues + LINE * queue, types.int64, 1)[0] = 0
        first = shared_record_at(array_at(works, types.int64, count)[region.on], Block)
        call_openmp(openmp, first.take, region_at, n_threads)
        release(memory)
    ran: int = region.ran
    return ran


@callback(types.int64(types.int64, types.int64, types.int64, types.int64, types.int64))
def run(works: int, count: int, n_threads: int, openmp: int, times: int) -> Any:
    """`run_works`, as a C function."""
    return run_works(works, count, n_threads, openmp, times)
