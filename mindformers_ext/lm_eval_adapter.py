"""The model ``mindformers_ext`` of lm-evaluation-harness.

    python -m mindformers_ext.lm_eval_adapter --model mindformers_ext --model_args config=predict.yaml --tasks NAME

It takes the arguments of the command ``lm_eval``, which finds no models of other packages by itself (0.4.13).
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mindformers_ext.config import load_config
from mindformers_ext.predict.pairs import cut_left, encode_pair
from mindformers_ext.predict.records import RecordError
from mindformers_ext.predict.templates import PromptTemplates, read_templates

if TYPE_CHECKING:
    from mindformers_ext.trainer import Trainer

logger = logging.getLogger(__name__)

NAME = "mindformers_ext"
# As lm-eval's own model of HuggingFace has them: new tokens where a task names none, the names for their number.
DEFAULT_NEW_TOKENS = 256
_NEW_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
# lm-eval seeds torch with it; it seeds sampling here unless generation.seed does.
DEFAULT_SEED = 1234
# What lm-eval asks for where its user does not say --device.
_DEFAULT_DEVICE = "cuda:0"
# Requests between two steps of the progress bar, in batches.
_BATCHES_AT_ONCE = 32


@dataclass(frozen=True)
class Decoding:
    """How a request wants its answer.

    Attributes:
        until: texts before which the answer ends.
        max_new_tokens: of the answer.
        options: of decoding, by transformers' names.
    """

    until: tuple[str, ...]
    max_new_tokens: int
    options: dict[str, Any]

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Decoding:
        """Reads the generation arguments of a task, as lm-eval's models do.

        Raises:
            ValueError: `until` is no text or list of texts.
        """
        options = dict(arguments)
        until = options.pop("until", None) or []
        until = [until] if isinstance(until, str) else until
        if not isinstance(until, list) or not all(isinstance(text, str) for text in until):
            raise ValueError(f"until must be a text or a list of texts, not {until!r}")
        given = [options.pop(name) for name in _NEW_TOKENS if options.get(name) is not None]
        number = int(given[0]) if given else DEFAULT_NEW_TOKENS
        for name in _NEW_TOKENS:
            options.pop(name, None)
        temperature = float(options.get("temperature") or 0.0)
        if options.setdefault("do_sample", temperature > 0) and not temperature:
            options.pop("temperature", None)
        if not options["do_sample"]:
            options = {name: value for name, value in options.items() if name not in ("temperature", "top_p", "top_k")}
        return cls(tuple(text for text in until if text), number, options)


class HarnessModel:
    """What lm-eval asks of a model, over a Trainer; knows nothing of lm-eval.

    In a job of several processes all of them call every method with the same arguments.

    Args:
        trainer: of a YAML with ``run_mode: predict``.
        batch_size: sequences that run together on a replica; None takes ``inference.batch_size``.
    """

    def __init__(self, trainer: Trainer, batch_size: int | None = None) -> None:
        from mindformers_ext.trainer.request import inference_options  # imports MindSpore

        assert trainer.tokenizer is not None
        self.trainer, self.tokenizer = trainer, trainer.tokenizer
        self.batch_size = inference_options(trainer.config, None, None, None, batch_size).batch_size
        length = getattr(trainer.model.config, "seq_length", None)
        if length is None:
            raise ValueError("the model's config does not give its length, which lm-eval needs")
        self.max_length: int = length
        self._chat: PromptTemplates | None = None

    def loglikelihood(self, requests: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Returns the log-likelihood of each continuation of a context, and whether greedy decoding would give it.

        What is too long loses the beginning of its context.

        Raises:
            ValueError: a continuation without tokens, or one that is longer than the model's length.
        """
        pairs = [
            cut_left(encode_pair(self.tokenizer, context, continuation), self.max_length)
            for context, continuation in requests
        ]
        found = self.trainer.score(pairs, batch_size=self.batch_size)
        return [(likelihood.total, likelihood.is_greedy) for likelihood in found]

    def loglikelihood_rolling(self, texts: Sequence[str]) -> list[float]:
        """Returns the log-likelihood of each text, in windows of the model's length."""
        ids = [self.tokenizer.encode(text) for text in texts]
        return self.trainer.score_rolling(ids, max_length=self.max_length, batch_size=self.batch_size)

    def generate_until(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """Returns the answer to each context, cut before the first of its stop texts.

        A context that leaves no room for the answer loses its beginning.

        Raises:
            ValueError: as many new tokens as the model has positions, or an option that decoding does not have.
        """
        groups: dict[str, list[int]] = {}
        for number, (_, arguments) in enumerate(requests):
            groups.setdefault(repr(sorted(arguments.items())), []).append(number)
        found: dict[int, str] = {}
        for numbers in groups.values():
            decoding = Decoding.of(requests[numbers[0]][1])
            found |= zip(numbers, self._answers([requests[number][0] for number in numbers], decoding), strict=True)
        return [found[number] for number in range(len(requests))]

    def _answers(self, contexts: list[str], decoding: Decoding) -> list[str]:
        from mindformers_ext.trainer.answering import answer_ids

        room = self.max_length - decoding.max_new_tokens
        if room < 1:
            raise ValueError(
                f"{decoding.max_new_tokens} new tokens leave no room for a context in the model's {self.max_length}; "
                "give fewer with --gen_kwargs max_gen_toks=N"
            )
        prompts = [self.tokenizer.encode(context) for context in contexts]
        if cut := sum(len(ids) > room for ids in prompts):
            logger.warning(
                "%d of %d contexts are longer than %d tokens and lose their beginning", cut, len(prompts), room
            )
        options = dict(decoding.options)
        if options["do_sample"] and "seed" not in options and self.trainer.config.generation.seed is None:
            options["seed"] = DEFAULT_SEED
        completions = answer_ids(
            self.trainer,
            [ids[-room:] for ids in prompts],
            max_new_tokens=decoding.max_new_tokens,
            batch_size=self.batch_size,
            stop_strings=list(decoding.until) or None,
            **options,
        )
        ends = [*decoding.until, *(self.tokenizer.decode([token], False) for token in self.tokenizer.eos_token_ids)]
        answers = []
        for completion in completions:
            text = self.tokenizer.decode(completion.token_ids)
            for end in filter(None, ends):
                text = text.split(end)[0]
            answers.append(text)
        return answers

    def apply_chat_template(self, history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """Returns the messages as the prompt that the checkpoint's chat template makes of them.

        Raises:
            ValueError: there is no such template, or it fails on the messages.
            NotImplementedError: the last message is the beginning of an answer.
        """
        if not add_generation_prompt:
            raise NotImplementedError(
                "answers that begin in the prompt (gen_prefix) are not supported with a chat template"
            )
        prompt = self._templates().prompt_maker("messages")({"messages": [dict(message) for message in history]})
        if isinstance(prompt, RecordError):
            raise ValueError(f"the chat template fails: {prompt.message}")
        return prompt.text

    def chat_template(self) -> str:
        """Returns the text of the checkpoint's chat template."""
        return self._templates().chat or ""

    def _templates(self) -> PromptTemplates:
        if self._chat is None:
            from mindformers_ext.trainer.model import tokenizer_folder

            folder = tokenizer_folder(self.trainer.config)
            self._chat = read_templates(None, "auto", folder, self.tokenizer.named_tokens)
        return self._chat


def open_model(config: str, batch_size: Any = None, **arguments: Any) -> HarnessModel:
    """Makes the model of ``--model_args config=predict.yaml,section.key=value``.

    Args:
        config: path of the YAML.
        batch_size: of lm-eval, whose default is 1; 1 and ``auto`` take ``inference.batch_size``.
        **arguments: values of keys of the YAML, by dotted names.

    Raises:
        ValueError: an argument that is no key, a batch size out of range, or a mistake in the YAML.
    """
    size = _batch_size(batch_size)
    for name, default in (("max_batch_size", None), ("device", _DEFAULT_DEVICE)):
        if arguments.pop(name, None) not in (None, default):
            logger.warning("no effect on this model: %s", name)
    unknown = sorted(name for name in arguments if "." not in name)
    if unknown:
        raise ValueError(f"--model_args: {unknown[0]} is neither config nor section.key of the YAML")
    arguments["inference.input_data"] = None  # tasks bring the input along
    loaded = load_config(config, arguments)
    if loaded.run_mode != "predict":
        raise ValueError(f"{config}: lm-eval needs run_mode: predict, not {loaded.run_mode}")
    if loaded.predict.prompt_template is not None or loaded.predict.chat_template != "none":
        logger.warning("no effect under lm-eval, whose tasks make the prompts: predict.prompt_template, chat_template")
        loaded = load_config(config, {**arguments, "predict.prompt_template": None, "predict.chat_template": "none"})
    from mindformers_ext.trainer import Trainer  # imports MindSpore

    return HarnessModel(Trainer(loaded), size)


def _batch_size(given: Any) -> int | None:
    """Returns the number of sequences that lm-eval's user asks for, None for that of the YAML."""
    text = str(given)
    if given is None or text.startswith("auto"):
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"--batch_size must be a positive integer or auto, not {text}")
    return None if int(text) == 1 else int(text)


def register() -> type:
    """Tells lm-eval of the model, and returns its class.

    Raises:
        ModuleNotFoundError: lm-eval is not installed.
    """
    import lm_eval.models  # noqa: F401  the registry fills itself only while it is empty
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
    from tqdm import tqdm

    @register_model(NAME)
    class MindFormersLM(LM):
        """See `open_model` for the arguments."""

        def __init__(self, config: str, batch_size: Any = None, **arguments: Any) -> None:
            super().__init__()
            self.model = open_model(config, batch_size, **arguments)

        def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            return self._ask("loglikelihood", requests, disable_tqdm)

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
            return self._ask("loglikelihood_rolling", requests, disable_tqdm)

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            return self._ask("generate_until", requests, disable_tqdm)

        def _ask(self, method: str, requests: list[Any], disable_tqdm: bool) -> list[Any]:
            """Asks in parts, whose answers lm-eval's cache has before the next one begins."""
            arguments = [request.args for request in requests]
            size = _BATCHES_AT_ONCE * self.model.batch_size
            found: list[Any] = []
            with tqdm(total=len(arguments), desc=method, disable=disable_tqdm or _rank() > 0) as bar:
                for start in range(0, len(arguments), size):
                    part = arguments[start : start + size]
                    texts = [one[0] for one in part] if method == "loglikelihood_rolling" else part
                    answers = getattr(self.model, method)(texts)
                    for one, answer in zip(part, answers, strict=True):
                        self.cache_hook.add_partial(method, one, answer)
                    found += answers
                    bar.update(len(part))
            return found

        @property
        def tokenizer_name(self) -> str:
            return str(self.model.trainer.config.checkpoint.load_path).replace("/", "__")

        def chat_template(self, chat_template: bool | str = False) -> str:
            if isinstance(chat_template, str):
                raise ValueError(f"--apply_chat_template {chat_template}: the template is that of the checkpoint")
            return self.model.chat_template() if chat_template else ""

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            return self.model.apply_chat_template(chat_history, add_generation_prompt)

    return MindFormersLM


def _rank() -> int:
    return int(os.environ.get("RANK_ID", "0"))


def main() -> int:
    """Runs lm-eval's command on the arguments of this process; returns 1 after a message if it is not installed."""
    try:
        register()
        from lm_eval.__main__ import cli_evaluate
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "lm_eval":
            raise
        if {"-h", "--help"} & set(sys.argv):
            print(__doc__)
        print("error: lm-eval is not installed: pip install 'mindformers_ext[lm_eval]'", file=sys.stderr)
        return 1
    # Each process of a job has all requests and gives all answers; lm-eval lets only LOCAL_RANK 0 report them.
    os.environ.setdefault("LOCAL_RANK", str(_rank()))
    cli_evaluate()
    return 0


if __name__ == "__main__":
    sys.exit(main())
