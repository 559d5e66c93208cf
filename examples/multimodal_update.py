"""One policy update on answers to prompts with images, with a small vision-language model made here."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForImageTextToText, Qwen2_5_VLConfig

from dovetail.config import load_config
from dovetail.models.multimodal import multimodal_position_ids
from dovetail.protocol import DataProto
from dovetail.workers.actor import DataParallelPPOActor
from dovetail.workers.build import build_policy
from dovetail.workers.micro_batches import MicroBatchLimit

IMAGE, START, END = 300, 301, 302
ANSWER = 4

# ---- 1. A model: two layers of text, two of vision. A published one is only a larger folder. ----
folder = Path(tempfile.mkdtemp(prefix="vision-"))
torch.manual_seed(0)
model = AutoModelForImageTextToText.from_config(
    Qwen2_5_VLConfig(
        text_config={
            "vocab_size": 320, "hidden_size": 128, "intermediate_size": 160, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
        },
        vision_config={
            "depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "out_hidden_size": 128,
            "patch_size": 4, "spatial_merge_size": 2, "window_size": 16, "fullatt_block_indexes": [1],
        },
        image_token_id=IMAGE, video_token_id=303, vision_start_token_id=START, vision_end_token_id=END,
    )
)  # fmt: skip
model.save_pretrained(folder)

# ---- 2. Two prompts with an image of 4 x 4 patches, two with text alone; the last four tokens are the answers. ----
generator = torch.Generator().manual_seed(1)
words = torch.randint(3, 290, (4, 8 + ANSWER), generator=generator)
rows = [[START, *[IMAGE] * 4, END, *line] if n % 2 == 0 else [0] * 6 + line for n, line in enumerate(words.tolist())]
ids = torch.tensor(rows)
mask = (ids != 0).long()
images = [
    {"pixel_values": torch.randn(16, 96, generator=generator), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    if n % 2 == 0
    else {}
    for n in range(4)
]
grids = torch.cat([image["image_grid_thw"] for image in images if image])
positions = multimodal_position_ids(model, ids, mask, {"image_grid_thw": grids})
assert positions is not None, "this model counts positions in time, height and width"
batch = DataProto.from_dict(
    {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": positions,
        "responses": ids[:, -ANSWER:],
        "response_mask": mask[:, -ANSWER:],
        "advantages": torch.tensor([[1.0], [1.0], [-1.0], [-1.0]]).expand(4, ANSWER).contiguous(),
    },
    non_tensors={"multi_modal_inputs": np.array(images, dtype=object)},
    meta_info={"temperature": 1.0},
)

# ---- 3. The actor, and one update. ----
config = load_config(
    overrides=[
        f"actor_rollout_ref.model.path={folder}",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=float32",
    ]
).config.actor_rollout_ref
backend = build_policy(
    config.model, strategy="fsdp2", fsdp=config.actor.fsdp_config, optim=config.actor.optim,
    sp_size=1, world_size=1, device=torch.device("cpu"),
)  # fmt: skip
actor = DataParallelPPOActor(config.actor, backend, mini_batch_rows=4, log_prob_limit=MicroBatchLimit(rows=2))
before, _ = actor.compute_log_prob(batch)
metrics = actor.update_policy(batch)
after, _ = actor.compute_log_prob(batch)
change = (after - before).mean(dim=1)
print(f"gradient norm {metrics['actor/grad_norm']:.3f}; log-probs changed by", [f"{v:+.4f}" for v in change.tolist()])
assert change[:2].mean() > change[2:].mean(), "answers with a positive advantage became more likely than the others"
