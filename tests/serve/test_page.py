"""The web page: its files, and its behaviour in a real browser where one is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from browser import CHROMIUM, Browser
from serve.asgi import at_door
from serve.server_process import ServerProcess
from slipstream.serve.http.page import page_files
from tiny import write_tiny

VOID = {"meta", "link", "input", "br", "img"}


class Elements(HTMLParser):
    """Checks that tags are balanced, and collects elements."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another element"


def elements() -> list[tuple[str, dict[str, str | None]]]:
    parser = Elements()
    parser.feed(page_files()["index.html"].decode())
    assert parser.open == []
    return parser.found


def test_files_are_served_with_a_strict_policy_and_without_a_key(folder):
    async def scenario(door):
        page = await door.get("/")
        assert page.status == 200 and page.headers["content-type"].startswith("text/html")
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "*" not in policy
        for name in page_files():
            file = await door.get(f"/ui/{name}")
            assert file.status == 200 and file.headers["x-content-type-options"] == "nosniff"
        for name in ("none.js", "../page.py", "%2e%2e/page.py", "index.html/x"):
            assert (await door.get(f"/ui/{name}")).status == 404

    at_door(folder, scenario, api_key=("one",))


def test_the_page_names_only_its_own_files_and_has_no_inline_code():
    names = [value for _, attrs in elements() for key, value in attrs.items() if key in ("src", "href")]
    assert {name for name in names if name.startswith("ui/")} <= {f"ui/{name}" for name in page_files()}
    for tag, attrs in elements():
        assert not any(key.startswith("on") or key == "style" for key in attrs), (tag, attrs)
        assert tag not in ("style", "iframe", "object")
    for name, content in page_files().items():
        found = set(
            re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"'`)]*", re.sub(r"(?m)^\s*//.*$", "", content.decode()))
        )
        assert found <= {"http://www.w3.org/2000/svg"}, (name, found)


def test_ids_are_unique_and_every_control_has_a_name():
    ids = [attrs["id"] for _, attrs in elements() if "id" in attrs]
    assert len(ids) == len(set(ids))
    for _, attrs in elements():
        for key in ("aria-controls", "aria-labelledby", "for"):
            assert attrs.get(key) is None or attrs[key] in ids
    used = set(re.findall(r'\$\("([\w-]+)"\)', "".join(text.decode() for text in page_files().values())))
    assert used <= set(ids), used - set(ids)


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
@pytest.mark.parametrize("name", sorted(name for name in page_files() if name.endswith(".js")))
def test_modules_parse(name, tmp_path):
    file = tmp_path / (name.removesuffix(".js") + ".mjs")
    file.write_bytes(page_files()[name])
    subprocess.run(["node", "--check", str(file)], check=True, timeout=60)


# in a browser


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = write_tiny(tmp_path_factory.mktemp("page"))
    server = ServerProcess(str(folder), "--api-key", "secret", "--max-model-len", "512", "--num-pages", "64")
    yield server
    server.process.terminate()
    server.process.wait(30)


@pytest.fixture
def browser():
    browser = Browser()
    yield browser
    browser.close()


def text(browser: Browser, id: str) -> str:
    return browser.run(f"document.getElementById('{id}').textContent")


def click(browser: Browser, id: str) -> None:
    browser.run(f"document.getElementById('{id}').click()")


def give_key(browser: Browser, key: str) -> None:
    browser.run(f"document.getElementById('key').value = '{key}'")
    browser.run("document.querySelector('#key-dialog button[value=save]').click()")


def ask(browser: Browser, prompt: str, max_tokens: int) -> None:
    browser.run(f"document.getElementById('max_tokens').value = {max_tokens}")
    browser.run("document.getElementById('prompt').focus()")
    browser.type(prompt)
    browser.press("Enter")


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_the_page_in_a_browser(server, browser, tmp_path):
    browser.open(server.url + "/")
    browser.until("document.getElementById('key-dialog').open")
    assert "needs an API key" in text(browser, "key-reason")
    give_key(browser, "wrong")
    browser.until("document.getElementById('key-reason').textContent.includes('refused')")
    give_key(browser, "secret")
    browser.until("document.getElementById('chat-model').value")
    refused = [error for error in browser.errors if "401" not in error]
    assert refused == []
    browser.errors.clear()

    # chat: streams, is stopped, edited and regenerated
    click(browser, "logprobs")
    ask(browser, "hello", 8)
    browser.until("document.querySelector('.assistant .facts')")
    assert browser.run("document.querySelectorAll('.assistant .token').length") > 0
    browser.run("document.querySelector('.assistant button').click()")  # regenerate
    browser.until("document.querySelectorAll('.assistant').length === 1 && !document.getElementById('send').disabled")
    ask(browser, "more", 400)
    browser.until("document.querySelectorAll('.assistant').length === 2")
    browser.press("Escape")
    browser.until("document.getElementById('stop').disabled")
    browser.run("[...document.querySelectorAll('.user button')].at(-1).previousElementSibling.click()")  # edit
    assert browser.run("document.getElementById('prompt').value") == "more"
    assert browser.run("document.querySelectorAll('article').length") == 2

    # the timeline moves while requests run, and steps are logged only while it is open
    click(browser, "tab-timeline")
    browser.run("document.getElementById('prompt').value = 'go'; document.getElementById('send').click()")
    browser.until("+document.getElementById('lanes').dataset.steps > 3")
    click(browser, "pause")
    assert browser.run("document.getElementById('pause').getAttribute('aria-pressed')") == "true"
    browser.until("document.querySelectorAll('#sums tr').length > 5")
    click(browser, "tab-models")
    browser.until("document.querySelector('#load-table td')")
    assert "generate" in text(browser, "model-table")
    click(browser, "tab-requests")
    assert "/v1/chat/completions" in text(browser, "request-table")

    # keyboard: arrows change views
    browser.run("document.getElementById('tab-requests').focus()")
    browser.press("ArrowRight")
    assert browser.run("document.activeElement.id") == "tab-chat"

    # phone width, and dark
    browser.resize(360, 640)
    click(browser, "theme")
    for tab in ("chat", "vectors", "timeline", "models", "requests"):
        click(browser, f"tab-{tab}")
        assert browser.run("document.documentElement.scrollWidth <= innerWidth"), f"{tab} is wider than the screen"
    browser.screenshot(Path(tmp_path) / "phone.png")
    assert browser.errors == []
    assert all(url.startswith((server.url, "about:", "data:", "blob:")) for url in browser.urls)


def find_axe() -> Path | None:
    """axe-core as npm installs it: in this folder or for the machine. Its licence (MPL) differs from ours, so it is not
    copied here."""
    roots = [Path("node_modules")]
    if shutil.which("npm") is not None:
        found = subprocess.run(["npm", "root", "--global"], capture_output=True, text=True, timeout=60)
        roots.append(Path(found.stdout.strip() or "."))
    files = (root / "axe-core" / "axe.min.js" for root in roots)
    return next((file for file in files if file.is_file()), None)


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_axe_finds_no_violation(server, browser):
    axe = find_axe()
    if axe is None:
        pytest.skip("axe-core is not installed; npm install axe-core")
    browser.open(server.url + "/")
    browser.until("document.getElementById('key-dialog').open")
    give_key(browser, "secret")
    browser.until("document.getElementById('chat-model').value")
    browser.run(axe.read_text(encoding="utf-8") + "; true")
    for _ in range(2):  # light and dark
        for tab in ("chat", "vectors", "timeline", "models", "requests"):
            click(browser, f"tab-{tab}")
            found = browser.run("axe.run().then(result => result.violations.map(each => [each.id, each.help]))")
            assert found == [], (tab, found)
        click(browser, "theme")
