"""Tools, structured output, reasoning, Responses and Messages, by OpenAI's and Anthropic's SDKs, against an engine that
has them (scripted_engine.py): whole at one worker, and with prefill and decode apart."""

import contextlib
import types

import anthropic
import openai
import pytest

from cluster import Server, chat, metric, wait_until
from scripted_engine import ARGUMENTS, MODEL, SCHEMA_ANSWER, TEXT, THOUGHT, ScriptedEngine

KEY = "sk-of-a-client"
ASK = [{"role": "user", "content": "Hi"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
SCHEMA = {"type": "object", "properties": {"answer": {"type": "integer"}}}
CHAT_TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
MESSAGE_TOOLS = [{"name": "weather", "input_schema": PARAMETERS}]
RESPONSE_TOOLS = [{"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": False}]


@pytest.fixture(scope="module", params=["plain", "pd"])
def fleet(request, tmp_path_factory):
    tmp = tmp_path_factory.mktemp("other_apis")
    keys = tmp / "keys.txt"
    keys.write_text(f"client:{KEY}\n")
    roles = ["worker"] if request.param == "plain" else ["prefill", "decode"]
    with contextlib.ExitStack() as ending:
        engines = [ending.enter_context(ScriptedEngine()) for _ in roles]
        urls = [arg for role, engine in zip(roles, engines) for arg in (f"--{role}", engine.url)]
        router = Server("router", *urls, "--api-keys-file", keys, "--failures-until-out", 100, log=tmp / "router.log")
        ending.callback(router.stop)
        router.wait_ready("/ready")
        yield types.SimpleNamespace(url=router.url, first=engines[0], last=engines[-1], split=len(engines) == 2)


@pytest.fixture
def client(fleet):
    return openai.OpenAI(base_url=fleet.url + "/v1", api_key=KEY, max_retries=0)


@pytest.fixture
def claude(fleet):
    return anthropic.Anthropic(base_url=fleet.url, api_key=KEY, max_retries=0)


def was_split(fleet, path):
    """Whether the last request to `path` got its KV from another worker."""
    return "kv_transfer_params" in fleet.last.bodies(path)[-1]


def test_chat_calls_tools(client, fleet):
    answer = client.chat.completions.create(model=MODEL, messages=ASK, tools=CHAT_TOOLS, tool_choice="required")
    call = answer.choices[0].message.tool_calls[0]
    assert (call.function.name, call.function.arguments, answer.choices[0].finish_reason) == ("weather", ARGUMENTS, "tool_calls")
    pieces = []
    for chunk in client.chat.completions.create(model=MODEL, messages=ASK, tools=CHAT_TOOLS, stream=True):
        pieces += [c.function.arguments for c in chunk.choices[0].delta.tool_calls or []]
    assert "".join(pieces) == ARGUMENTS
    assert was_split(fleet, "/v1/chat/completions") == fleet.split


def test_chat_follows_schemas_and_reasons(client, fleet):
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    answer = client.chat.completions.create(model=MODEL, messages=ASK, response_format=form, reasoning_effort="low")
    assert answer.choices[0].message.content == SCHEMA_ANSWER
    assert answer.choices[0].message.reasoning_content == "".join(THOUGHT)
    assert fleet.last.bodies("/v1/chat/completions")[-1]["response_format"] == form
    chunks = client.chat.completions.create(model=MODEL, messages=ASK, reasoning_effort="low", stream=True)
    thought = [getattr(chunk.choices[0].delta, "reasoning_content", None) for chunk in chunks]
    assert [piece for piece in thought if piece] == THOUGHT


def test_responses(client, fleet):
    path = "/v1/responses"
    whole = client.responses.create(model=MODEL, input="Hi", reasoning={"effort": "low"})
    assert whole.output_text == "".join(TEXT)
    assert whole.output[0].content[0].text == "".join(THOUGHT)
    assert whole.usage.output_tokens == 4
    events = list(client.responses.create(model=MODEL, input=ASK, instructions="Be brief.", stream=True))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "".join(TEXT)
    assert events[-1].type == "response.completed"
    with client.responses.stream(model=MODEL, input="Hi", tools=RESPONSE_TOOLS) as stream:
        assert stream.get_final_response().output[0].arguments == ARGUMENTS
    form = {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}
    assert client.responses.create(model=MODEL, input="Hi", text=form).output_text == SCHEMA_ANSWER
    assert not was_split(fleet, path)  # vLLM has no field for it there: the decode worker does it all
    assert len(fleet.last.bodies(path)) == 4
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_1")


def test_messages(claude, fleet):
    path = "/v1/messages"
    whole = claude.messages.create(model=MODEL, max_tokens=64, messages=ASK, system="Be brief.")
    assert whole.content[0].text == "".join(TEXT)
    assert (whole.stop_reason, whole.usage.input_tokens, whole.usage.output_tokens) == ("end_turn", 11, 4)
    thinking = {"type": "enabled", "budget_tokens": 1024}
    with claude.messages.stream(model=MODEL, max_tokens=2048, messages=ASK, thinking=thinking) as stream:
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text"]
    assert (final.content[0].thinking, final.content[1].text) == ("".join(THOUGHT), "".join(TEXT))
    with claude.messages.stream(model=MODEL, max_tokens=64, messages=ASK, tools=MESSAGE_TOOLS) as stream:
        final = stream.get_final_message()
    assert (final.stop_reason, final.content[0].name, final.content[0].input) == ("tool_use", "weather", {"city": "Rome"})
    assert was_split(fleet, path) == fleet.split
    forced = claude.messages.create(model=MODEL, max_tokens=64, messages=ASK, tools=MESSAGE_TOOLS, tool_choice={"type": "any"})
    assert forced.content[0].input == {"city": "Rome"}
    assert not was_split(fleet, path)  # vLLM cannot answer a prefill leg that has to call a tool
    assert claude.messages.count_tokens(model=MODEL, messages=ASK).input_tokens == 11
    headers = [headers for at, headers, _ in fleet.last.seen if at == path][-1]
    assert headers["anthropic-version"] and "x-api-key" not in headers


def test_broken_streams_are_the_sdks_own_errors(client, claude, fleet):
    broken = "break off, please"
    with pytest.raises(openai.APIError, match="broke off"):
        list(client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": broken}], stream=True))
    with pytest.raises(openai.APIError, match="broke off"):
        list(client.responses.create(model=MODEL, input=broken, stream=True))
    with pytest.raises(anthropic.APIStatusError, match="broke off") as caught:
        list(claude.messages.create(model=MODEL, max_tokens=9, messages=[{"role": "user", "content": broken}], stream=True))
    assert caught.value.body["error"]["type"] == "api_error"


def test_errors_are_the_sdks_own(fleet, claude):
    stranger = anthropic.Anthropic(base_url=fleet.url, api_key="sk-of-nobody", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError):
        stranger.messages.create(model=MODEL, max_tokens=9, messages=ASK)
    with pytest.raises(anthropic.NotFoundError) as caught:
        claude.messages.create(model="another", max_tokens=9, messages=ASK)
    assert caught.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError):
        claude.messages.create(model=MODEL, max_tokens=9, messages=ASK, extra_body={"kv_transfer_params": {"do_remote_prefill": True}})


def test_workers_without_these_apis_say_so(cluster):
    """The embedded worker: one that does both by itself, and prefill and decode apart."""
    for url in (cluster.url, cluster.both[0].url):
        client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
        model = client.models.list().data[0].id
        with pytest.raises(openai.NotFoundError):
            client.responses.create(model=model, input="Hi")
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model=model, tools=CHAT_TOOLS, **chat())
        assert caught.value.param == "tools"
    claude = anthropic.Anthropic(base_url=cluster.url, api_key="none", max_retries=0)
    with pytest.raises(anthropic.NotFoundError) as caught:
        claude.messages.create(model=model, max_tokens=9, messages=ASK)
    assert caught.value.body["error"]["code"] == "endpoint_not_served"
    wait_until(lambda: metric(cluster.url, "kindred_router_requests_in_flight") == 0, 10, "nothing in flight")
