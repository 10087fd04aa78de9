// The frame of the page: views, side bar, API key, colours, and which models the server has.

import { changes, getKey, json, setKey } from "./api.js"
import { openConversation, startChat, useModels } from "./chat.js"
import { $, make, makeIcon } from "./dom.js"
import { startPlayground, usePlayground } from "./playground.js"
import { showModels, startServer } from "./server.js"
import { showTimeline, startTimeline } from "./timeline.js"

for (const element of document.querySelectorAll("[data-icon]")) element.prepend(makeIcon(element.dataset.icon))

// Views: the part of the address after # names one

const links = [...document.querySelectorAll("nav a")]
const viewOf = hash => hash.slice(1).split("/")[0]
const selected = () => links.find(link => viewOf(link.hash) === viewOf(location.hash)) ?? links[0]

function showView() {
  const view = viewOf(selected().hash)
  for (const link of links) {
    $(viewOf(link.hash)).hidden = link !== selected()
    if (link === selected()) link.setAttribute("aria-current", "page")
    else link.removeAttribute("aria-current")
  }
  document.body.dataset.view = view
  document.title = view === "chat" ? "Slipstream" : `${selected().textContent} - Slipstream`
  $("view-title").textContent = selected().textContent
  if (view !== "chat") openSettings(false)
  openMenu(false)
  if (view === "chat") openConversation(location.hash.split("/")[1])
  watch()
}

const watch = () => {
  const view = document.hidden ? "" : document.body.dataset.view
  showTimeline(view === "timeline")
  showModels(view === "models")
}
addEventListener("hashchange", showView)
document.addEventListener("visibilitychange", watch)

// The side bar and the settings cover the view on a small screen

const small = matchMedia("(max-width: 64rem)")

function cover(drawer) {
  $("shade").hidden = !drawer
  document.querySelector(".page").inert = Boolean(drawer)
  drawer?.querySelector("button").focus()
}

function openMenu(open) {
  if (!small.matches && open) return
  const was = $("sidebar").classList.toggle("open", open) !== open || $("menu").getAttribute("aria-expanded") === "true"
  $("menu").setAttribute("aria-expanded", open)
  if (open) cover($("sidebar"))
  else if (was) { cover(null); $("menu").focus() }
}

function openSettings(open) {
  if ($("settings").hidden === !open) return
  $("settings").hidden = !open
  $("settings-button").setAttribute("aria-expanded", open)
  if (small.matches || !open) cover(open ? $("settings") : null)
  if (!open) $("settings-button").focus()
}

$("menu").addEventListener("click", () => openMenu(true))
$("close-menu").addEventListener("click", () => openMenu(false))
$("settings-button").addEventListener("click", () => openSettings($("settings").hidden))
$("close-settings").addEventListener("click", () => openSettings(false))
$("shade").addEventListener("click", () => { openMenu(false); openSettings(false) })
small.addEventListener("change", () => { openMenu(false); openSettings(false); cover(null) })
document.addEventListener("keydown", event => {
  if (event.key === "Escape" && !$("shade").hidden) { openMenu(false); openSettings(false) }
})
$("clear").addEventListener("click", () => openMenu(false))

// API key

const dialog = $("key-dialog")
$("key-button").addEventListener("click", () => askKey("The key is kept in this tab only."))
dialog.addEventListener("close", () => {
  if (dialog.returnValue === "save") setKey($("key").value.trim())
  if (dialog.returnValue === "forget") setKey("")
  $("key").value = ""
  if (["save", "forget"].includes(dialog.returnValue)) load()
})
changes.addEventListener("models", load)
changes.addEventListener("refused", () => askKey(getKey() ? "The server refused this key." : "This server needs an API key."))

function askKey(reason) {
  $("key-reason").textContent = reason
  if (!dialog.open) { dialog.returnValue = ""; dialog.showModal() }
}

// Colours: as the system, light, dark

const THEMES = ["", "light", "dark"]
$("theme").addEventListener("click", () => setTheme(THEMES[(THEMES.indexOf(localStorage.theme ?? "") + 1) % 3]))

function setTheme(name) {
  localStorage.theme = name
  if (name) document.documentElement.dataset.theme = name
  else delete document.documentElement.dataset.theme
  $("theme").lastChild.textContent = { "": "Auto", light: "Light", dark: "Dark" }[name]
}

// The models of the server; while it starts, asked again every second

async function load() {
  try {
    const { data } = await json("v1/models", { log: false })
    const can = task => data.filter(model => model.tasks.includes(task))
    const first = tasks => [...new Set(tasks.flatMap(can))].sort((a, b) => generates(a) - generates(b))  // made for it first
    fillSelect($("chat-model"), can("generate"))
    fillSelect($("other-model"), can("generate"))
    useModels(can("generate"))
    fillSelect($("embed-model"), first(["embed"]))
    fillSelect($("rerank-model"), [...new Set([...can("score"), ...first(["embed", "token_embed"])])])
    fillSelect($("classify-model"), first(["classify"]))
    fillSelect($("token-model"), data.filter(model => !model.parent))
    fillSelect($("adapter-base"), can("generate").filter(model => !model.parent))
    usePlayground()
    $("status").textContent = `Ready, ${data.length === 1 ? "1 model" : data.length + " models"}`
    watch()
  } catch (error) {
    $("status").textContent = error.message
    useModels([], error.status === 503 ? `The server is not ready yet: ${error.message}` : error.message)
    if (![401, 403].includes(error.status)) setTimeout(load, 1000)  // it starts, or cannot be reached for now
  }
}

const generates = model => model.tasks.includes("generate")

function fillSelect(element, models) {
  const before = element.value
  element.replaceChildren(...models.map(model => make("option", { text: model.id, value: model.id })))
  if (models.some(model => model.id === before)) element.value = before
}

setTheme(localStorage.theme ?? "")
startChat()
startPlayground()
startTimeline()
startServer()
showView()
load()
