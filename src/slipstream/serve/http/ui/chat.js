// The conversation: streaming, stop, edit, regenerate, shades of probability, JSON schema and tools.

import { events } from "./api.js"
import { $ } from "./dom.js"
import { MessageView } from "./message.js"

const messages = []  // {role, content, reasoning, calls, tokens, facts}; of a tool: {role, content, tool_call_id}
const PROMPT = $("prompt").placeholder
let running = null  // AbortController of the answer that is being written

let canGenerate = false  // whether a model of the server does

export function useModels(models) {
  canGenerate = models.length > 0
  $("welcome-model").textContent = models[0]?.id ?? "a model"
  if (!canGenerate) $("welcome-note").textContent = "No model of this server writes text. The playground has embeddings and reranking."
  setBusy(running !== null)
}

export function startChat() {
  $("chat-model").addEventListener("change", () => { $("welcome-model").textContent = $("chat-model").value })
  for (const button of document.querySelectorAll(".example")) {
    button.addEventListener("click", () => { $("prompt").value = button.textContent; $("prompt").focus(); setBusy(running !== null) })
  }
  $("prompt").addEventListener("input", () => setBusy(running !== null))
  $("chat-form").addEventListener("submit", event => { event.preventDefault(); send() })
  $("prompt").addEventListener("keydown", event => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send() }
  })
  document.addEventListener("keydown", event => { if (event.key === "Escape") running?.abort() })
  $("stop").addEventListener("click", () => running?.abort())
  $("clear").addEventListener("click", () => { running?.abort(); messages.length = 0; show(); $("prompt").focus() })
}

function send() {
  const text = $("prompt").value.trim()
  if (!text || running || !canGenerate) return
  const call = openCall()
  messages.push(call ? { role: "tool", content: text, tool_call_id: call.id } : { role: "user", content: text })
  $("prompt").value = ""
  setBusy(false)
  requestAnimationFrame(() => { $("messages").scrollTop = $("messages").scrollHeight })
  if (openCall()) show()
  else if (!answer()) { messages.pop(); $("prompt").value = text; show() }
}

// The first tool call without a result: the next message is its result.
function openCall() {
  const answered = new Set(messages.map(message => message.tool_call_id))
  return messages.flatMap(message => message.calls ?? []).find(call => call && !answered.has(call.id))
}

function number(id) { const text = $(id).value.trim(); return text === "" ? undefined : Number(text) }

function parsed(id, name) {
  const text = $(id).value.trim()
  if (!text) return undefined
  try { return JSON.parse(text) } catch (error) { throw new Error(`${name} is not JSON: ${error.message}`) }
}

function requestBody() {
  const schema = parsed("schema", "The JSON schema"), tools = parsed("tools", "The list of tools")
  const system = $("system").value.trim(), stop = $("stop-texts").value.split("\n").filter(line => line)
  const sent = messages.map(({ role, content, calls, tool_call_id }) => calls?.length ? { role, content, tool_calls: calls } : { role, content, tool_call_id })
  return {
    model: $("chat-model").value || undefined,
    messages: system ? [{ role: "system", content: system }, ...sent] : sent,
    temperature: number("temperature"), top_p: number("top_p"), top_k: number("top_k"), seed: number("seed"),
    max_completion_tokens: number("max_tokens"), stop: stop.length ? stop : undefined,
    ...($("logprobs").checked ? { logprobs: true, top_logprobs: 5 } : {}),
    ...(schema ? { response_format: { type: "json_schema", json_schema: { name: "answer", schema } } } : {}),
    ...(tools ? { tools } : {}),
    stream: true, stream_options: { include_usage: true },
  }
}

// Starts an answer. Returns false where a field is not valid.
function answer() {
  $("chat-error").textContent = ""
  try { stream(requestBody()) } catch (error) { $("chat-error").textContent = error.message; return false }
  return true
}

async function stream(body) {
  running = new AbortController()
  setBusy(true)
  const message = { role: "assistant", model: body.model, content: "", reasoning: "", calls: [], tokens: [] }
  messages.push(message)
  show()
  const view = views.get(message), began = performance.now()
  let first = null, usage = null, finish = "", due = false
  const draw = () => {
    due = false
    if (running) view.update({ isWritten: true })
  }
  try {
    for await (const chunk of events("v1/chat/completions", { body, signal: running.signal })) {
      usage = chunk.usage ?? usage
      const choice = chunk.choices?.[0]
      if (!choice) continue
      first ??= performance.now()
      take(message, choice)
      finish = choice.finish_reason ?? finish
      if (!due) { due = true; setTimeout(() => requestAnimationFrame(() => atEnd(draw)), 3 * view.cost) }
    }
  } catch (error) {
    if (error.name === "AbortError") finish = "stopped"
    else $("chat-error").textContent = error.message
  } finally {
    running = null
    setBusy(false)
    message.facts = { first: first && first - began, seconds: (performance.now() - began) / 1000, usage, finish }
    if (!message.content && !message.reasoning && !message.calls.length && $("chat-error").textContent) messages.pop()
    atEnd(show)
    if (!$("chat").hidden) $("prompt").focus()  // the user may be in another view
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

// Draws, and stays at the end of the conversation where the reader is there.
function atEnd(work) {
  const box = $("messages"), follows = box.scrollHeight - box.scrollTop - box.clientHeight < 80
  work()
  if (follows) box.scrollTop = box.scrollHeight
}

function setBusy(busy) {
  $("send").hidden = busy
  $("stop").hidden = !busy
  $("send").disabled = !canGenerate || !$("prompt").value.trim()
}

const views = new Map()  // of messages

function show() {
  $("welcome").hidden = messages.length > 0
  for (const message of views.keys()) if (!messages.includes(message)) views.delete(message)
  $("thread").replaceChildren(...messages.map(message => {
    if (!views.has(message)) views.set(message, new MessageView(message, { edit, regenerate }))
    const view = views.get(message)
    view.update({ isWritten: Boolean(running) && message === messages.at(-1), canChange: !running })
    return view.element
  }))
  const call = running ? null : openCall()
  $("prompt").placeholder = call ? `Result of ${call.function.name}(${call.function.arguments})` : PROMPT
}

function edit(message) {
  $("prompt").value = message.content
  messages.length = messages.indexOf(message)
  show()
  setBusy(false)
  $("prompt").focus()
}

function regenerate(message) {
  const later = messages.splice(messages.indexOf(message))
  if (!answer()) messages.push(...later)
}
