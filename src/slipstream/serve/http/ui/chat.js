// The conversation: writing messages, receiving answers, and moving between branches.

import { events } from "./api.js"
import { $, iconButton, make } from "./dom.js"
import { markCurrent, startHistory } from "./history.js"
import { MessageView, parted } from "./message.js"
import { applySettings, requestFields, settings, startSettings } from "./settings.js"
import { append, branch, follow, newConversation, readConversation, remove, siblings, writeConversation } from "./store.js"

const PROMPT = $("prompt").placeholder
const MAX_FILE = 2_000_000  // bytes
const SAVE_PERIOD = 2000  // milliseconds between two saves of an answer that is being written
let conversation = newConversation()
let canGenerate = false  // whether a model of the server does
let editing = null  // the end of the branch before a message is edited
let files = []  // {name, text}, attached to the next message
const running = new Map()  // conversation id: {conversation, controller}, whose answers are being written
const views = new Map()  // of messages

export function startChat() {
  startSettings()
  startHistory({ isRunning: id => running.has(id), leave: () => startNew() })
  $("chat-form").addEventListener("submit", event => { event.preventDefault(); send() })
  $("prompt").addEventListener("keydown", keyed)
  $("prompt").addEventListener("input", showState)
  document.addEventListener("keydown", event => { if (event.key === "Escape" && !event.defaultPrevented) stop() })
  $("stop").addEventListener("click", stop)
  $("clear").addEventListener("click", () => { if (location.hash === "#chat") startNew(); else location.hash = "#chat" })
  $("cancel-edit").addEventListener("click", cancelEdit)
  $("chat-model").addEventListener("change", () => { $("welcome-model").textContent = $("chat-model").value })
  for (const button of document.querySelectorAll(".example")) {
    button.addEventListener("click", () => { $("prompt").value = button.textContent; $("prompt").focus(); showState() })
  }
  startFiles()
  startFollowing()
  addEventListener("pagehide", () => { for (const each of running.values()) writeConversation(each.conversation) })
}

// The models that generate text. `note`: why there are none yet.
export function useModels(models, note) {
  canGenerate = models.length > 0
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

function requestBody(values) {
  const system = values.system?.trim()
  const sent = branch(conversation).map(node => {
    const { role, calls, tool_call_id } = node
    return { role, content: role === "user" ? withFiles(node) : parted(node).content, tool_call_id, tool_calls: calls?.length ? calls : undefined }
  })
  return {
    ...requestFields(values),
    model: $("chat-model").value || undefined,
    messages: system ? [{ role: "system", content: system }, ...sent] : sent,
    stream: true, stream_options: { include_usage: true },
  }
}

// Starts an answer. Returns false where a field is not valid.
function answer() {
  $("chat-error").textContent = ""
  try {
    const values = settings(), body = requestBody(values)
    conversation.settings = values
    stream(conversation, body)
  } catch (error) { $("chat-error").textContent = error.message; return false }
  return true
}

async function stream(own, body) {
  const controller = new AbortController()
  running.set(own.id, { conversation: own, controller })
  const node = append(own, { role: "assistant", model: body.model, content: "", reasoning: "", calls: [], tokens: [] })
  show()
  const began = performance.now()
  let first = null, usage = null, finish = "", due = false, saved = began, failed = ""
  const draw = () => {
    due = false
    if (own === conversation && running.has(own.id)) views.get(node)?.update({ isWritten: true })
  }
  try {
    for await (const chunk of events("v1/chat/completions", { body, signal: controller.signal })) {
      usage = chunk.usage ?? usage
      const choice = chunk.choices?.[0]
      if (!choice) continue
      first ??= performance.now()
      take(node, choice)
      finish = choice.finish_reason ?? finish
      if (!due) { due = true; setTimeout(() => requestAnimationFrame(draw), 3 * (views.get(node)?.cost ?? 0)) }
      if (performance.now() - saved > SAVE_PERIOD) { saved = performance.now(); save(own) }
    }
  } catch (error) {
    if (error.name === "AbortError") finish = "stopped"
    else failed = error.message
  } finally {
    running.delete(own.id)
    node.facts = { first: first && first - began, seconds: (performance.now() - began) / 1000, usage, finish }
    if (failed && !node.content && !node.reasoning && !node.calls.length) remove(own, node)
    save(own)
    if (own === conversation) {
      $("chat-error").textContent = failed
      show()
      if (!$("chat").hidden && document.activeElement === document.body) $("prompt").focus()  // the user may be elsewhere
    }
  }
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
  for (const node of views.keys()) if (!nodes.includes(node)) views.delete(node)
  const elements = nodes.map(node => {
    if (!views.has(node)) views.set(node, new MessageView(node, { edit, regenerate, change }))
    const view = views.get(node), all = siblings(conversation, node)
    view.update({ isWritten: busy && node.id === conversation.leaf, canChange: !busy, place: all.indexOf(node), count: all.length })
    return view.element
  })
  const box = $("thread")
  for (const child of [...box.children]) if (!elements.includes(child)) child.remove()
  elements.forEach((element, i) => { if (box.children[i] !== element) box.insertBefore(element, box.children[i] ?? null) })
  const call = busy ? null : openCall()
  $("prompt").placeholder = call ? `Result of ${call.function.name}(${call.function.arguments})` : PROMPT
  $("editing").hidden = editing === null
  showState()
}

function showState() {
  const busy = isRunning()
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
