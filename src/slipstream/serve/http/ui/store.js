// Conversations and their branches, kept in this browser (IndexedDB; in this page only where the browser forbids it).
//
// A conversation is a tree of messages: `nodes` by id, each with its parent, and `leaf`, the end of the branch shown.

const FORMAT = "slipstream-conversations"
const MAX_TITLE = 80  // characters
const ROLES = ["user", "assistant", "tool"]

export const changes = new EventTarget()  // "conversations"
const channel = new BroadcastChannel(FORMAT)  // tells other tabs
channel.onmessage = () => changes.dispatchEvent(new Event("conversations"))

const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(9)), each => each.toString(36).padStart(2, "0")).join("")

export const newConversation = () => ({ id: newId(), title: "", created: Date.now(), changed: Date.now(), nodes: {}, leaf: null })

// Adds a message at the end of the branch.
export function append(conversation, message) {
  const node = Object.assign(message, { id: newId(), parent: conversation.leaf, created: Date.now() })
  conversation.nodes[node.id] = node
  conversation.leaf = node.id
  conversation.title ||= (message.content.trim().split("\n")[0] || message.files?.[0]?.name || "").slice(0, MAX_TITLE)
  return node
}

export function branch(conversation) {
  const found = []
  for (let node = conversation.nodes[conversation.leaf]; node; node = conversation.nodes[node.parent]) found.unshift(node)
  return found
}

const children = ({ nodes }, parent) => Object.values(nodes).filter(node => node.parent === parent).sort((a, b) => a.created - b.created)
export const siblings = (conversation, node) => children(conversation, node.parent)

// Shows the branch through a node: the newest one where it divides.
export function follow(conversation, node) {
  while (node) { conversation.leaf = node.id; node = children(conversation, node.id).at(-1) }
}

export function remove(conversation, node) {
  delete conversation.nodes[node.id]
  conversation.leaf = node.parent
}

// The database

const memory = new Map()
const STORES = ["conversations", "titles"]
const database = new Promise((resolve, reject) => {
  const request = indexedDB.open("slipstream", 1)
  request.onupgradeneeded = () => { for (const name of STORES) request.result.createObjectStore(name, { keyPath: "id" }) }
  request.onsuccess = () => resolve(request.result)
  request.onerror = () => reject(request.error)
}).catch(() => null)

const result = request => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result)
  request.onerror = () => reject(request.error)
})

const open = async mode => (await database)?.transaction(STORES, mode)

function told() {
  changes.dispatchEvent(new Event("conversations"))
  channel.postMessage("")
}

const newestFirst = list => list.sort((a, b) => b.changed - a.changed)

export async function allConversations() {
  const found = await open("readonly")
  return newestFirst(found ? await result(found.objectStore("conversations").getAll()) : [...memory.values()])
}

// {id, title, changed} of each conversation: the list does not read their messages.
export async function allTitles() {
  const found = await open("readonly")
  return newestFirst(found ? await result(found.objectStore("titles").getAll()) : [...memory.values()])
}

export async function readConversation(id) {
  const found = await open("readonly")
  return found ? result(found.objectStore("conversations").get(id)) : memory.get(id)
}

// Keeps the branches that another tab has added meanwhile, and the name that the user has given in the list.
export async function writeConversation(conversation) {
  const copy = structuredClone(conversation), found = await open("readwrite")
  if (!found) memory.set(copy.id, copy)
  else {
    const before = await result(found.objectStore("conversations").get(copy.id))
    if (before?.isNamed && !copy.isNamed) Object.assign(copy, { title: before.title, isNamed: true })
    found.objectStore("conversations").put({ ...copy, nodes: { ...before?.nodes, ...copy.nodes } })
    await result(found.objectStore("titles").put({ id: copy.id, title: copy.title, changed: copy.changed }))
  }
  told()
}

export async function deleteConversation(id) {
  const found = await open("readwrite")
  if (!found) memory.delete(id)
  else await Promise.all(STORES.map(name => result(found.objectStore(name).delete(id))))
  told()
}

// Export and import

export const exported = conversations => JSON.stringify({ format: FORMAT, version: 1, conversations }, null, 1)

// Adds the conversations of an exported file and returns how many there are. All fields are checked first.
export async function importConversations(text) {
  let found
  try { found = JSON.parse(text) } catch { throw new Error("the file is not JSON; choose a file that this page has exported") }
  if (found?.format !== FORMAT || !Array.isArray(found.conversations)) throw new Error("the file has no conversations; choose a file that this page has exported")
  const all = found.conversations.map(checked)
  for (const conversation of all) await writeConversation(conversation)
  return all.length
}

const text = value => typeof value === "string" ? value : ""
const time = value => Number.isFinite(value) ? value : Date.now()
const list = value => Array.isArray(value) ? value : []

function checked(found) {
  const nodes = {}
  for (const node of Object.values(found?.nodes ?? {})) {
    if (!text(node?.id) || !ROLES.includes(node.role) || node.id === "__proto__") continue
    nodes[node.id] = checkedMessage(node)
  }
  for (const id of Object.keys(nodes)) if (!isRooted(nodes, id)) throw new Error("the file has a message without an end of its parents")
  const leaf = nodes[found?.leaf] ? found.leaf : Object.keys(nodes).at(-1) ?? null
  const settings = found?.settings && Object.fromEntries(Object.entries(found.settings).filter(([, value]) => ["string", "boolean"].includes(typeof value)))
  return { id: text(found?.id) || newId(), title: text(found?.title).slice(0, MAX_TITLE), created: time(found?.created), changed: time(found?.changed), nodes, leaf, ...(settings ? { settings } : {}) }
}

function isRooted(nodes, id) {
  const seen = new Set()
  for (; id !== null; id = nodes[id].parent) {
    if (seen.has(id) || !nodes[id]) return false
    seen.add(id)
  }
  return true
}

function checkedMessage(node) {
  const call = each => ({ id: text(each?.id), type: "function", function: { name: text(each?.function?.name), arguments: text(each?.function?.arguments) } })
  const message = { role: node.role, content: text(node.content), reasoning: text(node.reasoning), model: text(node.model), calls: list(node.calls).map(call) }
  if (text(node.tool_call_id)) message.tool_call_id = node.tool_call_id
  if (list(node.files).length) message.files = node.files.map(each => ({ name: text(each?.name), text: text(each?.text) }))
  if (node.other) message.other = checkedMessage({ ...node.other, role: "assistant", other: null })
  return Object.assign(message, { id: node.id, parent: text(node.parent) || null, created: time(node.created) })
}
