// The settings of the chat: fields in the drawer, kept in this browser, and sets of them by name.

import { $, ask, iconButton, make } from "./dom.js"

const PROMPT = ["system"]
const PARAMETERS = ["temperature", "max_tokens", "top_p", "top_k", "seed", "stop-texts", "logprobs", "schema", "tools"]
const KEY = "slipstream-settings", NAMED = "slipstream-named"

const read = key => { try { return JSON.parse(localStorage.getItem(key)) ?? {} } catch { return {} } }
const write = (key, value) => { try { localStorage.setItem(key, JSON.stringify(value)) } catch { /* full or forbidden: kept in this page only */ } }

export function startSettings() {
  applySettings(read(KEY))
  $("settings").addEventListener("input", keep)
  named("prompts", "system prompt", PROMPT)
  named("presets", "set of parameters", PARAMETERS)
}

const keep = () => write(KEY, settings())
const value = id => $(id).type === "checkbox" ? $(id).checked : $(id).value

// The values of the fields, by name.
export const settings = (names = [...PROMPT, ...PARAMETERS]) => Object.fromEntries(names.map(name => [name, value(name)]))

// Fields that `values` does not have are cleared.
export function applySettings(values, names = [...PROMPT, ...PARAMETERS]) {
  for (const name of names) {
    if ($(name).type === "checkbox") $(name).checked = Boolean(values[name])
    else $(name).value = values[name] ?? ""
  }
  keep()
}

export const presetNames = () => Object.keys(read(NAMED).presets ?? {}).sort()
export const preset = name => read(NAMED).presets?.[name]

// A list of saved sets of values: choosing one fills the fields.
function named(kind, words, names) {
  const box = $(kind), all = () => read(NAMED)[kind] ?? {}
  const store = found => { write(NAMED, { ...read(NAMED), [kind]: found }); show(); box.dispatchEvent(new Event("named", { bubbles: true })) }
  const select = make("select", { "aria-label": `Saved: ${words}` })
  const remove = iconButton("trash", `Delete this ${words}`, () => { const { [select.value]: _, ...rest } = all(); store(rest) })
  const save = iconButton("save", `Save this ${words} by a name`, async () => {
    const name = await ask(`Name of this ${words}`, select.value)
    if (name) { store({ ...all(), [name]: settings(names) }); select.value = name; remove.hidden = false }
  })
  select.addEventListener("change", () => {
    remove.hidden = !select.value
    if (Object.hasOwn(all(), select.value)) applySettings({ ...settings(), ...all()[select.value] })
  })
  function show() {
    const found = Object.keys(all()).sort()
    select.hidden = !found.length
    select.replaceChildren(make("option", { text: "Saved ones", value: "" }), ...found.map(name => make("option", { text: name, value: name })))
    remove.hidden = true
  }
  box.append(select, save, remove)
  show()
}

// The fields of a request that the settings determine. Raises for text that is not JSON.
export function requestFields(values) {
  const schema = parsed(values.schema, "The JSON schema"), tools = parsed(values.tools, "The list of tools")
  const stop = (values["stop-texts"] ?? "").split("\n").filter(line => line)
  return {
    temperature: number(values.temperature), top_p: number(values.top_p), top_k: number(values.top_k), seed: number(values.seed),
    max_completion_tokens: number(values.max_tokens), stop: stop.length ? stop : undefined,
    ...(values.logprobs ? { logprobs: true, top_logprobs: 5 } : {}),
    ...(schema ? { response_format: { type: "json_schema", json_schema: { name: "answer", schema } } } : {}),
    ...(tools ? { tools } : {}),
  }
}

const number = text => text?.trim() ? Number(text) : undefined

function parsed(text, name) {
  if (!text?.trim()) return undefined
  try { return JSON.parse(text) } catch (error) { throw new Error(`${name} is not JSON: ${error.message}`) }
}
