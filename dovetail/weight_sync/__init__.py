"""How weights reach an engine: a training backend streams full tensors, the engine takes them."""

from dovetail.weight_sync.broadcast import (
    Announcements,
    BroadcastFailedError,
    WeightReceiver,
    WeightSender,
    cancel_broadcast,
)
from dovetail.weight_sync.buckets import DEFAULT_BUCKET_BYTES, Bucket, BucketEntry, entries_of, iter_buckets
from dovetail.weight_sync.checksum import (
    SampledWeights,
    WeightMismatchError,
    require_equal,
    tensor_checksum,
)
from dovetail.weight_sync.disk import write_version
from dovetail.weight_sync.group import GroupAddress, GroupFailedError
from dovetail.weight_sync.sharding_manager import (
    FSDPSGLangShardingManager,
    FSDPVLLMShardingManager,
    MegatronVLLMShardingManager,
)
from dovetail.weight_sync.shared_memory import (
    IpcHandle,
    export_ipc_handle,
    import_ipc_handle,
    read_bucket_file,
    shared_memory_buckets,
)
from dovetail.weight_sync.stream import (
    ExpectedWeights,
    GatheredWeights,
    LoraAdapter,
    NamedTensors,
    WeightAccount,
    in_engine_dtype,
    write_peft_folder,
)

__all__ = [
    "DEFAULT_BUCKET_BYTES",
    "Announcements",
    "BroadcastFailedError",
    "Bucket",
    "BucketEntry",
    "ExpectedWeights",
    "FSDPSGLangShardingManager",
    "FSDPVLLMShardingManager",
    "GatheredWeights",
    "GroupAddress",
    "GroupFailedError",
    "IpcHandle",
    "LoraAdapter",
    "MegatronVLLMShardingManager",
    "NamedTensors",
    "SampledWeights",
    "WeightAccount",
    "WeightMismatchError",
    "WeightReceiver",
    "WeightSender",
    "cancel_broadcast",
    "entries_of",
    "export_ipc_handle",
    "import_ipc_handle",
    "in_engine_dtype",
    "iter_buckets",
    "read_bucket_file",
    "require_equal",
    "shared_memory_buckets",
    "tensor_checksum",
    "write_peft_folder",
    "write_version",
]
