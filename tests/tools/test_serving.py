"""`ckpt serve` shows runs as they are, keeps the page so, and answers nobody who has no business.

Sections are values and are compared as such. The server listens on a port of its own and gets real
requests; saves are made while a client is connected. Where Chromium is installed, the page runs in
it: on wide and narrow screens, light and dark, with the server gone and back.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote_plus, urlencode, urlsplit

import pytest
import torch

import ckpt
from ckpt.cli import main
from ckpt.screens import serve_http
from ckpt.screens.following import Following
from ckpt.screens.pages import SECTIONS, PageChoice, PageMatter, sections_of, serve_page
from ckpt.screens.serve_http import HEADERS, PageServer, digest_of
from ckpt.service.retention import KeepLatest, KeepRule
from ckpt.telemetry.record import SaveFailure, Telemetry
from ckpt.tools.polling import RunPoller, RunState
from ckpt.tools.report import TrainingRun
from storage.memory import MemoryStore
from tests.tools.browser import BARE_HEADS, CHROMIUM, CUT, HARD_TO_READ, TAB_STOPS, browser
from tests.tools.test_polling import LongRun, attempt_of, telemetry_of_step
from tests.tools.test_report import EVIL, Page

GUARD_SECONDS = 90.0  # against hanging


def followed(steps: int, *failures: SaveFailure, **telemetry: Any) -> RunState:
    long = LongRun(steps - 1)
    long.save(**telemetry)
    long.job(*failures)
    return RunPoller(MemoryStore(long.bucket)).poll()


def look_at(
    *states: RunState,
    choice: PageChoice | None = None,
    rule: KeepRule | None = None,
    telemetry: Telemetry | None = None,
) -> PageMatter:
    return PageMatter(states, choice or PageChoice(), lambda run, attempt: telemetry, rule, 1100.0)


def text_of(html: str) -> str:
    return Page(html).text


# Sections ---------------------------------------------------------------------------------------


def test_page_has_every_section_and_no_code_of_its_own() -> None:
    look = look_at(followed(5), telemetry=telemetry_of_step(5))
    sections = sections_of(look)
    assert list(sections) == list(SECTIONS)
    page = serve_page(look, sections, "abc")
    assert page.count("<script") == 1 and "<style" not in page and " style=" not in page
    assert Page(page).addresses[:3] == ["data:,", "/page.css", "/page.js"]
    assert page.count("<section") == page.count("</section>") == len(SECTIONS)


def test_sections_say_what_the_run_says() -> None:
    state = followed(9, SaveFailure(step=4, time_unix=1003.5, error="no space"))
    texts = {name: text_of(html) for name, html in sections_of(look_at(state)).items()}
    assert "node-1" in texts["runs"] and "running" in texts["runs"]
    assert "step 9" in texts["runs"] and "3 of 9 saves" in texts["runs"]
    assert "the save of step 4 has failed" in texts["look"]
    assert "no space" in texts["failures"] and "no space" in texts["timeline"]
    made = sections_of(look_at(state))
    assert made["timeline"].count('<rect class="bar') == 9
    assert made["timeline"].count('<rect class="failed"') == 1
    assert made["charts"].count('<rect class="bar') == 4 * 3
    assert made["charts"].count('<rect class="unknown"') == 4 * 6
    rows = made["saves"].count("<tr")
    assert rows == 1 + 9 and "Retired: 6 checkpoints" in texts["keep"]


def test_a_chosen_save_is_shown_and_has_links_to_its_neighbours() -> None:
    state = followed(9)
    asked = []

    def telemetry(run: int, attempt: str) -> Telemetry | None:
        asked.append((run, attempt))
        return telemetry_of_step(8)

    look = replace(look_at(state, choice=PageChoice(0, attempt_of(8))), telemetry=telemetry)
    shown = sections_of(look)["save"]
    assert asked == [(0, attempt_of(8))] and "<h2>Step 8, 0.5 s on 1 rank</h2>" in shown
    links = [address for address in Page(shown).addresses if "save=" in address]
    assert links == [f"/?run=0&save={attempt_of(step)}#save" for step in (7, 9)]
    # Of a retired one only totals may be known, or nothing; of nonsense, the newest is shown.
    retired = sections_of(look_at(state, choice=PageChoice(0, attempt_of(2))))["save"]
    assert "Step 2" in retired and "not known" in retired
    newest = sections_of(look_at(state, choice=PageChoice(0, EVIL), telemetry=telemetry_of_step(9)))
    assert "Step 9" in newest["save"]


def test_retention_shows_what_a_rule_would_keep_and_why() -> None:
    state = followed(9)
    entries = [replace(state.entries[0], pinned=True), *state.entries[1:]]
    state = replace(state, entries=tuple(entries))
    without = text_of(sections_of(look_at(state))["keep"])
    assert "its own and not in the root" in without and "pinned" in without
    assert "only its training's rule" in without and "everything is kept" not in without
    shown = text_of(sections_of(look_at(state, rule=KeepLatest(1)))["keep"])
    assert "one of the latest 1; the latest" in shown
    assert "8" in shown and "would be retired: no rule keeps it" in shown and "pinned" in shown


def test_runs_stand_side_by_side_on_one_scale() -> None:
    slow = telemetry_of_step(2).totals.model_copy(update={"seconds": 50.0})
    one, other = followed(2), followed(2, totals=slow)
    one = replace(one, run=replace(one.run, url="s3://bucket/sweep/a/run"))
    other = replace(other, run=replace(other.run, url="s3://bucket/sweep/b/run"))
    assert look_at(one, other).labels == ["a/run", "b/run"] and look_at(one).labels == [one.run.url]
    assert look_at(one, one).labels == [one.run.url] * 2
    sections = sections_of(look_at(one, other, choice=PageChoice(1)))
    assert sections["charts"].count("50 s</span>") == 2
    assert (
        sections["runs"].count('<div class="run') == 2 and 'class="run chosen"' in sections["runs"]
    )
    assert sections["timeline"].count("<svg") == 2 and "Saves of b/run" in sections["saves"]


@pytest.mark.parametrize(
    ("axis", "ends"),
    [("step", ["1", "2", "4"]), ("time", None), ("since the first save", ["0 s", "1.5 s", "3 s"])],
)
def test_runs_share_the_axis_that_is_chosen(axis: str, ends: list[str] | None) -> None:
    states = followed(2), followed(4)
    saves = [state.run.saves for state in states]
    made = sections_of(look_at(*states, choice=PageChoice(1, axis=axis)))["charts"]
    places = [float(one) for one in re.findall(r'<rect class="[^"]*" x="([\d.]+)"', made)]
    assert len(places) == 4 * (2 + 4)
    step = saves[1][1].committed_unix - saves[1][0].committed_unix
    if axis == "time":
        begun = min(one[0].committed_unix for one in saves)
        shares = [(save.committed_unix - begun) / step for one in saves for save in one]
        whole = max(shares)
    else:
        shares, whole = [0, 1, 0, 1, 2, 3], 3
    expected = [995.6 * share / whole for share in shares]
    assert places[:2] == places[2:4] == pytest.approx(expected[:2], abs=0.01)
    assert places[8:12] == pytest.approx(expected[2:], abs=0.01)
    below = re.findall(r'<div class="xs ">\n((?:<span>.*</span>)+)', made)
    assert len({*below}) == 1 and len(below) == 8
    if ends:
        assert re.findall("<span>(.*?)</span>", below[0]) == ends
    chosen = urlencode({"run": 1, "axis": axis})
    assert f'<a href="/?{chosen}#charts" aria-current="true">{axis}</a>' in made.replace(
        "&amp;", "&"
    )
    # Saves that are chosen keep the axis, and nonsense is none.
    assert (
        f"axis={quote_plus(axis)}"
        in sections_of(look_at(*states, choice=PageChoice(0, axis=axis)))["saves"]
    )
    nonsense = sections_of(look_at(*states, choice=PageChoice(0, axis=EVIL)))
    assert 'x="0.06"' in nonsense["charts"] and "<script" not in nonsense["charts"]


def test_places_without_saves_say_so() -> None:
    waiting = RunState(TrainingRun("runs/7b"), problem=EVIL)
    away = replace(waiting, availability="away", problem=EVIL, since_unix=1000.0)
    for state, word in ((waiting, "waiting for the first save"), (away, "not to be read since")):
        html = "".join(sections_of(look_at(state)).values())
        assert word in text_of(html) and EVIL in text_of(html) and "<script" not in html
        assert "nothing to resume" not in html


def test_hostile_texts_stay_texts() -> None:
    evil = telemetry_of_step(3).totals.model_copy(update={"slowest_phase": EVIL})
    failure = SaveFailure(step=2, time_unix=1001.5, error=EVIL)
    state = followed(3, failure, totals=evil, warnings=[EVIL])
    state = replace(state, run=replace(state.run, url=EVIL), availability="away", problem=EVIL)
    hostile = telemetry_of_step(3).model_copy(update={"phases": [EVIL], "totals": evil})
    look = look_at(state, state, telemetry=hostile)
    page = Page(serve_page(look, sections_of(look), EVIL))
    assert page.tags.count("script") == 1 and "img" not in page.tags
    assert page.text.count(EVIL) > 10
    assert all(address.startswith(("/", "#", "data:,")) for address in page.addresses)


def test_many_saves_and_ranks_make_a_page_of_bounded_size() -> None:
    many = telemetry_of_step(1).model_copy(
        update={name: [[100]] * 5000 for name in ("started_us", "took_us", "nbytes")}
        | {name: [0] * 5000 for name in ("blocked_us", "retries")}
    )
    state = followed(900)
    shown = "".join(sections_of(look_at(state, telemetry=many)).values())
    assert "128 of 5000 ranks" in shown and len(shown) < 1_000_000


# The server -------------------------------------------------------------------------------------


@contextmanager
def serving(
    *urls: str,
    options: Mapping[str, Any] | None = None,
    near: Sequence[str] = (),
    port: int = 0,
    **how: Any,
) -> Iterator[PageServer]:
    with (
        Following(urls, options or {}, interval_seconds=0.05, near=near) as following,
        PageServer(following, ("127.0.0.1", port), **how) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        running = pool.submit(server.serve_forever, 0.05)
        try:
            yield server
        finally:
            server.shutdown()
            running.result()


def save(url: str, *steps: int, **how: Any) -> None:
    for step in steps:
        ckpt.save({"x": torch.ones(100)}, url, step=step, **how)


def request(
    server: PageServer, path: str, method: str = "GET", **headers: str
) -> tuple[int, http.client.HTTPMessage, str]:
    host, port = server.server_address[:2]
    with closing(http.client.HTTPConnection(str(host), int(port), timeout=GUARD_SECONDS)) as client:
        client.request(method, path, headers=headers)
        answer = client.getresponse()
        return answer.status, answer.headers, answer.read().decode()


def test_server_answers_and_says_what_a_page_may_do(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    save(url, 1, 2)
    with serving(url) as server:
        for path, kind in (("/", "html"), ("/page.css", "css"), ("/page.js", "javascript")):
            status, headers, text = request(server, path)
            assert status == 200 and kind in headers["Content-Type"] and len(text) > 500
            assert {name: headers[name] for name in HEADERS} == HEADERS
            assert "python" not in headers["Server"].lower()
            status, headers, nothing = request(server, path, "HEAD")
            assert (status, nothing) == (200, "") and int(headers["Content-Length"]) > 500
        for path in ("/nothing", "/../etc/passwd", "//evil.example/"):
            status, headers, text = request(server, path)
            assert status == 404 and "no such page" in text
            assert headers["Content-Security-Policy"] == HEADERS["Content-Security-Policy"]
        assert request(server, "/", "POST")[0] == request(server, "/", "DELETE")[0] == 501
        # Nonsense chooses nothing.
        for query in ("run=7", "run=-1", "run=x", f"save={attempt_of(1)}", "&".join("abcdefghijk")):
            assert "step 2" in request(server, f"/?{query}")[2]


def test_server_answers_to_names_it_is_known_by(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    with serving(url, names=["Cluster.Example"]) as server:
        for host in ("localhost", "127.0.0.1:9", "[::1]:80", "LOCALHOST:80", "cluster.example"):
            assert request(server, "/", Host=host)[0] == 200, host
        for host in ("evil.example", "localhost.evil.example", "", "[::1", "127.0.0.2", "a b"):
            for path in ("/", "/events", "/page.js"):
                status, _, text = request(server, path, Host=host)
                assert status == 403 and "--allow-host" in text, host
        port = int(server.server_address[1])
        with socket.create_connection(("127.0.0.1", port), timeout=GUARD_SECONDS) as raw:
            raw.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")
            assert b" 403 " in raw.makefile("rb").readline()


class Stream:
    """A client of `/events`."""

    def __init__(self, server: PageServer, query: str = "", **headers: str) -> None:
        host, port = server.server_address[:2]
        self._client = http.client.HTTPConnection(str(host), int(port), timeout=GUARD_SECONDS)
        self._client.request("GET", f"/events{query}", headers=headers)
        self.answer = self._client.getresponse()

    def next(self) -> dict[str, str]:
        """The fields of the next event; a comment has the name ""."""
        fields: dict[str, str] = {}
        while line := self.answer.readline().decode().rstrip("\n"):
            name, _, value = line.partition(": ")
            fields[name] = value
        return fields

    def until(self, text: str) -> dict[str, str]:
        """The next event that has this text."""
        while text not in (event := self.next()).get("data", ""):
            assert event, "the stream has ended"
        return event

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.answer.close()
        self._client.close()


def test_events_bring_a_save_that_is_made_while_somebody_looks(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    with serving(url) as server:
        with Stream(server) as stream:
            assert stream.answer.status == 200
            assert stream.answer.headers["Content-Type"].startswith("text/event-stream")
            assert stream.next() == {"retry": "2000"}
            first = stream.until("waiting for the first save")
            assert (
                list(json.loads(first["data"])) == list(SECTIONS) and first["event"] == "sections"
            )
            save(url, 41)
            event = stream.until(">41</a>")
            assert "step 41" in json.loads(event["data"])["runs"]
        # Who comes back with the newest gets nothing again, and others get everything.
        page = request(server, "/")[2]
        (seen,) = (part.split('"')[1] for part in page.split("data-seen=")[1:])
        for query, headers in ((f"?seen={seen}", {}), ("", {"Last-Event-ID": seen})):
            with Stream(server, query, **headers) as stream:
                assert stream.next() == {"retry": "2000"} and stream.next() == {"": "nothing new"}
        for missed in (first["id"], "nonsense"):
            with Stream(server, **{"Last-Event-ID": missed}) as stream:
                stream.next()
                again = stream.next()
                assert list(json.loads(again["data"])) == list(SECTIONS) and again["id"] == seen


def test_events_bring_only_sections_that_have_changed(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    save(url, 1)
    with serving(url) as server, Stream(server) as stream:
        first = json.loads(stream.until("step 1")["data"])
        save(url, 2)
        event = stream.until(">2</a>")
        changed = json.loads(event["data"])
        assert "failures" not in changed and {"runs", "timeline", "saves"} <= set(changed)
        # The name of an event is that of all sections, sent or not.
        assert event["id"] == digest_of({**first, **changed}) or set(changed) != set(SECTIONS)


def test_streams_are_bounded_and_end_with_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_http, "STREAMS_MAX", 2)
    with serving(str(tmp_path / "run")) as server:
        streams = [Stream(server), Stream(server)]
        for stream in streams:
            assert stream.until("waiting")
        with Stream(server) as refused:
            assert refused.answer.status == 503 and b"close some" in refused.answer.read()
    for stream in streams:
        with stream:
            assert b"event: sections" not in stream.answer.read()


def test_half_requests_are_few_and_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(str(tmp_path / "run")) as server, ExitStack() as stack:
        address = ("127.0.0.1", int(server.server_address[1]))

        def half(source: str = "127.0.0.1") -> socket.socket:
            connection = socket.create_connection(address, GUARD_SECONDS, (source, 0))
            sock = stack.enter_context(connection)
            sock.sendall(b"GET / HTTP/1.0\r\nA: ")
            return sock

        ours = half("127.0.0.2")
        hanging = [half() for _ in range(200)]
        assert request(server, "/")[0] == 200
        # What one address sends ends no other's request.
        ours.sendall(b"x\r\nHost: localhost\r\n\r\n")
        assert b" 200 " in ours.recv(100)
        for sock in hanging[:100]:  # the oldest made room
            sock.settimeout(5.0)
            with suppress(ConnectionError):
                assert sock.recv(1) == b""
        # One that sends a byte now and then is late like any other.
        monkeypatch.setattr(serve_http, "REQUEST_SECONDS", 0.3)
        sock = half()
        until = time.monotonic() + 5.0
        with suppress(ConnectionError):
            while not select.select([sock], [], [], 0.05)[0]:
                assert time.monotonic() < until, "it may send its head for ever"
                sock.sendall(b"x")


# The command ------------------------------------------------------------------------------------


def test_command_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    save(url, 1)
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "from ckpt.cli import main; code = main()\n"
    code += "print('torch' in sys.modules); sys.exit(code)"
    command = [sys.executable, "-c", code, "serve", url, "--port", "0", "--keep-last", "1"]
    environment = {**os.environ, "PYTHONPATH": str(Path(ckpt.__file__).parents[1])}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            address = urlsplit(line.split()[0])
            assert address.hostname == "127.0.0.1" and url in line
            client = http.client.HTTPConnection("127.0.0.1", address.port, timeout=GUARD_SECONDS)
            with closing(client):
                client.request("GET", "/")
                assert "one of the latest 1" in client.getresponse().read().decode()
            process.send_signal(signal.SIGINT)
            assert process.stdout.read() == "False\n"  # no traceback, and no torch
            assert process.wait(GUARD_SECONDS) == 0
        finally:
            process.kill()


def test_wrong_command_lines_end_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("x")
    assert main(["serve", str(tmp_path), "--port", "0"]) == 1
    assert "notes.txt" in capsys.readouterr().err
    assert main(["serve", "s4://bucket/run", "--port", "0"]) == 2
    assert "did you mean s3" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = f"{taken.getsockname()[1]}"
        assert main(["serve", str(tmp_path / "run"), "--port", port]) == 1
    assert "--port 0 takes a free one" in capsys.readouterr().err
    for wrong in (["--port", "70000"], ["--retire-unmeasured"], ["--interval", "0s"]):
        with pytest.raises(SystemExit):
            main(["serve", str(tmp_path / "run"), *wrong])


# The browser ------------------------------------------------------------------------------------


@pytest.mark.server
@pytest.mark.skipif(CHROMIUM is None, reason="no browser here")
def test_browser_shows_a_run_as_it_goes_on(tmp_path: Path) -> None:
    url, other = str(tmp_path / "run"), str(tmp_path / "other")
    save(url, 1, 2, 3)
    save(other, *range(100_000, 100_100))
    is_live = "document.getElementById('live').textContent === 'live'"
    with socket.socket() as held, browser(tmp_path / "profile") as page:
        # Bound and not listening, so that nobody else gets the port while the server is gone.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port = int(held.getsockname()[1])
        with serving(url, other, port=port) as server:
            page.open(server.url)
            page.wait_for(is_live)
            for width in (1280, 390):
                for scheme in ("light", "dark"):
                    page.show_as(width=width, scheme=scheme)
                    assert page.evaluate(CUT) == [], (width, scheme)
                    assert page.evaluate(HARD_TO_READ) == [], (width, scheme)
            page.open(f"{server.url}?run=1")
            assert page.evaluate("document.querySelectorAll('#saves tr').length") == 101
            assert 40 < page.evaluate(TAB_STOPS) <= 60 and page.evaluate(BARE_HEADS) == []
            page.open(server.url)
            page.wait_for(is_live)
            # A save that is made now comes by itself, and who tabs stays where they were.
            page.evaluate("document.querySelector('#saves a').focus()")
            save(url, 4)
            page.wait_for("document.querySelector('#saves a').textContent === '4'")
            assert page.evaluate("document.activeElement.textContent") == "3"
            assert "ago" in page.evaluate("document.querySelector('#runs time').textContent")
            page.press("Tab")
            assert page.evaluate("document.activeElement.textContent") == "2"
            page.evaluate("document.activeElement.click()")
            page.wait_for("document.readyState === 'complete' && location.hash === '#save'")
            assert "Step 2" in page.evaluate("document.getElementById('save').textContent")
            page.wait_for(is_live)
            assert page.complaints == []
        page.wait_for("document.getElementById('live').className === 'tag lost'")
        save(url, 5)
        with serving(url, other, port=port):
            page.wait_for(is_live)
            page.wait_for("document.querySelector('#saves a').textContent === '5'")


@pytest.mark.server
@pytest.mark.skipif(CHROMIUM is None, reason="no browser here")
def test_browser_runs_nothing_that_was_not_escaped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hostile texts are put into the page without escaping: its policy stops them."""
    loud = '<script>document.title = "owned"</script><img src="https://example.com/x" onerror="'
    loud += "document.title = 'owned'\"><style>body { display: none }</style>"
    monkeypatch.setattr(serve_http, "sections_of", lambda look: dict.fromkeys(SECTIONS, loud))
    with serving(str(tmp_path / "run")) as server, browser(tmp_path / "profile") as page:
        page.open(server.url)
        page.wait_for("document.getElementById('live').textContent === 'live'")
        assert page.evaluate("document.title").startswith("ckpt: ")
        assert page.evaluate("getComputedStyle(document.body).display") == "block"
        assert any("Content Security Policy" in text for text in page.complaints)
