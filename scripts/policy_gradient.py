"""Teaches the quickstart's model, by rewards alone, to compute sums that are asked in words it has never seen.

    python scripts/policy_gradient.py

The shipped checkpoint answers ``37 + 45 =`` right; put ``The sum`` before it, and most of its answers are wrong: it has
learned where in a prompt the digits are. Each step here samples several answers to some prompts from the policy of the
moment (`model.generate`), rewards those that are right with 1 and all others with 0, and follows the gradient of the
expected reward. An answer's advantage is its reward minus the mean of the other answers to its prompt (leave-one-out
REINFORCE, Ahmadian et al., arXiv:2402.14740; GRPO's groups without its division by the deviation). No right answer is
ever shown, so what is learned comes from the rewards.

Before, between and after, `Trainer.inference` answers sums that neither the checkpoint was trained on nor this run
asks. One seed gives one course of the run. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import mindspore as ms
import numpy as np
from make_quickstart_data import TRAINED_SUMS, Question, split_sums, sums
from mindspore import Tensor, nn, ops

from mindformers_ext.config import load_config
from mindformers_ext.predict import Tokenizer
from mindformers_ext.trainer import Trainer
from mindformers_ext.trainer.optimizer import AdamW, clip_by_norm, global_norm

ROOT = Path(__file__).resolve().parent.parent
QUICKSTART = ROOT / "configs" / "quickstart"
WORDS = "The sum "
MOST_NEW_TOKENS = 5  # up to three digits and the end of the text


@dataclass(frozen=True)
class Rollout:
    """Sampled answers of one step, N in all, the answers to a prompt one after the other.

    Attributes:
        ids: int32 ``[N, S]``: prompt, answer and fill.
        answers: bool ``[N, S]``: which of the ids are those of answers.
        logprobs: float32 ``[N, S]``: log-probability of each answer's id when it was sampled; 0 elsewhere.
        texts: the answers.
    """

    ids: np.ndarray
    answers: np.ndarray
    logprobs: np.ndarray
    texts: list[str]


def quickstart_trainer(seed: int) -> Trainer:
    """Returns a training Trainer with the quickstart's weights."""
    settings = {
        "checkpoint.load_path": str(QUICKSTART / "checkpoint"),
        "checkpoint.enable_save": False,
        "training.seed": seed,
        "train_dataset.dataloader.path": str(QUICKSTART / "sums.jsonl"),
        "train_dataset.dataloader.tokenizer_path": str(QUICKSTART / "tokenizer"),
    }
    return Trainer(load_config(QUICKSTART / "train.yaml", settings))


def asked(questions: Sequence[Question]) -> list[Question]:
    """Returns the sums among questions, in the new words."""
    return [replace(question, prompt=WORDS + question.prompt) for question in questions if "+" in question.prompt]


def exact_match(trainer: Trainer, questions: Sequence[Question]) -> float:
    """Returns the share of questions whose greedy answer is right, the end of the text included."""
    tokenizer = tokenizer_of(trainer)
    prompts = [question.prompt for question in questions]
    answers = trainer.inference(prompts, max_new_tokens=MOST_NEW_TOKENS, batch_size=256, output="")
    right = 0
    for index, ids in answers:
        expected = tokenizer.encode(questions[index].prompt + questions[index].answer)
        right += ids == [*expected, *tokenizer.eos_token_ids]
    return right / len(questions)


def sample(model: nn.Cell, tokenizer: Tokenizer, questions: Sequence[Question], num_samples: int, seed: int) -> Rollout:
    """Draws ``num_samples`` answers to each question from the model's own distribution."""
    prompts = [tokenizer.encode(question.prompt) for question in questions]
    width = max(map(len, prompts))
    input_ids = np.zeros((len(prompts), width), np.int32)
    mask = np.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):  # generate() takes batches that are padded on the left
        input_ids[row, width - len(prompt) :] = prompt
        mask[row, width - len(prompt) :] = 1
    output = model.generate(
        Tensor(input_ids),
        attention_mask=Tensor(mask),
        max_new_tokens=MOST_NEW_TOKENS,
        eos_token_id=list(tokenizer.eos_token_ids),
        do_sample=True,
        top_k=0,  # with any filter the samples would not be the policy's
        seed=seed,
        num_return_sequences=num_samples,
        output_logprobs=1,
        return_dict_in_generate=True,
    )
    ids = np.zeros((len(output.rows), width + MOST_NEW_TOKENS), np.int32)
    answers, logprobs = np.zeros(ids.shape, bool), np.zeros(ids.shape, np.float32)
    texts = []
    for index, row in enumerate(output.rows):
        prompt = prompts[index // num_samples]
        start, end = len(prompt), len(prompt) + len(row.token_ids)
        ids[index, :start], ids[index, start:end] = prompt, row.token_ids
        answers[index, start:end] = True
        logprobs[index, start:end] = row.logprobs
        texts.append(tokenizer.decode(row.token_ids) if row.finish_reason == "eos" else "")
    return Rollout(ids, answers, logprobs, texts)


def advantages(rewards: np.ndarray) -> np.ndarray:
    """Returns each reward minus the mean of the others of its prompt, float32 ``[P, n]`` for rewards ``[P, n]``."""
    count = rewards.shape[1]
    others = (rewards.sum(axis=1, keepdims=True) - rewards) / (count - 1)
    return (rewards - others).astype(np.float32)


def policy_gradient(model: nn.Cell, parameters: list[ms.Parameter]) -> Callable[..., tuple[Tensor, tuple[Tensor, ...]]]:
    """Returns ``(ids, labels, sampled log-probabilities, weights) -> (loss, gradients)``.

    The loss is minus the weighted sum of ratios between the probabilities now and when the tokens were sampled. Right
    after sampling all ratios are 1, and the gradient is that of the expected reward.
    """

    def loss(ids: Tensor, labels: Tensor, sampled: Tensor, weights: Tensor) -> Tensor:
        logits = model(ids)["logits"]
        logprobs = ops.gather_d(ops.log_softmax(logits, -1), 2, labels.expand_dims(-1)).squeeze(-1)
        return -(ops.exp(logprobs - sampled) * weights).sum()

    return ms.value_and_grad(loss, None, parameters)


def batches(questions: Sequence[Question], size: int, seed: int) -> Iterator[list[Question]]:
    """Yields ``size`` questions again and again, each once before any comes twice."""
    order = random.Random(seed)
    left: list[Question] = []
    while True:
        if len(left) < size:
            left += order.sample(list(questions), len(questions))
        yield [left.pop() for _ in range(size)]


def train_policy(
    trainer: Trainer, known: Sequence[Question], options: argparse.Namespace, report: Callable[[int], None]
) -> None:
    """Takes ``options.steps`` steps; ``report`` is called after each with the number of it, from 1."""
    model, tokenizer = trainer.model, tokenizer_of(trainer)
    model.set_train(True)
    optimizer = AdamW(model.trainable_params(), weight_decay=0.0)
    gradient = policy_gradient(model, optimizer.params)
    source = batches(known, options.prompts, options.seed)
    for step in range(1, options.steps + 1):
        questions = next(source)
        rollout = sample(model, tokenizer, questions, options.samples, seed=options.seed * 100_003 + step)
        expected = np.repeat([question.answer for question in questions], options.samples)
        rewards = (np.array(rollout.texts) == expected).reshape(len(questions), options.samples)
        weights = rollout.answers * advantages(rewards.astype(np.float32)).reshape(-1, 1) / rewards.size
        _, gradients = gradient(
            Tensor(rollout.ids[:, :-1]),
            Tensor(rollout.ids[:, 1:]),
            Tensor(rollout.logprobs[:, 1:]),
            Tensor(weights[:, 1:]),
        )
        norm = global_norm(gradients)
        optimizer.step(clip_by_norm(gradients, norm, 1.0), options.learning_rate)
        print(f"step {step}/{options.steps}: mean reward {rewards.mean():.3f}, gradient norm {norm:.3f}", flush=True)
        report(step)


def tokenizer_of(trainer: Trainer) -> Tokenizer:
    """Returns the trainer's tokenizer, which it has as the configuration names one."""
    assert trainer.tokenizer is not None
    return trainer.tokenizer


def main() -> None:
    """Trains, samples and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="updates (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=32, help="prompts of a step (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=8, help="answers to each, from 2 (default: %(default)s)")
    parser.add_argument("--learning_rate", type=float, default=1e-4, help="default: %(default)s")
    parser.add_argument("--questions", type=int, default=300, help="held-out sums of an exam (default: %(default)s)")
    parser.add_argument("--interval", type=int, default=10, help="steps between two exams (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of everything (default: %(default)s)")
    options = parser.parse_args()

    trained, others = (asked(part) for part in split_sums(sums(), TRAINED_SUMS))
    limits = {"steps": (1, None), "prompts": (1, len(trained)), "samples": (2, None), "interval": (1, None)}
    for name, (least, most) in {**limits, "questions": (1, len(others))}.items():
        value = getattr(options, name)
        if value < least or (most is not None and value > most):
            parser.error(
                f"--{name} must be at least {least}{'' if most is None else f' and at most {most}'}, not {value}"
            )
    held_out = random.Random(options.seed).sample(others, options.questions)
    trainer = quickstart_trainer(options.seed)
    before = exact_match(trainer, held_out)
    print(f"exact match on {len(held_out)} sums that are never trained: {before:.1%} (CPU {time.process_time():.0f} s)")
    scores = {0: before}

    def report(step: int) -> None:
        if step % options.interval == 0 or step == options.steps:
            scores[step] = exact_match(trainer, held_out)
            print(f"exact match after step {step}: {scores[step]:.1%} (CPU {time.process_time():.0f} s)", flush=True)

    train_policy(trainer, trained, options, report)
    after = scores[options.steps]
    print(f"exact match {before:.1%} -> {after:.1%}: {100 * (after - before):+.1f} points")
    result = {"before": before, "after": after, "exams": scores, "cpu_seconds": round(time.process_time(), 1)}
    print(json.dumps(result | vars(options)))


if __name__ == "__main__":
    main()
