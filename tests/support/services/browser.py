"""A real Chromium without a window, driven over its debugging protocol.

    with browser(tmp_path) as page:
        page.open("http://127.0.0.1:4200/runs")
        page.wait("document.querySelector('h1')", "a heading")
        page.click("Resume")

Nothing but loopback can be reached. The browser ends with its `with` block, and when the test
process is killed.
"""

import base64
import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

from tasks.kernel.process import guarded_process

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next((path for path in map(shutil.which, NAMES) if path), None)
needs_browser = pytest.mark.skipif(
    BROWSER is None, reason=f"none of {', '.join(NAMES)} is installed"
)
START_LIMIT_S = 120
REPLY_LIMIT_S = 120
WAIT_LIMIT_S = 120
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-port=0",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
)  # fmt: skip

_FIND = """
(text => {
  const seen = e => { const b = e.getBoundingClientRect(); return b.width > 0 && b.height > 0; };
  const roles = 'button, a, [role=button], [role=menuitem], [role=option], [role=tab], label, li';
  const found = [...document.querySelectorAll(roles)].filter(
    e => seen(e) && (e.innerText || e.ariaLabel || '').trim() === text);
  return found[found.length - 1];
})"""


class Page:
    """One tab.

    Attributes:
        console: errors that the page reported.
    """

    def __init__(self, connection: ClientConnection) -> None:
        self._connection, self._numbers = connection, itertools.count(1)
        self.console: list[str] = []
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol and its reply."""
        number = next(self._numbers)
        self._connection.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            said = json.loads(self._connection.recv(timeout=REPLY_LIMIT_S))
            self._note(said)
            if said.get("id") == number:
                assert "error" not in said, f"{method}: {said['error']}"
                return dict(said["result"])

    def open(self, url: str) -> None:
        """Go to an address; does not wait for what its scripts then show."""
        self.call("Page.navigate", url=url)

    def run_before_each_page(self, script: str) -> None:
        """Run a script in every page before its own."""
        self.call("Page.addScriptToEvaluateOnNewDocument", source=script)

    def value(self, expression: str) -> Any:
        """Value of a JavaScript expression; a promise is waited for."""
        reply = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    @property
    def text(self) -> str:
        """The words that the page shows."""
        return str(self.value("document.body ? document.body.innerText : ''"))

    def wait(self, expression: str, what: str) -> Any:
        """Poll until an expression holds; returns its value.

        Raises:
            AssertionError: it did not; the message has the page's words.
        """
        deadline = time.monotonic() + WAIT_LIMIT_S
        while not (found := self.value(f"(() => {{ const v = {expression}; return v && v.nodeType "
                                       "? true : v; })()")):  # fmt: skip
            assert time.monotonic() < deadline, f"never saw {what} in: {self.text[:3000]}"
            time.sleep(0.2)
        return found

    def wait_for_text(self, *words: str) -> None:
        """Poll until the page shows all these words."""
        for word in words:
            self.wait(f"document.body?.innerText.includes({json.dumps(word)})", repr(word))

    def click(self, text: str) -> None:
        """Click the last button, link, tab or menu entry with exactly these words."""
        element = f"{_FIND}({json.dumps(text)})"
        self.wait(f"{element} && !{element}.disabled", f"something to click that says {text!r}")
        self.click_on(element)

    def click_on(self, element: str) -> None:
        """Click the middle of an element, given as an expression, as a mouse does."""
        self.value(f"{element}.scrollIntoView({{block: 'center'}})")
        box = self.value(
            f"(() => {{ const b = {element}.getBoundingClientRect();"
            " return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.call(
                "Input.dispatchMouseEvent",
                type=kind, x=box[0], y=box[1], button="left", clickCount=1,
            )  # fmt: skip

    def type_into(self, element: str, text: str) -> None:
        """Click an input, given as an expression, and type."""
        self.click_on(element)
        self.call("Input.insertText", text=text)

    def set_size(self, width: int, height: int) -> None:
        """Size of the window, in pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip

    def prefer(self, scheme: str) -> None:
        """Ask pages for the `light` or the `dark` look."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def picture(self, file: Path) -> None:
        """Write what the window shows as PNG."""
        shot = self.call("Page.captureScreenshot", format="png")
        file.write_bytes(base64.b64decode(shot["data"]))

    def _note(self, said: dict[str, Any]) -> None:
        if said.get("method") == "Runtime.exceptionThrown":
            self.console.append(json.dumps(said["params"])[:500])
        if said.get("method") == "Log.entryAdded" and said["params"]["entry"]["level"] == "error":
            self.console.append(said["params"]["entry"]["text"])


@contextmanager
def browser(scratch: Path, width: int = 1400, height: int = 1000) -> Iterator[Page]:
    """A browser with one tab; its profile lies in `scratch`."""
    if BROWSER is None:
        raise RuntimeError("no Chromium is installed, which shows pages; see `make tools`")
    profile = scratch / "profile"
    command = [BROWSER, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    log = scratch / "browser.log"
    with guarded_process(command, log, os.environ, folder=scratch) as process:
        address = _address_of_tab(process, profile / "DevToolsActivePort")
        with connect(address, max_size=None) as connection:
            page = Page(connection)
            page.set_size(width, height)
            yield page


def _address_of_tab(process: subprocess.Popen[bytes], file: Path) -> str:
    deadline = time.monotonic() + START_LIMIT_S
    while process.poll() is None and time.monotonic() < deadline:
        if file.exists() and len(lines := file.read_text().splitlines()) == 2:
            with connect(f"ws://127.0.0.1:{lines[0]}{lines[1]}", max_size=None) as whole:
                whole.send(json.dumps({"id": 1, "method": "Target.getTargets"}))
                targets = json.loads(whole.recv(timeout=REPLY_LIMIT_S))["result"]["targetInfos"]
            tabs = [t["targetId"] for t in targets if t["type"] == "page"]
            if tabs:
                return f"ws://127.0.0.1:{lines[0]}/devtools/page/{tabs[0]}"
        time.sleep(0.1)
    raise AssertionError(f"no browser: {(file.parent.parent / 'browser.log').read_text()[-2000:]}")
