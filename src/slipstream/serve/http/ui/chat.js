// The conversation: streaming, stop, edit, regenerate, shades of probability, JSON schema and tools.

import { events } from "./api.js"
import { $, iconButton, make } from "./dom.js"

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
  const message = { role: "assistant", model: body.model, content: "", reasoning: "", calls: [], tokens: [], facts: "" }
  messages.push(message)
  show()
  const element = $("thread").lastElementChild, began = performance.now()
  let first = null, usage = null, finish = "", due = false
  running = new AbortController()
  setBusy(true)
  try {
    for await (const chunk of events("v1/chat/completions", { body, signal: running.signal })) {
      usage = chunk.usage ?? usage
      const choice = chunk.choices?.[0]
      if (!choice) continue
      first ??= performance.now()
      take(message, choice)
      finish = choice.finish_reason ?? finish
      if (!due) { due = true; requestAnimationFrame(() => { due = false; fill(element, message) }) }
    }
  } catch (error) {
    if (error.name === "AbortError") finish = "stopped"
    else $("chat-error").textContent = error.message
  } finally {
    running = null
    setBusy(false)
    message.facts = facts(began, first, usage, finish)
    if (!message.content && !message.reasoning && !message.calls.length && $("chat-error").textContent) messages.pop()
    show()
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

function facts(began, first, usage, finish) {
  const seconds = (performance.now() - began) / 1000, parts = []
  if (first) parts.push(`first token ${((first - began) / 1000).toFixed(2)} s`)
  if (usage) {
    const rate = first && usage.completion_tokens > 1 ? (usage.completion_tokens - 1) / (seconds - (first - began) / 1000) : 0
    parts.push(`${usage.prompt_tokens} + ${usage.completion_tokens} tokens`)
    if (rate) parts.push(`${rate.toFixed(1)} tokens/s`)
    const cached = usage.prompt_tokens_details?.cached_tokens
    if (cached) parts.push(`${cached} from the cache`)
  }
  if (finish && finish !== "stop") parts.push(`ended: ${finish}`)
  return parts.join(", ")
}

function setBusy(busy) {
  $("send").hidden = busy
  $("stop").hidden = !busy
  $("send").disabled = !canGenerate || !$("prompt").value.trim()
}

function show() {
  $("welcome").hidden = messages.length > 0
  $("thread").replaceChildren(...messages.map((message, index) => {
    const element = make("article", { className: message.role })
    fill(element, message)
    if (!running) element.append(actions(message, index))
    return element
  }))
  $("messages").scrollTop = $("messages").scrollHeight
  const call = running ? null : openCall()
  $("prompt").placeholder = call ? `Result of ${call.function.name}(${call.function.arguments})` : PROMPT
}

function fill(element, message) {
  const box = $("messages"), atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 60
  const shown = [make("h2", { text: { user: "You", assistant: message.model || "Assistant", tool: "Result of the tool" }[message.role] })]
  if (message.reasoning) {
    const open = element.querySelector("details")?.open ?? false
    const details = make("details", { className: "thinking" }, make("summary", { text: "Reasoning" }), make("div", { className: "content", text: message.reasoning }))
    details.open = open
    shown.push(details)
  }
  shown.push(message.tokens?.length ? shaded(message) : make("div", { className: "content", text: message.content }))
  for (const call of message.calls ?? []) if (call) shown.push(make("pre", { text: `${call.function.name}(${call.function.arguments})` }))
  if (message.facts) shown.push(make("p", { className: "facts", text: message.facts }))
  element.replaceChildren(...shown)
  if (atEnd) box.scrollTop = box.scrollHeight
}

function shaded(message) {
  const box = make("div", { className: "content" })
  let length = 0
  for (const token of message.tokens) {
    if (length >= message.content.length && token.token.startsWith("<")) continue  // an end marker: not in the text
    length += token.token.length
    const others = (token.top_logprobs ?? []).map(other => `${JSON.stringify(other.token)} ${percent(other.logprob)}`)
    const span = make("span", { className: "token", text: token.token, title: [percent(token.logprob), ...others].join("\n") })
    span.style.setProperty("--p", Math.exp(token.logprob))
    box.append(span)
  }
  return box
}

const percent = logprob => (100 * Math.exp(logprob)).toFixed(1) + " %"

function actions(message, index) {
  const line = make("p", { className: "buttons" })
  const add = (icon, name, onclick) => line.append(iconButton(icon, name, onclick))
  add("copy", "Copy", () => navigator.clipboard?.writeText(message.content))
  if (message.role !== "assistant") add("edit", "Edit", () => {
    $("prompt").value = message.content
    messages.length = index
    show()
    setBusy(false)
    $("prompt").focus()
  })
  else add("again", "Regenerate", () => { const later = messages.splice(index); if (!answer()) messages.push(...later) })
  return line
}
