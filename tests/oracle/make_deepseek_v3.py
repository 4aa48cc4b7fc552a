"""Writes tests/data/deepseek_v3: options beside those of the family's checkpoint (torch, transformers 5.24)."""

import json
import pathlib
import shutil

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

FOLDER = pathlib.Path(__file__).parents[1] / "data" / "deepseek_v3"
COMMON = {
    "vocab_size": 48,
    "hidden_size": 24,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_group": 3,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "attn_implementation": "eager",
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
}
VARIANTS = {
    "direct_queries": {"q_lora_rank": None, "rope_interleave": False, "n_group": 1, "topk_group": 1},
    "yarn": {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    "yarn_two_mscales": {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}, "q_lora_rank": None},
    "biases": {
        "attention_bias": True,
        "rms_norm_eps": 1e-3,
        "kv_lora_rank": 13,
        "v_head_dim": 10,
        "qk_rope_head_dim": 6,
        "n_shared_experts": 2,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
    },
}


def main() -> None:
    for name, options in VARIANTS.items():
        torch.manual_seed(0)
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**{**COMMON, **options})).float().eval()
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if key.endswith("bias"):
                tensor.data = 0.3 * torch.randn(tensor.shape)
            elif "norm" in key:
                tensor.data = 1 + 0.2 * torch.randn(tensor.shape)
        shutil.rmtree(FOLDER / name, ignore_errors=True)
        model.save_pretrained(FOLDER / name)
        (FOLDER / name / "generation_config.json").unlink()
        cases = []
        for length in (9, 1, 22):
            ids = torch.randint(0, COMMON["vocab_size"], (1, length))
            with torch.no_grad():
                logits = model(ids).logits[0, -1]
                answer = model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False, pad_token_id=0
                )
            cases.append(
                {
                    "input_ids": ids[0].tolist(),
                    "logits_last": [round(value, 6) for value in logits.tolist()],
                    "greedy": answer[0, length:].tolist(),
                }
            )
        (FOLDER / name / "reference.json").write_text(json.dumps({"cases": cases}))


if __name__ == "__main__":
    main()
