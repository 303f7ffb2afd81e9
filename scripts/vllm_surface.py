"""List all of vLLM that our server touches, and where a version of it lacks something.

    python scripts/vllm_surface.py [--against FOLDER]

Nothing is imported: the sources of the installed vLLM are read, and of an unpacked wheel in FOLDER.
With FOLDER a name is marked as `missing` there, or `changed` where its arguments are others. The
exit status is 1 where a name is missing.

What is imported from vLLM, and attributes of imported modules, are found in our own sources. What
is imported under one name from two places, as it has moved, must be in one of them. Objects that
vLLM hands to us tell no class: METHODS names them, by the class that defines a method.
"""

import ast
import importlib.util
import re
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OURS = [ROOT / "vllm_server.py", *sorted((ROOT / "server").glob("*.py"))]

METHODS = {
    "vllm.engine.arg_utils.AsyncEngineArgs": ["add_cli_args"],
    "vllm.engine.arg_utils.EngineArgs": ["from_cli_args"],
    "vllm.v1.engine.async_llm.AsyncLLM": [
        "from_engine_args", "add_request", "abort", "check_health", "shutdown",
        "pause_generation", "resume_generation", "sleep", "wake_up", "update_weight_version",
    ],
    "vllm.v1.engine.core_client.AsyncMPClient": ["call_utility_all_async", "pause_scheduler_async"],
    "vllm.v1.engine.core.EngineCore": ["_attach_weight_version", "pause_scheduler", "collective_rpc"],
    "vllm.v1.engine.output_processor.RequestOutputCollector": ["get"],
    "vllm.renderers.base.BaseRenderer": ["clear_mm_cache_async", "render_cmpl_async"],
    "vllm.renderers.chat_utils.AsyncMultiModalItemTracker": ["create_parser", "resolve_items"],
    "vllm.lora.lora_model.LoRAModel": ["from_lora_tensors"],
    "vllm.lora.model_manager.LoRAModelManager": ["add_adapter", "activate_adapter", "remove_adapter"],
    "vllm.v1.worker.gpu_worker.Worker": ["get_model", "reset_weights", "sleep", "wake_up"],
    "vllm.model_executor.layers.vocab_parallel_embedding.UnquantizedEmbeddingMethod": ["process_weights_after_loading"],
    "vllm.model_executor.layers.fused_moe.modular_kernel.FusedMoEExperts": ["process_weights_after_loading"],
}  # fmt: skip
# Text that must stand somewhere in vLLM: options of ours.
OPTIONS = [
    "logprobs_mode", "generation_config", "mm_processor_cache_gb", "dtype", "max_model_len",
    "block_size", "enforce_eager", "enable_chunked_prefill", "kv_cache_memory_bytes",
    "max_num_seqs", "enable_sleep_mode", "max_lora_rank", "worker_extension_cls",
    "allowed_media_domains", "disable_log_stats", "scheduling_policy", "served_model_name",
]  # fmt: skip

# -- vLLM's sources --------------------------------------------------------------------------------


def file_of(folder: Path, module: str) -> Path | None:
    """The file of a module; None where there is none."""
    base = folder.joinpath(*module.split("."))
    paths = (base.with_suffix(".py"), base / "__init__.py")
    return next((path for path in paths if path.exists()), None)


def find(folder: Path, name: str) -> str | None:
    """The arguments of what has a dotted name, if it is defined there; None where it is not even imported."""
    module, names = name, list[str]()
    while module:
        path = file_of(folder, module)
        if path:
            return _find_in(ast.parse(path.read_text()).body, names)
        module, _, last = module.rpartition(".")
        names = [last, *names]
    return None


def _find_in(body: list[ast.stmt], names: list[str]) -> str | None:
    """As `find`, in the body of a module or of a class."""
    if not names:
        return ""
    first, *inner = names
    text = ""  # of what else may give it: a table of `__getattr__`, too
    for node in _statements(body):
        if isinstance(node, ast.ClassDef) and node.name == first:
            found = _find_in(node.body, inner or ["__init__"])
            return found if inner else found or ""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == first:
            return _arguments(node)
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Assign | ast.AnnAssign):
            text += ast.unparse(node) + "\n"
    return "" if re.search(rf"\b{first}\b", text) else None


def _statements(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """All statements of a body, those under `if` and `try` too."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.ExceptHandler):
            yield from _statements(ast.iter_child_nodes(node))


def _arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Arguments with their defaults, without annotations."""
    for argument in ast.walk(node.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return ast.unparse(node.args)


# -- Our sources -----------------------------------------------------------------------------------


def touched() -> dict[tuple[str, ...], str]:
    """Dotted names that we touch, one of which must be there, each with a place of ours."""
    found: dict[tuple[str, ...], str] = {}
    for path in OURS:
        tree = ast.parse(path.read_text())
        imported: dict[str, tuple[str, ...]] = {}
        places: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm."):
                for alias in node.names:
                    own = alias.asname or alias.name
                    imported[own] = (*imported.get(own, ()), f"{node.module}.{alias.name}")
                    places.setdefault(own, f"{path.name}:{node.lineno}")
        for own, names in imported.items():
            found.setdefault(names, places[own])
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                modules = imported.get(node.value.id, ())
                if any(file_of(installed(), module) for module in modules):
                    names = tuple(f"{module}.{node.attr}" for module in modules)
                    found.setdefault(names, f"{path.name}:{node.lineno}")
    for owner, methods in METHODS.items():
        for name in methods:
            found[f"{owner}.{name}",] = "METHODS"
    return found


@cache
def installed() -> Path:
    """The folder that holds the installed vLLM."""
    spec = importlib.util.find_spec("vllm")
    if not spec or not spec.origin:
        sys.exit("error: vLLM is not installed")
    return Path(spec.origin).parent.parent


def compare(here: Path, there: Path) -> list[tuple[str, str, str]]:
    """Each name that we touch, with our place, and what is wrong with it there."""
    rows = []
    for names, place in sorted(touched().items()):
        ours = [find(here, name) for name in names]
        theirs = [find(there, name) for name in names]
        fault = "missing"
        if theirs != [None] * len(names):
            known = [pair for pair in zip(theirs, ours, strict=True) if all(pair)]
            changed = [f"changed: ({a}), was ({b})" for a, b in known if a != b]
            fault = "".join(changed)
        rows.append((" or ".join(names), place, fault))

    folders = (there / "vllm" / "engine", there / "vllm" / "config")
    text = "\n".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))
    for word in OPTIONS:
        rows.append((word, "option", "" if word in text else "missing"))
    return rows


def main() -> None:
    """Print the table."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="holds another `vllm/`")
    args = parser.parse_args()
    rows = compare(installed(), args.against or installed())
    for name, place, fault in rows:
        print(f"{name:<95}{place:<22}{fault or 'as it is'}")
    faults = [fault for _, _, fault in rows if fault]
    missing = faults.count("missing")
    print(f"{len(rows)} names: {missing} missing, {len(faults) - missing} changed")
    sys.exit(min(missing, 1))


if __name__ == "__main__":
    main()
