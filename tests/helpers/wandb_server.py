"""As much of a W&B server as its client needs: begin, resume and rewind a run, and send rows."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class WandbServer(ThreadingHTTPServer):
    """Holds the rows of each run by its id; one that does not rewind refuses it as an error."""

    def __init__(self, *, rewinds: bool) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.rewinds = rewinds
        self.asked: list[str] = []
        """The names of all requests, in order."""
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.exit_codes: list[int] = []

    @property
    def variables(self) -> dict[str, str]:
        """The environment of a client."""
        url = f"http://127.0.0.1:{self.server_port}"
        return {"WANDB_BASE_URL": url, "WANDB_API_KEY": "0" * 40, "WANDB_MODE": "online"}

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of a client that goes away without a word."""

    def answer(self, name: str, given: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a request of GraphQL."""
        self.asked.append(name)
        match name:
            case "RunResumeStatus":
                return {"data": {"model": {**_PROJECT, "bucket": self._bucket(given["name"])}}}
            case "UpsertBucket":
                inserted = given["name"] not in self.rows
                self.rows.setdefault(given["name"], [])
                bucket = {**self._bucket(given["name"]), "project": _PROJECT}
                return {"data": {"upsertBucket": {"bucket": bucket, "inserted": inserted}}}
            case "RewindRun" if not self.rewinds:
                return {"errors": [{"message": "rewind is not enabled here"}], "data": None}
            case "RewindRun":
                rows, last = self.rows[given["runName"]], given["metricValue"]
                rows[:] = [row for row in rows if row["_step"] <= last]
                found = {**self._bucket(given["runName"]), "project": _PROJECT}
                return {"data": {"rewindRun": {"rewoundRun": found}}}
            case "CreateRunFiles":
                url = self.variables["WANDB_BASE_URL"]
                files = [{"name": n, "uploadUrl": f"{url}/upload/{n}"} for n in given["files"]]
                made = {"runID": given["run"], "uploadHeaders": [], "files": files}
                return {"data": {"createRunFiles": made}}
        return {"data": {"viewer": {"id": "1", "entity": "us", "username": "us"}}}

    def take(self, run: str, sent: dict[str, Any]) -> None:
        """Take what a client streams of a run."""
        if "exitcode" in sent:
            self.exit_codes.append(sent["exitcode"])
        part = sent.get("files", {}).get("wandb-history.jsonl")
        if part is not None:
            rows = self.rows[run]
            rows[part["offset"] :] = [json.loads(line) for line in part["content"]]

    def _bucket(self, run: str) -> dict[str, Any] | None:
        if run not in self.rows:
            return None
        rows = self.rows[run]
        tail = [json.dumps(row) for row in rows[-1:]]
        counts = {"logLineCount": 0, "eventsLineCount": 0, "historyLineCount": len(rows)}
        tails = {"eventsTail": "[]", "historyTail": json.dumps(tail), "summaryMetrics": "{}"}
        about = {"config": "{}", "wandbConfig": '{"t": {}}', "tags": [], "notes": ""}
        named = {"id": run, "name": run, "displayName": run, "description": "", "sweepName": None}
        return {**named, **counts, **tails, **about}


_PROJECT = {"id": "1", "name": "keepstep", "entity": {"id": "1", "name": "us"}}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: WandbServer

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        found: dict[str, Any] = {}
        if self.path == "/graphql":
            asked = json.loads(body)
            (name,) = re.findall(r"^\s*(?:query|mutation) (\w+)", asked["query"])
            found = self.server.answer(name, asked.get("variables") or {})
        elif stream := re.fullmatch(r"/files/.*/([^/]+)/file_stream", self.path):
            self.server.take(stream[1], json.loads(body))
        self._say(found)

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"] or 0))
        self._say({})

    def _say(self, found: dict[str, Any]) -> None:
        data = json.dumps(found).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def wandb_server(*, rewinds: bool = True) -> Iterator[WandbServer]:
    """A server for as long as the block lasts."""
    with WandbServer(rewinds=rewinds) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
