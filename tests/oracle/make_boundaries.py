"""Writes tests/data/boundaries: what transformers answers around every length at which something changes in a model.

Run with an interpreter that has torch and transformers 5.24: ``python tests/oracle/make_boundaries.py [family ...]``.
Weights follow from a seed and the tensor's name (tests/unit/models/boundary_cases.py); a seed is taken only if

- the two best logits of every greedy step differ by more than 1e-3,
- noise of a millionth in all weights changes neither an id nor, by 1e-4, a logit: no choice of experts is a near tie,
- other values of any kind of tensor change the logits by far more than the tests tolerate,
- transformers gives the same logits with and without its cache.
"""

import argparse
import json
import pathlib
import re
import sys
import tempfile

import numpy as np
import torch
import transformers
from boundary_variants import VARIANTS, prompt_lengths
from safetensors import safe_open

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "unit" / "models"))
from boundary_cases import FOLDER, compacted, expanded, write_checkpoint

NEW_TOKENS = 12
SHOWN = 16  # logits that are stored
MARGIN, NOISE, CONDITION, EFFECT = 1e-3, 1e-6, 1e-4, 2e-2


def stored_tensors(config, folder):
    """Returns the shape of every tensor that transformers writes for a model, by name."""
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    with safe_open(folder / "model.safetensors", "np") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def load(case, changed=None):
    """Returns the model of a case; see `write_checkpoint` for ``changed``."""
    with tempfile.TemporaryDirectory() as name:
        write_checkpoint(pathlib.Path(name), case, changed)
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            name, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    left = {kind: names for kind, names in info.items() if names}
    if left:
        raise SystemExit(f"transformers did not read the checkpoint as a whole: {left}")
    return model.eval()


def greedy(model, ids):
    """Returns the logits ``[1 + NEW_TOKENS, V]`` from the last prompt token on, and the ids chosen by them."""
    outputs = model(torch.tensor([ids]), use_cache=True)
    logits, chosen = [outputs.logits[0, -1]], []
    for _ in range(NEW_TOKENS):
        chosen.append(int(logits[-1].argmax()))
        outputs = model(torch.tensor([chosen[-1:]]), past_key_values=outputs.past_key_values, use_cache=True)
        logits.append(outputs.logits[0, -1])
    return torch.stack(logits), chosen


def forced(model, ids, chosen):
    """Returns the same logits from one forward over all ids."""
    return model(torch.tensor([ids + chosen]), use_cache=False).logits[0, len(ids) - 1 :]


def difference(logits, expected):
    """Returns the largest difference, relative to the largest logit."""
    return float((logits - expected).abs().max() / expected.abs().max())


def disturb(model):
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.mul_(1 + NOISE * torch.randn(parameter.shape, generator=generator))


def answers(case, lengths):
    """Returns what is stored of every prompt, or why the seed of the case does not do."""
    model = load(case)
    found = []
    for length in lengths:
        ids = np.random.default_rng([case["seed"], length]).integers(0, case["config"]["vocab_size"], length).tolist()
        logits, chosen = greedy(model, ids)
        best = logits[:-1].topk(2).values
        if (best[:, 0] - best[:, 1]).min() < MARGIN:
            return f"near tie after {length} tokens"
        without_cache = difference(forced(model, ids, chosen), logits)
        if without_cache > CONDITION:
            return f"with and without cache differ by {without_cache:.1e} after {length} tokens"
        found.append((ids, logits, chosen))
    if len({token for _, _, chosen in found for token in chosen}) < SHOWN:
        return "too few different tokens"
    disturb(model)
    for ids, logits, chosen in found:
        change = difference(forced(model, ids, chosen), logits)
        if change > CONDITION:
            return f"noise changes logits by {change:.1e} after {len(ids)} tokens"
    weak = without_effect(case, found)
    return f"without effect: {weak}" if weak else [stored(*entry, case["logit_ids"]) for entry in found]


def without_effect(case, found):
    """Returns the kinds of tensors that could be wrong without a test that sees it."""
    kinds = {re.sub(r"\d+", r"\\d+", re.escape(name)) for name in expanded(case["tensors"])}
    ids, logits, chosen = found[-1]
    effects = {kind: difference(forced(load(case, kind), ids, chosen), logits) for kind in kinds}
    return {kind.replace("\\", ""): effect for kind, effect in effects.items() if effect < EFFECT}


def stored(ids, logits, chosen, logit_ids):
    last = logits[0].double()
    summary = {"mean": last.mean(), "rms": last.square().mean().sqrt(), "largest": last.abs().max()}
    return {
        "ids": ids,
        "logits": [round(float(last[index]), 5) for index in logit_ids],
        **{name: round(float(value), 5) for name, value in summary.items()},
        "greedy": chosen,
    }


def make_case(name, config):
    """Returns a case with the first seed that does."""
    with tempfile.TemporaryDirectory() as folder:
        tensors = compacted(stored_tensors(config, pathlib.Path(folder)))
        saved = json.loads((pathlib.Path(folder) / "config.json").read_text(encoding="utf-8"))
    saved.pop("transformers_version")
    vocabulary = config.vocab_size
    logit_ids = [index * vocabulary // SHOWN for index in range(SHOWN)]
    for seed in range(60):
        case = {"seed": seed, "config": saved, "tensors": tensors, "logit_ids": logit_ids}
        prompts = answers(case, prompt_lengths(config))
        if isinstance(prompts, list):
            return case | {"prompts": prompts}
        print(f"  {name}: seed {seed}: {prompts}", flush=True)
    raise SystemExit(f"{name}: no seed does")


def text_of(document):
    """JSON with one line a prompt and a tensor."""
    lists = json.dumps(document, indent=1)
    return re.sub(r"\[[^\[\]{}]*\]", lambda match: re.sub(r"\s+", "", match[0]), lists) + "\n"


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=list(VARIANTS))
    options = parser.parse_args()
    torch.set_num_threads(1)  # the models are tiny
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    FOLDER.mkdir(exist_ok=True)
    for family in options.families:
        made = {name: make_case(f"{family} {name}", config) for name, config in VARIANTS[family].items()}
        target = FOLDER / f"{family}.json"
        target.write_text(text_of({"transformers": transformers.__version__, "cases": made}), encoding="utf-8")
        print(f"{target}: {len(made)} cases, {target.stat().st_size:,} bytes", flush=True)


if __name__ == "__main__":
    main()
