"""Renders the chat templates of tests/data/chat_templates with transformers and writes what came out.

python tests/oracle/make_chat_templates.py
"""

import json
import pathlib

from transformers.utils.chat_template_utils import _normalize_chat_messages, render_jinja_template

FOLDER = pathlib.Path(__file__).parents[1] / "data" / "chat_templates"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
CHATS = {
    "one user": [{"role": "user", "content": "What is  2 + 2?\n"}],
    "system first": [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "hé \u2028 <b>&"}],
    "several turns": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": " b ", "tool_calls": None},
        {"role": "user", "content": "c d"},
    ],
    "roles in the wrong order": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
    "tools and reasoning": [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "",
            "reasoning": "look it up",
            "tool_calls": [{"function": {"name": "weather", "arguments": {"town": "Köln", "days": [1, 2.5, None]}}}],
        },
        {"role": "tool", "content": '{"rain": true}'},
        {"role": "assistant", "content": "Rain."},
        {"role": "user", "content": "Thanks"},
        {"role": "user", "content": "Bye"},
    ],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "image"}], "hidden": True}],
    "no content": [{"role": "user"}],
}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "It's <wet>"}}]


def render(template: str, messages: list, tools: list | None) -> dict[str, str]:
    try:
        messages = _normalize_chat_messages(messages)
        rendered, _ = render_jinja_template(
            conversations=[messages], tools=tools, chat_template=template, add_generation_prompt=True, **TOKENS
        )
    except Exception as error:
        return {"error": str(error)}
    return {"text": rendered[0]}


def main() -> None:
    cases = []
    for path in sorted(FOLDER.glob("*.jinja")):
        for name, messages in CHATS.items():
            tools = TOOLS if "tools" in name else None
            answer = render(path.read_text(encoding="utf-8"), messages, tools)
            cases.append({"template": path.name, "chat": name, "messages": messages, "tools": tools, **answer})
    text = json.dumps({"special_tokens": TOKENS, "cases": cases}, ensure_ascii=False, indent=1)
    (FOLDER / "rendered.json").write_text(text + "\n", encoding="utf-8")
    print(len(cases), "cases,", sum("error" in case for case in cases), "of them errors")


if __name__ == "__main__":
    main()
