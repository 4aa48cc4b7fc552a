"""Writes tests/data/processors.json: scores before and after the processors that transformers builds for its options.

Run with an interpreter that has torch and transformers 5.24: ``python tests/oracle/make_processors.py``.
"""

import json
import pathlib

import numpy as np
import torch
import transformers
from transformers import GenerationConfig
from transformers.generation.utils import GenerationMixin

OUTPUT = pathlib.Path(__file__).parents[1] / "data" / "processors.json"
VOCAB, PROMPT, LENGTH = 12, 3, 9
SAMPLING = {"do_sample": True, "top_k": 0}
OPTIONS = [
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 2},
    {"no_repeat_ngram_size": 3},
    {"bad_words_ids": [[1], [2, 3], [0, 1, 2], [4]], "eos_token_id": 4},
    {"sequence_bias": [[[3], 1.5], [[1, 2], -2.0], [[2, 2], 0.5], [[1, 1, 2], 4.0]]},
    {"min_length": 10, "eos_token_id": [4, 7]},
    {"min_new_tokens": 6, "eos_token_id": [4, 7]},
    {"min_new_tokens": 7, "eos_token_id": [4, 7]},
    {"forced_eos_token_id": [4, 7], "max_new_tokens": 7},
    {"forced_eos_token_id": 4, "max_new_tokens": 8},
    {"exponential_decay_length_penalty": [2, 1.2], "eos_token_id": [4, 7]},
    {"suppress_tokens": [1, 5], "begin_suppress_tokens": [2]},
    {"renormalize_logits": True},
    SAMPLING | {"temperature": 0.6},
    SAMPLING | {"top_k": 4},
    SAMPLING | {"top_p": 0.63},
    SAMPLING | {"min_p": 0.13},
    SAMPLING | {"typical_p": 0.41},
    SAMPLING | {"epsilon_cutoff": 0.051},
    SAMPLING | {"eta_cutoff": 0.17},
    SAMPLING | {"top_h": 0.57},
    SAMPLING | {"temperature": 1.7, "top_k": 7, "top_p": 0.83, "min_p": 0.07, "renormalize_logits": True},
    SAMPLING | {"temperature": 0.8, "typical_p": 0.71, "epsilon_cutoff": 0.03, "eta_cutoff": 0.09},
    SAMPLING | {"top_k": 6, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "suppress_tokens": [0]},
    SAMPLING | {"top_p": 0.2, "min_p": 0.9, "num_beams": 2, "eos_token_id": [4, 7]},
    SAMPLING | {"top_k": 1, "num_beams": 2},
    SAMPLING | {"typical_p": 0.2, "num_beams": 2, "eos_token_id": 4},
    SAMPLING | {"epsilon_cutoff": 0.7, "num_beams": 2, "eos_token_id": 4},
]


class Builder(GenerationMixin):
    """Just enough of a model for transformers to build its list of processors."""

    def __init__(self):
        self.config = transformers.PretrainedConfig()
        self.device = torch.device("cpu")


def after(options, ids, scores):
    config = GenerationConfig(**options)
    config.max_length = PROMPT + options.get("max_new_tokens", 100)
    for name, value in (("num_beams", 1), ("top_p", 1.0), ("temperature", 1.0), ("min_length", 0)):
        if getattr(config, name) is None:
            setattr(config, name, value)
    eos = config.eos_token_id
    if eos is not None:
        config._eos_token_tensor = torch.tensor([eos] if isinstance(eos, int) else eos)
    else:
        config._eos_token_tensor = None
    processors = Builder()._get_logits_processor(
        generation_config=config,
        input_ids_seq_length=PROMPT,
        encoder_input_ids=torch.tensor(ids[:, :PROMPT]),
        prefix_allowed_tokens_fn=None,
        logits_processor=transformers.LogitsProcessorList(),
        device="cpu",
        model_kwargs={},
    )
    return processors(torch.tensor(ids), torch.tensor(scores)).numpy()


def listed(scores):
    return [[None if np.isneginf(value) else float(value) for value in row] for row in scores]


def main():
    rng = np.random.default_rng(0)
    cases = []
    for options in OPTIONS:
        scores = (rng.normal(size=(8, VOCAB)) * 1.5).astype(np.float32)
        ids = rng.integers(0, 5, (8, LENGTH))
        cases.append(
            {
                "options": options,
                "ids": ids.tolist(),
                "scores": listed(scores),
                "after": listed(after(options, ids, scores)),
            }
        )
    document = {"transformers": transformers.__version__, "prompt_length": PROMPT, "cases": cases}
    OUTPUT.write_text(json.dumps(document) + "\n", encoding="utf-8")
    print(f"{OUTPUT}: {len(cases)} cases")


if __name__ == "__main__":
    main()
