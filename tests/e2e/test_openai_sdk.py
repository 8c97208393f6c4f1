"""The OpenAI Python SDK, unmodified, against the router."""

import openai
import pytest

from cluster import chat


@pytest.fixture
def client(cluster):
    return openai.OpenAI(base_url=cluster.url + "/v1", api_key="none", max_retries=0)


@pytest.fixture
def model(client):
    return client.models.list().data[0].id


def test_completes(client, model):
    answer = client.chat.completions.create(model=model, **chat())
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_streams_what_it_completes(client, model):
    whole = client.chat.completions.create(model=model, **chat())
    pieces, usage, reason = [], None, None
    for chunk in client.chat.completions.create(model=model, stream=True, stream_options={"include_usage": True}, **chat()):
        if chunk.choices:
            pieces.append(chunk.choices[0].delta.content or "")
            reason = chunk.choices[0].finish_reason or reason
        usage = chunk.usage or usage
    assert "".join(pieces) == whole.choices[0].message.content
    assert reason == whole.choices[0].finish_reason
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_text_completions(client, model):
    answer = client.completions.create(model=model, prompt="int main(", max_tokens=8, temperature=0)
    assert answer.object == "text_completion"
    assert answer.choices[0].text


def test_logprobs_and_choices(client, model):
    answer = client.chat.completions.create(model=model, logprobs=True, top_logprobs=3, n=2, seed=1, **{**chat(), "temperature": 1})
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert len(choice.logprobs.content[0].top_logprobs) == 3
        assert all(entry.logprob <= 0 for entry in choice.logprobs.content)


def test_errors_are_the_sdks_own(client, model):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=model, messages=[])
    assert caught.value.body["param"] == "messages"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="no-such-model", **chat())
