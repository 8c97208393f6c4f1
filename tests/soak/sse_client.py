"""A small HTTP/1.1 client for very many streams at once, which tells exactly how a response ended."""

import asyncio
import dataclasses
import json

HEAD_BYTES = 64 * 1024


@dataclasses.dataclass
class Outcome:
    status: int = 0  # 0: no head came
    headers: dict = dataclasses.field(default_factory=dict)
    events: list = dataclasses.field(default_factory=list)  # data of each SSE event
    body: bytes = b""  # of an answer that is no stream
    complete: bool = False  # ended as its framing says
    aborted: bool = False  # by us

    @property
    def error(self):
        """The error object that ended it, or None."""
        texts = self.events[-1:] if self.events else [self.body]
        for text in texts:
            try:
                return json.loads(text).get("error")
            except (ValueError, AttributeError):
                pass
        return None

    @property
    def done(self):
        return bool(self.events) and self.events[-1] == "[DONE]"


class _Events:
    """Splits the decoded bytes of a body into events."""

    def __init__(self, outcome):
        self._outcome, self._rest = outcome, b""

    def feed(self, data):
        *whole, self._rest = (self._rest + data).split(b"\n\n")
        for event in whole:
            lines = [line[5:].lstrip(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                self._outcome.events.append(b"\n".join(lines).decode(errors="replace"))


async def _read_head(reader, outcome):
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    outcome.status = int(first.split(" ")[1])
    outcome.headers = {k.lower(): v.strip() for k, v in (line.split(":", 1) for line in lines if ":" in line)}


async def _read_body(reader, outcome, keep_going):
    """Returns False if `keep_going` said to leave."""
    sink = _Events(outcome)
    streams = outcome.headers.get("content-type", "").startswith("text/event-stream")

    def take(data):
        if streams:
            sink.feed(data)
        else:
            outcome.body += data

    if outcome.headers.get("transfer-encoding", "").lower() != "chunked":
        take(await reader.readexactly(int(outcome.headers.get("content-length", 0))))
        return True
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        take((await reader.readexactly(size + 2))[:-2])
        if not keep_going(outcome):
            return False
    await reader.readuntil(b"\r\n")
    return True


async def post(host, port, path, body, headers=None, keep_going=lambda outcome: True, abort_after_s=None):
    """POSTs `body` (for json.dumps) on a connection of its own. `keep_going(outcome)` is asked after each piece;
    `abort_after_s` leaves at that time, whatever has come."""
    outcome = Outcome()
    data = json.dumps(body).encode()
    lines = {"Host": f"{host}:{port}", "Content-Type": "application/json", "Content-Length": len(data),
             "Connection": "close", **(headers or {})}
    head = f"POST {path} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in lines.items()) + "\r\n"
    writer = None
    try:
        reader, writer = await asyncio.open_connection(host, port, limit=HEAD_BYTES)
        writer.write(head.encode() + data)

        async def talk():
            await _read_head(reader, outcome)
            outcome.complete = await _read_body(reader, outcome, keep_going)
            outcome.aborted = not outcome.complete

        await asyncio.wait_for(talk(), abort_after_s)
    except asyncio.TimeoutError:
        outcome.aborted = True
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
        pass  # cut
    finally:
        if writer:
            writer.transport.abort() if outcome.aborted else writer.close()
    return outcome
