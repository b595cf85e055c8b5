"""A Hub on loopback: `huggingface_hub`'s own client lists, downloads, creates and fills repositories that are folders."""

import base64
import contextlib
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit


COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubHandler(BaseHTTPRequestHandler):
    """Serves `root/user/name/...` as the repository `user/name` with one commit on `main`; data sets and Spaces likewise."""

    def do_GET(self):
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        if parts[0] == "api" and parts[1] in ("models", "datasets"):
            self.answer_api(parts[2:])
        elif parts[0] == "api":
            self.fail("EntryNotFound")
        else:
            self.answer_file(parts[1:] if parts[0] in ("datasets", "spaces") else parts)

    do_HEAD = do_GET

    def do_POST(self):
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if parts[1:] == ["repos", "create"]:
            request = json.loads(body)
            repository = f"{request.get('organization') or 'user'}/{request['name']}"
            if not Path(self.server.root, repository).exists():
                self.server.private[repository] = (
                    request.get("visibility") == "private" or request.get("private") is True
                )
            self.server.created.append(request)
            Path(self.server.root, repository).mkdir(parents=True, exist_ok=True)
            answer = {"url": f"{self.server.url}/{repository}", "name": repository, "id": repository}
        elif parts[4:5] == ["branch"]:
            self.server.branches.append(parts[5])
            answer = {}  # all branches share one commit
        elif parts[1:] == ["validate-yaml"]:
            answer = {"errors": [], "warnings": []}
        elif parts[4:5] == ["paths-info"]:
            folder = Path(self.server.root, *parts[2:4])
            paths = [folder / name for name in parse_qs(body.decode())["paths"]]
            answer = [entry(path, folder) for path in paths if path.exists()]
        elif parts[4:5] == ["preupload"]:
            # Files are sent in the commit itself: neither LFS nor xet.
            answer = {
                "files": [
                    {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                    for file in json.loads(body)["files"]
                ]
            }
        elif self.server.failures:
            self.server.failures -= 1
            return self.send(b"no", "text/plain", status=400)
        else:
            self.server.commits.append(parts[5])
            self.commit(Path(self.server.root, *parts[2:4]), [json.loads(line) for line in body.splitlines()])
            answer = {
                "commitUrl": f"{self.server.url}/{parts[2]}/{parts[3]}/commit/{COMMIT}",
                "commitOid": COMMIT,
                "success": True,
            }
        self.send(json.dumps(answer).encode(), "application/json")

    def commit(self, folder, changes):
        for change in changes:
            if change["key"] == "file":
                path = folder / change["value"]["path"]
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(base64.b64decode(change["value"]["content"]))
            elif change["key"] == "deletedFile":
                (folder / change["value"]["path"]).unlink()

    def repository(self, parts):
        folder = Path(self.server.root, *parts[:2])
        if not folder.is_dir():
            self.fail("RepoNotFound")
            return None
        return folder

    def answer_api(self, parts):
        if (folder := self.repository(parts)) is None:
            return
        if parts[2:3] == ["tree"]:
            inside = folder.joinpath(*parts[4:])
            if not inside.is_dir():
                return self.fail("EntryNotFound")
            paths = inside.rglob("*") if "recursive=true" in self.path.lower() else inside.iterdir()
            self.send(json.dumps([entry(path, folder) for path in sorted(paths)]).encode(), "application/json")
        else:
            files = sorted(path for path in folder.rglob("*") if path.is_file())
            siblings = [{"rfilename": path.relative_to(folder).as_posix()} for path in files]
            info = {"id": "/".join(parts[:2]), "sha": COMMIT, "siblings": siblings, "tags": []}
            info["private"] = self.server.private.get(info["id"], False)
            self.send(json.dumps(info).encode(), "application/json")

    def answer_file(self, parts):
        if (folder := self.repository(parts)) is None:
            return
        resolve, revision, *name = parts[2:]
        if resolve != "resolve" or revision not in ("main", COMMIT, *self.server.branches):
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


def entry(path, folder):
    name = path.relative_to(folder).as_posix()
    if path.is_dir():
        return {"type": "directory", "path": name, "oid": "0" * 40}
    return {"type": "file", "path": name, "size": path.stat().st_size, "oid": etag(path)}


def etag(path):
    return hashlib.sha1(path.read_bytes()).hexdigest()


@contextlib.contextmanager
def serve(root):
    """Serves the repositories under `root`; yields the server, with `.url` and the list `.downloads`."""
    with ThreadingHTTPServer(("127.0.0.1", 0), HubHandler) as server:
        server.root, server.downloads, server.created, server.branches, server.private = root, [], [], [], {}
        server.commits = []  # the branch of every commit
        server.failures = 0  # commits to refuse from now on
        server.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
