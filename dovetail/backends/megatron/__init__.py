"""Megatron-core as a training backend: tensor, pipeline, context and expert parallelism. Knows no RL.

Megatron is imported inside these modules only, and none of them is imported unless a role's strategy is `megatron`.
"""
