"""What a prefill holds at once is bounded by its chunk: tokens, biases, and no logits but those of the last token."""

import pytest
from checkpoint_models import load

from mindformers_ext.generate import GenerationConfig, generate_rows
from mindformers_ext.models.context import ForwardContext
from mindformers_ext.models.gpt_model import GPTModel

CHUNK = 16
PROMPTS = [[1 + i % 7 for i in range(70)], [2] * 33]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "deepseek_v3", "deepseek_v4"])
def test_no_prompt_is_run_masked_or_scored_as_a_whole(family, monkeypatch):
    lengths, logits, biases, derived = [], [], [], []
    run_layers, run_head = GPTModel.run_layers, GPTModel.run_head
    bias, cached = ForwardContext.bias, ForwardContext.cached

    def spy(original, note):
        def call(self, *arguments, **options):
            result = original(self, *arguments, **options)
            note(result, arguments)
            return result

        return call

    monkeypatch.setattr(
        GPTModel, "run_layers", spy(run_layers, lambda _, arguments: lengths.append(arguments[1].shape[1]))
    )
    monkeypatch.setattr(GPTModel, "run_head", spy(run_head, lambda result, _: logits.append(result.shape)))
    monkeypatch.setattr(ForwardContext, "bias", spy(bias, lambda result, _: biases.append(result.shape)))
    monkeypatch.setattr(
        ForwardContext, "cached", spy(cached, lambda result, _: derived.append(getattr(result, "size", 0)))
    )
    model = load(family)
    generate_rows(model, PROMPTS, GenerationConfig(max_new_tokens=3, prefill_chunk_size=CHUNK))
    assert lengths == [CHUNK] * 4 + [70 - 4 * CHUNK, 1, 1]
    assert set(logits) == {(2, 1, model.config.vocab_size)}
    assert all(shape[2] <= CHUNK for shape in biases) and (biases or family == "deepseek_v4")
    assert max(derived, default=0) <= 2 * CHUNK * 128
