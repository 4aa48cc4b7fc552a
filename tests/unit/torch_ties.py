"""Which blocks transformers' indexer chooses among equals: what ``torch.topk`` leaves in front on a CPU.

It runs ``std::nth_element`` on pairs (score, index) that are compared by score alone, so the choice depends on the
scores of all blocks, those that a token must not see included. It differs between a prefill and the decode steps after
it; this package takes the lowest index instead. Source: ATen's TopKImpl.h and libstdc++'s stl_algo.h.
"""

import numpy as np
from mindspore import Tensor

from mindformers_ext.ops.sparse_attention import MASKED


def select_blocks(scores, visible, topk):
    """As `mindformers_ext.ops.select_blocks`, with torch's choice for prompts that are run at once and decode steps."""
    values, (batch, length, count) = scores.asnumpy(), scores.shape
    counts = np.broadcast_to(visible, (batch, length))
    bias = np.full((batch, length, count), MASKED, np.float32)
    for row in range(batch):
        # A prompt of its own has no more blocks than its last token sees.
        width = int(counts[row].max())
        for token in range(length):
            seen = int(counts[row, token])
            masked = np.where(np.arange(width) < seen, values[row, token, :width], -np.inf)
            chosen = [index for index in first_by_nth_element(masked, min(topk, width)) if index < seen]
            bias[row, token, chosen] = 0
    return Tensor(bias)


def first_by_nth_element(values, count):
    """Indices of the first ``count`` entries after ``std::nth_element`` put entry ``count - 1`` in its place."""
    queue = [(float(value), index) for index, value in enumerate(values)]
    if not count:
        return []
    first, last, nth = 0, len(queue), count - 1
    assert last < 64 * count, "torch sorts longer rows in another way"
    while last - first > 3:
        cut = _partition(queue, first, last)
        first, last = (cut, last) if cut <= nth else (first, cut)
    for place in range(first + 1, last):
        while place > first and queue[place][0] > queue[place - 1][0]:
            queue[place - 1], queue[place] = queue[place], queue[place - 1]
            place -= 1
    return [index for _, index in queue[:count]]


def _partition(queue, first, last):
    def before(i, j):
        return queue[i][0] > queue[j][0]

    def swap(i, j):
        queue[i], queue[j] = queue[j], queue[i]

    a, b, c = first + 1, first + (last - first) // 2, last - 1
    if before(a, b):
        swap(first, b if before(b, c) else c if before(a, c) else a)
    else:
        swap(first, a if before(a, c) else c if before(b, c) else b)
    low, high = first + 1, last
    while True:
        while before(low, first):
            low += 1
        high -= 1
        while before(first, high):
            high -= 1
        if low >= high:
            return low
        swap(low, high)
        low += 1
