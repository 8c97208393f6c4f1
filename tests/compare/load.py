"""Clients that stream chats on kept-alive connections at times that are drawn beforehand, and look at the clock."""

import asyncio
import dataclasses
import json
import random
import time

WORDS = (
    "the model reads a long prompt and thinks about which of its experts knows most of ships winds and tides".split()
)


@dataclasses.dataclass
class Plan:
    """One run's requests; the same seed gives the same ones at the same times."""

    model: str
    requests: int
    per_s: float
    prompt_words: int
    max_tokens: int
    seed: int
    path: str = "/v1/chat/completions"

    def draw(self):
        rng, at_s = random.Random(self.seed), 0.0
        for i in range(self.requests):
            at_s += rng.expovariate(self.per_s)
            words = [f"{self.seed}.{i}"] + rng.choices(
                WORDS, k=rng.randint(self.prompt_words // 2, 3 * self.prompt_words // 2)
            )
            body = {"model": self.model, "messages": [{"role": "user", "content": " ".join(words)}], "stream": True,
                    "max_tokens": self.max_tokens, "temperature": 0, "ignore_eos": True}  # fmt: skip
            yield at_s, json.dumps(body).encode()


@dataclasses.dataclass
class Outcome:
    ttft_s: list
    tpot_s: list
    failed: list  # why
    wall_s: float = 0
    tokens: int = 0


class Client:
    def __init__(self, port, path):
        self._port, self._path, self._idle = port, path, []

    async def chat(self, body, out):
        reader, writer = self._idle.pop() if self._idle else await asyncio.open_connection("127.0.0.1", self._port)
        head = f"POST {self._path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        sent_s = time.perf_counter()
        writer.write(head.encode() + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in answer.split(b"\r\n")[0]:
            writer.close()
            out.failed.append(answer.split(b"\r\n")[0].decode())
            return
        first_s = last_s = None
        pieces, done, rest = 0, False, b""
        if b"chunked" not in answer.lower():
            writer.close()
            out.failed.append("not chunked")
            return
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            rest += (await reader.readexactly(size + 2))[:-2]
            while b"\n\n" in rest:
                event, _, rest = rest.partition(b"\n\n")
                if event == b"data: [DONE]":
                    done = True
                elif has_text(event):
                    last_s = time.perf_counter()
                    first_s = first_s or last_s
                    pieces += 1
        await reader.readuntil(b"\r\n")
        self._idle.append((reader, writer))
        if not done or pieces == 0:
            out.failed.append("no [DONE]" if not done else "no text")
            return
        out.ttft_s.append(first_s - sent_s)
        out.tokens += pieces
        if pieces > 1:
            out.tpot_s.append((last_s - first_s) / (pieces - 1))

    def close(self):
        for _, writer in self._idle:
            writer.close()


def has_text(event):
    if not event.startswith(b"data: {"):
        return False
    choices = json.loads(event[6:]).get("choices") or [{}]
    return bool(choices[0].get("delta", {}).get("content"))


async def _run(port, plan):
    out, client = Outcome([], [], []), Client(port, plan.path)
    began_s = time.perf_counter()

    async def one(at_s, body):
        await asyncio.sleep(max(0, began_s + at_s - time.perf_counter()))
        try:
            await asyncio.wait_for(client.chat(body, out), 120)
        except (OSError, ValueError, asyncio.IncompleteReadError, TimeoutError) as error:
            out.failed.append(type(error).__name__)

    await asyncio.gather(*(one(at_s, body) for at_s, body in plan.draw()))
    out.wall_s = time.perf_counter() - began_s
    client.close()
    return out


def run(port, plan):
    return asyncio.run(_run(port, plan))
