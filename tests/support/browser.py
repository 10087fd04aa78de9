"""A headless Chromium, driven over a pipe (Chrome DevTools Protocol), without further packages."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """One tab. Collects console errors and the addresses of all requests."""

    def __init__(self, width: int = 1100, height: int = 800) -> None:
        assert CHROMIUM is not None
        self._folder = tempfile.TemporaryDirectory(prefix="slipstream-chromium-")
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()

        def before() -> None:  # the browser reads commands from 3 and writes to 4
            os.dup2(to_read, 13)
            os.dup2(to_write, 14)
            os.dup2(13, 3)
            os.dup2(14, 4)

        flags = ["--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--no-first-run",
                 "--disable-background-networking", "--disable-dev-shm-usage", f"--window-size={width},{height}",
                 f"--user-data-dir={self._folder.name}", "about:blank"]  # fmt: skip
        self.process = subprocess.Popen(
            [CHROMIUM, *flags],
            preexec_fn=before,
            pass_fds=(3, 4, to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self._is_loaded = False
        self.errors: list[str] = []  # of the console and of scripts
        self.urls: list[str] = []  # of all requests
        pages = [each for each in self.send("Target.getTargets")["targetInfos"] if each["type"] == "page"]
        attached = self.send("Target.attachToTarget", targetId=pages[0]["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            data = os.read(self._read, 65536)
            assert data, "the browser has ended"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        params = found.get("params", {})
        if found.get("method") == "Network.requestWillBeSent":
            self.urls.append(params["request"]["url"])
        elif found.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"])[:2000])
        elif found.get("method") == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.errors.append(json.dumps(params["args"])[:2000])
        elif found.get("method") == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(json.dumps(params["entry"])[:2000])
        elif found.get("method") == "Page.loadEventFired":
            self._is_loaded = True
        return found

    def open(self, url: str) -> None:
        """Loads a page. Scripts run in the new page from then on: one that the old page still evaluates would fail."""
        self._is_loaded = False
        if "loaderId" in self.send("Page.navigate", url=url):  # else another place of the same page
            self._wait_for_page()

    def reload(self) -> None:
        self._is_loaded = False
        self.send("Page.reload")
        self._wait_for_page()

    def _wait_for_page(self) -> None:
        while not self._is_loaded:
            self._receive()

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, (script, answer["exceptionDetails"])
        return answer["result"].get("value")

    def until(self, script: str, seconds: float = 30) -> None:
        """Waits until an expression is true."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.run(f"Boolean({script})"):
                return
            self.run("new Promise(done => requestAnimationFrame(() => done(1)))")
        raise AssertionError(f"{script} did not become true; errors: {self.errors}")

    def press(self, key: str, *, shift: bool = False) -> None:
        text = {"Enter": "\r", " ": " "}.get(key, key if len(key) == 1 else "")
        modifiers = 8 if shift else 0
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, text=text, modifiers=modifiers)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key, modifiers=modifiers)

    def type(self, text: str) -> None:
        self.send("Input.insertText", text=text)

    def resize(self, width: int, height: int) -> None:
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def screenshot(self, path: Path) -> None:
        how = {"format": "webp", "quality": 80} if path.suffix == ".webp" else {"format": "png"}
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", **how)["data"]))

    def close(self) -> None:
        os.close(self._write)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self._read)
        self._folder.cleanup()
