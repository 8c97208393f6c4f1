"""LangChain's OpenAI client."""

import asyncio
import importlib.metadata

import openai
import pydantic
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI

from checks import Checks, raises

checks = Checks(importlib.metadata.version("langchain-openai"))
check = checks.check
COMMON = {"api_key": "none", "max_retries": 0}
TEXT = {**COMMON, "base_url": checks.text + "/v1", "model": checks.model, "temperature": 0, "max_tokens": 24}
ENGINE = {**COMMON, "base_url": checks.engine + "/v1", "model": checks.engine_model}
PROMPT = "Write a short story about the sea."


class Answer(pydantic.BaseModel):
    """An answer."""

    answer: int


@tool
def weather(city: str) -> str:
    """The weather in a city."""
    return city


@check
def invoke_and_stream_agree():
    whole = ChatOpenAI(**TEXT).invoke(PROMPT)
    pieces = [piece.content for piece in ChatOpenAI(**TEXT, stream_usage=True).stream(PROMPT)]
    assert whole.content and "".join(pieces) == whole.content
    assert whole.usage_metadata["output_tokens"] > 0


@check
def batch_and_async():
    chat = ChatOpenAI(**TEXT)
    assert len({answer.content for answer in chat.batch([PROMPT] * 3)}) == 1
    assert asyncio.run(chat.ainvoke(PROMPT)).content


@check
def text_completions():
    assert OpenAI(**TEXT).invoke("int main(")


@check
def errors_are_typed():
    raises(openai.NotFoundError, lambda: ChatOpenAI(**{**TEXT, "model": "none"}).invoke(PROMPT))


@check
def tools():
    answer = ChatOpenAI(**ENGINE).bind_tools([weather]).invoke(PROMPT)
    assert answer.tool_calls[0]["args"] == {"city": "Rome"}
    whole = None
    for piece in ChatOpenAI(**ENGINE).bind_tools([weather]).stream(PROMPT):
        whole = piece if whole is None else whole + piece
    assert whole.tool_calls[0]["args"] == {"city": "Rome"}


@check
def structured_output():
    structured = ChatOpenAI(**ENGINE).with_structured_output(Answer, method="json_schema")
    assert structured.invoke(PROMPT) == Answer(answer=42)


@check
def responses_api():
    chat = ChatOpenAI(**ENGINE, use_responses_api=True)
    assert chat.invoke(PROMPT).text == "Hello, world."
    assert "".join(piece.text for piece in chat.stream(PROMPT)) == "Hello, world."


@check
def a_broken_stream_raises():
    raises(openai.APIError, lambda: list(ChatOpenAI(**ENGINE).stream("break off")))
