"""Lets PyPI's torchvision, which is built for CUDA, be imported beside a CPU build of torch.

scripts/env.sh puts it into such an environment, with a .pth file that imports it. Image processors need torchvision's
Python parts only, but its import looks up two operators that its compiled part would define.
"""

import sys
from importlib.abc import MetaPathFinder
from typing import Any


class _BeforeTorchvision(MetaPathFinder):
    """Defines the operators when torchvision is first looked for; finds nothing itself."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            self.library = torch.library.Library("torchvision", "DEF")
            self.library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            self.library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            kept.append(self)


kept: list[_BeforeTorchvision] = []  # the operators live as long as their library
sys.meta_path.insert(0, _BeforeTorchvision())
