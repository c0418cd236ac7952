"""A local hub with one model."""

import json
from http.server import BaseHTTPRequestHandler
from typing import ClassVar

SIZES = {
    "model-00001-of-00002.safetensors": 3000,
    "model-00002-of-00002.safetensors": 1000,
    "original/consolidated.safetensors": 50_000,
    "tokenizer.json": 700,
}


SHA = "a" * 40


class Hub(BaseHTTPRequestHandler):
    """Serves `owner/model`."""

    broken = ""
    """Name of a file whose download fails."""
    requested: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        *_, name = path.partition(f"/owner/model/resolve/{SHA}/")
        if path in ("/api/models/owner/model", "/api/models/owner/model/revision/main"):
            files = [{"rfilename": name, "size": size} for name, size in SIZES.items()]
            self._respond(json.dumps({"id": "owner/model", "sha": SHA, "siblings": files}).encode())
        elif path == f"/api/models/owner/model/tree/{SHA}":
            tree = [{"type": "file", "path": n, "size": s, "oid": n} for n, s in SIZES.items()]
            self._respond(json.dumps(tree).encode())
        elif name in SIZES and name != self.broken:
            self.requested.append(name)
            self._respond(b"x" * SIZES[name], etag=f'"{name}"')
        else:
            self._respond(b"", 404)

    do_HEAD = do_GET

    def _respond(self, body: bytes, status: int = 200, etag: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if etag:
            self.send_header("ETag", etag)
            self.send_header("X-Repo-Commit", SHA)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...
