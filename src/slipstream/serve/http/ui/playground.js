// The playground: similarity of texts, reranking, classification and tokens.

import { json } from "./api.js"
import { $, make } from "./dom.js"

const FORMS = { embed: compare, rerank: rank, classify, token: cut }
const MISSING = {
  embed: "No model of this server makes embeddings.", rerank: "No model of this server scores pairs of texts.",
  classify: "No model of this server classifies. Start the server with one that does, next to the others.", token: "The server has no tokenizer.",
}

export function startPlayground() {
  for (const [name, work] of Object.entries(FORMS)) {
    $(`${name}-form`).addEventListener("submit", async event => {
      event.preventDefault()
      const began = performance.now()
      $(`${name}-error`).textContent = ""
      $(`${name}-note`).textContent = "..."
      try {
        const said = await work($(`${name}-model`).value || undefined)
        $(`${name}-note`).textContent = `${said}${(performance.now() - began).toFixed(0)} ms`
      } catch (error) {
        $(`${name}-note`).textContent = ""
        $(`${name}-error`).textContent = error.message
      }
    })
  }
}

// Says which forms have a model.
export function usePlayground() {
  for (const name of Object.keys(FORMS)) {
    const has = $(`${name}-model`).options.length > 0
    $(`${name}-form`).classList.toggle("off", !has)
    for (const field of $(`${name}-form`).elements) field.disabled = !has
    $(`${name}-note`).textContent = has ? "" : MISSING[name]
  }
}

function lines(id) {
  const found = $(id).value.split("\n").map(line => line.trim()).filter(line => line)
  if (!found.length) throw new Error("there is no text; write one per line")
  return found
}

async function compare(model) {
  const input = lines("embed-texts")
  const { data, usage } = await json("v1/embeddings", { body: { input, model } })
  const vectors = data.sort((a, b) => a.index - b.index).map(each => each.embedding)
  const lengths = vectors.map(vector => Math.hypot(...vector))
  const similarity = (i, j) => dot(vectors[i], vectors[j]) / (lengths[i] * lengths[j])
  const cell = (i, j) => {
    const element = make("td", { text: similarity(i, j).toFixed(3), className: "cell", title: `${input[i]}\n${input[j]}` })
    element.style.setProperty("--p", similarity(i, j))
    return element
  }
  const head = make("tr", {}, make("td"), ...input.map((_, i) => make("th", { text: i + 1, scope: "col" })))
  $("matrix").replaceChildren(make("table", {}, make("thead", {}, head), make("tbody", {}, ...input.map((text, i) =>
    make("tr", {}, make("th", { text: `${i + 1}  ${text}`, scope: "row" }), ...input.map((_, j) => cell(i, j)))))))
  return `${vectors[0].length} numbers for each text, ${usage.prompt_tokens} tokens, `
}

const dot = (a, b) => a.reduce((sum, value, i) => sum + value * b[i], 0)

async function rank(model) {
  const documents = lines("documents")
  const { results } = await json("v1/rerank", { body: { query: $("query").value, documents, model } })
  const most = Math.max(...results.map(each => each.relevance_score), 1e-9)
  $("ranking").replaceChildren(...results.map(({ index, relevance_score }) => scored(documents[index], relevance_score.toFixed(4), relevance_score / most)))
  return ""
}

async function classify(model) {
  const input = lines("classify-texts")
  const { data } = await json("classify", { body: { input, model } })
  $("classes").replaceChildren(...data.sort((a, b) => a.index - b.index).map(({ index, label, probs }) => {
    const most = Math.max(...probs)
    return scored(input[index], `${label ?? "class " + probs.indexOf(most)}  ${(100 * most).toFixed(1)} %`, most)
  }))
  return ""
}

// A text with a bar behind it.
function scored(text, score, part) {
  const element = make("li", {}, make("span", { text }), make("b", { text: score }))
  element.style.setProperty("--p", Math.max(0, Math.min(1, part)))
  return element
}

async function cut(model) {
  const found = await json("tokenize", { body: { prompt: $("token-text").value, model, return_token_strs: true } })
  $("tokens").replaceChildren(...found.tokens.map((id, i) => make("span", { className: "piece", title: `token ${id}`, text: found.token_strs[i] })))
  return `${found.count} tokens of at most ${found.max_model_len}, `
}
