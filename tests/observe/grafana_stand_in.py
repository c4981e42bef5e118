"""Answers like Grafana's HTTP API, with its status codes, and keeps what it was given."""

from __future__ import annotations

import json
import re
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, urlsplit

from tests.observe.local_server import LocalServer

TOKEN = "glsa_secret-of-the-service-account"


class StandIn(LocalServer):
    """A server on 127.0.0.1.

    `writes` lists every change that was asked for; `fail` says what to answer instead: part of path -> (status, body).
    """

    def __init__(self):
        self.folders, self.boards, self.sources, self.groups = {}, {}, {}, {}
        self.writes, self.fail = [], {}
        super().__init__()

    def answer(self, method, target, headers, body):
        path = urlsplit(target).path.removeprefix("/api")
        for part, failure in self.fail.items():
            if part in f"{method} {path}":
                return failure
        if headers.get("authorization") != f"Bearer {TOKEN}":
            return 401, {"message": "Invalid API key"}
        if method != "GET":
            self.writes.append(f"{method} {path}")
        for pattern, handler in self._routes():
            if found := re.fullmatch(pattern, f"{method} {path}"):
                return handler(body, headers, parse_qs(urlsplit(target).query), *found.groups())
        return 404, {"message": "Not found"}

    def _routes(self):
        return (
            (r"GET /folders/([^/]+)", self._getter(self.folders, "folder not found")),
            (r"POST /folders", self._post_folder),
            (r"GET /datasources/uid/([^/]+)", self._getter(self.sources, "Data source not found")),
            (r"POST /datasources", self._post_source),
            (r"PUT /datasources/uid/([^/]+)", self._put_source),
            (r"GET /dashboards/uid/([^/]+)", self._getter(self.boards, "Dashboard not found")),
            (r"POST /dashboards/db", self._post_board),
            (r"DELETE /dashboards/uid/([^/]+)", self._delete_board),
            (r"GET /v1/provisioning/folder/([^/]+)/rule-groups/([^/]+)", self._get_group),
            (r"PUT /v1/provisioning/folder/([^/]+)/rule-groups/([^/]+)", self._put_group),
            (r"GET /search", self._search),
        )  # fmt: skip

    @staticmethod
    def _getter(where, message):
        return lambda _body, _headers, _query, uid: (200, where[uid]) if uid in where else (404, {"message": message})

    def _post_folder(self, body, *_):
        if body["uid"] in self.folders:
            return 412, {"message": "a folder with the same uid already exists"}
        self.folders[body["uid"]] = {**body, "id": len(self.folders) + 1, "version": 1}
        return 200, self.folders[body["uid"]]

    def _post_source(self, body, *_):
        if body["uid"] in self.sources:
            return 409, {"message": "data source with the same name already exists"}
        return self._put_source(body, {}, {}, body["uid"])

    def _put_source(self, body, _headers, _query, uid):
        self.sources[uid] = {**body, "id": 1, "orgId": 1, "isDefault": False, "readOnly": False}
        return 200, {"message": "Datasource added", "datasource": self.sources[uid]}

    def _post_board(self, body, *_):
        if body["folderUid"] not in self.folders:
            return 400, {"message": "folder not found"}
        model = body["dashboard"]
        before = self.boards.get(model["uid"])
        if before is not None and not body.get("overwrite"):
            return 412, {"message": "The dashboard has been changed by someone else", "status": "version-mismatch"}
        version = 1 if before is None else before["dashboard"]["version"] + 1
        kept = {**model, "id": 7, "version": version}
        self.boards[model["uid"]] = {"dashboard": kept, "meta": {"folderUid": body["folderUid"], "slug": "x"}}
        return 200, {"uid": model["uid"], "status": "success", "version": version}

    def _delete_board(self, _body, _headers, _query, uid):
        if self.boards.pop(uid, None) is None:
            return 404, {"message": "Dashboard not found"}
        return 200, {"message": "Dashboard deleted", "title": uid}

    def _get_group(self, _body, _headers, _query, folder, group):
        found = self.groups.get((folder, group))
        return (200, found) if found else (404, {"message": "rule group not found"})

    def _put_group(self, body, headers, _query, folder, group):
        if headers.get("x-disable-provenance") != "true":
            return 409, {"message": "provenance mismatch"}
        rules = [{**rule, "id": 1, "updated": "2026-01-01T00:00:00Z", "isPaused": False} for rule in body["rules"]]
        self.groups[folder, group] = {**body, "rules": rules}
        return 202, None  # Grafana has answered writes with an empty body

    def _search(self, _body, _headers, query):
        tag, folder = query["tag"][0], query["folderUIDs"][0]
        return 200, [
            {"uid": uid, "tags": board["dashboard"]["tags"], "type": "dash-db"}
            for uid, board in self.boards.items()
            if tag in board["dashboard"]["tags"] and board["meta"]["folderUid"] == folder
        ]

    def _handler(stand_in):  # noqa: N805  # the handler's own methods have a self
        class Handler(BaseHTTPRequestHandler):
            def _serve(self):
                length = int(self.headers.get("content-length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                headers = {name.lower(): value for name, value in self.headers.items()}
                status, answer = stand_in.answer(self.command, self.path, headers, body)
                data = answer if isinstance(answer, bytes) else b"" if answer is None else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PUT = do_DELETE = _serve  # noqa: N815  # http.server's names

            def log_message(self, *_):
                pass

        return Handler
