// Small helpers for elements. Text is always set as text, never as HTML.

export const $ = id => document.getElementById(id)

export function make(tag, { text, className, ...more } = {}, ...children) {
  const element = document.createElement(tag)
  if (text !== undefined) element.textContent = text
  if (className) element.className = className
  for (const [name, value] of Object.entries(more)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value)
    else element.setAttribute(name, value)
  }
  element.append(...children)
  return element
}

// Fills a table: `heads` are column titles, `rows` lists of texts or elements; numbers are aligned to the right.
export function fillTable(table, heads, rows) {
  const head = make("tr", {}, ...heads.map(text => make("th", { text, scope: "col" })))
  const lines = rows.map(row => make("tr", {}, ...row.map(cell =>
    cell instanceof Node ? make("td", {}, cell) : make("td", { text: cell, className: typeof cell === "number" ? "number" : "" }))))
  table.replaceChildren(make("thead", {}, head), make("tbody", {}, ...lines))
}
