"""Gated delta net: attention whose memory is a matrix of fixed size (Yang et al., arXiv 2412.06464)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from mindspore import Tensor, nn

from mindformers_ext import ops
from mindformers_ext.models.cache import LayerState, RowCopy, zeros
from mindformers_ext.models.config import DeltaNetConfig, TransformerConfig
from mindformers_ext.models.context import ForwardContext
from mindformers_ext.models.layers import Linear, RMSNorm, empty_parameter
from mindformers_ext.models.sequence_share import SequenceShare


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
        heads, dims = config.linear_num_value_heads, (config.linear_key_head_dim, config.linear_value_head_dim)
        self.conv = zeros(batch_size, config.linear_conv_kernel_dim - 1, config.conv_size)
        self.recurrent = zeros(batch_size, heads, *dims)

    @property
    def nbytes(self) -> int:
        """Bytes of both buffers."""
        return sum(buffer.size * buffer.itemsize for buffer in (self.conv, self.recurrent))

    def reorder(self, rows: np.ndarray, shared: int = 0) -> None:
        """See `LayerState.reorder`; no part of the state belongs to one token, so rows that move are copied whole."""
        if len(rows) == self.conv.shape[0]:
            for buffer in (self.conv, self.recurrent):
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

    def shift(self, by: int) -> None:
        """See `LayerState.shift`; pads have left nothing in the memory."""
        self.length += by

    def take_rows(self, rows: np.ndarray, source: DeltaNetState) -> None:
        """See `LayerState.take_rows`."""
        for buffer, other in ((self.conv, source.conv), (self.recurrent, source.recurrent)):
            ops.put_rows(buffer, rows, buffer.shape[2], other, 0, other.shape[2])

    def take(self, source: DeltaNetState, copies: Sequence[RowCopy], length: int) -> None:
        """See `LayerState.take`; a state is that of all its tokens.

        Raises:
            ValueError: other than all tokens of a row are wanted.
        """
        for row in copies:
            if row.count != source.length:
                raise ValueError(f"the state of {source.length} tokens cannot become that of {row.count}")
            for buffer, given in ((self.conv, source.conv), (self.recurrent, source.recurrent)):
                values = np.ascontiguousarray(given.asnumpy()[row.source : row.source + 1])
                ops.write_slots(ops.view_rows(buffer, row.target, row.target + 1), 0, Tensor.from_numpy(values))
        self.length = length

    def clear(self) -> None:
        """See `LayerState.clear`."""
        self.conv, self.recurrent = zeros(*self.conv.shape), zeros(*self.recurrent.shape)
        self.length = 0


class GatedDeltaNet(nn.Cell):
    """Convolution over projected queries, keys and values, gated delta rule, gated norm.

    The rows of ``in_proj`` are queries, keys and values of all heads, the output's gate, writing strengths and decays
    (Megatron's order).
    """

    def __init__(self, config: TransformerConfig, layer_number: int = 0) -> None:
        super().__init__()
        sizes = config.delta_net
        if sizes is None:
            raise ValueError(f"model: {config.model_type} has no gated delta net, so layer_types cannot ask for one")
        heads = sizes.linear_num_value_heads
        self.sizes = sizes
        self.in_proj = Linear(config.hidden_size, sizes.conv_size + sizes.value_size + 2 * heads)
        self.conv1d = nn.Cell()
        self.conv1d.weight = empty_parameter(sizes.conv_size, 1, sizes.linear_conv_kernel_dim)
        self.A_log = empty_parameter(heads, initial=_log_of_rates)
        self.dt_bias = empty_parameter(heads, initial=1.0)
        self.out_norm = RMSNorm(sizes.linear_value_head_dim, config.layernorm_epsilon)
        self.out_proj = Linear(sizes.value_size, config.hidden_size, initial="residual")

    def construct(self, x: Tensor, context: ForwardContext, state: DeltaNetState | None = None) -> Tensor:
        """Reads what the earlier tokens and those in ``state`` have written.

        Args:
            x: float32 ``[B * S, H]``.
            context: the tokens of this forward.
            state: memory of earlier tokens; those of ``x`` are written to it.

        Returns:
            float32 ``[B * S, H]``.
        """
        if context.share is not None and context.share.is_split:
            return self._in_turn(x, context, context.share, state)
        return self._run(x, context, state)

    def _in_turn(self, x: Tensor, context: ForwardContext, share: SequenceShare, state: DeltaNetState | None) -> Tensor:
        """Runs the parts of a sequence on one process after the other, each from the state of the one before."""
        state = self.new_state(context.batch, share.total) if state is None else state
        result = x
        for turn in range(share.group.size):
            if turn == share.group.rank:
                result = self._run(x, context, state)
            for buffer in (state.conv, state.recurrent):
                # In place: the buffers of a micro-batch are views of those of the whole batch.
                ops.write_slots(buffer, 0, share.group.broadcast(buffer, turn))
        state.length = share.past + share.total
        return result

    def _run(self, x: Tensor, context: ForwardContext, state: DeltaNetState | None) -> Tensor:
        sizes, real = self.sizes, context.real_rows
        if real is not None:
            x = ops.zero_rows(x, real)  # in_proj has no bias: pads enter the convolution as zeros
        projected = self.in_proj(x)
        rows, conv, value = len(projected), sizes.conv_size, sizes.value_size
        conv_state, recurrent = (None, None) if state is None else (state.conv, state.recurrent)
        tokens = projected.reshape(context.batch, context.length, -1).narrow(2, 0, conv)
        qkv = ops.causal_conv(tokens, self.conv1d.weight, conv_state)
        gates = projected.narrow(1, conv + value, 2 * sizes.linear_num_value_heads)
        beta, g = ops.delta_gates(gates, self.A_log, self.dt_bias, real)
        read = ops.gated_delta_rule(
            qkv, beta, g, sizes.linear_num_key_heads, sizes.linear_key_head_dim, recurrent
        ).reshape(rows, value)
        if state is not None:
            state.length += context.length
        z = projected.narrow(1, conv, value)
        return self.out_proj(ops.gated_rms_norm(read, z, self.out_norm.weight, self.out_norm.eps))

    def new_state(self, batch_size: int, max_length: int) -> DeltaNetState:
        """Returns an empty memory for ``batch_size`` rows."""
        return DeltaNetState(self.sizes, batch_size, max_length)


def _log_of_rates(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """First values of ``A_log``; rates near 0 would have a logarithm without bound."""
    return np.log(generator.uniform(0.01, 16, shape))
