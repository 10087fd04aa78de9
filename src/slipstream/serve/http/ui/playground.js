// Embeddings as a matrix of similarities, and reranking.

import { json } from "./api.js"
import { $, make } from "./dom.js"

export function startPlayground() {
  $("embed-form").addEventListener("submit", event => { event.preventDefault(); attempt(compare) })
  $("rerank-form").addEventListener("submit", event => { event.preventDefault(); attempt(rank) })
}

async function attempt(work) {
  $("playground-error").textContent = ""
  try { await work() } catch (error) { $("playground-error").textContent = error.message }
}

const lines = id => $(id).value.split("\n").map(line => line.trim()).filter(line => line)

async function compare() {
  const input = lines("embed-texts")
  const { data } = await json("v1/embeddings", { body: { input, model: $("embed-model").value || undefined } })
  const vectors = data.sort((a, b) => a.index - b.index).map(each => each.embedding)
  const lengths = vectors.map(vector => Math.hypot(...vector))
  const table = make("table")
  table.append(make("tr", {}, make("th", { text: "text", scope: "col" }), ...input.map((_, i) => make("th", { text: i + 1, scope: "col" }))))
  input.forEach((text, i) => table.append(make("tr", {}, make("th", { text: `${i + 1} ${text}`, scope: "row" }),
    ...input.map((_, j) => {
      const similarity = dot(vectors[i], vectors[j]) / (lengths[i] * lengths[j])
      const cell = make("td", { text: similarity.toFixed(3), className: "cell" })
      cell.style.setProperty("--p", similarity)
      return cell
    }))))
  $("matrix").replaceChildren(table)
}

const dot = (a, b) => a.reduce((sum, value, i) => sum + value * b[i], 0)

async function rank() {
  const documents = lines("documents")
  const { results } = await json("v1/rerank", { body: { query: $("query").value, documents, model: $("rerank-model").value || undefined } })
  $("ranking").replaceChildren(...results.map(({ index, relevance_score }) =>
    make("li", { text: `${relevance_score.toFixed(4)}  ${documents[index]}` })))
}
