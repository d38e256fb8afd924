"""A headless browser that measures pages: which boxes are cut off at the width of a phone or of a
laptop.
"""

from __future__ import annotations

import base64
import html
import json
import re
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import websocket

# Run inside the page: boxes that hold more than they show, and cells that reach beyond the window.
_MEASURE = """
<script>addEventListener('load', () => setTimeout(() => {
  const cut = [];
  const width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > width) cut.push('page ' + document.documentElement.scrollWidth);
  for (const box of document.querySelectorAll('.wide, section, table'))
    if (box.scrollWidth > box.clientWidth + 1) cut.push((box.className || box.tagName) + ' ' + box.scrollWidth
      + ' > ' + box.clientWidth + ': ' + box.textContent.slice(0, 60));
  for (const cell of document.querySelectorAll('td, th, dd, h1, h2, p, li, pre'))
    if (cell.getBoundingClientRect().right > width + 1) cut.push('cell ' + cell.textContent.slice(0, 60));
  parent.postMessage({width, cut, cells: document.querySelectorAll('td').length}, '*');
}, WAIT));</script>
"""
_FRAME = """<!doctype html><body><iframe src="PAGE" style="width:WIDTHpx;height:30000px;border:0"></iframe><script>
addEventListener('message', (event) => {
  if (!event.data || event.data.cut === undefined) return;
  const found = document.createElement('pre'); found.id = 'found'; found.textContent = JSON.stringify(event.data);
  document.body.append(found);
});</script>"""
_OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
    "--window-size=1600,1200",
    "--enable-logging=stderr",
)


class Browser:
    """One chromium for several pages, driven by the DevTools protocol.

    It keeps all requests and console messages.

    Skips the test where chromium is not installed.
    """

    def __init__(self, folder: Path) -> None:
        program = shutil.which("chromium")
        if program is None:
            pytest.skip("chromium is not installed")
        words = [
            *_OPTIONS,
            "--hide-scrollbars",
            "--force-color-profile=srgb",
            "--remote-debugging-port=0",
        ]
        self._process = subprocess.Popen(
            [program, *words, f"--user-data-dir={folder}/profile", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            self._socket = websocket.create_connection(
                self._address(folder / "profile" / "DevToolsActivePort"),
                timeout=60,
                suppress_origin=True,
            )
        except BaseException:
            self.close()
            raise
        self._sent = 0
        self.heard = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def _address(self, port: Path, seconds: float = 60.0) -> str:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not (port.exists() and port.read_text().strip()):
            time.sleep(0.05)
        with urllib.request.urlopen(
            f"http://127.0.0.1:{port.read_text().split()[0]}/json", timeout=30
        ) as answer:
            return next(
                target["webSocketDebuggerUrl"]
                for target in json.load(answer)
                if target["type"] == "page"
            )

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._sent += 1
        self._socket.send(json.dumps({"id": self._sent, "method": method, "params": parameters}))
        while True:
            answer = json.loads(self._socket.recv())
            if answer.get("id") == self._sent:
                assert "error" not in answer, answer
                return answer["result"]
            self.heard.append(answer)

    def evaluate(self, expression: str) -> Any:
        found = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def open(
        self,
        url: str,
        *,
        width: int = 1000,
        height: int = 1000,
        dark: bool = False,
        printed: bool = False,
    ) -> None:
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", media="print" if printed else "", features=scheme)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Page.navigate", url="about:blank")
        self.heard.clear()
        self.call("Page.navigate", url=url)
        until = time.monotonic() + 60
        while (
            not any(message["method"] == "Page.loadEventFired" for message in self.heard)
            and time.monotonic() < until
        ):
            self.evaluate("new Promise((done) => setTimeout(done, 20))")
        self.evaluate(
            "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )

    def picture(self, *, top: int = 0, height: int = 3200, scale: float = 1.0) -> bytes:
        """A part of the page as PNG, over its whole width."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        height = min(height, int(size["height"]) - top)
        clip = {"x": 0, "y": top, "width": size["width"], "height": height, "scale": scale}
        return base64.b64decode(
            self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)["data"]
        )

    def requests(self) -> list[str]:
        """Addresses that the page asked for since it was opened."""
        return [
            message["params"]["request"]["url"]
            for message in self.heard
            if message["method"] == "Network.requestWillBeSent"
        ]

    def complaints(self) -> list[str]:
        """Errors and messages on the page's console."""
        kinds = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
        return [
            json.dumps(message["params"]) for message in self.heard if message["method"] in kinds
        ]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def dump(page: Path, folder: Path, *, budget_milliseconds: int = 40_000) -> str:
    """The page's document after its scripts have run, without a word on the console, which also
    names refused requests.

    Skips the test where chromium is not installed.
    """
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("chromium is not installed")
    done = subprocess.run(
        [
            browser,
            *_OPTIONS,
            f"--user-data-dir={folder}/profile",
            f"--virtual-time-budget={budget_milliseconds}",
            "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not said, said
    return done.stdout


def cut_off(page: str, width: int, folder: Path, *, wait_milliseconds: int = 100) -> list[str]:
    """What a window of `width` pixels cuts off of a page that has tables.

    Fails when nothing could be measured.
    """
    folder.mkdir(parents=True, exist_ok=True)
    measured = folder / "page.html"
    script = _MEASURE.replace("WAIT", str(wait_milliseconds))
    # It forbids scripts but the page's own
    page = re.sub(r'<meta http-equiv="Content-Security-Policy".*?>', "", page)
    head, body, rest = page.rpartition("</body>")
    measured.write_text(head + script + body + rest if body else page + script)
    frame = folder / "frame.html"
    frame.write_text(_FRAME.replace("PAGE", measured.as_uri()).replace("WIDTH", str(width)))
    shown = re.search(r'<pre id="found">(.*?)</pre>', dump(frame, folder), re.DOTALL)
    assert shown, "the page was not measured"
    found = json.loads(html.unescape(shown[1]))
    assert found["width"] == width and found["cells"] > 0, found
    return found["cut"]
