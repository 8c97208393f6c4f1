"""SGLang prefill, decode and whole servers that follow a script instead of a model, for tests of the router.

Fields and events are those of SGLang 0.5.23 (python/sglang/srt: entrypoints/openai/protocol.py, serving_chat.py,
serving_completions.py, http_server.py, v1_loads.py, managers/load_snapshot.py, observability/metrics_collector.py),
and so is when a leg answers: a prefill server once the KV is with the decode server, a decode server not before. The
experts of a prompt's token are a choice of its domain, the first word of the prompt; the one layer without experts
(layer 0) is zeros.
"""

import base64
import contextlib
import http.server
import json
import struct
import threading

LAYERS, EXPERTS, TOP_K = 24, 64, 2
WORDS = "the sea was calm and the night was long".split()
CREATED = 1_700_000_000
BOOTSTRAP_PORT = 8998


class Rooms:
    """Where legs meet: one for all servers of a fleet."""

    def __init__(self):
        self._lock = threading.Lock()
        self._rooms = {}

    def events(self, room):
        with self._lock:
            return self._rooms.setdefault(room, (threading.Event(), threading.Event()))


def prompt_text(body):
    if "messages" in body:
        return "".join(message["content"] for message in body["messages"])
    return body.get("prompt", body.get("text", ""))


def experts_of(domain):
    """TOP_K different experts for each layer."""
    first = sum(domain.encode()) * 7
    return [[0] * TOP_K if layer == 0 else [(first + layer + 5 * k) % EXPERTS for k in range(TOP_K)] for layer in range(LAYERS)]


def encoded(rows):
    """[tokens][layers][top_k] as the wire has it: base64 of little-endian int32."""
    return base64.b64encode(b"".join(rows)).decode()


def row(experts):
    flat = [expert for layer in experts for expert in layer]
    return struct.pack(f"<{len(flat)}i", *flat)


class SglangServer(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, mode="null", rooms=None, dp_size=1, version="0.5.23", return_experts=True):
        self.mode, self.rooms, self.dp_size, self.version, self.return_experts = mode, rooms, dp_size, version, return_experts
        self.seen = []  # bodies, in the order in which they came
        self.garbage = None  # sent in place of routed_experts
        self.waiting_tokens = [0] * dp_size  # of each rank, for /v1/loads
        self.has_loads = True  # else /metrics is all there is
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def handle_error(self, request, client_address):
        pass  # a router that hangs up, which it may

    def stop(self):
        self.shutdown()
        self.server_close()

    def loads(self):
        def load(rank, tokens):
            core = {"timestamp": 1.5, "dp_rank": rank, "num_running_reqs": 0, "num_waiting_reqs": int(tokens > 0), "num_waiting_uncached_tokens": tokens,
                    "num_used_tokens": 0, "num_total_tokens": tokens, "num_active_tokens": tokens, "num_prealloc_ready_tokens": 0,
                    "max_total_num_tokens": 100_000, "max_running_requests": 128, "token_usage": 0.0, "gen_throughput": 0.0, "cache_hit_rate": 0.0,
                    "utilization": 0.0, "total_prefill_uncached_tokens": 0, "total_prefill_busy_us": 0, "decode_moments": None}
            disagg = {"mode": self.mode, "prefill_bootstrap_queue_reqs": 0, "prefill_inflight_queue_reqs": 0, "decode_prealloc_queue_reqs": 0,
                      "decode_transfer_queue_reqs": 0, "decode_retracted_queue_reqs": 0, "kv_transfer_speed_gb_s": 0.0, "kv_transfer_latency_ms": 0.0}
            queues = {"waiting": int(tokens > 0), "grammar": 0, "paused": 0, "retracted": 0, "prealloc_ready": 0}
            return {**core, "disaggregation": disagg, "queues": queues}

        return {"timestamp": "2026-01-01T00:00:00+00:00", "version": self.version, "accelerator": None, "num_accelerators": 1,
                "loads": [load(rank, tokens) for rank, tokens in enumerate(self.waiting_tokens)]}

    def metrics(self):
        lines = []
        for name, value in (("sglang:num_running_reqs", 0), ("sglang:num_queue_reqs", 0), ("sglang:token_usage", 0.0)):
            lines.append(f"# TYPE {name} gauge")
            for rank in range(self.dp_size):
                labels = f'dp_rank="{rank}",engine_type="{self.mode}",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank="0"'
                lines.append(f"{name}{{{labels}}} {float(value)}")
        return "\n".join(lines) + "\n"

    def server_info(self):
        return {"model_path": "m", "served_model_name": "m", "dp_size": self.dp_size, "disaggregation_mode": self.mode,
                "disaggregation_bootstrap_port": BOOTSTRAP_PORT, "enable_return_routed_experts": self.return_experts, "startup_time": 1.0,
                "internal_states": [{}] * self.dp_size, "version": self.version, "frontend": "python"}

    def routed_experts(self, body, prompt_tokens, output_tokens):
        """Of all tokens but the last. A decode server has not run the prompt: its rows of it are whatever was there."""
        if not (self.return_experts and body.get("return_routed_experts")):
            return None
        if self.garbage is not None:
            return self.garbage
        own = row(experts_of(prompt_text(body).split()[0]))
        of_prompt = bytes(len(own)) if self.mode == "decode" else own
        rows = [of_prompt] * prompt_tokens + [own] * (output_tokens - 1)
        return encoded(rows[body.get("routed_experts_start_len", 0):])


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def _send(self, status, body, content_type="application/json"):
        data = body.encode() if isinstance(body, str) else json.dumps(body, separators=(",", ":")).encode()
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _error(self, status, message):
        self._send(status, {"object": "error", "message": message, "type": "BadRequest", "param": None, "code": status})

    def do_GET(self):
        server, path = self.server, self.path.split("?")[0]
        if path in ("/health", "/health_generate"):
            self._send(200, "", "text/plain")
        elif path == "/v1/models":
            card = {"id": "m", "object": "model", "created": CREATED, "owned_by": "sglang", "root": "m", "parent": None, "max_model_len": 4096}
            self._send(200, {"object": "list", "data": [card]})
        elif path in ("/server_info", "/get_server_info"):
            self._send(200, server.server_info())
        elif path == "/v1/loads" and server.has_loads:
            self._send(200, server.loads())
        elif path == "/metrics":
            self._send(200, server.metrics(), "text/plain; version=0.0.4; charset=utf-8")
        else:
            self._send(404, {"detail": "Not Found"})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        server.seen.append(body)
        rank = body.get("routed_dp_rank")
        if rank is not None and not 0 <= rank < server.dp_size:
            return self._error(400, f"routed_dp_rank={rank} out of range [0, {server.dp_size})")
        if server.mode != "null" and not self._met(body):
            return None
        if self.path not in ("/v1/chat/completions", "/v1/completions"):
            return self._send(404, {"detail": "Not Found"})
        tokens = 1 if server.mode == "prefill" else min(body.get("max_tokens", len(WORDS)), len(WORDS))
        return (self._stream if body.get("stream") else self._whole)(body, tokens)

    def _met(self, body):
        """Waits for the other leg. False: it did not come, or the request says nothing of it; then that is answered."""
        if not isinstance(body.get("bootstrap_room"), int) or body.get("bootstrap_port") != BOOTSTRAP_PORT or "bootstrap_host" not in body:
            self._error(400, "Disaggregated request received without bootstrap room id")
            return False
        decode_is_there, kv_is_there = self.server.rooms.events(body["bootstrap_room"])
        mine, other = (kv_is_there, decode_is_there) if self.server.mode == "prefill" else (decode_is_there, kv_is_there)
        if self.server.mode == "decode":
            mine.set()
        if not other.wait(5):
            self._error(500, "KVTransferError: bootstrap timed out")
            return False
        mine.set()
        return True

    def _usage(self, body, tokens):
        prompt_tokens = len(prompt_text(body).split())
        return {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens + tokens, "completion_tokens": tokens, "prompt_tokens_details": None, "reasoning_tokens": 0}

    def _whole(self, body, tokens):
        usage, chats = self._usage(body, tokens), self.path.endswith("chat/completions")
        said = {"message": {"role": "assistant", "content": " ".join(WORDS[:tokens]), "reasoning_content": None, "tool_calls": None}}
        choice = {"index": 0, **(said if chats else {"text": " ".join(WORDS[:tokens])}), "logprobs": None, "finish_reason": "length", "matched_stop": None}
        answer = {"id": "x", "object": "chat.completion" if chats else "text_completion", "created": CREATED, "model": "m", "choices": [choice],
                  "usage": usage, "metadata": {"weight_version": "default"}}
        experts = self.server.routed_experts(body, usage["prompt_tokens"], tokens)
        if experts is not None:
            answer["sglext"] = {"routed_experts": experts}
        self._send(200, answer)

    def _stream(self, body, tokens):
        usage, chats = self._usage(body, tokens), self.path.endswith("chat/completions")
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

        def event(data):
            text = f"data: {data if isinstance(data, str) else json.dumps(data, separators=(',', ':'))}\n\n".encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(text), text))

        def chunk(choices, **more):
            return {"id": "x", "object": "chat.completion.chunk" if chats else "text_completion", "created": CREATED, "model": "m", "choices": choices,
                    "usage": None, **more}

        def choice(text, finish=None, **delta):
            said = {"delta": {"role": None, "content": text, "reasoning_content": None, **delta}} if chats else {"text": text or ""}
            return [{"index": 0, **said, "logprobs": None, "finish_reason": finish, "matched_stop": None}]

        with contextlib.suppress(ConnectionError):  # the router may hang up
            if chats:
                event(chunk(choice("", role="assistant")))
            for word in WORDS[:tokens]:
                event(chunk(choice(word + " ")))
            event(chunk(choice(None, finish="length")))
            experts = self.server.routed_experts(body, usage["prompt_tokens"], tokens)
            if experts is not None:
                event(chunk([], sglext={"routed_experts": experts}))
            if (body.get("stream_options") or {}).get("include_usage"):
                event(chunk([], usage=usage))
            event("[DONE]")
            self.wfile.write(b"0\r\n\r\n")
