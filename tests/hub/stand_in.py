"""A hub of models in a thread: the few routes that `huggingface_hub` asks for, over a dictionary of files."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class StandIn:
    """Serves `files` of each repository; `asked` are the paths that were fetched."""

    def __init__(self, repos: dict[str, dict[str, bytes]], *, gated: tuple[str, ...] = ()):
        self.repos, self.gated, self.asked = repos, gated, []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        path = unquote(path.partition("?")[0])
        listing = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path)
        tree = re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        match = file or tree or listing
        if match is None:
            return 404, {}, b""
        repo, revision = match[1], match[2] or "main"
        if repo in self.gated:
            return 403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "gated"}, b"{}"
        if repo not in self.repos:
            return 401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "no such repo"}, b"{}"
        if revision not in ("main", COMMIT):
            return 404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "no such revision"}, b"{}"
        files = self.repos[repo]
        if tree:
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in files.items()
            ]
            return 200, {"Content-Type": "application/json"}, json.dumps(entries).encode()
        if listing:
            info = {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
            return 200, {"Content-Type": "application/json"}, json.dumps(info).encode()
        data = files.get(file[3])
        if data is None:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Error-Message": "no such file"}, b""
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        return 200, headers, data

    def _handler(self):
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _send(self, *, with_body: bool):
                status, headers, body = stand_in.answer(self.path)
                if with_body and status == 200 and "/resolve/" in self.path:
                    stand_in.asked.append(unquote(self.path).split("/resolve/")[1].partition("/")[2])
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if with_body:
                    self.wfile.write(body)

            def do_GET(self):
                self._send(with_body=True)

            def do_HEAD(self):
                self._send(with_body=False)

            def log_message(self, *arguments):
                pass

        return Handler
