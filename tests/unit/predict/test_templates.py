"""Prompt and chat templates: what they render, whose text wins, and that none can do harm."""

import json
import pathlib
import shutil
import signal

import pytest

from mindformers_ext.predict import (
    PromptTemplates,
    TemplateLimitError,
    Tokenizer,
    normalize_input,
    read_templates,
    run_generation,
    templates,
)

DATA = pathlib.Path(__file__).parents[2] / "data"
RENDERED = json.loads((DATA / "chat_templates" / "rendered.json").read_text(encoding="utf-8"))


def records(data, prompt=None, chat=None, **options):
    make_prompt = PromptTemplates(prompt, chat, **options).prompt_maker("instruction")
    return list(normalize_input(data, make_prompt=make_prompt))


def prompts(data, prompt=None, chat=None, **options):
    return [record.prompt for record in records(data, prompt, chat, **options)]


def test_chat_templates_give_the_text_and_the_errors_of_transformers():
    tokens = RENDERED["special_tokens"]
    for name in sorted({case["template"] for case in RENDERED["cases"]}):
        cases = [case for case in RENDERED["cases"] if case["template"] == name]
        text = (DATA / "chat_templates" / name).read_text(encoding="utf-8")
        data = [{"messages": case["messages"], "tools": case["tools"]} for case in cases]
        found = records(data, chat=text, special_tokens=tokens)
        for case, record in zip(cases, found, strict=True):
            if "error" in case:
                assert record.error.type == "template" and case["error"] in record.error.message
            else:
                assert record.prompt == case["text"], (name, case["chat"])
                assert not record.add_special_tokens
                assert record.fields["messages"] == case["messages"]


def test_a_prompt_template_takes_any_field_and_the_record_itself():
    template = "{{ question }} ({{ record['due date'] }}){% for word in list %} {{ word }}{% endfor %}\n"
    data = {"question": "q?", "due date": 7, "list": ["a", "b"]}
    (record,) = records(data, template)
    assert record.prompt == "q? (7) a b" and record.fields == data and record.add_special_tokens
    assert prompts({"record": "mine", "instruction": "x"}, "{{ record }}") == ["mine"]
    assert prompts("plain text", "Q: {{ instruction }}\nA:") == ["Q: plain text\nA:"]


def test_half_a_surrogate_pair_nul_and_long_text_pass_through_a_template():
    text = "\ud800\x00\u2028" + "x" * 1_000_000
    assert prompts([text], "{{ instruction }}") == [text]


@pytest.mark.parametrize(
    ("template", "fields", "word"),
    [
        ("{{ absent }}", {}, "'absent' is undefined"),
        ("{% if absent %}x{% endif %}", {}, "'absent' is undefined"),
        ("{{ a.b }}", {"a": {}}, "no attribute 'b'"),
        ("{{ a + 1 }}", {"a": "x"}, "TypeError"),
        ("{{ 1 / a }}", {"a": 0}, "ZeroDivisionError"),
        ("{{ raise_exception('not ' ~ a) }}", {"a": "this"}, "not this"),
        ("{{ a }}", {"a": ""}, "empty prompt"),
    ],
)
def test_what_a_record_lacks_is_an_error_record_and_its_neighbours_live(template, fields, word):
    bad, good = records([fields, {"good": 1}], "{% if record.good is defined %}ok{% else %}" + template + "{% endif %}")
    assert bad.error.type == "template" and word in bad.error.message and bad.fields == fields
    assert good.prompt == "ok"


def test_the_chat_template_gets_what_the_prompt_would_have_been():
    chat = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ '<bot>' if add_generation_prompt }}"
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert prompts({"instruction": "a", "input": "b"}, chat=chat) == ["<user>a\nb<bot>"]
    assert prompts({"messages": messages, "instruction": "a"}, chat=chat) == ["<system>s<user>u<bot>"]
    assert prompts({"messages": messages, "x": "y"}, "{{ x }}{{ messages|length }}", chat) == ["<user>y2<bot>"]


@pytest.mark.parametrize("messages", [[], "hi", None, ["hi"], {"role": "user"}])
def test_messages_that_are_no_conversation_are_a_schema_error(messages):
    (record,) = records({"messages": messages}, chat="{{ messages }}")
    assert record.error.type == "schema" and "'messages' must be an array of objects" in record.error.message


def test_messages_without_a_chat_template_say_what_to_set():
    (record,) = records({"messages": [{"role": "user", "content": "u"}]})
    assert record.error.type == "schema" and "predict.chat_template" in record.error.message


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(DATA / "tokenizer", tmp_path / "t")
    return tmp_path / "t"


def change(path, **values):
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_auto_takes_the_file_then_the_config_and_of_several_the_default(folder):
    config = folder / "tokenizer_config.json"
    change(config, chat_template=[{"name": "rag", "template": "R"}, {"name": "default", "template": "D{{ 1 }}"}])
    assert read_templates(None, "auto", folder).chat == "D{{ 1 }}"
    change(config, chat_template="C")
    assert read_templates(None, "auto", folder).chat == "C"
    (folder / "chat_template.jinja").write_bytes(b"\xef\xbb\xbfF\r\n{{ 2 }}")
    assert read_templates(None, "auto", folder).chat == "F\n{{ 2 }}"
    assert read_templates(None, str(folder / "chat_template.jinja")).chat == "F\n{{ 2 }}"
    assert read_templates(None, "none", folder).chat is None


@pytest.mark.parametrize("value", [None, 3, [], [{"name": "rag", "template": "x"}], ["x"]])
def test_auto_without_a_template_is_refused(folder, value):
    change(folder / "tokenizer_config.json", chat_template=value)
    with pytest.raises(ValueError, match="auto finds none"):
        read_templates(None, "auto", folder)


def test_templates_that_cannot_be_meant_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("plain.txt").write_text("the same for every record")
    pathlib.Path("bytes.txt").write_bytes(b"{{ a }}\xff")
    pathlib.Path("long.txt").write_text("{{ a }}" * 1_000_000)
    pathlib.Path("good.txt").write_text("{{ a }}\n")
    for name, kind, word in (
        ("gone.txt", FileNotFoundError, "no file 'gone.txt'"),
        ("plain.txt", ValueError, "every prompt is equal"),
        ("bytes.txt", ValueError, "not UTF-8 at byte 8"),
        ("long.txt", ValueError, "characters"),
    ):
        with pytest.raises(kind) as caught:
            read_templates(name, "none")
        assert word in str(caught.value) and "predict.prompt_template" in str(caught.value)
    assert read_templates("good.txt", "none").prompt == "{{ a }}\n"
    assert read_templates("{{ good.txt }}", "none").prompt == "{{ good.txt }}"
    with pytest.raises(ValueError, match=r"predict: a template is not valid: line 2: .*'endif'"):
        PromptTemplates("\n{% endif %}").prompt_maker("instruction")


def test_the_identity_changes_with_text_and_tokens_and_the_time_is_known_to_be_shown():
    plain = PromptTemplates("{{ a }}")
    assert plain.identity() == PromptTemplates("{{ a }}", special_tokens={"bos_token": "x"}).identity()
    day = PromptTemplates("{{ strftime_now('%Y-%m-%d') }}")
    assert day.show_time and PromptTemplates(None, day.prompt).show_time and not plain.show_time
    assert prompts("x", day.prompt, now=day.now)[0] == day.now.date().isoformat()
    kinds = [plain, PromptTemplates("{{ b }}"), PromptTemplates(None, "{{ a }}"), day]
    kinds.append(PromptTemplates(None, "{{ a }}", {"bos_token": "x"}))
    assert len({json.dumps(kind.identity()) for kind in kinds}) == len(kinds)


def bos_tokenizer(folder):
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|im_end|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {"<|im_end|>": {"id": "<|im_end|>", "ids": [301], "tokens": ["<|im_end|>"]}},
    }
    backend = json.loads((folder / "tokenizer.json").read_text())
    template["special_tokens"]["<|im_end|>"]["ids"] = [
        next(token["id"] for token in backend["added_tokens"] if token["content"] == "<|im_end|>")
    ]
    change(folder / "tokenizer.json", post_processor=template)
    change(folder / "tokenizer_config.json", bos_token="<|im_end|>")
    return Tokenizer.from_folder(folder)


def test_a_chat_template_alone_decides_about_the_bos_and_nothing_has_two(folder):
    tokenizer = bos_tokenizer(folder)
    assert tokenizer.named_tokens["bos_token"] == "<|im_end|>"
    bos, plain = tokenizer.bos_token_id, tokenizer.encode("hi", add_special_tokens=False)
    expected = {
        (None, None): [bos, *plain],
        ("<|im_end|>{{ instruction }}", None): [bos, *plain],
        (None, "{{ bos_token }}{{ messages[0].content }}"): [bos, *plain],
        (None, "{{ messages[0].content }}"): plain,
    }
    seen = []

    def decode(batch, indices):
        seen.extend(batch)
        raise ValueError("enough")

    for prompt, chat in expected:
        source = records("hi", prompt, chat, special_tokens=tokenizer.named_tokens)
        run_generation(source, tokenizer, decode, batch_size=1, max_new_tokens=1)
    assert seen == list(expected.values())


# What a template may not do


@pytest.mark.parametrize(
    ("template", "word"),
    [
        ("{% for i in range(10**9) %}x{% endfor %}", "Range too big"),
        ("{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}", "turns of loops and calls"),
        ("{% for i in instruction * 5000 recursive %}{{ loop([]) }}{% endfor %}", "turns of loops and calls"),
        ("{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(40) }}", "turns of loops"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself without end"),
        ("{{ instruction * 2000 }}", "more than 1000 characters"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{{ '{0.__class__}'.format(instruction) }}", "unsafe"),
        ("{{ (instruction|attr('format')).__globals__ }}", "unsafe"),
        ("{% set x = namespace(__init__=1) %}{{ x }}", "underscore"),
        ("{% set x = namespace() %}{% set x.__class__ = 1 %}{{ x }}", "underscore"),
        ("{% include '/etc/passwd' %}{{ 1 }}", "no loader"),
        ("{% import '/etc/passwd' as x %}{{ 1 }}", "no loader"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ record.update(a=1) }}", "unsafe"),
    ],
)
def test_a_hostile_template_gives_an_error_record(monkeypatch, template, word):
    monkeypatch.setitem(templates.LIMITS, "steps", 2000)
    monkeypatch.setitem(templates.LIMITS, "characters", 1000)
    (record,) = records({"instruction": "ab", "messages": [1]}, template)
    assert record.error.type == "template" and word in record.error.message


@pytest.mark.parametrize("template", ["{{ [1, 2]|random }}", "{{ lipsum() }}"])
def test_a_template_cannot_draw_lots_because_ranks_would_differ(template):
    try:
        (record,) = records("x", template)
    except ValueError as error:
        assert "No filter named 'random'" in str(error)
    else:
        assert "'lipsum' is undefined" in record.error.message


@pytest.mark.parametrize("template", ["{{ instruction * 10**10 }}", "{{ instruction.center(10**10) }}"])
def test_a_template_that_wants_too_much_memory_ends_the_run(template):
    with pytest.raises(TemplateLimitError, match="took more memory than it may"):
        records("ab", template)


@pytest.mark.parametrize("template", ["{{ 9 ** (9 ** 9) }}", "{{ 9 ** (9 ** (7 + instruction|length)) }}"])
def test_a_template_that_takes_too_much_time_ends_the_run(monkeypatch, template):
    monkeypatch.setitem(templates.LIMITS, "seconds", 1)
    with pytest.raises(TemplateLimitError, match=r"took more time \(over 1 s\) than it may"):
        records("ab", template)


def worker_of(make_prompt):
    cells = [cell.cell_contents for cell in make_prompt.__closure__]
    return next(cell for cell in cells if isinstance(cell, templates._Worker))


def test_a_worker_that_is_gone_is_an_error_of_the_program_and_not_of_the_record():
    make_prompt = PromptTemplates("{{ instruction }}").prompt_maker("instruction")
    worker_of(make_prompt)._process.send_signal(signal.SIGKILL)
    with pytest.raises(RuntimeError, match="ended with code -9"):
        list(normalize_input("a", make_prompt=make_prompt))


def test_the_process_of_a_template_ends_with_its_prompts():
    make_prompt = PromptTemplates("{{ instruction }}").prompt_maker("instruction")
    process = worker_of(make_prompt)._process
    assert process.poll() is None
    del make_prompt
    assert process.returncode == -signal.SIGKILL
