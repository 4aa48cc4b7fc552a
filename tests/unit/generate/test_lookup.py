"""Prompt lookup gives the tokens, reasons and log-probabilities of decoding without it, in fewer forwards."""

import numpy as np
import pytest
from checkpoint_models import FAMILIES, load
from mindspore import Tensor, nn
from stubs import Hashed, Sum

from mindformers_ext.generate import GenerationConfig, GenerationStats, generate, generate_rows
from mindformers_ext.generate.lookup import propose
from mindformers_ext.generate.prefix import PrefixCache

ONE_ROW_ONLY = ("deepseek_v4", "qwen3_5", "qwen3_5_moe")


class Cycle(nn.Cell):
    """Goes on with a fixed text after a token, most of the time; remembers (K, V) pairs of the tokens' ids."""

    vocab = 16

    def __init__(self, period=5):
        super().__init__()
        self.period = period
        self.lengths = []

    def construct(self, input_ids, position_ids, attention_mask=None, past_key_values=None):
        self.lengths.append(input_ids.shape[1])
        new = input_ids.asnumpy().astype(np.float32)[:, None, :, None]
        key = new if past_key_values is None else np.concatenate((past_key_values[0][0].asnumpy(), new), 2)
        positions = position_ids.asnumpy()
        # Every third round the text changes in one place, so some drafts are wrong.
        wanted = np.where(positions % (3 * self.period) == self.period, 9, 3 + positions % self.period)
        logits = -np.abs(np.arange(self.vocab) - wanted[..., None]).astype(np.float32)
        return {"logits": Tensor(logits), "past_key_values": [(Tensor(key), Tensor(key))]}


def decode(prompt_ids, new_ids):
    return "".join(f"<{token}>" for token in new_ids)


def compared(model, prompts, drafts=4, min_accepted=1, **options):
    """The rows without and with lookup, which must be equal; and what lookup did."""
    options = {"max_new_tokens": 20} | options
    stats = GenerationStats()
    plain = generate_rows(model, prompts, GenerationConfig(**options), decode=decode)
    config = GenerationConfig(**options, prompt_lookup_num_tokens=drafts)
    ahead = generate_rows(model, prompts, config, stats, decode=decode)
    for one, other in zip(plain, ahead, strict=True):
        for name in ("token_ids", "finish_reason", "stop_string", "stop_position", "sequence_idx"):
            assert getattr(one, name) == getattr(other, name)
        if one.logprobs is not None:
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
            assert [[token for token, _ in step] for step in one.top_logprobs] == [
                [token for token, _ in step] for step in other.top_logprobs
            ]
    assert stats.accepted_tokens >= min_accepted
    assert stats.accepted_tokens <= stats.drafted_tokens
    assert stats.decode_tokens == sum(len(row.token_ids) - 1 for row in ahead)
    return ahead, stats


def few_tokens(model):
    """Options under which answers repeat themselves: two tokens are left."""
    return {"suppress_tokens": [token for token in range(model.config.vocab_size) if token not in (5, 6)]}


@pytest.mark.parametrize(
    ("ids", "count", "longest", "stop", "expected"),
    [
        ([1, 2, 3, 4, 1, 2], 3, 2, (), [3, 4, 1]),
        ([5, 2, 7, 1, 2, 3, 1, 2], 2, 2, (), [3, 1]),  # two last tokens before one
        ([5, 2, 7, 9, 2], 2, 2, (), [7, 9]),  # one, as two are not found
        ([1, 2, 8, 1, 2, 9, 1, 2], 1, 2, (), [8]),  # the first occurrence
        ([4, 4, 4], 5, 2, (), [4]),  # what there is
        ([1, 2, 3], 4, 2, (), []),
        ([1], 4, 2, (), []),
        ([1, 2, 3, 4, 1, 2], 3, 2, (4,), [3]),  # up to an EOS
        ([1, 2, 3, 1, 2], 0, 2, (), []),
    ],
)
def test_proposals_follow_the_first_occurrence_of_the_longest_tail(ids, count, longest, stop, expected):
    assert propose(np.array(ids), count, longest, stop).tolist() == expected


def test_a_text_that_repeats_itself_needs_fewer_forwards_of_more_tokens():
    model = Cycle()
    rows, stats = compared(model, [[3, 4, 5, 6, 7]], drafts=4, max_new_tokens=40, min_accepted=20)
    assert len(rows[0].token_ids) == 40
    assert stats.forwards < 20
    assert max(model.lengths[1:]) == 5


@pytest.mark.parametrize("model", [Cycle(), Cycle(3), Sum(), Hashed(0)], ids=["cycle", "short", "sum", "hashed"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"eos_token_id": 9},
        {"eos_token_id": [4, 9], "min_new_tokens": 7},
        {"max_new_tokens": 1},
        {"max_new_tokens": 2},
        {"max_length": 13, "max_new_tokens": None},
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 4},
        {"do_sample": True, "seed": 3, "temperature": 0.5},
        {"do_sample": True, "seed": 4, "num_return_sequences": 3},
        {"output_logprobs": 2},
        {"stop_strings": ["<5><6>", "7><"]},
        {"max_matching_ngram_size": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("prompts", [[[3, 4, 5, 6, 7]], [[3], [1, 2, 3, 4, 5, 6], [7, 7]]], ids=["one", "several"])
def test_options_end_and_change_rows_as_without(model, options, prompts):
    compared(model, prompts, min_accepted=0, **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_accepts_drafts_and_gives_the_same_rows(family):
    model = load(family)
    text = np.random.default_rng(1).integers(3, 90, 7).tolist()
    compared(model, [text * 3], min_accepted=0, max_new_tokens=16, output_logprobs=1)
    _, stats = compared(model, [text * 3], **few_tokens(model))
    assert stats.forwards < 20
    _, stats = compared(model, [text * 3], do_sample=True, seed=1, **few_tokens(model))
    assert stats.forwards < 20


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in ONE_ROW_ONLY])
def test_rows_of_a_batch_advance_at_their_own_pace(family):
    texts = [np.random.default_rng(seed).integers(3, 90, 5).tolist() for seed in range(4)]
    prompts = [text * (1 + seed) for seed, text in enumerate(texts)]
    model = load(family)
    compared(model, prompts, min_accepted=0, max_new_tokens=12)
    _, stats = compared(model, prompts, do_sample=True, seed=5, num_return_sequences=2, **few_tokens(model))
    assert stats.forwards < 20


@pytest.mark.parametrize("family", ONE_ROW_ONLY)
def test_states_that_take_nothing_back_refuse_several_rows(family):
    config = GenerationConfig(max_new_tokens=4, prompt_lookup_num_tokens=3)
    with pytest.raises(ValueError, match="cannot take tokens back try drafts for one row only"):
        generate_rows(load(family), [[5, 6], [7]], config)


def test_gaps_are_closed_before_a_cache_is_full(monkeypatch):
    closed = []
    from mindformers_ext.generate.lookup import DraftForward

    original = DraftForward._close_gaps
    monkeypatch.setattr(DraftForward, "_close_gaps", lambda self: (closed.append(self.length), original(self)))
    for model, prompts in (
        (Cycle(), [[3, 4, 5, 6, 7, 3], [9, 3, 1], [2, 5]]),
        (load("qwen3"), [[5, 6] * 4, [7, 8, 9], [4] * 6, [11]]),
    ):
        before = len(closed)
        compared(model, prompts, max_new_tokens=50, drafts=6)
        assert len(closed) > before


def test_scores_are_those_of_every_step():
    ids = Tensor(np.array([[3, 4, 5, 6, 7], [5, 6, 7, 3, 4]], np.int32))
    options = {"max_new_tokens": 12, "eos_token_id": 9, "output_scores": True, "return_dict_in_generate": True}
    plain = generate(Cycle(), ids, GenerationConfig(**options))
    ahead = generate(Cycle(), ids, GenerationConfig(**options, prompt_lookup_num_tokens=4))
    assert len(plain.scores) == len(ahead.scores)
    for one, other in zip(plain.scores, ahead.scores, strict=True):
        np.testing.assert_array_equal(one, other)


class _Streamer:
    def __init__(self):
        self.got = []

    def put(self, tokens):
        self.got.append(np.asarray(tokens).tolist())

    def end(self):
        self.got.append("end")


def test_a_streamer_gets_one_token_after_the_other():
    ids, got = Tensor(np.array([[3, 4, 5, 6, 7]], np.int32)), []
    for options in ({}, {"prompt_lookup_num_tokens": 4}):
        streamer = _Streamer()
        generate(Cycle(), ids, GenerationConfig(max_new_tokens=15, **options), streamer=streamer)
        got.append(streamer.got)
    assert got[0] == got[1]


def test_a_streamer_of_several_rows_is_refused():
    ids = Tensor(np.array([[3, 4], [5, 6]], np.int32))
    with pytest.raises(ValueError, match="at their own pace"):
        generate(Cycle(), ids, GenerationConfig(prompt_lookup_num_tokens=4), streamer=_Streamer())


def test_a_plug_in_sees_rows_as_without():
    def processor(ids, scores):
        scores[np.arange(len(ids)), (ids[:, -1] * 7 + ids.shape[1]) % scores.shape[1]] += 3
        return scores

    def criterion(ids, scores):
        return ids[:, -1] == 6

    compared(Cycle(), [[3, 4, 5, 6, 7] * 2], min_accepted=0, logits_processor=[processor])
    compared(Cycle(), [[3, 4, 5, 6, 7] * 2], min_accepted=0, stopping_criteria=[criterion])


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"num_beams": 2}, "set num_beams to 1"),
        ({"use_cache": False}, "without a cache drafts save nothing"),
    ],
)
def test_options_that_exclude_drafts_are_refused(options, problem):
    with pytest.raises(ValueError, match=problem):
        GenerationConfig(prompt_lookup_num_tokens=3, **options)


def test_drafts_and_a_shared_prefix_go_together():
    model, stats = load("qwen3"), GenerationStats()
    header = np.random.default_rng(0).integers(3, 90, 12).tolist()
    prompts = [header + [5, 6, 7] * 3, header + [8], header + [5, 5]]
    plain = generate_rows(model, prompts, GenerationConfig(max_new_tokens=20))
    config = GenerationConfig(max_new_tokens=20, prompt_lookup_num_tokens=3)
    rows = generate_rows(model, prompts, config, stats, prefixes=PrefixCache(model, stats, least=4))
    assert [row.token_ids for row in rows] == [row.token_ids for row in plain]
    assert 12 < stats.shared_tokens <= 36
    assert stats.accepted_tokens > 0
