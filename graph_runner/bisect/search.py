"""A smallest set of nodes with which a run is wrong."""

from __future__ import annotations

from collections.abc import Callable

Nodes = frozenset[int]  # numbers of nodes that are on the device


def smallest(n: int, fails: Callable[[Nodes], bool], most: int) -> list[int]:
    """Returns a smallest set of the nodes 0 to n - 1 with which a run fails: without any one of them it is right.

    The last of them is found by halving: the run fails with the nodes up to it, and not without it. Then the same again
    with that node always there, until those that were found fail alone. Each takes log2(n) + 1 runs.

    fails  whether a run does with some nodes; it is known to fail with all, and to be right without any
    most   how many nodes to find; if the set is larger, those that were found are returned
    """
    needed: list[int] = []
    end = n
    while end and len(needed) < most and not (needed and fails(frozenset(needed))):
        right, wrong = 0, end  # with so many nodes from the first one on, besides those that are needed
        while wrong - right > 1:
            middle = (right + wrong) // 2
            if fails(frozenset([*range(middle), *needed])):
                wrong = middle
            else:
                right = middle
        needed.append(wrong - 1)
        end = wrong - 1
    return sorted(needed)


def shortest(end: int, fails: Callable[[Nodes], bool]) -> range:
    """Returns the shortest range of nodes up to one with which a run fails, by halving; log2(end) + 1 runs.

    end    the last node; the run is known to fail with 0 to `end`
    fails  whether a run does with some nodes
    """
    wrong, right = 0, end + 1  # a range from the one on fails, from the other on it does not
    while right - wrong > 1:
        middle = (wrong + right) // 2
        if fails(frozenset(range(middle, end + 1))):
            wrong = middle
        else:
            right = middle
    return range(wrong, end + 1)


def text_of(nodes: Nodes) -> str:
    """Returns a set of nodes as ranges: "0-74 88"; "none" for an empty one."""
    ranges: list[list[int]] = []
    for node in sorted(nodes):
        if ranges and node == ranges[-1][1] + 1:
            ranges[-1][1] = node
        else:
            ranges.append([node, node])
    return " ".join(f"{a}-{b}" if a < b else f"{a}" for a, b in ranges) or "none"
