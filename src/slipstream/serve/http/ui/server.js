// The views of the server: its models, its load, and the requests that this browser has sent.

import { changes, clearRequests, json, readSteps, relist, requests } from "./api.js"
import { $, fillTable, make } from "./dom.js"

export function startServer() {
  changes.addEventListener("requests", showRequests)
  $("clear-requests").addEventListener("click", clearRequests)
  $("record").checked = localStorage.getItem("slipstream-record") !== "no"
  $("record").addEventListener("change", () => localStorage.setItem("slipstream-record", $("record").checked ? "yes" : "no"))
  showRequests()
}

let refresh = 0  // timer
let visible = false

export async function showModels(show = visible) {
  visible = show
  clearTimeout(refresh)
  if (!visible) return
  try {
    const [{ data }, load, { version }, health] = await Promise.all(["v1/models", "load", "version", "health"].map(path => json(path, { log: false })))
    const { models, is_asleep, ...gauges } = load
    const row = ({ id, parent, tasks, max_model_len }) => {
      const own = models.find(each => each.model === (parent ?? id))
      const pages = own?.pages ? `${own.pages - own.free_pages} of ${own.pages}` : ""
      return [parent ? `${id} (adapter of ${parent})` : id, own ? (is_asleep ? "asleep" : "ready") : "", own?.running ?? "", own?.waiting ?? "", pages, tasks.join(", "), max_model_len]
    }
    fillTable($("model-table"), ["model", "state", "running", "waiting", "pages used", "tasks", "maximum tokens"], data.map(row))
    fillTable($("load-table"), ["gauge", "value"], [["version", version], ["health", health.status], ...Object.entries(gauges).map(([name, value]) => [name.replaceAll("_", " "), value])])
    $("models-error").textContent = ""
  } catch (error) { $("models-error").textContent = error.message }
  clearTimeout(refresh)  // another call may have ended meanwhile
  if (visible) refresh = setTimeout(showModels, 2000)
}

// Requests

const PARTS = {  // name: [colour, title, explanation]
  before: ["turnaround", "before the first step", "The request travels, is checked and turned into tokens, and waits for a free place in a step."],
  prompt: ["prefill", "prompt", "Steps that read the prompt. Its cached tokens are not computed again, so a prompt seen before is shorter here."],
  first: ["prefill", "until the first token", "Network, queue and prompt together: the server's steps were not recorded."],
  tokens: ["decode", "tokens", "Steps that write tokens, one or more in each."],
  grammar: ["grammar", "of them, waiting for a grammar or a logits processor", "The device waited for a mask from the host. Simpler schemas and fewer processors make it shorter."],
  rest: ["output", "network and browser", "From the end of the last step until the last event came here."],
}

// Records the server's steps while a request runs. Returns a function that ends it and sets `entry.parts`.
export function record(entry) {
  let steps = [], offset = 0, seen = 0
  const end = $("record").checked ? readSteps(found => {
    offset = found.offset
    seen = found.now - found.offset
    const lane = found.models.indexOf(entry.model)
    steps.push(...found.steps.filter(step => lane < 0 || step.lane === lane))
  }) : () => {}
  return async () => {
    const last = Date.now() / 1000
    for (let i = 0; i < 20 && seen < last && $("record").checked; i++) await new Promise(done => setTimeout(done, 50))
    end()
    const ms = time => (time - offset) * 1000 - entry.began
    steps = steps.filter(step => ms(step.end) > 0 && ms(step.start) < entry.total)
    entry.detail = { ...entry.detail, steps: steps.map(step => ({ ...step, from: ms(step.start), to: ms(step.end), gap: step.gap * 1000, late: step.late * 1000 })) }
    entry.parts = partsOf(entry)
    relist()
    return entry.parts
  }
}

// Milliseconds of each part. The steps may be of other requests too: `alone` says whether they are not.
function partsOf({ total, detail: { came, steps } }) {
  const prompts = steps.filter(step => step.prefill_tokens && step.from < (came[0] ?? total))
  if (!prompts.length) return { first: came[0] ?? total, tokens: total - (came[0] ?? total) }
  const sum = value => steps.reduce((all, step) => all + value(step), 0)
  const start = Math.max(0, prompts[0].from), read = prompts.at(-1).to, end = Math.min(total, steps.at(-1).to)
  return {
    before: start, prompt: read - start, tokens: Math.max(0, end - read), rest: total - Math.max(end, read),
    grammar: sum(step => step.late + (step.cause === "grammar" && step.from > start ? step.gap : 0)),
    drafts: sum(step => step.drafts), accepted: sum(step => step.accepted), alone: steps.every(step => step.running + step.waiting <= 1),
  }
}

const bar = (name, from, length, total, title = "") => {
  const element = make("i", { title })
  element.style.background = `var(--${name})`
  element.style.left = 100 * Math.max(0, from) / total + "%"
  element.style.width = Math.max(0, Math.min(100, 100 * length / total)) + "%"
  return element
}
const duration = ms => ms >= 1000 ? (ms / 1000).toFixed(2) + " s" : ms.toFixed(ms < 10 ? 1 : 0) + " ms"
const ORDER = ["before", "first", "prompt", "tokens", "rest"]

function smallBar({ parts, total }, longest) {
  const box = make("div", { className: "track", role: "img", "aria-label": parts ? ORDER.filter(name => parts[name]).map(name => `${PARTS[name][1]} ${duration(parts[name])}`).join(", ") : duration(total ?? 0) })
  let from = 0
  for (const name of parts ? ORDER : []) {
    if (!parts[name]) continue
    box.append(bar(PARTS[name][0], from, parts[name], longest, `${PARTS[name][1]}: ${duration(parts[name])}`))
    from += parts[name]
  }
  if (!parts) box.append(bar("turnaround", 0, total ?? 0, longest))
  return box
}

let chosen = null
function showRequests() {
  const longest = Math.max(1, ...requests.map(each => each.total ?? 0))
  fillTable($("request-table"), ["time", "request", "model", "status", "where the time went", "total"], requests.map(each => [
    each.detail?.steps ? make("button", { className: "plain", text: clock(each), "aria-label": `Show the request of ${clock(each)}`, onclick: () => { chosen = each; showRequests(); $("waterfall").scrollIntoView({ block: "nearest" }) } }) : clock(each),
    `${each.method} /${each.path}`, each.model ?? "", String(each.status), smallBar(each, longest), duration(each.total ?? 0)]))
  if (!requests.includes(chosen)) chosen = requests.find(each => each.detail?.steps) ?? null
  $("waterfall").hidden = !chosen
  if (chosen) waterfall(chosen)
}
const clock = each => new Date(each.began).toLocaleString()

const MAX_BARS = 1500
function waterfall({ began, path, total, parts, detail: { came, steps } }) {
  const few = list => list.length > MAX_BARS ? list.slice(0, MAX_BARS) : list
  const first = came[0] ?? total, start = parts.before ?? 0
  const rows = [
    ["Browser", [bar("no_requests", 0, first, total, `waits ${duration(first)}`), ...few(came).map(time => bar("output", time, 0, total))]],
    ["Before", parts.before ? [bar("turnaround", 0, start, total, duration(start))] : []],
    ["Prompt", few(steps.filter(step => step.prefill_tokens)).map(step => bar("prefill", step.from, step.to - step.from, total, `${step.prefill_tokens} tokens, ${duration(step.to - step.from)}`))],
    ["Tokens", few(steps.filter(step => !step.prefill_tokens)).map(step => bar("decode", step.from, step.to - step.from, total, duration(step.to - step.from)))],
    ["Grammar", few(steps.filter(step => step.late || step.cause === "grammar" && step.gap)).map(step => bar("grammar", step.late ? step.to - step.late : step.from - step.gap, step.late || step.gap, total))],
  ].filter(([, bars]) => bars.length)
  const axis = make("div", { className: "track axis" }, ...[0, 0.25, 0.5, 0.75, 1].map(part => make("span", { text: duration(part * total) })))
  const facts = Object.entries(PARTS).filter(([name]) => parts[name] > 0.05).map(([name, [colour, title, text]]) => {
    const key = make("span", { className: "key" })
    key.style.background = `var(--${colour})`
    return make("li", {}, key, make("b", { text: `${title} ${duration(parts[name])}. ` }), text)
  })
  $("waterfall").replaceChildren(make("h2", { text: `${new Date(began).toLocaleTimeString()} /${path}, ${duration(total)}` }),
    make("div", { className: "rows", role: "img", "aria-label": "Times of the request; the list below has them as text" },
      ...rows.flatMap(([name, bars]) => [make("span", { text: name }), make("div", { className: "track" }, ...bars)]), make("span"), axis),
    make("ul", {}, ...facts), ...(parts.alone === false ? [make("p", { text: "Other requests ran at the same time: the steps are of all of them." })] : []))
}
