"""The web pages in headless Chromium: values change with traffic, errors are shown, keyboard and themes work.

scripts/test-browser runs it; pytest does not collect it, because it needs Chromium and Playwright. SCREENSHOTS is the
folder for pictures.
"""

import contextlib
import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from machine import free_port
from playwright.sync_api import Page, expect, sync_playwright

sys.path.append(str(Path(__file__).parents[1] / "storage"))

from storage_support import make_record

from shadowserve_tools.processes import Child, start_data_plane, start_storage, started
from shadowserve_tools.storage_client import Login, StorageClient

SCREENSHOTS = Path(os.environ["SCREENSHOTS"])
SMALL = ["--decompression-buffer-bytes", "8 MiB", "--store-buffer-bytes", "8 MiB"]
WAIT_MS = 60_000


@pytest.fixture
def page(request: pytest.FixtureRequest) -> Iterator[Page]:
    """A page that fails its test if the browser reports an error, or if it asks another server."""
    found: list[str] = []
    with sync_playwright() as browsers:
        sandbox = [] if os.geteuid() else ["--no-sandbox"]
        browser = browsers.chromium.launch(executable_path=os.environ["CHROMIUM"], args=sandbox)
        page = browser.new_page(viewport={"width": 1200, "height": 900})
        page.set_default_timeout(WAIT_MS)
        expect.set_options(timeout=WAIT_MS)
        page.on("console", lambda message: found.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: found.append(str(error)))
        page.on(
            "request", lambda asked: asked.url.startswith(("http://127.0.0.1:", "data:")) or found.append(asked.url)
        )
        yield page
        browser.close()
    expected = getattr(request.node, "expected", "no such text")
    assert not [each for each in found if expected not in each]


@contextlib.contextmanager
def traffic(storage: Child) -> Iterator[None]:
    """Store and read records until the end of the context."""
    ended = threading.Event()
    host, _, port = storage.address.rpartition(":")

    def run() -> None:
        with StorageClient(Login(host=host, port=int(port))) as client:
            while not ended.wait(0.01):
                key, value = make_record(os.urandom(32))
                client.call("SET", key, value)
                client.call("GET", key)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def figure(page: Page, title: str, part: str = "main") -> Any:
    """Return the number above a chart."""
    return page.locator(part).locator("figure", has_text=title).locator("b").first


def test_a_programs_page_is_live_and_tells_when_the_program_ends(
    page: Page, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    request.node.expected = "net::ERR_"  # Chromium's own line about a server that is gone
    port = free_port()
    with start_storage(tmp_path, "--metrics-port", str(port)) as storage:
        page.goto(f"http://127.0.0.1:{port}/")
        expect(page.get_by_role("heading", level=2)).to_contain_text("storage node")
        expect(page.locator(".limit")).to_contain_text("no traffic")
        expect(figure(page, "Keys found")).to_have_text("0/s")
        with traffic(storage):
            expect(figure(page, "Keys found")).not_to_have_text("0/s")
            expect(page.locator(".text")).to_contain_text("(100.0 %)")
            expect(page.locator(".limit")).to_contain_text("now: nothing")
            assert page.locator("canvas").count() == page.locator("figure").count() >= 5
            drawn = (
                "canvas => canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.some(x => x)"
            )
            assert page.locator("canvas").first.evaluate(drawn)
            page.screenshot(path=SCREENSHOTS / "traffic.png", full_page=True)
        expect(page.locator("#alert")).to_be_hidden()
    expect(page.get_by_role("alert").first).to_contain_text("does not answer")
    expect(page.locator("#alert")).to_contain_text("The values are from")
    expect(page.locator("#state")).to_have_text("not live")
    page.screenshot(path=SCREENSHOTS / "ended.png", full_page=True)
    with start_storage(tmp_path, "--metrics-port", str(port)):
        expect(page.locator("#alert")).to_be_hidden()  # no reload is needed
        page.goto("about:blank")  # while the program runs: afterwards the browser reports that it is gone


def test_ui_shows_programs_together_and_which_one_has_died(page: Page, tmp_path: Path) -> None:
    with start_storage(tmp_path) as storage:
        with start_data_plane(tmp_path, storage.address, *SMALL) as plane:
            command = [
                sys.executable,
                "-m",
                "shadowserve_tools",
                "ui",
                storage.address,
                plane.address,
                "--port",
                "0",
                "--interval",
                "0.5",
            ]
            with started("ui", command, tmp_path, ready=re.compile(r"http://(?P<address>127\.0\.0\.1:\d+)/")) as served:
                page.goto(f"http://{served.address}/")
                first, second = page.locator("section").nth(0), page.locator("section").nth(1)
                expect(first.get_by_role("heading")).to_have_text(f"{storage.address}: storage node")
                expect(second.get_by_role("heading")).to_have_text(f"{plane.address}: data plane")
                with traffic(storage):
                    expect(figure(page, "Keys found", "#program-0")).not_to_have_text("0/s")
                expect(second.get_by_role("alert")).to_be_hidden()
                plane.process.kill()
                expect(second.get_by_role("alert")).to_contain_text("No values:")
                expect(second.get_by_role("alert")).to_contain_text("The values below are from")
                expect(first.get_by_role("alert")).to_be_hidden()
                expect(page.locator("#alert")).to_be_hidden()
                page.screenshot(path=SCREENSHOTS / "ui.png", full_page=True)
                page.goto("about:blank")


def test_the_page_is_used_with_the_keyboard_in_dark_and_light(page: Page, tmp_path: Path) -> None:
    def background() -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    port = free_port()
    page.emulate_media(color_scheme="dark")
    with start_storage(tmp_path, "--metrics-port", str(port)):
        page.goto(f"http://127.0.0.1:{port}/")
        expect(page.locator("figure").first).to_be_visible()
        assert background() == "rgb(13, 17, 23)"
        page.screenshot(path=SCREENSHOTS / "dark.png", full_page=True)
        page.keyboard.press("Tab")
        expect(page.locator("#pause")).to_be_focused()
        assert page.locator("#pause").evaluate("each => getComputedStyle(each).outlineStyle") == "solid"
        page.keyboard.press("Enter")
        expect(page.locator("#pause")).to_have_attribute("aria-pressed", "true")
        expect(page.locator("#state")).to_contain_text("paused")
        page.keyboard.press("Enter")
        expect(page.locator("#state")).to_contain_text("live")
        page.keyboard.press("Tab")
        expect(page.locator("#theme")).to_be_focused()
        for colour, name in (("rgb(13, 17, 23)", "dark"), ("rgb(255, 255, 255)", "light")):
            page.keyboard.press("Space")
            expect(page.locator("#theme")).to_have_text(f"Theme: {name}")
            assert background() == colour
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        expect(page.locator("details tbody tr").first).to_be_visible()
        page.set_viewport_size({"width": 360, "height": 700})  # a phone: nothing is cut off
        page.wait_for_function("document.documentElement.scrollWidth <= 360")
        page.screenshot(path=SCREENSHOTS / "phone.png", full_page=True)
        page.goto("about:blank")
