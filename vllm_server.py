"""Rollout server: vLLM's own OpenAI-compatible server with the RL routes, weight transfer and an access guard.

Start it by `python vllm_server.py --model Qwen/Qwen2.5-1.5B-Instruct`, with any option of `vllm serve`.
"""

import hmac
import os
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import vllm

from utils import RIGHT_VLLM, VLLM_VERSION, TransferGroup, api_token, die_with

if vllm.__version__.partition("+")[0] != VLLM_VERSION:  # before an import below fails
    sys.exit(f"error: vLLM {vllm.__version__} is installed, not {VLLM_VERSION}: {RIGHT_VLLM}")

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from torch.distributed import TCPStore
from vllm.distributed.weight_transfer import base, factory
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import layerwise
from vllm.platforms import current_platform
from vllm.utils import cpu_resource_utils, nccl, torch_utils
from vllm.v1.core.sched import output

BACKEND = "grpo"
MAX_BODY_BYTES = 64 << 20  # of a request: a prompt with its images
TRAINER_ROUTES = frozenset({
    "/inference/v1/generate", "/pause", "/init_weight_transfer_engine", "/start_weight_update", "/finish_weight_update",
    "/update_weights", "/resume", "/health", "/version", "/v1/models", "/metrics", "/get_world_size", "/weight_checker",
})  # fmt: skip

# vLLM's V1 runner gets no images that cached prefixes cover, but needs them when an update makes the K/V anew.
output.strip_covered_mm_data = lambda features, *_, **__: features

DEFAULTS = {  # ours, in place of vLLM's
    "host": "127.0.0.1",
    "generation_config": "vllm",  # the model's own sampling defaults would silently change the policy
    "logprobs_mode": "processed_logprobs",  # log-probs after temperature, as the trainer computes them
    "uvicorn_log_level": "warning",
    "mm_processor_cache_gb": 0,  # a pause clears its two halves one after the other: requests between them fail
}
CPU_DEFAULTS = {  # -1: as memory allows; `share_cpu` sets None, and a size of the cache in place of 1e-9
    "dtype": "float32", "max_model_len": -1, "max_num_seqs": 256, "enforce_eager": None, "gpu_memory_utilization": 1e-9,
    "block_size": 32,  # completions share whole blocks alone: of 128, shorter prompts would have none
    "enable_chunked_prefill": False,  # a seeded request that is prefilled in parts ends vLLM's CPU engine
}  # fmt: skip
REQUIRED = [
    "--enable-scale-out",  # /inference/v1/generate: token ids in, token ids out
    "--weight-transfer-config.backend", BACKEND,
    "--worker-extension-cls", "vllm_server.WorkerExtension",
    "--middleware", "vllm_server.AccessGuard",
    "--allowed-media-domains", "none.invalid",  # images come as data URIs: the server fetches nothing
]  # fmt: skip


@dataclass
class TransferInit(base.WeightTransferInitInfo):
    """Where the trainer (rank 0 of the transfer group) waits for this server's workers; or a `temperature` alone."""

    host: str = ""
    port: int = 0
    world_size: int = 0
    timeout_s: float = 0.0
    trainer: str = ""
    temperature: float = 0.0


class WeightReceiver(base.WeightTransferEngine[TransferInit, base.WeightTransferUpdateInfo]):
    """Loads the trainer's weights into a worker, which gets full tensors and keeps its shard, as of a checkpoint."""

    init_info_cls = TransferInit
    update_info_cls = (
        base.WeightTransferUpdateInfo
    )  # buckets until an empty one: nothing to say beforehand
    group: TransferGroup | None = None
    trainer = ""
    temperature = 0.0  # of a reference, 0 for any other server

    def init_transfer_engine(self, init_info: TransferInit) -> None:
        """Join the trainer's transfer group, in place of one that an earlier trainer left; or become a reference."""
        if init_info.temperature:  # of which vLLM's log-probs of prompts know nothing
            if self.temperature not in (0.0, init_info.temperature):
                raise RuntimeError(
                    f"it is the reference of a run at temperature {self.temperature}: start another one"
                )
            for module in () if self.temperature else self.model.modules():
                if isinstance(module, LogitsProcessor):
                    module.scale /= init_info.temperature
            self.temperature = init_info.temperature
            return
        if (
            self.group is not None
            and self.trainer != init_info.trainer
            and self.group.trainer_lives()
        ):
            raise RuntimeError("another trainer uses this server: one at a time")
        self.shutdown()
        self.trainer = init_info.trainer
        config = self.parallel_config
        rank = 1 + config.data_parallel_index * config.world_size + config.rank
        # The store exists before the server hears of it: a trainer that is gone meanwhile keeps nobody waiting.
        store = TCPStore(
            init_info.host, init_info.port, is_master=False, timeout=timedelta(seconds=10)
        )
        store.set_timeout(timedelta(seconds=init_info.timeout_s))
        dtype: Any = self.model_config.dtype
        with (
            nccl.unpinned_nccl_env()
        ):  # the trainer has not what vLLM sets for its own communicators
            self.group = TransferGroup(
                store, rank, init_info.world_size, self.device, init_info.timeout_s, dtype=dtype
            )

    def start_weight_update(self) -> None:
        """Open vLLM's layerwise reload: layers are rebuilt as soon as all of their weights have arrived."""
        layerwise.initialize_layerwise_reload(self.model)
        tied = getattr(self.model_config.hf_text_config, "tie_word_embeddings", False)
        for module in (
            self.model.modules()
        ):  # of those without weights vLLM would warn that they failed to load
            info = layerwise.get_layerwise_info(module)
            if not info.restore_metadata[0] or (tied and isinstance(module, ParallelLMHead)):
                info.load_numel_total = 0

    def receive_weights(self, update_info: base.WeightTransferUpdateInfo) -> None:
        """Load every bucket; each has memory of its own, as layerwise reload keeps views until a layer is whole."""
        load_weights: Any = self.model.load_weights
        try:
            assert self.group, "/init_weight_transfer_engine comes first"
            while bucket := self.group.receive():
                load_weights(bucket.items())
        except BaseException:
            self.shutdown()  # what the trainer sends then fails at once, instead of waiting for this worker
            layerwise.finalize_layerwise_reload(
                self.model, self.model_config
            )  # or they cannot be opened again
            raise

    def finish_weight_update(self) -> None:
        """Close the reload and refresh what it leaves behind."""
        layerwise.finalize_layerwise_reload(self.model, self.model_config)
        # The reload does not touch what vLLM prepacks for the CPU, a tied embedding and experts: they would stay.
        for module in self.model.modules() if self.device.type == "cpu" else ():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)
            if kernel := getattr(getattr(module, "quant_method", None), "moe_kernel", None):
                kernel.fused_experts.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """Leave the transfer group."""
        if self.group is not None:
            self.group.close()
            self.group = None


class WorkerExtension:
    """Named by `--worker-extension-cls`, so that every worker imports this module and registers `WeightReceiver`."""


if (
    BACKEND not in factory.WeightTransferEngineFactory._registry
):  # the file is imported twice, as script and module
    factory.WeightTransferEngineFactory.register_engine(BACKEND, WeightReceiver)
if (
    __name__ == "__mp_main__"
):  # vLLM's engine, or a worker: it would outlive a server that is killed
    die_with(os.getppid())


class AccessGuard:
    """ASGI middleware: only the trainer's routes pass, with the token where one is set, and bodies of a stated length.

    vLLM's `--api-key` guards `/v1` and `/inference` alone: the RL routes, which can replace the model, would stay open.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app, self.token = app, api_token()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it here."""
        if scope["type"] == "lifespan" and current_platform.is_cpu():  # where vLLM's log is quiet
            args, model = scope["app"].state.args, scope["app"].state.vllm_config.model_config
            print(
                f"serving at http://{args.host}:{args.port}, up to {model.max_model_len} tokens",
                flush=True,
            )
        refusal = None if scope["type"] == "lifespan" else self._refusal(scope)
        await (refusal or self.app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> JSONResponse | None:
        """The answer to a request that may not pass."""
        if scope["type"] != "http" or scope["path"] not in TRAINER_ROUTES:
            return JSONResponse({"error": "no such route on a rollout server"}, 404)
        headers = dict(scope["headers"])
        needs_token = self.token and scope["path"] != "/health"
        if needs_token and not hmac.compare_digest(
            headers.get(b"authorization", b""), f"Bearer {self.token}".encode()
        ):
            return JSONResponse({"error": "missing or wrong bearer token"}, 401)
        length = headers.get(b"content-length", b"0")
        is_number = length.isdigit() and len(length) < 20
        if b"transfer-encoding" in headers or not is_number or int(length) > MAX_BODY_BYTES:
            return JSONResponse(
                {"error": f"a request has at most {MAX_BODY_BYTES} bytes, and says how many"}, 413
            )
        return None


def share_cpu(args: Any, parser: Any) -> None:
    """Choose what the user left open so that a trainer fits beside the server, and print it."""
    given = {name for name, value in vars(args).items() if value != parser.get_default(name)}
    given |= {name for name, value in os.environ.items() if value}
    if args.enforce_eager is None:
        args.enforce_eager = not given & {"compilation_config", "optimization_level"}
    line = f"loading {args.model} on the CPU: --dtype {args.dtype} --{'' if args.enforce_eager else 'no-'}enforce-eager"
    if not given & {"gpu_memory_utilization", "kv_cache_memory_bytes", "VLLM_CPU_KVCACHE_SPACE"}:
        args.kv_cache_memory_bytes = min(
            4 << 30, cpu_resource_utils.get_memory_node_info().available_memory // 8
        )
        line += f" --kv-cache-memory-bytes {args.kv_cache_memory_bytes >> 20}M"
    has_workers = "VLLM_CPU_OMP_THREADS_BIND" in given or any(
        "parallel_size" in name for name in given
    )
    chosen = {
        "OMP_NUM_THREADS": str(max(1, torch_utils.available_cpu_count() // 2)),
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    chosen["TORCHDYNAMO_DISABLE"] = (
        f"{args.enforce_eager:d}"  # or the sampler compiles itself for many batch sizes
    )
    chosen["VLLM_ENABLE_V1_MULTIPROCESSING"] = (
        f"{has_workers:d}"  # else one process: waiting for two takes a core
    )
    os.environ.update(chosen | os.environ)
    print(
        line,
        *(f"{name}={os.environ[name]}" for name in ("OMP_NUM_THREADS", "VLLM_LOGGING_LEVEL")),
        flush=True,
    )


def main(argv: list[str]) -> None:
    """Start the server and serve until a signal; SystemExit for options that it refuses."""
    here = str(Path(__file__).resolve().parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [here, os.environ.get("PYTHONPATH")])
    )  # for the workers
    os.environ["VLLM_SERVER_DEV_MODE"] = (
        "1"  # the RL routes; AccessGuard closes the rest of dev mode
    )
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # as `vllm serve` does
    import uvloop
    from vllm.entrypoints.launchers.api_server.entry import run_server_worker, setup_server
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser(description=__doc__))
    parser.set_defaults(**DEFAULTS, **(CPU_DEFAULTS if current_platform.is_cpu() else {}))
    args = parser.parse_args([*argv, *REQUIRED])
    if args.api_key and len(args.api_key) > 1:
        sys.exit("--api-key: one token, which the trainer has as VLLM_API_KEY")
    if args.api_key:
        os.environ["VLLM_API_KEY"], args.api_key = args.api_key[0], None  # the log would show it
    if args.host not in ("localhost", "127.0.0.1", "::1") and not api_token():
        sys.exit(
            f"--host {args.host} is reachable from outside: set VLLM_API_KEY, here and at the trainer"
        )
    args.model = (
        args.model_tag or args.model
    )  # the word without an option, as `vllm serve` takes it
    args.model = (
        str(Path(args.model).resolve()) if Path(args.model).is_dir() else args.model
    )  # which trainers compare
    if current_platform.is_cpu():
        share_cpu(args, parser)
    validate_parsed_serve_args(args)
    address, sock = setup_server(args, reuse_port=False)
    uvloop.run(
        run_server_worker(address, sock, args)
    )  # `run_server` would not hear SIGTERM while a model loads


if __name__ == "__main__":
    main(sys.argv[1:])
