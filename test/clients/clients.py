"""Runs scenarios with the Python clients against a server, and prints one JSON line for each client and scenario.

usage: clients.py URL KEY SLOW   (the server's address without a path, its API key, and a server whose long answers take seconds)

A line is {"client", "scenario", "value"} for an answer, or {"client", "scenario", "error": {"class", "status", "message"}}. Values contain
what a program reads from the answer: no identifiers, times or lengths of chunks, which differ between two equal answers.
"""

import asyncio
import json
import os
import sys
import warnings

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no downloads at import
os.environ["LANGCHAIN_TRACING_V2"] = "false"
warnings.filterwarnings("ignore")

import anthropic
import instructor
import langchain_openai
import litellm
import openai
import pydantic
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

litellm.telemetry = False
litellm.suppress_debug_info = True
litellm.num_retries = 0

URL, KEY, SLOW = sys.argv[1:4]
MODEL = "tiny"
V1, SLOW_V1 = URL + "/v1", SLOW + "/v1"
TEXT = "func main() {"
UNICODE = "Grüße, 世界! 🦊 \u202eabc \u0000 e\u0301"
TOO_LONG = "func main() { " * 3000
STOPS = ["public", "};"]
MANY = 50
TOKENS = 12
# A client leaves a stream of this length after its first event.
ABORTED_TOKENS = 900
TIMEOUT = 120

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}, "warm": {"type": "boolean"}},
    "required": ["city", "warm"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "The weather of a city.", "parameters": WEATHER}}
CHOICE = {"type": "function", "function": {"name": "weather"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER, "strict": True}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome", "warm": true}'}}
# The history of a tool call: the assistant's content is null.
HISTORY = [
    {"role": "user", "content": "How is Rome?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
]


class Weather(pydantic.BaseModel):
    """The weather of a city."""

    city: str = pydantic.Field(json_schema_extra={"enum": ["Rome", "Oslo"]})
    warm: bool


def user(text):
    return [{"role": "user", "content": text}]


def usage(u):
    """The token counts of OpenAI's usage."""
    return [u.prompt_tokens, u.completion_tokens, u.total_tokens]


def rounded(logprob):
    return round(logprob, 2)


def calls(tool_calls):
    return [[c.function.name, json.loads(c.function.arguments)] for c in tool_calls or []]


def chat_value(answer):
    choices = [[c.index, c.message.role, c.message.content, calls(c.message.tool_calls), c.finish_reason] for c in answer.choices]
    return {"model": answer.model, "choices": choices, "usage": usage(answer.usage)}


def chat_stream_value(chunks):
    text, finish, counted, events = "", None, None, 0
    for chunk in chunks:
        events += 1
        for c in chunk.choices:
            text += c.delta.content or ""
            finish = c.finish_reason or finish
        if getattr(chunk, "usage", None):
            counted = usage(chunk.usage)
    return {"text": text, "finish": finish, "usage": counted, "streamed": events > 2}


def first_then_close(stream):
    """Reads the first event of a stream and leaves."""
    next(iter(stream))
    stream.close()
    return "left"


def with_openai():
    client = openai.OpenAI(base_url=V1, api_key=KEY, max_retries=0, timeout=TIMEOUT)

    def chat(text=TEXT, **more):
        return client.chat.completions.create(**{"model": MODEL, "messages": user(text), "max_tokens": TOKENS, "temperature": 0, **more})

    def complete(text=TEXT, **more):
        return client.completions.create(**{"model": MODEL, "prompt": text, "max_tokens": TOKENS, "temperature": 0, **more})

    def respond(**more):
        return client.responses.create(**{"model": MODEL, "input": TEXT, "max_output_tokens": TOKENS, "temperature": 0, "store": False, **more})

    def left():
        slow = openai.OpenAI(base_url=SLOW_V1, api_key=KEY, max_retries=0, timeout=TIMEOUT)
        more = {"max_tokens": ABORTED_TOKENS, "extra_body": {"ignore_eos": True}}
        return first_then_close(slow.chat.completions.create(model=MODEL, messages=user(TEXT), stream=True, **more))

    def completion_value(answer):
        return {"choices": [[c.index, c.text, c.finish_reason] for c in answer.choices], "usage": usage(answer.usage)}

    def completion_stream():
        text, counted = "", None
        for chunk in complete(stream=True, stream_options={"include_usage": True}):
            text += "".join(c.text for c in chunk.choices)
            counted = usage(chunk.usage) if chunk.usage else counted
        return [text, counted]

    def completion_logprobs():
        logprobs = complete(logprobs=2).choices[0].logprobs
        tops = [{token: rounded(p) for token, p in top.items()} for top in logprobs.top_logprobs]
        return [logprobs.tokens, [rounded(p) for p in logprobs.token_logprobs], tops, logprobs.text_offset]

    def chat_logprobs():
        content = chat(logprobs=True, top_logprobs=2).choices[0].logprobs.content
        return [[t.token, rounded(t.logprob), [[top.token, rounded(top.logprob)] for top in t.top_logprobs]] for t in content]

    def response_value(answer):
        return [answer.status, answer.output_text, answer.usage.input_tokens, answer.usage.output_tokens]

    def response_stream():
        text, kinds, last = "", [], None
        for event in respond(stream=True):
            if event.type == "response.output_text.delta":
                text += event.delta
            if not kinds or kinds[-1] != event.type:
                kinds.append(event.type)
            last = getattr(event, "response", None) or last
        return [text, kinds, response_value(last)]

    async def fifty():
        async with openai.AsyncOpenAI(base_url=V1, api_key=KEY, max_retries=0, timeout=TIMEOUT) as many:
            async def one(n):
                answer = await many.chat.completions.create(model=MODEL, messages=user(f"func f{n}() {{"), max_tokens=TOKENS, temperature=0)
                return answer.choices[0].message.content

            return await asyncio.gather(*(one(n) for n in range(MANY)))

    return {
        "models": lambda: [[m.id, m.object, m.owned_by] for m in client.models.list()],
        "chat": lambda: chat_value(chat()),
        "chat stream": lambda: chat_stream_value(chat(stream=True, stream_options={"include_usage": True})),
        "completion": lambda: completion_value(complete()),
        "completion stream": completion_stream,
        "completion of ids": lambda: completion_value(complete([1, 2, 3])),
        "tools": lambda: chat_value(chat(tools=[TOOL], tool_choice=CHOICE, max_tokens=64)),
        "tool result": lambda: chat_value(chat(messages=HISTORY)),
        "JSON schema": lambda: chat_value(chat(response_format=SCHEMA, max_tokens=64)),
        "parse": lambda: client.chat.completions.parse(model=MODEL, messages=user(TEXT), response_format=Weather, temperature=0, max_tokens=64).choices[0].message.parsed.model_dump(),
        "n": lambda: chat_value(chat(n=2)),
        "logprobs": completion_logprobs,
        "chat logprobs": chat_logprobs,
        "stop": lambda: chat_value(chat(stop=STOPS, max_tokens=40)),
        "unicode": lambda: chat_value(chat(UNICODE)),
        "responses": lambda: response_value(respond(instructions="Be short.")),
        "responses stream": response_stream,
        "embeddings": lambda: len(client.embeddings.create(model=MODEL, input=TEXT).data),
        "fifty": lambda: asyncio.run(fifty()),
        "abort": left,
        "wrong key": lambda: openai.OpenAI(base_url=V1, api_key="wrong", max_retries=0).models.list().data,
        "wrong model": lambda: chat_value(chat(model="other")),
        "too long": lambda: chat_value(chat(TOO_LONG)),
        "answer too long": lambda: chat_value(chat(max_tokens=100000)),
        "wrong type": lambda: chat_value(chat(max_tokens="many")),
    }


def with_anthropic():
    client = anthropic.Anthropic(base_url=URL, auth_token=KEY, api_key=None, max_retries=0, timeout=TIMEOUT)

    def arguments(text=TEXT, **more):
        return {"model": MODEL, "messages": user(text), "max_tokens": TOKENS, "extra_body": {"temperature": 0}, **more}

    def value(message):
        content = [[b.type, b.text if b.type == "text" else [b.name, b.input]] for b in message.content]
        return [message.role, content, message.stop_reason, message.usage.input_tokens, message.usage.output_tokens]

    def message(*args, **more):
        return value(client.messages.create(**arguments(*args, **more)))

    def stream():
        with client.messages.stream(**arguments()) as events:
            text = "".join(events.text_stream)
            return [text, value(events.get_final_message())]

    def left():
        slow = anthropic.Anthropic(base_url=SLOW, auth_token=KEY, api_key=None, max_retries=0, timeout=TIMEOUT)
        return first_then_close(slow.messages.create(**arguments(max_tokens=ABORTED_TOKENS), stream=True))

    async def fifty():
        async with anthropic.AsyncAnthropic(base_url=URL, auth_token=KEY, api_key=None, max_retries=0, timeout=TIMEOUT) as many:
            answers = await asyncio.gather(*(many.messages.create(**arguments(f"func f{n}() {{")) for n in range(MANY)))
            return [value(answer) for answer in answers]

    tool = {"name": "weather", "description": "The weather of a city.", "input_schema": WEATHER}
    return {
        "messages": message,
        "messages stream": stream,
        "system": lambda: message(system="Be short."),
        "count tokens": lambda: client.messages.count_tokens(model=MODEL, messages=user(TEXT)).input_tokens,
        "tools": lambda: message(tools=[tool], tool_choice={"type": "tool", "name": "weather"}, max_tokens=64),
        "stop": lambda: message(stop_sequences=STOPS, max_tokens=40),
        "unicode": lambda: message(UNICODE),
        "fifty": lambda: asyncio.run(fifty()),
        "abort": left,
        "wrong key": lambda: anthropic.Anthropic(base_url=URL, auth_token="wrong", api_key=None, max_retries=0).messages.create(**arguments()).id,
        "wrong model": lambda: message(model="other"),
        "too long": lambda: message(TOO_LONG),
    }


def with_litellm():
    def arguments(text=TEXT, **more):
        return {"model": "openai/" + MODEL, "api_base": V1, "api_key": KEY, "messages": user(text), "max_tokens": TOKENS, "temperature": 0, "timeout": TIMEOUT, **more}

    def chat(*args, **more):
        return litellm.completion(**arguments(*args, **more))

    def completion():
        more = arguments(model="text-completion-openai/" + MODEL, prompt=TEXT)
        del more["messages"]
        answer = litellm.text_completion(**more)
        return [[c.text, c.finish_reason] for c in answer.choices]

    def response():
        answer = litellm.responses(model="openai/" + MODEL, api_base=V1, api_key=KEY, input=TEXT, max_output_tokens=TOKENS, temperature=0, store=False)
        return [answer.status, [part.text for item in answer.output for part in item.content]]

    async def fifty():
        answers = await asyncio.gather(*(litellm.acompletion(**arguments(f"func f{n}() {{")) for n in range(MANY)))
        return [answer.choices[0].message.content for answer in answers]

    def left():
        stream = chat(api_base=SLOW_V1, stream=True, max_tokens=ABORTED_TOKENS, extra_body={"ignore_eos": True})
        next(iter(stream))
        stream.completion_stream.close()
        return "left"

    return {
        "chat": lambda: chat_value(chat()),
        "chat stream": lambda: chat_stream_value(chat(stream=True, stream_options={"include_usage": True})),
        "completion": completion,
        "tools": lambda: chat_value(chat(tools=[TOOL], tool_choice=CHOICE, max_tokens=64)),
        "tool result": lambda: chat_value(chat(messages=HISTORY)),
        "JSON schema": lambda: chat_value(chat(response_format=SCHEMA, max_tokens=64)),
        "n": lambda: chat_value(chat(n=2)),
        "stop": lambda: chat_value(chat(stop=STOPS, max_tokens=40)),
        "unicode": lambda: chat_value(chat(UNICODE)),
        "responses": response,
        "embeddings": lambda: len(litellm.embedding(model="openai/" + MODEL, api_base=V1, api_key=KEY, input=[TEXT]).data),
        "fifty": lambda: asyncio.run(fifty()),
        "abort": left,
        "wrong key": lambda: chat_value(chat(api_key="wrong")),
        "wrong model": lambda: chat_value(chat(model="openai/other")),
        "too long": lambda: chat_value(chat(TOO_LONG)),
        "answer too long": lambda: chat_value(chat(max_tokens=100000)),
    }


def with_langchain():
    def model(**more):
        return langchain_openai.ChatOpenAI(**{"base_url": V1, "api_key": KEY, "model": MODEL, "temperature": 0, "max_tokens": TOKENS, "max_retries": 0, "timeout": TIMEOUT, **more})

    def value(message):
        return [message.content, [[c["name"], c["args"]] for c in message.tool_calls], message.usage_metadata and message.usage_metadata["total_tokens"]]

    def stream():
        whole = None
        for chunk in model(stream_usage=True).stream(TEXT):
            whole = chunk if whole is None else whole + chunk
        return value(whole)

    def left():
        return first_then_close(model(base_url=SLOW_V1, max_tokens=ABORTED_TOKENS, extra_body={"ignore_eos": True}).stream(TEXT))

    history = [HumanMessage("How is Rome?"), AIMessage("", tool_calls=[{"name": "weather", "args": {"city": "Rome", "warm": True}, "id": "call_1"}]), ToolMessage("sunny", tool_call_id="call_1")]
    return {
        "chat": lambda: value(model().invoke(TEXT)),
        "chat stream": stream,
        "completion": lambda: langchain_openai.OpenAI(base_url=V1, api_key=KEY, model=MODEL, temperature=0, max_tokens=TOKENS, max_retries=0).invoke(TEXT),
        "tools": lambda: value(model(max_tokens=64).bind_tools([TOOL], tool_choice="weather").invoke(TEXT)),
        "tool result": lambda: value(model().invoke(history)),
        "JSON schema": lambda: model(max_tokens=64).with_structured_output(Weather, method="json_schema").invoke(TEXT).model_dump(),
        "n": lambda: [g.message.content for g in model(n=2).generate([[HumanMessage(TEXT)]]).generations[0]],
        "chat logprobs": lambda: len(model(logprobs=True).invoke(TEXT).response_metadata["logprobs"]["content"]),
        "stop": lambda: value(model(max_tokens=40).invoke(TEXT, stop=STOPS)),
        "unicode": lambda: value(model().invoke(UNICODE)),
        "responses": lambda: model(use_responses_api=True, store=False).invoke(TEXT).text,
        "embeddings": lambda: len(langchain_openai.OpenAIEmbeddings(base_url=V1, api_key=KEY, model=MODEL, check_embedding_ctx_length=False, max_retries=0).embed_query(TEXT)),
        "fifty": lambda: [m.content for m in model().batch([f"func f{n}() {{" for n in range(MANY)], {"max_concurrency": MANY})],
        "abort": left,
        "wrong key": lambda: value(model(api_key="wrong").invoke(TEXT)),
        "wrong model": lambda: value(model(model="other").invoke(TEXT)),
        "too long": lambda: value(model().invoke(TOO_LONG)),
    }


def with_instructor():
    def create(mode, key=KEY, model=MODEL, text=TEXT):
        client = instructor.from_openai(openai.OpenAI(base_url=V1, api_key=key, max_retries=0, timeout=TIMEOUT), mode=mode)
        return client.chat.completions.create(model=model, messages=user(text), response_model=Weather, max_retries=0, max_tokens=64, temperature=0).model_dump()

    return {
        "tools": lambda: create(instructor.Mode.TOOLS),
        "JSON schema": lambda: create(instructor.Mode.JSON_SCHEMA),
        "wrong key": lambda: create(instructor.Mode.JSON_SCHEMA, key="wrong"),
        "wrong model": lambda: create(instructor.Mode.JSON_SCHEMA, model="other"),
        "too long": lambda: create(instructor.Mode.JSON_SCHEMA, text=TOO_LONG),
    }


def with_llama_index():
    def model(**more):
        return OpenAILike(**{"api_base": V1, "api_key": KEY, "model": MODEL, "is_chat_model": True, "temperature": 0, "max_tokens": TOKENS, "max_retries": 0, "timeout": TIMEOUT, **more})

    def chat(text=TEXT, more=None, **arguments):
        return model(**arguments).chat([ChatMessage(role="user", content=text)], **(more or {})).message.content

    def left():
        stream = model(api_base=SLOW_V1, max_tokens=ABORTED_TOKENS, additional_kwargs={"extra_body": {"ignore_eos": True}}).stream_chat([ChatMessage(role="user", content=TEXT)])
        return first_then_close(stream)

    async def fifty():
        many = model()
        answers = await asyncio.gather(*(many.achat([ChatMessage(role="user", content=f"func f{n}() {{")]) for n in range(MANY)))
        return [answer.message.content for answer in answers]

    return {
        "chat": chat,
        "chat stream": lambda: "".join(part.delta or "" for part in model().stream_chat([ChatMessage(role="user", content=TEXT)])),
        "completion": lambda: model(is_chat_model=False).complete(TEXT).text,
        "completion stream": lambda: "".join(part.delta or "" for part in model(is_chat_model=False).stream_complete(TEXT)),
        "stop": lambda: chat(max_tokens=40, more={"stop": STOPS}),
        "unicode": lambda: chat(UNICODE),
        "fifty": lambda: asyncio.run(fifty()),
        "abort": left,
        "wrong key": lambda: chat(api_key="wrong"),
        "wrong model": lambda: chat(model="other"),
        "too long": lambda: chat(TOO_LONG),
    }


def error(e):
    """Describes an exception. A client may wrap the one of its HTTP client."""
    cause, status = e, None
    while cause is not None and status is None:
        status = getattr(cause, "status_code", None)
        cause = cause.__cause__ or cause.__context__
    return {"class": type(e).__name__, "status": status, "message": str(e).replace(URL, "URL").replace(SLOW, "URL")}


def main():
    for client, scenarios in {
        "openai (Python)": with_openai,
        "anthropic (Python)": with_anthropic,
        "litellm": with_litellm,
        "langchain (Python)": with_langchain,
        "instructor": with_instructor,
        "llama-index": with_llama_index,
    }.items():
        for scenario, run in scenarios().items():
            line = {"client": client, "scenario": scenario}
            try:
                line["value"] = run()
            except Exception as e:  # the Go test decides which errors are right
                line["error"] = error(e)
            print(json.dumps(line), flush=True)


main()
