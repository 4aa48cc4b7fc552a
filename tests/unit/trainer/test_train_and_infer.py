"""One process, both states: train() and inference() on one model, in any order, leave nothing in each other."""

import gc
import random
import tracemalloc

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from mindformers_ext.generate import GenerateMixin
from mindformers_ext.models.cache import LayerState
from mindformers_ext.trainer import Trainer
from mindformers_ext.trainer.callbacks import TrainerCallback
from tests.unit.trainer.test_train_families import FAMILIES, configuration
from tests.unit.trainer.test_trainer_train import _folder, config, losses, same, weights  # noqa: F401

PROMPTS = ["1 + 2 =", "4 + 4 =", "0 + 3 = and so on"]
MODES = {
    "greedy": {},
    "sampling": {"do_sample": True, "seed": 3, "num_return_sequences": 2},
    "drawn seed": {"do_sample": True},
    "beams": {"num_beams": 3},
}


def moments(trainer):
    return {name: value.copy() for name, value in trainer._run.optimizer.state_dict().items()}


def modes_of(model):
    return [
        (name, cell.training, cell.phase, dict(getattr(cell, "_func_graph_flags", {})))
        for name, cell in model.cells_and_names()
    ]


def random_states():
    return [random.getstate(), repr(np.random.get_state()), ms.get_rng_state().asnumpy().tolist()]


def caches_in_memory():
    gc.collect()
    return sum(issubclass(type(thing), LayerState) for thing in gc.get_objects())


def predicted(folder, prompts=PROMPTS, max_new_tokens=6):
    settings = {"run_mode": "predict", "checkpoint": {"load_path": folder}, "inference": {}}
    return Trainer(settings).inference(prompts, max_new_tokens=max_new_tokens, batch_size=2, output="")


def test_ten_steps_inference_and_ten_more_equal_twenty_to_the_last_digit():
    whole = Trainer(config(checkpoint={"save_path": "whole"}))
    whole.train()
    halves = Trainer(config())
    untrained = halves.inference(PROMPTS, max_new_tokens=6, output="")
    halves.train(until=10)
    assert halves.state.global_step == 10
    between = [halves.inference(PROMPTS, max_new_tokens=6, batch_size=2, output="", **mode) for mode in MODES.values()]
    halves.train()
    after = halves.inference(PROMPTS, max_new_tokens=6, batch_size=2, output="")
    assert losses(halves.state) == losses(whole.state)
    same(weights(halves), weights(whole))
    same(moments(halves), moments(whole))
    assert halves.state.to_common() == whole.state.to_common()
    # The weights are those of the moment.
    assert between[0] == predicted("saved/iteration_00000010")
    assert after == predicted("saved") == whole.inference(PROMPTS, max_new_tokens=6, batch_size=2, output="")
    assert len({repr(answers) for answers in (untrained, between[0], after)}) > 1


@pytest.mark.parametrize("until", [0, -1, 21, 2.5, True, "x"])
def test_a_step_to_end_after_is_one_of_the_run(until):
    trainer = Trainer(config(checkpoint={"enable_save": False}))
    with pytest.raises(ValueError, match=rf"until must be a step from 1 to training.steps \(20\), not {until!r}"):
        trainer.train(until=until)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_answers_with_the_weights_of_the_moment(family, tmp_path, monkeypatch):
    """Kernels may keep what they made of the weights; no such copy may be older than the weights."""
    monkeypatch.chdir(tmp_path)
    settings = configuration(family)
    settings["training"]["steps"], settings["lr_scheduler"]["learning_rate"] = 4, 5e-2
    prompts = ["The capital of France is", "37 + 45 ="]
    trainer = Trainer(settings)
    answers = [trainer.inference(prompts, max_new_tokens=8, output="")]
    for step in (2, 4):
        trainer.train(until=step)
        answers.append(trainer.inference(prompts, max_new_tokens=8, output=""))
    assert answers[2] == predicted("saved", prompts, 8)
    assert answers[0] != answers[1]


@pytest.mark.parametrize("mode", MODES)
def test_inference_leaves_modes_of_cells_and_random_states_as_they_were(mode):
    trainer = Trainer(config(checkpoint={"enable_save": False}))
    trainer.model.set_train(True)
    trainer.model.decoder.layers[0].set_train(False)
    before = modes_of(trainer.model), random_states()
    trainer.inference(PROMPTS, max_new_tokens=3, output="", **MODES[mode])
    assert (modes_of(trainer.model), random_states()) == before


def test_a_callback_may_train_on_after_a_generation_that_failed():
    class Fails(TrainerCallback):
        def on_step_end(self, args, state, **kwargs):
            def broken(input_ids, scores):
                raise KeyError("a plug-in of the user's")

            before = modes_of(kwargs["model"]), random_states()
            with pytest.raises(RuntimeError, match="a plug-in of the user's"):
                kwargs["model"].generate(Tensor([[1, 2]], ms.int32), max_new_tokens=2, logits_processor=[broken])
            assert (modes_of(kwargs["model"]), random_states()) == before
            assert caches_in_memory() == 0

    whole, asked = (
        Trainer(config(checkpoint={"enable_save": False}, training={"steps": 4}), callbacks=callbacks)
        for callbacks in ([], [Fails()])
    )
    assert losses(asked.train()) == losses(whole.train())
    same(weights(asked), weights(whole))


def test_generate_in_a_callback_equals_inference_and_changes_no_training():
    class Samples(TrainerCallback):
        def __init__(self):
            self.answers = []

        def on_step_begin(self, args, state, **kwargs):
            output = kwargs["model"].generate(
                Tensor([[5, 6, 7], [8, 9, 10]], ms.int32),
                max_new_tokens=4,
                do_sample=True,
                seed=state.global_step,
                num_return_sequences=2,
                output_logprobs=1,
                return_dict_in_generate=True,
            )
            assert all(np.isfinite(row.logprobs).all() for row in output.rows)
            self.answers.append(output.sequences.asnumpy().tolist())

    samples = Samples()
    whole, asked = (
        Trainer(config(checkpoint={"enable_save": False}, training={"steps": 4}), callbacks=callbacks)
        for callbacks in ([], [samples])
    )
    assert losses(asked.train()) == losses(whole.train())
    same(weights(asked), weights(whole))
    assert len(samples.answers) == 4 and samples.answers[0] != samples.answers[3]


class Dropping(GenerateMixin, nn.Cell):
    """A model with dropout: one matrix from a token to the next one's logits."""

    def __init__(self):
        super().__init__()
        self.table = ms.Parameter(Tensor(np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)), "table")
        self.dropout = nn.Dropout(p=0.5)

    def construct(self, input_ids):
        return ops.gather(self.dropout(self.table), input_ids, 0)


def test_generation_neither_drops_nor_disturbs_what_dropout_draws():
    def run(asks):
        ms.set_seed(1)
        model, ids = Dropping(), Tensor([[1, 2, 3]], ms.int32)
        model.set_train(True)
        step = ms.value_and_grad(lambda: model(ids).sum(), None, [model.table])
        seen = []
        for _ in range(3):
            loss, (gradient,) = step()
            seen.append((float(loss.asnumpy()), gradient.asnumpy().tolist()))
            if asks:
                answers = [model.generate(ids, max_new_tokens=5).asnumpy().tolist() for _ in range(3)]
                assert answers[0] == answers[1] == answers[2] and model.dropout.training
        return seen

    assert run(asks=True) == run(asks=False)
    assert len({loss for loss, _ in run(asks=False)}) == 3  # dropout was on


def test_inference_gives_back_all_the_memory_that_it_took():
    trainer = Trainer(config(checkpoint={"enable_save": False}, training={"steps": 4}))
    trainer.train(until=2)
    prompts = [f"{number} and {number} and {number} and {number}" for number in range(200)]

    def ask():
        trainer.inference(prompts, max_new_tokens=4, batch_size=200, output="", collect=False)
        assert caches_in_memory() == 0

    ask()  # what is made once: compiled patterns, buffers of kernels
    tracemalloc.start()
    try:
        ask()
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        for _ in range(3):
            ask()
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    taken = peak - before
    assert taken > 1 << 20
    assert after - before < taken / 50
    trainer.train()
