"""The part of a model that a process builds."""

from __future__ import annotations

from dataclasses import dataclass

from mindformers_ext.models.config import TransformerConfig
from mindformers_ext.models.sharding import (
    EXPERT_PLAN,
    check_context_parallel,
    check_expert_parallel,
    check_tensor_parallel,
    local_config,
    tensor_plan,
)
from mindformers_ext.models.weights import WeightLayout
from mindformers_ext.parallel.collectives import Group
from mindformers_ext.parallel.groups import ParallelContext, single
from mindformers_ext.parallel.plan import Plan, Region, Rule, Shard, plan_regions, rule_of, split_evenly

_EMBEDDING = "embedding.word_embeddings.weight"


@dataclass(frozen=True)
class ModelShard:
    """Sizes, layers and groups of one process.

    Attributes:
        config: of the whole model.
        local: sizes of the blocks that this process builds.
        context: its place in the layout, and its groups.
        layers: its decoder layers.
    """

    config: TransformerConfig
    local: TransformerConfig
    context: ParallelContext
    layers: range

    @property
    def is_first(self) -> bool:
        """Whether it embeds the tokens."""
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the head."""
        return self.layers.stop == self.config.num_layers

    @property
    def vocab(self) -> tuple[int, int]:
        """First and last + 1 of the token ids whose rows of embedding and head it holds."""
        return split_evenly(self.config.vocab_size, self.context.tp.size, self.context.tp.rank)

    @property
    def has_embedding(self) -> bool:
        """Whether it holds the embedding: the first stage, and the last one where the head is tied to it."""
        return self.is_first or (self.is_last and self.config.tie_word_embeddings)

    @property
    def local_experts(self) -> int:
        """Routed experts that it holds."""
        return 0 if self.config.moe is None else self.config.moe.num_moe_experts // self.context.ep.size

    def holds(self, name: str) -> bool:
        """Tells whether a parameter belongs to its layers."""
        if name.startswith("decoder.layers."):
            return int(name.split(".")[2]) in self.layers
        return self.has_embedding if name == _EMBEDDING else self.is_last

    def regions(self, layout: WeightLayout) -> dict[str, Region]:
        """Returns the part of every parameter that it holds while its layers run."""
        tensor, ep = tensor_plan(self.config), self.context.ep
        experts: Plan = EXPERT_PLAN if ep.size > 1 else ()

        def tensor_rule(name: str) -> Rule | None:
            return None if rule_of(experts, name) else rule_of(tensor, name)

        shapes = {mapping.name: mapping.shape for mapping in layout.mappings if self.holds(mapping.name)}
        tp = self.context.tp
        return plan_regions(shapes, [(tensor_rule, tp.size, tp.rank), (experts, ep.size, ep.rank)])

    def stored_regions(self, layout: WeightLayout) -> dict[str, Region]:
        """Returns the part of every parameter that it keeps: rows of `regions` where parameters are sharded."""
        stored = {}
        for name, region in self.regions(layout).items():
            group = self.sharing(name)
            pieces = Shard(0).ranges(region.shape[0], group.size, group.rank)
            stored[name] = region if group.size == 1 else region.narrowed(0, pieces)
        return stored

    def sharing(self, name: str) -> Group:
        """Returns the group whose members keep a part each of a parameter that all of them use."""
        split = self.context.ep.size > 1 and rule_of(EXPERT_PLAN, name) is not None
        return self.context.groups["efsdp" if split else "fsdp"]


def shard_of(
    config: TransformerConfig,
    context: ParallelContext | None = None,
    layers: range | None = None,
) -> ModelShard:
    """Returns the part of a model for a process; by default all of it.

    Raises:
        ValueError: the model cannot be split like this.
    """
    context = single() if context is None else context
    tp, ep = context.tp, context.ep
    check_tensor_parallel(config, tp.size)
    check_expert_parallel(config, ep.size)
    local = local_config(config, tp.size, tp.rank, ep.size, ep.rank)
    check_context_parallel(local, context.cp.size, context.ulysses.size)
    return ModelShard(config, local, context, range(config.num_layers) if layers is None else layers)
