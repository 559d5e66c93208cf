"""Plug-ins as a user of verl brings them, with nothing changed but the imports."""

ALGORITHM = """
from collections import defaultdict

import torch

from dovetail.algorithms import agg_loss, masked_mean, register_adv_est, register_policy_loss


@register_adv_est("brought_along")
def compute_brought_along_advantage(token_level_rewards, response_mask, index, epsilon=1e-6, config=None, **kwargs):
    scores = token_level_rewards.sum(dim=-1)
    if config is not None and config.get("norm_adv_by_std_in_grpo", True):
        groups = defaultdict(list)
        for i, name in enumerate(index):
            groups[name].append(scores[i])
        with torch.no_grad():
            scores = scores.clone()
            for i, name in enumerate(index):
                values = torch.stack(groups[name])
                scores[i] = (scores[i] - values.mean()) / (values.std() + epsilon)
    advantages = scores.unsqueeze(-1) * response_mask
    return advantages, advantages


@register_policy_loss("brought_along")
def compute_brought_along_loss(
    old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None, rollout_is_weights=None
):
    assert config is not None
    high = config.clip_ratio_high if config.clip_ratio_high is not None else config.clip_ratio
    low = config.clip_ratio_low if config.clip_ratio_low is not None else config.clip_ratio
    ratio = torch.exp(torch.clamp(log_prob - old_log_prob, min=-20.0, max=20.0))
    losses1, losses2 = -advantages * ratio, -advantages * torch.clamp(ratio, 1 - low, 1 + high)
    clipped = torch.maximum(losses1, losses2)
    clipped = torch.where(advantages < 0, torch.min(-advantages * config.get("clip_ratio_c", 3.0), clipped), clipped)
    loss = agg_loss(loss_mat=clipped, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **config.global_batch_info)
    fraction = masked_mean(torch.gt(losses2, losses1).float(), response_mask)
    return loss, {"actor/pg_clipfrac": fraction.detach().item()}
"""

ENGINE_AND_TRACKER = '''
from pathlib import Path

from dovetail.observability.sinks import Sink, register_tracker
from dovetail.rollout import register_engine
from dovetail.rollout.native.engine import NativeEngine


class OwnEngine(NativeEngine):
    """Leaves a note of the process that it runs in."""

    @classmethod
    def from_config(cls, *args, **kwargs):
        import os

        Path("engine.txt").write_text(str(os.getpid()))
        return super().from_config(*args, **kwargs)


register_engine("own", f"{__name__}:OwnEngine")


def stop_at_two(step, metrics):
    return "stop" if step == 2 and "actor/pg_loss" in metrics else None


@register_tracker("notes")
class Notes(Sink):
    def __init__(self, facts):
        self.file = facts.folder / "notes.txt"

    def event(self, kind, step, facts):
        self._write(f"{kind} {step}")

    def log(self, step, metrics):
        self._write(f"step {step}")

    def close(self):
        self._write("end")

    def _write(self, line):
        with self.file.open("a") as file:
            file.write(line + "\\n")
'''

DATASET = '''
import pyarrow.parquet as parquet
from torch.utils.data import Dataset


class BroughtDataset(Dataset):
    """Rows of parquet files, chats as they are: the prompt is put into tokens later."""

    def __init__(self, data_files, tokenizer, config, processor=None, max_samples=-1):
        self.rows = [row for path in data_files for row in parquet.read_table(path).to_pylist()]
        self.prompt_key = config.get("prompt_key", "prompt")
        self.max_prompt_length = config.get("max_prompt_length", 1024)
        self.cache_dir = config.get("cache_dir", "none")
        assert self.cache_dir == "none"
        assert config.max_prompt_length == self.max_prompt_length

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, item):
        row = dict(self.rows[item])
        row["raw_prompt"] = row.pop(self.prompt_key)
        row["index"] = row.get("extra_info", {}).get("index", 0)
        return row
'''

SAMPLER = '''
from collections.abc import Sized

import torch
from torch.utils.data import Sampler


class BroughtSampler(Sampler[int]):
    """verl's AbstractCurriculumSampler: easy rows first, and it hears of every batch."""

    def __init__(self, data_source: Sized, data_config):
        self.data_source = data_source
        self.batch_size = data_config.get("train_batch_size", 4)
        self.seen = 0

    def __len__(self):
        return len(self.data_source)

    def __iter__(self):
        yield from range(len(self.data_source))

    def update(self, batch):
        self.seen += len(batch)

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


class RandomOrder(Sampler[int]):
    """As torch's own: the data source alone, and random numbers of the global generator."""

    def __init__(self, data_source):
        self.data_source = data_source

    def __len__(self):
        return len(self.data_source)

    def __iter__(self):
        yield from torch.randperm(len(self.data_source)).tolist()
'''
