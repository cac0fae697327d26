import heapq
from collections import defaultdict


def shortest_paths(edges, source):
    """Dijkstra over a dict of lists; returns distances and predecessors."""
    graph = defaultdict(list)
    for start, end, weight in edges:
        if weight < 0:
            raise ValueError(f"edge {start}->{end} has a negative weight")
        graph[start].append((end, weight))
    distance = {source: 0}
    previous = {}
    queue = [(0, source)]
    while queue:
        travelled, node = heapq.heappop(queue)
        if travelled > distance[node]:
            continue
        for neighbour, weight in graph[node]:
            candidate = travelled + weight
            if candidate < distance.get(neighbour, float("inf")):
                distance[neighbour] = candidate
                previous[neighbour] = node
                heapq.heappush(queue, (candidate, neighbour))
    return distance, previous
