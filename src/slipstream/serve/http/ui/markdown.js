// Markdown as elements, while it is written. No HTML string is made: each token of the parser becomes an element with
// text, and HTML in the source stays text. So nothing that a model writes can become code, and blocks that have not
// changed keep their elements (no flicker, selections stay).

import { $, make, makeIcon } from "./dom.js"
import { Marked, hljs, katex } from "./vendor.js"

const MAX_DEPTH = 30  // of lists and quotes in each other; deeper ones are shown as written
const MAX_PARAGRAPH = 5000, MAX_HIGHLIGHTED = 30000, MAX_FORMULA = 2000  // characters; longer ones are shown as written
const KEPT = 4  // last blocks that more text may still change

// Grammar: formulas, and text that is too large to search for marks

const math = (name, level, starts, patterns) => ({
  name, level,
  start(source) {
    const end = level === "block" ? source.indexOf("\n\n") : -1, at = (end < 0 ? source : source.slice(0, end)).search(starts)
    return at < 0 ? undefined : at
  },
  tokenizer(source) {
    for (const [pattern, display] of patterns) {
      const found = pattern.exec(source)
      if (found) return { type: "math", raw: found[0], text: found[1].trim(), display }
    }
  },
})
const INLINE = math("math", "inline", /\$|\\[([]/, [
  [/^\$\$([^$]{1,2000})\$\$/, true],
  [/^\$(?![\s$])((?:[^$\\\n]|\\[^\n]){1,500})(?<!\s)\$(?!\d)/, false],
  [/^\\\(((?:[^\\]|\\[^)]){1,2000}?)\\\)/, false],
  [/^\\\[((?:[^\\]|\\[^\]]){1,2000}?)\\\]/, true],
])
const BLOCK = math("math-block", "block", /\n {0,3}(?:\$\$|\\\[)/, [
  [/^ {0,3}\$\$([^$]{1,2000})\$\$[ \t]*(?:\n|$)/, true],
  [/^ {0,3}\\\[((?:[^\\]|\\[^\]]){1,2000}?)\\\][ \t]*(?:\n|$)/, true],
])
const LARGE = {
  name: "plain", level: "block",
  tokenizer(source) {
    if (/^(?:\n| {0,3}(?:```|~~~))/.test(source)) return
    const found = /\n(?= {0,3}(?:[-*+>] |#{1,6} |[|\n]|```|~~~|\d+[.)]))/.exec(source), end = found ? found.index + 1 : source.length
    if (end > MAX_PARAGRAPH) return plain(source.slice(0, end))
    if (!/^ {0,3}(?:[-*+>]|\d+[.)])/.test(source)) return
    const blank = source.indexOf("\n\n"), piece = blank < 0 ? source : source.slice(0, blank + 2)
    if (/\n(?: {100}|(?:> ?){50})/.test(piece)) return plain(piece)  // lists and quotes in each other
  },
}
const plain = raw => ({ type: "plain", raw })
const marked = new Marked({ gfm: true, breaks: true })  // models end lines of verses with one break
marked.use({ extensions: [LARGE, BLOCK, INLINE] })

function lex(source) {
  try { return marked.lexer(source) } catch (error) {
    return Object.assign([plain(source)], { links: {}, error })  // too deep for the parser, for example
  }
}

// One text in an element. `update` may be called for each piece that arrives; `done`: the text is complete.
export class Markdown {
  constructor(element) {
    this.element = element
    this.clear()
  }

  clear() {
    this.text = ""
    this.settled = 0  // length of the start of the text whose blocks do not change any more
    this.blocks = []  // {raw, type, node} of the rest
    this.element.replaceChildren()
  }

  update(source, done = true) {
    const text = source.replace(/\r\n?/g, "\n").replaceAll("\t", "    ")
    if (!text.startsWith(this.text)) this.clear()
    if (done && this.settled && /^ {0,3}\[[^\]\n]+\]:/m.test(text)) this.clear()  // names links of earlier blocks
    this.text = text
    const rest = text.slice(this.settled)
    const tokens = lex(done ? rest : closed(rest)).filter(token => token.type !== "def")
    this.reconcile(tokens)
    if (!done) this.settle(tokens, rest)
  }

  reconcile(tokens) {
    let same = 0
    while (same < tokens.length && same < this.blocks.length && this.blocks[same].raw === tokens[same].raw) same++
    const grown = this.blocks[same]
    if (grown?.type === "code" && tokens[same]?.type === "code" && grown.lang === tokens[same].lang) {
      grow(grown.node, tokens[same].text)
      grown.raw = tokens[same++].raw
    }
    for (const { node } of this.blocks.splice(same)) node?.remove()
    for (const { type, raw, lang, ...token } of tokens.slice(same)) {
      const node = block({ type, raw, lang, ...token }, 0)
      if (node) this.element.append(node)
      this.blocks.push({ type, raw, lang, node })
    }
  }

  settle(tokens, rest) {
    const count = tokens.length - KEPT
    if (count < KEPT) return
    const raw = tokens.slice(0, count).map(token => token.raw).join("")
    if (!rest.startsWith(raw)) return
    this.settled += raw.length
    this.blocks.splice(0, count)
  }
}

// The text with marks closed that its last line has opened, so that bold text is bold before its end arrives.
function closed(text) {
  const start = text.lastIndexOf("\n") + 1, line = text.slice(start)
  if ((text.match(/^ {0,3}(?:```|~~~)/gm) ?? []).length % 2 || line.length > MAX_PARAGRAPH) return text
  const rest = line.replace(/`[^`]*`/g, "")
  if (rest.includes("`")) return /`$/.test(line) ? text.slice(0, -1) : text + "`"
  const bare = rest.replace(/\*+$/, "")
  const cut = text.slice(0, text.length - (rest.length - bare.length))
  return (bare.match(/\*\*/g) ?? []).length % 2 ? cut.trimEnd() + "**" : cut
}

// Blocks

const TAGS = { paragraph: "p", blockquote: "blockquote", strong: "strong", em: "em", del: "del" }

function block(token, depth) {
  if (depth > MAX_DEPTH) return make("p", { className: "as-written", text: token.raw })
  switch (token.type) {
    case "space": return null
    case "heading": return make("h" + Math.min(6, token.depth + 2), {}, ...inline(token.tokens, depth))
    case "paragraph": return make("p", {}, ...inline(token.tokens, depth))
    case "text": return make("span", {}, ...(token.tokens ? inline(token.tokens, depth) : [decode(token.text)]))
    case "blockquote": return make("blockquote", {}, ...blocks(token.tokens, depth + 1))
    case "hr": return make("hr")
    case "code": return codeBlock(token.text, token.lang)
    case "math": return formula(token)
    case "list": return list(token, depth + 1)
    case "table": return table(token, depth)
    default: return make("p", { className: "as-written", text: token.raw })
  }
}

const blocks = (tokens, depth) => tokens.map(token => block(token, depth)).filter(node => node)

function list({ ordered, start, items }, depth) {
  const element = make(ordered ? "ol" : "ul", ordered && start !== 1 && Number.isSafeInteger(start) ? { start } : {})
  for (const item of items) {
    const children = blocks(item.tokens.filter(token => token.type !== "checkbox"), depth)
    element.append(make("li", { className: item.task ? "task" : "" }, ...(item.task ? [item.checked ? "☑ " : "☐ "] : []), ...children))
  }
  return element
}

function table({ header, align, rows }, depth) {
  const cells = (row, tag) => row.map((cell, i) =>
    make(cell.text ? tag : "td", align[i] ? { className: "to-" + align[i] } : {}, ...inline(cell.tokens, depth)))
  const head = make("thead", {}, make("tr", {}, ...cells(header, "th")))
  const body = make("tbody", {}, ...rows.map(row => make("tr", {}, ...cells(row, "td"))))
  return make("div", { className: "scroll", tabindex: 0, role: "group", "aria-label": "Table" }, make("table", {}, head, body))
}

// Text within a block

function inline(tokens, depth) {
  if (depth > MAX_DEPTH) return tokens.map(token => token.raw)
  return tokens.map(token => {
    switch (token.type) {
      case "strong": case "em": case "del": return make(TAGS[token.type], {}, ...inline(token.tokens, depth + 1))
      case "codespan": return make("code", { text: token.text })
      case "br": return make("br")
      case "link": return link(token.href, inline(token.tokens, depth + 1), token.raw)
      case "image": return link(token.href, [`Picture: ${token.text || token.href}`], token.raw)  // never loaded
      case "math": return formula(token)
      case "html": return /^<br *\/?>$/i.test(token.raw) ? make("br") : token.raw
      case "text": return token.tokens ? make("span", {}, ...inline(token.tokens, depth + 1)) : decode(token.text)
      case "escape": return token.text
      default: return token.raw
    }
  })
}

// Only absolute addresses of these kinds; the page they open cannot reach this one.
function link(href, children, raw) {
  let found
  try { found = new URL(href) } catch { return raw }
  if (!["http:", "https:", "mailto:"].includes(found.protocol)) return raw
  return make("a", { href: found.href, title: found.href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children)
}

const ENTITIES = {
  amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", copy: "©", reg: "®", hellip: "…", mdash: "—", ndash: "–",
  times: "×", deg: "°", rarr: "→", larr: "←", middot: "·", bull: "•", le: "≤", ge: "≥", ne: "≠", plusmn: "±", euro: "€",
}
const decode = text => text.replace(/&(?:#(\d{1,7})|#x([\da-f]{1,6})|(\w{2,8}));/gi, (raw, decimal, hex, name) => {
  if (name) return Object.hasOwn(ENTITIES, name) ? ENTITIES[name] : raw
  const code = decimal ? Number(decimal) : parseInt(hex, 16)
  return code > 0 && code <= 0x10ffff ? String.fromCodePoint(code) : raw
})

// Code and formulas are drawn when they come near the visible part

const due = new WeakMap()
const near = new IntersectionObserver(entries => {
  for (const { isIntersecting, target } of entries) {
    if (!isIntersecting) continue
    near.unobserve(target)
    due.get(target)?.()
    due.delete(target)
  }
}, { root: $("messages"), rootMargin: "800px" })

function later(element, draw) {
  due.set(element, draw)
  near.observe(element)
  return element
}

export function codeBlock(text, lang = "") {
  const name = lang.trim().split(/[\s{,:]/)[0].slice(0, 30)
  const code = make("code", { text })
  const copy = make("button", { type: "button", className: "plain", text: "Copy", onclick: () => copied(copy, code.textContent) })
  copy.prepend(makeIcon("copy"))
  const figure = make("figure", { className: "code" }, make("div", { className: "bar" }, make("span", { text: name || "text" }), copy), make("pre", { tabindex: 0 }, code))
  figure.dataset.lang = name
  return later(figure, () => highlight(code, name))
}

function grow(figure, text) {
  const code = figure.querySelector("code")
  code.textContent = text
  if (!due.has(figure)) highlight(code, figure.dataset.lang)
}

export async function copied(button, text) {
  try { await navigator.clipboard.writeText(text) } catch { copyOld(text) }  // without https there is no clipboard object
  button.classList.add("done")
  setTimeout(() => button.classList.remove("done"), 1200)
}

function copyOld(text) {
  const field = make("textarea", { className: "hidden" })
  field.value = text
  document.body.append(field)
  field.select()
  document.execCommand("copy")
  field.remove()
}

// Builds elements where highlight.js would write HTML.
class Spans {
  constructor() { this.top = document.createDocumentFragment(); this.open = [this.top] }
  addText(text) { this.open.at(-1).append(text) }
  openNode(name) { const span = make("span", { className: "hl-" + name.split(".")[0] }); this.open.at(-1).append(span); this.open.push(span) }
  closeNode() { this.open.pop() }
  startScope(name) { this.openNode(name) }
  endScope() { this.closeNode() }
  __addSublanguage(other) { this.open.at(-1).append(other.top) }
  closeAllNodes() {}
  finalize() {}
  toHTML() { return "" }
}
hljs.configure({ __emitter: Spans })

function highlight(code, lang) {
  const text = code.textContent
  if (!hljs.getLanguage(lang) || text.length > MAX_HIGHLIGHTED || /[^\n]{2000}/.test(text)) return
  const result = hljs.highlight(text, { language: lang, ignoreIllegals: true })
  if (!result.errorRaised) code.replaceChildren(result._emitter.top)
}

let styles = null  // a promise: the styles and fonts of formulas, loaded for the first one
function loadStyles() {
  const element = make("link", { rel: "stylesheet", href: "ui/vendor.css" })
  document.head.append(element)
  return new Promise(resolve => { element.onload = element.onerror = resolve })
}

function formula({ text, raw, display }) {
  const element = make(display ? "div" : "span", { className: "math", text: raw.trim() })
  if (text.length > MAX_FORMULA) return element
  return later(element, async () => {
    await (styles ??= loadStyles())
    const drawn = document.createElement("span")
    try {
      katex.render(text, drawn, { displayMode: display, throwOnError: true, strict: "ignore", trust: false, maxSize: 20, maxExpand: 200 })
      element.replaceChildren(...drawn.childNodes)
      element.title = raw.trim()
    } catch { /* stays as written */ }
  })
}
