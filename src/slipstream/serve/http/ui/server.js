// The views of the server: its models, its load, and the requests that this browser has sent.

import { changes, clearRequests, json, requests } from "./api.js"
import { $, fillTable } from "./dom.js"

export function startServer() {
  changes.addEventListener("requests", showRequests)
  $("clear-requests").addEventListener("click", clearRequests)
  showRequests()
}

let refresh = 0  // timer
let visible = false

export async function showModels(show = visible) {
  visible = show
  clearTimeout(refresh)
  if (!visible) return
  try {
    const [{ data }, load, { version }, health] = await Promise.all(["v1/models", "load", "version", "health"].map(path => json(path, { log: false })))
    const { models, is_asleep, ...gauges } = load
    const row = ({ id, parent, tasks, max_model_len }) => {
      const own = models.find(each => each.model === (parent ?? id))
      const pages = own?.pages ? `${own.pages - own.free_pages} of ${own.pages}` : ""
      return [parent ? `${id} (adapter of ${parent})` : id, own ? (is_asleep ? "asleep" : "ready") : "", own?.running ?? "", own?.waiting ?? "", pages, tasks.join(", "), max_model_len]
    }
    fillTable($("model-table"), ["model", "state", "running", "waiting", "pages used", "tasks", "maximum tokens"], data.map(row))
    fillTable($("load-table"), ["gauge", "value"], [["version", version], ["health", health.status], ...Object.entries(gauges).map(([name, value]) => [name.replaceAll("_", " "), value])])
    $("models-error").textContent = ""
  } catch (error) { $("models-error").textContent = error.message }
  clearTimeout(refresh)  // another call may have ended meanwhile
  if (visible) refresh = setTimeout(showModels, 2000)
}

function showRequests() {
  fillTable($("request-table"), ["time", "request", "status", "ms to the first byte"], requests.map(each =>
    [new Date(each.began).toLocaleString(), `${each.method} /${each.path}`, String(each.status), each.milliseconds]))
}
