"""Which modules become sharding units of their own: the layers a model declares, and embeddings that are not tied.

The output layer always stays with the root, whose forward uses its weight directly.
"""

from __future__ import annotations

from torch import nn

from dovetail.config.fsdp import WrapPolicyConfig

_HEAD_NAMES = frozenset({"lm_head", "score", "classifier"})


def sharding_units(model: nn.Module, policy: WrapPolicyConfig) -> list[nn.Module]:
    """Units from the inside out, without the model itself: children before the modules that contain them."""
    if policy.disable:
        return []
    if policy.min_num_params > 0:
        return _units_by_size(model, policy.min_num_params)
    names = layer_class_names(model, policy)
    chosen = {module for module in model.modules() if type(module).__name__ in names}
    if not chosen:
        raise ValueError(
            f"{type(model).__name__} has no module of class {', '.join(sorted(names)) or '(none declared)'}; "
            "set fsdp_config.wrap_policy.transformer_layer_cls_to_wrap to its layer classes, or disable to true"
        )
    chosen |= {module for module in model.modules() if isinstance(module, nn.Embedding)}
    heads = _head_parameters(model)
    return [module for module in _inside_out(model) if module in chosen and not _holds(module, heads)]


def layer_class_names(model: nn.Module, policy: WrapPolicyConfig) -> frozenset[str]:
    """Classes named by the configuration, else those that the model (or a part of it) declares unsplittable."""
    if policy.transformer_layer_cls_to_wrap:
        return frozenset(policy.transformer_layer_cls_to_wrap)
    declared: set[str] = set()
    for module in model.modules():
        declared.update(getattr(module, "_no_split_modules", None) or ())
    return frozenset(declared)


def _units_by_size(model: nn.Module, min_num_params: int) -> list[nn.Module]:
    heads = _head_parameters(model)
    taken: set[int] = set()
    units: list[nn.Module] = []
    for module in _inside_out(model):
        own = {id(parameter): parameter.numel() for parameter in module.parameters() if id(parameter) not in taken}
        # A list or dict of modules is never called, so nothing would gather its weights.
        is_container = isinstance(module, (nn.ModuleList, nn.ModuleDict))
        if sum(own.values()) >= min_num_params and not is_container and not _holds(module, heads):
            units.append(module)
            taken |= own.keys()
    return units


def _inside_out(model: nn.Module) -> list[nn.Module]:
    return [module for module in reversed(list(model.modules())) if module is not model]


def _head_parameters(model: nn.Module) -> frozenset[int]:
    # By identity: an embedding tied to the output layer is the same parameter and must stay with it.
    heads = (module for name, module in model.named_modules() if name.split(".")[-1] in _HEAD_NAMES)
    return frozenset(id(parameter) for head in heads for parameter in head.parameters())


def _holds(module: nn.Module, parameters: frozenset[int]) -> bool:
    return any(id(parameter) in parameters for parameter in module.parameters())
