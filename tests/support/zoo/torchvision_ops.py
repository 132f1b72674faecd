"""Operators that torchvision declares in its C extension, where that extension cannot be loaded.

A torchvision wheel is built against one build of torch; beside another build (CPU only, say) its
extension does not load, and then `import torchvision` fails, because it registers shapes for
operators that nobody has declared. The models of the zoo do not call them (they are for inference),
so a declaration without a kernel is enough.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

DECLARATIONS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}


def declare_missing() -> None:
    """Declare the operators, unless the extension has or the package is not there."""
    if hasattr(torch.ops.torchvision, "nms"):
        return
    package = importlib.util.find_spec("torchvision")
    if package is None or package.origin is None or _loads(Path(package.origin).parent):
        return
    for name, schema in DECLARATIONS.items():
        torch.library.define(f"torchvision::{name}", schema)


def _loads(folder: Path) -> bool:
    for library in folder.glob("_C*.so"):
        try:
            torch.ops.load_library(library)
        except OSError:
            continue
        return True
    return False
