"""A headless Chromium over the DevTools protocol's pipe: pages from files, their scripts' answers, their console."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--hide-scrollbars",
)


class Browser:
    """One Chromium with one page. `complaints` are the console's errors and warnings, and exceptions, of the page."""

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM is not None
        commands, self._out = os.pipe()
        self._in, answers = os.pipe()
        high = [fcntl.fcntl(end, fcntl.F_DUPFD, 64) for end in (commands, answers)]  # where 3 and 4 are not

        def place() -> None:
            for wanted, end in zip((3, 4), high, strict=True):
                os.dup2(end, wanted)

        self._process = subprocess.Popen(
            [CHROMIUM, *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={folder}", "about:blank"],
            preexec_fn=place, pass_fds=(3, 4), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, env=os.environ | {"HOME": str(folder)},
        )  # fmt: skip
        for end in (commands, answers, *high):
            os.close(end)
        self._buffer = b""
        self._id = 0
        self._session: str | None = None
        self._events: list[dict[str, Any]] = []
        self.complaints: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")
        self.resize(1366, 900)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._out)
        os.close(self._in)

    def resize(self, width: int, height: int) -> None:
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def prefer(self, scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._call("Emulation.setEmulatedMedia", features=features)

    def open(self, file: Path, fragment: str = "") -> None:
        """Opens a file, anew where it is open, and waits until it is loaded."""
        self.complaints.clear()
        self._events.clear()
        self._call("Page.navigate", url="about:blank")
        self._wait("Page.loadEventFired")
        self._events.clear()
        self._call("Page.navigate", url=file.as_uri() + (f"#{fragment}" if fragment else ""))
        self._wait("Page.loadEventFired")

    def requests(self) -> list[str]:
        """Addresses that the page asked for, its own included."""
        self.run("0")
        return [e["params"]["request"]["url"] for e in self._events if e["method"] == "Network.requestWillBeSent"]

    def run(self, script: str) -> Any:
        """The value of an expression in the page, two frames later."""
        later = f"new Promise(done => {{ const value = {script}; const frame = requestAnimationFrame; "
        later += "frame(() => frame(() => done(value))); })"
        answer = self._call("Runtime.evaluate", expression=later, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def texts(self, selector: str) -> list[str]:
        found: list[str] = self.run(f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.textContent)")
        return found

    def click(self, selector: str) -> None:
        """A press of the mouse in the middle of an element."""
        where = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{where}.scrollIntoView({{block: 'center'}})")
        x, y = self.run(f"(b => [b.x + b.width / 2, b.y + b.height / 2])({where}.getBoundingClientRect())")
        self.press(x, y)

    def press(self, x: float, y: float) -> None:
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, text: str) -> None:
        self._call("Input.insertText", text=text)

    def key(self, name: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key=name, code=name)

    def screenshot(self, file: Path, *, whole: bool = False) -> None:
        picture = self._call("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        file.write_bytes(base64.b64decode(picture))

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._id += 1
        message: dict[str, Any] = {"id": self._id, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data) :]
        while True:
            answer = self._read()
            if answer.get("id") == self._id:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def _wait(self, event: str) -> None:
        while not any(each["method"] == event for each in self._events):
            self._read()

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            data = os.read(self._in, 1 << 16)
            assert data, "Chromium has ended"
            self._buffer += data
        text, self._buffer = self._buffer.split(b"\0", 1)
        message: dict[str, Any] = json.loads(text)
        if "method" in message:
            self._events.append(message)
            params = message["params"]
            if message["method"] == "Runtime.exceptionThrown":
                self.complaints.append(str(params["exceptionDetails"].get("exception", params)))
            elif message["method"] == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                self.complaints.append(str(params["args"]))
            elif message["method"] == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                self.complaints.append(params["entry"]["text"])
        return message


@contextmanager
def chromium(folder: Path) -> Iterator[Browser]:
    """A browser whose profile lies in a folder."""
    browser = Browser(folder)
    try:
        yield browser
    finally:
        browser.close()
