// Requests to this server. The API key stays in this tab. Every request is listed in `requests`, without its content.

const KEY = "slipstream-key", LOG = "slipstream-requests"
const MAX_LISTED = 200

export const requests = listed()  // {path, method, status, milliseconds, began}, the newest first
export const changes = new EventTarget()  // "requests", "refused" (the key)

export const getKey = () => sessionStorage.getItem(KEY) || ""
export const setKey = key => key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY)

function listed() {
  try { return JSON.parse(localStorage.getItem(LOG)) ?? [] } catch { return [] }
}

function list(entry) {
  requests.splice(0, requests.length, entry, ...listed())  // another tab may have added some
  requests.length = Math.min(requests.length, MAX_LISTED)
  store()
}

export function clearRequests() { requests.length = 0; store() }

function store() {
  try { localStorage.setItem(LOG, JSON.stringify(requests)) } catch { /* full or forbidden: kept in this page only */ }
  changes.dispatchEvent(new Event("requests"))
}

export class ApiError extends Error {
  constructor(status, message) { super(message); this.status = status }
}

// Returns a response with status 200. `body`: an object, sent as JSON.
export async function call(path, { body, signal, log = true } = {}) {
  const entry = { path, method: body ? "POST" : "GET", status: "", milliseconds: 0, began: Date.now() }
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
    entry.milliseconds = Math.round(performance.now() - start)
    if (log) list(entry)
  }
}

export const json = async (path, options) => (await call(path, options)).json()

// The objects of a stream of server-sent events.
export async function* events(path, options) {
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
        if (found.error) throw new ApiError(200, found.error.message)
        yield found
      }
    }
  } finally {
    reader.cancel().catch(() => {})
  }
}

async function reason(response) {
  const text = await response.text()
  try { return JSON.parse(text).error.message } catch { return text || response.statusText }
}
