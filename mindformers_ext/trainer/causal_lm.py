"""The model that the Trainer builds."""

from __future__ import annotations

from mindspore import nn

from mindformers_ext.config.schema import ParallelismSection
from mindformers_ext.generate import GenerateMixin
from mindformers_ext.models import TransformerConfig
from mindformers_ext.models.gpt_model import GPTModel
from mindformers_ext.models.pipeline_model import PipelineModel
from mindformers_ext.models.shard import shard_of
from mindformers_ext.parallel.groups import ParallelContext


class CausalLM(GenerateMixin, GPTModel):
    """`GPTModel` with ``generate()``."""


class PipelineCausalLM(GenerateMixin, PipelineModel):
    """`PipelineModel` with ``generate()``."""


def build_causal_lm(
    config: TransformerConfig, context: ParallelContext, layers: range, parallelism: ParallelismSection
) -> nn.Cell:
    """Builds the part of a model that a process runs.

    Args:
        config: of the whole model.
        context: the place of the process.
        layers: its layers.
        parallelism: further options of the layout.

    Raises:
        ValueError: the model cannot be split like this.
    """
    part = CausalLM(config, shard_of(config, context, layers))
    if context.dims.pp == 1:
        return part
    return PipelineCausalLM(part, parallelism.pipeline_parallel_microbatch_size)
