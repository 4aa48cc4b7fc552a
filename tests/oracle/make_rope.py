"""Writes tests/data/rope.json: inverse frequencies that transformers computes (needs torch and transformers 5.24)."""

import json
import pathlib

from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

CASES = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn_mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
    "yarn_untruncated": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 4096,
        "attention_factor": 1.25,
        "truncate": False,
    },
}


def main() -> None:
    result = []
    for name, parameters in CASES.items():
        for theta in (10000.0, 1000000.0):
            config = LlamaConfig(
                hidden_size=256,
                num_attention_heads=4,
                head_dim=64,
                max_position_embeddings=131072,
                rope_parameters={"rope_theta": theta, **parameters},
            )
            frequencies, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu")
            result.append(
                {
                    "name": name,
                    "theta": theta,
                    "parameters": parameters,
                    "frequencies": frequencies.tolist(),
                    "attention_factor": factor,
                }
            )
    target = pathlib.Path(__file__).parents[1] / "data" / "rope.json"
    target.write_text(json.dumps(result) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
