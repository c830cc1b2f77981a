"""The largest flow between two sets of codes: the yardstick of what proportional filling reaches."""

from collections import deque
from collections.abc import Sequence

EPSILON = 1e-12


def max_flow(supply: Sequence[float], demand: Sequence[float], pairs: Sequence[tuple[int, int]]) -> float:
    """The most that can flow from y to x over `pairs` (y, x), within what each y supplies and each x demands.

    Edmonds and Karp (1972): shortest augmenting paths, for graphs of hundreds of codes.
    """
    givers, takers = len(supply), len(demand)
    source, sink = givers + takers, givers + takers + 1
    room: list[dict[int, float]] = [{} for _ in range(givers + takers + 2)]
    for y, x in pairs:
        if supply[y] > EPSILON and demand[x] > EPSILON:
            room[y][givers + x], room[givers + x][y] = float("inf"), 0.0
    for y in range(givers):
        room[source][y], room[y][source] = supply[y], 0.0
    for x in range(takers):
        room[givers + x][sink], room[sink][givers + x] = demand[x], 0.0
    total = 0.0
    while path := _shortest(room, source, sink):
        amount = min(room[a][b] for a, b in path)
        for a, b in path:
            room[a][b] -= amount
            room[b][a] += amount
        total += amount
    return total


def _shortest(room: list[dict[int, float]], source: int, sink: int) -> list[tuple[int, int]]:
    """The steps of a shortest way along which there is room; none if there is no way."""
    before = {source: source}
    pending = deque([source])
    while pending and sink not in before:
        node = pending.popleft()
        for other, left in room[node].items():
            if left > EPSILON and other not in before:
                before[other] = node
                pending.append(other)
    if sink not in before:
        return []
    path, node = [], sink
    while node != source:
        path.append((before[node], node))
        node = before[node]
    return path
