// The conversation: writing messages, receiving answers, and moving between branches.

import { events } from "./api.js"
import { $, iconButton, make } from "./dom.js"
import { markCurrent, startHistory } from "./history.js"
import { MessageView, parted } from "./message.js"
import { record } from "./server.js"
import { applySettings, preset, presetNames, requestFields, settings, startSettings } from "./settings.js"
import { append, branch, follow, newConversation, readConversation, remove, siblings, writeConversation } from "./store.js"

const PROMPT = $("prompt").placeholder
const MAX_FILE = 2_000_000  // bytes
const SAVE_PERIOD = 2000  // milliseconds between two saves of an answer that is being written
let conversation = newConversation()
let canGenerate = false  // whether a model of the server does
let editing = null  // the end of the branch before a message is edited
let files = []  // {name, text}, attached to the next message
const limits = new Map()  // model: its longest prompt and answer together, in tokens
const running = new Map()  // conversation id: {conversation, controller}, whose answers are being written
const views = new Map()  // of messages

export function startChat() {
  startSettings()
  startHistory({ isRunning: id => running.has(id), leave: () => startNew() })
  $("chat-form").addEventListener("submit", event => { event.preventDefault(); send() })
  $("prompt").addEventListener("keydown", keyed)
  $("prompt").addEventListener("input", showState)
  document.addEventListener("keydown", event => {
    const closes = !$("shade").hidden || document.querySelector("dialog[open]")  // what Escape closes
    if (event.key === "Escape" && !event.defaultPrevented && !closes) stop()
  }, { capture: true })
  $("stop").addEventListener("click", stop)
  $("clear").addEventListener("click", () => { if (location.hash === "#chat") startNew(); else location.hash = "#chat" })
  $("cancel-edit").addEventListener("click", cancelEdit)
  $("chat-model").addEventListener("change", () => { $("welcome-model").textContent = $("chat-model").value })
  for (const button of document.querySelectorAll(".example")) {
    button.addEventListener("click", () => { $("prompt").value = button.textContent; $("prompt").focus(); showState() })
  }
  $("compare-button").addEventListener("click", () => setCompare($("compare").hidden))
  document.addEventListener("named", showPresets)
  showPresets()
  startFiles()
  startFollowing()
  addEventListener("pagehide", () => { for (const each of running.values()) writeConversation(each.conversation) })
}

// The models that generate text. `note`: why there are none yet.
export function useModels(models, note) {
  canGenerate = models.length > 0
  for (const { id, max_model_len } of models) limits.set(id, max_model_len)
  $("welcome-model").textContent = $("chat-model").value || "the model"
  $("welcome-note").textContent = canGenerate ? "It runs on this server. Conversations are kept in this browser."
    : note ?? "No model of this server writes text. The playground has embeddings, reranking and tokens."
  $("examples").hidden = !canGenerate
  showState()
}

// Shows the conversation of an id, or a new one.
export async function openConversation(id) {
  if (!id) return startNew()
  if (conversation.id === id) return
  const found = running.get(id)?.conversation ?? await readConversation(id)
  if (!found) { $("chat-error").textContent = "This browser has no such conversation."; return startNew(false) }
  if (found.settings) applySettings(found.settings)
  use(found)
}

function startNew(clear = true) {
  if (clear) $("chat-error").textContent = ""
  if (conversation.leaf === null) return
  use(newConversation())
  $("tab-chat").hash = "#chat"
  if (location.hash.startsWith("#chat/")) history.replaceState(null, "", "#chat")
}

function use(found) {
  conversation = found
  editing = null
  views.clear()
  if (conversation.leaf !== null) $("tab-chat").hash = "#chat/" + conversation.id
  markCurrent(conversation.id)
  show()
  toEnd()
  if (!$("chat").hidden && matchMedia("(hover: hover)").matches) $("prompt").focus()
}

// Writing

function keyed(event) {
  if (event.isComposing) return
  if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); send() }
  if (event.key === "Escape" && editing !== null) { event.preventDefault(); cancelEdit() }
  const last = branch(conversation).findLast(node => node.role === "user")
  if (event.key === "ArrowUp" && !$("prompt").value && last && !isRunning()) { event.preventDefault(); edit(last) }
}

const isRunning = () => running.has(conversation.id)
const stop = () => running.get(conversation.id)?.controller.abort()

function send() {
  const text = $("prompt").value.trim()
  if (!text && !files.length || isRunning() || !canGenerate) return
  const call = openCall()
  const node = append(conversation, call ? { role: "tool", content: text, tool_call_id: call.id } : { role: "user", content: text, ...(files.length ? { files } : {}) })
  if (!openCall() && !answer()) { remove(conversation, node); return show() }
  editing = null
  files = []
  $("prompt").value = ""
  address()
  save()
  show()
  toEnd()
}

// The address names the conversation once it has a message.
function address() {
  const hash = "#chat/" + conversation.id
  $("tab-chat").hash = hash
  if (location.hash !== hash) history.replaceState(null, "", hash)
  markCurrent(conversation.id)
}

function save(found = conversation) {
  found.changed = Date.now()
  return writeConversation(found)
}

// The first tool call without a result: the next message is its result.
function openCall() {
  const messages = branch(conversation), answered = new Set(messages.map(message => message.tool_call_id))
  return messages.flatMap(message => message.calls ?? []).find(call => call && !answered.has(call.id))
}

function edit(node) {
  editing = conversation.leaf
  conversation.leaf = node.parent
  files = node.files ?? []
  $("prompt").value = node.content
  show()
  $("prompt").focus()
}

function cancelEdit() {
  conversation.leaf = editing
  editing = null
  files = []
  $("prompt").value = ""
  show()
}

function regenerate(node) {
  const leaf = conversation.leaf
  conversation.leaf = node.parent
  if (!answer()) { conversation.leaf = leaf; show() }
}

// `step`: 1 or -1, to the next or the previous branch at this message.
function change(node, step) {
  const all = siblings(conversation, node)
  follow(conversation, all[all.indexOf(node) + step])
  save()
  show()
}

// Answers

const withFiles = ({ content, files }) => [...(files ?? []).map(({ name, text }) => `File ${name}:\n\`\`\`\n${text}\n\`\`\``), content].filter(each => each).join("\n\n")

// isOther: of the second of two models that are compared, which continues with its own answers.
function requestBody(values, model, isOther) {
  const system = values.system?.trim()
  const sent = branch(conversation).map(node => {
    const { role, calls, tool_call_id } = node
    const own = isOther && node.other || node
    return { role, content: role === "user" ? withFiles(node) : parted(own).content, tool_call_id, tool_calls: calls?.length ? own.calls : undefined }
  })
  return {
    ...requestFields(values),
    model: model || undefined,
    messages: system ? [{ role: "system", content: system }, ...sent] : sent,
    stream: true, stream_options: { include_usage: true, continuous_usage_stats: true },
  }
}

// Starts an answer, or two. Returns false where a field is not valid.
function answer() {
  $("chat-error").textContent = ""
  try {
    const values = settings(), bodies = [requestBody(values, $("chat-model").value)], name = $("other-preset").value
    if (!$("compare").hidden) bodies.push(requestBody(name ? { ...values, ...preset(name) } : values, $("other-model").value, true))
    conversation.settings = values
    write(conversation, bodies, name)
  } catch (error) { $("chat-error").textContent = error.message; return false }
  return true
}

const emptyAnswer = (body, name) => ({ role: "assistant", model: body.model + (name ? `, ${name}` : ""), content: "", reasoning: "", calls: [], tokens: [] })
const isEmpty = ({ content, reasoning, calls }) => !content && !reasoning && !calls.length

async function write(own, bodies, name) {
  const controller = new AbortController()
  running.set(own.id, { conversation: own, controller })
  const node = append(own, emptyAnswer(bodies[0]))
  if (bodies[1]) node.other = emptyAnswer(bodies[1], name)
  show()
  const saving = setInterval(() => save(own), SAVE_PERIOD)
  const errors = await Promise.all(bodies.map((body, i) => receive(own, i ? node.other : node, body, controller.signal)))
  clearInterval(saving)
  running.delete(own.id)
  const failed = errors.find(error => error) ?? ""
  if (failed && isEmpty(node) && (!node.other || isEmpty(node.other))) remove(own, node)
  save(own)
  if (own !== conversation) return
  $("chat-error").textContent = failed
  show()
  if (!$("chat").hidden && document.activeElement === document.body) $("prompt").focus()  // the user may be elsewhere
}

// Writes an answer into `message`. Returns the text of an error, or "".
async function receive(own, message, body, signal) {
  const entry = {}
  let first = null, usage = null, finish = "", due = false, failed = ""
  const draw = () => {
    due = false
    if (own === conversation && running.has(own.id)) views.get(message)?.update({ isWritten: true })
  }
  const recorded = await record(entry, body.model), began = performance.now()
  try {
    for await (const chunk of events("v1/chat/completions", { body, signal, entry })) {
      usage = chunk.usage ?? usage
      const choice = chunk.choices?.[0]
      if (!choice) continue
      first ??= performance.now()
      take(message, choice)
      message.facts = { first: first - began, seconds: (performance.now() - began) / 1000, usage, limit: limits.get(body.model) }
      finish = choice.finish_reason ?? finish
      if (!due) { due = true; setTimeout(() => requestAnimationFrame(draw), 3 * (views.get(message)?.cost ?? 0)) }
    }
  } catch (error) {
    if (error.name === "AbortError") finish = "stopped"
    else failed = error.message
  }
  message.facts = { first: first && first - began, seconds: (performance.now() - began) / 1000, usage, finish, limit: limits.get(body.model) }
  recorded().then(({ drafts, accepted, alone }) => {
    if (!drafts || !alone) return
    Object.assign(message.facts, { drafts, accepted })
    if (own === conversation) show()
    save(own)
  })
  return failed
}

function take(message, { delta, logprobs }) {
  message.content += delta.content ?? ""
  message.reasoning += delta.reasoning ?? delta.reasoning_content ?? ""
  for (const part of delta.tool_calls ?? []) {
    const call = message.calls[part.index] ??= { id: part.id, type: "function", function: { name: "", arguments: "" } }
    call.function.name += part.function?.name ?? ""
    call.function.arguments += part.function?.arguments ?? ""
  }
  message.tokens.push(...(logprobs?.content ?? []))
}

// Showing

// The view stays at the end of the conversation while the reader is there, also where formulas and code are drawn later.
let follows = true

function startFollowing() {
  const box = $("messages"), settle = () => { if (follows) box.scrollTop = box.scrollHeight }
  box.addEventListener("scroll", () => {
    follows = box.scrollHeight - box.scrollTop - box.clientHeight < 80
    $("to-end").hidden = follows
  })
  $("to-end").addEventListener("click", toEnd)
  const seen = new ResizeObserver(settle)
  seen.observe($("thread"))
  seen.observe(box)
}

function toEnd() {
  follows = true
  $("to-end").hidden = true
  $("messages").scrollTop = $("messages").scrollHeight
}

function show() {
  const nodes = branch(conversation), busy = isRunning()
  $("welcome").hidden = nodes.length > 0
  const shown = nodes.flatMap(node => node.other ? [node, node.other] : [node])
  for (const message of views.keys()) if (!shown.includes(message)) views.delete(message)
  const elements = nodes.map(node => {
    const all = siblings(conversation, node)
    const state = { isWritten: busy && node.id === conversation.leaf, canChange: !busy, place: all.indexOf(node), count: all.length }
    const actions = { edit, regenerate, change, keep: node.other && keep }
    const element = viewOf(node, actions).update(state)
    if (!node.other) return element
    const other = viewOf(node.other, { keep: (_, message) => keep(node, message) }).update({ ...state, count: 1 })
    const pair = element.closest(".pair") ?? make("div", { className: "pair" })
    if (pair.children.length !== 2) pair.replaceChildren(element, other)
    return pair
  })
  const box = $("thread")
  box.setAttribute("aria-busy", busy)  // a screen reader waits for the whole answer
  for (const child of [...box.children]) if (!elements.includes(child)) child.remove()
  elements.forEach((element, i) => { if (box.children[i] !== element) box.insertBefore(element, box.children[i] ?? null) })
  const call = busy ? null : openCall()
  $("prompt").placeholder = call ? `Result of ${call.function.name}(${call.function.arguments})` : PROMPT
  $("editing").hidden = editing === null
  showState()
}

function viewOf(message, actions) {
  if (!views.has(message)) views.set(message, new MessageView(message, actions))
  return views.get(message)
}

// Comparing: each message goes to two models, and the answers stand side by side

function setCompare(on) {
  $("compare").hidden = !on
  $("compare-button").setAttribute("aria-pressed", on)
  const models = [...$("other-model").options].map(option => option.value)
  if (on && $("other-model").value === $("chat-model").value) $("other-model").value = models.find(each => each !== $("chat-model").value) ?? models[0]
}

function showPresets() {
  const before = $("other-preset").value, found = presetNames()
  $("other-preset").replaceChildren(make("option", { text: "same parameters", value: "" }), ...found.map(name => make("option", { text: name, value: name })))
  if (found.includes(before)) $("other-preset").value = before
}

// Goes on with one of two answers, as a new branch.
function keep(node, message) {
  const { id: _, parent: __, created: ___, other: ____, ...rest } = message
  conversation.leaf = node.parent
  append(conversation, rest)
  setCompare(false)
  save()
  show()
}

const growsAlone = CSS.supports("field-sizing", "content")

function showState() {
  const busy = isRunning(), field = $("prompt")
  if (!growsAlone) { field.style.height = "auto"; field.style.height = field.scrollHeight + "px" }
  $("send").hidden = busy
  $("stop").hidden = !busy
  $("send").disabled = !canGenerate || !$("prompt").value.trim() && !files.length
  $("files").replaceChildren(...files.map(file => make("li", {}, make("span", { text: file.name }),
    iconButton("close", `Remove ${file.name}`, () => { files = files.filter(each => each !== file); showState() }))))
}

// Text files: chosen, dropped or pasted

function startFiles() {
  $("attach").addEventListener("click", () => $("attach-file").click())
  $("attach-file").addEventListener("change", () => { attach([...$("attach-file").files]); $("attach-file").value = "" })
  $("chat").addEventListener("dragover", event => event.preventDefault())
  $("chat").addEventListener("drop", event => { event.preventDefault(); attach([...event.dataTransfer.files]) })
  $("prompt").addEventListener("paste", event => {
    if (event.clipboardData.files.length) { event.preventDefault(); attach([...event.clipboardData.files]) }
  })
}

async function attach(found) {
  $("chat-error").textContent = ""
  for (const file of found) {
    try {
      if (file.size > MAX_FILE) throw new Error(`it has more than ${MAX_FILE / 1e6} MB`)
      const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer())
      if (text.includes("\0")) throw new TypeError()
      files.push({ name: file.name, text })
    } catch (error) {
      $("chat-error").textContent = `${file.name} is not attached: ${error instanceof TypeError ? "it is not text; the models of this server read text only" : error.message}.`
    }
  }
  showState()
  $("prompt").focus()
}
