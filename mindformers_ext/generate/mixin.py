"""``model.generate()`` for any Cell."""

from __future__ import annotations

from typing import Any

from mindspore import Tensor

from mindformers_ext.generate.generation import generate
from mindformers_ext.generate.utils import GenerationConfig


class GenerateMixin:
    """Adds `generate` to a Cell that meets the contract of `mindformers_ext.generate.forward.BatchForward`."""

    def generate(
        self,
        input_ids: Tensor,
        generation_config: GenerationConfig | None = None,
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Extends each row of a batch; see `mindformers_ext.generate.generate`.

        Args:
            input_ids: integers ``[B, S]``, padded on the left.
            generation_config: options.
            attention_mask: ``[B, S]``, 1 for a real token and 0 for a pad.
            **options: fields of `GenerationConfig` that override ``generation_config``.

        Raises:
            TypeError: an option that `GenerationConfig` does not have.
        """
        values = {**vars(generation_config or GenerationConfig()), **options}
        return generate(self, input_ids, GenerationConfig(**values), attention_mask)
