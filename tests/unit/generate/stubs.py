"""Models whose answers can be worked out by hand."""

import numpy as np
from mindspore import Tensor, nn, ops

PAD, BOS, EOS, A, B, C = range(6)

# logits(next | last) = ln of these rows, normalised; rows 0 (pad) and 2 (eos) are uniform.
BIGRAM = {
    BOS: [0.02, 0.02, 0.06, 0.50, 0.30, 0.10],
    A: [0.02, 0.02, 0.36, 0.10, 0.30, 0.20],
    B: [0.02, 0.02, 0.10, 0.36, 0.10, 0.40],
    C: [0.02, 0.02, 0.56, 0.20, 0.10, 0.10],
}


def bigram_table(rows=BIGRAM, vocab=6):
    table = np.full((vocab, vocab), 1.0 / vocab, np.float32)
    for last, row in rows.items():
        table[last] = row
    return np.log(table / table.sum(-1, keepdims=True))


class Bigram(nn.Cell):
    """The next token depends on the last one alone; returns nothing but logits."""

    def __init__(self, table=None):
        super().__init__()
        self.table = Tensor(bigram_table() if table is None else table.astype(np.float32))
        self.calls = []

    def construct(self, input_ids, position_ids, attention_mask=None, past_key_values=None):
        self.calls.append(
            {
                "ids": input_ids.asnumpy().copy(),
                "positions": position_ids.asnumpy().copy(),
                "mask": None if attention_mask is None else attention_mask.asnumpy().copy(),
                "past": past_key_values,
            }
        )
        return {"logits": ops.gather(self.table, input_ids, 0)}


class Sum(nn.Cell):
    """The next token is (sum of (position + 1) * id over all real tokens) mod vocab; keeps plain (K, V) pairs.

    K holds (position + 1) * id and V the same, ``[B, 1, S, 1]``: a wrong position, mask or cache changes the answer.
    """

    vocab = 11

    def construct(self, input_ids, position_ids, attention_mask=None, past_key_values=None):
        new = ((position_ids + 1) * input_ids).astype(np.float32).reshape(*input_ids.shape, 1).expand_dims(1)
        key = new if past_key_values is None else ops.cat((past_key_values[0][0], new), 2)
        terms = key.asnumpy()[:, 0, :, 0]
        length = input_ids.shape[1]
        visible = np.ones((len(terms), length, terms.shape[1]), bool)
        if attention_mask is not None:
            visible &= attention_mask.asnumpy()[:, 0] == 0
        totals = (terms[:, None] * visible).sum(-1).astype(int)
        return {"logits": Tensor(self.logits(totals)), "past_key_values": [(key, key)]}

    def logits(self, totals):
        return -np.abs(np.arange(self.vocab) - totals[..., None] % self.vocab).astype(np.float32)

    @classmethod
    def answer(cls, prompt, count):
        ids = list(prompt)
        for _ in range(count):
            ids.append(sum((i + 1) * t for i, t in enumerate(ids)) % cls.vocab)
        return ids[len(prompt) :]


class Hashed(Sum):
    """Random logits that depend on all tokens so far: no two sequences have the same score."""

    vocab = 9

    def __init__(self, seed):
        super().__init__()
        self.rows = np.random.default_rng(seed).normal(size=(997, self.vocab), scale=2).astype(np.float32)

    def logits(self, totals):
        return self.rows[totals * 31 % 997]

    def logprobs(self, ids):
        row = self.rows[sum((i + 1) * t for i, t in enumerate(ids)) * 31 % 997].astype(np.float64)
        return row - np.log(np.exp(row).sum())
