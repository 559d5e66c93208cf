"""What travels between processes: `DataProto` and the schema of its columns. Knows nothing of models."""

from dovetail.protocol.dataproto import AUTO_PADDING, PADDING_COLUMN, DataProto, DataProtoItem
from dovetail.protocol.future import DataProtoFuture
from dovetail.protocol.padding import pad_dataproto_to_divisor, unpad_dataproto
from dovetail.protocol.readonly import ReadOnlyTensor, is_readonly
from dovetail.protocol.schema import (
    COLUMNS,
    STAGES,
    ColumnSpec,
    SchemaError,
    Stage,
    stage_columns,
    unmet_reads,
    validate,
    validate_stage,
)

__all__ = [
    "AUTO_PADDING",
    "COLUMNS",
    "PADDING_COLUMN",
    "STAGES",
    "ColumnSpec",
    "DataProto",
    "DataProtoFuture",
    "DataProtoItem",
    "ReadOnlyTensor",
    "SchemaError",
    "Stage",
    "is_readonly",
    "pad_dataproto_to_divisor",
    "stage_columns",
    "unmet_reads",
    "unpad_dataproto",
    "validate",
    "validate_stage",
]
