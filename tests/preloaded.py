"""What the fork server of `tests.ranks` imports before its first fork: each process of it begins with all of this.

The garbage collector leaves it out, in the server and in every fork: walking over it would copy its pages.
"""

import contextlib
import gc
import importlib

gc.disable()
for _name in (
    "pytest",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "dovetail.backends.fsdp1",
    "dovetail.backends.fsdp2",
    "dovetail.models.load",
    "dovetail.rollout.native.engine",
    "dovetail.trainer.run",
    "dovetail.workers.actor_rollout_ref",
    "peft",
    "megatron.core.dist_checkpointing",
    "dovetail.backends.megatron.backend",
):
    with contextlib.suppress(ImportError):  # the environment of SGLang has no Megatron
        importlib.import_module(_name)
gc.freeze()
gc.enable()
