"""Let a torchvision that is built for CUDA be imported beside a CPU build of torch, for soaks with
models of timm.

Such a torchvision cannot load its library of operators, and its import fails because two of them
are not declared. With this folder in PYTHONPATH they are declared, without an implementation:
models and transforms call neither.
"""

import importlib.abc
import sys

_OPERATORS = ("nms", "qnms")
_libraries = []


class _Declare(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            library = torch.library.Library("torchvision", "FRAGMENT")
            _libraries.append(library)
            for operator in _OPERATORS:
                if not hasattr(torch.ops.torchvision, operator):
                    library.define(
                        f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                    )


sys.meta_path.insert(0, _Declare())
