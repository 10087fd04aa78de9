// Requests to this server. The API key stays in this tab. Every request is listed in `requests`, without its content.

const KEY = "slipstream-key", LOG = "slipstream-requests"
const MAX_LISTED = 200

export const requests = listed()  // {path, method, model, status, milliseconds, total, began, parts}, the newest first
export const changes = new EventTarget()  // "requests", "models", "refused" (the key)

export const getKey = () => sessionStorage.getItem(KEY) || ""
export const setKey = key => key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY)

function listed() {
  try { return JSON.parse(localStorage.getItem(LOG)) ?? [] } catch { return [] }
}

function list(entry) {
  const known = new Map(requests.map(each => [each.began, each]))  // with what is not stored
  requests.splice(0, requests.length, entry, ...listed().map(each => known.get(each.began) ?? each))  // another tab may have added some
  requests.length = Math.min(requests.length, MAX_LISTED)
  store()
}

// Stores a change of an entry.
export const relist = store

export function clearRequests() { requests.length = 0; store() }

function store() {
  try { localStorage.setItem(LOG, JSON.stringify(requests, (key, value) => key === "detail" ? undefined : value)) } catch { /* full or forbidden: kept in this page only */ }
  changes.dispatchEvent(new Event("requests"))
}

export class ApiError extends Error {
  constructor(status, message) { super(message); this.status = status }
}

// Returns a response with status 200. `body`: an object, sent as JSON. `entry`: an object that becomes its line in the list.
export async function call(path, { body, method, signal, log = true, entry = {} } = {}) {
  Object.assign(entry, { path, method: method ?? (body ? "POST" : "GET"), model: body?.model, status: "", milliseconds: 0, began: Date.now() })
  const start = performance.now()
  const headers = {}
  if (getKey()) headers.authorization = "Bearer " + getKey()
  if (body) headers["content-type"] = "application/json"
  try {
    const response = await fetch(path, { method: entry.method, headers, signal, body: body && JSON.stringify(body) })
    entry.status = response.status
    if (!response.ok) {
      if (response.status === 401) changes.dispatchEvent(new Event("refused"))
      throw new ApiError(response.status, await reason(response))
    }
    return response
  } catch (error) {
    if (!entry.status) entry.status = error.name === "AbortError" ? "stopped" : "failed"
    throw error
  } finally {
    entry.milliseconds = entry.total = Math.round(performance.now() - start)
    if (log) list(entry)
  }
}

export const json = async (path, options) => (await call(path, options)).json()

// The objects of a stream of server-sent events. The entry gets the times at which they came, in milliseconds.
export async function* events(path, options) {
  const entry = options?.entry, start = performance.now(), came = []
  if (entry) entry.detail = { came }
  const response = await call(path, options)
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader()
  let rest = ""
  try {
    for (;;) {
      const { value, done } = await reader.read()
      if (done) return
      const parts = (rest + value).split("\n\n")
      rest = parts.pop()
      for (const part of parts) {
        if (!part.startsWith("data: ") || part === "data: [DONE]") continue
        const found = JSON.parse(part.slice(6))
        if (entry && came.length < 5000) came.push(performance.now() - start)
        if (found.error) throw new ApiError(200, found.error.message)
        yield found
      }
    }
  } finally {
    reader.cancel().catch(() => {})
    if (entry) { entry.total = Math.round(performance.now() - start); relist() }
  }
}

// The steps of the server's device, while at least one reader wants them: the server logs them only while they are read.

const readers = new Set()
let stream = null  // an AbortController
let last = null  // the last event of the stream, without its steps

// `take` gets {now, models, steps: [{number, lane, start, ...}], offset: server's clock minus this one, in seconds}.
// Returns a function that ends the reading. `fail` gets the error of a stream that ends.
export function readSteps(take, fail = () => {}) {
  const reader = { take, fail }
  readers.add(reader)
  if (!stream) follow(stream = new AbortController())
  else if (last) take(last)
  return () => {
    readers.delete(reader)
    if (!readers.size) { stream?.abort(); stream = null }
  }
}

async function follow(own) {
  last = null
  let offset = -Infinity, failure = new Error("the server has ended the stream of steps")
  try {
    for await (const { now, models, fields, steps } of events("debug/timeline", { signal: own.signal, log: false })) {
      offset = Math.max(offset, now - Date.now() / 1000)  // of the event that was the fastest to come
      const found = { now, models, offset, steps: steps.map(values => Object.fromEntries(fields.map((name, i) => [name, values[i]]))) }
      last = { ...found, steps: [] }
      for (const reader of readers) reader.take(found)
    }
  } catch (error) { failure = error }
  if (stream !== own) return
  stream = null
  for (const reader of [...readers]) { readers.delete(reader); reader.fail(failure) }
}

async function reason(response) {
  const text = await response.text()
  try { return JSON.parse(text).error.message } catch { return text || response.statusText }
}
