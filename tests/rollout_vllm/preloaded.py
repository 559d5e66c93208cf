"""What a server of `tests.quick_python` imports for processes with vLLM in them and nothing else.

The environment is set before, as for any process that imports vLLM; torch is imported already and reads it no more.
"""

import importlib
import os

import torch._dynamo

from dovetail.rollout.vllm.environment import environment

os.environ.update(environment(cpu=True, own_process=True))
torch._dynamo.config.disable = os.environ["TORCHDYNAMO_DISABLE"] == "1"

for _name in (
    "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
):
    importlib.import_module(_name)
