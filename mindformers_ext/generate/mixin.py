"""``model.generate()`` for any Cell."""

from __future__ import annotations

from typing import Any

from mindspore import Tensor

from mindformers_ext.generate.configuration import GenerationConfig
from mindformers_ext.generate.generation import GenerateOutput, generate
from mindformers_ext.generate.stopping import DecodeNew
from mindformers_ext.generate.streamers import Streamer


class GenerateMixin:
    """Adds `generate` to a Cell that meets the contract of `mindformers_ext.generate.model_call.ModelCall`."""

    def generate(
        self,
        input_ids: Tensor,
        generation_config: GenerationConfig | None = None,
        attention_mask: Tensor | None = None,
        *,
        decode: DecodeNew | None = None,
        streamer: Streamer | None = None,
        **options: Any,
    ) -> Tensor | GenerateOutput:
        """Extends each row of a batch; see `mindformers_ext.generate.generate`.

        Args:
            input_ids: integers ``[B, S]``, padded on the left.
            generation_config: options.
            attention_mask: ``[B, S]``, 1 for a real token and 0 for a pad.
            decode: ``(prompt ids, new ids) -> text of the new ids``; needed for stop strings.
            streamer: is given the prompts and then each step's tokens.
            **options: fields of `GenerationConfig` that override ``generation_config``.

        Raises:
            TypeError: an option that `GenerationConfig` does not have.
        """
        config = (generation_config or GenerationConfig()).updated(**options)
        return generate(self, input_ids, config, attention_mask, decode=decode, streamer=streamer)
