"""Lets PyPI's torchvision, which is built for CUDA, be imported beside a CPU build of torch.

`python scripts/torchvision_ops.py` copies this file into that Python's site-packages, with a .pth file that imports it
at every start. Image processors need torchvision's Python parts only, but its import looks up two operators that its
compiled library defines, and a library for CUDA does not load beside a CPU torch: so they are declared here before. If it
does load, nothing is declared, as an operator that is declared twice aborts the process.
"""

import shutil
import sys
import sysconfig
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any


class _BeforeTorchvision(MetaPathFinder):
    """Defines the operators when torchvision is first looked for; finds nothing itself."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            spec = PathFinder.find_spec(name)
            if spec and spec.origin and not _loads_compiled_part(Path(spec.origin).parent):
                import torch

                library = torch.library.Library("torchvision", "DEF")
                library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
                library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
                kept.append(library)


def _loads_compiled_part(folder: Path) -> bool:
    """Try to load the library as torchvision will; it fails beside a torch that it was not built for."""
    import torch

    with suppress(OSError):
        for library in folder.glob("_C*.so"):
            torch.ops.load_library(library)
            return True
    return False


kept: list[Any] = []  # an operator goes with its torch.library.Library
if __name__ == "__main__":
    packages = Path(sysconfig.get_path("purelib"))
    shutil.copy(__file__, packages)
    (packages / "torchvision_ops.pth").write_text("import torchvision_ops\n")
else:
    sys.meta_path.insert(0, _BeforeTorchvision())
