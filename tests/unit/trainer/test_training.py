"""The training loop on the real model, in a shape that trains in milliseconds."""

from types import SimpleNamespace

import numpy as np
import pytest

from mindformers_ext.models.config import TransformerConfig
from mindformers_ext.models.gpt_model import GPTModel
from mindformers_ext.trainer.callbacks import CallbackHandler, LossCallback, TrainerCallback
from mindformers_ext.trainer.dataset import IGNORE_INDEX, PackedDataset
from mindformers_ext.trainer.lr_scheduler import build_schedule
from mindformers_ext.trainer.optimizer import AdamW
from mindformers_ext.trainer.train_state import TrainerState
from mindformers_ext.trainer.training import (
    accumulate,
    check_batch_sizes,
    global_batch_size,
    gradient_function,
    train_loop,
)

VOCAB, LENGTH, SAMPLES = 32, 12, 11


def make_model(seed=0):
    model = GPTModel(
        TransformerConfig(
            model_type="qwen3",
            architectures="Qwen3ForCausalLM",
            vocab_size=VOCAB,
            hidden_size=16,
            num_layers=2,
            num_attention_heads=2,
            num_query_groups=1,
            kv_channels=8,
            ffn_hidden_size=24,
            max_position_embeddings=LENGTH,
            qk_layernorm=True,
            tie_word_embeddings=True,
            init_method_std=0.2,
        )
    )
    model.init_weights(seed)
    return model


def make_dataset(seed=0):
    """Blocks of two documents and some padding, with differing numbers of tokens to learn."""
    rng = np.random.default_rng(seed)
    documents = np.zeros((SAMPLES, LENGTH), np.int32)
    for row in documents:
        first, second = rng.integers(2, LENGTH // 2, 2)
        row[:first], row[first : first + second] = 1, 2
    ids = rng.integers(1, VOCAB, (SAMPLES, LENGTH)).astype(np.int32)
    labels = np.where((documents > 0) & (rng.random(documents.shape) < 0.8), (ids * 3 + 1) % VOCAB, IGNORE_INDEX)
    labels[:, 1] = 5
    return PackedDataset(ids, labels.astype(np.int32), documents, shuffle=True, seed=seed)


def make_config(**training):
    defaults = {
        "local_batch_size": 2,
        "global_batch_size": 4,
        "max_norm": 1.0,
        "use_skip_step_on_nan": False,
        "max_consecutive_skipped_steps": 0,
        "rampup_batch_size": None,
    }
    return SimpleNamespace(training=SimpleNamespace(**(defaults | training)))


class Run:
    """One training run with everything it needs; ``snapshot`` is what a checkpoint would hold."""

    def __init__(self, config=None, max_steps=20, model_seed=0, callback=None, snapshot=None, **options):
        self.model, self.dataset = make_model(model_seed), make_dataset()
        self.optimizer = AdamW(self.model.trainable_params(), weight_decay=0.1)
        self.state = TrainerState(max_steps=max_steps)
        if snapshot:
            weights, optimizer_state, common = snapshot
            for name, array in weights.items():
                self.model.set_weight(name, array.copy())
            self.optimizer.load_state_dict(optimizer_state)
            self.state = TrainerState.from_common(common, max_steps)
        schedule = build_schedule({"type": "CosineWithWarmUpLR", "learning_rate": 0.02, "warmup_steps": 3}, 20)
        callbacks = CallbackHandler([LossCallback(), *([callback] if callback else [])])
        config = config or make_config()
        train_loop(self.model, config, self.dataset, self.optimizer, schedule, callbacks, self.state, **options)
        self.losses = [line["loss"] for line in self.state.log_history]

    def weights(self):
        return {name: p.asnumpy().copy() for name, p in self.model.parameters_dict().items()}

    def snapshot(self):
        moments = {name: array.copy() for name, array in self.optimizer.state_dict().items()}
        return self.weights(), moments, self.state.to_common()


def assert_same_weights(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert np.array_equal(a[name], b[name]), name


class EventLog(TrainerCallback):
    def __init__(self):
        self.events = []

    def __getattribute__(self, name):
        if not name.startswith("on_"):
            return super().__getattribute__(name)
        return lambda args, state, **kwargs: self.events.append((name, state.global_step))


@pytest.fixture(scope="module")
def whole():
    return Run(max_steps=20)


def test_resumed_run_equals_uninterrupted_run_to_the_last_bit(whole):
    first = Run(max_steps=10)
    second = Run(max_steps=20, model_seed=99, snapshot=first.snapshot())
    assert len(whole.losses) == 20
    assert first.losses + second.losses == whole.losses
    assert_same_weights(second.weights(), whole.weights())
    assert second.state.to_common() == whole.state.to_common()


def test_same_seed_same_run():
    a, b = Run(max_steps=4), Run(max_steps=4)
    assert a.losses == b.losses
    assert_same_weights(a.weights(), b.weights())


def test_loss_falls(whole):
    assert np.mean(whole.losses[-3:]) < 0.8 * np.mean(whole.losses[:3])


def test_accumulated_micro_batches_equal_one_batch():
    model, dataset = make_model(), make_dataset()
    function = gradient_function(model, model.trainable_params())
    whole, parts = accumulate(function, dataset, 3, 6, 6), accumulate(function, dataset, 3, 6, 1)
    counts = {dataset.batch(start, 1).num_counted for start in range(3, 9)}
    assert len(counts) > 1  # otherwise a plain mean over micro-batches would pass too
    assert parts.loss == pytest.approx(whole.loss, rel=1e-6)
    assert parts.num_tokens == whole.num_tokens
    for a, b in zip(whole.grads, parts.grads, strict=True):
        np.testing.assert_allclose(b.asnumpy(), a.asnumpy(), rtol=1e-5, atol=1e-6)


def test_gradients_are_the_slope_of_the_loss():
    model, dataset = make_model(), make_dataset()
    params = model.trainable_params()
    function = gradient_function(model, params)
    grads = [grad.asnumpy().copy() for grad in accumulate(function, dataset, 0, 4, 2).grads]
    starts = [param.asnumpy().copy() for param in params]
    norm, step, losses = np.sqrt(sum(float(np.sum(grad**2)) for grad in grads)), 1e-2, []
    for distance in (step, -step):  # along the gradient the slope is its norm
        for param, start, grad in zip(params, starts, grads, strict=True):
            model.set_weight(param.name, (start + distance / norm * grad).astype(np.float32))
        losses.append(accumulate(function, dataset, 0, 4, 2).loss)
    assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(norm, rel=1e-3)


def test_packed_documents_do_not_influence_each_other():
    model, dataset = make_model(), make_dataset()
    batch = dataset.batch(0, 1)
    changed = batch.input_ids.copy()
    changed[batch.documents == 1] = 7
    labels = np.where(batch.documents == 2, 3, IGNORE_INDEX).astype(np.int32)
    losses = []
    for ids in (batch.input_ids, changed):
        one = PackedDataset(ids, labels, batch.documents)
        losses.append(accumulate(gradient_function(model, []), one, 0, 1, 1).loss)
    assert losses[0] == losses[1]


def test_events_come_in_order_and_epochs_follow_the_data():
    log = EventLog()
    Run(max_steps=3, callback=log)
    step_events = [("on_step_begin", 0), ("on_step_end", 1), ("on_step_begin", 1), ("on_step_end", 2)]
    assert log.events == [
        ("on_train_begin", 0),
        ("on_epoch_begin", 0),
        *step_events,
        ("on_step_begin", 2),
        ("on_step_end", 3),
        ("on_epoch_end", 3),  # 3 steps of 4 samples pass the end of an epoch of 11
        ("on_train_end", 3),
    ]


def test_own_loss_function_gets_outputs_and_labels():
    def constant_loss(outputs, labels):
        assert outputs["logits"].shape == (2, LENGTH, VOCAB)
        return outputs["logits"].sum() * 0 + 2.5

    run = Run(max_steps=2, compute_loss_func=constant_loss)
    assert run.losses == pytest.approx([2.5, 2.5])


def nan_loss_at(steps):
    calls = []

    def loss(outputs, labels):
        calls.append(None)
        return outputs["logits"].mean() * (float("nan") if len(calls) in steps else 1.0)

    return loss


def test_nan_stops_the_run_before_the_weights_are_spoilt():
    config = make_config(local_batch_size=4)
    with pytest.raises(RuntimeError, match="step 3: loss nan"):
        Run(config, compute_loss_func=nan_loss_at({3}))


def test_nan_step_is_skipped_when_asked_and_leaves_the_weights_finite():
    config = make_config(local_batch_size=4, use_skip_step_on_nan=True, max_consecutive_skipped_steps=2)
    run = Run(config, max_steps=6, compute_loss_func=nan_loss_at({3, 5}))
    assert (run.state.global_step, run.state.skipped_steps, run.optimizer.updates) == (6, 2, 4)
    assert all(np.isfinite(array).all() for array in run.weights().values())


def test_too_many_skipped_steps_in_a_row_end_the_run():
    config = make_config(local_batch_size=4, use_skip_step_on_nan=True, max_consecutive_skipped_steps=2)
    with pytest.raises(RuntimeError, match="step 4: .*2 steps in a row"):
        Run(config, compute_loss_func=nan_loss_at({3, 4}))


def test_clipping_bounds_what_reaches_the_optimizer(monkeypatch):
    norms = []
    monkeypatch.setattr(
        AdamW, "step", lambda self, grads, lr: norms.append(sum(float((g * g).sum().asnumpy()) for g in grads) ** 0.5)
    )
    run = Run(make_config(max_norm=0.01), max_steps=2)
    assert norms == pytest.approx([0.01, 0.01], rel=1e-4)
    assert run.state.log_history[0]["grad_norm"] > 0.01


def test_samples_without_a_label_are_refused():
    dataset = PackedDataset(*(np.full((1, 4), value, np.int32) for value in (1, IGNORE_INDEX, 1)))
    with pytest.raises(ValueError, match="samples 0 to 1 hold no label"):
        accumulate(lambda batch, weight: (0.0, ()), dataset, 0, 2, 1)


def test_finished_run_has_nothing_to_train():
    run = Run(max_steps=2)
    again = Run(max_steps=2, snapshot=run.snapshot())
    assert again.losses == []
    assert_same_weights(again.weights(), run.weights())


def test_batch_size_ramps_up_with_the_data():
    options = make_config(rampup_batch_size=[2, 2, 30], global_batch_size=8).training
    sizes = [global_batch_size(options, consumed) for consumed in (0, 9, 10, 19, 20, 29, 30, 31)]
    assert sizes == [2, 2, 4, 4, 6, 6, 8, 8]


@pytest.mark.parametrize(
    "training",
    [
        {"global_batch_size": 3},
        {"global_batch_size": 1},
        {"local_batch_size": 0},
        {"rampup_batch_size": [3, 1, 10]},
        {"rampup_batch_size": [6, 2, 10]},
    ],
)
def test_batch_sizes_that_do_not_fit_are_refused(training):
    with pytest.raises(ValueError, match=r"training\.(global|rampup)_batch_size"):
        check_batch_sizes(make_config(**training).training)


def test_progress_of_a_foreign_checkpoint_is_read_or_refused():
    state = TrainerState.from_common({"global_step": 5, "global_batch_size": 8}, 9)
    assert (state.global_step, state.consumed_samples, state.max_steps) == (5, 40, 9)
    with pytest.raises(ValueError, match="global_step"):
        TrainerState.from_common({"consumed_samples": 8}, 9)
    with pytest.raises(ValueError, match="consumed_samples"):
        TrainerState.from_common({"global_step": 5}, 9)


@pytest.mark.parametrize("key", ["global_step", "global_batch_size", "consumed_samples", "epoch_num"])
@pytest.mark.parametrize("value", ["7", -1, 1.5, True, [], 10**30])
def test_a_damaged_counter_is_named(key, value):
    good = {"global_step": 5, "global_batch_size": 8, "consumed_samples": 40, "epoch_num": 1}
    with pytest.raises(ValueError, match=f"^saved/common.json: {key} must be a whole number"):
        TrainerState.from_common({**good, key: value}, 9, "saved/common.json")
