"""Anthropic's Python SDK."""

import anthropic

from checks import ASK, PARAMETERS, Checks, raises

checks = Checks(anthropic.__version__)
check = checks.check
engine = anthropic.Anthropic(base_url=checks.engine, api_key="none", max_retries=0)
REQUEST = {"model": checks.engine_model, "max_tokens": 2048, "messages": ASK}
TOOLS = [{"name": "weather", "description": "The weather.", "input_schema": PARAMETERS}]


@check
def whole_and_stream_agree():
    whole = engine.messages.create(**REQUEST, system="Be brief.")
    with engine.messages.stream(**REQUEST, system="Be brief.") as stream:
        assert "".join(stream.text_stream) == whole.content[0].text == "Hello, world."


@check
def tools():
    with engine.messages.stream(**REQUEST, tools=TOOLS) as stream:
        assert stream.get_final_message().content[0].input == {"city": "Rome"}
    forced = engine.messages.create(**REQUEST, tools=TOOLS, tool_choice={"type": "tool", "name": "weather"})
    assert forced.content[0].input == {"city": "Rome"} and forced.stop_reason == "tool_use"


@check
def thinking():
    with engine.messages.stream(**REQUEST, thinking={"type": "enabled", "budget_tokens": 1024}) as stream:
        assert [block.type for block in stream.get_final_message().content] == ["thinking", "text"]


@check
def count_tokens():
    assert engine.messages.count_tokens(model=checks.engine_model, messages=ASK).input_tokens == 11


@check
def errors_are_typed():
    raises(anthropic.NotFoundError, lambda: engine.messages.create(**{**REQUEST, "model": "none"}))
    refused = {"extra_body": {"kv_transfer_params": {}}}
    raises(anthropic.BadRequestError, lambda: engine.messages.create(**REQUEST, **refused))
    text = anthropic.Anthropic(base_url=checks.text, api_key="none", max_retries=0)
    raises(anthropic.NotFoundError, lambda: text.messages.create(**{**REQUEST, "model": checks.model}))


@check
def a_broken_stream_raises():
    broken = {**REQUEST, "messages": [{"role": "user", "content": "break off"}]}
    raises(anthropic.APIStatusError, lambda: list(engine.messages.create(**broken, stream=True)))
