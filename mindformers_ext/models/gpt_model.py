"""The decoder-only transformer of every family: one forward for training and for prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
from mindspore import Tensor, nn

from mindformers_ext import ops
from mindformers_ext.models.block import TransformerBlock
from mindformers_ext.models.cache import LayerState, SlotState
from mindformers_ext.models.config import TransformerConfig
from mindformers_ext.models.context import ForwardContext
from mindformers_ext.models.context_parallel import SharedState
from mindformers_ext.models.families import weight_layout
from mindformers_ext.models.layers import LanguageModelEmbedding, Linear, Packable, initial_values
from mindformers_ext.models.rope import rotary_tables
from mindformers_ext.models.sequence_share import SequenceShare, share_of
from mindformers_ext.models.shard import ModelShard, shard_of
from mindformers_ext.models.weights import WeightLayout
from mindformers_ext.parallel.plan import Region
from mindformers_ext.parallel.sharded_parameters import ShardedParameters
from mindformers_ext.runtime import logger

_SCORED_AT_ONCE = 2**24  # logits that exist at the same time where tokens are scored


class GPTModel(nn.Cell):
    """Decoder-only transformer with MindSpore Transformers' parameter names and layouts.

    Parameters have no memory until `set_weight` or `init_weights` gives them values.

    Args:
        config: shape and options of the whole model.
        shard: the part of it that this process builds; None for all of it.
    """

    def __init__(self, config: TransformerConfig, shard: ModelShard | None = None) -> None:
        super().__init__()
        self.config = config
        self.model_shard = shard_of(config) if shard is None else shard
        if self.model_shard.has_embedding:
            self.embedding = LanguageModelEmbedding(self.model_shard)
        self.decoder = TransformerBlock(self.model_shard)
        if self.model_shard.is_last and not config.tie_word_embeddings:
            first, end = self.model_shard.vocab
            self.output_layer = Linear(config.hidden_size, end - first)
        self._parameters_by_name = self.parameters_dict()
        self._rotary = rotary_tables(config)
        self._weight_dtype: str | None = None
        self._packable = _packable_parameters(self)
        self._sharded: ShardedParameters | None = None
        if self.model_shard.context.dims.degree("fsdp") > 1:
            self._sharded = ShardedParameters(self._parameters_by_name, self.model_shard.sharing)
        # Recurrent layers and compressed blocks follow the order of tokens, whatever a mask says.
        self.takes_additive_mask = set(config.layer_types) == {"full_attention"}
        self.can_crop_cache = self.takes_additive_mask

    def construct(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Sequence[LayerState] | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | None = None,
        score_targets: Tensor | None = None,
    ) -> dict[str, object] | Tensor:
        """Runs the model.

        Args:
            input_ids: int32 ``[B, S]``.
            position_ids: int32 ``[B or 1, S]``; None counts on from the cache.
            attention_mask: None (causal), int ``[B, past + S]`` (1 real, 0 pad, causal besides), or additive float32
                ``[B or 1, 1, S, past + S]`` (families with full attention in every layer only).
            past_key_values: state of earlier tokens, from `new_cache`; extended in place.
            labels: int32 ``[B, S]``, the token that follows each input token; -100 does not count.
            logits_to_keep: the last so many positions go through the head; None takes all.
            score_targets: int32 ``[B, S]``, a token after each input token whose probability is asked for; -100 for
                none, and then the position does not go through the head.

        Returns:
            With score_targets ``{"scores": float32 [B, S, 4], "past_key_values": past_key_values}``, see
            `ops.token_scores`; zeros where nothing is asked. With labels the mean loss, a float32 scalar. Else
            ``{"logits": float32 [B, S or kept, V], "past_key_values": past_key_values}``; under tensor parallelism the
            logits of this process' part of the vocabulary.
        """
        batch, length = input_ids.shape
        past = past_key_values[0].length if past_key_values else 0
        hidden = self.run_layers(None, input_ids, position_ids, attention_mask, past_key_values)
        if labels is not None:
            return ops.cross_entropy(self._head(hidden), labels.reshape(-1))
        if score_targets is not None:
            scores = self.score_tokens(hidden, score_targets, past)
            return {"scores": scores, "past_key_values": past_key_values}
        logits = self.run_head(hidden, batch, length, logits_to_keep, past)
        return {"logits": logits, "past_key_values": past_key_values}

    def run_layers(
        self,
        hidden: Tensor | None,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Sequence[LayerState] | None = None,
    ) -> Tensor:
        """Runs the layers of this process.

        Args:
            hidden: what the stage before gave, see `TransformerBlock.construct`; None in the first stage.
            input_ids: see `construct`, as the rest.
            position_ids: see there.
            attention_mask: see there.
            past_key_values: state of this process' layers.
        """
        batch, length = input_ids.shape
        past = past_key_values[0].length if past_key_values else 0
        states: Sequence[LayerState | None] = past_key_values or [None] * len(self.model_shard.layers)
        for state in past_key_values or ():
            state.reserve(past + length)
        positions = None if position_ids is None else position_ids.asnumpy()
        mask = None if attention_mask is None else attention_mask.asnumpy()
        context = ForwardContext(input_ids, positions, mask, past, self._rotary)
        if context.has_additive_mask and not self.takes_additive_mask:
            raise ValueError(
                f"{self.config.model_type} has layers that cannot follow an additive attention_mask; give "
                f"[{batch}, {past + length}] with 1 for real tokens and 0 for pads"
            )
        context = context.shared(self.model_shard.context)
        if hidden is None:
            with self._joined(self.embedding):
                hidden = self.embedding(context.input_ids).reshape(batch * context.length, -1)
        return self.decoder(hidden, context, states, self._joined)

    def run_head(
        self, hidden: Tensor, batch: int, length: int, logits_to_keep: int | None = None, past: int = 0
    ) -> Tensor:
        """Turns what `run_layers` gave in the last stage into logits ``[B, S or kept, V]``, as `construct` has them.

        Args:
            hidden: what `run_layers` gave.
            batch: rows B.
            length: new tokens S of the whole sequence.
            logits_to_keep: see `construct`.
            past: tokens before them.
        """
        kept = length if logits_to_keep is None else min(logits_to_keep, length)
        share = self._share(past, length)
        if share is not None and share.is_split:
            hidden = share.last(hidden, batch, kept)
        elif kept < length:
            hidden = hidden.reshape(batch, length, -1)[:, length - kept :].reshape(batch * kept, -1)
        logits = self._head(hidden)
        return logits.reshape(batch, -1, logits.shape[-1])

    def score_tokens(self, hidden: Tensor, targets: Tensor, past: int = 0) -> Tensor:
        """Turns what `run_layers` gave in the last stage into scores ``[B, S, 4]``, as `construct` has them.

        Args:
            hidden: what `run_layers` gave.
            targets: see `construct`.
            past: tokens before them.
        """
        asked = targets.asnumpy()
        share = self._share(past, asked.shape[1])
        if share is not None:
            asked = asked[:, slice(*share.own)]
        rows = np.flatnonzero(asked >= 0)
        ids, scores = asked.reshape(-1)[rows], np.zeros((asked.size, 4), np.float32)
        first, end = self.model_shard.vocab
        step = max(_SCORED_AT_ONCE // (end - first), 1)
        # Both blocks are entered once, however many rows there are: the processes join parameters in them.
        normed = self._normed(Tensor.from_numpy(hidden.asnumpy()[rows])).asnumpy()
        with self._projection() as project:
            for start in range(0, len(rows), step):
                part = slice(start, start + step)
                logits = project(Tensor.from_numpy(normed[part]))
                scores[rows[part]] = ops.token_scores(logits.asnumpy(), ids[part], first)
        result = Tensor.from_numpy(scores.reshape(*asked.shape, 4))
        return share.gather(result, 1) if share is not None and share.is_split else result

    def local_length(self, past: int, length: int) -> int:
        """Returns how many of ``length`` new tokens this process computes, after ``past`` others."""
        share = self._share(past, length)
        return length if share is None else share.length

    def _share(self, past: int, length: int) -> SequenceShare | None:
        return share_of(self.model_shard.context, past, length)

    def new_cache(self, batch_size: int, max_length: int) -> list[LayerState]:
        """Returns empty state for ``batch_size`` rows of up to ``max_length`` tokens, one entry a layer."""
        states = [layer.self_attention.new_state(batch_size, max_length) for layer in self.decoder.layers]
        group = self.model_shard.context.cp
        if group.size == 1:
            return states
        return [SharedState(state, group) if isinstance(state, SlotState) else state for state in states]

    def weight_layout(self) -> WeightLayout:
        """Returns how the parameters of the whole model are stored in HuggingFace checkpoints."""
        return weight_layout(self.config)

    def weight_regions(self) -> dict[str, Region]:
        """Returns the part of each parameter that `set_weight` takes on this process."""
        return self.model_shard.stored_regions(self.weight_layout())

    def prepare_prediction(self, weight_dtype: str = "auto") -> None:
        """Lets `set_weight` keep large weights in the order and type in which a prediction reads them fastest.

        Where C++ kernels are at hand they are packed for them. Elsewhere, and where parameters are spread over
        processes (FSDP), they stay float32 and only their values are rounded. The model cannot be trained afterwards.

        Args:
            weight_dtype: ``float32``, ``bfloat16``, ``int8`` (one scale for each output), or ``auto``: bfloat16 for
                weights that are given so, float32 for others, which both give the values that were given.
        """
        self._weight_dtype = weight_dtype
        if self._sharded is not None and weight_dtype in ("bfloat16", "int8"):
            logger.info("weights are rounded to %s but stay float32 in memory, where FSDP joins them", weight_dtype)

    def packed_weights(self) -> list[ops.PackedWeight]:
        """Returns the matrices that are packed, that of a tied embedding once."""
        cells = {id(cell): cell for cell, _ in self._packable.values()}.values()
        return [weight for cell in cells for weight in cell.packed_weights()]

    def takes_bits(self, name: str) -> bool:
        """Tells whether `set_weight` takes the bits of bfloat16 values (uint16) for a parameter: biases are float32."""
        return name in self._packable and len(self._parameters_by_name[name].shape) > 1 and self._packs()

    def set_weight(self, name: str, array: np.ndarray) -> None:
        """Makes ``array`` (float32 or int32, C-contiguous) the memory of parameter ``name``, without a copy.

        After `prepare_prediction` it is packed or rounded instead.

        Raises:
            KeyError: no such parameter.
            ValueError: the shape differs, or the type of weights cannot hold a value.
        """
        parameter = self._parameters_by_name[name]
        if self._sharded is None and parameter.shape != array.shape:
            raise ValueError(f"{name} has shape {parameter.shape}, not {array.shape}")
        self.decoder.forget_packed()
        held: np.ndarray | None = array
        if name in self._packable and self._weight_dtype is not None:
            try:
                held = self._packed_or_rounded(name, array, self._weight_dtype)
            except ValueError as error:
                raise ValueError(f"{name} cannot be kept as {self._weight_dtype}: {error}") from error
        if held is None:
            return
        if self._sharded is not None:
            self._sharded.store(name, held)
        else:
            parameter.set_data(Tensor.from_numpy(held))

    def weight(self, name: str) -> np.ndarray:
        """Returns what `set_weight` set, or training made of it: the part that `weight_regions` says, to be read only.

        Raises:
            KeyError: no such parameter on this process.
        """
        if self._sharded is not None:
            return self._sharded.stored(name)
        if name in self._packable:
            cell, local = self._packable[name]
            unpacked = cell.unpack(local)
            if unpacked is not None:
                return unpacked
        return self._parameters_by_name[name].asnumpy()

    def init_weights(self, seed: int) -> None:
        """Gives every parameter its first value: norms 1, biases 0, matrices normal.

        Projections back into the residual stream get a standard deviation smaller by ``sqrt(2 num_layers)``
        (GPT-2 report, section 2.3).
        """
        generator = np.random.default_rng(seed)
        std = self.config.init_method_std
        for name, parameter in self._parameters_by_name.items():
            residual_std = std / (2 * self.config.num_layers) ** 0.5
            self.set_weight(name, initial_values(parameter, std, residual_std, generator))

    def _packs(self) -> bool:
        return self._weight_dtype is not None and self._sharded is None and ops.can_pack()

    def _packed_or_rounded(self, name: str, values: np.ndarray, weight_dtype: str) -> np.ndarray | None:
        """Returns the values that a packable parameter has to hold itself; None where its block has packed them."""
        cell, local = self._packable[name]
        dtype = weight_dtype if cell.narrow else "float32"
        if dtype == "auto":
            dtype = "bfloat16" if values.dtype == np.uint16 else "float32"
        if self._packs():
            return None if cell.pack(local, values, dtype) else values
        if values.ndim == 1:  # a bias
            return values
        # Experts are stored with their outputs last.
        return np.ascontiguousarray(ops.rounded(values, dtype, -2 if values.ndim == 3 else -1))

    def _head(self, hidden: Tensor) -> Tensor:
        """Final norm and logits: float32 ``[N, H]`` to ``[N, V]``."""
        normed = self._normed(hidden)
        with self._projection() as project:
            return project(normed)

    def _normed(self, hidden: Tensor) -> Tensor:
        with self._joined(self.decoder.final_layernorm, self.decoder.hc_head):
            return self.decoder.finish(hidden) if len(hidden) else hidden

    @contextmanager
    def _projection(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """Gives what turns normed rows into logits."""
        if self.config.tie_word_embeddings:
            with self._joined(self.embedding):
                yield lambda normed: ops.linear(normed, self.embedding.table)
        else:
            with self._joined(self.output_layer):
                yield self.output_layer

    def _joined(self, *cells: nn.Cell | None) -> AbstractContextManager[None]:
        """Within it the parameters of blocks can be used, wherever they are kept."""
        if self._sharded is None:
            return nullcontext()
        mine = {id(parameter) for cell in cells if cell is not None for parameter in cell.get_parameters()}
        return self._sharded.gathered({n: p for n, p in self._parameters_by_name.items() if id(p) in mine})


def _packable_parameters(model: nn.Cell) -> dict[str, tuple[Packable, str]]:
    """Returns, by parameter name, the block that can pack a parameter and the name that it has there."""
    return {
        f"{name}.{local}": (cell, local)
        for name, cell in model.cells_and_names()
        for local in getattr(cell, "packable", ())
    }
