"""The plan of a run, from its config and the model's `config.json`: who runs where, batches, memory."""

from dovetail.config.plan.model_shape import (
    ModelShape,
    ModelShapeError,
    Shapes,
    read_model_shape,
    read_shapes,
    shape_from_config,
)
from dovetail.config.plan.plan import Plan, make_plan

__all__ = [
    "ModelShape",
    "ModelShapeError",
    "Plan",
    "Shapes",
    "make_plan",
    "read_model_shape",
    "read_shapes",
    "shape_from_config",
]
