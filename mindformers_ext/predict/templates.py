"""Prompt and chat templates: where their text comes from, and prompts made with them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from mindformers_ext.predict.records import MakePrompt, Prompt, RecordError, field_prompt, json_kind
from mindformers_ext.predict.strict_json import parse_json

MAX_TEMPLATE_CHARACTERS = 1 << 20
# What one rendering may take. The first two are the same on every rank, so they make an error record; the others end
# the run, because ranks that do not agree on a record would wait for each other.
LIMITS = {"steps": 200_000, "characters": 1 << 24, "seconds": 5, "memory": 2 << 30}

_MARKS = ("{{", "{%", "{#")
_CHAT_FILE = "chat_template.jinja"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_NO_CHAT = "none"
_FROM_FOLDER = "auto"
_REASONING = ("reasoning_content", "thinking", "reasoning")


class TemplateLimitError(RuntimeError):
    """A template took more time or memory than it may."""


@dataclass(frozen=True)
class PromptTemplates:
    """The templates of a run.

    Attributes:
        prompt: text of the prompt template, None without one.
        chat: text of the chat template, None without one.
        special_tokens: variables of a chat template: "bos_token" and its kind.
        now: what `strftime_now` shows, for all records of a run.
        may_be_empty: whether a prompt without text is one.
    """

    prompt: str | None = None
    chat: str | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    now: datetime = field(default_factory=lambda: datetime.now().replace(microsecond=0))
    may_be_empty: bool = False

    @property
    def show_time(self) -> bool:
        """Whether the prompts depend on `now`."""
        return any("strftime_now" in (text or "") for text in (self.prompt, self.chat))

    def identity(self) -> dict[str, Any]:
        """Returns what makes the prompts of two runs equal, the time aside."""
        tokens = dict(self.special_tokens) if self.chat is not None else {}
        return {"prompt_template": self.prompt, "chat_template": self.chat, "special_tokens": tokens}

    def prompt_maker(self, dataset_field: str) -> MakePrompt:
        """Returns what makes prompts of fields; see `normalize_input`.

        The text is that of the prompt template, or of `field_prompt` without one. A chat template turns it into the
        message of a user; without a prompt template it takes the messages of a record that has a list of them.

        Raises:
            ValueError: a template cannot be compiled.
            TemplateLimitError: compiling one takes too much; making a prompt raises it too.
        """
        if self.prompt is None and self.chat is None:
            return field_prompt(dataset_field, self.may_be_empty)
        worker = _Worker(self)
        plain = field_prompt(dataset_field, self.may_be_empty)

        def make(fields: dict[str, Any]) -> Prompt | RecordError:
            messages: Any = None
            if self.prompt is not None:
                text = worker.render("prompt_template", {"record": fields, **fields})
                prompt = text if isinstance(text, RecordError) else Prompt(text)
            elif "messages" in fields:
                messages = _messages(fields["messages"])
                prompt = messages if isinstance(messages, RecordError) else Prompt("")
            else:
                prompt = plain(fields)
            if isinstance(prompt, RecordError):
                return prompt
            if self.chat is not None:
                variables = {
                    **self.special_tokens,
                    "messages": messages or [{"role": "user", "content": prompt.text}],
                    "tools": _list_or_none(fields, "tools"),
                    "documents": _list_or_none(fields, "documents"),
                    "add_generation_prompt": True,
                }
                text = worker.render("chat_template", variables)
                if isinstance(text, RecordError):
                    return text
                prompt = Prompt(text, add_special_tokens=False)
            if prompt.text or self.may_be_empty:
                return prompt
            return RecordError("template", "the template gives an empty prompt")

        return make


def read_templates(
    prompt_template: str | None,
    chat_template: str,
    folder: str | os.PathLike[str] | None = None,
    special_tokens: Mapping[str, str] | None = None,
) -> PromptTemplates:
    """Finds the text of the templates.

    Args:
        prompt_template: the text, which has a `{{`, `{%` or `{#`, or the path of a file that holds it; None for none.
        chat_template: `none`, the path of a file, or `auto`: what lies in `folder` (chat_template.jinja, or else
            chat_template in tokenizer_config.json, of several the one named "default").
        folder: the folder of the tokenizer.
        special_tokens: name and content of the tokenizer's special tokens.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: no template in the folder, a text that has no place for a field, or one that is too long.
    """
    prompt = chat = None
    if prompt_template is not None:
        is_text = any(mark in prompt_template for mark in _MARKS)
        prompt = prompt_template if is_text else _read_text(Path(prompt_template), "predict.prompt_template")
        if not any(mark in prompt for mark in _MARKS):
            raise ValueError(
                f"predict.prompt_template: {prompt_template!r} has no {{{{ field }}}}; every prompt is equal"
            )
    if chat_template == _FROM_FOLDER:
        chat = _chat_template_of(folder)
    elif chat_template != _NO_CHAT:
        chat = _read_text(Path(chat_template), "predict.chat_template")
    for name, text in (("prompt_template", prompt), ("chat_template", chat)):
        if text is not None and len(text) > MAX_TEMPLATE_CHARACTERS:
            raise ValueError(f"predict.{name}: the template has more than {MAX_TEMPLATE_CHARACTERS} characters")
    return PromptTemplates(prompt, chat, dict(special_tokens or {}))


def _read_text(path: Path, key: str) -> str:
    if not path.is_file():
        hint = " (a template text has a {{ field }})" if key == "predict.prompt_template" else ""
        raise FileNotFoundError(f"{key}: there is no file {str(path)!r}{hint}")
    with open(path, "rb") as file:
        data = file.read(4 * MAX_TEMPLATE_CHARACTERS + 4)  # one that is cut here is too long anyway
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{key}: {path} is not UTF-8 at byte {error.start + 1}") from None


def _chat_template_of(folder: str | os.PathLike[str] | None) -> str:
    if folder is None:
        raise ValueError("predict.chat_template: auto needs a checkpoint folder; name the template's file")
    path = Path(folder) / _CHAT_FILE
    if path.is_file():
        return _read_text(path, "predict.chat_template")
    path = Path(folder) / _TOKENIZER_CONFIG
    found: Any = None
    if path.is_file():
        config = parse_json(path.read_bytes())
        found = config.get("chat_template") if isinstance(config, dict) else None
    if isinstance(found, list):  # several templates, each with a name
        entries = [entry for entry in found if isinstance(entry, dict)]
        found = next((entry.get("template") for entry in entries if entry.get("name") == "default"), None)
    if not isinstance(found, str):
        raise ValueError(
            f"predict.chat_template: auto finds none in {folder}: neither {_CHAT_FILE} nor chat_template in "
            f"{_TOKENIZER_CONFIG}; use none, or name the template's file"
        )
    return found


def _messages(value: Any) -> list[dict[str, Any]] | RecordError:
    """The messages as transformers gives them to a template: without nulls, and reasoning under all of its names."""
    if not isinstance(value, list) or not value or not all(isinstance(message, dict) for message in value):
        kind = "an empty array" if value == [] else json_kind(value)
        return RecordError("schema", f"field 'messages' must be an array of objects, not {kind}")
    result = []
    for message in value:
        message = {key: content for key, content in message.items() if content is not None}
        reasoning = next((message[name] for name in _REASONING if name in message), None)
        if reasoning is not None:
            message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        result.append(message)
    return result


def _list_or_none(fields: Mapping[str, Any], name: str) -> list[Any] | None:
    value = fields.get(name)
    return value if isinstance(value, list) else None


class _Worker:
    """The process that renders; it ends with this object, or when this process does."""

    def __init__(self, templates: PromptTemplates) -> None:
        paths = [os.path.abspath(path) for path in sys.path if path]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mindformers_ext.predict.template_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a traceback would show prompts
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            # Python looks for modules where it starts; the folder of the caller may be that of a model.
            cwd=Path(__file__).parents[2],
            start_new_session=True,  # Ctrl-C is for this process, which may want to finish its batch
        )
        self._end = weakref.finalize(self, _end, self._process)
        texts = {"prompt_template": (templates.prompt, False), "chat_template": (templates.chat, True)}
        given = {name: value for name, value in texts.items() if value[0] is not None}
        answer = self._ask({"now": templates.now.isoformat(), "limits": LIMITS, "templates": given})
        if "error" in answer:
            raise ValueError(f"predict: a template is not valid: {answer['error']}")

    def render(self, name: str, variables: dict[str, Any]) -> str | RecordError:
        """Returns the text, or why there is none.

        Raises:
            TemplateLimitError: it takes too much time or memory.
        """
        answer = self._ask([name, variables])
        if "error" in answer:
            return RecordError("template", f"{name}: {answer['error']}")
        return answer["text"]

    def _ask(self, request: Any) -> dict[str, Any]:
        to, back = _pipes(self._process)
        try:
            to.write(json.dumps(request).encode() + b"\n")
            to.flush()
            line = back.readline()
        except BrokenPipeError:
            line = b""
        answer = json.loads(line) if line else {"limit": self._why_it_ended()}
        if "limit" in answer:
            raise TemplateLimitError(f"predict: a template took more {answer['limit']} than it may for one record")
        return answer

    def _why_it_ended(self) -> str:
        code = self._process.wait()
        if code == -signal.SIGXCPU:
            return f"time (over {LIMITS['seconds']} s)"
        raise RuntimeError(
            f"predict: the process that renders templates ended with code {code}; is the package jinja2 installed?"
        )


def _pipes(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    assert process.stdin is not None and process.stdout is not None
    return process.stdin, process.stdout


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in _pipes(process):
        pipe.close()
