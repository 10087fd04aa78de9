// The views of the server: its models, memory and control, and the requests that this browser has sent.

import { call, changes, clearRequests, json, readSteps, relist, requests } from "./api.js"
import { $, fillTable, make } from "./dom.js"

export function startServer() {
  changes.addEventListener("requests", showRequests)
  $("clear-requests").addEventListener("click", clearRequests)
  $("record").checked = localStorage.getItem("slipstream-record") !== "no"
  $("record").addEventListener("change", () => localStorage.setItem("slipstream-record", $("record").checked ? "yes" : "no"))
  showRequests()
  startControl()
}

// Models

let refresh = 0  // timer
let visible = false
const text = async path => (await call(path, { log: false })).text()
const bytes = count => count >= 1e9 ? (count / 1e9).toFixed(2) + " GB" : (count / 1e6).toFixed(0) + " MB"
const TASKS = { generate: "text", embed: "embeddings", token_embed: "embeddings of tokens", score: "scores of pairs", classify: "classes", token_classify: "classes of tokens", sparse: "sparse vectors" }

export async function showModels(show = visible) {
  visible = show
  clearTimeout(refresh)
  if (!visible) return
  try {
    const get = path => json(path, { log: false })
    const [{ data }, load, { version }, health, ps, metrics] = await Promise.all([get("v1/models"), get("load"), get("version"), get("health"), get("api/ps"), text("metrics")])
    const files = new Map(ps.models.map(model => [model.name, model]))
    $("server-facts").textContent = `Slipstream ${version}, ${load.is_asleep ? "asleep" : health.status}, ${load.server_load} open requests: ${load.running} running, ${load.waiting} waiting. ${load.steps.toLocaleString()} steps since the start.`
    $("model-cards").replaceChildren(...data.filter(model => !model.parent).map(model =>
      card(model, load, files.get(model.id), data.filter(each => each.parent === model.id))))
    $("memory").replaceChildren(...memory(load, ps.models, metrics))
    $("models-error").textContent = ""
  } catch (error) { $("models-error").textContent = error.message }
  clearTimeout(refresh)  // another call may have ended meanwhile
  if (visible) refresh = setTimeout(showModels, 2000)
}

function card({ id, tasks, max_model_len }, load, file, adapters) {
  const own = load.models.find(each => each.model === id), details = file?.details
  const facts = [
    ["returns", tasks.map(task => TASKS[task] ?? task).join(", ")],
    ["longest input and output", `${max_model_len.toLocaleString()} tokens`],
    ["parameters", [details?.parameter_size, details?.quantization_level].filter(each => each).join(", ")],
    ["requests", own ? `${own.running} running, ${own.waiting} waiting` : ""],
  ].filter(([, value]) => value)
  return make("div", { className: "card" },
    make("h2", { text: id }), make("span", { className: "state", text: load.is_asleep ? "asleep" : "loaded" }),
    make("dl", {}, ...facts.flatMap(([name, value]) => [make("dt", { text: name }), make("dd", { text: value })])),
    ...(own?.pages ? [meter("KV cache in use", own.pages - own.free_pages, own.pages)] : []),
    ...(adapters.length ? [make("ul", { className: "adapters" }, ...adapters.map(({ id: name }) => make("li", { text: `LoRA adapter ${name} ` },
      make("button", { text: "Unload", "aria-label": `Unload ${name}`, onclick: () => control("v1/unload_lora_adapter", { lora_name: name }) }))))] : []))
}

function meter(name, value, most) {
  const track = make("div", { className: "track" }, ...(value ? [bar("prefill", 0, value, most)] : []))
  return make("div", { className: "meter" }, make("span", { text: `${name}: ${(100 * value / most).toFixed(0)} %` }), track)
}

const PLAN = {  // part: [name, colour]
  weights: ["weights", "prefill"], adapters: ["LoRA adapters", "grammar"], cache: ["KV cache, when it is full", "decode"],
  activations: ["activations of the largest step", "host"], buffers: ["buffers", "turnaround"], host: ["buffers of the host", "output"],
}

// Memory as one bar for each plan of a model, and for each place: weights on a GPU, and the processes of the server.
function memory(load, models, metrics) {
  const resident = [...metrics.matchAll(/^process_resident_memory_bytes\{process="([^"]*)"\} (\S+)/gm)].map(found => [found[1], Number(found[2])])
  const colours = ["prefill", "decode", "host", "output"], onGpu = models.filter(model => model.size_vram > 0)
  const weights = list => list.map((model, i) => [`weights of ${model.name}`, model.size, colours[i % colours.length]])
  const places = load.models.map(({ model, memory }) => [`Plan of ${model}, at most`, Object.entries(PLAN).filter(([part]) => memory[part]).map(([part, [name, colour]]) => [name, memory[part], colour])])
  if (onGpu.length) places.push(["Weights on the device:", weights(onGpu)])
  for (const [name, size] of resident) {
    const here = name.startsWith("core") && !onGpu.length && !load.is_asleep ? weights(models) : []
    const rest = size - here.reduce((sum, [, count]) => sum + count, 0)
    const parts = rest > 0 ? [...here, [here.length ? "KV cache, buffers and program" : "program and buffers", rest, "turnaround"]] : [["all", size, "turnaround"]]
    places.push([name.replace(/^core/, "Engine").replace(/^front_end_(\d+)/, (_, i) => `Front end ${Number(i) + 1}`) + " now:", parts])
  }
  const most = Math.max(1, ...places.map(([, parts]) => parts.reduce((sum, [, count]) => sum + count, 0)))
  return [...places.map(([name, parts]) => {
    let from = 0
    const all = parts.reduce((sum, [, count]) => sum + count, 0)
    const track = make("div", { className: "track", role: "img", "aria-label": parts.map(([part, count]) => `${part} ${bytes(count)}`).join(", ") },
      ...parts.map(([part, count, colour]) => { from += count; return bar(colour, from - count, count, most, `${part}: ${bytes(count)}`) }))
    const keys = parts.map(([part, count, colour]) => make("span", {}, keyOf(colour), `${part} ${bytes(count)}`))
    return make("div", { className: "place" }, make("b", { text: `${name} ${bytes(all)}` }), track, make("p", { className: "facts" }, ...keys))
  }), make("p", { text: "On a CPU pages of the KV cache take memory when they are first used. Every buffer of a plan: slipstream plan --model MODEL." })]
}

function keyOf(colour) {
  const key = make("span", { className: "key" })
  key.style.background = `var(--${colour})`
  return key
}

// Admin routes

function startControl() {
  $("sleep-1").addEventListener("click", () => control("sleep?level=1"))
  $("sleep-2").addEventListener("click", () => control("sleep?level=2"))
  $("wake").addEventListener("click", () => control("wake_up"))
  $("reload").addEventListener("click", () => control("collective_rpc", { method: "reload_weights" }))
  $("adapter-form").addEventListener("submit", event => {
    event.preventDefault()
    control("v1/load_lora_adapter", { lora_name: $("adapter-name").value.trim(), lora_path: $("adapter-path").value.trim(), base_model_name: $("adapter-base").value || undefined })
  })
}

async function control(path, body) {
  $("models-error").textContent = ""
  $("control-note").textContent = "..."
  try {
    await call(path, { method: "POST", body })
    $("control-note").textContent = "Done."
    changes.dispatchEvent(new Event("models"))
  } catch (error) {
    $("control-note").textContent = ""
    $("models-error").textContent = error.message
  }
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

const MAX_WAIT = 300  // milliseconds for the stream of steps to begin

// Records the server's steps while a request runs; resolves when the request may be sent. Returns a function that ends
// the recording and sets `entry.parts`.
export async function record(entry, model) {
  let steps = [], offset = 0, seen = 0, begun
  const ready = new Promise(resolve => { begun = resolve })
  const end = $("record").checked ? readSteps(found => {
    begun()
    offset = found.offset
    seen = found.now - found.offset
    const lane = found.models.indexOf(model)
    steps.push(...found.steps.filter(step => lane < 0 || step.lane === lane))
  }, begun) : () => {}
  setTimeout(begun, $("record").checked ? MAX_WAIT : 0)
  await ready
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

let picked = null  // by the user; else the newest is shown
function showRequests() {
  const longest = Math.max(1, ...requests.map(each => each.total ?? 0))
  fillTable($("request-table"), ["time", "request", "model", "status", "where the time went", "total"], requests.map(each => [
    each.detail?.steps ? make("button", { className: "plain", text: clock(each), "aria-label": `Show the request of ${clock(each)}`, onclick: () => { picked = each; showRequests(); $("waterfall").scrollIntoView({ block: "nearest" }) } }) : clock(each),
    `${each.method} /${each.path}`, each.model ?? "", String(each.status), smallBar(each, longest), duration(each.total ?? 0)]))
  const chosen = requests.includes(picked) ? picked : requests.find(each => each.detail?.steps)
  $("waterfall").hidden = !chosen
  if (chosen) drawRequest(chosen)
}
const clock = ({ began }) => {
  const date = new Date(began), today = date.toDateString() === new Date().toDateString()
  return today ? date.toLocaleTimeString() : date.toLocaleString()
}

const MAX_BARS = 1500
function drawRequest({ began, path, total, parts, detail: { came, steps } }) {
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
    return make("li", {}, keyOf(colour), make("b", { text: `${title} ${duration(parts[name])}. ` }), text)
  })
  $("waterfall").replaceChildren(make("h2", { text: `${new Date(began).toLocaleTimeString()} /${path}, ${duration(total)}` }),
    make("div", { className: "rows", role: "img", "aria-label": "Times of the request; the list below has them as text" },
      ...rows.flatMap(([name, bars]) => [make("span", { text: name }), make("div", { className: "track" }, ...bars)]), make("span"), axis),
    make("ul", {}, ...facts), ...(parts.alone === false ? [make("p", { text: "Other requests ran at the same time: the steps are of all of them." })] : []))
}
