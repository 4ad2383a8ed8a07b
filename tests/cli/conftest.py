"""A headless Chromium driven over its DevTools pipe, which needs no port and no driver; RL ranks as threads."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from weightsync.cli.rl.local import at_once, groups
from weightsync.cli.rl.parallel import TensorParallel

OnRanks = Callable[[int, Callable[[TensorParallel], Any]], list[Any]]

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
    "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip
SECONDS = 60
"""Deadline of one command."""


def find_browser() -> str | None:
    """A Chromium that starts, or None; some systems have a stub under its name."""
    for path in filter(None, map(shutil.which, NAMES)):
        said = subprocess.run([path, "--version"], capture_output=True, timeout=SECONDS, check=False)
        if said.returncode == 0:
            return path
    return None


class Browser:
    """One page of a headless browser.

    Args:
        path: the program.
        profile: an empty folder for its user data.

    Attributes:
        events: what the browser reported since ``open``, in order.
    """

    def __init__(self, path: str, profile: Path) -> None:
        self.events: list[dict[str, Any]] = []
        self._sent = 0
        self._rest = b""
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        # Chromium reads commands from descriptor 3 and writes to 4; bash puts them there.
        command = [
            "bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash",
            path, *FLAGS, f"--user-data-dir={profile}", "about:blank",
        ]  # fmt: skip
        self.process = subprocess.Popen(
            command, pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._session: str | None = None
        pages = self.ask("Target.getTargets")["targetInfos"]
        target = next(one["targetId"] for one in pages if one["type"] == "page")
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime", "Accessibility"):
            self.ask(f"{domain}.enable")
        self.ask("Page.setLifecycleEventsEnabled", enabled=True)

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """The answer to one DevTools command."""
        self._sent += 1
        message: dict[str, Any] = {"id": self._sent, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            heard = self._hear()
            if heard.get("id") == self._sent:
                if "error" in heard:
                    raise RuntimeError(f"{method}: {heard['error']}")
                answer: dict[str, Any] = heard["result"]
                return answer
            self.events.append(heard)

    def open(self, file: Path, width: int = 1280, scheme: str = "light", height: int = 900) -> None:
        """Load a page and return once its load event came; ``events`` are those since."""
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 500,
        )  # fmt: skip
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self._go("about:blank")
        self.events.clear()
        self._go(file.as_uri())
        self.run("new Promise(done => requestAnimationFrame(() => setTimeout(done)))")

    def run(self, script: str) -> Any:
        """The value of a script, awaited."""
        found = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"])
        return found["result"].get("value")

    def happened(self, method: str) -> list[dict[str, Any]]:
        """Parameters of the events of one kind since ``open``."""
        return [one["params"] for one in self.events if one.get("method") == method]

    def screenshot(self) -> bytes:
        """The whole page as PNG."""
        return base64.b64decode(self.ask("Page.captureScreenshot", captureBeyondViewport=True)["data"])

    def close(self) -> None:
        """End the browser."""
        os.close(self._out)  # it leaves when its pipe ends
        try:
            self.process.wait(SECONDS)
        finally:
            self.process.kill()
            self.process.wait()
            os.close(self._in)

    def _go(self, url: str) -> None:
        loader = self.ask("Page.navigate", url=url)["loaderId"]
        while not any(
            (one["loaderId"], one["name"]) == (loader, "load") for one in self.happened("Page.lifecycleEvent")
        ):
            self.events.append(self._hear())

    def _hear(self) -> dict[str, Any]:
        until = time.monotonic() + SECONDS
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(0.0, until - time.monotonic()))
            more = os.read(self._in, 1 << 16) if ready else b""
            if not more:
                raise RuntimeError("the browser says nothing more" if ready else f"no answer in {SECONDS} s")
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        heard: dict[str, Any] = json.loads(message)
        return heard


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser; skips where there is none, unless WEIGHTSYNC_BROWSER says it is required."""
    path = find_browser()
    if path is None:
        if os.environ.get("WEIGHTSYNC_BROWSER") == "required":
            pytest.fail(f"WEIGHTSYNC_BROWSER is required, but none of {', '.join(NAMES)} starts here")
        pytest.skip("no Chromium on this machine")
    found = Browser(path, tmp_path_factory.mktemp("browser"))
    yield found
    found.close()


@pytest.fixture(scope="session")
def on_ranks() -> OnRanks:
    """Have a function called on each rank of a group, at once; what it returned, per rank. Groups serve again."""
    idle: dict[int, list[TensorParallel]] = {}

    def run(size: int, call: Callable[[TensorParallel], Any]) -> list[Any]:
        tps = idle.pop(size, None) or groups(size)
        found = at_once([partial(call, tp) for tp in tps], tps)
        idle[size] = tps
        return found

    return run
