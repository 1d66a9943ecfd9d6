"""Messages become the text that transformers would make of them, and the same text tomorrow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raytest.chat_template import ChatTemplateError, find_template, renderer, special_tokens
from raytest.errors import UsageError

MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]


def render(template: str, messages: list[dict[str, str]] = MESSAGES, **tokens: str) -> str:
    return renderer(template, tokens)(messages)


def test_special_tokens_are_those_of_the_tokenizer(tmp_path: Path) -> None:
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokens = special_tokens(tmp_path)
    assert tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    template = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    assert render(template, **tokens) == "<s>Hi</s>"


def test_blocks_leave_no_line_of_their_own() -> None:
    condition = "    {% if m.role == 'user' %}\n{{ m.content }}\n    {% endif %}\n"
    template = "{% for m in messages %}\n" + condition + "{% endfor %}"
    assert render(template) == "Hi\n"


def test_filters_loops_and_tags_are_those_of_transformers() -> None:
    assert render("{{ {'b': 'é<', 'a': 1} | tojson }}") == '{"b": "é<", "a": 1}'
    loop = "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}x{% endfor %}"
    assert render(loop) == "x"
    tagged = "{% generation %}{{ messages[1].content }}{% endgeneration %}!"
    assert render(tagged) == "Yes!"
    assert render("{% if add_generation_prompt and not tools %}go{% endif %}") == "go"


def test_a_template_never_sees_todays_date() -> None:
    template = "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% else %}fixed{% endif %}"
    assert render(template) == "fixed"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].nothing.more }}", "nothing"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ 1 / 0 }}", "zero"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
    ],
)
def test_messages_that_a_template_refuses_are_an_error_of_their_own(
    template: str, said: str
) -> None:
    made = renderer(template, {})
    with pytest.raises(ChatTemplateError, match=said):
        made(MESSAGES)


def test_a_template_that_does_not_parse_is_refused_before_any_message() -> None:
    with pytest.raises(UsageError, match="chat template: ") as caught:
        renderer("{% for %}", {})
    assert not isinstance(caught.value, ChatTemplateError)


def test_the_templates_own_file_wins_then_the_one_named_default(tmp_path: Path) -> None:
    assert find_template(tmp_path) is None
    config = tmp_path / "tokenizer_config.json"
    named = [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}]
    for found, expected in (("T", "T"), (named, "D"), (named[:1], None), (7, None)):
        config.write_text(json.dumps({"chat_template": found}))
        assert find_template(tmp_path) == expected
    config.write_text("[]")
    assert find_template(tmp_path) is None
    (tmp_path / "chat_template.jinja").write_text("F", encoding="utf-8")
    assert find_template(tmp_path) == "F"
