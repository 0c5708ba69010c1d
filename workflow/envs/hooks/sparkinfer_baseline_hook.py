"""Start-up hook of the baseline's environment: lets a torchvision without loadable operators be imported.

vLLM's Qwen3.5 module imports torchvision for images. PyPI's torchvision is built for CUDA; beside a CPU torch its
native operators do not load and `torch.library.register_fake("torchvision::nms")` raises at import. A text model calls
none of these operators, so exactly those registrations are skipped, and only when the operator is missing. Nothing of
vLLM changes.

`make_env.py` copies this file into the environment with a .pth file that imports it. Without a torchvision import it
does nothing: the patch is applied when `torchvision` is first looked up.
"""

import importlib.abc
import sys


def _skip_missing_operators() -> None:
    import torch.library

    original = torch.library.register_fake

    def register_fake(op, func=None, /, **options):  # type: ignore[no-untyped-def]
        if isinstance(op, str) and op.startswith("torchvision::"):
            name = op.removeprefix("torchvision::").split(".")[0]
            if not hasattr(torch.ops.torchvision, name):
                return func if func is not None else (lambda implementation: implementation)
        return original(op, func, **options) if func is not None else original(op, **options)

    torch.library.register_fake = register_fake


class _OnTorchvision(importlib.abc.MetaPathFinder):
    """Finds nothing: applies the patch when torchvision is looked up, then removes itself."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name == "torchvision":
            sys.meta_path.remove(self)
            _skip_missing_operators()
        return None


sys.meta_path.insert(0, _OnTorchvision())
