"""Token ids in, token ids out: the decode loop, its caches and its choices."""

from mindformers_ext.generate.generation import GeneratedRow, GenerationStats, generate, generate_rows
from mindformers_ext.generate.kv_cache import KVCache
from mindformers_ext.generate.mixin import GenerateMixin
from mindformers_ext.generate.sampler import greedy_sample
from mindformers_ext.generate.utils import GenerationConfig, build_causal_mask, build_position_ids

__all__ = [
    "GenerateMixin",
    "GeneratedRow",
    "GenerationConfig",
    "GenerationStats",
    "KVCache",
    "build_causal_mask",
    "build_position_ids",
    "generate",
    "generate_rows",
    "greedy_sample",
]
