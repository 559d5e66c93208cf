"""What travels between processes: `DataProto` and the schema of its columns. Knows nothing of models."""

from dovetail.protocol.dataproto import AUTO_PADDING, PADDING_COLUMN, DataProto, DataProtoItem
from dovetail.protocol.future import DataProtoFuture
from dovetail.protocol.padding import pad_dataproto_to_divisor, unpad_dataproto
from dovetail.protocol.readonly import ReadOnlyTensor, is_readonly

__all__ = [
    "AUTO_PADDING",
    "PADDING_COLUMN",
    "DataProto",
    "DataProtoFuture",
    "DataProtoItem",
    "ReadOnlyTensor",
    "is_readonly",
    "pad_dataproto_to_divisor",
    "unpad_dataproto",
]
