"""Tiny wheels, made here, and a package index on loopback that has them and wants a password."""

import base64
import contextlib
import threading
import zipfile
from collections.abc import Mapping
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

USER, PASSWORD = "me", "p4ssw0rd-of-the-index"


def make_wheel(
    folder: Path, name: str, version: str = "1.0", *, files: Mapping[str, str] | None = None, needs: str = ""
) -> Path:
    """A wheel of one module, with a script ``NAME-says`` that prints where it runs."""
    info = f"{name}-{version}.dist-info"
    content = {
        f"{name}.py": f"import sys\n__version__ = '{version}'\ndef say(): print(sys.executable)\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        + (f"Requires-Dist: {needs}\n" if needs else ""),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{name}-says = {name}:say\n",
        **(files or {}),
    }
    content[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*content, f"{info}/RECORD"])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for inside, text in content.items():
            archive.writestr(inside, text)
    return path


class Index(ThreadingHTTPServer):
    """A package index on loopback that wants a password, and can keep who asks for a wheel waiting."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.go = threading.Event()
        self.go.set()
        self.is_asked = threading.Event()
        super().__init__(("127.0.0.1", 0), _Answer)

    @property
    def url(self) -> str:
        return f"http://{USER}:{PASSWORD}@127.0.0.1:{self.server_address[1]}/"


class _Answer(SimpleHTTPRequestHandler):
    server: Index

    def do_GET(self) -> None:
        wanted = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        if self.headers.get("Authorization") != wanted:
            self.send_response(401)
            self.send_header("WWW-Authenticate", "Basic")
            self.end_headers()
            return
        name = self.path.strip("/")
        if name.endswith(".whl"):
            self.server.is_asked.set()
            self.server.go.wait(60)
            data = (self.server.folder / name).read_bytes()
        else:
            data = "".join(
                f'<a href="/{path.name}">{path.name}</a>\n'
                for path in self.server.folder.glob(f"{name}-*.whl")
            ).encode()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # who asked was killed
            self.send_response(200 if data else 404)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the base's name
        pass
