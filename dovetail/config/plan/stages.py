"""Which layers a pipeline stage holds. Plain arithmetic; knows no config and no device."""

from __future__ import annotations


def pipeline_stages(
    num_layers: int,
    pipeline: int,
    *,
    virtual: int = 1,
    first: int | None = None,
    last: int | None = None,
    count_embedding: bool = False,
    count_head: bool = False,
) -> tuple[tuple[int, ...], ...]:
    """Layer indices of each stage, `first` and `last` layers in the end stages where they are given.

    `count_embedding` and `count_head` count the ends as a layer each, so that their stages hold one layer less. With
    `virtual` chunks per stage, stage `s` holds chunks `s`, `s + pipeline`, ... as interleaved schedules do.
    """
    if (count_embedding or count_head) and pipeline > 1:
        if first is not None or last is not None:
            raise ValueError(
                "account_for_embedding_in_pipeline_split and account_for_loss_in_pipeline_split cannot be combined "
                "with a number of layers for the first or last stage"
            )
        sizes = _counting_ends(num_layers, pipeline, virtual, int(count_embedding), int(count_head))
    else:
        sizes = _chunk_sizes(stage_sizes(num_layers, pipeline, first=first, last=last), virtual)
    held: list[list[int]] = [[] for _ in range(pipeline)]
    next_layer = 0
    for chunk, size in enumerate(sizes):
        held[chunk % pipeline].extend(range(next_layer, next_layer + size))
        next_layer += size
    return tuple(tuple(layers) for layers in held)


def stage_sizes(
    num_layers: int, pipeline: int, *, first: int | None = None, last: int | None = None
) -> tuple[int, ...]:
    """Layers per stage; a ValueError says why a split is impossible."""
    if pipeline == 1:
        return (num_layers,)
    if first == 0 or last == 0:
        raise ValueError("a first or last stage of 0 layers is not built by Megatron; it must hold at least one")
    inner = num_layers - (first or 0) - (last or 0)
    inner_stages = pipeline - (first is not None) - (last is not None)
    if inner < 0:
        raise ValueError(f"the end stages ask for {(first or 0) + (last or 0)} layers, the model has {num_layers}")
    if inner_stages == 0:
        if inner:
            raise ValueError(f"the two stages hold {(first or 0) + (last or 0)} layers, the model has {num_layers}")
        return (first or 0, last or 0)
    if inner % inner_stages:
        raise ValueError(f"{inner} layers cannot be shared equally by {inner_stages} pipeline stages")
    if inner == 0:
        raise ValueError(f"{inner_stages} pipeline stages would hold no layer at all")
    sizes = [inner // inner_stages] * pipeline
    if first is not None:
        sizes[0] = first
    if last is not None:
        sizes[-1] = last
    return tuple(sizes)


def _chunk_sizes(stages: tuple[int, ...], virtual: int) -> list[int]:
    """Layers of each virtual chunk: the first of every stage, then the second of every stage, ..."""
    for stage, count in enumerate(stages):
        if count % virtual:
            raise ValueError(
                f"pipeline stage {stage} has {count} layers, which {virtual} virtual chunks cannot share equally"
            )
    return [count // virtual for _ in range(virtual) for count in stages]


def _counting_ends(num_layers: int, pipeline: int, virtual: int, embedding: int, head: int) -> list[int]:
    """The same where the embedding and the head take the place of a layer."""
    places = num_layers + embedding + head
    chunks = pipeline * virtual
    if places % chunks:
        raise ValueError(
            f"{num_layers} layers and {embedding + head} end{'s' * (embedding + head > 1)} that count as one cannot be "
            f"shared equally by {pipeline} pipeline stages" + (f" of {virtual} virtual chunks" if virtual > 1 else "")
        )
    sizes = [places // chunks] * chunks
    sizes[0] -= embedding
    sizes[-1] -= head
    return sizes
