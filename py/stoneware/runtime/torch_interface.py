"""The check that torch has what Stoneware uses beyond torch's public functions.

Everything in `PRIVATE` may change in any release of torch. `runtime/dtypes.py`, which all code with tensors imports,
checks it before anything else of torch is used. So an unsupported torch is one ImportError, not an AttributeError of
some later call. The check takes 0.2 ms, and does not initialise CUDA.
"""

from __future__ import annotations

import operator
import re
from typing import Any

from stoneware.errors import MINIMUM_TORCH, TORCH_REQUIREMENT

PRIVATE = (
    # Native calls read tensors through DLPack's C exchange API (cc/call/exchange_api.h).
    "Tensor.__dlpack_c_exchange_api__",
    # Which calls need torch's dispatcher (cc/call/fast_call.cc, ops/tensor_checks.py).
    "_C._any_requires_grad",
    "_C._are_functorch_transforms_active",
    "_C._functorch.is_functorch_wrapped_tensor",
    "_C._is_any_autocast_enabled",
    "_C._is_fwd_grad_enabled",
    "_C._len_torch_dispatch_stack",
    "_C._len_torch_function_stack",
    "autograd.forward_ad._current_level",
    # Operators and their gradients (ops/registration.py, ops/backward.py), traced functions (epilogue/trace.py).
    "_C._AutoDispatchBelowAutograd",
    "_C._disabled_torch_function_impl",
    "Tensor._make_wrapper_subclass",
    "_check_value",
    "_functorch.utils.enable_single_level_autograd_function",
    "_ops.OpOverload",
    "autograd.function._SingleLevelFunction",
    "utils._pytree",
    "utils._python_dispatch.TorchDispatchMode",
    "utils._python_dispatch._disable_current_modes",
    # The tuning state in autograd's threads (tuning/policy.py).
    "_C._get_obj_in_tls",
    "_C._is_key_in_tls",
    "_C._stash_obj_in_tls",
    # The vendor library's kernels.
    "_grouped_mm",
    "_scaled_grouped_mm",
    "_scaled_mm",
    "_scaled_mm_v2",
    # Gradients that are added to a buffer (nn/main_grad.py).
    "_C._will_engine_execute_node",
    # Layers (nn/), and the timer (measuring/stopwatch.py).
    "_foreach_copy_",
    "_foreach_norm",
    "cuda._sleep",
    "nn.modules.module._has_any_global_hook",
    "ops.aten._to_copy.default",
    "ops.aten._unsafe_view.default",
)
"""Below torch, in every build of it."""

PRIVATE_ON_CUDA = ("_C._cuda_getCurrentRawStream",)
"""Below torch, in its CUDA builds."""


def check(torch: Any) -> None:
    """Checks the version of the module `torch`, then `PRIVATE` and `PRIVATE_ON_CUDA`.

    Raises:
      ImportError: torch is too old, or lacks one of them. The message states version, what is missing, and the remedy.
    """
    version = torch.__version__
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and tuple(map(int, numbers.groups())) < MINIMUM_TORCH:
        raise ImportError(
            f'stoneware needs {TORCH_REQUIREMENT}, but torch {version} is installed; pip install "{TORCH_REQUIREMENT}"',
            name="torch",
        )
    missing = [name for name in PRIVATE + PRIVATE_ON_CUDA * bool(torch.version.cuda) if not _has(torch, name)]
    if missing:
        raise ImportError(
            f"stoneware needs {', '.join(f'torch.{name}' for name in missing)}, which torch {version} lacks; install a "
            "newer stoneware, or a torch that docs/versions.md lists",
            name="torch",
        )


def _has(torch: Any, name: str) -> bool:
    try:
        operator.attrgetter(name)(torch)
    except AttributeError:
        return False
    return True
