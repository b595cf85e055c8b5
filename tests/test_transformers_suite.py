"""Transformers' own tests of models, configs and backbones, on ours; see peer_suites.py for the command."""

import unittest

import pytest
import torch
from conftest import TINY_SIZES
from peer_suites import import_suite, skip_exceptions

from hf_decayed import (
    DecayedViTMAEBackbone,
    DecayedViTMAEConfig,
    DecayedViTMAEForImageClassification,
    DecayedViTMAEForPreTraining,
    DecayedViTMAEModel,
)


pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
common, configurations, backbones = import_suite(
    "TRANSFORMERS_SOURCE",
    "test_modeling_common",
    "test_configuration_common",
    "test_backbone_common",
    needs=("parameterized", "httpx"),
)


class ModelTester:
    """What the library's tests ask of a family: a config, inputs, and the sizes that they expect."""

    batch_size, num_channels, image_size, patch_size = 3, 3, 32, 8
    hidden_size, num_hidden_layers, num_attention_heads = 32, 2, 4

    def __init__(self, parent, is_training: bool, inputs: dict, seq_length: int = 17):
        """`seq_length` is that of the encoder: 16 patches and the class token, or those that are not masked."""
        self.parent, self.is_training, self.inputs, self.seq_length = parent, is_training, inputs, seq_length

    def get_config(self) -> DecayedViTMAEConfig:
        sizes = {**TINY_SIZES, "num_hidden_layers": 2, "decoder_num_hidden_layers": 2}
        return DecayedViTMAEConfig(**sizes, attn_implementation="eager", num_labels=3)

    def prepare_config_and_inputs_for_common(self):
        shape = [self.batch_size, self.num_channels, self.image_size, self.image_size]
        return self.get_config(), {"pixel_values": common.floats_tensor(shape), **self.inputs}


class ModelTests(common.ModelTesterMixin):
    test_resize_embeddings = False

    def test_config(self):
        sizes = {"hidden_size": 32, "num_attention_heads": 4}
        configurations.ConfigTester(
            self, config_class=DecayedViTMAEConfig, has_text_modality=False, **sizes
        ).run_common_tests()

    def test_model_get_set_embeddings(self):
        for model_class in self.all_model_classes:
            model = model_class(self.model_tester.get_config())
            assert isinstance(model.get_input_embeddings(), torch.nn.Module)


INCOMPLETE = {
    "test_model_weights_reload_no_missing_tied_weights": "An incomplete checkpoint is refused, not filled with new weights.",
}


# The test passes noise, by which our encoder masks, and an attention mask for the tokens of the whole image.
MASKS_AND_NOISE = {
    name: "An attention mask for all tokens does not fit those that are left by the mask of the noise."
    for name in dir(ModelTests)
    if name.startswith("test_eager_matches_sdpa_inference_") and "no_attn_mask" not in name
}


@skip_exceptions({**INCOMPLETE, **MASKS_AND_NOISE})
class TestEncoder(ModelTests, unittest.TestCase):
    all_model_classes = (DecayedViTMAEModel,)

    def setUp(self):
        self.model_tester = ModelTester(self, is_training=False, inputs={})


@skip_exceptions(INCOMPLETE)
class TestPreTraining(ModelTests, unittest.TestCase):
    """With the noise of the mask among the inputs, so that outputs can be compared; ViTMAE's own tests leave these out."""

    all_model_classes = (DecayedViTMAEForPreTraining,)

    def setUp(self):
        noise = torch.rand(3, 16, generator=torch.Generator().manual_seed(0))
        self.model_tester = ModelTester(self, is_training=True, inputs={"noise": noise}, seq_length=5)


@skip_exceptions(INCOMPLETE)
class TestClassifier(ModelTests, unittest.TestCase):
    all_model_classes = (DecayedViTMAEForImageClassification,)

    def setUp(self):
        self.model_tester = ModelTester(self, is_training=True, inputs={})

    def _prepare_for_class(self, inputs_dict, model_class, return_labels=False):
        inputs = super()._prepare_for_class(inputs_dict, model_class)
        return {**inputs, "labels": torch.zeros(3, dtype=torch.long)} if return_labels else inputs


class TestBackbone(backbones.BackboneTesterMixin, unittest.TestCase):
    all_model_classes = (DecayedViTMAEBackbone,)
    config_class = DecayedViTMAEConfig

    def setUp(self):
        self.model_tester = ModelTester(self, is_training=False, inputs={})
