"""List all of vLLM that our server touches, and where a version of it lacks something.

    python scripts/vllm_surface.py [--against FOLDER]

Nothing is imported: the sources of the installed vLLM are read, and of an unpacked wheel in FOLDER.
With FOLDER a name is marked as `missing` there, or `changed` where its arguments are others. The
exit status is 1 where a name is missing.

What is imported from vLLM, and attributes of imported modules, are found in our own sources. What
is imported under one name from two places, as it has moved, must be in one of them. Objects that
vLLM hands to us tell no class: METHODS names them.
"""

import argparse
import ast
import importlib.util
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OURS = [ROOT / "vllm_server.py", *sorted((ROOT / "server").glob("*.py"))]

METHODS = {
    "vllm.engine.arg_utils.AsyncEngineArgs": ["add_cli_args", "from_cli_args"],
    "vllm.v1.engine.async_llm.AsyncLLM": [
        "from_engine_args", "add_request", "abort", "check_health", "shutdown",
        "pause_generation", "resume_generation", "sleep", "wake_up", "update_weight_version",
    ],
    "vllm.v1.engine.core_client.AsyncMPClient": [
        "call_utility_all_async", "pause_scheduler_async",
    ],
    "vllm.v1.engine.core.EngineCore": [
        "_attach_weight_version", "set_weight_version", "pause_scheduler", "collective_rpc",
    ],
    "vllm.v1.engine.output_processor.RequestOutputCollector": ["get"],
    "vllm.renderers.base.BaseRenderer": ["clear_mm_cache_async", "render_cmpl_async"],
    "vllm.renderers.chat_utils.AsyncMultiModalItemTracker": ["create_parser", "resolve_items"],
    "vllm.lora.lora_model.LoRAModel": ["from_lora_tensors"],
    "vllm.lora.model_manager.LoRAModelManager": [
        "add_adapter", "activate_adapter", "remove_adapter",
    ],
    "vllm.v1.worker.gpu_worker.Worker": ["get_model", "reset_weights", "sleep", "wake_up"],
    "vllm.model_executor.layers.vocab_parallel_embedding.UnquantizedEmbeddingMethod": [
        "process_weights_after_loading",
    ],
    "vllm.model_executor.layers.fused_moe.modular_kernel.FusedMoEExperts": [
        "process_weights_after_loading",
    ],
}  # fmt: skip
# Text that must stand somewhere in vLLM: options of ours.
OPTIONS = [
    "logprobs_mode", "generation_config", "mm_processor_cache_gb", "dtype", "max_model_len",
    "block_size", "enforce_eager", "enable_chunked_prefill", "kv_cache_memory_bytes",
    "gpu_memory_utilization", "max_num_seqs", "enable_sleep_mode", "max_lora_rank",
    "worker_extension_cls", "allowed_media_domains", "disable_log_stats", "scheduling_policy",
    "served_model_name",
]  # fmt: skip


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

# -- vLLM's sources --------------------------------------------------------------------------------


class Sources:
    """vLLM in a folder, read file by file; `folder` holds `vllm/`."""

    def __init__(self, folder: Path):
        self.folder = folder

    def path(self, name: str) -> Path | None:
        """The file of a module; None where there is none."""
        base = self.folder.joinpath(*name.split("."))
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.exists():
                return path
        return None

    def find(self, name: str) -> str | None:
        """The arguments of what has a dotted name, empty for what takes none; None where nothing has it."""
        module, rest = name, list[str]()
        while module:
            path = self.path(module)
            if path:
                if not rest:
                    return ""
                found = self._find_in(_tree(path), rest, path)
                # A module may give it by `__getattr__`.
                is_lazy = f'"{rest[0]}"' in path.read_text()
                return "" if found is None and is_lazy else found
            module, _, last = module.rpartition(".")
            rest = [last, *rest]
        return None

    def _find_in(self, body: list[ast.stmt], rest: list[str], path: Path) -> str | None:
        """As `find`, in the body of a module or of a class."""
        first, *inner = rest
        for node in _statements(body):
            if isinstance(node, FUNCTIONS) and node.name == first:
                return _arguments(node)
            if isinstance(node, ast.ClassDef) and node.name == first:
                return self._find_in_class(node, inner, path)
            if first in _assigned(node):
                return ""
            origin = self._origin(node, first, path)
            if origin:
                return self.find(".".join([origin, *inner]))
        return None

    def _find_in_class(self, node: ast.ClassDef, inner: list[str], path: Path) -> str | None:
        """As `find`: of a class itself, or of a method, which a base may have."""
        found = self._find_in(node.body, inner or ["__init__"], path)
        if not inner:
            return found or ""
        for base in node.bases:
            if found is None:
                name = ast.unparse(base).partition("[")[0]
                found = self._find_in(_tree(path), [*name.split("."), *inner], path)
        return found

    def _origin(self, node: ast.stmt, name: str, path: Path) -> str:
        """The dotted name of what a statement imports as `name`, or nothing."""
        if not isinstance(node, ast.Import | ast.ImportFrom):
            return ""
        base = ""
        if isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = path.parents[node.level - 1].relative_to(self.folder)
                base = ".".join([*parent.parts, base]).rstrip(".")
            if not base.startswith("vllm"):
                return ""
        for alias in node.names:
            if (alias.asname or alias.name) == name:
                return f"{base}.{alias.name}".lstrip(".")
        return ""

    @cache  # noqa: B019  # as long as the script runs
    def text(self) -> str:
        """All of vLLM's options, as text."""
        folders = ("engine", "config")
        paths = [path for name in folders for path in (self.folder / "vllm" / name).rglob("*.py")]
        return "\n".join(path.read_text() for path in paths)


@cache
def _tree(path: Path) -> list[ast.stmt]:
    return ast.parse(path.read_text()).body


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """All statements of a body, those under `if` and `try` too."""
    for node in body:
        yield node
        for name in ("body", "orelse", "handlers", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.ExceptHandler):
                yield from _statements(getattr(node, name, []))


def _assigned(node: ast.stmt) -> set[str]:
    """Names that a statement gives a value."""
    targets = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return {target.id for target in targets if isinstance(target, ast.Name)}


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
                if any(installed().path(module) for module in modules):
                    names = tuple(f"{module}.{node.attr}" for module in modules)
                    found.setdefault(names, f"{path.name}:{node.lineno}")
    for owner, methods in METHODS.items():
        for name in methods:
            found[f"{owner}.{name}",] = "METHODS"
    return found


@cache
def installed() -> Sources:
    """The installed vLLM."""
    spec = importlib.util.find_spec("vllm")
    if not spec or not spec.origin:
        sys.exit("error: vLLM is not installed")
    return Sources(Path(spec.origin).parent.parent)


def _first(sources: Sources, names: tuple[str, ...]) -> str | None:
    """The arguments of the first of some names that is there."""
    found = [sources.find(name) for name in names]
    return next((arguments for arguments in found if arguments is not None), None)


def compare(here: Sources, there: Sources) -> list[tuple[str, str, str]]:
    """Each name that we touch, with our place, and what is wrong with it there."""
    rows = []
    for names, place in sorted(touched().items()):
        ours = _first(here, names)
        theirs = _first(there, names)
        fault = ""
        if theirs is None:
            fault = "missing"
        elif ours is not None and ours != theirs:
            fault = f"changed: ({theirs}), was ({ours})"
        rows.append((" or ".join(names), place, fault))
    for word in OPTIONS:
        rows.append((word, "option", "" if word in there.text() else "missing"))
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="holds another `vllm/`")
    args = parser.parse_args()
    rows = compare(installed(), Sources(args.against) if args.against else installed())
    for name, place, fault in rows:
        print(f"{name:<95}{place:<22}{fault or 'as it is'}")
    faults = [fault for _, _, fault in rows if fault]
    missing = faults.count("missing")
    print(f"{len(rows)} names: {missing} missing, {len(faults) - missing} changed")
    sys.exit(min(missing, 1))


if __name__ == "__main__":
    main()
