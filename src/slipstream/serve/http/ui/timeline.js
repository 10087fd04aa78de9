// The live timeline: host and device lanes, idle gaps with their causes, and counts, of the last minute.
// The stream is read only while this view is visible, and the server logs steps only while it is read.

import { call, readSteps } from "./api.js"
import { $, fillTable, make, saveFile } from "./dom.js"
import { Markdown } from "./markdown.js"

const KEPT = 60  // seconds
const LANES = { host: 40, device: 100, idle: 160 }, HEIGHT = 34, CHART = 232
const TITLES = {
  host: "Host: plans and starts each step", device: "Device: computes the steps (blue: with parts of prompts, green: tokens only)",
  idle: "Device idle: the colour is the cause, see the table",
}
const CAUSES = {  // name: [words, meaning and what helps]
  turnaround: ["between two steps", "The next step was ready; the device needs some microseconds to begin it. Nothing to do."],
  host_late: ["waited for the host", "Planning and starting a step took longer than computing the one before. Fewer logits processors or a faster CPU help."],
  output: ["waited for the caller", "Results were not read, or the next prompt did not come in time. In a script, give all prompts to one call; for a server, start more --workers."],
  grammar: ["waited for a grammar", "The mask of a schema, or a logits processor, was late within a step. Simpler schemas help."],
  no_requests: ["no requests", "There was nothing to compute. More requests at the same time use the device better."],
}
let steps = [], models = [], reading = null, paused = false
let span = 10, end = null  // seconds shown; end of the window, null: now
let offset = 0  // server clock minus this clock, in seconds
let hovered = null

export function startTimeline() {
  const canvas = $("lanes")
  $("help-link").addEventListener("click", event => { event.preventDefault(); help(event.target.href) })
  $("pause").addEventListener("click", () => setPaused(!paused))
  $("live").addEventListener("click", () => { end = null; setPaused(false) })
  $("zoom-in").addEventListener("click", () => zoom(0.5))
  $("zoom-out").addEventListener("click", () => zoom(2))
  $("save-trace").addEventListener("click", save)
  canvas.addEventListener("wheel", event => { event.preventDefault(); zoom(event.deltaY > 0 ? 1.25 : 0.8, at(event)) }, { passive: false })
  canvas.addEventListener("pointerdown", drag)
  canvas.addEventListener("pointermove", event => { if (!event.buttons) hover(at(event), event.offsetY) })
  canvas.addEventListener("keydown", keyed)
  new ResizeObserver(draw).observe(canvas)
}

// Shows a page of the docs; links to other pages of them are text.
async function help(address) {
  try {
    const parts = (await (await fetch(address)).text()).split(/(^```[^]*?^```$)/m)  // odd ones are code
    const prose = text => text.replace(/(?<=[^\n|])\n(?=[^\n|#*!\d])/g, " ").replace(/!?\[([^\]]*)\]\((?!https?:)[^)]*\)/g, "$1")
    new Markdown($("help-text")).update(parts.map((text, i) => i % 2 ? text : prose(text)).join(""))
    $("help").showModal()
  } catch (error) { $("timeline-error").textContent = error.message }
}

export function showTimeline(visible) {
  if (!visible) { reading?.(); reading = null; return }
  if (reading) return
  $("timeline-error").textContent = ""
  reading = readSteps(take, error => { reading = null; $("timeline-error").textContent = error.message })
  animate(reading)
}

function take(found) {
  ({ models, offset } = found)
  steps.push(...found.steps)
  if (!paused) steps = steps.filter(step => step.end > found.now - KEPT)
  $("lanes").dataset.steps = steps.length
}

const now = () => end ?? Date.now() / 1000 + offset - 0.3  // events come 4 times per second
const at = event => now() - span + span * event.offsetX / $("lanes").clientWidth

function setPaused(value) {
  paused = value
  end = value ? now() : null
  $("pause").setAttribute("aria-pressed", value)
  $("pause").textContent = value ? "Continue" : "Pause"
  draw()
}

function zoom(factor, around = now() - span / 2) {
  const before = span
  span = Math.min(KEPT, Math.max(0.002, span * factor))
  if (end !== null) end = around + (end - around) * span / before
  draw()
}

function drag(down) {
  const canvas = $("lanes"), start = now()
  canvas.setPointerCapture(down.pointerId)
  const move = event => {
    if (!paused) setPaused(true)
    end = start - span * (event.offsetX - down.offsetX) / canvas.clientWidth
    draw()
  }
  canvas.addEventListener("pointermove", move)
  canvas.addEventListener("pointerup", () => canvas.removeEventListener("pointermove", move), { once: true })
}

function keyed(event) {
  const actions = {
    " ": () => setPaused(!paused), "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2),
    ArrowLeft: () => move(-1, event.shiftKey), ArrowRight: () => move(1, event.shiftKey),
    Home: () => { end = null; setPaused(false) },
  }
  if (actions[event.key]) { event.preventDefault(); actions[event.key]() }
}

// Moves the window by a tenth, or chooses the step before or after the chosen one.
function move(direction, choose) {
  if (!paused) setPaused(true)
  if (!choose) end += direction * span / 10
  else if (steps.length) {
    const index = steps.indexOf(hovered)
    hovered = steps[index < 0 ? steps.length - 1 : Math.min(steps.length - 1, Math.max(0, index + direction))]
    if (hovered.start < end - span || hovered.end > end) end = (hovered.start + hovered.end + span) / 2
    tell()
  }
  draw()
}

function animate(own) {
  if (reading !== own) return
  if (!paused) draw()
  setTimeout(() => requestAnimationFrame(() => animate(own)), 50)
}

function draw() {
  const canvas = $("lanes"), scale = devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight
  if (!width) return
  if (canvas.width !== Math.round(width * scale)) { canvas.width = Math.round(width * scale); canvas.height = Math.round(height * scale) }
  const ctx = canvas.getContext("2d"), style = getComputedStyle(canvas)
  const color = probe()
  const last = now(), first = last - span, x = time => (time - first) / span * width
  ctx.setTransform(scale, 0, 0, scale, 0, 0)
  ctx.clearRect(0, 0, width, height)
  ctx.font = "12px system-ui, sans-serif"
  const shown = steps.filter(step => step.end >= first && step.start - step.gap <= last)
  const bar = (name, y, from, to) => {
    ctx.fillStyle = color(name)
    ctx.fillRect(x(from), y, Math.max(x(to) - x(from), 0.7), HEIGHT)
  }
  for (const step of shown) {
    bar("host", LANES.host, step.launched - step.host, step.launched)
    bar(step.prefill_tokens ? "prefill" : "decode", LANES.device, step.start, step.end)
    if (step.gap > 0) bar(step.cause, LANES.idle, step.start - step.gap, step.start)
    if (step.late > 0) bar("grammar", LANES.idle, step.end - step.late, step.end)
  }
  if (hovered) { ctx.strokeStyle = style.color; ctx.strokeRect(x(hovered.start), LANES.device, x(hovered.end) - x(hovered.start), HEIGHT) }
  ctx.fillStyle = style.color
  for (const [name, y] of Object.entries(LANES)) ctx.fillText(TITLES[name], 2, y - 6, width - 4)
  axis(ctx, first, last, x, width, style)
  chart(ctx, shown, x, height, color, style.color)
  $("window").textContent = span >= 1 ? `${span.toFixed(1)} s` : `${(span * 1000).toFixed(0)} ms`
  sums(shown, first, last)
}

// Seconds before now, or before the end of the window where it is paused.
function axis(ctx, first, last, x, width, style) {
  const unit = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10].find(unit => unit / span * width > 70) ?? 20
  ctx.fillStyle = style.getPropertyValue("--quiet")
  for (let back = 0; back < span; back += unit) {
    const words = back ? `-${unit < 0.1 ? (back * 1000).toFixed(0) + " ms" : back.toFixed(unit < 1 ? 1 : 0) + " s"}` : end === null ? "now" : "end"
    ctx.fillText(words, x(last - back) - ctx.measureText(words).width - 3, 12)
    ctx.fillRect(x(last - back) - 1, 0, 1, 16)
  }
}

// Running and waiting requests, and used pages, as lines from 0 to their maximum.
function chart(ctx, shown, x, height, color, text) {
  const lines = [["running requests", step => step.running, "decode"], ["waiting requests", step => step.waiting, "host_late"],
    ["% of the KV cache in use", step => step.num_pages ? Math.round(100 * (1 - step.free_pages / step.num_pages)) : 0, "prefill"]]
  let label = 4, top = CHART
  for (const [name, value, hue] of lines) {
    const words = `${shown.length ? value(shown.at(-1)) : 0} ${name}, at most ${Math.max(0, ...shown.map(value))}`
    const wide = ctx.measureText(words).width + 28
    if (label + wide - 16 > ctx.canvas.clientWidth) { label = 4; top += 15 }  // a phone
    ctx.fillStyle = color(hue); ctx.fillRect(label, top - 10, 8, 8)
    ctx.fillStyle = text; ctx.fillText(words, label + 12, top - 2)
    label += wide
  }
  const room = height - top - 12
  for (const [, value, hue] of lines) {
    const most = Math.max(1, ...shown.map(value))
    ctx.strokeStyle = color(hue)
    ctx.beginPath()
    shown.forEach((step, i) => ctx[i ? "lineTo" : "moveTo"](x(step.start), height - 4 - room * value(step) / most))
    ctx.stroke()
  }
}

let probed = ["", null]
function probe() {
  const theme = matchMedia("(prefers-color-scheme: dark)").matches + (document.documentElement.dataset.theme ?? "")
  if (probed[0] !== theme) {
    const element = make("span", { className: "hidden" }), found = {}
    document.body.append(element)
    for (const name of ["host", "prefill", "decode", ...Object.keys(CAUSES)]) {
      element.style.color = `var(--${name})`
      found[name] = getComputedStyle(element).color
    }
    element.remove()
    probed = [theme, name => found[name]]
  }
  return probed[1]
}

let summed = 0
function sums(shown, first, last) {
  if (performance.now() - summed < 400 && !paused) return
  summed = performance.now()
  const seconds = { busy: 0, turnaround: 0, host_late: 0, output: 0, grammar: 0, no_requests: 0 }
  let tokens = 0, prefill = 0, drafts = 0, accepted = 0
  for (const step of shown) {
    seconds.busy += Math.max(0, Math.min(step.end, last) - Math.max(step.start, first)) - step.late
    seconds[step.cause] += Math.max(0, Math.min(step.start, last) - Math.max(step.start - step.gap, first))
    seconds.grammar += step.late
    tokens += step.drawn - step.drafts + step.accepted
    drafts += step.drafts
    accepted += step.accepted
    prefill += step.prefill_tokens
  }
  const row = (name, text, help) => [make("span", {}, key(name === "busy" ? "decode" : name), text),
    Number((seconds[name] * 1000).toFixed(1)), Number((100 * seconds[name] / (last - first)).toFixed(1)), help]
  fillTable($("sums"), ["The device", "ms", "%", "what it means"], [row("busy", "computes", "Steps of all models. This is what a server is for."),
    ...Object.entries(CAUSES).map(([name, [text, help]]) => row(name, text, help))])
  $("speeds").textContent = `${shown.length} steps, ${(tokens / (last - first)).toFixed(0)} tokens/s written, ${(prefill / (last - first)).toFixed(0)} tokens/s of prompts read`
    + (drafts ? `, ${accepted} of ${drafts} drafts accepted` : "") + "."
}

function key(name) {
  const element = make("span", { className: "key" })
  element.style.background = `var(--${name})`
  return element
}

function hover(time, y) {
  hovered = steps.find(step => time >= step.start - (y >= LANES.idle ? step.gap : 0) && time <= step.end)
    ?? steps.find(step => time >= step.launched - step.host && time <= step.launched) ?? null
  if (!hovered) return
  tell()
}

// The data of the chosen step.
function tell() {
  const { number, lane, rows, tokens, prefill_tokens, drawn, running, waiting, gap, cause, host, drafts, accepted, num_pages, free_pages } = hovered
  const ms = seconds => (1000 * seconds).toFixed(2) + " ms"
  $("hover").textContent = `Step ${number} of ${models[lane]}: ${rows} requests, ${tokens} tokens, ${prefill_tokens} of them of prompts, ${drawn} written. `
    + `It took ${ms(hovered.end - hovered.start)} on the device and ${ms(host)} on the host. The device was idle for ${ms(gap)} before it: ${CAUSES[cause][0]}. `
    + `${running} requests were running, ${waiting} waiting` + (num_pages ? `, ${(100 * (1 - free_pages / num_pages)).toFixed(0)} % of the KV cache was in use` : "") + (drafts ? `; ${accepted} of ${drafts} drafts were accepted` : "") + "."
  if (paused) draw()
}

async function save() {
  $("timeline-error").textContent = ""
  try {
    saveFile("slipstream-trace.json", await (await call("debug/trace?seconds=5")).blob())
  } catch (error) { $("timeline-error").textContent = error.message }
}
