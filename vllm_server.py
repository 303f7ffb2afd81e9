"""Rollout server: vLLM's, with RL routes, weight transfer and an access guard.

Start it by `python vllm_server.py --model Qwen/Qwen2.5-1.5B-Instruct`, with any option of
`vllm serve`.
"""

import hmac
import os
import sys
from pathlib import Path
from typing import Any

# Or C++ prints a stack for every trainer that ends.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import vllm

from server.messages import SAMPLE, UPDATE
from utils import RIGHT_VLLM, VLLM_VERSIONS, api_token, die_with, was_tried

ANY_VLLM = "--any-vllm"  # the option, which must be known before an import below fails
if not was_tried(vllm.__version__):
    tried = " or ".join(VLLM_VERSIONS)
    if ANY_VLLM not in sys.argv:
        sys.exit(
            f"error: vLLM {vllm.__version__} is installed, not {tried}: {RIGHT_VLLM}, or try it "
            f"with {ANY_VLLM}"
        )
    print(
        f"warning: vLLM {vllm.__version__} was not tried, {tried} were: trainers prove its weights "
        "before it samples",
        flush=True,
    )

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.distributed.weight_transfer import factory
from vllm.platforms import current_platform
from vllm.utils import cpu_resource_utils, torch_utils
from vllm.v1.core.sched import output

from server.receiver import WeightReceiver
from server.receiver import WorkerExtension as WorkerExtension  # as an option names it
from server.route import returns_sampling_mask, sample
from server.update import update
from server.whole import keep_tokens

BACKEND = "grpo"
MAX_BODY_BYTES = 64 << 20  # of a request: a prompt with its images


async def version(scope: Scope, receive: Receive, send: Send) -> None:
    """Tell vLLM's version, whether trainers may use one not tried, and if there are masks."""
    about = {
        "version": vllm.__version__,
        "any_vllm": ANY_VLLM in sys.argv,
        "sampling_mask": returns_sampling_mask(scope["app"].state),
    }
    await JSONResponse(about)(scope, receive, send)


OWN_ROUTES: dict[str, ASGIApp] = {SAMPLE: sample, UPDATE: update, "/version": version}
TRAINER_ROUTES = {
    *OWN_ROUTES, "/pause", "/init_weight_transfer_engine", "/health", "/v1/models", "/metrics",
    "/get_world_size", "/weight_checker",
}  # fmt: skip
SLEEP_ROUTES = {"/sleep", "/wake_up"}  # with `--enable-sleep-mode`

DEFAULTS = {  # ours, in place of vLLM's
    "host": "127.0.0.1",
    # The model's own sampling defaults would silently change the policy.
    "generation_config": "vllm",
    # Log-probs after temperature, as the trainer computes them.
    "logprobs_mode": "processed_logprobs",
    "uvicorn_log_level": "warning",
    # A pause clears its two halves one after the other: requests between them fail.
    "mm_processor_cache_gb": 0,
}
CPU_DEFAULTS = {
    "dtype": "float32",
    "max_model_len": -1,  # as memory allows
    "max_num_seqs": 256,
    "enforce_eager": None,  # `share_cpu` sets it
    "gpu_memory_utilization": 1e-9,  # `share_cpu` sets a size of the cache in its place
    # Completions share whole blocks alone: of 128, shorter prompts would have none.
    "block_size": 32,
    # A seeded request that is prefilled in parts ends vLLM's CPU engine.
    "enable_chunked_prefill": False,
}
REQUIRED = [
    "--weight-transfer-config.backend", BACKEND,
    "--worker-extension-cls", "vllm_server.WorkerExtension",
    "--middleware", "vllm_server.AccessGuard",
    # Images come as data URIs: the server fetches nothing.
    "--allowed-media-domains", "none.invalid",
]  # fmt: skip


def _keep_mm_data(mm_features: Any, *_: Any, **__: Any) -> Any:
    """Let vLLM's V1 runner have all images.

    It gets none that cached prefixes cover, but needs them when an update makes the K/V anew.
    """
    return mm_features


output.strip_covered_mm_data = _keep_mm_data


keep_tokens()
# The file is imported twice, as script and module.
if BACKEND not in factory.WeightTransferEngineFactory._registry:
    factory.WeightTransferEngineFactory.register_engine(BACKEND, WeightReceiver)
# vLLM's engine, or a worker: it would outlive a server that is killed.
if __name__ == "__mp_main__":
    die_with(os.getppid())


class AccessGuard:
    """ASGI middleware that lets only the trainer's routes pass.

    They need the token, where one is set, and bodies of a stated length. vLLM's `--api-key` guards
    `/v1` and `/inference` alone: the RL routes, which can replace the model, would stay open.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.token = api_token()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it here."""
        answer: ASGIApp = self.app
        if scope["type"] != "lifespan":
            route = OWN_ROUTES.get(scope["path"], self.app)
            answer = self._refusal(scope) or route
        elif current_platform.is_cpu():  # where vLLM's log is quiet
            _announce(scope["app"].state)
        await answer(scope, receive, send)

    def _refusal(self, scope: Scope) -> JSONResponse | None:
        """The answer to a request that may not pass."""
        is_open = scope["path"] in TRAINER_ROUTES
        if scope["path"] in SLEEP_ROUTES:
            is_open = scope["app"].state.args.enable_sleep_mode
        if scope["type"] != "http" or not is_open:
            return JSONResponse({"error": "no such route on a rollout server"}, 404)

        headers = dict(scope["headers"])
        if self.token and scope["path"] != "/health":
            given = headers.get(b"authorization", b"")
            if not hmac.compare_digest(given, f"Bearer {self.token}".encode()):
                return JSONResponse({"error": "missing or wrong bearer token"}, 401)

        length = headers.get(b"content-length", b"0")
        is_number = length.isdigit() and len(length) < 20
        if b"transfer-encoding" in headers or not is_number or int(length) > MAX_BODY_BYTES:
            return JSONResponse(
                {"error": f"a request has at most {MAX_BODY_BYTES} bytes, and says how many"}, 413
            )
        return None


def _announce(state: Any) -> None:
    """Print the server's address, as it begins to serve."""
    host = f"[{state.args.host}]" if ":" in str(state.args.host) else state.args.host
    address = f"http://{host}:{state.args.port}"
    max_len = state.vllm_config.model_config.max_model_len
    print(f"serving at {address}, up to {max_len} tokens", flush=True)


def share_cpu(args: Any, parser: Any) -> None:
    """Make room for a trainer by options that the user left open.

    The options chosen are printed.
    """
    given = {name for name, value in vars(args).items() if value != parser.get_default(name)}
    given |= {name for name, value in os.environ.items() if value}

    if args.enforce_eager is None:
        args.enforce_eager = not given & {"compilation_config", "optimization_level"}
    eager = "--enforce-eager" if args.enforce_eager else "--no-enforce-eager"
    line = f"loading {args.model} on the CPU: --dtype {args.dtype} {eager}"
    if not given & {"gpu_memory_utilization", "kv_cache_memory_bytes", "VLLM_CPU_KVCACHE_SPACE"}:
        available = cpu_resource_utils.get_memory_node_info().available_memory
        args.kv_cache_memory_bytes = min(4 << 30, available // 8)
        line += f" --kv-cache-memory-bytes {args.kv_cache_memory_bytes >> 20}M"

    is_parallel = any("parallel_size" in name for name in given)
    has_workers = is_parallel or "VLLM_CPU_OMP_THREADS_BIND" in given
    chosen = {
        "OMP_NUM_THREADS": str(max(1, torch_utils.available_cpu_count() // 2)),
        "VLLM_LOGGING_LEVEL": "ERROR",
        # Or the sampler compiles itself for many batch sizes.
        "TORCHDYNAMO_DISABLE": f"{args.enforce_eager:d}",
        # Else one process: waiting for two takes a core.
        "VLLM_ENABLE_V1_MULTIPROCESSING": f"{has_workers:d}",
    }
    os.environ.update(chosen | os.environ)
    for name in ("OMP_NUM_THREADS", "VLLM_LOGGING_LEVEL"):
        line += f" {name}={os.environ[name]}"
    print(line, flush=True)


def _cli_args() -> Any:
    """vLLM's module of options, which has moved in 0.33."""
    try:
        from vllm.entrypoints.common import cli_args  # type: ignore[attr-defined]
    except ImportError:
        from vllm.entrypoints.launchers import cli_args
    return cli_args


def main(argv: list[str]) -> None:
    """Start the server, and serve until a signal.

    Raises:
        SystemExit: the server refuses an option.
    """
    # By this path the workers find this file.
    paths = [str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    # The RL routes; AccessGuard closes the rest of dev mode.
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # as `vllm serve` does

    import uvloop
    from vllm.entrypoints.launchers.api_server.entry import run_server_worker, setup_server
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_args = _cli_args()
    parser = cli_args.make_arg_parser(FlexibleArgumentParser(description=__doc__))
    parser.set_defaults(**DEFAULTS)
    if current_platform.is_cpu():
        parser.set_defaults(**CPU_DEFAULTS)
    parser.add_argument(
        "--metrics",
        action="store_true",
        help="keep the statistics of /metrics, which cost CPU time",
    )
    parser.add_argument(ANY_VLLM, action="store_true", help="start with a vLLM not tried here")
    args = parser.parse_args([*argv, *REQUIRED])
    args.disable_log_stats = not args.metrics

    if args.api_key:
        if len(args.api_key) > 1:
            sys.exit("--api-key: one token, which the trainer has as VLLM_API_KEY")
        os.environ["VLLM_API_KEY"] = args.api_key[0]
        args.api_key = None  # the log would show it
    if args.api_server_count not in (None, 1):
        sys.exit(
            "--api-server-count: this server has one; start more servers in place of more of these"
        )
    if args.host not in ("localhost", "127.0.0.1", "::1") and not api_token():
        sys.exit(
            f"--host {args.host} is reachable from outside: set VLLM_API_KEY, "
            "here and at the trainer"
        )

    # The word without an option is a model, as for `vllm serve`.
    args.model = args.model_tag or args.model
    if Path(args.model).is_dir():
        args.model = str(Path(args.model).resolve())  # which trainers compare
    if current_platform.is_cpu():
        share_cpu(args, parser)
    cli_args.validate_parsed_serve_args(args)

    address, sock = setup_server(args, reuse_port=False)
    # `run_server` would not hear SIGTERM while a model loads.
    uvloop.run(run_server_worker(address, sock, args))


if __name__ == "__main__":
    main(sys.argv[1:])
