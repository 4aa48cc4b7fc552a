"""Cells that were not written for this package: plain pairs, no cache, nothing but logits."""

import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from stubs import Sum

from mindformers_ext.generate import GenerateMixin, GenerationConfig, generate, generate_rows

PROMPTS = [[3], [1, 2, 3, 4, 5], [7, 7]]


class Pairs(GenerateMixin, Sum):
    """Returns a list of plain (K, V) tuples."""

    def __init__(self):
        super().__init__()
        self.lengths = []

    def construct(self, input_ids, position_ids, attention_mask=None, past_key_values=None):
        self.lengths.append(input_ids.shape[1])
        return super().construct(input_ids, position_ids, attention_mask, past_key_values)


class Tuple(GenerateMixin, Sum):
    """Returns (logits, past_key_values)."""

    def construct(self, input_ids, position_ids, attention_mask=None, past_key_values=None):
        outputs = super().construct(input_ids, position_ids, attention_mask, past_key_values)
        return outputs["logits"], outputs["past_key_values"]


class NoCache(GenerateMixin, Sum):
    """Takes no past_key_values, and returns a dict with logits."""

    def construct(self, input_ids, position_ids, attention_mask):
        return {"logits": super().construct(input_ids, position_ids, attention_mask)["logits"]}


class OnlyLogits(GenerateMixin, Sum):
    """Returns a tensor."""

    def construct(self, input_ids, position_ids, attention_mask=None, past_key_values=None):
        return super().construct(input_ids, position_ids, attention_mask)["logits"]


class OnlyIds(nn.Cell):
    """Takes nothing but ids."""

    def construct(self, input_ids):
        return ops.one_hot((input_ids + 1) % 5, 5)


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("model", [Pairs, Tuple, NoCache, OnlyLogits])
class TestEveryKind:
    def test_greedy(self, model, use_cache):
        ids, mask = np.zeros((3, 5), np.int32), np.zeros((3, 5), np.int32)
        for row, prompt in enumerate(PROMPTS):
            ids[row, 5 - len(prompt) :], mask[row, 5 - len(prompt) :] = prompt, 1
        config = GenerationConfig(max_new_tokens=6, pad_token_id=10, use_cache=use_cache)
        found = model().generate(Tensor(ids), config, attention_mask=Tensor(mask)).asnumpy().tolist()
        for row, prompt in zip(found, PROMPTS, strict=True):
            answer = prompt + Sum.answer(prompt, 6)
            assert row == answer + [10] * (11 - len(answer))

    def test_beams_and_samples_are_those_of_the_other_kinds(self, model, use_cache):
        for options in ({"num_beams": 3}, {"do_sample": True, "seed": 1, "num_return_sequences": 3}):
            config = GenerationConfig(max_new_tokens=5, use_cache=use_cache, **options)
            rows = generate_rows(model(), PROMPTS, config)
            expected = generate_rows(Sum(), PROMPTS, config)
            assert [row.token_ids for row in rows] == [row.token_ids for row in expected]

    def test_a_prompt_in_pieces(self, model, use_cache):
        config = GenerationConfig(max_new_tokens=4, use_cache=use_cache, prefill_chunk_size=2)
        rows = generate_rows(model(), PROMPTS, config)
        assert [row.token_ids for row in rows] == [Sum.answer(prompt, 4) for prompt in PROMPTS]


def test_a_model_with_pairs_reads_each_token_once():
    model = Pairs()
    generate_rows(model, PROMPTS, GenerationConfig(max_new_tokens=3, prefill_chunk_size=2))
    assert model.lengths == [2, 2, 1, 1, 1]


def test_a_model_that_takes_ids_alone_answers_prompts_of_one_length():
    rows = generate_rows(OnlyIds(), [[1, 2], [0, 0]], GenerationConfig(max_new_tokens=3))
    assert [row.token_ids for row in rows] == [[3, 4, 0], [1, 2, 3]]


def test_a_model_without_a_mask_is_not_given_prompts_of_different_lengths():
    with pytest.raises(ValueError, match="OnlyIds.construct takes no attention_mask and no position_ids"):
        generate_rows(OnlyIds(), [[1], [0, 0]], GenerationConfig(max_new_tokens=3))


def test_generate_is_the_same_function_without_the_mixin():
    ids = Tensor(np.array([[3, 4]], np.int32))
    config = GenerationConfig(max_new_tokens=4)
    assert generate(Pairs(), ids, config).asnumpy().tolist() == Pairs().generate(ids, config).asnumpy().tolist()
