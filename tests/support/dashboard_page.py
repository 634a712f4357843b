"""A page with one dashboard view, served as TensorBoard does, with checks and waits."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from lightning_modelprof.tensorboard_plugin.plugin import static_files
from tests.support.chromium import requested, said

# TensorBoard 2.21 sends it with every plugin page.
POLICY = "; ".join(
    (
        "default-src 'self'",
        "font-src 'self' data:",
        "frame-src 'self' https://ui.perfetto.dev",
        "img-src 'self' data: blob:",
        "object-src 'none'",
        "style-src 'self' https://www.gstatic.com data: 'unsafe-inline'",
        "connect-src 'self'",
        "script-src 'self' 'unsafe-eval'",
    )
)

HTML, SCRIPT, BYTES = "text/html; charset=utf-8", "text/javascript", "application/octet-stream"

Files = dict[str, tuple[bytes, str]]
"""Name → content and media type."""

Site = tuple[str, Files]
"""What is served: its address, and the files before those of the dashboard."""

_LOADS = itertools.count()


@contextmanager
def serve(own: Files) -> Iterator[str]:
    """Serve ``own``, which may change while served, then the dashboard's files; yield the address.

    The browser requests the dashboard's own files once.
    """
    files = {name: (file.content, file.media_type) for name, file in static_files().items()}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.partition("?")[0].lstrip("/")
            content, media_type = own.get(name) or files.get(name) or (b"", "")
            self.send_response(200 if media_type else 404)
            self.send_header("Content-Type", media_type or "text/plain")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("Content-Security-Policy", POLICY)
            self.send_header("Content-Length", str(len(content)))
            is_kept = name in files and name not in own
            self.send_header("Cache-Control", "max-age=86400" if is_kept else "no-store")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            """Keep the tests' output for failures."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    # The default polls for shutdown every half second.
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def watched(browser: Any, address: str) -> Iterator[None]:
    """Check that the console stays empty and that requests only go to the address."""
    requested(browser)
    said(browser)
    yield
    assert said(browser) == []
    asked = requested(browser)
    assert asked
    assert {url for url in asked if not url.startswith(address)} == set()


@contextmanager
def loaded(browser: Any, site: Site, own: Files, fragment: str = "") -> Iterator[None]:
    """A newly loaded page of these files, watched."""
    with watched(browser, site[0]):
        load(browser, site, own, fragment)
        yield


def load(browser: Any, site: Site, own: Files, fragment: str = "") -> None:
    """Load a page of these files, whatever page is open."""
    address, files = site
    files.clear()
    files.update(own)
    # Changing only the fragment of an address would load nothing.
    browser.get(f"{address}?{next(_LOADS)}#{fragment}")


def wait(browser: Any, script: str, *arguments: Any, seconds: float = 60) -> Any:
    """Wait until the script returns a true value, and return it."""
    end = time.monotonic() + seconds
    while not (answer := browser.execute_script(script, *arguments)):
        assert time.monotonic() < end, said(browser)
        time.sleep(0.01)
    return answer
