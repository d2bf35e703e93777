"""A real server that speaks S3, in a process of its own, behind a gate that can misbehave."""

import http.client
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.helpers.world import free_port

SERVER = "import sys; from moto.server import main; main(['-H', '127.0.0.1', '-p', sys.argv[1]])"
ERRORS = {503: "SlowDown", 403: "AccessDenied", 500: "InternalError"}


class Server:
    """The server; `kill` is a SIGKILL, after which nothing answers."""

    def __init__(self) -> None:
        self.port = free_port()
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(self.port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if "Running on" in line:
                break
        self._drain = threading.Thread(target=self._process.stderr.read, daemon=True)
        self._drain.start()

    def make_bucket(self, name: str) -> None:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/{name}", method="PUT")
        request.add_header("Authorization", "AWS4-HMAC-SHA256 Credential=k/20260101/us-east-1/s3/x")
        urllib.request.urlopen(request, timeout=20).close()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._drain.join()
        assert self._process.stderr is not None
        self._process.stderr.close()


class Gate:
    """Hands requests on to a server; `rule(method, path)` may answer one, or cut it, instead.

    The rule returns None to hand it on, a status to answer, or "cut" to close the connection when
    half of the request's body was read. `log` holds (method, path).
    """

    def __init__(self, port: int) -> None:
        self.log: list[tuple[str, str]] = []
        self.rule: Callable[[str, str], int | str | None] = lambda _method, _path: None
        gate = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

            def do(self) -> None:
                gate.log.append((self.command, self.path))
                wanted = gate.rule(self.command, self.path)
                count = int(self.headers.get("Content-Length") or 0)
                if wanted == "cut":
                    self.rfile.read(count // 2)
                    self.close_connection = True
                    return
                body = self.rfile.read(count)
                if isinstance(wanted, int):
                    text = (
                        f"<Error><Code>{ERRORS[wanted]}</Code><Message>so be it</Message></Error>"
                    )
                    self.answer(wanted, [], text.encode())
                    return
                onward = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
                try:
                    onward.request(self.command, self.path, body, dict(self.headers))
                    reply = onward.getresponse()
                    self.answer(reply.status, reply.getheaders(), reply.read())
                except OSError:
                    # The server is gone: so is this connection.
                    self.close_connection = True
                finally:
                    onward.close()

            def answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
                self.send_response_only(status)
                known = [name.lower() for name, _ in headers]
                for name, value in headers:
                    if name.lower() not in ("transfer-encoding", "connection"):
                        self.send_header(name, value)
                if "content-length" not in known:
                    self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def surroundings(port: int) -> dict[str, str]:
    """Return the environment in which `s3://` is the server behind a port."""
    return {
        "AWS_ACCESS_KEY_ID": "tests",
        "AWS_SECRET_ACCESS_KEY": "hidden-secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_MAX_ATTEMPTS": "1",
    }


@contextmanager
def gated_server() -> Iterator[tuple[Server, Gate]]:
    """Run a server with a gate, and have this process and its children speak to the gate."""
    server = Server()
    gate = Gate(server.port)
    wanted = surroundings(gate.port)
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield server, gate
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        gate.close()
        server.kill()
