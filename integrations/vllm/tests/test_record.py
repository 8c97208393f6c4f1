from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from kindred_vllm import record
from kindred_vllm.wire import ExpertCounts

EXPERTS = 4


class Engine(BaseHTTPRequestHandler):
    """Token t goes to experts t % 4 and (t + 1) % 4. A prompt of n characters is the tokens 0 to n - 1."""

    with_counts = True

    def do_GET(self) -> None:
        self._answer({"data": [{"id": "tiny"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            self._answer({"tokens": list(range(len(body["messages"][0]["content"])))})
        elif "kv_transfer_params" in body:
            self._answer({"kv_transfer_params": self._params(body["prompt"])})
        else:
            self._answer({"choices": [{"token_ids": [9, 6, 3][: body["max_tokens"]]}]})

    def _params(self, prompt: list[int]) -> dict[str, Any]:
        row = np.bincount([(t + i) % EXPERTS for t in prompt for i in (0, 1)], minlength=EXPERTS)
        counts = ExpertCounts([0, 2], 2, len(prompt), np.stack([row, row]))
        return {"expert_counts": counts.to_json()} if self.with_counts else {}

    def _answer(self, body: Any) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def engine() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Engine)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def run(monkeypatch: pytest.MonkeyPatch, url: str, folder: Path, rows: list[dict[str, str]], *more: str) -> Path:
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    out = folder / "out.safetensors"
    args = ["record", "--url", url, "--prompts", str(folder / "prompts.jsonl"), "--output", str(out), *more]
    monkeypatch.setattr(sys, "argv", args)
    record.main()
    return out


def test_prompt_and_answer_are_told_apart(monkeypatch: pytest.MonkeyPatch, engine: str, tmp_path: Path) -> None:
    out = run(monkeypatch, engine, tmp_path, [{"prompt": "abc", "domain": "x"}, {"prompt": "a", "domain": "y"}])
    with safe_open(out, "np") as file:
        assert file.metadata()["format"] == "kindred.activations.v1"
        assert json.loads(file.metadata()["layers"]) == [0, 2]
        assert json.loads(file.metadata()["domains"]) == ["x", "y"]
        assert file.get_tensor("prompt_tokens").tolist() == [3, 1]
        assert file.get_tensor("decode_tokens").tolist() == [2, 2]  # the last of three is not fed back
        assert file.get_tensor("prefill_counts")[0, 1].tolist() == [1, 2, 2, 1]
        assert file.get_tensor("decode_counts")[0, 0].tolist() == [0, 1, 2, 1]  # tokens 9 and 6


def test_what_cannot_be_recorded_is_said(monkeypatch: pytest.MonkeyPatch, engine: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no answer of two tokens"):
        run(monkeypatch, engine, tmp_path, [{"prompt": "abc"}], "--max-tokens", "1")
    with pytest.raises(SystemExit, match="accepted: an object with 'prompt'"):
        run(monkeypatch, engine, tmp_path, [{"text": "abc"}])
    monkeypatch.setattr(Engine, "with_counts", False)
    with pytest.raises(SystemExit, match="no expert_counts"):
        run(monkeypatch, engine, tmp_path, [{"prompt": "abc"}])
