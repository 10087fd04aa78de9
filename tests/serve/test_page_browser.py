"""The web page in a real browser, where one is installed: run these before every change of the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from browser import CHROMIUM, Browser
from patience import PATIENCE
from serve.server_process import ServerProcess
from tiny import write_tiny

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed"),
]
TABS = ("chat", "playground", "timeline", "models", "requests")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = write_tiny(tmp_path_factory.mktemp("page"))
    server = ServerProcess(str(folder), "--api-key", "secret", "--max-model-len", "512", "--num-pages", "64")
    yield server
    server.process.terminate()
    server.process.wait(PATIENCE)


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
    browser.until("document.querySelector('.assistant .facts span') && document.getElementById('stop').hidden")
    assert browser.run("document.querySelectorAll('.assistant .token').length") > 0
    browser.run("document.querySelector('.assistant [aria-label=Regenerate]').click()")
    browser.until("document.querySelectorAll('.assistant').length === 1 && !document.getElementById('send').hidden")
    ask(browser, "more", 400)
    browser.until("document.querySelectorAll('.assistant').length === 2")
    browser.press("Escape")
    browser.until("document.getElementById('stop').hidden")
    browser.run("[...document.querySelectorAll('.user [aria-label=Edit]')].at(-1).click()")
    assert browser.run("document.getElementById('prompt').value") == "more"
    assert browser.run("document.querySelectorAll('article').length") == 2

    # text that is not JSON: the message is not lost
    browser.run("document.getElementById('schema').value = '{'")
    browser.press("Enter")
    assert "The JSON schema is not JSON" in text(browser, "chat-error")
    assert browser.run("document.getElementById('prompt').value") == "more"
    browser.run("document.getElementById('schema').value = ''")

    # the timeline moves while requests run, and steps are logged only while it is open
    click(browser, "tab-timeline")
    browser.run("document.getElementById('prompt').value = 'go'; document.getElementById('chat-form').requestSubmit()")
    browser.until("+document.getElementById('lanes').dataset.steps > 3")
    click(browser, "pause")
    assert browser.run("document.getElementById('pause').getAttribute('aria-pressed')") == "true"
    browser.until("document.querySelectorAll('#sums tr').length > 5")
    browser.run("document.getElementById('lanes').focus()")
    browser.press("ArrowLeft", shift=True)  # the last step, then the one before it
    number = int(text(browser, "hover").split()[1])
    browser.press("ArrowLeft", shift=True)
    told = text(browser, "hover")
    assert (
        told.startswith(f"Step {number - 1} of ") and "1 requests" in told and "KV cache" in told and "was idle" in told
    )
    assert "tokens/s written" in text(browser, "speeds")
    click(browser, "help-link")
    browser.until("document.querySelector('#help[open] td')")
    help = text(browser, "help-text")
    assert help.startswith("Where did my time go?") and "host_late" in help and "](" not in help
    click(browser, "close-help")
    click(browser, "tab-models")
    browser.until("document.querySelector('.place')")
    assert "returnstext" in text(browser, "model-cards") and "loaded" in text(browser, "model-cards")
    assert "ok" in text(browser, "server-facts") and "weights of " in text(browser, "memory")
    plans = browser.run("[...document.querySelectorAll('#memory b')].map(each => each.textContent).join()")
    assert "Plan of page" in plans and "KV cache, when it is full" in text(browser, "memory")
    click(browser, "sleep-1")
    browser.until("document.getElementById('models-error').textContent.includes('--admin-key')")

    # similarities and ranks
    click(browser, "tab-playground")
    browser.run("document.getElementById('embed-form').requestSubmit()")
    browser.run("document.getElementById('rerank-form').requestSubmit()")
    browser.until("document.querySelectorAll('#matrix .cell').length === 9")
    browser.until("document.querySelectorAll('#ranking li').length === 3")
    browser.run("document.getElementById('token-form').requestSubmit()")
    browser.until("document.querySelectorAll('#tokens .piece').length > 5")
    assert text(browser, "tokens").startswith("Slipstream counts tokens, not words")
    assert "No model of this server classifies" in text(browser, "classify-note")
    assert browser.run("document.querySelector('#matrix .cell').textContent") == "1.000"

    # the log of requests outlives the page, the key the page only in its tab
    browser.open(server.url + "/#requests")
    browser.reload()
    browser.until("document.getElementById('chat-model')?.value")
    assert "/v1/chat/completions" in text(browser, "request-table") and "/v1/rerank" in text(browser, "request-table")
    assert "secret" not in browser.run("JSON.stringify({...localStorage})")

    # keyboard: Enter opens a view, Escape closes a drawer and gives the focus back
    browser.run("document.getElementById('tab-chat').focus()")
    browser.press("Enter")
    browser.until("!document.getElementById('chat').hidden")
    browser.resize(360, 640)
    browser.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")  # it has seen its size
    for button, drawer in (("menu", "sidebar"), ("settings-button", "settings")):
        click(browser, button)
        browser.until(f"document.getElementById('{drawer}').contains(document.activeElement)")
        browser.press("Escape")
        assert browser.run("document.activeElement.id") == button

    # phone width, and dark
    click(browser, "theme")
    for tab in TABS:
        click(browser, f"tab-{tab}")
        browser.until(f"!document.getElementById('{tab}').hidden")
        assert browser.run("document.documentElement.scrollWidth <= innerWidth"), f"{tab} is wider than the screen"
    browser.screenshot(Path(tmp_path) / "phone.png")
    assert [error for error in browser.errors if "/sleep?level=1" not in error] == []  # refused above
    assert all(url.startswith((server.url, "about:", "data:", "blob:")) for url in browser.urls)


TOOL_STREAM = """
window.sent = []
const real = window.fetch
window.fetch = (path, options) => {
  if (path !== "v1/chat/completions") return real(path, options)
  sent.push(JSON.parse(options.body))
  const call = (index, id) => ({ index, id, type: "function", function: { name: "weather", arguments: '{"city":' } })
  const rest = { index: 0, function: { arguments: '"Rome"}' } }
  const parts = [call(0, "a"), rest, call(1, "b")].map(part => ({ tool_calls: [part] }))
  const drawn = ["sun", "ny", "<|im_end|>"].map(token => ({ token, logprob: -1 }))
  const deltas = sent.length > 1 ? [{ content: "sunny" }] : parts
  const choices = deltas.map(delta => [{ delta, logprobs: delta.content && { content: drawn } }])
  const events = choices.map(each => "data: " + JSON.stringify({ choices: each }) + "\\n\\n").join("")
  return Promise.resolve(new Response(events + "data: [DONE]\\n\\n"))
}
"""


def test_results_of_tools_are_sent_back(server, browser):
    browser.open(server.url + "/")
    browser.until("document.getElementById('key-dialog').open")
    give_key(browser, "secret")
    browser.until("document.getElementById('chat-model').value")
    browser.run(TOOL_STREAM)
    browser.run(
        """document.getElementById('tools').value = '[{"type": "function", "function": {"name": "weather"}}]'"""
    )
    ask(browser, "is it warm?", 8)
    browser.until("document.getElementById('prompt').placeholder.startsWith('Result of weather({\"city\":\"Rome\"})')")
    ask(browser, "20 degrees", 8)
    assert browser.run("sent.length") == 1, "the second call has no result yet"
    ask(browser, "21 degrees", 8)
    browser.until("document.querySelectorAll('.assistant').length === 2 && document.getElementById('stop').hidden")
    assert browser.run("[...document.querySelectorAll('.assistant > .prose')].at(-1).textContent") == "sunny"
    messages = browser.run("sent[1].messages")
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool"]
    assert [message.get("tool_call_id") for message in messages[2:]] == ["a", "b"]
    assert messages[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city":"Rome"}'}
    assert browser.run("document.getElementById('prompt').placeholder").startswith("Write a message")


STREAM = """
(pieces => {
  const real = window.fetch
  window.fetch = (path, options) => path !== "v1/chat/completions" ? real(path, options) : Promise.resolve(new Response(
    pieces.map(content => "data: " + JSON.stringify({ choices: [{ delta: { content } }] }) + "\\n\\n").join("")))
})"""


def answer(browser: Browser, text: str, size: int = 7) -> None:
    """Shows a text as the answer of the model, in pieces."""
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    browser.run(f"{STREAM}({json.dumps(pieces)})")
    ask(browser, "go", 8)
    browser.until("document.querySelector('.assistant') && document.getElementById('stop').hidden", 120)


def open_chat(server, browser: Browser) -> None:
    browser.open(server.url + "/")
    browser.until("document.getElementById('key-dialog').open")
    give_key(browser, "secret")
    browser.until("document.getElementById('chat-model').value")
    browser.errors.clear()


MARKDOWN = r"""# Title

Some **bold** and `code`, [a page](https://example.org/a?b=1) and $x^2$.

```python
def f(x):
    return "text"
```

| a | b |
|---|--:|
| 1 | 2 |

- one
  1. two

$$\frac{1}{2}$$
"""


def test_markdown_becomes_elements(server, browser):
    open_chat(server, browser)
    answer(browser, MARKDOWN)
    count = "document.querySelectorAll('.assistant > .prose {}').length"
    for selector in ("h3", "strong", "p > code", "table td", "ul ol li", "a[target=_blank][rel~=noopener]"):
        assert browser.run(count.format(selector)), selector
    browser.until(count.format(".hl-keyword"))
    browser.until(count.format(".math .katex") + " === 2")
    assert browser.run("document.querySelector('.assistant pre').textContent").startswith("def f(x):\n    return")
    browser.until("document.fonts.check('16px KaTeX_Main')")
    assert browser.errors == []


def test_blocks_that_do_not_change_keep_their_elements(server, browser):
    open_chat(server, browser)
    browser.run("import('/ui/markdown.js').then(found => { window.Markdown = found.Markdown })")
    browser.run("document.body.append(window.box = document.createElement('div')); window.shown = new Markdown(box); 0")
    text = "first\n\n" + MARKDOWN + "".join(f"paragraph {i}\n\n" for i in range(30))
    browser.run(
        f"window.text = {json.dumps(text)}; shown.update(text.slice(0, 9), false); window.first = box.firstChild; 0"
    )
    browser.run("for (let i = 9; i <= text.length; i++) shown.update(text.slice(0, i), false)")
    browser.run("shown.update(text)")
    assert browser.run("box.firstChild === first")
    browser.run("window.whole = document.createElement('div'); new Markdown(whole).update(text); 0")
    plain = "(node => [...node.querySelectorAll('*')].map(each => each.tagName).join() + node.textContent)"
    assert browser.run(f"{plain}(box).length") > 500
    assert browser.run("box.children.length === whole.children.length")


def test_conversations_are_kept(server, browser):
    open_chat(server, browser)
    answer(browser, "the first answer")
    first = browser.run("location.hash")
    assert first.startswith("#chat/")

    # branches: an answer made again, and an edited message
    browser.run("document.querySelector('.assistant [aria-label=Regenerate]').click()")
    browser.until("document.querySelector('.assistant .branches')?.textContent === '2 of 2'")
    browser.run("document.querySelector('.user [aria-label=Edit]').click()")
    browser.type(", changed")
    browser.press("Enter")
    browser.until("document.querySelector('.user .branches')?.textContent === '2 of 2'")
    assert browser.run("document.querySelector('.user .content').textContent") == "go, changed"
    browser.run("document.querySelector('.user [aria-label=\"Previous branch\"]').click()")
    assert browser.run("document.querySelector('.user .content').textContent") == "go"
    assert browser.run("document.querySelector('.assistant .branches').textContent") == "2 of 2"

    # a second one; the list finds words of answers, and the address opens a conversation after a reload
    browser.run("document.getElementById('clear').click()")
    browser.until("document.querySelectorAll('article').length === 0")
    answer(browser, "zebra")
    items = "document.querySelectorAll('#conversations li').length"
    browser.until(items + " === 2")
    browser.reload()
    browser.until("document.querySelector('.assistant > .prose')?.textContent === 'zebra'")
    browser.until(items + " === 2")
    search = (
        "document.getElementById('search').value = '{}'; import('/ui/history.js').then(found => found.showHistory())"
    )
    browser.run(search.format("ZEBRA"))
    browser.until(items + " === 1")
    browser.run(search.format(""))
    browser.until(items + " === 2")
    browser.run(f"location.hash = '{first}'")
    browser.until("document.querySelector('.assistant > .prose')?.textContent === 'the first answer'")

    # rename, also against a later save; delete, undo
    browser.until(f"document.querySelector('#conversations [aria-current]')?.hash === '{first}'")
    browser.run("document.querySelector('#conversations li:has([aria-current]) [aria-label^=Rename]').click()")
    browser.run("document.getElementById('name').value = 'new name'")
    browser.run("document.querySelector('#name-dialog [value=save]').click()")
    browser.until("document.querySelector('#conversations [aria-current]')?.textContent === 'new name'")
    browser.run("document.querySelector('.user [aria-label=\"Next branch\"]').click()")
    browser.until("document.querySelector('.user .branches').textContent === '2 of 2'")
    browser.run("document.querySelector('#conversations li:has([aria-current]) [aria-label^=Delete]').click()")
    browser.until(items + " === 1 && document.querySelectorAll('article').length === 0")
    browser.run("document.querySelector('#notice button').click()")
    browser.until(items + " === 2")

    # export and import, with a file that is not one and one that is hostile
    store = "import('/ui/store.js').then(async store => { const all = await store.allConversations(); "
    exported = browser.run(store + "return store.exported(all) })")
    assert [each["title"] for each in json.loads(exported)["conversations"]].count("new name") == 1
    browser.run(store + "for (const each of all) await store.deleteConversation(each.id) })")
    browser.until(items + " === 0")

    def imported(text: str) -> Any:
        return browser.run(
            f"{store} return store.importConversations({json.dumps(text)}).catch(error => error.message) }})"
        )

    assert "not JSON" in imported("<script>")
    assert "no conversations" in imported("{}")
    loop = {"a": {"id": "a", "parent": "b", "role": "user"}, "b": {"id": "b", "parent": "a", "role": "user"}}
    ring = json.dumps({"format": "slipstream-conversations", "conversations": [{"nodes": loop}]})
    assert "without an end" in imported(ring)
    assert imported(exported) == 2
    browser.until(items + " === 2")
    assert browser.errors == []


def test_two_answers_side_by_side(server, browser):
    open_chat(server, browser)
    click(browser, "compare-button")
    ask(browser, "hello", 4)
    browser.until("document.querySelectorAll('.pair .facts span').length > 2")
    browser.until("document.getElementById('stop').hidden")
    assert browser.run("document.querySelectorAll('.pair > .assistant').length") == 2
    kept = browser.run("document.querySelector('.pair > :last-child .prose:last-of-type').textContent")
    browser.run("document.querySelector('.pair > :last-child [aria-label^=\"Go on\"]').click()")
    browser.until("!document.querySelector('.pair') && document.getElementById('compare').hidden")
    assert browser.run("document.querySelector('.assistant .prose:last-of-type').textContent") == kept
    assert browser.run("document.querySelector('.assistant .branches').textContent") == "2 of 2"
    assert browser.errors == []


def test_a_request_shows_where_its_time_went(server, browser):
    open_chat(server, browser)
    ask(browser, "hello", 12)
    browser.until("document.querySelector('#request-table button')")
    click(browser, "tab-requests")
    browser.until("!document.getElementById('waterfall').hidden")
    told = text(browser, "waterfall")
    assert all(
        name in told for name in ("Browser", "Before", "Prompt", "Tokens", "before the first step", "tokens ")
    ), told
    assert browser.run("document.querySelectorAll('#waterfall .track i').length") > 12
    bars = browser.run(
        "[...document.querySelectorAll('#request-table .track i')].map(bar => parseFloat(bar.style.width))"
    )
    assert len(bars) >= 3 and 50 < sum(bars) <= 101

    # not recorded: only what the browser sees
    click(browser, "record")
    browser.run(
        "document.getElementById('prompt').value = 'again'; document.getElementById('chat-form').requestSubmit()"
    )
    browser.until("document.querySelectorAll('#request-table [aria-label*=\"until the first token\"]').length === 1")
    assert browser.errors == []


def test_settings_are_kept_and_saved_by_name(server, browser):
    open_chat(server, browser)

    def save(kind: str, name: str) -> None:
        browser.run("document.getElementById('settings').dispatchEvent(new Event('input'))")
        browser.run(f"document.querySelector('#{kind} button[aria-label^=Save]').click()")
        browser.run(f"document.getElementById('name').value = '{name}'")
        browser.run("document.querySelector('#name-dialog [value=save]').click()")
        browser.until(f"document.querySelector('#{kind} select').value === '{name}'")

    browser.run("document.getElementById('system').value = 'Be brief.'; document.getElementById('seed').value = 7")
    save("prompts", "brief")
    save("presets", "fixed")
    browser.run("document.getElementById('system').value = ''; document.getElementById('seed').value = 8")
    browser.run("document.getElementById('settings').dispatchEvent(new Event('input'))")
    browser.reload()
    browser.until("document.getElementById('chat-model')?.value")
    assert browser.run("document.getElementById('seed').value") == "8"
    for kind, name in (("prompts", "brief"), ("presets", "fixed")):
        browser.run(f"document.querySelector('#{kind} select').value = '{name}'")
        browser.run(f"document.querySelector('#{kind} select').dispatchEvent(new Event('change'))")
    assert (
        browser.run("document.getElementById('seed').value + document.getElementById('system').value") == "7Be brief."
    )
    browser.run("document.querySelector('#presets button[aria-label^=Delete]').click()")
    assert browser.run("document.querySelectorAll('#presets option').length") == 1


def test_text_files_are_sent(server, browser):
    open_chat(server, browser)
    browser.run(TOOL_STREAM)
    drop = "new Event('drop', {{cancelable: true}})"
    files = "[new File(['x = 1'], 'a.py'), new File([new Uint8Array([137, 80, 0, 255])], 'a.png')]"
    browser.run(f"{{const found = {drop.format()}; found.dataTransfer = {{files: {files}}}; "
                "document.getElementById('chat').dispatchEvent(found)}")  # fmt: skip
    browser.until("document.querySelectorAll('#files li').length === 1")
    browser.until("document.getElementById('chat-error').textContent.includes('a.png is not attached: it is not text')")
    ask(browser, "What is x?", 8)
    browser.until("sent.length")
    assert browser.run("sent[0].messages[0].content") == "File a.py:\n```\nx = 1\n```\n\nWhat is x?"
    assert browser.run("document.querySelector('.user .file summary').textContent") == "a.py"


HOSTILE = {
    "script": "<script>window.hit = 1</script>",
    "picture": '<img src=x onerror="window.hit = 1"> ![x](https://example.org/x.png)',
    "frame": '<iframe srcdoc="<script>parent.hit = 1</script>"></iframe><svg onload="window.hit=1">',
    "links": "[a](javascript:window.hit=1) [b](data:text/html,<script>hit=1</script>) <javascript:hit=1> "
    "[c](vbscript:x) [d](/sleep) [e](jAvAsCrIpT&colon;hit=1)",
    "attributes": '[x](https://example.org/"onmouseover="hit=1) ```"><img src=x onerror=hit=1>\n',
    "language": '```"><img src=x onerror=hit=1>\ncode <b>x</b>\n```',
    "formula": r"$\href{javascript:hit=1}{x}$ $\includegraphics{https://example.org/x}$ "
    r"$\def\a{\a\a}\a$ $\htmlData{a=b}{x}$",
    "nested": "> " * 3000 + "x",
    "lists": "\n".join(" " * 2 * i + "- x" for i in range(1500)),
    "marks": "*_`[" * 20000,
    "line": "x" * 1_000_000,
    "fence": "```js\n" + "x = 1;" * 100_000,
    "blocks": "```py\nx = 1\n```\n" * 10_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_answers_are_harmless(server, browser, name):
    open_chat(server, browser)
    answer(browser, HOSTILE[name], 7 if len(HOSTILE[name]) < 1000 else 20_000)
    assert browser.run("window.hit") is None
    assert browser.run("document.querySelectorAll('#thread :is(img, script, iframe, object, form, style)').length") == 0
    hrefs = browser.run("[...document.querySelectorAll('#thread a')].map(each => each.href)")
    assert all(href.startswith(("https://example.org/", "http://", "mailto:")) for href in hrefs), hrefs
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    shown = browser.run("document.querySelector('.assistant > .prose').textContent")
    assert len(shown) >= len(HOSTILE[name]) / 4
    ask(browser, "still there", 8)
    browser.until("document.querySelectorAll('.user').length === 2")
    assert all(url.startswith((server.url, "about:", "data:", "blob:")) for url in browser.urls)
    assert browser.errors == []


AXE = Path(__file__).parents[1] / "support/axe.min.js"  # of axe-core, taken by scripts/vendor
VIOLATIONS = """axe.run().then(result => result.violations.map(each =>
    [each.id, each.help, each.nodes.map(node => node.target.join(" "))]))"""


def test_axe_finds_no_violation(server, browser):
    code = AXE.read_text(encoding="utf-8") + "; true"

    def check(*where: Any) -> None:
        found = browser.run(VIOLATIONS)
        assert found == [], (where, found)

    browser.open(server.url + "/")
    browser.run(code)
    browser.until("document.getElementById('key-dialog').open")
    check("key")
    give_key(browser, "secret")
    browser.until("document.getElementById('chat-model').value")
    click(browser, "logprobs")
    ask(browser, "hello", 20)
    browser.until("document.querySelector('.assistant .facts span')")
    browser.run("document.getElementById('embed-form').requestSubmit()")
    browser.run("document.getElementById('rerank-form').requestSubmit()")
    browser.until("document.querySelector('#matrix td') && document.querySelector('#ranking li')")
    for theme in ("light", "dark"):
        browser.until(
            f"document.getElementById('theme').click() ?? document.documentElement.dataset.theme === '{theme}'"
        )
        for width in (1100, 360):
            browser.resize(width, 700)
            for tab in TABS:
                click(browser, f"tab-{tab}")
                browser.until(f"document.querySelector('#{tab} :is(td, .facts)')")
                check(theme, width, tab)
                if tab == "timeline":
                    click(browser, "help-link")
                    browser.until("document.querySelector('#help td')")
                    check(theme, width, "help")
                    click(browser, "close-help")
        click(browser, "key-button")
        check(theme, "key")
        browser.run("document.getElementById('key-dialog').close()")
        click(browser, "menu")
        check(theme, "menu")
        click(browser, "close-menu")
        click(browser, "tab-chat")
        click(browser, "settings-button")
        check(theme, "settings")
        click(browser, "close-settings")
        browser.run("document.getElementById('schema').value = '{'")
        ask(browser, "hello", 20)
        browser.until("document.getElementById('chat-error').textContent")
        check(theme, "error")
        browser.run("document.getElementById('schema').value = document.getElementById('prompt').value = ''")
    browser.run("document.getElementById('schema').value = ''; document.getElementById('logprobs').checked = false")
    click(browser, "clear")
    click(browser, "compare-button")
    answer(browser, MARKDOWN + HOSTILE["links"])
    browser.resize(1100, 2400)
    browser.until("document.querySelectorAll('.math .katex').length === 4 && document.querySelector('.hl-keyword')")
    for theme in ("light", "dark"):
        browser.run(f"document.documentElement.dataset.theme = '{theme}'")
        check(theme, "Markdown, side by side")
    browser.open(server.url + "/docs")
    browser.until("document.querySelector('summary')")
    browser.run("document.querySelectorAll('details').forEach(each => { each.open = true })")
    browser.run(code)
    check("routes")
