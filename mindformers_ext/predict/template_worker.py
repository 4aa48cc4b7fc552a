"""Renders templates in a process of its own, so that whatever a template does can be bounded from outside.

    python -m mindformers_ext.predict.template_worker

Lines of JSON come in and go out. The first holds the templates and the limits; each one after it asks for a text. The
system ends the process when it takes too much of the processor, and refuses it memory beyond the limit.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

from jinja2 import StrictUndefined, TemplateError, TemplateSyntaxError, Undefined, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_COUNT = "counted_by_the_sandbox"


class _StepsError(TemplateError):
    """The template does more than it may."""


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, which counts turns of loops and calls: a number that is the same on every machine."""

    max_steps = 0
    steps = 0

    def _generate(self, source: nodes.Template, *args: Any, **options: Any) -> str:
        for loop in list(source.find_all(nodes.For)):
            counted = nodes.Filter(loop.iter, _COUNT, [], [], None, None, lineno=loop.lineno)
            loop.iter = counted.set_environment(self)
        return super()._generate(source, *args, **options)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as the base class
        __self.step()
        return super().call(__context, __obj, *args, **kwargs)

    def step(self) -> None:
        self.steps += 1
        if self.steps > self.max_steps:
            raise _StepsError(f"the template takes more than {self.max_steps} turns of loops and calls")

    def counted(self, values: Any) -> Any:
        # What cannot be walked through keeps its own error.
        return self._each(values) if hasattr(values, "__iter__") and not isinstance(values, Undefined) else values

    def _each(self, values: Any) -> Iterator[Any]:
        for value in values:
            self.step()
            yield value


class _Generation(Extension):
    """`{% generation %}`, with which templates mark what a model is trained on; its body is text like any other."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _PlainNamespace(Namespace):
    """`namespace()` without the names that Python uses for itself."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        for name in dict(*rest, **kwargs):
            _refuse_private(name)
        Namespace.__init__(self, *rest, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"the attribute {name!r} of a namespace begins with an underscore")


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own filter escapes what HTML needs escaped.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def build_environment(now: datetime, max_steps: int, strict: bool) -> _Environment:
    """Returns a sandbox with what transformers gives to chat templates, and without what draws lots.

    Args:
        now: the time that `strftime_now` shows.
        max_steps: turns of loops and calls of one rendering.
        strict: whether a variable that does not exist is an error wherever it is used.
    """
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined if strict else Undefined,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
    )
    environment.max_steps = max_steps
    del environment.filters["random"], environment.globals["lipsum"]
    environment.filters |= {"tojson": _tojson, _COUNT: environment.counted}
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": now.strftime,
        "dict": _dict,
        "namespace": _PlainNamespace,
    }
    return environment


def build_renderer(text: str, environment: _Environment, max_characters: int) -> Callable[[dict[str, Any]], str]:
    """Compiles a template.

    Returns:
        What makes a text of variables; it raises whatever the template brings about.

    Raises:
        TemplateSyntaxError: it is no template.
    """
    template = environment.from_string(text)

    def render(variables: dict[str, Any]) -> str:
        environment.steps = 0
        pieces, size = [], 0
        for piece in template.generate(variables):
            size += len(piece)
            if size > max_characters:
                raise TemplateError(f"the prompt has more than {max_characters} characters")
            pieces.append(piece)
        return "".join(pieces)

    return render


def _limit(seconds: int, memory: int) -> None:
    """Sets what the process may take from here on; the system kills it when the seconds are over."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    soft = int(used.ru_utime + used.ru_stime) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard < 0 else min(soft, hard), hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core file would hold prompts
    resource.setrlimit(resource.RLIMIT_AS, (memory, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _answer(render: Callable[[dict[str, Any]], str], variables: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"text": render(variables)}
    except MemoryError:
        return {"limit": "memory"}
    except RecursionError:
        return {"error": "the template calls itself without end"}
    except TemplateError as error:
        return {"error": error.message or type(error).__name__}
    except Exception as error:  # a template is a program: it can raise anything
        return {"error": f"{type(error).__name__}: {error}"}


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Serves until the input ends."""
    first = json.loads(sys.stdin.readline())
    limits = first["limits"]
    now = datetime.fromisoformat(first["now"])
    renderers = {}
    _limit(limits["seconds"], limits["memory"])
    for name, (text, is_chat) in first["templates"].items():
        environment = build_environment(now, limits["steps"], strict=not is_chat)
        try:
            renderers[name] = build_renderer(text, environment, limits["characters"])
        except TemplateSyntaxError as error:
            return _say({"error": f"line {error.lineno}: {error.message}"})
        except (RecursionError, MemoryError, SyntaxError, ValueError) as error:
            return _say({"error": f"it cannot be compiled: {type(error).__name__}"})
    _say({})
    for line in sys.stdin:
        name, variables = json.loads(line)
        _limit(limits["seconds"], limits["memory"])
        _say(_answer(renderers[name], variables))


if __name__ == "__main__":
    main()
