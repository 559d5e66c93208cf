"""Which modules become sharding units of their own: the layers a model declares, and embeddings that are not tied."""

from __future__ import annotations

from torch import nn

from dovetail.config.fsdp import WrapPolicyConfig


def sharding_units(model: nn.Module, policy: WrapPolicyConfig) -> list[nn.Module]:
    """Units from the inside out, without the model itself: children before the modules that contain them."""
    if policy.disable:
        return []
    if policy.min_num_params > 0:
        chosen = {m for m in model.modules() if _num_params(m) >= policy.min_num_params and m is not model}
    else:
        names = layer_class_names(model, policy)
        chosen = {m for m in model.modules() if type(m).__name__ in names}
        if not chosen:
            raise ValueError(
                f"{type(model).__name__} has no module of class {', '.join(sorted(names)) or '(none declared)'}; "
                "set fsdp_config.wrap_policy.transformer_layer_cls_to_wrap to its layer classes, or disable to true"
            )
        if not _ties_embeddings(model):
            chosen |= {m for m in model.modules() if isinstance(m, nn.Embedding)}
    return [module for module in reversed(list(model.modules())) if module in chosen]


def layer_class_names(model: nn.Module, policy: WrapPolicyConfig) -> frozenset[str]:
    """Classes named by the configuration, else those that the model (or a part of it) declares unsplittable."""
    if policy.transformer_layer_cls_to_wrap:
        return frozenset(policy.transformer_layer_cls_to_wrap)
    declared: set[str] = set()
    for module in model.modules():
        declared.update(getattr(module, "_no_split_modules", None) or ())
    return frozenset(declared)


def _ties_embeddings(model: nn.Module) -> bool:
    # Asked of the parameters, not of a config: a tied matrix must stay in the unit that contains both its users.
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    return any(isinstance(m, nn.Linear) and id(m.weight) in embeddings for m in model.modules())


def _num_params(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
