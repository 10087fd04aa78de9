// One message of a conversation as an element, updated in place while it is written.

import { iconButton, make } from "./dom.js"
import { Markdown, codeBlock, copied } from "./markdown.js"

const NAMES = { user: "You", tool: "Result of the tool" }

export class MessageView {
  // `actions`: functions of a message, by name.
  constructor(message, actions) {
    this.message = message
    this.actions = actions
    this.cost = 0  // milliseconds that the last update took
    this.element = make("article", { className: message.role })
    this.title = make("h2", { text: NAMES[message.role] ?? (message.model || "Assistant") })
    this.thoughts = make("div", { className: "prose" })
    this.thinking = make("details", { className: "thinking", hidden: "" }, make("summary"), this.thoughts)
    this.body = make("div", { className: message.role === "assistant" ? "prose" : "content" })
    this.calls = make("div", { className: "calls" })
    this.facts = make("p", { className: "facts" })
    this.buttons = make("div", { className: "buttons" })
    for (const { name, text } of message.files ?? []) this.element.append(make("details", { className: "file" }, make("summary", { text: name }), codeBlock(text, name.split(".").at(-1))))
    this.element.append(this.title, this.thinking, this.body, this.calls, this.facts, this.buttons)
    this.reasoning = new Markdown(this.thoughts)
    this.text = new Markdown(this.body)
  }

  // isWritten: more of it will come. canChange: it may be edited and made again. place, count: of its branches.
  update({ isWritten = false, canChange = false, place = 0, count = 1 } = {}) {
    const began = performance.now()
    this.element.classList.toggle("written", isWritten)
    const { role } = this.message
    if (role === "assistant") this.answer(isWritten)
    else if (role === "tool") this.once("body", this.message.content, () => this.body.replaceChildren(result(this.message.content)))
    else this.body.textContent = this.message.content
    this.facts.replaceChildren(...factsOf(this.message))
    this.facts.hidden = !this.facts.childNodes.length
    this.once("buttons", `${canChange} ${place} ${count}`, () => this.buttons.replaceChildren(...(canChange ? this.controls(place, count) : [])))
    this.cost = performance.now() - began
    return this.element
  }

  once(part, state, draw) {
    if (this.element.dataset[part] === state) return
    this.element.dataset[part] = state
    draw()
  }

  answer(isWritten) {
    const { content, reasoning } = parted(this.message)
    this.thinking.hidden = !reasoning
    if (reasoning) {
      this.thinking.firstChild.textContent = isWritten && !content ? "Thinking" : "Reasoning"
      this.thinking.classList.toggle("busy", isWritten && !content)
      if (this.thinking.open || !isWritten) this.reasoning.update(reasoning, !isWritten)
      this.thinking.ontoggle = () => this.reasoning.update(parted(this.message).reasoning)
    }
    if (this.message.tokens?.length) this.body.replaceChildren(shaded(this.message))
    else this.text.update(content, !isWritten)
    const calls = (this.message.calls ?? []).filter(call => call)
    if (calls.length) this.once("calls", JSON.stringify(calls), () => this.calls.replaceChildren(...calls.map(callBlock)))
  }

  controls(place, count) {
    const { message, actions } = this
    const copy = iconButton("copy", "Copy", () => copied(copy, parted(message).content))
    const kept = actions.keep ? [iconButton("check", "Go on with this answer only", () => actions.keep(message, message))] : []
    if (!actions.regenerate) return [copy, ...kept]
    const change = message.role === "assistant" ? iconButton("again", "Regenerate", () => actions.regenerate(message))
      : iconButton("edit", "Edit", () => actions.edit(message))
    if (count < 2) return [copy, change, ...kept]
    const previous = iconButton("left", "Previous branch", () => actions.change(message, -1))
    const next = iconButton("right", "Next branch", () => actions.change(message, 1))
    previous.disabled = place === 0
    next.disabled = place === count - 1
    return [copy, change, ...kept, make("span", { className: "branches" }, previous, `${place + 1} of ${count}`, next)]
  }
}

// Reasoning comes in a field of its own, or within tags where the server does not know the model's format.
export function parted({ content, reasoning = "" }) {
  if (reasoning || !content.startsWith("<think>")) return { content, reasoning }
  const end = content.indexOf("</think>")
  return end < 0 ? { content: "", reasoning: content.slice(7) } : { content: content.slice(end + 8).trimStart(), reasoning: content.slice(7, end) }
}

function callBlock({ function: { name, arguments: text } }) {
  return make("details", { className: "call", open: "" }, make("summary", { text: `Calls the tool ${name}` }), codeBlock(indented(text), "json"))
}

const result = text => codeBlock(indented(text), indented(text) === text ? "" : "json")
const indented = text => { try { return JSON.stringify(JSON.parse(text), null, 2) } catch { return text } }

// Speed and counts, each with an explanation as its tooltip.
function factsOf({ facts }) {
  if (!facts) return []
  const { first, seconds, usage, finish, limit } = facts, found = []
  const add = (text, title) => found.push(make("span", { text, title }))
  if (usage) {
    const rest = seconds - (first ?? 0) / 1000
    if (first && usage.completion_tokens > 1 && rest > 0) add(`${((usage.completion_tokens - 1) / rest).toFixed(1)} tokens/s`, "Speed after the first token")
    add(`${usage.completion_tokens} tokens`, "Length of the answer, with its reasoning")
  }
  if (first) add(`first after ${(first / 1000).toFixed(2)} s`, "Time from sending to the first token")
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens
    add(`prompt ${usage.prompt_tokens}` + (cached ? `, ${cached} of them cached` : ""), "Tokens of the prompt; cached ones were not computed again")
  }
  const used = (usage?.prompt_tokens + usage?.completion_tokens) / limit
  if (used > 0.5) add(`${(100 * used).toFixed(0)} % of the context used`, `The model takes ${limit} tokens of prompt and answer together`)
  if (facts.drafts) add(`${facts.accepted} of ${facts.drafts} drafts accepted`, "Tokens that were guessed, and those of them that the model would have written too")
  if (ENDS[finish]) add(ENDS[finish], `finish_reason: ${finish}`)
  return found
}
const ENDS = { length: "cut at the maximum of tokens", repetition: "ended: it repeats itself", stopped: "stopped", tool_calls: "waits for tools" }

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
