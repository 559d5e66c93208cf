"""How long new weights hold up generation: the embedded engine decodes while an update arrives, then swaps it in.

Random bf16 weights of Qwen2.5's shapes, 512 sequences running. `staged` copies an update beside the model while
decoding goes on and swaps between two tokens; `direct` (`update_weights`) holds decoding for the whole transfer. Both
take the same tensors from host memory, as they would arrive from a network.

    python -m benchmarks.gpu.weight_swap --repeats 5
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time

import torch
from transformers import AutoModelForCausalLM

from benchmarks.gpu.shapes import SHAPES, VOCABULARY, qwen2_config
from dovetail.rollout import GenerationRequest, SamplingParams
from dovetail.rollout.native.engine import NativeEngine

SEQUENCES, PROMPT, RESPONSE = 512, 120, 3000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[*SHAPES, "tiny"], default="1.5B")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        config = qwen2_config(args.shape, architectures=["Qwen2ForCausalLM"])
        with device:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder)
        weights = [(name, value.detach().cpu()) for name, value in model.named_parameters()]
        del model
        engine = NativeEngine(
            folder, device=device, dtype=torch.bfloat16, max_num_seqs=SEQUENCES, max_model_len=PROMPT + RESPONSE
        )
    print(json.dumps(measure(engine, weights, args.repeats)), flush=True)
    engine.close()


def measure(engine: NativeEngine, weights: list[tuple[str, torch.Tensor]], repeats: int) -> dict[str, list[float]]:
    """Seconds that decoding was held, and that the whole update took."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, VOCABULARY, (SEQUENCES, PROMPT), generator=generator).tolist()
    sampling = SamplingParams(max_new_tokens=RESPONSE, ignore_eos=True, seed=0)
    seconds: dict[str, list[float]] = {"staged_held_s": [], "staged_whole_s": [], "direct_held_s": []}
    with engine.open_stream() as stream:
        stream.submit(*(GenerationRequest(str(i), prompt, sampling) for i, prompt in enumerate(prompts)))
        decoding = threading.Thread(target=lambda: stream.results(), daemon=True)
        decoding.start()
        time.sleep(10)  # graphs are captured, decoding is in its stride
        for version in range(1, repeats + 1):
            start = time.perf_counter()
            engine.stage_weights(iter(weights), version)
            seconds["staged_held_s"].append(round(engine.commit_weights(version), 4))
            seconds["staged_whole_s"].append(round(time.perf_counter() - start, 4))
            time.sleep(1)
        for version in range(repeats + 1, 2 * repeats + 1):
            start = time.perf_counter()
            engine.update_weights(iter(weights), version)
            seconds["direct_held_s"].append(round(time.perf_counter() - start, 4))
            time.sleep(1)
        assert stream.num_running == SEQUENCES, "responses ended before the last update; make them longer"
        engine.abort()
        decoding.join(60)
    return seconds


if __name__ == "__main__":
    main()
