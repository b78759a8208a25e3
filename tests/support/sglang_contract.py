"""Contracts that mrl relies on in SGLang, whose 0.5.23 is pinned for CPUs and GPUs alike. See vllm_contract.py."""

from tests.support.contract_checks import Argument, Contract, Field, Route, Says, Takes, Uses, meaning

SRT = "sglang/srt"
HTTP = f"{SRT}/entrypoints/http_server.py"
FIELDS = f"{SRT}/arg_groups/fields"
IO = f"{SRT}/managers/io_struct.py"
TOKENIZER = f"{SRT}/managers/tokenizer_manager.py"
SCHEDULER = f"{SRT}/managers/scheduler.py"
UPDATER = f"{SRT}/managers/scheduler_components/weight_updater.py"
SERVING = "mrl/engines/sglang.py"
LAUNCHING = "mrl/engines/sglang_launch.py"
BROADCAST = "mrl/engines/sglang_broadcast.py"
UPDATES = f"{SERVING}, _load_when_idle, and tests/engines/test_sglang_updates.py"

ROUTES = [
    Contract(f"mrl asks {method} {path} to {why}", HTTP, Route(method, path), SERVING)
    for method, path, why in (
        ("GET", "/ready", "learn whether it takes requests"),
        ("GET", "/server_info", "learn what it serves, and whether its scheduler lives"),
        ("GET", "/model_info", "learn which folder it has loaded"),
        ("POST", "/abort_request", "give up what runs"),
        ("POST", "/flush_cache", "wait until nothing runs"),
        ("POST", "/update_weights_from_disk", "load weights"),
        ("POST", "/weights_checker", "hash weights"),
        ("POST", "/release_memory_occupation", "free a GPU"),
        ("POST", "/resume_memory_occupation", "take it again"),
        ("POST", "/init_weights_update_group", "join a broadcast"),
        ("POST", "/begin_weight_update", "begin one"),
        ("POST", "/update_weights_from_distributed", "receive a bucket"),
        ("POST", "/end_weight_update", "end one"),
        ("POST", "/destroy_weights_update_group", "leave it"),
    )
] + [
    Contract("mrl asks POST /generate to sample and to score", HTTP, Says(("/generate",)), SERVING),
    Contract("mrl reads the routes from /openapi.json", HTTP, Says(("/openapi.json",)), f"{SERVING}, probe"),
    Contract("mrl reads /metrics", f"{SRT}/utils/common.py", Says(("/metrics",)), f"{SERVING}, usage"),
]

FLAGS = [
    Contract(
        f"mrl starts SGLang with --{field.replace('_', '-')}",
        f"{FIELDS}/{file}.py",
        Field(owner, field, default),
        LAUNCHING,
    )
    for file, owner, field, default in (
        ("model", "Model", "model_path", ...),
        ("model", "Model", "load_format", "auto"),
        ("model", "Model", "context_length", None),
        ("model", "Model", "dtype", "auto"),
        ("serving", "Serving", "host", "127.0.0.1"),
        ("serving", "Serving", "port", 30000),
        ("serving", "Serving", "api_key", None),
        ("serving", "Serving", "skip_tokenizer_init", False),
        ("serving", "Serving", "skip_server_warmup", False),
        ("serving", "Serving", "incremental_streaming_output", False),
        ("serving", "Serving", "sampling_defaults", "model"),
        ("schedule", "Schedule", "mem_fraction_static", None),
        ("schedule", "Schedule", "max_running_requests", None),
        ("schedule", "Schedule", "max_total_tokens", None),
        ("schedule", "Schedule", "disable_overlap_schedule", False),
        ("memory", "Memory", "disable_radix_cache", False),
        ("device", "Device", "device", None),
        ("device", "Device", "random_seed", None),
        ("device", "Device", "sleep_on_idle", False),
        ("observability", "Observability", "log_level", "info"),
        ("observability", "Observability", "enable_metrics", False),
        ("observability", "Observability", "decode_log_interval", 40),
        ("exec_", "ExecFeatures", "enable_memory_saver", False),
        ("exec_", "ExecFeatures", "enable_return_routed_experts", False),
        ("exec_", "ExecKernel", "attention_backend", None),
        ("exec_", "ExecKernel", "sampling_backend", None),
        ("exec_", "ExecKernel", "grammar_backend", None),
        ("parallel", "Parallel", "tp_size", 1),
    )
] + [
    *meaning(
        "a field of the configuration is a word of the command line, with dashes",
        f"{SRT}/arg_groups/arg_utils.py",
        ("_field_to_cli_name",),
        LAUNCHING,
        cpu="22754edcdb29",
        gpu="22754edcdb29",
    ),
    Contract(
        "mrl gives SGLang options in a file with --config",
        f"{SRT}/server_args.py",
        Argument("--config"),
        LAUNCHING,
    ),
    *meaning(
        "with a key of its own SGLang asks for it on all routes but /health, /ready and /metrics",
        f"{SRT}/utils/auth.py",
        ("decide_request_auth",),
        LAUNCHING,
        cpu="324f26e37237",
        gpu="324f26e37237",
    ),
    Contract(
        "seeds count with --enable-deterministic-inference alone, which is off unless it is asked for",
        f"{FIELDS}/exec_.py",
        Field("ExecDeterministic", "enable_deterministic_inference", False),
        f"{SERVING}, and docs/engine-contracts.md",
    ),
]

VARIABLES = [
    Contract(f"SGLang reads {name}", file, check, LAUNCHING)
    for name, file, check in (
        (
            "SGLANG_REQUEST_STATE_WAIT_TIMEOUT",
            f"{SRT}/environ.py",
            Uses(("SGLANG_REQUEST_STATE_WAIT_TIMEOUT",), "Envs"),
        ),
        ("SGLANG_USE_CPU_ENGINE", f"{SRT}/platforms/__init__.py", Says(("SGLANG_USE_CPU_ENGINE",))),
        ("SGLANG_RETURN_ORIGINAL_LOGPROB", f"{SRT}/layers/sampler.py", Says(("SGLANG_RETURN_ORIGINAL_LOGPROB",))),
    )
]

REQUESTS = (
    [
        Contract(f"a request has {field}", IO, Field("GenerateReqInput", field), f"{SERVING}, _ask")
        for field in ("input_ids", "sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num")
    ]
    + [
        Contract(
            f"sampling has {field}",
            f"{SRT}/sampling/sampling_params.py",
            Field("SamplingParams", field, default),
            f"{SERVING}, _ask",
        )
        for field, default in (
            *(("max_new_tokens", ...), ("temperature", 1.0), ("top_p", 1.0), ("top_k", ...), ("min_p", 0.0)),
            *(
                ("repetition_penalty", 1.0),
                ("frequency_penalty", 0.0),
                ("presence_penalty", 0.0),
                ("min_new_tokens", 0),
            ),
            *(("stop_token_ids", None), ("sampling_seed", None), ("ignore_eos", False)),
        )
    ]
    + [
        Contract(f"{owner} has {field}", IO, Field(owner, field), look_at)
        for owner, look_at, fields in (
            ("UpdateWeightFromDiskReqInput", f"{SERVING}, load", ("model_path", "weight_version", "flush_cache")),
            ("AbortReq", f"{SERVING}, abort_all", ("abort_all",)),
            ("CheckWeightsReqInput", f"{SERVING}, checksums", ("action",)),
            (
                "InitWeightsUpdateGroupReqInput",
                f"{BROADCAST}, meet",
                ("master_address", "master_port", "rank_offset", "world_size", "group_name", "backend"),
            ),
            (
                "UpdateWeightsFromDistributedReqInput",
                f"{BROADCAST}, load",
                ("names", "dtypes", "shapes", "group_name", "load_format", "flush_cache", "weight_version"),
            ),
            ("DestroyWeightsUpdateGroupReqInput", f"{BROADCAST}, leave", ("group_name",)),
        )
        for field in fields
    ]
)

ANSWERS = [
    Contract(
        "an answer has output_ids and meta_info",
        TOKENIZER,
        Says(("output_ids", "meta_info", "finish_reason"), "TokenizerManager"),
        f"{SERVING}, generate",
    ),
    Contract(
        "each event of a stream counts all tokens of its answer",
        TOKENIZER,
        Says(("completion_tokens",), "TokenizerManager"),
        f"{SERVING}, stream",
    ),
    Contract(
        "it has log-probabilities of tokens and prompts",
        TOKENIZER,
        Says(("output_token_logprobs", "input_token_logprobs", "output_top_logprobs", "input_top_logprobs")),
        f"{SERVING}, generate and score",
    ),
    *meaning(
        "tokens name their weights by spans",
        f"{SRT}/utils/weight_versions.py",
        ("add_weight_versions_to_meta_info",),
        f"{SERVING}, generate",
        cpu="cf240c6cb447",
        gpu="cf240c6cb447",
    ),
    Contract(
        "the experts of a layer are two parameters, w13_weight and w2_weight",
        f"{SRT}/layers/quantization/unquant.py",
        Says(("w13_weight", "w2_weight"), "UnquantizedFusedMoEMethod.create_weights"),
        "mrl/engines/tensor_folder.py, EXPERTS",
    ),
    *meaning(
        "an expert's gate lies before its up projection, and its down projection apart",
        f"{SRT}/layers/moe/fused_moe_triton/layer.py",
        ("FusedMoE._load_w13", "FusedMoE._load_w2"),
        "mrl/engines/tensor_folder.py, EXPERTS",
        cpu="ebaf03f1bb2e",
        gpu="ebaf03f1bb2e",
    ),
    Contract("/weights_checker answers with ranks", HTTP, Says(("ranks",), "check_weights"), f"{SERVING}, checksums"),
    *(
        Contract(
            f"SGLang counts {name}", f"{SRT}/observability/metrics_collector.py", Says((name,)), f"{SERVING}, usage"
        )
        for name in (
            *("sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage", "sglang:realtime_tokens_total"),
            *("sglang:generation_tokens_total", "sglang:prompt_tokens_total", "sglang:cached_tokens_total"),
        )
    ),
]

UPDATING = [
    *meaning(
        "a request that comes while weights change waits for them, whatever it asks",
        TOKENIZER,
        ("TokenizerManager.generate_request",),
        f"{SERVING}, abort_all and load",
        cpu="95dabe2b61c7",
        gpu="95dabe2b61c7",
    ),
    *meaning(
        "what is aborted has finish reason abort, and no status of a failure",
        f"{SRT}/managers/schedule_batch.py",
        ("FINISH_ABORT.__init__", "FINISH_ABORT.to_json"),
        f"{SERVING}, _ask",
        cpu="e0f091eb9717",
        gpu="e0f091eb9717",
    ),
    *meaning(
        "an abort with a status becomes an HTTP failure, one without is an answer",
        TOKENIZER,
        ("TokenizerManager._handle_abort_finish_reason",),
        f"{SERVING}, _ask",
        cpu="b0eab46bc8d7",
        gpu="b0eab46bc8d7",
    ),
    *meaning(
        "abort_all reaches whatever runs or waits, and does not wait for it",
        TOKENIZER,
        ("TokenizerManager.abort_request",),
        f"{SERVING}, abort_all",
        cpu="3ce6bf7dcb94",
        gpu="3ce6bf7dcb94",
    ),
    *meaning(
        "running requests end behind one more step, with what they have",
        SCHEDULER,
        ("Scheduler.abort_request",),
        f"{SERVING}, abort_all",
        cpu="24c0cfce733b",
        gpu="24c0cfce733b",
    ),
    *meaning(
        "a load waits for all that run, and requests that come meanwhile wait for it",
        TOKENIZER,
        ("TokenizerManager.update_weights_from_disk",),
        f"{SERVING}, load",
        cpu="3ba70f190cd2",
        gpu="3ba70f190cd2",
    ),
    *meaning(
        "a load whose cache was not flushed is a failure, although the weights are new",
        UPDATER,
        (
            "SchedulerWeightUpdaterManager.flush_cache_after_weight_update",
            "SchedulerWeightUpdaterManager.update_weights_from_disk",
        ),
        UPDATES,
        cpu="852c668838f3",
        gpu="852c668838f3",
    ),
    Contract(
        "that failure says that the cache was not flushed",
        UPDATER,
        Says(("cache was not flushed",), "SchedulerWeightUpdaterManager.flush_cache_after_weight_update"),
        f"{SERVING}, NOT_FLUSHED",
    ),
    *meaning(
        "/flush_cache with a timeout waits until the scheduler is idle, and fails if it never is",
        f"{SRT}/managers/scheduler_components/flush_wrapper.py",
        ("SchedulerFlushWrapper.handle", "SchedulerFlushWrapper.check_pending"),
        UPDATES,
        cpu="9b2f6cc99ad7",
        gpu="9b2f6cc99ad7",
    ),
    Contract("/flush_cache takes a timeout", HTTP, Takes("flush_cache", ("timeout",)), UPDATES),
    *meaning(
        "the cache is flushed when nothing runs, and else not",
        SCHEDULER,
        ("Scheduler.flush_cache",),
        UPDATES,
        cpu="78dd50305bfa",
        gpu="78dd50305bfa",
    ),
    *meaning(
        "a folder that does not load leaves the old weights where its iterator fails, else reads it once more",
        f"{SRT}/model_executor/model_runner_components/weight_updater.py",
        ("WeightUpdater.update_weights_from_disk",),
        f"{SERVING}, NOT_BEGUN and check_same_tensors",
        cpu="167dfc3ff85d",
        gpu="167dfc3ff85d",
    ),
    *meaning(
        "a failed load has status 400",
        HTTP,
        ("update_weights_from_disk",),
        f"{SERVING}, load",
        cpu="72c987ea7b04",
        gpu="72c987ea7b04",
    ),
    *meaning(
        "memory is released when nothing runs; else the scheduler ends",
        UPDATER,
        ("SchedulerWeightUpdaterManager.release_memory_occupation",),
        f"{SERVING}, sleep",
        cpu="3ced6314fa66",
        gpu="3ced6314fa66",
    ),
    Contract(
        "a bucket is one flat tensor",
        f"{SRT}/model_executor/model_runner_components/weight_updater.py",
        Says(("flattened_bucket",)),
        BROADCAST,
    ),
]

SAMPLING = [
    *meaning(
        "log-probabilities are those behind temperature unless SGLANG_RETURN_ORIGINAL_LOGPROB is set",
        f"{SRT}/layers/sampler.py",
        ("Sampler.forward",),
        f"{SERVING}, and the canary's noise",
        cpu="9dfc55ed31d5",
        gpu="9dfc55ed31d5",
    ),
    *meaning(
        "seven tokens of the context are given to nobody",
        f"{SRT}/managers/tp_worker.py",
        ("TpModelWorker.get_worker_info",),
        f"{LAUNCHING}, SPARE_TOKENS",
        cpu="0ca6d06a9523",
        gpu="0ca6d06a9523",
    ),
    Contract(
        "its processes are spawned, so each imports sitecustomize and dies with its parent",
        f"{SRT}/entrypoints/engine.py",
        Says(("spawn",)),
        "mrl/engines/inside/sitecustomize.py",
    ),
    Contract(
        "weights are hashed by SHA-256",
        f"{SRT}/utils/weight_checker.py",
        Uses(("sha256",)),
        f"{SERVING}, checksums",
    ),
]

SAMPLER = f"{SRT}/layers/sampler.py"
ASLEEP = [
    Contract(
        "asleep it keeps its graphs unless SGLANG_MEMORY_SAVER_CUDA_GRAPH is set",
        f"{SRT}/environ.py",
        Uses(("SGLANG_MEMORY_SAVER_CUDA_GRAPH",), "Envs"),
        "mrl/processes/unit_memory.py, SLEEPER_MIB",
    )
]
PLACING = meaning(
    "its own all-reduce over several GPUs reads CUDA_VISIBLE_DEVICES as numbers; of ids it is left out",
    f"{SRT}/distributed/device_communicators/custom_all_reduce_utils.py",
    ("can_use_custom_all_reduce_with_nvlink",),
    "docs/placement.md",
    gpu="c5858c09cf46",
)
JIT = "sglang/kernels/jit/utils/compile"
COMPILING = [
    *(
        Contract(
            "on a GPU every layer has kernels that are compiled where they first run",
            f"sglang/kernels/ops/{file}.py",
            Uses(("load_jit",)),
            f"{LAUNCHING}, environment: else PATH may stay as it is",
        )
        for file in ("attention/rope", "activation/activation")
    ),
    Contract(
        "FlashInfer's sampling is imported, and compiled, with the first answer that has a top_p",
        SAMPLER,
        Says(("flashinfer.sampling", "top_k_top_p_sampling_from_probs")),
        f"{LAUNCHING}, --sampling-backend",
    ),
    *meaning(
        "an answer without one is drawn by torch, whatever the backend",
        SAMPLER,
        ("Sampler._sample_from_probs",),
        f"{LAUNCHING}, --sampling-backend",
        cpu="12edca6213f9",
        gpu="12edca6213f9",
    ),
    Contract(
        "they are compiled by the ninja of PATH",
        f"{JIT}/ninja.py",
        Says(("ninja",), "build"),
        f"{LAUNCHING}, environment",
    ),
    *meaning(
        "and by the nvcc of CUDA_HOME, else CUDA_PATH, else PATH, else /usr/local/cuda",
        f"{JIT}/toolchain.py",
        ("cuda_home", "device_compiler_path"),
        f"{LAUNCHING}, environment",
        gpu="77be73ffab81",
    ),
]

ENTRY = "mrl/engines/inside/for_sglang/sglang_cpu_experts.py"
CAPTURED = f"{SRT}/state_capturer/base.py"
EXPERTS = [
    *(
        Contract(f"a request has {field}", IO, Field("GenerateReqInput", field, default), f"{SERVING}, _body_of_answer")
        for field, default in (("return_routed_experts", False), ("routed_experts_start_len", 0))
    ),
    Contract(
        "an answer has the experts of its tokens in base64, and counts those of its prompt",
        TOKENIZER,
        Says(("routed_experts", "prompt_tokens"), "TokenizerManager"),
        f"{SERVING}, _experts",
    ),
    *meaning(
        "experts are collected when a request has finished, from the place asked for to the last but one token",
        f"{SRT}/managers/scheduler_components/batch_result_processor.py",
        ("SchedulerBatchResultProcessor._maybe_collect_routed_experts",),
        f"{SERVING}, _experts, and tests/engines/test_sglang_experts.py",
        cpu="cd0748855710",
        gpu="cd0748855710",
    ),
    *meaning(
        "they are those of each place of the cache, whoever wrote it",
        CAPTURED,
        ("BaseTopkCapturer.get_topk",),
        f"{SERVING}, _experts",
        cpu="cc020fe6680e",
        gpu="cc020fe6680e",
    ),
    *meaning(
        "their table is made by the function of its device, in 32 bits",
        CAPTURED,
        ("BaseHostCache.__init__",),
        ENTRY,
        cpu="4f220b589373",
    ),
    *meaning(
        "on a CPU that function asks for memory that a GPU knows",
        f"{SRT}/mem_cache/pool_host/common.py",
        ("alloc_with_host_register",),
        f"{ENTRY}: without it that file is not needed",
        cpu="6a3075c991db",
    ),
    Contract(
        "functions of devices are in ALLOC_MEMORY_FUNCS",
        f"{SRT}/mem_cache/pool_host/common.py",
        Uses(("ALLOC_MEMORY_FUNCS",)),
        ENTRY,
        ("cpu",),
    ),
    Contract(
        "its entry is run_server, of arguments that were prepared",
        "sglang/launch_server.py",
        Uses(("run_server", "prepare_server_args", "load_plugins", "kill_process_tree")),
        ENTRY,
        ("cpu",),
    ),
]

CONTRACTS = [
    *ROUTES,
    *FLAGS,
    *VARIABLES,
    *REQUESTS,
    *ANSWERS,
    *UPDATING,
    *SAMPLING,
    *ASLEEP,
    *PLACING,
    *COMPILING,
    *EXPERTS,
]
