// The page: views, API key, colours, and the state of the server.

import { changes, clearRequests, getKey, json, requests, setKey } from "./api.js"
import { startChat } from "./chat.js"
import { $, fillTable, make } from "./dom.js"
import { showTimeline, startTimeline } from "./timeline.js"
import { startVectors } from "./vectors.js"

const tabs = [...document.querySelectorAll("[role=tab]")]

function select(tab, focus = false) {
  for (const each of tabs) {
    const chosen = each === tab
    each.setAttribute("aria-selected", chosen)
    each.tabIndex = chosen ? 0 : -1
    $(each.getAttribute("aria-controls")).hidden = !chosen
  }
  if (focus) tab.focus()
  history.replaceState(null, "", "#" + tab.getAttribute("aria-controls"))  // a navigation would move the focus
  watch()
}

const selected = () => tabs.find(tab => tab.getAttribute("aria-selected") === "true").getAttribute("aria-controls")
const watch = () => {
  showTimeline(selected() === "timeline" && !document.hidden)
  showModels()
}

tabs.forEach((tab, index) => {
  tab.addEventListener("click", () => select(tab))
  tab.addEventListener("keydown", event => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key]
    if (step) select(tabs[(index + step + tabs.length) % tabs.length], true)
  })
})
document.addEventListener("visibilitychange", watch)

// API key

const dialog = $("key-dialog")
$("key-button").addEventListener("click", () => askKey("The key is kept in this tab only."))
dialog.addEventListener("close", () => {
  if (dialog.returnValue === "save") setKey($("key").value.trim())
  if (dialog.returnValue === "forget") setKey("")
  $("key").value = ""
  if (["save", "forget"].includes(dialog.returnValue)) load()
})
changes.addEventListener("refused", () => askKey(getKey() ? "The server refused this key." : "This server needs an API key."))

function askKey(reason) {
  $("key-reason").textContent = reason
  if (!dialog.open) { dialog.returnValue = ""; dialog.showModal() }
}

// Colours: automatic, light, dark

const THEMES = ["", "light", "dark"]
$("theme").addEventListener("click", () => setTheme(THEMES[(THEMES.indexOf(localStorage.theme ?? "") + 1) % 3]))

function setTheme(name) {
  localStorage.theme = name
  if (name) document.documentElement.dataset.theme = name
  else delete document.documentElement.dataset.theme
  $("theme").textContent = name ? `Colours: ${name}` : "Colours"
}

// Models and server

async function load() {
  try {
    const { data } = await json("v1/models", { log: false })
    const can = task => data.filter(model => model.tasks.includes(task))
    fillSelect($("chat-model"), can("generate"))
    fillSelect($("embed-model"), can("embed"))
    fillSelect($("rerank-model"), [...new Set(["score", "embed", "token_embed"].flatMap(can))])  // the best task first
    $("send").disabled = !can("generate").length
    $("status").textContent = data.map(model => model.id).join(", ")
    watch()
  } catch (error) {
    $("status").textContent = error.message
    if (error.status === 503) setTimeout(load, 1000)  // the engine is starting
  }
}

function fillSelect(element, models) {
  const before = element.value
  element.replaceChildren(...models.map(model => make("option", { text: model.id, value: model.id })))
  if (models.some(model => model.id === before)) element.value = before
}

let refresh = 0  // timer
async function showModels() {
  clearTimeout(refresh)
  if (selected() !== "models" || document.hidden) return
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
  refresh = setTimeout(showModels, 2000)
}

function showRequests() {
  fillTable($("request-table"), ["time", "request", "status", "ms to the first byte"], requests.map(each =>
    [new Date(each.began).toLocaleString(), `${each.method} /${each.path}`, String(each.status), each.milliseconds]))
}
changes.addEventListener("requests", showRequests)
$("clear-requests").addEventListener("click", clearRequests)

setTheme(localStorage.theme ?? "")
showRequests()
startChat()
startVectors()
startTimeline()
select(tabs.find(tab => "#" + tab.getAttribute("aria-controls") === location.hash) ?? tabs[0])
load()
