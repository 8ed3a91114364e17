"""An HTTP cache for `bazel --remote_cache`: GET and PUT of files, in the layout of Bazel's disk cache.

It serves one machine, without a password: for the release check, which runs where no other server is reached.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import shutil
import tempfile
import threading
import wsgiref.types
from collections.abc import Iterable, Iterator
from http import HTTPStatus
from wsgiref.util import FileWrapper

import waitress

# Results of actions and contents of files, each named by a sha256.
_PATH = re.compile(r"/(?P<kind>ac|cas)/(?P<name>(?P<start>[0-9a-f]{2})[0-9a-f]{62})")
_CHUNK_BYTES = 1 << 20
_MAX_FILE_BYTES = 1 << 32
# More than Bazel keeps open: 100 (--remote_max_connections) for downloads, and as many for uploads.
_MAX_CONNECTIONS = 500


class Cache:
    """The WSGI application: every file lies at FOLDER/ac/ab/abcd... or FOLDER/cas/ab/abcd..."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder

    def __call__(
        self, environ: wsgiref.types.WSGIEnvironment, start_response: wsgiref.types.StartResponse
    ) -> Iterable[bytes]:
        def answer(status: HTTPStatus, length: int = 0) -> None:
            start_response(f"{status.value} {status.phrase}", [("Content-Length", str(length))])

        match = _PATH.fullmatch(environ["PATH_INFO"])
        if match is None:
            answer(HTTPStatus.NOT_FOUND)
            return []
        file = self._folder / match["kind"] / match["start"] / match["name"]
        if environ["REQUEST_METHOD"] == "PUT":
            self._store(file, environ["wsgi.input"])
            answer(HTTPStatus.CREATED)
            return []
        if environ["REQUEST_METHOD"] != "GET":
            answer(HTTPStatus.METHOD_NOT_ALLOWED)
            return []
        try:
            content = file.open("rb")
        except FileNotFoundError:
            answer(HTTPStatus.NOT_FOUND)
            return []
        answer(HTTPStatus.OK, os.fstat(content.fileno()).st_size)
        return environ.get("wsgi.file_wrapper", FileWrapper)(content, _CHUNK_BYTES)

    def _store(self, file: pathlib.Path, content: wsgiref.types.InputStream) -> None:
        """Whoever reads the file at the same time sees nothing or all of it."""
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self._folder, prefix="upload.") as folder:
            upload = pathlib.Path(folder, file.name)
            with upload.open("wb") as out:
                shutil.copyfileobj(content, out, _CHUNK_BYTES)
            os.replace(upload, file)


@contextlib.contextmanager
def serve(folder: pathlib.Path) -> Iterator[str]:
    """Runs the server on a free port of this machine, in a thread; gives its address."""
    folder.mkdir(parents=True, exist_ok=True)
    server = waitress.create_server(
        Cache(folder),
        host="127.0.0.1",
        port=0,
        threads=8,
        connection_limit=_MAX_CONNECTIONS,
        max_request_body_size=_MAX_FILE_BYTES,
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.effective_port}"
    finally:
        server.close()
