"""The places where vLLM 0.22.1 and 0.32.0 call this package. Each function names the module of vLLM that it changes.

vLLM calls register in every process of a server (vllm/plugins/__init__.py): the API servers, the engine cores, the workers.
What a release lacks is logged and left out: the plug-in never keeps an engine from starting or a step from finishing.
"""

import functools
import logging
import multiprocessing
import os

import numpy as np

from semmoe_vllm import counters
from semmoe_vllm.rows import Rows

logger = logging.getLogger("vllm.semmoe")

# ASK marks a request that asks for routed experts, in SamplingParams.extra_args.
ASK = "semmoe_routed_experts"
# FIELD is the member of a request's body by which a client asks.
FIELD = "return_routed_experts"
# The bound on the routed experts that one engine core holds, or has handed to an API server, of unfinished requests.
BUDGET_VARIABLE = "SEMMOE_VLLM_ROUTED_EXPERTS_MIB"
DEFAULT_BUDGET_MIB = 512

_registered = False


def register():
    """Installs the plug-in in this process. Further calls do nothing."""
    global _registered
    if _registered:
        return
    _registered = True
    _install("the counters of local activations", _serve_counters)
    _install("capturing experts", _capture_in_workers)
    _install("routed experts in answers", _answer_routed_experts)
    _install("--enable-return-routed-experts where vLLM refuses it", _accept_flag)
    if not multiprocessing.current_process().name.startswith(("EngineCore", "VllmWorker")):
        _install("routed experts by request", _mark_requests)  # engines never see the bodies of requests


def _install(what, install):
    try:
        install()
    except Exception as error:  # of any kind: the engine must start
        logger.warning("semmoe-vllm: failed to install %s: %s: %s", what, type(error).__name__, error)


def _wrap(owner, name, wrapper):
    """Replaces a function by wrapper(original), once."""
    original = getattr(owner, name)
    if not getattr(original, "of_semmoe", False):
        wrapped = functools.wraps(original)(wrapper(original))
        wrapped.of_semmoe = True
        setattr(owner, name, wrapped)


# --- /metrics -----------------------------------------------------------------------------------------------------------


def _serve_counters():
    """Adds the collector to the registries behind /metrics.

    vllm/v1/metrics/prometheus.py serves prometheus_client's REGISTRY, or, with several API servers, a separate registry
    with a MultiProcessCollector. Data parallelism has as many API servers as ranks by default (vllm/entrypoints/cli/serve.py).
    """
    from prometheus_client import REGISTRY, multiprocess

    collector = counters.Collector(counters.directory())
    REGISTRY.register(collector)

    def wrapper(original):
        def init(self, registry, path=None):
            original(self, registry, path)
            if registry is not None and registry is not REGISTRY:
                registry.register(collector)

        return init

    _wrap(multiprocess.MultiProcessCollector, "__init__", wrapper)


# --- workers ------------------------------------------------------------------------------------------------------------


def _capture_in_workers():
    """Follows each worker once its device is known (vllm/v1/worker/worker_base.py).

    vLLM may load plug-ins in the middle of WorkerWrapperBase.init_worker; init_device comes after it, before load_model.
    """
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    def wrapper(original):
        def init_device(self, *args, **kwargs):
            result = original(self, *args, **kwargs)
            _install("capturing experts in a worker", lambda: WorkerCapture(self.worker).follow())
            return result

        return init_device

    _wrap(WorkerWrapperBase, "init_device", wrapper)


class WorkerCapture:
    """Captures the experts that a worker's model chooses, in each step."""

    def __init__(self, worker):
        self.worker = worker
        self.config = worker.vllm_config
        self.capture = None
        self._restore = []
        self._asked = set()
        self._step = None
        self._failed = False

    def follow(self):
        """Wraps the methods of the worker."""
        worker = self.worker
        worker.semmoe_capture = self
        load_model, execute_model, sample_tokens = worker.load_model, worker.execute_model, worker.sample_tokens

        def load(*args, **kwargs):
            result = load_model(*args, **kwargs)
            _install("capturing experts of the model", self.attach)
            return result

        def execute(scheduler_output):
            if self.capture is None:
                return execute_model(scheduler_output)
            self.capture.begin()
            output = execute_model(scheduler_output)
            self._guard(self._computed, scheduler_output)
            if output is not None:
                self._guard(self._hand_over, output)
            return output

        def sample(*args, **kwargs):
            output = sample_tokens(*args, **kwargs)
            if self.capture is not None:
                self._guard(self._hand_over, output)
            return output

        worker.load_model, worker.execute_model, worker.sample_tokens = load, execute, sample

    def attach(self):
        """Follows the MoE layers of the loaded model."""
        self.detach()
        found = _moe_layers(self.worker.model_runner.get_model())
        if not found:
            return
        if compiled(self.config):
            logger.warning("semmoe-vllm: counts no activations: on CPUs it needs --enforce-eager")
            return
        from semmoe_vllm.capture import Capture

        parallel = self.config.parallel_config
        rank, part, parts = parallel.data_parallel_rank, self.worker.rank % parallel.tensor_parallel_size, parallel.tensor_parallel_size
        layers = [_describe(layer) for layer in found]
        shared = counters.Counters(counters.directory(), rank, part, [layer.index for layer in layers])
        self.capture = Capture(
            layers, self.config.scheduler_config.max_num_batched_tokens, layers[0].local.device, rank, part, parts,
            _tokens_of_ranks, shared.publish,
        )  # fmt: skip
        # The ids of a load balancer's slots are not those of the model's experts.
        self._returns = part == 0 and returns(self.config) and all(layer.router.eplb_state is None for layer in found)
        self._layers, self._dtype = shape(self.config)
        for i, layer in enumerate(found):
            self._follow_router(i, layer.router)
        logger.info("semmoe-vllm: counts the activations of %d MoE layers, rank %d", len(layers), rank)

    def detach(self):
        """Stops following the MoE layers."""
        for router in self._restore:
            del router.select_experts  # the wrapper: what is left is the method of the class
        self._restore, self.capture = [], None

    def _follow_router(self, i, router):
        select, record = router.select_experts, self.capture.record

        def select_experts(*args, **kwargs):
            chosen = select(*args, **kwargs)
            if not self._failed:
                try:
                    record(i, chosen[1])
                except Exception:
                    self._fail()
            return chosen

        router.select_experts = select_experts
        self._restore.append(router)

    def _guard(self, step, argument):
        if not self._failed:
            try:
                step(argument)
            except Exception:
                self._fail()

    def _fail(self):
        self._failed = True
        logger.exception("semmoe-vllm: failed to follow a step; the counters stay at their values")

    def _computed(self, scheduler_output):
        """Counts a step after its forward pass."""
        self._step = scheduler_output
        if scheduler_output.total_num_scheduled_tokens > 0:
            self.capture.count(scheduler_output.total_num_scheduled_tokens)
        if scheduler_output.finished_req_ids:
            # Each finished request is in the next step, which has no tokens where nothing else runs (SchedulerInterface.has_requests).
            self.capture.flush()
        if not self._returns:
            return
        self._asked.difference_update(scheduler_output.finished_req_ids)
        for request in scheduler_output.scheduled_new_reqs:
            if asks(request.sampling_params):
                self._asked.add(request.req_id)

    def _hand_over(self, output):
        """Attaches the rows of the requests that ask for them to what the worker returns for the step.

        Both model runners order the tokens of a step by the request ids of its ModelRunnerOutput, which asynchronous outputs
        hold (vllm/v1/worker/gpu_model_runner.py, vllm/v1/worker/gpu/async_utils.py).
        """
        step, self._step = self._step, None
        if step is None or not self._asked:
            return
        for name in ("model_runner_output", "_model_runner_output"):
            output = getattr(output, name, output)
        position, spans = 0, {}
        for request_id in getattr(output, "req_ids", None) or ():
            count = step.num_scheduled_tokens.get(request_id, 0)
            if count and request_id in self._asked:
                spans[request_id] = position, position + count
            position += count
        rows = self.capture.rows(position, self._layers, self._dtype) if spans else None
        if rows is not None:
            # Copies: a view would keep the rows of the whole step.
            output.semmoe_rows = {request_id: rows[start:end].copy() for request_id, (start, end) in spans.items()}


class MoELayer:
    """An MoE layer of vLLM: its index in the model, the router that chooses experts, and the module that holds them."""

    def __init__(self, index, router, experts, monolithic):
        self.index, self.router, self.experts, self.monolithic = index, router, experts, monolithic


def _moe_layers(model):
    """Returns the MoE layers of a model, in order.

    vllm/model_executor/layers/fused_moe/runner/moe_runner.py: in 0.32.0 a MoERunner holds the experts. In 0.22.1 it is a member of the
    module that does (FusedMoE, vllm/model_executor/layers/fused_moe/layer.py).
    """
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    found = []
    for module in model.modules():
        if isinstance(module, MoERunner) and hasattr(module, "routed_experts"):
            found.append(MoELayer(module.layer_id, module.router, module.routed_experts, module.is_monolithic))
        elif isinstance(getattr(module, "runner", None), MoERunner) and hasattr(module, "quant_method"):
            found.append(MoELayer(module.layer_id, module.router, module, module.quant_method.is_monolithic))
    if any(layer.monolithic for layer in found):
        raise ValueError("the kernel of the MoE layers chooses experts itself")
    return sorted(found, key=lambda layer: layer.index)


def _describe(layer):
    """Describes an MoE layer. The ranks of a tensor-parallel group compute the attention of the same tokens."""
    import torch
    from vllm.distributed import get_tp_group
    from semmoe_vllm.capture import Layer

    experts, expert_map = layer.experts.global_num_experts, layer.experts.expert_map
    if expert_map is None:
        device = next(layer.experts.parameters()).device
        return Layer(layer.index, layer.router.top_k, torch.ones(experts, dtype=torch.bool, device=device))
    local = (expert_map >= 0).to(torch.int32)
    return Layer(layer.index, layer.router.top_k, get_tp_group().all_reduce(local) > 0)


def _tokens_of_ranks():
    """Returns the tokens of the data-parallel ranks and the sizes of gathered shards (vllm/forward_context.py)."""
    from vllm.forward_context import get_forward_context

    metadata = get_forward_context().dp_metadata
    if metadata is None:
        return None, None
    return metadata.num_tokens_across_dp_cpu.tolist(), metadata.local_sizes


# --- what a configuration allows ----------------------------------------------------------------------------------------


def compiled(config):
    """Reports whether a compiler traces the MoE layers, and would trace the plug-in.

    Elsewhere than on CPUs the layers are opaque to the compiler (MoERunner._select_forward).
    """
    from vllm.config import CompilationMode
    from vllm.platforms import current_platform

    return current_platform.is_cpu() and config.compilation_config.mode != CompilationMode.NONE


def returns(config):
    """Reports whether the plug-in can return routed experts, and vLLM does not itself."""
    auxiliary = getattr(config, "aux_output_config", None)  # 0.22.1 has none: there the plug-in counts only
    return auxiliary is not None and not auxiliary.enabled and obstacle(config) is None


def obstacle(config):
    """Returns why the plug-in cannot return routed experts, or None."""
    parallel = config.parallel_config
    if not config.model_config.is_moe or config.model_config.runner_type != "generate":
        return "the model is no MoE model that generates text"
    if config.speculative_config is not None:
        return "speculative decoding computes tokens that it rejects"
    if max(parallel.pipeline_parallel_size, parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size) > 1:
        return "pipeline and context parallelism spread the experts of a token over workers"
    if compiled(config):
        return "on CPUs it needs --enforce-eager"
    return None


def shape(config):
    """Returns the number of the model's layers and the type of routed experts, as vLLM itself has it."""
    model = config.model_config
    return model.get_total_num_hidden_layers(), np.uint8 if model.get_num_experts() <= 256 else np.uint16


def _accept_flag():
    """Lets --enable-return-routed-experts mean this plug-in where vLLM refuses it.

    VllmConfig._verify_aux_output_compatibility (vllm/config/vllm.py) refuses it on CPUs, which have no model runner V2, and
    with connectors that move KV caches between engines. Releases without the function return experts themselves, or not at all.
    """
    from vllm.config import VllmConfig

    if not hasattr(VllmConfig, "_verify_aux_output_compatibility"):
        return

    def wrapper(original):
        def verify(self):
            try:
                return original(self)
            except ValueError as error:
                why = obstacle(self)
                if why is not None:
                    raise ValueError(f"{error} The plug-in semmoe-vllm cannot return them either: {why}.") from error
                self.aux_output_config.enable_return_routed_experts = False
                logger.warning(
                    "semmoe-vllm: returns routed experts instead of vLLM, for requests with %s: %s", FIELD, error
                )

        return verify

    _wrap(VllmConfig, "_verify_aux_output_compatibility", wrapper)


# --- requests and answers -----------------------------------------------------------------------------------------------


def asks(sampling_params):
    """Reports whether a request asks for routed experts."""
    extra = getattr(sampling_params, "extra_args", None)
    return bool(extra) and bool(extra.get(ASK))


def _mark_requests():
    """Marks completions and chats whose body has "return_routed_experts": true and that are not streamed.

    vLLM keeps members of a body that it does not know in model_extra (vllm/entrypoints/serve/engine/protocol.py).
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    def wrapper(original):
        def to_sampling_params(self, *args, **kwargs):
            params = original(self, *args, **kwargs)
            if (self.model_extra or {}).get(FIELD) is True and not self.stream:
                params.extra_args = {**(params.extra_args or {}), ASK: 1}
            return params

        return to_sampling_params

    for request in (ChatCompletionRequest, CompletionRequest):
        _wrap(request, "to_sampling_params", wrapper)


def _answer_routed_experts():
    """Puts the rows that workers attach into the outputs of the scheduler (vllm/v1/core/sched/scheduler.py).

    From there on they go the way of vLLM's own: EngineCoreOutput.routed_experts, choices[].routed_experts.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    def add(original):
        def add_request(self, request):
            answers = _answers(self)
            if answers.rows is not None and asks(request.sampling_params):
                answers.guard(answers.admit, request, self.requests)
            return original(self, request)

        return add_request

    def update(original):
        def update_from_output(self, scheduler_output, model_runner_output):
            answers = _answers(self)
            if not answers.rows:
                return original(self, scheduler_output, model_runner_output)
            answers.guard(answers.add, scheduler_output, model_runner_output)
            result = original(self, scheduler_output, model_runner_output)
            answers.guard(answers.put_into, result, self.requests)
            return result

        return update_from_output

    _wrap(Scheduler, "add_request", add)
    _wrap(Scheduler, "update_from_output", update)


def _answers(scheduler):
    if not hasattr(scheduler, "semmoe_answers"):
        scheduler.semmoe_answers = Answers(scheduler.vllm_config)
    return scheduler.semmoe_answers


class Answers:
    """The routed experts that a scheduler puts into its outputs."""

    def __init__(self, config):
        self.rows = None
        self.guard(self._start, config)

    def guard(self, step, *arguments):
        """Takes a step. After an error there are no more routed experts: the scheduler goes on."""
        try:
            step(*arguments)
        except Exception:
            self.rows = None
            logger.exception("semmoe-vllm: failed to collect routed experts; answers have none from now on")

    def _start(self, config):
        if returns(config):
            layers, dtype = shape(config)
            self.rows = Rows(budget_mib() << 20, layers * config.model_config.get_num_experts_per_tok() * dtype().itemsize)

    def admit(self, request, running):
        """Admits a new request that asks for routed experts."""
        if request.request_id in running:
            return  # more input of a request that vLLM has
        self.rows.keep_only(running)
        first = getattr(request.sampling_params, "routed_experts_prompt_start", 0)
        if self.rows.admit(request.request_id, request.num_prompt_tokens + request.max_tokens, first):
            request.skip_reading_prefix_cache = True  # nothing chooses the experts of a token whose keys and values are cached
        else:
            logger.warning("semmoe-vllm: returns no routed experts for a request: %s is used up", BUDGET_VARIABLE)

    def add(self, scheduler_output, model_runner_output):
        """Adds the rows of a step."""
        starts = {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
        cached = scheduler_output.scheduled_cached_reqs
        starts.update(zip(cached.req_ids, cached.num_computed_tokens))
        for request_id, rows in getattr(model_runner_output, "semmoe_rows", {}).items():
            self.rows.add(request_id, starts[request_id], rows)

    def put_into(self, outputs, running):
        """Puts the rows into the outputs {client: EngineCoreOutputs}."""
        for of_client in outputs.values():
            for output in of_client.outputs:
                if output.routed_experts is None:
                    output.routed_experts = self.rows.take(output.request_id)
        self.rows.keep_only(running)


def budget_mib():
    """Returns the bound on routed experts, in MiB."""
    text = os.environ.get(BUDGET_VARIABLE, "")
    if text.isdecimal() and len(text) <= 7:
        return int(text)
    if text:
        logger.warning("semmoe-vllm: %s: %r is invalid: use a whole number of MiB", BUDGET_VARIABLE, text[:20])
    return DEFAULT_BUDGET_MIB
