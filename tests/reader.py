"""A browser tab on the built pages, and how the browser is started: with no network."""

import time

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATIENCE = 180  # seconds that a page may take on a slow and busy machine
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND",  # no name resolves: there is no network
)


class Reader:
    """A browser tab that notes every request that leaves the disk and every error."""

    def __init__(self, tab, site):
        self.tab, self.site = tab, site
        tab.set_default_timeout(1000 * PATIENCE)  # navigation too
        self.left: list[str] = []
        self.loads: list[str] = []
        self.errors: list[str] = []
        tab.on("request", lambda request: self._note(request.url))
        tab.on("pageerror", lambda error: self.errors.append(str(error)))
        tab.on("console", lambda m: self.errors.append(m.text) if m.type == "error" else None)

    def _note(self, url):
        self.loads.append(url)
        if not url.startswith(("file:", "data:", "blob:")):
            self.left.append(url)

    def open(self, name):
        path, _, query = name.partition("?")
        address = (self.site / f"{path}.html").as_uri() + (f"?{query}" if query else "")
        self.tab.goto(address, wait_until="load")
        return self.tab


def soon(read, wanted):
    """Assert that ``read()`` comes to equal ``wanted``, however slow the machine is."""
    end = time.monotonic() + PATIENCE
    while (found := read()) != wanted and time.monotonic() < end:
        time.sleep(0.02)
    assert found == wanted
