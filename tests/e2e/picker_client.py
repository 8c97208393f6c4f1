"""A proxy's side of Envoy's ext_proc protocol, for tests of `kindred picker`: messages of src/picker/proto over grpcio,
in the order in which Envoy sends them."""

import contextlib
import functools
import queue
import subprocess
import tempfile

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from cluster import ROOT, Process, Server, free_port, wait_until

ENVOY = "envoy.service.ext_proc.v3."
FULL_DUPLEX, BUFFERED, STREAMED, NONE = 4, 2, 1, 0


@functools.cache
def _pool():
    with tempfile.NamedTemporaryFile() as out:
        subprocess.run(["protoc", "-I", ROOT / "src/picker/proto", "--include_imports", f"--descriptor_set_out={out.name}",
                        "ext_proc.proto", "health.proto"], check=True)
        files = descriptor_pb2.FileDescriptorSet.FromString(out.read())
    pool = descriptor_pool.DescriptorPool()
    for file in files.file:
        pool.Add(file)
    return pool


def message(name):
    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(name))


def health(address, service):
    request, response = message("grpc.health.v1.HealthCheckRequest"), message("grpc.health.v1.HealthCheckResponse")
    with grpc.insecure_channel(address) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check", request.SerializeToString, response.FromString)
        return check(request(service=service), timeout=10).status


class Stream:
    """One HTTP request of a proxy. A context manager: leaving it ends the stream in peace."""

    def __init__(self, channel):
        self._queue = queue.Queue()
        request, response = message(ENVOY + "ProcessingRequest"), message(ENVOY + "ProcessingResponse")
        process = channel.stream_stream(f"/{ENVOY}ExternalProcessor/Process", request.SerializeToString, response.FromString)
        self.call = process(iter(self._queue.get, None), timeout=60)
        self._request = request

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()
        with contextlib.suppress(grpc.RpcError):
            list(self.call)

    def send(self, **fields):
        self._queue.put(self._request(**fields))

    def receive(self):
        return next(self.call)

    def end(self):
        self._queue.put(None)

    def head(self, path="/v1/chat/completions", method="POST", end_of_stream=False, headers=(), subset=None,
             request_mode=FULL_DUPLEX, response_mode=FULL_DUPLEX):
        named = {":method": method, ":path": path, ":authority": "gateway", "content-type": "application/json", **dict(headers)}
        fields = {"request_headers": {
            "headers": {"headers": [{"key": k, "raw_value": v.encode()} for k, v in named.items()]},
            "end_of_stream": end_of_stream}}
        if request_mode is not None:
            fields["protocol_config"] = {"request_body_mode": request_mode, "response_body_mode": response_mode}
        request = self._request(**fields)
        if subset is not None:
            space = request.metadata_context.filter_metadata["envoy.lb.subset_hint"]
            space.update({"x-gateway-destination-endpoint-subset": subset})
        self._queue.put(request)

    def body(self, data, end_of_stream=True):
        self.send(request_body={"body": data, "end_of_stream": end_of_stream})

    def answer(self, status=200, served=None, end_of_stream=False):
        request = self._request(response_headers={
            "headers": {"headers": [{"key": ":status", "raw_value": str(status).encode()}]}, "end_of_stream": end_of_stream})
        if served:
            request.metadata_context.filter_metadata["envoy.lb"].update({"x-gateway-destination-endpoint-served": served})
        self._queue.put(request)

    def answer_body(self, data, end_of_stream=False):
        self.send(response_body={"body": data, "end_of_stream": end_of_stream})

    def picked(self):
        """(the endpoint, all headers that are set), of an answer to the request's headers."""
        return pick_of(self.receive())


def headers_of(mutation):
    assert all(o.append_action == 2 for o in mutation.set_headers)  # in the place of what the client said
    return {o.header.key: o.header.raw_value.decode() for o in mutation.set_headers}


def pick_of(response):
    part = response.request_headers if response.WhichOneof("response") == "request_headers" else response.request_body
    headers = headers_of(part.response.header_mutation)
    endpoint = headers["x-gateway-destination-endpoint"]
    # The two ways to say it must not differ.
    assert response.dynamic_metadata.fields["envoy.lb"].struct_value["x-gateway-destination-endpoint"] == endpoint
    return endpoint, headers


@contextlib.contextmanager
def mock_fleet(tmp_path, workers, dialect="openai", *args):
    """(role, URL) of the workers of a mock fleet, and its process."""
    log = tmp_path / "fleet.log"
    serve = Process("simulate", "--serve", "--workers", workers, "--port", 0, "--dialect", dialect,
                    "--profile", "h200-gpt-oss-20b", "--domains", 2, *args, log=log)
    try:
        wait_until(lambda: "ready; a router for them:" in serve.text(), 60, "mock fleet ready")
        command = serve.text().split("ready; a router for them:\n")[1].split("\n")[0].split()
        urls = [(command[i][2:], command[i + 1]) for i in range(len(command) - 1)
                if command[i] in ("--prefill", "--decode", "--worker")]
        yield urls, serve
    finally:
        serve.stop()


@contextlib.contextmanager
def picker(tmp_path, urls, *args):
    """(the process, its gRPC address)."""
    port = free_port()
    flags = [flag for role, url in urls for flag in (f"--{role}", url)]
    with contextlib.ExitStack() as ending:
        process = Server("picker", *flags, "--picker-port", port, "--health-interval-ms", 100, *args, log=tmp_path / "picker.log")
        ending.callback(process.stop)
        process.wait_ready("/ready")
        yield process, f"127.0.0.1:{port}"
