// The list of conversations in the side bar: search, rename, delete with undo, export and import.

import { $, ask, iconButton, make, saveFile } from "./dom.js"
import { allConversations, allTitles, changes, deleteConversation, exported, importConversations, readConversation, writeConversation } from "./store.js"

let current = null, isRunning = () => false, leave = () => {}

// isRunning: whether an answer of a conversation is being written, by id. leave: called when the current one is deleted.
export function startHistory(actions) {
  ({ isRunning, leave } = actions)
  changes.addEventListener("conversations", showHistory)
  $("search").addEventListener("input", showHistory)
  $("export").addEventListener("click", async () => saveFile("slipstream-conversations.json", exported(await allConversations())))
  $("import").addEventListener("click", () => $("import-file").click())
  $("import-file").addEventListener("change", async () => {
    const [file] = $("import-file").files
    $("import-file").value = ""
    if (!file) return
    try { say(`${await importConversations(await file.text())} conversations are imported.`) } catch (error) { say(`Nothing is imported: ${error.message}.`) }
  })
  showHistory()
}

export function markCurrent(id) { current = id; showHistory() }

const words = conversation => [conversation.title, ...Object.values(conversation.nodes).map(node => node.content)].join("\n").toLowerCase()

let round = 0
export async function showHistory() {
  const own = ++round, query = $("search").value.trim().toLowerCase()
  const all = await (query ? allConversations() : allTitles())
  if (own !== round) return  // a later call shows
  const found = query ? all.filter(each => words(each).includes(query)) : all
  $("history-tools").hidden = !all.length && !query
  const focused = document.activeElement?.closest("#conversations li")?.dataset.id
  const groups = Map.groupBy(found, each => group(each.changed))
  $("conversations").replaceChildren(...[...groups].flatMap(([name, each]) => [make("h2", { text: name }), make("ul", {}, ...each.map(item))]))
  if (query && !found.length) $("conversations").append(make("p", { text: "No conversation has this text." }))
  if (focused) document.querySelector(`#conversations li[data-id="${CSS.escape(focused)}"] a`)?.focus()
}

function group(time) {
  const days = (new Date().setHours(24, 0, 0, 0) - time) / 86_400_000
  return days <= 1 ? "Today" : days <= 2 ? "Yesterday" : days <= 7 ? "This week" : "Earlier"
}

function item(conversation) {
  const { id, title } = conversation
  const link = make("a", { href: "#chat/" + id, text: title || "Without a title", title })
  if (id === current) link.setAttribute("aria-current", "true")
  if (isRunning(id)) link.classList.add("busy")
  return make("li", { "data-id": id }, link,
    iconButton("edit", `Rename ${title}`, () => rename(conversation)),
    iconButton("export", `Export ${title}`, async () => saveFile(fileName(title), exported([await readConversation(id)]))),
    iconButton("trash", `Delete ${title}`, () => discard(id)))
}

const fileName = title => (title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40) || "conversation") + ".json"

async function rename(conversation) {
  const title = await ask("Name of the conversation", conversation.title)
  if (title) await writeConversation({ ...await readConversation(conversation.id), title: title.slice(0, 80), isNamed: true })
}

async function discard(id) {
  const kept = await readConversation(id)
  await deleteConversation(id)
  if (id === current) leave()
  say(`"${kept.title}" is deleted.`, "Undo", () => writeConversation(kept))
}

function say(text, action, work) {
  const line = $("notice")
  line.replaceChildren(make("span", { text }))
  const close = () => line.replaceChildren()
  if (work) line.append(make("button", { text: action, onclick: () => { close(); work() } }))
  line.append(iconButton("close", "Close", close))
}
