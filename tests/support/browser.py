"""A real Chromium without a window, spoken to by its debugging pipe: opens a page, listens, takes pictures."""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-headless", "chromium-headless-shell", "chromium-browser", "google-chrome")


def chromium() -> str | None:
    """The program, where there is one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of a Chromium; a context manager."""

    def __init__(self, profile: Path) -> None:
        program = chromium()
        assert program
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        # The shell gives the pipes the numbers 3 and 4, at which Chromium looks for them.
        command = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        options = (
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
            *("--disable-background-networking", "--hide-scrollbars", "--remote-debugging-pipe"),
            f"--user-data-dir={profile}",
        )
        self._process = subprocess.Popen(
            ["bash", "-c", command, "bash", program, *options, "about:blank"],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer, self._calls = b"", 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> "Browser":
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(120)
        os.close(self._read)
        os.close(self._write)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A command of the DevTools protocol, and its result."""
        self._calls += 1
        number = self._calls
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result

    def _message(self, timeout: float = 240) -> dict[str, Any]:
        until = time.monotonic() + timeout
        while b"\0" not in self._buffer:
            left = until - time.monotonic()
            assert left > 0 and select.select([self._read], [], [], left)[0], "Chromium does not answer"
            chunk = os.read(self._read, 1 << 20)
            assert chunk, "Chromium ended"
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        value: dict[str, Any] = json.loads(message)
        if "method" in value:
            self.events.append(value)
        return value

    def open(self, page: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Open a file and wait until it is loaded and laid out."""
        mobile = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=page.absolute().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._message()
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def complaints(self) -> list[Any]:
        """What the console says, errors that nobody caught, and whatever the page asked for but itself."""
        found: list[Any] = []
        for event in self.events:
            if event["method"] in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
                found.append(event["params"])
            elif event["method"] == "Network.requestWillBeSent":
                url = event["params"]["request"]["url"]
                if not url.startswith(("data:", "file:")):
                    found.append(url)
        return found

    def picture(self, *, whole: bool = False, of: str | None = None) -> bytes:
        """The page as a PNG: what is seen, all of it, or the first element of a CSS selector, with a margin."""
        options: dict[str, Any] = {}
        if of:
            x, y, width, height = self.run(
                f"(({{x, y, width, height}}) => [x, y, width, height])"
                f"(document.querySelector({json.dumps(of)}).getBoundingClientRect())"
            )
            clip = {"x": x - 8, "y": y - 8, "width": width + 16, "height": height + 16, "scale": 1}
            options = {"captureBeyondViewport": True, "clip": clip}
        elif whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 12000), "scale": 1}
            options = {"captureBeyondViewport": True, "clip": clip}
        return base64.b64decode(self.call("Page.captureScreenshot", format="png", **options)["data"])
