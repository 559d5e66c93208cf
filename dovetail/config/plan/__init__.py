"""The plan of a run, from its config and the model's `config.json`: who runs where, batches, memory."""

from dovetail.config.plan.model_shape import ModelShape, ModelShapeError, read_model_shape, shape_from_config
from dovetail.config.plan.plan import Plan, make_plan
from dovetail.config.plan.shapes import Shapes, read_shapes

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
