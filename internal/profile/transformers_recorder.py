#!/usr/bin/env python3
"""Records which experts the tokens of requests activate, with PyTorch and Hugging Face transformers (5.0 or later).

    python3 transformers_recorder.py --model-path DIR [--host 127.0.0.1] [--port 30000]

`semmoe profile --backend Transformers` starts the program, or calls one that runs. The program serves until it is stopped:

    GET /health    200
    POST /record   {"model": {"layers", "moeLayers", "experts", "expertsPerToken"}, "tokens", "requestTokens",
                    "requests": [{"prompt": TEXT} or {"messages": [{"role", "content"}]}]}

"model" is a part of what `semmoe inspect` prints. Requests are tokenized in order until they have "tokens" tokens. The
response is a sequence of frames, each a line of JSON:

    {"event": "tokenized", "requests": [{"ids": [...]} or {"refused": REASON}]}    the requests in use, before any experts
    {"event": "progress", "done": N, "total": M}
    {"event": "experts", "layer": L, "first": R, "count": N, "bytes": B}           followed by B bytes
    {"event": "end"} or {"event": "error", "message": TEXT}

The bytes are little-endian 16-bit expert numbers of the tokens of N requests from request R on, in the shape [tokens,
experts per token], the heaviest expert of a token first.

The experts are those that the model's own code selects. The program computes no gate. It records the arguments of the
module that receives the numbers and weights of the selected experts or, without such a module, an output with exactly one
weight for each selected expert (Llama 4).

All requests pass through one decoder layer before the next one. So each layer is needed on the device once, and one layer
and the residual streams of the requests suffice there. A checkpoint that exceeds the memory of the machine is offloaded to
--offload-dir, which needs the package accelerate.
"""
import argparse
import contextlib
import glob
import json
import os
import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MAX_BODY = 2 << 30
MEMORY_SHARE = 0.8  # of the available memory that the weights may take


class Failure(Exception):
    """An error that another attempt would repeat."""


class Cancelled(BaseException):
    """Ends the thread of a request."""


def available_memory():
    """Returns the bytes of memory that this process may still allocate, in its machine and its control group."""
    limits = []
    with contextlib.suppress(OSError):
        with open("/proc/meminfo", encoding="ascii") as file:
            limits += [int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable:")]
    for limit, usage in (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):
        with contextlib.suppress(OSError, ValueError):
            with open(f"/sys/fs/cgroup/{limit}", encoding="ascii") as high, open(f"/sys/fs/cgroup/{usage}", encoding="ascii") as low:
                limits.append(int(high.read()) - int(low.read()))
    return min(limits, default=1 << 62)


def find_layers(decoder, count):
    """Returns the path and the list of the decoder layers: the outermost list with a module for each layer."""
    import torch
    found = [(path, module) for path, module in decoder.named_modules() if isinstance(module, torch.nn.ModuleList) and len(module) == count]
    if not found:
        raise Failure(f"{type(decoder).__name__} has no list of {count} layers")
    return min(found, key=lambda entry: entry[0].count("."))


def around_layers(module, layers, prefix=""):
    """Yields the path and the module of each largest part of a model that contains none of the layers, and of each layer."""
    inside = {id(layer) for layer in layers}
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        if id(child) in inside or not any(id(part) in inside for part in child.modules()):
            yield path, child
        else:
            yield from around_layers(child, layers, path)


class Model:
    """A loaded checkpoint whose layers are brought to the device one at a time."""

    def __init__(self, options, facts):
        import torch
        import transformers
        if int(transformers.__version__.split(".")[0]) < 5:
            raise Failure(f"transformers {transformers.__version__} is too old: install transformers 5.0 or later")
        self.torch = torch
        accelerator = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") and torch.accelerator.is_available() else "cpu"
        self.device = torch.device(options.device or accelerator)
        config = transformers.AutoConfig.from_pretrained(options.model_path)
        factory = getattr(transformers, (getattr(config, "architectures", None) or [""])[0], transformers.AutoModelForCausalLM)
        size = sum(os.path.getsize(path) for path in glob.glob(os.path.join(options.model_path, "*.safetensors")))
        memory = options.memory_bytes or available_memory()
        self.offloaded = size > MEMORY_SHARE * memory
        arguments = {"dtype": options.dtype}
        if self.offloaded:
            if not options.offload_dir:
                raise Failure(f"the checkpoint has {size} bytes and {memory} bytes of memory are available: provide more memory, or --offload-dir")
            arguments |= {"device_map": self.device_map(factory, config, facts), "offload_folder": options.offload_dir, "offload_buffers": True}
        self.model = factory.from_pretrained(options.model_path, **arguments).eval()
        self.decoder = self.model.get_decoder()
        _, self.layers = find_layers(self.decoder, facts["layers"])
        if not self.offloaded:
            for _, module in around_layers(self.decoder, self.layers):
                if not any(module is layer for layer in self.layers):
                    module.to(self.device)

    def device_map(self, factory, config, facts):
        """Returns a device map with all layers on disk, and all other modules on the device."""
        with self.torch.device("meta"):
            build = factory._from_config if hasattr(factory, "_from_config") else factory.from_config
            empty = build(config)
        _, layers = find_layers(empty.get_decoder(), facts["layers"])
        on_disk = {id(layer) for layer in layers}
        return {path: "disk" if id(module) in on_disk else str(self.device) for path, module in around_layers(empty, layers)}

    @contextlib.contextmanager
    def resident(self, layer):
        """Keeps the weights of a layer on the device."""
        if not self.offloaded:
            layer.to(self.device)
            yield
            layer.to("cpu")
            return
        # Without this, the hooks of accelerate would read the weights again for each request.
        hooks = [(module, module._hf_hook) for module in layer.modules() if getattr(getattr(module, "_hf_hook", None), "offload", False)]
        for module, hook in hooks:
            hook.pre_forward(module)
            hook.offload = False
        yield
        for module, hook in hooks:
            hook.offload = True
            hook.post_forward(module, None)


class Selection:
    """The experts that one request activates in one layer."""

    def __init__(self, tokens, experts, top):
        self.tokens, self.experts, self.top = tokens, experts, top
        self.chosen = self.dense = None

    def see_arguments(self, module, tensors):
        """Records numbers and weights of the selected experts, if a module receives them."""
        size = self.tokens * self.top
        for index in tensors:
            if index.is_floating_point() or index.is_complex() or index.ndim < 2 or index.shape[-1] != self.top or index.numel() != size:
                continue
            for weights in tensors:
                if weights.is_floating_point() and weights.shape == index.shape:
                    return self.choose(module, index.reshape(-1, self.top), weights.reshape(-1, self.top))

    def choose(self, module, index, weights):
        order = weights.float().argsort(dim=-1, descending=True, stable=True)
        chosen = index.gather(-1, order)
        if self.chosen is not None and not self.chosen.equal(chosen):
            raise Failure(f"{type(module).__name__} receives other experts than an earlier module of the same layer")
        self.chosen = chosen

    def see_output(self, tensors):
        """Records the weights of all experts, if exactly the selected ones are not zero."""
        for weights in tensors:
            if self.dense is None and weights.is_floating_point() and weights.ndim > 1 and weights.shape[-1] == self.experts and weights.numel() == self.tokens * self.experts:
                rows = weights.reshape(-1, self.experts)
                if bool((rows.count_nonzero(dim=-1) == self.top).all()):
                    self.dense = rows.float().abs().topk(self.top, dim=-1).indices

    def bytes(self, layer):
        import torch
        chosen = self.dense if self.chosen is None else self.chosen
        if chosen is None:
            raise Failure(f"layer {layer}: no module selects {self.top} of {self.experts} experts for each token")
        low, high = chosen.aminmax()
        if low < 0 or high >= self.experts:
            raise Failure(f"layer {layer}: the model selects expert {int(low if low < 0 else high)}: it has experts 0 to {self.experts - 1}")
        return chosen.to("cpu", torch.int32).numpy().astype("<u2").tobytes()


class Pass:
    """The forward passes of some requests, in lockstep: one layer for all requests, then the next one.

    Each request has a thread, so that the model's own code runs unchanged. Only one thread runs at a time.
    """

    def __init__(self, model, facts, requests):
        self.model, self.facts, self.requests = model, facts, requests
        self.turns = [threading.Semaphore(0) for _ in requests]
        self.back = threading.Semaphore(0)
        self.current, self.cancelled, self.failure = 0, False, None
        self.at = [-1] * len(requests)  # the layer that each request is about to enter
        self.selection = None

    def run(self, emit):
        """Calls emit(layer, bytes) for each MoE layer, and emit(layer, None) for each dense one."""
        torch, moe = self.model.torch, set(self.facts["moeLayers"])
        last = max(moe)
        hooks = [layer.register_forward_pre_hook(lambda *_, number=number: self.enter(number)) for number, layer in enumerate(self.model.layers)]
        hooks += [hook for layer in self.model.layers for module in layer.modules() if module is not layer for hook in (
            module.register_forward_pre_hook(self.before, with_kwargs=True), module.register_forward_hook(self.after))]
        threads = [threading.Thread(target=self.forward, args=(request,), daemon=True) for request in range(len(self.requests))]
        try:
            for request, thread in enumerate(threads):
                thread.start()
                self.resume(request)
            for number, layer in enumerate(self.model.layers[:last + 1]):
                parts = []
                with self.model.resident(layer):
                    for request, ids in enumerate(self.requests):
                        if self.at[request] != number:
                            raise Failure(f"the model runs layer {self.at[request]} in place of layer {number}")
                        self.selection = Selection(len(ids), self.facts["experts"], self.facts["expertsPerToken"]) if number in moe else None
                        self.resume(request)
                        if self.selection is not None:
                            parts.append(self.selection.bytes(number))
                emit(number, b"".join(parts) if number in moe else None)
        finally:
            self.cancelled = True
            for turn in self.turns:
                turn.release()
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
            for hook in hooks:
                hook.remove()
        if torch.device(self.model.device).type == "cuda":
            torch.cuda.empty_cache()

    def resume(self, request):
        self.current = request
        self.turns[request].release()
        self.back.acquire()
        if self.failure is not None:
            raise self.failure

    def forward(self, request):
        torch = self.model.torch
        self.turns[request].acquire()
        try:
            if not self.cancelled:
                with torch.no_grad():
                    self.model.decoder(input_ids=torch.tensor([self.requests[request]], device=self.model.device), use_cache=False)
        except Cancelled:
            return
        except BaseException as error:  # passed on to the thread of run
            self.failure = error
        if not self.cancelled:
            self.at[request] = None
            self.back.release()

    def enter(self, number):
        """Suspends the thread of the current request before a layer."""
        request = self.current
        self.at[request] = number
        self.back.release()
        self.turns[request].acquire()
        if self.cancelled:
            raise Cancelled

    def before(self, module, args, kwargs):
        if self.selection is not None:
            self.selection.see_arguments(module, [value for value in (*args, *kwargs.values()) if isinstance(value, self.model.torch.Tensor)])

    def after(self, _module, _args, output):
        if self.selection is not None:
            values = output if isinstance(output, (tuple, list)) else (output,)
            self.selection.see_output([value for value in values if isinstance(value, self.model.torch.Tensor)])


def tokenize(options, body):
    """Yields the token IDs of requests, or the reason why one is refused, until the tokens suffice."""
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(options.model_path)
    tokens = 0
    for request in body["requests"]:
        try:
            if "prompt" in request:
                ids = tokenizer(request["prompt"])["input_ids"]
            else:
                text = tokenizer.apply_chat_template(request["messages"], tokenize=False, add_generation_prompt=True)
                ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        except Exception as error:
            yield {"refused": f"{type(error).__name__}: {error}"}
            continue
        ids = ids[:body["requestTokens"]]
        if not ids:
            yield {"refused": "the text contains no tokens"}
            continue
        yield {"ids": ids}
        tokens += len(ids)
        if tokens >= body["tokens"]:
            return


class Recorder:
    """Answers POST /record. The model is loaded by the first one."""

    def __init__(self, options):
        self.options, self.model, self.busy = options, None, threading.Lock()

    def record(self, body, send):
        facts = body["model"]
        answers = list(tokenize(self.options, body))
        send({"event": "tokenized", "requests": answers})
        requests = [(number, answer["ids"]) for number, answer in enumerate(answers) if "ids" in answer]
        # A pass that fails leaves layers on the device: the next recording then loads the model again.
        model, self.model = self.model or Model(self.options, facts), None
        step, done = self.options.in_flight, 0
        total = facts["layers"] * -(-len(requests) // step)
        for start in range(0, len(requests), step):
            part = [ids for _, ids in requests[start:start + step]]

            def emit(layer, data):
                nonlocal done
                if data is not None:
                    send({"event": "experts", "layer": layer, "first": start, "count": len(part), "bytes": len(data)}, data)
                done += 1
                send({"event": "progress", "done": done, "total": total})
            Pass(model, facts, part).run(emit)
        self.model = model


def handler(recorder):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer(200 if self.path == "/health" else 404, "")

        def do_POST(self):
            length = self.headers.get("Content-Length", "")
            if self.path != "/record" or not length.isdigit():
                return self.answer(404, "POST /record with a Content-Length is the only route")
            if int(length) > MAX_BODY:
                return self.answer(413, f"the body has {length} bytes: the maximum is {MAX_BODY}")
            if not recorder.busy.acquire(blocking=False):
                return self.answer(503, "another recording runs")
            try:
                body = json.loads(self.rfile.read(int(length)))
                self.send_response(200)
                self.end_headers()
                self.stream(body)
            finally:
                recorder.busy.release()

        def stream(self, body):
            def send(frame, data=b""):
                self.wfile.write(json.dumps(frame).encode() + b"\n" + data)
                self.wfile.flush()
            try:
                recorder.record(body, send)
                send({"event": "end"})
            except OSError as error:
                if isinstance(error, ConnectionError):
                    return  # the client has left
                send({"event": "error", "message": f"{type(error).__name__}: {error}"})
            except Failure as error:
                send({"event": "error", "message": str(error)})
            except Exception as error:
                import traceback
                traceback.print_exc()
                send({"event": "error", "message": f"{type(error).__name__}: {error}"})

        def answer(self, status, text):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_):
            pass  # health checks
    return Handler


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], prog="transformers_recorder.py")
    parser.add_argument("--model-path", required=True, help="directory of the checkpoint")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, default=30000, help="port to listen on; 0 for a free one (default 30000)")
    parser.add_argument("--device", help="device of PyTorch (default: the accelerator, or cpu)")
    parser.add_argument("--dtype", default="auto", help="data type of the arithmetic, such as float32 (default: that of the checkpoint)")
    parser.add_argument("--offload-dir", help="directory for weights that exceed the memory (default: such a checkpoint is refused)")
    parser.add_argument("--memory-bytes", type=int, help="memory for weights, in bytes (default: the available memory)")
    parser.add_argument("--in-flight", type=int, default=512, help="requests that pass through a layer together (default 512)")
    options = parser.parse_args()
    if options.in_flight < 1:
        parser.error("--in-flight must be at least 1")
    server = ThreadingHTTPServer((options.host, options.port), handler(Recorder(options)))
    server.daemon_threads = True
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print(json.dumps({"event": "listening", "port": server.server_address[1]}), flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
