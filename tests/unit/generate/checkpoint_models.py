"""The small checkpoints that transformers wrote, as models. Tests share a model and leave it as it is."""

import functools
import json
import pathlib

from mindformers_ext.checkpoint import load_weights
from mindformers_ext.models import transformer_config
from mindformers_ext.models.gpt_model import GPTModel

CHECKPOINTS = pathlib.Path(__file__).parents[2] / "data" / "checkpoints"
FAMILIES = sorted(folder.name for folder in CHECKPOINTS.iterdir())


@functools.cache
def load(family):
    """The model of a family, with the weights as they are."""
    folder = CHECKPOINTS / family
    model = GPTModel(transformer_config({}, json.loads((folder / "config.json").read_text())))
    load_weights(folder, model.weight_layout(), model.set_weight)
    model.set_train(False)
    return model


@functools.cache
def load_with_cases(family):
    """The model of a family, and the answers of transformers."""
    return load(family), json.loads((CHECKPOINTS / family / "reference.json").read_text())["cases"]
