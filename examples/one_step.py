"""One step of GRPO, taken apart: `python one_step.py MODEL_FOLDER`. One process, no Ray: set a breakpoint anywhere."""

from __future__ import annotations

import sys

import numpy as np
import torch

from dovetail.algorithms import get_adv_estimator_fn
from dovetail.config import load_config
from dovetail.models.load import load_tokenizer
from dovetail.protocol import DataProto
from dovetail.trainer.choose import choose_open_keys
from dovetail.trainer.groups import create_groups

# ---- 1. A configuration: what is not set is chosen to fit; `dovetail check` says what it comes to. ----
model = sys.argv[1]
keys = {"data.max_prompt_length": 64, "data.max_response_length": 8, "actor_rollout_ref.rollout.n": 4}
loaded = load_config(values={"model": model, "lr": 1e-4, "data.train_batch_size": 2, **keys})
config = choose_open_keys(loaded, one_process=True).config

# ---- 2. The workers: actor, engine and reference in this process. On a cluster the same calls go to Ray actors. ----
groups = create_groups(config, use_ray=False, use_gpu=config.trainer.device != "cpu")
policy = groups.actor_rollout
policy.init_model(1)

# ---- 3. Prompts, as token ids, each with a seed: its answers do not depend on what else is in the batch. ----
tokenizer = load_tokenizer(model)
questions = ["What is 2 + 3?", "What is 4 + 4?"]
ids = np.empty(len(questions), dtype=object)
ids[:] = [tokenizer.encode(question) for question in questions]
prompts = DataProto.from_dict(
    {},
    non_tensors={"raw_prompt_ids": ids, "sampling_seed": np.array([1, 2], dtype=object)},
    meta_info={"n": 4},
)

# ---- 4. Answers: four to each prompt, side by side, with the log-prob of every sampled token. ----
batch = policy.generate_sequences(prompts)
width = batch.tensors["responses"].shape[1]
texts = tokenizer.batch_decode(batch.tensors["responses"])
print(f"{len(texts)} answers of at most {width} tokens; the first: {texts[0]!r}")

# ---- 5. A reward for each, put on the last token of its answer. ----
scores = torch.tensor([sum(letter.isalpha() for letter in text) / max(1, len(text)) for text in texts])
mask = batch.tensors["response_mask"]
rewards = torch.zeros(mask.shape)
rewards[torch.arange(len(mask)), mask.sum(dim=1).long() - 1] = scores

# ---- 6. Advantages: each answer against the others of its group. ----
uid = np.repeat(np.arange(len(questions)), 4)
advantages, _ = get_adv_estimator_fn("grpo")(token_level_rewards=rewards, response_mask=mask.float(), uid=uid)
print("advantages:", [round(value, 2) for value in advantages[:, 0].tolist()])

# ---- 7. The update. Before and after, the log-probs of the same answers show what it did. ----
before = policy.compute_log_prob(batch).tensors["old_log_probs"]
found = policy.update_actor(batch.union(DataProto.from_dict({"advantages": advantages}))).meta_info["metrics"]
metrics = {name: values[0] for name, values in found.items()}  # one value from each rank; all ranks agree
after = policy.compute_log_prob(batch).tensors["old_log_probs"]
change = ((after - before) * mask).sum(dim=1)
print(f"loss {metrics['actor/pg_loss']:.4f}, gradient norm {metrics['actor/grad_norm']:.4f}")
better, worse = change[advantages[:, 0] > 0].mean(), change[advantages[:, 0] < 0].mean()
print(f"log-prob of better answers {better:+.4f}, of worse ones {worse:+.4f}")
assert better > worse, "an update makes better answers more likely than worse ones"
groups.shutdown()
