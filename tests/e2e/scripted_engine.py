"""An engine that speaks as a vLLM server does, by script: tools, structured output, reasoning, Responses, Messages.

The answer follows from the request alone: a tool that may be called is called, a schema is followed, asked for effort
it reasons, and a prompt with "break off" gets the beginning of a stream and a cut. Prefill legs are answered with
`kv_transfer_params`. What came is kept in `seen`.
"""

import http.server
import json
import socket
import struct
import threading

MODEL = "scripted"
ARGUMENTS = '{"city":"Rome"}'
SCHEMA_ANSWER = '{"answer":42}'
TEXT = ["Hello", ", ", "world", "."]
THOUGHT = ["Let me ", "see."]
USAGE = {"prompt_tokens": 11, "completion_tokens": 4, "total_tokens": 15}
HANDOFF = {"do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1, 2]], "remote_engine_id": "e-1"}


def plan(body):
    """(reasoning, text, the tool's name or None) of the answer."""
    tools = body.get("tools") or []
    choice = body.get("tool_choice")
    tool = None
    if tools and choice not in ("none", {"type": "none"}):
        tool = tools[0].get("name") or tools[0]["function"]["name"]
    output = body.get("response_format") or (body.get("text") or {}).get("format") or (body.get("output_config") or {}).get("format")
    thinks = body.get("reasoning_effort") or body.get("reasoning") or body.get("thinking")
    text = [] if tool else [SCHEMA_ANSWER] if output and output["type"] == "json_schema" else TEXT
    return (THOUGHT if thinks else []), text, tool


def chat_chunks(body):
    reasoning, text, tool = plan(body)
    deltas = [{"role": "assistant", "content": ""}]
    deltas += [{"reasoning_content": piece} for piece in reasoning] + [{"content": piece} for piece in text]
    if tool:
        deltas.append({"tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": {"name": tool, "arguments": ""}}]})
        deltas += [{"tool_calls": [{"index": 0, "function": {"arguments": half}}]} for half in (ARGUMENTS[:7], ARGUMENTS[7:])]
    common = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
    for delta in deltas:
        yield None, {**common, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    reason = "tool_calls" if tool else "stop"
    yield None, {**common, "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}
    if (body.get("stream_options") or {}).get("include_usage"):
        yield None, {**common, "choices": [], "usage": USAGE}
    yield None, "[DONE]"


def chat_whole(body):
    reasoning, text, tool = plan(body)
    message = {"role": "assistant", "content": "".join(text) or None}
    if reasoning:
        message["reasoning_content"] = "".join(reasoning)
    if tool:
        message["tool_calls"] = [{"id": "call_1", "type": "function", "function": {"name": tool, "arguments": ARGUMENTS}}]
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if tool else "stop"}
    return {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": MODEL, "choices": [choice], "usage": USAGE}


def response(body, status="completed"):
    reasoning, text, tool = plan(body)
    output = []
    if reasoning:
        content = [{"type": "reasoning_text", "text": "".join(reasoning)}]
        output.append({"type": "reasoning", "id": "rs_1", "summary": [], "content": content})
    if tool:
        output.append({"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": tool, "arguments": ARGUMENTS, "status": "completed"})
    if text:
        content = [{"type": "output_text", "text": "".join(text), "annotations": []}]
        output.append({"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": content})
    details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    usage = {"input_tokens": 11, "output_tokens": 4, "total_tokens": 15, **details}
    return {"id": "resp_1", "object": "response", "created_at": 1, "model": MODEL, "status": status,
            "output": output if status == "completed" else [], "parallel_tool_calls": True, "tool_choice": "auto",
            "tools": body.get("tools") or [], "usage": usage if status == "completed" else None}


def response_events(body):
    reasoning, text, tool = plan(body)
    number = -1

    def event(name, **fields):
        nonlocal number
        number += 1
        return name, {"type": name, "sequence_number": number, **fields}

    yield event("response.created", response=response(body, "in_progress"))
    whole = response(body)
    for index, item in enumerate(whole["output"]):
        begun = {**item, "content": []} if "content" in item else {**item, "arguments": ""}
        where = {"output_index": index, "content_index": 0}
        yield event("response.output_item.added", output_index=index, item=begun)
        if "content" in item:
            part = {**item["content"][0], "text": ""}
            yield event("response.content_part.added", item_id=item["id"], part=part, **where)
        if item["type"] == "reasoning":
            for piece in reasoning:
                yield event("response.reasoning_text.delta", item_id="rs_1", delta=piece, **where)
        if item["type"] == "message":
            for piece in text:
                yield event("response.output_text.delta", item_id="msg_1", delta=piece, logprobs=[], **where)
            yield event("response.output_text.done", item_id="msg_1", text="".join(text), logprobs=[], **where)
        if item["type"] == "function_call":
            yield event("response.function_call_arguments.delta", item_id="fc_1", output_index=index, delta=ARGUMENTS)
        yield event("response.output_item.done", output_index=index, item=item)
    yield event("response.completed", response=whole)


def message(body):
    reasoning, text, tool = plan(body)
    content = []
    if reasoning:
        content.append({"type": "thinking", "thinking": "".join(reasoning), "signature": "s"})
    if text:
        content.append({"type": "text", "text": "".join(text)})
    if tool:
        content.append({"type": "tool_use", "id": "toolu_1", "name": tool, "input": json.loads(ARGUMENTS)})
    return {"id": "msg_1", "type": "message", "role": "assistant", "model": MODEL, "content": content, "stop_sequence": None,
            "stop_reason": "tool_use" if tool else "end_turn", "usage": {"input_tokens": 11, "output_tokens": 4}}


def message_events(body):
    reasoning, text, tool = plan(body)
    whole = message(body)
    begun = {**whole, "content": [], "stop_reason": None, "usage": {"input_tokens": 11, "output_tokens": 0}}
    yield "message_start", {"type": "message_start", "message": begun}
    yield "ping", {"type": "ping"}
    for index, block in enumerate(whole["content"]):
        if block["type"] == "thinking":
            empty, deltas = {**block, "thinking": "", "signature": ""}, [{"type": "thinking_delta", "thinking": p} for p in reasoning]
            deltas.append({"type": "signature_delta", "signature": "s"})
        elif block["type"] == "text":
            empty, deltas = {**block, "text": ""}, [{"type": "text_delta", "text": p} for p in text]
        else:
            empty, deltas = {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": p} for p in (ARGUMENTS[:7], ARGUMENTS[7:])]
        yield "content_block_start", {"type": "content_block_start", "index": index, "content_block": empty}
        for delta in deltas:
            yield "content_block_delta", {"type": "content_block_delta", "index": index, "delta": delta}
        yield "content_block_stop", {"type": "content_block_stop", "index": index}
    stop = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    yield "message_delta", {"type": "message_delta", "delta": stop, "usage": {"output_tokens": 4}}
    yield "message_stop", {"type": "message_stop"}


ENDPOINTS = {
    "/v1/chat/completions": (chat_whole, chat_chunks),
    "/v1/responses": (response, response_events),
    "/v1/messages": (message, message_events),
    "/v1/messages/count_tokens": (lambda body: {"input_tokens": 11}, None),
}


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def send_json(self, value, status=200):
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        if self.path == "/v1/models":
            card = {"id": MODEL, "object": "model", "created": 1, "owned_by": "vllm", "root": MODEL, "parent": None, "max_model_len": 4096}
            return self.send_json({"object": "list", "data": [card]})
        if self.path == "/version":
            return self.send_json({"version": "0.32.0"})
        return self.send_json({}, 200 if self.path == "/health" else 404)

    def do_POST(self):
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        body = json.loads(raw)
        self.server.seen.append((self.path, dict(self.headers), body))
        if self.path not in ENDPOINTS:
            return self.send_json({"error": {"message": "Not Found", "type": "NotFoundError", "param": None, "code": 404}}, 404)
        whole, events = ENDPOINTS[self.path]
        if (body.get("kv_transfer_params") or {}).get("do_remote_decode"):
            return self.send_json({**whole(body), "kv_transfer_params": HANDOFF})
        if not body.get("stream"):
            return self.send_json(whole(body))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for number, (name, data) in enumerate(events(body)):
            if number == 3 and b"break off" in raw:
                # A reset, as of an engine that died: the router must not take it for an end.
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.close_connection = True
                return self.connection.shutdown(socket.SHUT_RDWR)
            data = data if isinstance(data, str) else json.dumps(data)
            text = (f"event: {name}\n" if name else "") + f"data: {data}\n\n"
            self.wfile.write(b"%x\r\n%s\r\n" % (len(text.encode()), text.encode()))
        self.wfile.write(b"0\r\n\r\n")


class ScriptedEngine(http.server.ThreadingHTTPServer):
    """A context manager; `url` is where it listens."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    def bodies(self, path):
        return [body for at, _, body in self.seen if at == path]
