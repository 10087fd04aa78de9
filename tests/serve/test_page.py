"""The web page: its files. `test_page_browser.py` has its behaviour in a real browser."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from patience import PATIENCE
from serve.asgi import at_door
from slipstream.serve.http.admin.page import page_files

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
        assert "require-trusted-types-for 'script'; trusted-types 'none'" in policy
        for name in page_files():
            file = await door.get(f"/ui/{name}")
            assert file.status == 200 and file.headers["x-content-type-options"] == "nosniff"
        for name in ("none.js", "../page.py", "%2e%2e/page.py", "index.html/x"):
            assert (await door.get(f"/ui/{name}")).status == 404

    at_door(folder, scenario, api_key=("one",))


def test_files_are_compressed_and_sent_once(folder):
    async def scenario(door):
        for name, content in page_files().items():
            packed = await door.get(f"/ui/{name}", **{"accept-encoding": "br, gzip"})
            assert packed.headers["content-encoding"] == "gzip" and gzip.decompress(packed.body) == content
            again = await door.get(f"/ui/{name}", **{"if-none-match": packed.headers["etag"]})
            assert again.status == 304 and again.body == b""
            other = await door.get(f"/ui/{name}", **{"if-none-match": "other"})
            assert other.status == 200 and other.body == content

    at_door(folder, scenario)


def test_the_page_names_only_its_own_files_and_has_no_inline_code():
    names = [value for _, attrs in elements() for key, value in attrs.items() if key in ("src", "href")]
    assert {name for name in names if name.startswith("ui/")} <= {f"ui/{name}" for name in page_files()}
    for tag, attrs in elements():
        assert not any(key.startswith("on") or key == "style" for key in attrs), (tag, attrs)
        assert tag not in ("style", "iframe", "object")
    for name, content in page_files().items():
        if name.startswith("vendor") or name.endswith(".md"):
            continue  # addresses of licences and namespaces, and links; the policy lets the page load nothing from them
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


def test_vendored_files_are_those_that_were_built():
    """scripts/vendor builds them, and lists packages, licences and checksums."""
    listed = json.loads((Path(__file__).parents[2] / "scripts/vendor.json").read_bytes())
    found = {name: content for name, content in page_files().items() if name.startswith("vendor")}
    found["axe.min.js"] = (Path(__file__).parents[1] / "support/axe.min.js").read_bytes()
    assert set(listed["sha256"]) == set(found)
    for name, sha256 in listed["sha256"].items():
        assert hashlib.sha256(found[name]).hexdigest() == sha256, f"{name} was edited; run scripts/vendor"
    head = page_files()["vendor.js"].decode().split("*/")[0]
    for package in listed["packages"]:
        if package["name"] == "axe-core":
            continue  # for tests only
        assert f"{package['name']} {package['version']}\n" in head and package["integrity"].startswith("sha512-")
        assert package["license"] in ("MIT", "BSD-3-Clause")
    assert "url(" not in re.sub(r"url\(data:font/woff2;base64,", "", page_files()["vendor.css"].decode())


def test_no_module_makes_elements_of_strings():
    """The policy forbids it too; this names the line."""
    for name, content in page_files().items():
        if name.endswith(".js") and not name.startswith("vendor"):
            found = re.findall(
                r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\b|new Function",
                content.decode(),
            )
            assert found == [], (name, found)


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
@pytest.mark.parametrize("name", sorted(name for name in page_files() if name.endswith(".js")))
def test_modules_parse(name, tmp_path):
    file = tmp_path / (name.removesuffix(".js") + ".mjs")
    file.write_bytes(page_files()[name])
    subprocess.run(["node", "--check", str(file)], check=True, timeout=PATIENCE)
