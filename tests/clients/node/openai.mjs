// The OpenAI Node SDK. One line of JSON for each check, as tests/clients/checks.py has it.
import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { parseArgs } from 'node:util';
import OpenAI from 'openai';

const { values } = parseArgs({ options: { text: { type: 'string' }, engine: { type: 'string' } } });
const say = (line) => console.log(JSON.stringify(line));
const { version } = JSON.parse(readFileSync(new URL('./node_modules/openai/package.json', import.meta.url)));
say({ version: `${version}, Node ${process.versions.node}` });

const common = { apiKey: 'none', maxRetries: 0 };
const text = new OpenAI({ ...common, baseURL: `${values.text}/v1` });
const engine = new OpenAI({ ...common, baseURL: `${values.engine}/v1` });
const model = (await text.models.list()).data[0].id;
const engineModel = (await engine.models.list()).data[0].id;
const ask = [{ role: 'user', content: 'Write a short story about the sea.' }];
const greedy = { model, messages: ask, max_tokens: 24, temperature: 0 };
const parameters = { type: 'object', properties: { city: { type: 'string' } } };
const tools = [{ type: 'function', function: { name: 'weather', parameters } }];

async function check(name, run) {
  try {
    await run();
    say({ check: name, ok: true });
  } catch (error) {
    say({ check: name, ok: false, error: `${error.name}: ${error.message}`.slice(0, 500) });
  }
}

async function collect(stream) {
  const out = [];
  for await (const piece of stream) out.push(piece);
  return out;
}

async function waitIdle() {
  const end = Date.now() + 20000;
  while (Date.now() < end) {
    const status = await (await fetch(`${values.text}/status`)).json();
    if (status.workers.every((worker) => worker.in_flight === 0)) return;
    await new Promise((done) => setTimeout(done, 50));
  }
  assert.fail('a request that its client gave up is still at a worker');
}

await check('models', async () => assert.equal((await text.models.retrieve(model)).id, model));

await check('whole and stream agree', async () => {
  const whole = await text.chat.completions.create(greedy);
  const chunks = await collect(await text.chat.completions.create({ ...greedy, stream: true, stream_options: { include_usage: true } }));
  const pieces = chunks.flatMap((chunk) => chunk.choices.map((choice) => choice.delta.content ?? ''));
  assert.ok(whole.choices[0].message.content);
  assert.equal(pieces.join(''), whole.choices[0].message.content);
  assert.equal(chunks.at(-1).usage.total_tokens, whole.usage.total_tokens);
});

await check('text completions', async () =>
  assert.ok((await text.completions.create({ model, prompt: 'int main(', max_tokens: 8 })).choices[0].text));

await check('logprobs and several choices', async () => {
  const answer = await text.chat.completions.create({ ...greedy, temperature: 1, logprobs: true, top_logprobs: 3, n: 2, seed: 1 });
  assert.deepEqual(answer.choices.map((choice) => choice.index), [0, 1]);
  assert.equal(answer.choices[1].logprobs.content[0].top_logprobs.length, 3);
});

await check('errors are typed', async () => {
  await assert.rejects(text.chat.completions.create({ ...greedy, messages: [] }), OpenAI.BadRequestError);
  await assert.rejects(text.chat.completions.create({ ...greedy, model: 'none' }), OpenAI.NotFoundError);
  await assert.rejects(text.chat.completions.create({ ...greedy, tools }), OpenAI.BadRequestError);
  await assert.rejects(text.responses.create({ model, input: 'Hi' }), OpenAI.NotFoundError);
});

await check('abort in a stream', async () => {
  const stream = await text.chat.completions.create({ ...greedy, max_tokens: 900, stream: true });
  let seen = 0;
  for await (const _ of stream) {
    seen += 1;
    if (seen === 3) stream.controller.abort();
  }
  await waitIdle();
});

await check('tools', async () => {
  const answer = await engine.chat.completions.create({ model: engineModel, messages: ask, tools });
  assert.equal(answer.choices[0].message.tool_calls[0].function.arguments, '{"city":"Rome"}');
  const final = await engine.chat.completions.stream({ model: engineModel, messages: ask, tools }).finalChatCompletion();
  assert.equal(final.choices[0].message.tool_calls[0].function.name, 'weather');
});

await check('structured output', async () => {
  const response_format = { type: 'json_schema', json_schema: { name: 'a', schema: { type: 'object' } } };
  const answer = await engine.chat.completions.create({ model: engineModel, messages: ask, response_format });
  assert.deepEqual(JSON.parse(answer.choices[0].message.content), { answer: 42 });
});

await check('reasoning', async () => {
  const answer = await engine.chat.completions.create({ model: engineModel, messages: ask, reasoning_effort: 'low' });
  assert.equal(answer.choices[0].message.reasoning_content, 'Let me see.');
});

await check('responses api', async () => {
  assert.equal((await engine.responses.create({ model: engineModel, input: 'Hi' })).output_text, 'Hello, world.');
  const events = await collect(await engine.responses.create({ model: engineModel, input: 'Hi', stream: true }));
  assert.equal(events.at(-1).type, 'response.completed');
});

await check('a broken stream raises', async () => {
  const messages = [{ role: 'user', content: 'break off' }];
  await assert.rejects(async () => collect(await engine.chat.completions.create({ model: engineModel, messages, stream: true })), OpenAI.APIError);
  await assert.rejects(async () => collect(await engine.responses.create({ model: engineModel, input: 'break off', stream: true })), OpenAI.APIError);
});
