"""A Hub on loopback, enough of it for `huggingface_hub`'s own client to list and download repositories from folders."""

import contextlib
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubHandler(BaseHTTPRequestHandler):
    """Serves `root/user/name/...` as the repository `user/name` with one commit on `main`."""

    def do_GET(self):
        path = unquote(urlsplit(self.path).path).strip("/")
        if path.startswith("api/models/"):
            self.answer_api(path.removeprefix("api/models/").split("/"))
        else:
            self.answer_file(path.split("/"))

    do_HEAD = do_GET

    def repository(self, parts):
        folder = Path(self.server.root, *parts[:2])
        if not folder.is_dir():
            self.fail("RepoNotFound")
            return None
        return folder

    def answer_api(self, parts):
        if (folder := self.repository(parts)) is None:
            return
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        names = [path.relative_to(folder).as_posix() for path in files]
        if parts[2:3] == ["tree"]:
            entries = [
                {"type": "file", "path": name, "size": path.stat().st_size, "oid": etag(path)}
                for name, path in zip(names, files)
            ]
            self.send(json.dumps(entries).encode(), "application/json")
        else:
            siblings = [{"rfilename": name} for name in names]
            info = {"id": "/".join(parts[:2]), "sha": COMMIT, "siblings": siblings, "tags": [], "private": False}
            self.send(json.dumps(info).encode(), "application/json")

    def answer_file(self, parts):
        if (folder := self.repository(parts)) is None:
            return
        resolve, revision, *name = parts[2:]
        if resolve != "resolve" or revision not in ("main", COMMIT):
            return self.fail("RevisionNotFound")
        path = folder.joinpath(*name)
        if not path.is_file():
            return self.fail("EntryNotFound")
        self.server.downloads.append("/".join(parts))
        self.send(path.read_bytes(), "application/octet-stream", {"ETag": f'"{etag(path)}"', "X-Repo-Commit": COMMIT})

    def fail(self, code):
        self.send(b"", "text/plain", {"X-Error-Code": code, "X-Repo-Commit": COMMIT}, status=404)

    def send(self, body, content_type, headers=(), status=200):
        self.send_response(status)
        for name, value in {"Content-Type": content_type, "Content-Length": str(len(body)), **dict(headers)}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


def etag(path):
    return hashlib.sha1(path.read_bytes()).hexdigest()


@contextlib.contextmanager
def serve(root):
    """Serves the repositories under `root`; yields the server, with `.url` and the list `.downloads`."""
    with ThreadingHTTPServer(("127.0.0.1", 0), HubHandler) as server:
        server.root, server.downloads = root, []
        server.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
