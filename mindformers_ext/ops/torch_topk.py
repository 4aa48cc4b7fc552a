"""The choice that ``torch.topk`` makes among equal values on a CPU.

It runs ``std::nth_element`` on pairs (value, index) that are compared by value alone (ATen, TopKImpl.h), so which of
several equals comes first follows from how libstdc++ partitions (stl_algo.h), not from their indices. Models that
choose blocks by scores that are often exactly 0 need it to agree with transformers.
"""

from __future__ import annotations

import numpy as np

Pair = tuple[float, int]


def top_indices(values: np.ndarray, count: int) -> list[int]:
    """Returns the indices of the ``count`` largest of float32 ``[T]``, in no order.

    Rows of ``64 count`` values or more, which torch sorts in another way, give the lowest indices among equals.
    """
    if len(values) >= 64 * count:
        return np.argsort(-values, kind="stable")[:count].tolist()
    queue = [(float(value), index) for index, value in enumerate(values)]
    first, last = 0, len(queue)
    while last - first > 3:
        cut = _partition(queue, first, last)
        first, last = (cut, last) if cut < count else (first, cut)
    for place in range(first + 1, last):
        while place > first and queue[place][0] > queue[place - 1][0]:
            queue[place - 1], queue[place] = queue[place], queue[place - 1]
            place -= 1
    return [index for _, index in queue[:count]]


def _partition(queue: list[Pair], first: int, last: int) -> int:
    """Puts what is larger than a pivot before what is smaller; returns where the latter begins."""

    def swap(i: int, j: int) -> None:
        queue[i], queue[j] = queue[j], queue[i]

    # The median of three becomes the pivot, in the first place.
    a, b, c = (queue[place][0] for place in (first + 1, first + (last - first) // 2, last - 1))
    middle, end = first + (last - first) // 2, last - 1
    if a > b:
        swap(first, middle if b > c else end if a > c else first + 1)
    else:
        swap(first, first + 1 if a > c else end if b > c else middle)
    pivot = queue[first][0]
    low, high = first + 1, last
    while True:
        while queue[low][0] > pivot:
            low += 1
        high -= 1
        while pivot > queue[high][0]:
            high -= 1
        if low >= high:
            return low
        swap(low, high)
        low += 1
