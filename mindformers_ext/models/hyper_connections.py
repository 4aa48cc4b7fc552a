"""Hyper-connections: several residual streams around every block."""

from __future__ import annotations

from mindspore import Tensor, nn

from mindformers_ext import ops
from mindformers_ext.models.config import HyperConnectionConfig, TransformerConfig
from mindformers_ext.models.layers import Linear, empty_parameter


def hyper_config(config: TransformerConfig) -> HyperConnectionConfig:
    """Returns the options of hyper-connections.

    Raises:
        ValueError: the configuration has none.
    """
    if config.hyper_connections is None:
        raise ValueError(f"model: {config.model_type} has no hyper-connections")
    return config.hyper_connections


class HyperConnection(nn.Cell):
    """Collapses the streams into the input of a block, and spreads its output over them (`ops.hyper_collapse`)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        hyper = hyper_config(config)
        streams = hyper.num_residual_streams
        self.mapping_proj = Linear(streams * config.hidden_size, (2 + streams) * streams, packing=None)
        self.alpha = empty_parameter(3, initial=1.0)
        self.bias = empty_parameter((2 + streams) * streams, initial=0.0)
        self.iterations, self.eps = hyper.mhc_sinkhorn_iterations, hyper.mhc_layernorm_epsilon
        self.norm_eps = config.layernorm_epsilon

    def construct(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Maps streams float32 ``[N, n * H]`` to the block's input ``[N, H]`` and what `expand` needs."""
        return ops.hyper_collapse(
            streams, self.mapping_proj.weight, self.alpha, self.bias, self.iterations, self.eps, self.norm_eps
        )

    @staticmethod
    def expand(update: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        """Adds a block's output ``[N, H]`` to every stream and mixes them; see `ops.hyper_expand`."""
        return ops.hyper_expand(update, streams, post, comb)


class HyperHead(nn.Cell):
    """Collapses the streams behind the last layer (`ops.hyper_head`)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        hyper = hyper_config(config)
        streams = hyper.num_residual_streams
        self.hc_fn = Linear(streams * config.hidden_size, streams, packing=None)
        self.hc_scale = empty_parameter(1, initial=1.0)
        self.hc_base = empty_parameter(streams, initial=0.0)
        self.eps, self.norm_eps = hyper.mhc_layernorm_epsilon, config.layernorm_epsilon

    def construct(self, streams: Tensor) -> Tensor:
        """Maps float32 ``[N, n * H]`` to ``[N, H]``."""
        return ops.hyper_head(streams, self.hc_fn.weight, self.hc_scale, self.hc_base, self.eps, self.norm_eps)
