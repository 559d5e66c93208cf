"""The start and the end of a decode step for every row, on the device: what it reads, and what it has become."""

from __future__ import annotations

import torch
import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]

from dovetail.rollout.native.cuda.slots import SlotState

_ROWS_EACH = 128


def begin_rows(
    slots: torch.Tensor, state: SlotState, page_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """For the rows that hold `slots`: token, position (int64 both), keys to attend to (int32), where to store (int64).

    A row whose slot is not active attends to nothing and stores nowhere (-1).
    """
    rows = slots.shape[0]
    tokens = slots.new_empty(rows, dtype=torch.int64)
    positions, targets = torch.empty_like(tokens), torch.empty_like(tokens)
    lengths = slots.new_empty(rows, dtype=torch.int32)
    _begin_kernel[(triton.cdiv(rows, _ROWS_EACH),)](
        slots,
        state.last_tokens,
        state.cached,
        state.active,
        state.table,
        tokens,
        positions,
        lengths,
        targets,
        rows,
        state.table.stride(0),
        PAGE=page_size,
        EACH=_ROWS_EACH,
        num_warps=4,
    )
    return tokens, positions, lengths, targets


def end_rows(
    slots: torch.Tensor,
    tokens: torch.Tensor,
    log_probs: torch.Tensor,
    state: SlotState,
    step: torch.Tensor,
    out_tokens: torch.Tensor,
    out_log_probs: torch.Tensor,
) -> None:
    """Append each active row's token to its slot and to row `step` of the outputs; end rows that stop.

    In `out_tokens` a token that ends its sequence is written as -2 - token, and -1 means the row was not active. The
    step counter itself is not moved.
    """
    rows = slots.shape[0]
    _end_kernel[(triton.cdiv(rows, _ROWS_EACH),)](
        slots,
        tokens,
        log_probs,
        state.last_tokens,
        state.cached,
        state.active,
        state.max_lengths,
        state.stop_ids,
        step,
        out_tokens,
        out_log_probs,
        rows,
        out_tokens.stride(0),
        NUM_STOPS=state.stop_ids.shape[1],
        EACH=_ROWS_EACH,
        num_warps=4,
    )


@triton.jit
def _begin_kernel(
    slot_ptr,
    last_token_ptr,
    cached_ptr,
    active_ptr,
    table_ptr,
    token_ptr,
    position_ptr,
    length_ptr,
    target_ptr,
    num_rows,
    table_stride,
    PAGE: tl.constexpr,
    EACH: tl.constexpr,
):
    rows = tl.program_id(0) * EACH + tl.arange(0, EACH)
    mask = rows < num_rows
    slot = tl.load(slot_ptr + rows, mask=mask, other=0).to(tl.int64)
    active = (tl.load(active_ptr + slot, mask=mask, other=0) != 0) & mask
    position = tl.load(cached_ptr + slot, mask=mask, other=0)
    page = tl.load(table_ptr + slot * table_stride + position // PAGE, mask=active, other=0).to(tl.int64)
    tl.store(token_ptr + rows, tl.load(last_token_ptr + slot, mask=mask, other=0), mask=mask)
    tl.store(position_ptr + rows, position.to(tl.int64), mask=mask)
    tl.store(length_ptr + rows, tl.where(active, position + 1, 0), mask=mask)
    tl.store(target_ptr + rows, tl.where(active, page * PAGE + position % PAGE, -1), mask=mask)


@triton.jit
def _end_kernel(
    slot_ptr,
    token_ptr,
    log_prob_ptr,
    last_token_ptr,
    cached_ptr,
    active_ptr,
    max_length_ptr,
    stop_ptr,
    step_ptr,
    out_token_ptr,
    out_log_prob_ptr,
    num_rows,
    out_stride,
    NUM_STOPS: tl.constexpr,
    EACH: tl.constexpr,
):
    rows = tl.program_id(0) * EACH + tl.arange(0, EACH)
    mask = rows < num_rows
    slot = tl.load(slot_ptr + rows, mask=mask, other=0).to(tl.int64)
    active = (tl.load(active_ptr + slot, mask=mask, other=0) != 0) & mask
    token = tl.load(token_ptr + rows, mask=mask, other=0)
    cached = tl.load(cached_ptr + slot, mask=mask, other=0) + 1
    # The cache holds all but the last token.
    done = cached + 1 >= tl.load(max_length_ptr + slot, mask=mask, other=0)
    for index in tl.static_range(NUM_STOPS):
        done = done | (token == tl.load(stop_ptr + slot * NUM_STOPS + index, mask=mask, other=-1))
    tl.store(last_token_ptr + slot, token, mask=active)
    tl.store(cached_ptr + slot, cached, mask=active)
    tl.store(active_ptr + slot, tl.where(done, 0, 1), mask=active)
    out = tl.load(step_ptr).to(tl.int64) * out_stride + rows
    tl.store(out_token_ptr + out, tl.where(active, tl.where(done, -2 - token, token), -1), mask=mask)
    tl.store(out_log_prob_ptr + out, tl.load(log_prob_ptr + rows, mask=mask, other=0.0), mask=mask)
