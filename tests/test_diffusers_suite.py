"""Diffusers' own tests of models and pipelines, on ours; see peer_suites.py for the command."""

import unittest

import pytest
import torch
from diffusers import AutoencoderKL, DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler
from peer_suites import import_suite

from hf_decayed import DecayedSiTPipeline, DecayedSiTTransformer2DModel, DecayedUViT2DModel, DecayedUViTPipeline


pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
models, pipelines, arguments = import_suite(
    "DIFFUSERS_SOURCE",
    "models.testing_utils",
    "pipelines.test_pipelines_common",
    "pipelines.pipeline_params",
    needs=("requests_mock",),
)


class Sizes(models.BaseModelTesterConfig):
    """A small network of two classes and one time per sample."""

    main_input_name = cache_input_key = "sample"
    output_shape = input_shape = (3, 8, 8)
    sizes = {"sample_size": 8, "patch_size": 2, "in_channels": 3, "hidden_size": 32, "num_attention_heads": 4}

    def get_init_dict(self) -> dict:
        return {**self.sizes, "num_layers": 4, "num_classes": 2, "shortcut_decay": 0.6}

    def get_dummy_inputs(self, batch_size: int = 2) -> dict:
        generator = torch.Generator().manual_seed(0)
        return {
            "sample": torch.randn(batch_size, 3, 8, 8, generator=generator),
            "timestep": torch.rand(batch_size, generator=generator),
            "class_labels": torch.arange(batch_size) % 2,
        }


class UViT(Sizes):
    model_class = DecayedUViT2DModel

    def get_init_dict(self) -> dict:
        # Branches that start at zero would leave attention, its caches and its adapters without effect.
        return {**super().get_init_dict(), "zero_init_branches": False}


class RandomSiT(DecayedSiTTransformer2DModel):
    """From scratch a SiT predicts zero, as a DiT does, and there would be nothing to compare."""

    def initialize_weights(self) -> None:
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter, std=0.2)


class SiT(Sizes):
    model_class = RandomSiT


class TestUViT(UViT, models.ModelTesterMixin):
    pass


class TestSiT(SiT, models.ModelTesterMixin):
    pass


class TestUViTTraining(UViT, models.TrainingTesterMixin):
    def test_gradient_checkpointing_is_applied(self):
        super().test_gradient_checkpointing_is_applied(expected_set={"DecayedUViT2DModel"})


class TestSiTTraining(SiT, models.TrainingTesterMixin):
    def test_gradient_checkpointing_is_applied(self):
        super().test_gradient_checkpointing_is_applied(expected_set={"RandomSiT"})


class TestUViTMemory(UViT, models.MemoryTesterMixin):
    pass


class TestSiTMemory(SiT, models.MemoryTesterMixin):
    pass


class TestUViTAttention(UViT, models.AttentionTesterMixin):
    pass


class TestSiTAttention(SiT, models.AttentionTesterMixin):
    pass


class TestUViTLora(UViT, models.LoraTesterMixin):
    pass


class TestSiTLora(SiT, models.LoraTesterMixin):
    pass


class TestUViTFirstBlockCache(UViT, models.FirstBlockCacheTesterMixin):
    pass


class TestSiTFirstBlockCache(SiT, models.FirstBlockCacheTesterMixin):
    pass


class TestUViTMagCache(UViT, models.MagCacheTesterMixin):
    pass


class TestSiTMagCache(SiT, models.MagCacheTesterMixin):
    pass


class TestUViTTaylorSeerCache(UViT, models.TaylorSeerCacheTesterMixin):
    pass


class TestSiTTaylorSeerCache(SiT, models.TaylorSeerCacheTesterMixin):
    pass


class TestUViTPyramidAttentionBroadcast(UViT, models.PyramidAttentionBroadcastTesterMixin):
    pass


class TestSiTPyramidAttentionBroadcast(SiT, models.PyramidAttentionBroadcastTesterMixin):
    pass


class PipelineTests(pipelines.PipelineTesterMixin):
    params = arguments.CLASS_CONDITIONED_IMAGE_GENERATION_PARAMS
    batch_params = arguments.CLASS_CONDITIONED_IMAGE_GENERATION_BATCH_PARAMS
    required_optional_params = pipelines.PipelineTesterMixin.required_optional_params - {"num_images_per_prompt"}

    def vae(self):
        torch.manual_seed(0)
        blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
        sizes = {"block_out_channels": (4, 8), "norm_num_groups": 2, "latent_channels": 3, "layers_per_block": 1}
        return AutoencoderKL(**blocks, **sizes).eval()

    def get_dummy_inputs(self, device, seed=0) -> dict:
        generator = torch.Generator().manual_seed(seed)
        return {"class_labels": [1], "generator": generator, "num_inference_steps": 2, "output_type": "np"}


class TestUViTPipeline(PipelineTests, unittest.TestCase):
    pipeline_class = DecayedUViTPipeline

    def get_dummy_components(self) -> dict:
        torch.manual_seed(0)
        network = DecayedUViT2DModel(**UViT().get_init_dict()).eval()
        return {"unet": network, "scheduler": DPMSolverMultistepScheduler(), "vae": self.vae()}


class TestSiTPipeline(PipelineTests, unittest.TestCase):
    pipeline_class = DecayedSiTPipeline

    def get_dummy_components(self) -> dict:
        torch.manual_seed(0)
        network = DecayedSiTTransformer2DModel(**SiT().get_init_dict()).eval()
        return {"transformer": network, "scheduler": FlowMatchEulerDiscreteScheduler(), "vae": self.vae()}
