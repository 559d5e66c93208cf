"""The processor of the tiny vision-language model: Qwen's own image processor, and placeholders widened as Qwen does.

Qwen2.5-VL's own class also builds a video processor, which needs torchvision. Saved with a model this file travels
along as code of the folder, so it imports transformers only; reading it takes `trust_remote_code`.
"""

from __future__ import annotations

from typing import Any

from transformers.processing_utils import ProcessorMixin


class TinyVisionProcessor(ProcessorMixin):
    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None) -> None:
        self.image_token = "<|image_pad|>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    def replace_image_token(self, image_inputs: dict[str, Any], image_idx: int, **kwargs: Any) -> str:
        merged = self.image_processor.merge_size**2
        return self.image_token * int(image_inputs["image_grid_thw"][image_idx].prod() // merged)


TinyVisionProcessor.register_for_auto_class("AutoProcessor")
