"""scripts/policy_gradient.py: its mathematics, and that one seed gives one course."""

import argparse
import importlib
import pathlib

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, ops

SCRIPTS = pathlib.Path(__file__).parents[3] / "scripts"


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        yield importlib.import_module("policy_gradient")


@pytest.fixture
def trainer(script):
    return script.quickstart_trainer(seed=1)


def questions(script, count):
    trained, _ = script.split_sums(script.sums(), script.TRAINED_SUMS)
    return script.asked(trained)[:count]


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--samples", "1", "--samples must be at least 2"),
        ("--interval", "0", "--interval must be at least 1"),
        ("--questions", "100000", "--questions must be at least 1 and at most"),
    ],
)
def test_sizes_that_cannot_be_are_refused_at_once(script, monkeypatch, capsys, flag, value, message):
    monkeypatch.setattr("sys.argv", ["policy_gradient.py", flag, value])
    with pytest.raises(SystemExit, match="2"):
        script.main()
    assert message in capsys.readouterr().err


def test_an_advantage_is_what_a_reward_has_over_the_others_of_its_prompt(script):
    rewards = np.array([[1, 0, 0], [1, 1, 1]], np.float32)
    np.testing.assert_allclose(script.advantages(rewards), [[1, -0.5, -0.5], [0, 0, 0]])


def test_exams_ask_what_no_phase_trains(script):
    trained, others = (script.asked(part) for part in script.split_sums(script.sums(), script.TRAINED_SUMS))
    assert not {question.prompt for question in trained} & {question.prompt for question in others}
    assert len(trained) > 4000 and len(others) > 2000
    assert all(question.prompt.startswith("The sum ") and "+" in question.prompt for question in others)


def test_log_probabilities_of_samples_are_those_of_the_training_forward(script, trainer):
    trainer.model.set_train(True)
    asked = questions(script, 3)
    rollout = script.sample(trainer.model, trainer.tokenizer, asked, 2, seed=5)
    again = script.sample(trainer.model, trainer.tokenizer, asked, 2, seed=5)
    assert rollout.texts == again.texts and len(rollout.texts) == 6
    logits = trainer.model(Tensor(rollout.ids))["logits"]
    logprobs = ops.log_softmax(logits, -1).asnumpy()[:, :-1]
    expected = np.take_along_axis(logprobs, rollout.ids[:, 1:, None].astype(np.int64), axis=2)[..., 0]
    answers = rollout.answers[:, 1:]
    np.testing.assert_allclose(rollout.logprobs[:, 1:][answers], expected[answers], atol=1e-4)
    for index, row in enumerate(rollout.ids):
        prompt = trainer.tokenizer.encode(asked[index // 2].prompt)
        assert row[~rollout.answers[index]][: len(prompt)].tolist() == prompt


def test_the_gradient_is_that_of_the_expected_reward(script, trainer):
    model = trainer.model
    parameters = [model.embedding.word_embeddings.weight]
    ids = Tensor(np.array([[5, 6, 7, 8]], np.int32))
    labels = Tensor(np.array([[6, 7, 8, 9]], np.int32))
    weights = np.array([[0, 0, 0.5, -1.0]], np.float32)

    def surrogate(ids):
        logprobs = ops.log_softmax(model(ids)["logits"], -1)
        return -(ops.gather_d(logprobs, 2, labels.expand_dims(-1)).squeeze(-1) * Tensor(weights)).sum()

    _, (expected,) = ms.value_and_grad(surrogate, None, parameters)(ids)
    logprobs = ops.log_softmax(model(ids)["logits"], -1).asnumpy()
    sampled = np.take_along_axis(logprobs, labels.asnumpy()[..., None].astype(np.int64), axis=2)[..., 0]
    value, (gradient,) = script.policy_gradient(model, parameters)(ids, labels, Tensor(sampled), Tensor(weights))
    largest = float(np.abs(expected.asnumpy()).max())
    np.testing.assert_allclose(gradient.asnumpy(), expected.asnumpy(), rtol=1e-3, atol=1e-4 * largest)
    assert largest > 1e-3
    assert float(value.asnumpy()) == pytest.approx(0.5, abs=1e-4)


def test_one_seed_gives_one_course(script, trainer, monkeypatch):
    # Two steps of a few prompts may have no reward that differs within a prompt, and so no gradient.
    monkeypatch.setattr(script, "advantages", lambda rewards: rewards - np.float32(0.5))
    options = argparse.Namespace(steps=2, prompts=4, samples=4, learning_rate=1e-4, seed=1)
    known, steps = questions(script, 40), []
    script.train_policy(trainer, known, options, steps.append)
    other = script.quickstart_trainer(seed=1)
    script.train_policy(
        other, known, options, lambda step: script.exact_match(other, known[:4])
    )  # exams change nothing
    start = script.quickstart_trainer(seed=1)
    assert steps == [1, 2]
    models = [one.model.parameters_dict() for one in (trainer, other, start)]
    weights = [{name: value.asnumpy() for name, value in model.items()} for model in models]
    for name, values in weights[0].items():
        np.testing.assert_array_equal(values, weights[1][name])
    assert any((values != weights[2][name]).any() for name, values in weights[0].items())
