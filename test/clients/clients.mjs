// Runs scenarios with the Node clients against a server, and prints one JSON line for each client and scenario.
//
// usage: node clients.mjs URL KEY SLOW   (next to node_modules)
//
// The arguments and the lines are those of clients.py.

import Anthropic from '@anthropic-ai/sdk'
import OpenAI from 'openai'
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { embed, generateObject, generateText, jsonSchema, streamText, tool } from 'ai'
import { AIMessage, HumanMessage, ToolMessage } from '@langchain/core/messages'
import { ChatOpenAI, OpenAI as CompletionOpenAI, OpenAIEmbeddings } from '@langchain/openai'

globalThis.AI_SDK_LOG_WARNINGS = false
process.env.LANGCHAIN_TRACING_V2 = 'false'

const [url, key, slow] = process.argv.slice(2)
const v1 = url + '/v1'
const model = 'tiny'
const text = 'func main() {'
const unicode = 'Grüße, 世界! 🦊 \u202eabc \u0000 e\u0301'
const tooLong = 'func main() { '.repeat(3000)
const many = Array.from({ length: 50 }, (_, n) => `func f${n}() {`)
const tokens = 12
// A client leaves a stream of this length after its first event.
const abortedTokens = 900
const stops = ['public', '};']

const weather = {
  type: 'object',
  properties: { city: { type: 'string', enum: ['Rome', 'Oslo'] }, warm: { type: 'boolean' } },
  required: ['city', 'warm'],
  additionalProperties: false,
}
const weatherTool = { type: 'function', function: { name: 'weather', description: 'The weather of a city.', parameters: weather } }
const choice = { type: 'function', function: { name: 'weather' } }
const format = { type: 'json_schema', json_schema: { name: 'weather', schema: weather, strict: true } }
const history = [
  { role: 'user', content: 'How is Rome?' },
  { role: 'assistant', content: null, tool_calls: [{ id: 'call_1', type: 'function', function: { name: 'weather', arguments: '{"city": "Rome", "warm": true}' } }] },
  { role: 'tool', tool_call_id: 'call_1', content: 'sunny' },
]

const user = (content) => [{ role: 'user', content }]
const usage = (u) => [u.prompt_tokens, u.completion_tokens, u.total_tokens]
const rounded = (logprob) => Math.round(logprob * 100) / 100
const calls = (list) => (list ?? []).map((c) => [c.function.name, JSON.parse(c.function.arguments)])
const chatValue = (a) => ({
  model: a.model,
  choices: a.choices.map((c) => [c.index, c.message.role, c.message.content, calls(c.message.tool_calls), c.finish_reason]),
  usage: usage(a.usage),
})

function withOpenAI() {
  const options = { baseURL: v1, apiKey: key, maxRetries: 0 }
  const client = new OpenAI(options)
  const slowClient = new OpenAI({ ...options, baseURL: slow + '/v1' })
  const chat = (more = {}) => client.chat.completions.create({ model, messages: user(text), max_tokens: tokens, temperature: 0, ...more })
  const complete = (more = {}) => client.completions.create({ model, prompt: text, max_tokens: tokens, temperature: 0, ...more })
  const respond = (more = {}) => client.responses.create({ model, input: text, max_output_tokens: tokens, temperature: 0, store: false, ...more })
  const completionValue = (a) => ({ choices: a.choices.map((c) => [c.index, c.text, c.finish_reason]), usage: usage(a.usage) })
  const responseValue = (a) => [a.status, a.output_text ?? '', a.usage.input_tokens, a.usage.output_tokens]
  return {
    models: async () => (await client.models.list()).data.map((m) => [m.id, m.object, m.owned_by]),
    chat: async () => chatValue(await chat()),
    'chat stream': async () => {
      const got = { text: '', finish: null, usage: null, streamed: false }
      let events = 0
      for await (const chunk of await chat({ stream: true, stream_options: { include_usage: true } })) {
        events++
        for (const c of chunk.choices) {
          got.text += c.delta.content ?? ''
          got.finish = c.finish_reason ?? got.finish
        }
        got.usage = chunk.usage ? usage(chunk.usage) : got.usage
      }
      got.streamed = events > 2
      return got
    },
    completion: async () => completionValue(await complete()),
    'completion stream': async () => {
      let all = ''
      let counted = null
      for await (const chunk of await complete({ stream: true, stream_options: { include_usage: true } })) {
        all += chunk.choices.map((c) => c.text).join('')
        counted = chunk.usage ? usage(chunk.usage) : counted
      }
      return [all, counted]
    },
    tools: async () => chatValue(await chat({ tools: [weatherTool], tool_choice: choice, max_tokens: 64 })),
    'tool result': async () => chatValue(await chat({ messages: history })),
    'JSON schema': async () => chatValue(await chat({ response_format: format, max_tokens: 64 })),
    n: async () => chatValue(await chat({ n: 2 })),
    logprobs: async () => {
      const got = (await complete({ logprobs: 2 })).choices[0].logprobs
      return [got.tokens, got.token_logprobs.map(rounded)]
    },
    'chat logprobs': async () => (await chat({ logprobs: true, top_logprobs: 2 })).choices[0].logprobs.content.map((t) => [t.token, rounded(t.logprob)]),
    stop: async () => chatValue(await chat({ stop: stops, max_tokens: 40 })),
    unicode: async () => chatValue(await chat({ messages: user(unicode) })),
    responses: async () => responseValue(await respond({ instructions: 'Be short.' })),
    'responses stream': async () => {
      let all = ''
      const kinds = []
      let last
      for await (const event of await respond({ stream: true })) {
        all += event.type === 'response.output_text.delta' ? event.delta : ''
        if (kinds.at(-1) !== event.type) kinds.push(event.type)
        last = event.response ?? last
      }
      return [all, kinds, responseValue(last)]
    },
    embeddings: async () => (await client.embeddings.create({ model, input: text })).data.length,
    fifty: async () => (await Promise.all(many.map((t) => chat({ messages: user(t) })))).map((a) => a.choices[0].message.content),
    abort: async () => {
      const stream = await slowClient.chat.completions.create({ model, messages: user(text), stream: true, max_tokens: abortedTokens, ignore_eos: true })
      for await (const _ of stream) break
      stream.controller.abort()
      return 'left'
    },
    'wrong key': () => new OpenAI({ ...options, apiKey: 'wrong' }).chat.completions.create({ model, messages: user(text), max_tokens: 1 }),
    'wrong model': async () => chatValue(await chat({ model: 'other' })),
    'too long': async () => chatValue(await chat({ messages: user(tooLong) })),
  }
}

function withAnthropic() {
  const options = { baseURL: url, authToken: key, apiKey: null, maxRetries: 0 }
  const client = new Anthropic(options)
  const send = (more = {}, from = client) => from.messages.create({ model, messages: user(text), max_tokens: tokens, temperature: 0, ...more })
  const value = (m) => [m.role, m.content.map((b) => [b.type, b.type === 'text' ? b.text : [b.name, b.input]]), m.stop_reason, m.usage.input_tokens, m.usage.output_tokens]
  return {
    messages: async () => value(await send()),
    'messages stream': async () => {
      const stream = client.messages.stream({ model, messages: user(text), max_tokens: tokens, temperature: 0 })
      let all = ''
      stream.on('text', (part) => { all += part })
      return [value(await stream.finalMessage()), all]
    },
    'count tokens': async () => (await client.messages.countTokens({ model, messages: user(text) })).input_tokens,
    tools: async () => value(await send({ tools: [{ name: 'weather', description: 'The weather of a city.', input_schema: weather }], tool_choice: { type: 'tool', name: 'weather' }, max_tokens: 64 })),
    stop: async () => value(await send({ stop_sequences: stops, max_tokens: 40 })),
    unicode: async () => value(await send({ messages: user(unicode) })),
    fifty: async () => (await Promise.all(many.map((t) => send({ messages: user(t) })))).map(value),
    abort: async () => {
      const stream = await send({ stream: true, max_tokens: abortedTokens }, new Anthropic({ ...options, baseURL: slow }))
      for await (const _ of stream) break
      stream.controller.abort()
      return 'left'
    },
    'wrong key': () => send({}, new Anthropic({ ...options, authToken: 'wrong' })),
    'wrong model': async () => value(await send({ model: 'other' })),
    'too long': async () => value(await send({ messages: user(tooLong) })),
  }
}

function withAI() {
  const provider = (apiKey, baseURL = v1) => createOpenAICompatible({ name: 'semmoe', baseURL, apiKey, includeUsage: true, supportsStructuredOutputs: true })
  const semmoe = provider(key)
  const generate = (more = {}) => generateText({ model: semmoe.chatModel(model), prompt: text, maxOutputTokens: tokens, temperature: 0, maxRetries: 0, ...more })
  const counts = (u) => [u.inputTokens, u.outputTokens, u.totalTokens]
  const value = (a) => [a.text, a.finishReason, counts(a.usage), a.toolCalls.map((c) => [c.toolName, c.input])]
  const schema = jsonSchema(weather)
  return {
    chat: async () => value(await generate()),
    'chat stream': async () => {
      let failed
      const result = streamText({ model: semmoe.chatModel(model), prompt: text, maxOutputTokens: tokens, temperature: 0, maxRetries: 0, onError: ({ error }) => { failed = error } })
      let all = ''
      for await (const part of result.textStream) all += part
      if (failed) throw failed
      return [all, await result.finishReason, counts(await result.usage)]
    },
    completion: async () => value(await generate({ model: semmoe.completionModel(model) })),
    tools: async () => value(await generate({ tools: { weather: tool({ description: 'The weather of a city.', inputSchema: schema }) }, toolChoice: { type: 'tool', toolName: 'weather' }, maxOutputTokens: 64 })),
    'tool result': async () => value(await generate({
      prompt: undefined,
      messages: [
        { role: 'user', content: 'How is Rome?' },
        { role: 'assistant', content: [{ type: 'tool-call', toolCallId: 'call_1', toolName: 'weather', input: { city: 'Rome', warm: true } }] },
        { role: 'tool', content: [{ type: 'tool-result', toolCallId: 'call_1', toolName: 'weather', output: { type: 'text', value: 'sunny' } }] },
      ],
    })),
    'JSON schema': async () => (await generateObject({ model: semmoe.chatModel(model), prompt: text, schema, maxOutputTokens: 64, temperature: 0, maxRetries: 0 })).object,
    stop: async () => value(await generate({ stopSequences: stops, maxOutputTokens: 40 })),
    unicode: async () => value(await generate({ prompt: unicode })),
    embeddings: async () => (await embed({ model: semmoe.embeddingModel(model), value: text, maxRetries: 0 })).embedding.length,
    fifty: async () => (await Promise.all(many.map((prompt) => generate({ prompt })))).map((a) => a.text),
    abort: async () => {
      const leave = new AbortController()
      const result = streamText({ model: provider(key, slow + '/v1').chatModel(model), prompt: text, maxOutputTokens: abortedTokens, maxRetries: 0, abortSignal: leave.signal, onError() {}, providerOptions: { semmoe: { ignore_eos: true } } })
      for await (const _ of result.textStream) break
      leave.abort()
      return 'left'
    },
    'wrong key': () => generate({ model: provider('wrong').chatModel(model) }),
    'wrong model': async () => value(await generate({ model: semmoe.chatModel('other') })),
    'too long': async () => value(await generate({ prompt: tooLong })),
  }
}

function withLangChain() {
  const options = { apiKey: key, model, temperature: 0, maxTokens: tokens, maxRetries: 0, configuration: { baseURL: v1 } }
  const chat = (more = {}) => new ChatOpenAI({ ...options, ...more })
  const value = (m) => [m.content, (m.tool_calls ?? []).map((c) => [c.name, c.args]), m.usage_metadata?.total_tokens ?? null]
  return {
    chat: async () => value(await chat().invoke(text)),
    'chat stream': async () => {
      let whole
      for await (const chunk of await chat({ streamUsage: true }).stream(text)) whole = whole ? whole.concat(chunk) : chunk
      return value(whole)
    },
    completion: () => new CompletionOpenAI(options).invoke(text),
    tools: async () => value(await chat({ maxTokens: 64 }).bindTools([weatherTool], { tool_choice: 'weather' }).invoke(text)),
    'tool result': async () => value(await chat().invoke([
      new HumanMessage('How is Rome?'),
      new AIMessage({ content: '', tool_calls: [{ name: 'weather', args: { city: 'Rome', warm: true }, id: 'call_1' }] }),
      new ToolMessage({ content: 'sunny', tool_call_id: 'call_1' }),
    ])),
    'JSON schema': () => chat({ maxTokens: 64 }).withStructuredOutput(weather, { method: 'jsonSchema', name: 'weather' }).invoke(text),
    stop: async () => value(await chat({ maxTokens: 40 }).invoke(text, { stop: stops })),
    unicode: async () => value(await chat().invoke(unicode)),
    responses: async () => (await chat({ useResponsesApi: true, zdrEnabled: true }).invoke(text)).text,
    embeddings: async () => (await new OpenAIEmbeddings({ ...options, model }).embedQuery(text)).length,
    fifty: async () => (await chat().batch(many, {}, { maxConcurrency: many.length })).map((m) => m.content),
    abort: async () => {
      const leave = new AbortController()
      for await (const _ of await chat({ configuration: { baseURL: slow + '/v1' }, maxTokens: abortedTokens, modelKwargs: { ignore_eos: true } }).stream(text, { signal: leave.signal })) break
      leave.abort()
      return 'left'
    },
    'wrong key': () => chat({ apiKey: 'wrong' }).invoke(text),
    'wrong model': async () => value(await chat({ model: 'other' }).invoke(text)),
    'too long': async () => value(await chat().invoke(tooLong)),
  }
}

// describe describes an exception. A client may wrap the one of its HTTP client.
function describe(e) {
  let status = null
  for (let cause = e; cause && status === null; cause = cause.cause ?? cause.lastError) status = cause.status ?? cause.statusCode ?? null
  return { class: e.constructor.name, status, message: `${e.message} ${e.responseBody ?? ''}`.replaceAll(url, 'URL').replaceAll(slow, 'URL') }
}

for (const [client, scenarios] of Object.entries({
  'openai (Node)': withOpenAI(),
  '@anthropic-ai/sdk': withAnthropic(),
  'ai, openai-compatible': withAI(),
  'langchain (Node)': withLangChain(),
})) {
  for (const [scenario, run] of Object.entries(scenarios)) {
    const line = { client, scenario }
    try {
      line.value = await run()
    } catch (e) { // the Go test decides which errors are right
      line.error = describe(e)
    }
    console.log(JSON.stringify(line))
  }
}
process.exit(0) // some clients keep connections, which would keep the process
