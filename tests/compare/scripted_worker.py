"""A worker on raw sockets that does exactly what a check wants, and keeps what it was sent and when it was left."""

import contextlib
import json
import selectors
import socket
import struct
import threading
import time

MODEL = "m"
PAGES = {
    "/v1/models": {
        "object": "list",
        "data": [{"id": MODEL, "object": "model", "owned_by": "vllm", "max_model_len": 4096}],
    },
    "/version": {"version": "0.32.0"},
    "/get_model_info": {"model_path": MODEL, "served_model_name": MODEL, "is_generation": True},
    "/model_info": {"model_path": MODEL, "served_model_name": MODEL, "is_generation": True},
    "/get_server_info": {"model_path": MODEL, "served_model_name": MODEL, "dp_size": 1, "version": "0.5.10"},
    "/server_info": {"model_path": MODEL, "served_model_name": MODEL, "dp_size": 1, "version": "0.5.10"},
}
ANSWER = {
    "id": "x", "object": "chat.completion", "created": 1, "model": MODEL,
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}  # fmt: skip


def event(text):
    piece = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": MODEL,
             "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}  # fmt: skip
    return b"data: " + json.dumps(piece).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


class Seen:
    """One request: its bytes, and the connection on which it may be answered."""

    def __init__(self, connection, head, body, nth):
        self.connection, self.head, self.body, self.nth = connection, head, body, nth
        self.left_s = None  # when the router closed the connection, if it did so before the answer's end

    def answer(self, status=200, value=ANSWER, headers=()):
        body = json.dumps(value).encode()
        extra = "".join(f"{name}: {text}\r\n" for name, text in headers)
        head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n{extra}\r\n"
        self.connection.sendall(head.encode() + body)

    def begin_stream(self):
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        self.connection.sendall(head)

    def send(self, data):
        self.connection.sendall(b"%x\r\n%s\r\n" % (len(data), data))

    def end_stream(self):
        self.connection.sendall(b"0\r\n\r\n")

    def reset(self):
        """Closes by RST, as the kernel does for a process that is killed."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def wait_left(self, timeout_s):
        """Until the router closes the connection; False: it did not."""
        with selectors.DefaultSelector() as ready:
            ready.register(self.connection, selectors.EVENT_READ)
            end = time.monotonic() + timeout_s
            while (rest := end - time.monotonic()) > 0:
                if not ready.select(rest):
                    continue
                try:
                    if not self.connection.recv(65536):
                        break
                except OSError:
                    break
            else:
                return False
        self.left_s = time.monotonic()
        return True


def say_ok(seen):
    """What a worker does unless a check wants something else."""
    if b'"stream": true' in seen.body or b'"stream":true' in seen.body:
        seen.begin_stream()
        seen.send(event("ok"))
        seen.send(DONE)
        seen.end_stream()
    else:
        seen.answer()


class ScriptedWorker:
    def __init__(self, port=0):
        self.play = say_ok  # for each completion
        self.seen = []  # completions
        self._lock = threading.Lock()
        self._connections = set()
        self._open(port)

    def _open(self, port):
        self._listener = socket.create_server(("127.0.0.1", port), backlog=128)
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def kill(self):
        """Nobody listens, and all connections break."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def revive(self):
        self._open(self.port)

    def count(self):
        with self._lock:
            return len(self.seen)

    def _accept(self, listener):
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection):
        with self._lock:
            self._connections.add(connection)
        data, nth = b"", 0
        with contextlib.suppress(OSError, ValueError), connection:
            while True:
                while b"\r\n\r\n" not in data:
                    got = connection.recv(65536)
                    if not got:
                        return
                    data += got
                head, _, data = data.partition(b"\r\n\r\n")
                if b" HTTP/1.1" not in head.split(b"\r\n")[0]:
                    return  # some ask first whether gRPC is spoken here
                body, data = self._body(connection, head, data)
                nth += 1
                path = head.split(b" ", 2)[1].decode().partition("?")[0]
                seen = Seen(connection, head, body, nth)
                if head.startswith(b"POST") and path.endswith("/completions"):
                    with self._lock:
                        self.seen.append(seen)
                    self.play(seen)
                else:
                    seen.answer(value=PAGES.get(path, {}))
        with self._lock:
            self._connections.discard(connection)

    @staticmethod
    def _body(connection, head, data):
        fields = dict(
            (name.strip().lower(), value.strip())
            for name, _, value in (line.partition(b":") for line in head.split(b"\r\n")[1:])
        )

        def more():
            got = connection.recv(65536)
            if not got:
                raise OSError("cut")
            return got

        if b"chunked" in fields.get(b"transfer-encoding", b""):
            body = b""
            while True:
                while b"\r\n" not in data:
                    data += more()
                size, _, data = data.partition(b"\r\n")
                size = int(size.split(b";")[0], 16)
                while len(data) < size + 2:
                    data += more()
                body, data = body + data[:size], data[size + 2 :]
                if size == 0:
                    return body, data
        length = int(fields.get(b"content-length", b"0"))
        while len(data) < length:
            data += more()
        return data[:length], data[length:]
