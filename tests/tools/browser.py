"""A headless Chromium, asked by its DevTools protocol over two pipes: no port, no library."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
GUARD_SECONDS = 90.0  # against hanging


class RefusedError(Exception):
    """The browser has refused a command, as it does while it goes from one page to the next."""


class Browser:
    """One page. `complaints` are what its console and its exceptions said."""

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive = send, receive
        self._rest = b""
        self._number = 0
        self._session = ""
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol; its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + GUARD_SECONDS
        while True:
            answer = self._next(deadline)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RefusedError(f"{method}: {answer['error']}")
                return dict(answer["result"])
            self._note(answer)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of the page's language, as JSON."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Returns once the expression is true."""
        deadline = time.monotonic() + GUARD_SECONDS
        while not self._is_so(expression):
            assert time.monotonic() < deadline, f"not so: {expression}"
            time.sleep(0.05)  # no event says that a script has changed something

    def _is_so(self, expression: str) -> bool:
        try:
            return bool(self.evaluate(expression))
        except RefusedError:
            return False

    def open(self, url: str) -> None:
        """Go to a page and wait until it is loaded."""
        self.call("Page.navigate", url=url)
        self.wait_for(f"document.readyState === 'complete' && location.href === {url!r}")

    def show_as(self, *, width: int, scheme: str) -> None:
        """As on a screen of this width whose user likes this color scheme."""
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def press(self, key: str) -> None:
        """One key, down and up."""
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=9
            )

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            left = deadline - time.monotonic()
            ready = select.select([self._receive], [], [], max(left, 0))[0]
            assert ready, "the browser does not answer"
            data = os.read(self._receive, 1 << 20)
            assert data, "the browser has ended"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(message))

    def _note(self, event: dict[str, Any]) -> None:
        if event.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown"):
            self.complaints.append(json.dumps(event["params"]))


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser of its own, gone at the end of the block."""
    assert CHROMIUM is not None
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    # It reads commands from descriptor 3 and answers on 4; a shell puts them there.
    script = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
    command = ["bash", "-c", script, CHROMIUM, *options, f"--user-data-dir={profile}"]
    process = subprocess.Popen(
        command,
        pass_fds=(theirs_in, theirs_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        os.close(theirs_in)
        os.close(theirs_out)
        yield Browser(ours_out, ours_in)
    finally:
        os.close(ours_out)
        os.close(ours_in)
        try:
            # It ends with its pipes; its starter may be a script, whose end would not be its own.
            process.wait(GUARD_SECONDS)
        finally:
            process.kill()
            process.wait()


# What of the texts of a page is hard to read: [text, contrast] by the formula of WCAG 2, section
# 1.4.3, which asks for 4.5.
HARD_TO_READ = """
(() => {
  const parsed = (text) => {
    const [r, g, b, a = 1] = text.match(/[0-9.]+/g).map(Number);
    return [r, g, b, a];
  };
  const over = (top, under) => top.slice(0, 3)
    .map((one, index) => one * top[3] + under[index] * (1 - top[3])).concat(1);
  const behind = (element) => {
    if (!element) return [255, 255, 255, 1];
    const own = parsed(getComputedStyle(element).backgroundColor);
    return own[3] === 1 ? own : over(own, behind(element.parentElement));
  };
  const luminance = (color) => {
    const [r, g, b] = color.slice(0, 3).map((one) => one / 255)
      .map((one) => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const bad = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement, text = walker.currentNode.data.trim();
    if (!text || !element.checkVisibility() || element.closest("svg, title, script")) continue;
    const ground = behind(element);
    const ink = over(parsed(getComputedStyle(element).color), ground);
    const two = [luminance(ink), luminance(ground)];
    const contrast = (Math.max(...two) + 0.05) / (Math.min(...two) + 0.05);
    if (contrast < 4.5) bad.push([text.slice(0, 40), contrast]);
  }
  return bad;
})()
"""

# What a page does not show whole: names of what sticks out to the sides, or is cut there.
CUT = """
(() => {
  const cut = [], width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > width) cut.push("the page scrolls to the side");
  const texts = "h1, h2, h3, p, dt, dd, td, .ys span, .xs span, .tag";
  for (const one of document.querySelectorAll(texts)) {
    if (!one.checkVisibility() || one.closest(".scroll")) continue;
    const box = one.getBoundingClientRect(), parent = one.closest("section");
    const room = parent ? parent.getBoundingClientRect() : {left: 0, right: width};
    const isOut = box.left < room.left - 1 || box.right > room.right + 1;
    if (isOut || one.scrollWidth > Math.ceil(box.width) + 1) cut.push(one.outerHTML.slice(0, 120));
  }
  return cut;
})()
"""

# How often somebody has to press Tab to come through a page; heads of tables that do not say
# whether they are of a row or a column.
TAB_STOPS = """
[...document.querySelectorAll("a, button, input, select, summary, [tabindex]")]
  .filter((one) => one.tabIndex >= 0 && one.checkVisibility()).length
"""
BARE_HEADS = "[...document.querySelectorAll('th:not([scope])')].map((one) => one.outerHTML)"
