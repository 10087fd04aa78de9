// Small helpers for elements. Text is always set as text, never as HTML: the policy of the page forbids HTML strings.

export const $ = id => document.getElementById(id)

export function make(tag, { text, className, icon, ...more } = {}, ...children) {
  const element = document.createElement(tag)
  if (text !== undefined) element.textContent = text
  if (className) element.className = className
  for (const [name, value] of Object.entries(more)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value)
    else element.setAttribute(name, value)
  }
  if (icon) element.prepend(makeIcon(icon))
  element.append(...children)
  return element
}

// A button with an icon and a name for screen readers, which is also its tooltip.
export const iconButton = (icon, name, onclick) => make("button", { icon, type: "button", className: "plain", title: name, "aria-label": name, onclick })

// Asks for a name. Null: cancelled.
export function ask(question, value = "") {
  const dialog = $("name-dialog"), field = $("name")
  $("name-title").textContent = question
  field.value = value
  dialog.returnValue = ""
  dialog.showModal()
  field.select()
  return new Promise(resolve => dialog.addEventListener("close", () => resolve(dialog.returnValue === "save" ? field.value.trim() : null), { once: true }))
}

export function saveFile(name, content, type = "application/json") {
  const link = make("a", { href: URL.createObjectURL(new Blob([content], { type })), download: name })
  link.click()
  URL.revokeObjectURL(link.href)
}

// Fills a table: `heads` are column titles, `rows` lists of texts or elements; numbers are aligned to the right.
export function fillTable(table, heads, rows) {
  const head = make("tr", {}, ...heads.map(text => make("th", { text, scope: "col" })))
  const lines = rows.map(row => make("tr", {}, ...row.map(cell =>
    cell instanceof Node ? make("td", {}, cell) : make("td", { text: cell, className: typeof cell === "number" ? "number" : "" }))))
  table.replaceChildren(make("thead", {}, head), make("tbody", {}, ...lines))
}

// Paths in a square of 24.
const ICONS = {
  menu: "M4 7h16M4 12h16M4 17h16", plus: "M12 5v14M5 12h14", close: "M6 6l12 12M18 6L6 18", check: "M5 12.5l4.5 4.5L19 7",
  send: "M12 19V5M6 11l6-6 6 6", stop: "M7 7h10v10H7zM10 7v10M12 7v10M14 7v10", left: "M14 6l-6 6 6 6", right: "M10 6l6 6-6 6", down: "M6 9l6 6 6-6",
  sliders: "M4 8h9M17 8h3M4 16h3M11 16h9M15 6v4M9 14v4", copy: "M9 9h10v11H9zM5 15V4h10", edit: "M4 20l1-4L16 5l3 3L8 19zM14 7l3 3",
  again: "M19 12a7 7 0 1 1-2.2-5M19 4v4h-4", trash: "M5 7h14M10 7V5h4v2M7 7l1 13h8l1-13", search: "M11 5a6 6 0 1 0 0 12 6 6 0 1 0 0-12M20 20l-4.5-4.5",
  chat: "M4 5h16v11H11l-4 4v-4H4z", dots: "M6 16a2 2 0 1 0 4 0 2 2 0 1 0-4 0M5 7a2 2 0 1 0 4 0 2 2 0 1 0-4 0M15 10a2 2 0 1 0 4 0 2 2 0 1 0-4 0M8.700 7.800l6.500 1.700M9.600 15l5.800-4", bars: "M4 7h8M9 12h8M14 17h6",
  box: "M4 8l8-4 8 4v8l-8 4-8-4zM4 8l8 4 8-4M12 12v8", list: "M4 6h16M4 12h10M4 18h13", columns: "M4 5h7v14H4zM13 5h7v14h-7z",
  clip: "M8 13l6-6a2.8 2.8 0 0 1 4 4l-8 8a4.6 4.6 0 0 1-6.500-6.500l7.500-7.500", export: "M12 4v11M7 10l5 5 5-5M5 20h14", import: "M12 15V4M7 9l5-5 5 5M5 20h14",
  save: "M5 4h12l2 2v14H5zM8 4v5h7V4M8 20v-6h8v6",
  theme: "M12 4a8 8 0 1 0 0 16 8 8 0 1 0 0-16M12 4v16M12 8h7M12 12h8M12 16h7", key: "M15 5a4.500 4.500 0 1 1-3.500 7.400L5 19v-3h3v-2M15.500 9v.1", file: "M6 3h8l4 4v14H6zM14 3v4h4",
}

export function makeIcon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg"), path = document.createElementNS(svg.namespaceURI, "path")
  for (const [key, value] of Object.entries({ viewBox: "0 0 24 24", class: "icon", "aria-hidden": "true" })) svg.setAttribute(key, value)
  path.setAttribute("d", ICONS[name])
  svg.append(path)
  return svg
}
