"""Networks: backbones, heads, the decoder, and how they are joined, counted and saved."""

from caaseg.config import ModelConfig
from caaseg.models.heads import HEADS
from caaseg.models.saving import load_model
from caaseg.models.segmenter import Prediction, Segmenter, create_model, with_output_stride

__all__ = ["HEADS", "ModelConfig", "Prediction", "Segmenter", "create_model", "load_model", "with_output_stride"]
