"""A model whose layers are spread over the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from mindformers_ext.models.cache import LayerState, take_numbers, view_rows
from mindformers_ext.models.gpt_model import GPTModel
from mindformers_ext.models.weights import WeightLayout
from mindformers_ext.parallel.pipeline import PerMicroBatch, PipelineScheduleRuntime, ScaledLossPipelineStage
from mindformers_ext.parallel.plan import Region
from mindformers_ext.parallel.schedule import split_rows


class PipelineModel(nn.Cell):
    """The stage of this process, called as if it were the whole model; only the last stage gets logits.

    Args:
        stage: the layers of this process.
        micro_batches: parts of a batch that are on their way at the same time.
    """

    def __init__(self, stage: GPTModel, micro_batches: int) -> None:
        super().__init__()
        self.stage = stage
        self.config, self.model_shard = stage.config, stage.model_shard
        self.takes_additive_mask, self.can_crop_cache = stage.takes_additive_mask, stage.can_crop_cache
        context = self.model_shard.context
        hyper = self.config.hyper_connections
        self._width = self.config.hidden_size * (1 if hyper is None else hyper.num_residual_streams)
        self.runtime = PipelineScheduleRuntime(
            ScaledLossPipelineStage(
                _Stage(stage),
                context.coordinates.pp,
                context.dims.pp,
                previous=context.previous_stage,
                following=context.next_stage,
                has_backward=False,
                activation_shape=self._activation_shape,
            ),
            micro_batches,
        )

    def construct(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Sequence[LayerState] | None = None,
        logits_to_keep: int | None = None,
        score_targets: Tensor | None = None,
    ) -> dict[str, object]:
        """See `GPTModel.construct`; logits and scores are None outside the last stage."""
        states = list(past_key_values or ())
        for state in states:
            state.reserve(state.length + input_ids.shape[1])
        parts = split_rows(input_ids.shape[0], self.runtime.micro_batch_num)
        views = [[view_rows(state, part.start, part.stop) for state in states] for part in parts]
        outputs = self.runtime.run(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=attention_mask,
            past_key_values=PerMicroBatch([view or None for view in views]),
            logits_to_keep=logits_to_keep,
            score_targets=score_targets,
        )
        for index, state in enumerate(states):
            take_numbers(state, [view[index] for view in views])
        result = None
        if outputs:
            result = Tensor.from_numpy(np.concatenate([output.asnumpy() for output in outputs]))
        return {"logits" if score_targets is None else "scores": result, "past_key_values": past_key_values}

    def new_cache(self, batch_size: int, max_length: int) -> list[LayerState]:
        """See `GPTModel.new_cache`; the layers of this process."""
        return self.stage.new_cache(batch_size, max_length)

    def weight_layout(self) -> WeightLayout:
        """See `GPTModel.weight_layout`."""
        return self.stage.weight_layout()

    def weight_regions(self) -> dict[str, Region]:
        """See `GPTModel.weight_regions`."""
        return self.stage.weight_regions()

    def set_weight(self, name: str, array: np.ndarray) -> None:
        """See `GPTModel.set_weight`."""
        self.stage.set_weight(name, array)

    def weight(self, name: str) -> np.ndarray:
        """See `GPTModel.weight`."""
        return self.stage.weight(name)

    def _activation_shape(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> tuple[int, int]:
        rows, length = keywords["input_ids"].shape
        states = keywords["past_key_values"]
        return rows * self.stage.local_length(states[0].length if states else 0, length), self._width


class _Stage(nn.Cell):
    """What the runtime calls: tokens in the first stage, what the stage before gave in the others."""

    def __init__(self, model: GPTModel) -> None:
        super().__init__()
        self.model = model

    def construct(
        self,
        hidden: Tensor | None = None,
        *,
        input_ids: Tensor,
        logits_to_keep: int | None = None,
        score_targets: Tensor | None = None,
        **inputs: Any,
    ) -> Tensor:
        states = inputs["past_key_values"]
        past = states[0].length if states else 0
        hidden = self.model.run_layers(hidden, input_ids, **inputs)
        if not self.model.model_shard.is_last:
            return hidden.astype(ms.float32)
        if score_targets is not None:
            return self.model.score_tokens(hidden, score_targets, past)
        batch, length = input_ids.shape
        return self.model.run_head(hidden, batch, length, logits_to_keep, past)
