"""Gated delta net: attention whose memory is a matrix of fixed size (Yang et al., arXiv 2412.06464)."""

from __future__ import annotations

import numpy as np
from mindspore import Tensor, nn

from mindformers_ext import ops
from mindformers_ext.models.cache import LayerState
from mindformers_ext.models.config import DeltaNetConfig, TransformerConfig
from mindformers_ext.models.context import ForwardContext
from mindformers_ext.models.layers import Linear, RMSNorm, empty_parameter


class DeltaNetState(LayerState):
    """What one layer remembers: the last inputs of its convolution, and a matrix a head.

    Args:
        config: sizes.
        batch_size: rows B.
        max_length: most tokens a row will ever hold; the memory does not grow with them.

    Attributes:
        conv: float32 ``[B, K - 1, C]``.
        recurrent: float32 ``[B, Hv, Dk, Dv]``.
    """

    def __init__(self, config: DeltaNetConfig, batch_size: int, max_length: int) -> None:
        super().__init__(max_length)
        heads, key_dim, value_dim = (
            config.linear_num_value_heads,
            config.linear_key_head_dim,
            config.linear_value_head_dim,
        )
        self._shapes = (config.linear_conv_kernel_dim - 1, config.conv_channels), (heads, key_dim, value_dim)
        self.conv, self.recurrent = (_zeros(batch_size, *shape) for shape in self._shapes)

    @property
    def nbytes(self) -> int:
        """Bytes of both buffers."""
        return sum(buffer.size * buffer.itemsize for buffer in (self.conv, self.recurrent))

    def reorder(self, rows: np.ndarray, shared: int = 0) -> None:
        """See `LayerState.reorder`; rows that move are copied whole, since no part of the state belongs to one token."""
        if len(rows) == self.conv.shape[0]:
            for buffer in (self.conv.expand_dims(1), self.recurrent):
                ops.move_rows(buffer, rows, 0, buffer.shape[2])
        else:
            self.conv, self.recurrent = (
                Tensor.from_numpy(buffer.asnumpy()[rows]) for buffer in (self.conv, self.recurrent)
            )

    def crop(self, length: int) -> None:
        """See `LayerState.crop`."""
        if length == 0:
            self.clear()
        elif length < self.length:
            raise ValueError(
                f"the state of a gated delta net cannot go back from {self.length} to {length} tokens; run the first "
                f"{length} again from an empty cache"
            )

    def clear(self) -> None:
        """See `LayerState.clear`."""
        self.conv, self.recurrent = (_zeros(self.conv.shape[0], *shape) for shape in self._shapes)
        self.length = 0
