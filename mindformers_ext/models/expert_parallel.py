"""Experts on other processes: tokens go to all of them, results come back summed."""

from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import Tensor

from mindformers_ext.models.context import ForwardContext
from mindformers_ext.models.shard import ModelShard


class TokenExchange:
    """Moves the tokens of an expert-parallel group to its experts.

    Every process of the group computes its experts for the tokens of all; the sum of what they give is a token's
    result. A process without tokens takes part like any other, so none waits for it.

    Args:
        shard: the place of this process.
    """

    def __init__(self, shard: ModelShard) -> None:
        self._group = shard.context.ep
        self._first_expert = self._group.rank * shard.local_experts
        self._experts = shard.local_experts
        dims = shard.context.dims
        # Tensor-parallel ranks hold the same tokens: the first of them in the group gives them.
        holders = [rank // dims.tp for rank in self._group.ranks]
        self._contributes = np.array([holders.index(holder) == index for index, holder in enumerate(holders)])
        self._source = holders.index(holders[self._group.rank])

    @property
    def shares_tokens(self) -> bool:
        """Whether all processes of the group hold the same tokens."""
        return int(self._contributes.sum()) == 1

    def run(self, x: Tensor, ids: Tensor, factors: Tensor, context: ForwardContext, experts: Any) -> Tensor:
        """Sends tokens through the experts of the group.

        Args:
            x: float32 ``[N, H]``.
            ids: int32 ``[N, K]``, experts of each token, -1 for none.
            factors: float32 ``[N, K]``.
            context: the tokens of this forward.
            experts: ``(x, ids, factors) -> float32 [N, H]``, this process' experts, numbered from 0.

        Returns:
            float32 ``[N, H]``.
        """
        if self.shares_tokens:
            return self._group.all_reduce(experts(x, self._local(ids), factors))
        counts = context.cached("expert tokens", lambda: self._counts(len(x)))
        tokens, chosen, weights = (self._gathered(part, counts) for part in (x, ids, factors))
        summed = self._group.all_reduce(experts(tokens, self._local(chosen), weights))
        begin = int(counts[: self._source].sum())
        return summed[begin : begin + len(x)]

    def _counts(self, count: int) -> np.ndarray:
        counts = self._group.all_gather(np.array([count], np.int32))[:, 0]
        return np.where(self._contributes, counts, 0)

    def _gathered(self, part: Tensor, counts: np.ndarray) -> Tensor:
        return Tensor.from_numpy(np.concatenate(self._group.all_gather_parts(part.asnumpy(), counts.tolist())))

    def _local(self, ids: Tensor) -> Tensor:
        """Numbers this process' experts from 0; those of others become -1."""
        values = ids.asnumpy() - self._first_expert
        return Tensor.from_numpy(np.where((values >= 0) & (values < self._experts), values, -1).astype(np.int32))
