"""The OpenAI Python SDK."""

import asyncio
import json

import openai
import pydantic

from checks import ASK, TOOLS, Checks, raises

checks = Checks(openai.__version__)
check = checks.check
text = openai.OpenAI(base_url=checks.text + "/v1", api_key="none", max_retries=0)
engine = openai.OpenAI(base_url=checks.engine + "/v1", api_key="none", max_retries=0)
GREEDY = {"model": checks.model, "messages": ASK, "max_tokens": 24, "temperature": 0}


class Answer(pydantic.BaseModel):
    answer: int


@check
def models():
    assert [model.id for model in text.models.list()] == [checks.model]
    assert text.models.retrieve(checks.model).id == checks.model


@check
def whole_and_stream_agree():
    whole = text.chat.completions.create(**GREEDY)
    pieces, usage = [], None
    for chunk in text.chat.completions.create(**GREEDY, stream=True, stream_options={"include_usage": True}):
        pieces += [choice.delta.content or "" for choice in chunk.choices]
        usage = chunk.usage or usage
    assert whole.choices[0].message.content and "".join(pieces) == whole.choices[0].message.content
    assert usage == whole.usage or usage.total_tokens == whole.usage.total_tokens


@check
def text_completions():
    assert text.completions.create(model=checks.model, prompt="int main(", max_tokens=8).choices[0].text


@check
def logprobs_and_several_choices():
    answer = text.chat.completions.create(**{**GREEDY, "temperature": 1}, logprobs=True, top_logprobs=3, n=2, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert all(len(choice.logprobs.content[0].top_logprobs) == 3 for choice in answer.choices)


@check
def errors_are_typed():
    assert raises(openai.BadRequestError, lambda: text.chat.completions.create(model=checks.model, messages=[])).param == "messages"
    assert raises(openai.NotFoundError, lambda: text.chat.completions.create(**{**GREEDY, "model": "none"})).code == "model_not_found"
    refused = raises(openai.BadRequestError, lambda: text.chat.completions.create(**GREEDY, tools=TOOLS))
    assert refused.param == "tools"  # the embedded worker has none, and says so
    raises(openai.NotFoundError, lambda: text.responses.create(model=checks.model, input="Hi"))


@check
def abort_in_a_stream():
    stream = text.chat.completions.create(**{**GREEDY, "max_tokens": 900}, stream=True)
    for number, _ in enumerate(stream):
        if number == 2:
            break
    stream.close()
    checks.wait_idle()


@check
def async_client():
    async def ask():
        async with openai.AsyncOpenAI(base_url=checks.text + "/v1", api_key="none", max_retries=0) as client:
            answers = await asyncio.gather(*(client.chat.completions.create(**GREEDY) for _ in range(4)))
            return {answer.choices[0].message.content for answer in answers}

    assert len(asyncio.run(ask())) == 1


@check
def tools():
    call = engine.chat.completions.create(model=checks.engine_model, messages=ASK, tools=TOOLS).choices[0].message.tool_calls[0]
    assert json.loads(call.function.arguments) == {"city": "Rome"}
    with engine.chat.completions.stream(model=checks.engine_model, messages=ASK, tools=TOOLS) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.tool_calls[0].function.name == "weather"


@check
def structured_output():
    answer = engine.chat.completions.parse(model=checks.engine_model, messages=ASK, response_format=Answer)
    assert answer.choices[0].message.parsed == Answer(answer=42)


@check
def reasoning():
    answer = engine.chat.completions.create(model=checks.engine_model, messages=ASK, reasoning_effort="low")
    assert answer.choices[0].message.reasoning_content == "Let me see."


@check
def responses_api():
    assert engine.responses.create(model=checks.engine_model, input="Hi").output_text == "Hello, world."
    with engine.responses.stream(model=checks.engine_model, input="Hi", reasoning={"effort": "low"}) as stream:
        assert stream.get_final_response().output_text == "Hello, world."
    assert engine.responses.parse(model=checks.engine_model, input="Hi", text_format=Answer).output_parsed == Answer(answer=42)


@check
def a_broken_stream_raises():
    broken = [{"role": "user", "content": "break off"}]
    raises(openai.APIError, lambda: list(engine.chat.completions.create(model=checks.engine_model, messages=broken, stream=True)))
    raises(openai.APIError, lambda: list(engine.responses.create(model=checks.engine_model, input="break off", stream=True)))
