"""Mixture of experts."""

from __future__ import annotations

from collections.abc import Sequence

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from mindformers_ext import ops
from mindformers_ext.models.config import MoEConfig, TransformerConfig
from mindformers_ext.models.context import ForwardContext
from mindformers_ext.models.expert_parallel import TokenExchange
from mindformers_ext.models.layers import MLP, Linear, PackableMatrix, empty_parameter
from mindformers_ext.models.shard import ModelShard


class MoELayer(nn.Cell):
    """Routed experts, and a shared one where the family has it.

    Args:
        shard: sizes, and the place of this process.
        layer_number: index of the layer; its type ``hash_moe`` takes the experts of a token from a table by token id.

    Raises:
        ValueError: the configuration has no mixture of experts.
    """

    def __init__(self, shard: ModelShard, layer_number: int = 0) -> None:
        super().__init__()
        config = shard.local
        moe = config.moe
        if moe is None:
            raise ValueError(f"model: {config.model_type} has no experts, so mlp_layer_types cannot be moe")
        hashed = config.mlp_layer_types[layer_number] == "hash_moe"
        self.router = Router(config, moe, hashed)
        self.experts = Experts(config, moe, shard.local_experts)
        self.expert_bias = None
        if moe.moe_router_enable_expert_bias and not hashed:
            self.expert_bias = empty_parameter(moe.num_moe_experts, initial=0.0)
            self.expert_bias.requires_grad = False  # it balances the experts' load and is no part of the loss
        self.shared_experts = SharedExperts(config, moe) if moe.moe_shared_expert_intermediate_size else None
        self.clamp_value = config.activation_func_clamp_value
        self._exchange = TokenExchange(shard) if shard.context.ep.size > 1 else None
        self._tp = shard.context.tp

    def construct(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Maps float32 ``[B * S, H]`` to ``[B * S, H]``; pads reach no expert."""
        ids, factors = self.router(x, context, self.expert_bias)
        if self._exchange is not None:
            routed = self._exchange.run(x, ids, factors, context, self._run_experts)
            return routed if self.shared_experts is None else routed + self._tp.all_reduce(self.shared_experts(x))
        routed = self._run_experts(x, ids, factors)
        return self._tp.all_reduce(routed if self.shared_experts is None else routed + self.shared_experts(x))

    def _run_experts(self, x: Tensor, ids: Tensor, factors: Tensor) -> Tensor:
        return ops.experts(x, ids, factors, *self.experts.weights, self.clamp_value)


class Router(PackableMatrix, nn.Cell):
    """Chooses the experts of each token, by the scores of a linear layer or by a table."""

    packable = ("weight",)
    narrow = False

    def __init__(self, config: TransformerConfig, moe: MoEConfig, hashed: bool) -> None:
        super().__init__()
        self.weight = empty_parameter(moe.num_moe_experts, config.hidden_size)
        self.tid2eid = None
        if hashed:
            experts = moe.num_moe_experts

            def any_experts(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
                return generator.random((shape[0], experts)).argsort(1)[:, : shape[1]]

            self.tid2eid = empty_parameter(config.vocab_size, moe.moe_router_topk, initial=any_experts, dtype=ms.int32)
        self.routing = ops.Routing(
            top_k=moe.moe_router_topk,
            score_function=moe.moe_router_score_function,
            normalise=moe.norm_topk_prob,
            scale=moe.moe_router_topk_scaling_factor,
            groups=moe.moe_router_num_groups,
            group_top_k=moe.moe_router_group_topk,
        )

    def construct(self, x: Tensor, context: ForwardContext, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns experts int32 ``[B * S, K]`` and their weights float32 ``[B * S, K]`` for x ``[B * S, H]``."""
        chosen = None
        if self.tid2eid is not None:
            chosen = self.tid2eid.asnumpy()[context.input_ids.asnumpy().reshape(-1)]
        logits = ops.linear(x, self.weight if self.packed is None else self.packed)
        return ops.route(logits, self.routing, bias, chosen, context.real_rows)


class Experts(nn.Cell):
    """The weights of the routed experts: gate beside up ``[E, H, 2 F]``, and down ``[E, F, H]``."""

    packable = ("weight1", "weight2")
    narrow = True

    def __init__(self, config: TransformerConfig, moe: MoEConfig, count: int) -> None:
        super().__init__()
        hidden, ffn = config.hidden_size, moe.moe_ffn_hidden_size
        self.weight1 = empty_parameter(count, hidden, 2 * ffn)
        self.weight2 = empty_parameter(count, ffn, hidden, initial="residual")
        self._packed: dict[str, ops.PackedStack] = {}

    @property
    def weights(self) -> tuple[Tensor | ops.PackedStack, Tensor | ops.PackedStack]:
        """Both weights, as `ops.experts` takes them."""
        if self._packed:
            return self._packed["weight1"], self._packed["weight2"]
        return self.weight1, self.weight2

    def pack(self, name: str, values: np.ndarray, dtype: str) -> bool:
        """See `Packable.pack`."""
        self._packed[name] = ops.PackedStack(values, dtype, "beside" if name == "weight1" else "plain")
        return True

    def unpack(self, name: str) -> np.ndarray | None:
        """See `Packable.unpack`."""
        return self._packed[name].read() if name in self._packed else None

    def packed_weights(self) -> Sequence[ops.PackedWeight]:
        """See `Packable.packed_weights`."""
        return [matrix for stack in self._packed.values() for matrix in stack.matrices]


class SharedExperts(MLP):
    """The expert that every token passes, with a sigmoid gate in some families."""

    def __init__(self, config: TransformerConfig, moe: MoEConfig) -> None:
        super().__init__(config, moe.moe_shared_expert_intermediate_size)
        self.shared_experts_gate = (
            Linear(config.hidden_size, 1, packing="float32") if moe.use_shared_expert_gating else None
        )

    def construct(self, x: Tensor) -> Tensor:
        """Maps float32 ``[N, H]`` to ``[N, H]``."""
        result = super().construct(x)
        return result if self.shared_experts_gate is None else result * ops.sigmoid(self.shared_experts_gate(x))
