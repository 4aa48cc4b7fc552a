"""Log-probabilities of continuations, on models whose logits are known, and on a checkpoint."""

import json
import pathlib

import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from stubs import Hashed

from mindformers_ext.generate import GenerationStats, score_groups
from mindformers_ext.trainer import Trainer

CHECKPOINT = pathlib.Path(__file__).parents[2] / "data" / "checkpoints" / "qwen3"
CASES = json.loads((CHECKPOINT / "reference.json").read_text())["cases"]
GROUPS = [
    [([3, 1, 4], [1, 5]), ([3, 1, 4], [2]), ([3, 1, 4], [6, 5, 3, 5])],
    [([2, 2], [7, 1]), ([2, 2], [8])],
    [([1, 1, 2, 3, 5, 8], [0, 4])],
]


class Pairs(Hashed):
    """Returns plain pairs of keys and values, and counts the tokens that it reads."""

    def __init__(self, seed=5):
        super().__init__(seed)
        self.shapes = []

    def construct(self, input_ids, position_ids, attention_mask=None, past_key_values=None):
        self.shapes.append(input_ids.shape)
        return super().construct(input_ids, position_ids, attention_mask, past_key_values)


class NoCache(Hashed):
    """Accepts a cache and never returns one."""

    def construct(self, input_ids, position_ids, attention_mask=None, past_key_values=None):
        assert past_key_values is None
        return super().construct(input_ids, position_ids, attention_mask)["logits"]


class OnlyLast(Hashed):
    """Returns as many positions as it is asked for."""

    def construct(self, input_ids, position_ids, attention_mask=None, past_key_values=None, logits_to_keep=None):
        outputs = super().construct(input_ids, position_ids, attention_mask, past_key_values)
        return outputs | {"logits": outputs["logits"][:, -logits_to_keep:]}


class OnlyIds(nn.Cell):
    """Takes nothing but ids: the next token is the last one and 1 more."""

    def construct(self, input_ids):
        return ops.one_hot((input_ids + 1) % 5, 5) * 3.0


class IdsAndCache(Hashed):
    """Takes no mask and no positions: it would read pads as tokens."""

    def construct(self, input_ids, past_key_values=None):
        past = 0 if past_key_values is None else past_key_values[0][0].shape[2]
        positions = ops.arange(past, past + input_ids.shape[1]).broadcast_to(input_ids.shape)
        hidden = np.triu(np.ones((input_ids.shape[1], past + input_ids.shape[1]), np.float32), past + 1)
        return super().construct(input_ids, positions, Tensor(-hidden[None, None]), past_key_values)


class Router(Hashed):
    """Returns more than logits."""

    def construct(self, input_ids, position_ids, attention_mask=None, past_key_values=None):
        outputs = super().construct(input_ids, position_ids, attention_mask, past_key_values)
        return outputs | {"scores": None}


class Forgetful(Hashed):
    """Returns a cache once."""

    def construct(self, input_ids, position_ids, attention_mask=None, past_key_values=None):
        outputs = super().construct(input_ids, position_ids, attention_mask, past_key_values)
        return outputs if past_key_values is None else {"logits": outputs["logits"]}


def expected(groups):
    model = Hashed(5)
    found = []
    for context, continuation in (pair for group in groups for pair in group):
        values = [model.logprobs(context + continuation[:i])[token] for i, token in enumerate(continuation)]
        best = [model.logprobs(context + continuation[:i]).argmax() for i in range(len(continuation))]
        found.append((values, best == continuation))
    return found


def check(found, groups=GROUPS):
    flat = [one for group in found for one in group]
    for one, (values, greedy) in zip(flat, expected(groups), strict=True):
        assert one.token_logprobs == pytest.approx(values, abs=1e-5)
        assert one.total == pytest.approx(sum(values), abs=1e-5) and one.is_greedy is greedy


@pytest.mark.parametrize("chunk_size", [512, 2, 1])
@pytest.mark.parametrize("share_prefix", [True, False])
@pytest.mark.parametrize("model", [Pairs, NoCache, OnlyLast, IdsAndCache, Router])
def test_every_kind_of_model_gives_the_log_softmax_of_its_logits(model, share_prefix, chunk_size):
    check(score_groups(model(5), GROUPS, share_prefix=share_prefix, chunk_size=chunk_size))


def test_a_model_that_returns_a_cache_once_and_then_none_is_refused():
    with pytest.raises(ValueError, match="Forgetful returned no past_key_values after it had returned some"):
        score_groups(Forgetful(5), GROUPS)


def test_a_greedy_continuation_is_known():
    model = Hashed(5)
    ids = [4, 2]
    for _ in range(4):
        ids.append(int(model.logprobs(ids).argmax()))
    groups = [[(ids[:2], ids[2:]), (ids[:2], [*ids[2:5], (ids[5] + 1) % model.vocab])]]
    found = score_groups(model, groups)
    assert [one.is_greedy for one in found[0]] == [True, False]
    check(found, groups)


def test_a_shared_context_is_read_once_and_continuations_together():
    model = Pairs()
    score_groups(model, [GROUPS[0], GROUPS[1]])
    assert model.shapes == [(2, 3), (3, 3)]  # two contexts; the rows of the choices with more than a token
    model.shapes.clear()
    score_groups(model, [GROUPS[0], GROUPS[1]], share_prefix=False)
    assert model.shapes == [(5, 6)]
    model.shapes.clear()
    score_groups(model, [[one[0]] for one in GROUPS])
    assert model.shapes == [(3, 7)]  # nothing is shared: one forward


def test_no_more_rows_run_at_once_than_groups_allow():
    model = Pairs()
    windows = [([1, 2], [number % 9]) for number in range(5)]
    texts = [([7], [number % 9, 3, 5]) for number in range(5)]
    many = [([4, 4], [number % 9, 1]) for number in range(6)]
    check(score_groups(model, [windows]), [windows])
    assert {shape[0] for shape in model.shapes} == {1}
    model.shapes.clear()
    check(score_groups(model, [texts, texts]), [texts, texts])
    assert model.shapes == [(2, 3)] * 5  # a prefix of one token is not shared
    model.shapes.clear()
    check(score_groups(model, [many]), [many])
    assert [shape[0] for shape in model.shapes] == [1, 4, 2]


def test_a_model_that_takes_ids_alone_works_where_nothing_needs_a_mask():
    normaliser = np.log(np.exp(3) + 4)
    for share in (True, False):
        (found,) = score_groups(OnlyIds(), [[([1, 2], [3, 4]), ([1, 2], [3, 0, 1])]], share_prefix=share)
        assert found[0].token_logprobs == pytest.approx([3 - normaliser] * 2, abs=1e-5) and found[0].is_greedy
        assert found[1].token_logprobs == pytest.approx([3 - normaliser, -normaliser, 3 - normaliser], abs=1e-5)


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (([], [1]), "pair 1 has an empty context"),
        (([1], []), "pair 1 has an empty continuation"),
        (([1, 320], [2]), "pair 1 has token id 320, which the model does not have"),
        (([1, -1], [2]), "pair 1 has token id -1"),
        (([1] * 200, [2] * 58), "pair 1: 200 tokens of context \\+ 58 of the continuation, of which the last is not"),
    ],
)
def test_pairs_that_cannot_be_scored_are_refused(trainer, pair, message):
    with pytest.raises(ValueError, match=message):
        trainer.score([([1], [2]), pair])
    assert len(trainer.score([([1] * 200, [2] * 57)])) == 1


def test_a_probability_that_is_no_number_is_an_error():
    class Bad(Hashed):
        def logits(self, totals):
            return super().logits(totals) * np.float32(np.nan)

    with pytest.raises(FloatingPointError, match="no finite log-probability"):
        score_groups(Bad(5), GROUPS)


def test_forwards_are_announced_and_counted():
    calls, stats = [], GenerationStats()
    score_groups(Pairs(), [GROUPS[0]], stats, before_forward=lambda: calls.append(1))
    assert len(calls) == stats.forwards == stats.steps == 2
    assert stats.prefill_tokens == 3 + 2 * 3


@pytest.fixture(scope="module")
def trainer():
    return Trainer({"run_mode": "predict", "checkpoint": {"load_path": str(CHECKPOINT)}, "inference": {}})


def test_the_greedy_answer_of_a_checkpoint_is_greedy_and_what_differs_is_not(trainer):
    pairs = [(case["input_ids"], case["greedy"][:6]) for case in CASES]
    pairs += [(context, [*answer[:-1], (answer[-1] + 1) % 320]) for context, answer in pairs]
    assert [one.is_greedy for one in trainer.score(pairs)] == [True] * 5 + [False] * 5


def test_only_rows_with_a_target_go_through_the_head_and_never_all_at_once(trainer, monkeypatch):
    from mindformers_ext.models import gpt_model

    shapes = []
    original = gpt_model.ops.token_scores

    def watched(logits, *arguments):
        shapes.append(logits.shape)
        return original(logits, *arguments)

    monkeypatch.setattr(gpt_model.ops, "token_scores", watched)
    monkeypatch.setattr(gpt_model, "_SCORED_AT_ONCE", 4 * 320)
    context = CASES[4]["input_ids"]
    trainer.score([(context, [5] * 6), (context[:9], [7] * 3)])
    assert shapes == [(4, 320), (4, 320), (1, 320)]


def test_pairs_come_back_in_their_order_whatever_the_batch(trainer):
    pairs = [(case["input_ids"][:cut], case["input_ids"][cut:]) for cut in (1, 3) for case in CASES]
    alone = [trainer.score([pair])[0].total for pair in pairs]
    assert [one.total for one in trainer.score(pairs, batch_size=4)] == pytest.approx(alone, abs=1e-4)
    assert trainer.score([]) == []


def test_ids_may_be_numpys(trainer):
    ids = np.array(CASES[0]["input_ids"], np.int64)
    assert trainer.score([(ids[:4], ids[4:])]) == trainer.score([(ids[:4].tolist(), ids[4:].tolist())])


def test_rolling_over_a_text_sums_its_windows(trainer):
    ids = CASES[4]["input_ids"][:25]
    found = trainer.score_rolling([ids], prefix=0, max_length=10)
    windows = [([0, *ids[:9]][:1], ids[:10]), (ids[9:10], ids[10:20]), (ids[14:20], ids[20:])]
    assert found == pytest.approx([sum(one.total for one in trainer.score(windows))], abs=1e-4)
