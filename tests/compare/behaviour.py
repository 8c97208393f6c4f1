"""What a router does when things go wrong: one black-box check a line, the same for all routers.

A check gets a `Bench` and returns whether the promise was kept, and what was seen. It knows nothing of who is tested:
workers are scripted ones (scripted_worker.py), clients are raw sockets.
"""

import contextlib
import json
import signal
import socket
import threading
import time

from peers import HEALTH_INTERVAL_S, answers_chat, plain_args, request, started, wait_until
from scripted_worker import DONE, MODEL, ScriptedWorker, event, say_ok

CHECKS = []
PATH = "/v1/chat/completions"


def check(sentence):
    def add(function):
        CHECKS.append((sentence, function))
        return function

    return add


def chat(**fields):
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, **fields}


class Bench:
    def __init__(self, peer, folder):
        self.peer, self._folder, self._starts = peer, folder, 0

    @contextlib.contextmanager
    def router(self, workers, *args):
        self._starts += 1
        log = self._folder / f"{self.peer.name}-{self._starts}.log"
        arguments = [*plain_args(self.peer, [worker.url for worker in workers]), *args]
        with started(self.peer, arguments, log, answers_chat(chat())) as router:
            # Of several workers each must be known, whichever answered first.
            wait_until(lambda: self._reached(router, workers), 30, f"{self.peer.name} uses all its workers")
            for worker in workers:
                worker.seen.clear()
            yield router

    @staticmethod
    def _reached(router, workers):
        request(router.url + PATH, "POST", chat(), timeout=10)
        return all(worker.count() for worker in workers)

    @contextlib.contextmanager
    def one(self, *args):
        worker = ScriptedWorker()
        try:
            with self.router([worker], *args) as router:
                yield router, worker
        finally:
            worker.kill()

    @contextlib.contextmanager
    def two(self):
        workers = [ScriptedWorker(), ScriptedWorker()]
        try:
            with self.router(workers) as router:
                yield router, workers
        finally:
            for worker in workers:
                worker.kill()


def ask(router, **fields):
    return request(router.url + PATH, "POST", chat(**fields), timeout=20)


def raw(router, data):
    client = socket.create_connection(("127.0.0.1", router.port), timeout=10)
    client.sendall(data)
    return client


def post(body, extra=b""):
    head = b"POST " + PATH.encode() + b" HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" + extra
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


def read_to_end(client):
    """(all bytes, whether the peer closed); a reset or silence ends it, too."""
    data = b""
    with contextlib.suppress(OSError):
        while got := client.recv(65536):
            data += got
            if data.endswith(b"\r\n0\r\n\r\n"):
                break
    return data


def stream_request():
    return json.dumps(chat(stream=True)).encode()


def text_of(raw_answer):
    """The body of a chunked answer, and whether its last chunk came."""
    _, _, rest = raw_answer.partition(b"\r\n\r\n")
    body = b""
    while True:
        size, mark, rest = rest.partition(b"\r\n")
        if not mark:
            return body, False
        try:
            length = int(size.split(b";")[0], 16)
        except ValueError:
            return body, False
        if length == 0:
            return body, True
        body, rest = body + rest[:length], rest[length + 2 :]


# --- clients that leave, workers that fail -------------------------------------------------------


def leave(client, worker, left):
    """Closes the client's connection: whether the worker's, which `left` tells of, follows within a second."""
    client.close()
    closed_s = time.monotonic()
    with contextlib.suppress(AssertionError):
        wait_until(lambda: left, 12, "the worker is left")
    if not left or not left[0]:
        return False, "not within 10 s"
    took_s = worker.seen[-1].left_s - closed_s
    return took_s <= 1, f"after {1000 * took_s:.0f} ms"


@check("a client that leaves a stream has its worker's connection closed within 1 s")
def client_leaves(bench):
    with bench.one() as (router, worker):
        left = []

        def play(seen):
            seen.begin_stream()
            seen.send(event("one"))
            left.append(seen.wait_left(10))
            raise OSError("left")

        worker.play = play
        client = raw(router, post(stream_request()))
        while b"one" not in client.recv(65536):
            pass
        return leave(client, worker, left)


@check("a client that leaves before the answer began has its worker's connection closed within 1 s")
def client_leaves_early(bench):
    with bench.one() as (router, worker):
        left = []

        def play(seen):
            left.append(seen.wait_left(10))
            raise OSError("left")

        worker.play = play
        client = raw(router, post(stream_request()))
        wait_until(worker.count, 10, "the request reaches the worker")
        return leave(client, worker, left)


@check("20 answers of 400 do not take the worker out")
def client_errors(bench):
    with bench.one() as (router, worker):
        wrong = {"error": {"message": "no such field", "type": "invalid_request_error", "code": 400}}
        worker.play = lambda seen: seen.answer(400, wrong)
        got = [ask(router)[0] for _ in range(20)]
        worker.play = say_ok
        after = ask(router)[0]
        return set(got) == {400} and after == 200, f"{got.count(400)} of 20 passed on, then {after}"


@check("a 503 of one worker leads to another")
def another_worker(bench):
    with bench.two() as (router, workers):
        workers[0].play = lambda seen: seen.answer(503, {"error": {"message": "queue full"}})
        got = [ask(router)[0] for _ in range(8)]
        return got == [200] * 8, f"{got.count(200)} of 8 answered"


@check("a stream that breaks off has no clean end: an error event or a cut, and no [DONE]")
def broken_stream(bench):
    with bench.one() as (router, worker):

        def play(seen):
            seen.begin_stream()
            for word in ("one ", "two ", "three "):
                seen.send(event(word))
            time.sleep(0.2)
            seen.reset()
            raise OSError("broken")

        worker.play = play
        body, whole = text_of(read_to_end(raw(router, post(stream_request()))))
        error = b'"error"' in body
        good = b"three" in body and b"[DONE]" not in body and (error or not whole)
        seen = ["error event" if error else "no error event", "last chunk" if whole else "cut"]
        return good, ", ".join(seen + (["[DONE]"] if b"[DONE]" in body else []))


@check("a request that meets a kept-alive connection its worker has given up is sent again")
def stale_connection(bench):
    with bench.one() as (router, worker):

        def play(seen):
            if seen.nth > 1:  # only the first request of a connection is served
                seen.reset()
                raise OSError("stale")
            seen.answer()

        worker.play = play
        got = []
        for _ in range(10):
            with contextlib.suppress(OSError):
                got.append(ask(router)[0])
        return got == [200] * 10, f"{got.count(200)} of 10 answered"


@check("a worker that died and is back gets requests within two health intervals")
def dead_worker_returns(bench):
    with bench.two() as (router, workers):
        workers[0].kill()
        end = time.monotonic() + 3 * HEALTH_INTERVAL_S
        lost = 0
        while time.monotonic() < end:
            lost += ask(router)[0] != 200
            time.sleep(0.05)
        before = workers[0].count()
        workers[0].revive()
        began_s = time.monotonic()
        while workers[0].count() == before and time.monotonic() - began_s < 20:
            ask(router)
            time.sleep(0.02)
        took_s = time.monotonic() - began_s
        good = took_s <= 2 * HEALTH_INTERVAL_S + 0.2
        return good, (f"after {took_s:.1f} s" if took_s < 20 else "not within 20 s") + f"; {lost} failed meanwhile"


@check("no request fails while one of two workers is dead")
def none_is_lost(bench):
    with bench.two() as (router, workers):
        workers[0].kill()
        got = []
        for _ in range(40):
            got.append(ask(router)[0])
            time.sleep(0.02)
        return got == [200] * 40, f"{got.count(200)} of 40 answered"


# --- bytes ---------------------------------------------------------------------------------------


@check("[DONE] inside content is content, and events pass byte for byte")
def done_inside_content(bench):
    with bench.one() as (router, worker):
        parts = [event("data: [DONE]\n\n"), event("[DONE]"), b": a comment\n\n", event("é\u2028 after"), DONE]

        def play(seen):
            seen.begin_stream()
            for part in parts:
                for i in range(0, len(part), 7):  # however it is cut
                    seen.send(part[i : i + 7])
            seen.end_stream()

        worker.play = play
        body, whole = text_of(read_to_end(raw(router, post(stream_request()))))
        return whole and body == b"".join(parts), "same bytes" if body == b"".join(
            parts
        ) else f"{len(body)} other bytes"


@check("a body reaches its worker byte for byte, with fields nobody knows")
def unknown_fields(bench):
    with bench.one() as (router, worker):
        body = (
            b'{ "model":"m","messages":[{"role":"user","content":"caf\\u00e9 \\/ \xc3\xa9"}],"max_tokens":8,\n'
            b' "temperature":1.0e-1,"x_new":{"b":[1.50,-0.0,12345678901234567890],"a":null},"top_k":4 }'
        )
        answer = read_until_answer(raw(router, post(body)))
        if not worker.seen:
            return False, f"refused: {answer[:40]!r}"
        return worker.seen[-1].body == body, "same bytes" if worker.seen[-1].body == body else "written anew"


def read_until_answer(client):
    """Of one small answer with a Content-Length."""
    data = b""
    with contextlib.suppress(OSError):
        while b"\r\n\r\n" not in data:
            if not (got := client.recv(65536)):
                break
            data += got
    client.close()
    return data


@check("kv_transfer_params of a client never reach a worker (a vLLM may die of them)")
def transfer_parameters(bench):
    with bench.one() as (router, worker):
        status = ask(router, kv_transfer_params={"do_remote_prefill": True})[0]
        reached = any(b"do_remote_prefill" in seen.body for seen in worker.seen)
        return not reached, f"{status}, " + ("passed on" if reached else "not passed on")


SMUGGLED = {
    "length and chunks": b"Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nX",
    "two lengths": b"Content-Length: 2\r\nContent-Length: 40\r\n\r\n{}",
    "a coding that is none": b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "a length with a sign": b"Content-Length: +2\r\n\r\n{}",
    "space before the colon": b"Content-Length : 2\r\n\r\n{}",
    "a chunk size that is none": b"Transfer-Encoding: chunked\r\n\r\n0x2\r\n{}\r\n0\r\n\r\n",
    "a folded line": b"X-A: 1\r\n Content-Length: 40\r\nContent-Length: 2\r\n\r\n{}",
}


@check("requests that two parsers may read differently are refused")
def smuggling(bench):
    with bench.one() as (router, worker):
        passed = []
        for name, shape in SMUGGLED.items():
            before = worker.count()
            client = raw(router, b"POST " + PATH.encode() + b" HTTP/1.1\r\nHost: x\r\n" + shape)
            client.settimeout(3)
            answer = read_until_answer(client)
            status = answer.split(b" ")[1] if answer.startswith(b"HTTP/1.1 ") else b""
            if worker.count() > before or not (status.startswith(b"4") or status == b"501" or answer == b""):
                passed.append(name)
        return not passed, f"{len(SMUGGLED) - len(passed)} of {len(SMUGGLED)} refused" + (
            f"; not: {', '.join(passed)}" if passed else ""
        )


# --- limits and the end --------------------------------------------------------------------------


@check("who is too much is told so at once, with Retry-After")
def overflow(bench):
    with bench.one(*bench.peer.one_at_a_time) as (router, worker):
        gate = threading.Event()

        def play(seen):
            seen.begin_stream()
            seen.send(event("one"))
            gate.wait(15)
            seen.send(DONE)
            seen.end_stream()

        worker.play = play
        client = raw(router, post(stream_request()))
        while b"one" not in client.recv(65536):
            pass
        worker.play = say_ok
        began_s = time.monotonic()
        try:
            status, headers, _ = request(router.url + PATH, "POST", chat(), timeout=5)
        except OSError:
            return False, "no answer within 5 s"
        finally:
            gate.set()
        took_s = time.monotonic() - began_s
        client.close()
        after = headers.get("Retry-After")
        good = status in (429, 503) and after is not None and took_s < 1
        return good, f"{status} after {1000 * took_s:.0f} ms, Retry-After: {after}"


@check("SIGTERM lets a stream end, then the process exits with 0")
def drain(bench):
    with bench.one() as (router, worker):

        def play(seen):
            seen.begin_stream()
            for i in range(20):
                seen.send(event(f"word{i} "))
                time.sleep(0.1)
            seen.send(DONE)
            seen.end_stream()

        worker.play = play
        client = raw(router, post(stream_request()))
        while b"word0" not in client.recv(65536, socket.MSG_PEEK):
            time.sleep(0.01)
        router.popen.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        worker.play = say_ok
        try:
            refused = ask(router)[0] >= 500
        except OSError:
            refused = True
        body, whole = text_of(read_to_end(client))
        ended = whole and b"[DONE]" in body
        client.close()
        with contextlib.suppress(Exception):
            router.popen.wait(20)
        code = router.popen.poll()
        seen = ["stream whole" if ended else "stream cut", "new refused" if refused else "new taken"]
        seen.append("does not exit" if code is None else f"exit {code}")
        return ended and code == 0, ", ".join(seen)


def run(peer, folder, say):
    """[(sentence, good or None if it could not be tried, what was seen)]."""
    rows = []
    for sentence, function in CHECKS:
        try:
            good, seen = function(Bench(peer, folder))
        except (AssertionError, OSError, RuntimeError, ValueError) as error:
            good, seen = None, f"{type(error).__name__}: {str(error).splitlines()[0][:80] if str(error) else ''}"
        rows.append((sentence, good, seen))
        say(f"{peer.name}: {sentence}: {'yes' if good else 'NO' if good is not None else 'not tried'} ({seen})")
    return rows
