"""Records a vLLM model's expert counts for `kindred fit` and `kindred simulate advise`.

    python -m kindred_vllm.record --url http://prefill:8000 --prompts prompts.jsonl --output activations.safetensors

Needs one server with the plugin (docs/deploy-vllm.md). Each prompt is answered; then its counts are asked for, and
those of prompt and answer together. The difference is what generating the answer used. Nobody fetches the KV of these
two, so the server holds it for its lease (30 s): run it beside little traffic.
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

TIMEOUT_S = 600


class Refused(RuntimeError):
    """The server answered with an error, or without counts."""


@dataclass
class Recorded:
    domain: str
    layers: list[int]
    top_k: int
    prompt_tokens: int
    decode_tokens: int
    prefill: np.ndarray  # [layers, experts]
    decode: np.ndarray


class Client:
    def __init__(self, url: str, model: str | None) -> None:
        self._url = url.rstrip("/")
        self.model = model or self._get("/v1/models")["data"][0]["id"]

    def tokens(self, prompt: str) -> list[int]:
        asked = {"model": self.model, "messages": [{"role": "user", "content": prompt}], "add_generation_prompt": True}
        return self._post("/tokenize", asked)["tokens"]

    def answer(self, prompt: list[int], most: int, temperature: float, seed: int | None) -> list[int]:
        fields: dict[str, Any] = {"max_tokens": most, "temperature": temperature, "return_token_ids": True}
        if seed is not None:
            fields["seed"] = seed
        reply = self._post("/v1/completions", {"model": self.model, "prompt": prompt, **fields})
        return reply["choices"][0]["token_ids"]

    def counts(self, prompt: list[int]) -> dict[str, Any]:
        transfer = {"do_remote_decode": True, "do_remote_prefill": False}
        body = {"model": self.model, "prompt": prompt, "max_tokens": 1, "kv_transfer_params": transfer}
        params = self._post("/v1/completions", body).get("kv_transfer_params") or {}
        if "expert_counts" not in params:
            raise Refused("no expert_counts in the answer: the server's log says why ('kindred:')")
        return params["expert_counts"]

    def _get(self, path: str) -> Any:
        return self._open(urllib.request.Request(self._url + path))

    def _post(self, path: str, body: Any) -> Any:
        headers = {"Content-Type": "application/json"}
        return self._open(urllib.request.Request(self._url + path, json.dumps(body).encode(), headers))

    def _open(self, request: urllib.request.Request) -> Any:
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            raise Refused(f"{request.full_url}: {error.code}: {error.read(2000).decode(errors='replace')}") from error


def cells(wire: dict[str, Any]) -> np.ndarray:
    data = np.frombuffer(base64.b64decode(wire["data"]), dtype="<u2" if wire["dtype"] == "u16" else "<u4")
    return data.reshape(len(wire["layers"]), wire["experts"]).astype(np.int64)


def record(
    client: Client, prompt: str, domain: str, most: int, temperature: float, seed: int | None
) -> Recorded | None:
    """None for an answer without a second token, or whose prompt was routed differently the second time."""
    ids = client.tokens(prompt)
    generated = client.answer(ids, most, temperature, seed)
    if len(generated) < 2:
        return None
    of_prompt = client.counts(ids)
    # The last token is never fed back.
    of_all = client.counts(ids + generated[:-1])
    prefill, decode = cells(of_prompt), cells(of_all) - cells(of_prompt)
    if (decode < 0).any():
        return None
    return Recorded(domain, of_prompt["layers"], of_prompt["top_k"], len(ids), len(generated) - 1, prefill, decode)


def save(rows: list[Recorded], model: str, path: Path) -> None:
    from safetensors.numpy import save_file

    metadata = {
        "format": "kindred.activations.v1",
        "model": model,
        "model_fingerprint": "",
        "layers": json.dumps(rows[0].layers),
        "top_k": str(rows[0].top_k),
    }
    if all(row.domain for row in rows):
        metadata["domains"] = json.dumps([row.domain for row in rows])
    tensors = {
        "prefill_counts": np.stack([row.prefill for row in rows]).astype("<u4"),
        "decode_counts": np.stack([row.decode for row in rows]).astype("<u4"),
        "prompt_tokens": np.array([row.prompt_tokens for row in rows], dtype="<u4"),
        "decode_tokens": np.array([row.decode_tokens for row in rows], dtype="<u4"),
    }
    save_file(tensors, str(path), metadata=metadata)


def prompts_of(path: Path) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(path.read_text().splitlines(), 1):
        row = json.loads(line)
        if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
            raise SystemExit(f"{path}:{number}: accepted: an object with 'prompt' and, optionally, 'domain'")
        yield row["prompt"], str(row.get("domain", ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="a vLLM server with the plugin")
    parser.add_argument("--prompts", required=True, type=Path, help='JSONL with "prompt" and, optionally, "domain"')
    parser.add_argument("--output", type=Path, default=Path("activations.safetensors"))
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--seed", type=int, help="prompt i is sampled with SEED + i; default: vLLM draws")
    args = parser.parse_args()
    prompts = list(prompts_of(args.prompts))

    def seed_of(i: int) -> int | None:
        # Not by default: vLLM 0.32 on a CPU dies of a seed while another prompt is in chunks.
        return None if args.seed is None else args.seed + i

    try:
        client = Client(args.url, args.model)
        with ThreadPoolExecutor(args.concurrency) as pool:
            found = list(
                pool.map(
                    lambda i: record(client, *prompts[i], args.max_tokens, args.temperature, seed_of(i)),
                    range(len(prompts)),
                )
            )
    except (Refused, OSError) as error:
        sys.exit(f"record: {error}")
    rows = [row for row in found if row is not None]
    if not rows:
        sys.exit("record: no answer of two tokens or more")
    save(rows, client.model, args.output)
    print(f"{args.output}: {len(rows)} requests, {len(found) - len(rows)} left out (short, or routed differently)")


if __name__ == "__main__":
    main()
