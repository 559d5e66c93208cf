"""Launch lists of verl's SFT trainers: model, optimizer and micro-batch are at the root there, the actor's here."""

from __future__ import annotations

_ACTOR, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"

SFT_SPELLINGS: tuple[tuple[str, str], ...] = (
    ("model.partial_pretrain", f"{_MODEL}.path"),
    ("model.strategy", f"{_ACTOR}.strategy"),
    ("model.fsdp_config.offload_params", f"{_ACTOR}.fsdp_config.param_offload"),
    ("model.fsdp_config.*", f"{_ACTOR}.fsdp_config.*"),
    ("model.*", f"{_MODEL}.*"),
    ("optim.warmup_steps_ratio", f"{_ACTOR}.optim.lr_warmup_steps_ratio"),
    ("optim.*", f"{_ACTOR}.optim.*"),
    ("ulysses_sequence_parallel_size", f"{_ACTOR}.ulysses_sequence_parallel_size"),
    ("use_remove_padding", f"{_MODEL}.use_remove_padding"),
    ("data.micro_batch_size_per_gpu", f"{_ACTOR}.ppo_micro_batch_size_per_gpu"),
    ("data.use_dynamic_bsz", f"{_ACTOR}.use_dynamic_bsz"),
    ("data.max_token_len_per_gpu", f"{_ACTOR}.ppo_max_token_len_per_gpu"),
    ("data.response_key", "sft.response_key"),
    ("data.prompt_dict_keys", "sft.prompt_dict_keys"),
    ("data.response_dict_keys", "sft.response_dict_keys"),
    ("data.messages_key", "sft.messages_key"),
    ("data.tools_key", "sft.tools_key"),
    ("data.multiturn.messages_key", "sft.messages_key"),
    ("data.multiturn.tools_key", "sft.tools_key"),
    ("data.balance_dp_token", "trainer.balance_batch"),
    ("data.chat_template", f"{_MODEL}.custom_chat_template"),
    ("trainer.checkpoint.*", f"{_ACTOR}.checkpoint.*"),
)
"""Written as, read as."""
