"""Structural adversarial objectives: networks, losses, metrics, pipeline, training script, page."""

import copy
import itertools
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import time

import evaluate
import pytest
import structural_gan
import structural_gan_report
import torch
from conftest import ROOT, random_weights, run_script
from diffusers import DiffusionPipeline
from script_server import kill, start_script
from torch import nn
from torch.nn import functional as F
from transformers import AutoModel, ViTConfig, ViTModel

from hf_decayed import (
    StructuralDiscriminatorConfig,
    StructuralDiscriminatorModel,
    StructuralGANPipeline,
    StructuralGenerator,
)
from hf_decayed.cli import main
from hf_decayed.evaluation import (
    cluster_accuracy,
    kmeans_metrics,
    linear_svm,
    normalized_mutual_information,
    purity,
    spherical_kmeans,
)
from hf_decayed.kinds.structural_gan import gan_output
from hf_decayed.losses.adversarial import (
    NeighbourBank,
    check_jacobian_support,
    gaussian_divergence,
    hinge_discriminator_loss,
    hinge_generator_loss,
    jacobian_norm,
    neighbour_alignment,
    norm_hinge,
)
from hf_decayed.models.shortcut_decay import shortcut_factors
from hf_decayed.pipelines.pipeline_structural_gan import truncate_normal
from hf_decayed.run.structural_gan import runaway_warning


TINY = {"hidden_sizes": (8, 16), "depths": (1, 2), "group_size": 4, "projection_size": 6, "num_channels": 1}
TINY_GENERATOR = {"sample_size": 12, "out_channels": 1, "latent_dim": 5, "block_out_channels": (16, 8)}


def tiny_discriminator(**fields):
    return StructuralDiscriminatorModel(StructuralDiscriminatorConfig(**{**TINY, **fields}))


def tiny_generator(**fields):
    return StructuralGenerator(**{**TINY_GENERATOR, **fields})


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def sphere(number, dim, seed=0):
    return F.normalize(torch.randn(number, dim, generator=torch.Generator().manual_seed(seed)), dim=1)


# Networks.


def test_networks_have_the_release_s_parameters():
    with torch.device("meta"):
        discriminator, probe = StructuralDiscriminatorModel(StructuralDiscriminatorConfig()), nn.Linear(512, 10)
        generator = StructuralGenerator()
    assert count(discriminator) + count(probe) == 11_498_314
    assert count(discriminator.projection_in) + count(discriminator.projection_out) == 328_320
    assert sum(isinstance(module, nn.GroupNorm) for module in discriminator.modules()) == 11
    assert count(generator) == 5_025_667


def test_networks_for_128_pixels():
    """The dissertation's stages, with few channels."""
    config = StructuralDiscriminatorConfig.from_size("imagenet")
    config = StructuralDiscriminatorConfig.from_size(
        "imagenet", hidden_sizes=[size // 16 for size in config.hidden_sizes], group_size=4
    )
    output = StructuralDiscriminatorModel(config)(torch.zeros(1, 3, 128, 128))
    assert output.last_hidden_state.shape == (1, 32, 4, 4)
    generator = StructuralGenerator.from_size("imagenet", sample_size=128, block_out_channels=(16, 16, 8, 8, 8))
    assert generator(torch.randn(2, 128)).sample.shape == (2, 3, 128, 128)
    assert "attention" in generator.stages[3] and "attention" not in generator.stages[4]


def test_discriminator_gives_features_and_embeddings():
    model = tiny_discriminator().eval()
    images = torch.randn(3, 1, 12, 12)
    output = model(images, output_hidden_states=True)
    assert output.last_hidden_state.shape == (3, 16, 6, 6) and output.raw_embeds.shape == (3, 6)
    torch.testing.assert_close(output.pooler_output, output.last_hidden_state.mean(dim=(2, 3)))
    torch.testing.assert_close(output.image_embeds, F.normalize(output.raw_embeds, dim=1))
    assert [state.shape[1] for state in output.hidden_states] == [8, 8, 16]
    assert model(images).hidden_states is None and len(model(images, return_dict=False)) == 4
    # An image's output does not depend on the others of the batch.
    torch.testing.assert_close(model(images[:1]).raw_embeds, output.raw_embeds[:1])
    with pytest.raises(
        ValueError, match=r"`pixel_values` must have shape \(batch, 1, height, width\), got \(3, 3, 8, 8\)"
    ):
        model(torch.zeros(3, 3, 8, 8))


def test_config_chooses_the_outputs():
    images = torch.randn(2, 1, 12, 12)
    assert tiny_discriminator(output_hidden_states=True)(images).hidden_states is not None
    assert isinstance(tiny_discriminator(return_dict=False)(images), tuple)
    assert tiny_discriminator()(images).hidden_states is None


def test_initial_weights_are_the_release_s():
    model = StructuralDiscriminatorModel(StructuralDiscriminatorConfig(hidden_sizes=(64, 128), depths=(1, 1)))
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            fan_out = module.out_channels * math.prod(module.kernel_size)
            assert module.weight.std().item() == pytest.approx(math.sqrt(2 / fan_out), rel=0.1)
        elif isinstance(module, nn.GroupNorm):
            assert (
                module.weight.eq(1).all()
                and module.bias.eq(0).all()
                and module.num_channels // module.num_groups == 16
            )
        elif isinstance(module, nn.Linear):
            assert 0.9 / math.sqrt(module.in_features) < module.weight.abs().max() <= 1 / math.sqrt(module.in_features)


def test_shortcuts_decay_with_depth():
    model = tiny_discriminator(shortcut_decay=0.4)
    alphas = [block.alpha for blocks in model.stages for block in blocks]
    assert alphas == shortcut_factors([0.0, 0.5, 1.0], 0.4)
    plain = tiny_discriminator()
    plain.load_state_dict(model.state_dict())
    images = torch.randn(2, 1, 8, 8)
    assert not torch.allclose(plain(images).raw_embeds, model(images).raw_embeds)


@pytest.mark.parametrize(
    "fields, sentence",
    [
        ({"depths": (1,)}, "`depths` needs one entry for each of `hidden_sizes`"),
        ({"hidden_sizes": (8, 10)}, "`hidden_sizes` must be divisible by `group_size`, got 10 and 4"),
        ({"projection_size": 0}, r"`projection_size` must be in \[1, 65536\], got 0"),
        ({"shortcut_decay": 1.5}, r"`shortcut_decay` must lie in \[0, 1\], got 1.5"),
        ({"projection_sizes": 3}, "did you mean `projection_size`"),
    ],
)
def test_wrong_configs_are_one_sentence(fields, sentence):
    with pytest.raises(Exception, match=sentence):
        StructuralDiscriminatorConfig(**{**TINY, **fields})


@pytest.mark.parametrize(
    "fields, sentence",
    [
        ({"sample_size": 10}, "`sample_size` must be divisible by 4, because 2 stages double it, got 10"),
        ({"block_out_channels": (8, 16)}, "`block_out_channels` must not rise from stage to stage"),
        ({"block_out_channels": (12, 8)}, "`block_out_channels` must be divisible by 8, got 12"),
        ({"attention_sizes": (64,)}, r"`attention_sizes` must be some of \[6, 12\]"),
        ({"latent_dims": 3}, "did you mean `latent_dim`"),
    ],
)
def test_wrong_generators_are_one_sentence(fields, sentence):
    with pytest.raises(ValueError, match=sentence):
        tiny_generator(**fields)


def test_spectral_norm_is_that_of_the_weight():
    generator = tiny_generator()
    for _ in range(30):
        generator(torch.randn(4, 5))
    layer = generator.stages[0]["blocks"][0].conv2
    exact = torch.linalg.matrix_norm(layer.weight.flatten(1), ord=2)
    torch.testing.assert_close(layer.normalized_weight(), layer.weight / exact, rtol=1e-3, atol=1e-5)
    generator.eval()
    before = layer.singular_vector.clone()
    generator(torch.randn(4, 5))
    assert torch.equal(layer.singular_vector, before)  # evaluation changes nothing


def test_generator_in_evaluation_uses_its_running_statistics():
    generator, latents = tiny_generator(), torch.randn(64, 5)
    for _ in range(80):  # running statistics become those of this batch
        trained = generator(latents).sample
    generator.eval()
    assert (generator(latents).sample - trained).abs().mean() < 0.01
    torch.testing.assert_close(generator(latents[:1]).sample, generator(latents).sample[:1], rtol=1e-4, atol=1e-5)
    fresh = tiny_generator().state_dict()
    generator.load_state_dict({**generator.state_dict(), **{name: fresh[name] for name in fresh if "running" in name}})
    assert (generator(latents).sample - trained).abs().mean() > 0.02  # so an average has to include the statistics
    with pytest.raises(ValueError, match=r"`latents` must have shape \(batch, 5\), got \(2, 3\)"):
        generator(torch.randn(2, 3))


TWO_PROCESSES = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from hf_decayed import StructuralGenerator
from hf_decayed.losses.adversarial import gather_rows, gaussian_divergence
torch.distributed.init_process_group("gloo")
rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
torch.manual_seed(0)
generator = StructuralGenerator(sample_size=8, out_channels=1, latent_dim=5, block_out_channels=(16, 8))
latents, target = torch.randn(8, 5), torch.nn.functional.normalize(torch.randn(8, 4), dim=1)
share = slice(rank * 8 // world, (rank + 1) * 8 // world)
images = generator(latents[share]).sample
embeds = torch.nn.functional.normalize(images.flatten(1)[:, :4], dim=1)
rows, real = gather_rows(embeds), gather_rows(target[share])
assert torch.equal(real, target) and rows.shape == (8, 4)
(gaussian_divergence(real, rows) / world + images.square().mean() / world).backward()
gradients = torch.cat([parameter.grad.flatten() for parameter in generator.parameters()])
torch.distributed.all_reduce(gradients)
if rank == 0:
    buffers = torch.cat([buffer.flatten() for buffer in generator.buffers()])
    torch.save([gradients, buffers], sys.argv[2])
"""


@pytest.mark.slow
def test_batch_statistics_are_those_of_all_processes(tmp_path):
    (tmp_path / "script.py").write_text(TWO_PROCESSES)
    results = []
    for processes in (1, 2):
        command = ["-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--master_port"]
        command += [str(29000 + os.getpid() % 900 + processes), str(tmp_path / "script.py")]
        result = subprocess.run(
            [sys.executable, *command, str(ROOT), str(tmp_path / f"{processes}.pt")],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, result.stderr[-2000:]
        results.append(torch.load(tmp_path / f"{processes}.pt"))
    for one, two in zip(*results):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


# Losses.


@pytest.mark.parametrize("form", ["jsd", "bhattacharyya"])
@pytest.mark.parametrize("covariance", ["full", "diagonal"])
@pytest.mark.parametrize("center", ["unit_mean", "mean"])
def test_divergence_is_zero_for_equals_and_symmetric(form, covariance, center):
    first, second = sphere(40, 6), F.normalize(sphere(40, 6, 1) + 0.7, dim=1)
    arguments = (form, covariance, center)
    assert gaussian_divergence(first, first, *arguments).item() == pytest.approx(0, abs=1e-5)
    distance = gaussian_divergence(first, second, *arguments)
    torch.testing.assert_close(distance, gaussian_divergence(second, first, *arguments), rtol=1e-4, atol=1e-5)
    assert distance > 0.05


def test_divergence_is_the_formula():
    first, second = sphere(30, 4).double(), F.normalize(sphere(50, 4, 1).double() + 0.3, dim=1)
    covariances, centres = [], []
    for rows in (first, second, torch.cat([first, second])):
        centre = F.normalize(rows.mean(dim=0), dim=0)
        centres.append(centre)
        covariances.append(torch.eye(4) + 4 / 0.5 * (rows - centre).T @ (rows - centre) / len(rows))
    dets = [torch.logdet(matrix) for matrix in covariances]
    expected = 0.5 * (dets[2] - (dets[0] + dets[1]) / 2)
    assert gaussian_divergence(first, second).item() == pytest.approx(expected.item(), rel=1e-4)
    diagonal = [matrix.diagonal().log().sum() for matrix in covariances]
    expected = 0.5 * (diagonal[2] - (diagonal[0] + diagonal[1]) / 2)
    assert gaussian_divergence(first, second, covariance="diagonal").item() == pytest.approx(expected.item(), rel=1e-4)
    mixed, difference = (covariances[0] + covariances[1]) / 2, centres[0] - centres[1]
    # The covariance itself is the regularised one times epsilon / dim.
    mahalanobis = difference @ torch.linalg.solve(mixed * 0.5 / 4, difference)
    expected = mahalanobis / 8 + 0.5 * (torch.logdet(mixed) - (dets[0] + dets[1]) / 2)
    assert gaussian_divergence(first, second, "bhattacharyya").item() == pytest.approx(expected.item(), rel=1e-4)


def test_divergence_of_too_few_says_what_to_do():
    few = sphere(5, 8)
    with pytest.raises(
        ValueError, match="8 dimensions needs as many embeddings, got 5: use a larger batch, a smaller"
    ):
        gaussian_divergence(few, few)
    assert gaussian_divergence(few, few, covariance="diagonal").item() == pytest.approx(0, abs=1e-6)
    for name in ("form", "covariance", "center"):
        with pytest.raises(ValueError, match=f"`{name}` must be .* got 'other'"):
            gaussian_divergence(few, few, **{name: "other"})
    with pytest.raises(ValueError, match=r"must have shape \(number, dim\)"):
        gaussian_divergence(few, sphere(5, 7))


def test_neighbours_are_real_and_not_oneself():
    real, keys = sphere(4, 3), sphere(4, 5, 1)
    bank = NeighbourBank(8, 3, 5)
    bank.update(sphere(4, 3, 2), sphere(4, 5, 3))
    candidates, candidate_keys = bank.candidates(real, keys)
    assert len(candidates) == 8 and torch.equal(candidates[:4], real)
    aligned = neighbour_alignment(real, keys, candidates, candidate_keys, exclude_self=True)
    similarities = (keys @ candidate_keys.T).fill_diagonal_(-1)
    nearest = similarities.argmax(dim=1)
    assert nearest.ne(torch.arange(4)).all()
    torch.testing.assert_close(aligned, (real * candidates[nearest]).sum(dim=1).mean())
    # A generated image whose key is that of a real one has it as neighbour; other generated ones are no candidates.
    generated = sphere(4, 3, 4)
    aligned = neighbour_alignment(generated, keys, candidates, candidate_keys)
    torch.testing.assert_close(aligned, (generated * real).sum(dim=1).mean())
    two = neighbour_alignment(generated, keys, candidates, candidate_keys, num_neighbours=2)
    best = (keys @ candidate_keys.T).topk(2, dim=1).indices
    torch.testing.assert_close(two, (generated[:, None] * candidates[best]).sum(dim=2).mean())
    with pytest.raises(ValueError, match=r"`num_neighbours` must lie in \[1, 7\], got 8"):
        neighbour_alignment(real, keys, candidates, candidate_keys, 8, exclude_self=True)


def test_no_gradients_go_into_the_average():
    """It gives the keys, and nothing else."""
    average, images = tiny_discriminator(), torch.randn(4, 1, 12, 12)
    keys = F.normalize(average(images).pooler_output, dim=1)
    embeddings = sphere(4, 6).requires_grad_()
    candidates = NeighbourBank(8, 6, 16).candidates(embeddings, keys)
    neighbour_alignment(embeddings, keys, *candidates, exclude_self=True).backward()
    assert embeddings.grad.norm() > 0 and all(parameter.grad is None for parameter in average.parameters())


def test_bank_wraps_and_takes_no_gradients():
    bank = NeighbourBank(6, 2, 3)
    batches = [
        (torch.full((2, 2), float(number), requires_grad=True), torch.full((2, 3), float(number)))
        for number in range(5)
    ]
    for embeddings, keys in batches:
        bank.update(embeddings, keys)
    assert bank.embeddings[:, 0].tolist() == [3, 3, 4, 4, 2, 2] == bank.keys[:, 0].tolist()
    assert not bank.embeddings.requires_grad and not list(bank.parameters()) and int(bank.count) == 10
    live = torch.ones(2, 2, requires_grad=True)
    candidates, _ = bank.candidates(live, torch.ones(2, 3))
    candidates.sum().backward()
    assert live.grad.eq(1).all() and batches[-1][0].grad is None
    again = NeighbourBank(6, 2, 3)
    again.load_state_dict(bank.state_dict())
    assert torch.equal(again.candidates(live, torch.ones(2, 3))[0], candidates)
    with pytest.raises(ValueError, match="The bank's 6 rows are not divisible by a batch of 4"):
        bank.update(torch.zeros(4, 2), torch.zeros(4, 3))


def exact_norms(function, inputs):
    jacobian = torch.func.vmap(torch.func.jacrev(lambda image: function(image[None])[0]))(inputs)
    return torch.linalg.svdvals(jacobian.flatten(2))[:, 0]


@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_jacobian_norm_is_the_largest_singular_value(decay):
    model = random_weights(tiny_discriminator(shortcut_decay=decay))
    embed = lambda images: model(images).raw_embeds  # noqa: E731
    images, directions = torch.randn(3, 1, 8, 8), torch.randn(3, 6)
    exact = exact_norms(embed, images)
    torch.testing.assert_close(jacobian_norm(embed, images, directions, 30), exact, rtol=1e-3, atol=0)
    once = jacobian_norm(embed, images, directions)
    assert (once <= exact * 1.0001).all() and (once > 0.3 * exact).all()
    with pytest.raises(ValueError, match="`num_iterations` must be at least 1, got 0"):
        jacobian_norm(embed, images, directions, 0)


def test_gradient_of_the_jacobian_norm_is_that_of_finite_differences():
    network = nn.Sequential(nn.Linear(5, 7), nn.ELU(), nn.Linear(7, 3))
    inputs, directions = torch.randn(4, 5), torch.randn(4, 3)
    jacobian_norm(network, inputs, directions, 200).sum().backward()
    exact = copy.deepcopy(network).double()
    for index in (0, 2):
        weight, step = exact[index].weight, 1e-5
        for row, column in itertools.product(*map(range, weight.shape)):
            values = []
            for change in (step, -2 * step, step):  # the last brings the weight back
                with torch.no_grad():
                    weight[row, column] += change
                values.append(exact_norms(exact, inputs.double()).sum().item())
            gradient = network[index].weight.grad[row, column].item()
            assert gradient == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-2, abs=1e-3)


def test_jacobian_norm_leaves_inputs_and_modes_alone():
    model = tiny_discriminator()
    images = torch.randn(2, 1, 8, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        sigma = jacobian_norm(lambda batch: model(batch).raw_embeds, images, torch.randn(2, 6))
    sigma.sum().backward()
    assert images.grad is None and sigma.dtype == torch.float32
    assert all(parameter.grad is not None for name, parameter in model.named_parameters() if "bias" not in name)
    with torch.no_grad():
        assert not jacobian_norm(lambda batch: model(batch).raw_embeds, images, torch.randn(2, 6)).requires_grad


def test_networks_without_a_jacobian_of_their_own_are_refused():
    network = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with pytest.raises(ValueError, match="`1` is a batch norm, which mixes the images of a batch.*: use group norm"):
        jacobian_norm(network, torch.randn(3, 4), torch.randn(3, 4))
    check_jacobian_support(network.eval())  # with fixed statistics it does not
    sizes = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
        "image_size": 8,
    }
    config = ViTConfig(**sizes, patch_size=4)
    with pytest.raises(ValueError, match="ViTModel has an attention kernel without forward-mode.*'eager'"):
        check_jacobian_support(ViTModel._from_config(config, attn_implementation="sdpa"))
    eager = ViTModel._from_config(config, attn_implementation="eager")
    check_jacobian_support(eager)
    function = lambda images: eager(images).last_hidden_state[:, 0]  # noqa: E731
    images = torch.randn(2, 3, 8, 8)
    norms = jacobian_norm(function, images, torch.randn(2, 8), 40)
    torch.testing.assert_close(norms, exact_norms(function, images), rtol=1e-2, atol=1e-4)


def test_hinges():
    rows = torch.tensor([[0.5, 0.0], [0.0, 3.0]])
    assert norm_hinge(rows).item() == pytest.approx(0.25 / 2)
    assert norm_hinge(rows, "above").item() == pytest.approx(4 / 2)
    with pytest.raises(ValueError, match="`side` must be 'below' or 'above', got 'left'"):
        norm_hinge(rows, "left")
    real, generated = torch.tensor([2.0, 0.0]), torch.tensor([-3.0, 1.0])
    assert hinge_discriminator_loss(real, generated).item() == pytest.approx(0.5 + 1.0)
    assert hinge_generator_loss(generated).item() == pytest.approx(1.0)


# Metrics.


def three_directions(number=60, noise=0.1, dim=5):
    labels = torch.arange(number) % 3
    scale = 1 + torch.rand(number, 1) * 10  # spherical k-means sees directions alone
    return (torch.eye(dim)[labels] + noise * torch.randn(number, dim)) * scale, labels


def test_spherical_kmeans_finds_directions():
    features, labels = three_directions()
    clusters = spherical_kmeans(features, 3, restarts=5)
    assert cluster_accuracy(clusters, labels) == 1.0
    assert torch.equal(spherical_kmeans(features, 3, seed=4), spherical_kmeans(features, 3, seed=4))
    assert kmeans_metrics(features, labels, runs=5)["kmeans_accuracy"] > 0.7
    assert spherical_kmeans(torch.ones(4, 2), 2).shape == (4,)  # all alike
    with pytest.raises(ValueError, match=r"`num_clusters` must lie in \[1, 60\], got 61"):
        spherical_kmeans(features, 61)
    with pytest.raises(ValueError, match="`runs` must be at least 1, got 0"):
        kmeans_metrics(features, labels, runs=0)


def test_cluster_metrics_are_scikit_learn_s():
    sklearn = pytest.importorskip("sklearn.metrics")
    clusters, labels = torch.randint(5, (200,)), torch.randint(3, (200,))
    expected = sklearn.normalized_mutual_info_score(labels.numpy(), clusters.numpy())
    assert normalized_mutual_information(clusters, labels) == pytest.approx(expected)
    assert normalized_mutual_information(labels, labels) == pytest.approx(1.0)
    assert purity(clusters, labels) == pytest.approx(
        sum(torch.bincount(labels[clusters == number]).max().item() for number in clusters.unique()) / 200
    )
    assert (
        cluster_accuracy((labels + 1) % 3, labels) == 1.0 and purity(torch.zeros(3).long(), torch.arange(3)) == 1 / 3
    )
    with pytest.raises(ValueError, match="two lists of one length"):
        purity(clusters, labels[:10])
    with pytest.raises(ValueError, match="`labels` must be whole numbers from 0 on"):
        purity(clusters, labels - 1)


def test_linear_svm_separates_directions():
    pytest.importorskip("sklearn")
    (train, train_labels), (test, test_labels) = three_directions(), three_directions(30)
    assert linear_svm(train, train_labels, test, test_labels) == 1.0
    shuffled = train_labels[torch.randperm(60)]
    assert linear_svm(train, shuffled, test, test_labels) < 0.8
    with pytest.raises(ValueError, match="`regularization` must be positive, got 0"):
        linear_svm(train, train_labels, test, test_labels, regularization=0)


def test_evaluate_modules_give_the_functions_numbers(tmp_path):
    def load(name):
        return evaluate.load(str(ROOT / "hf_decayed" / "metrics" / name), cache_dir=str(tmp_path))

    features, labels = three_directions(30, noise=0.5)
    clusters = spherical_kmeans(features, 3)
    values = {"predictions": features.numpy(), "references": labels.numpy()}
    assert load("kmeans_accuracy").compute(**values, runs=2) == pytest.approx(kmeans_metrics(features, labels, runs=2))
    pair = {"predictions": clusters.numpy(), "references": labels.numpy()}
    assert load("purity").compute(**pair) == {"purity": purity(clusters, labels)}
    information = normalized_mutual_information(clusters, labels)
    assert load("normalized_mutual_information").compute(**pair) == {"normalized_mutual_information": information}
    train = {"train_features": features.numpy(), "train_labels": labels.numpy()}
    assert load("linear_svm").compute(**values, **train) == {
        "linear_svm": linear_svm(features, labels, features, labels)
    }


# The pipeline.


@pytest.fixture
def pipeline():
    return StructuralGANPipeline(random_weights(tiny_generator()).eval(), random_weights(tiny_discriminator()).eval())


def test_pipeline_draws_in_one_step(pipeline):
    generators = [torch.Generator().manual_seed(seed) for seed in (3, 4)]
    images = pipeline(batch_size=2, generator=generators, output_type="pt").images
    assert images.shape == (2, 1, 12, 12) and images.min() >= 0 and images.max() <= 1
    latents = torch.stack([torch.randn(5, generator=torch.Generator().manual_seed(seed)) for seed in (3, 4)])
    with torch.no_grad():
        expected = pipeline.generator(latents).sample / 2 + 0.5
    torch.testing.assert_close(images, expected)
    assert pipeline().images[0].size == (12, 12)
    assert pipeline(latents=latents, output_type="np", return_dict=False)[0].shape == (2, 12, 12, 1)


def test_truncation_bounds_latents_and_keeps_their_order():
    latents = torch.randn(4000)
    truncated = truncate_normal(latents, 0.7)
    assert truncated.abs().max() <= 0.7 and torch.equal(truncated.argsort(), latents.argsort())
    inside = latents[latents.abs() < 0.7]
    assert truncated.std().item() == pytest.approx(inside.std().item(), rel=0.05)
    torch.testing.assert_close(truncate_normal(latents, 8.0), latents, rtol=1e-3, atol=1e-2)


def test_interpolation_goes_from_latent_to_latent(pipeline):
    latents = torch.randn(3, 5)
    frames = pipeline.interpolate(4, latents=latents, output_type="pt").images
    assert len(frames) == 7
    torch.testing.assert_close(frames[[0, 3, 6]], pipeline(latents=latents, output_type="pt").images)
    assert len(pipeline.interpolate(2, generator=torch.Generator().manual_seed(0)).images) == 2


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ({"batch_size": 0}, "`batch_size` must be at least 1, got 0"),
        ({"truncation": 0.0}, "`truncation` must be positive or None, got 0.0"),
        ({"latents": torch.zeros(2, 4)}, r"`latents` must have shape \(number, 5\), got \(2, 4\)"),
        ({"generator": [torch.Generator()] * 3}, "a generator for each of 1 images, or one for all, got 3"),
        ({"output_type": "latent"}, "`output_type` must be pil, np or pt, got 'latent'"),
    ],
)
def test_wrong_arguments_of_the_pipeline_are_one_sentence(arguments, sentence, pipeline):
    with pytest.raises(ValueError, match=sentence):
        pipeline(**arguments)


def test_wrong_interpolations_are_one_sentence(pipeline):
    with pytest.raises(ValueError, match="`num_frames` must be at least 2, got 1"):
        pipeline.interpolate(1)
    with pytest.raises(ValueError, match="`latents` must be at least two, got 1"):
        pipeline.interpolate(latents=torch.zeros(1, 5))


CLEAN_PROCESS = """
import sys
sys.modules["hf_decayed"] = None
import json, torch
from diffusers import AutoModel, DiffusionPipeline
from transformers import AutoModel as Encoder
pipeline = DiffusionPipeline.from_pretrained(sys.argv[1], trust_remote_code=True)
latents = torch.randn(2, 5, generator=torch.Generator().manual_seed(0))
images = pipeline(latents=latents, output_type="pt").images
pipeline.save_pretrained(sys.argv[2])
generator = AutoModel.from_pretrained(sys.argv[1], subfolder="generator", trust_remote_code=True)
encoder = Encoder.from_pretrained(sys.argv[1] + "/discriminator", trust_remote_code=True)
features = encoder(2 * images - 1).pooler_output
assert torch.equal(features, pipeline.discriminator(2 * images - 1).pooler_output)
numbers = images.double().sum().item(), features.double().sum().item()
print(json.dumps([type(pipeline).__name__, type(generator).__name__, type(encoder).__name__, *numbers]))
"""


def test_a_saved_pipeline_loads_where_the_package_is_not(pipeline, tmp_path):
    pipeline.save_pretrained(tmp_path / "model")
    latents = torch.randn(2, 5, generator=torch.Generator().manual_seed(0))
    images = pipeline(latents=latents, output_type="pt").images
    features = pipeline.discriminator(2 * images - 1).pooler_output
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CLEAN_PROCESS, str(tmp_path / "model"), str(tmp_path / "again")],
        env={**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        cwd="/",
    )
    assert result.returncode == 0, result.stderr[-3000:]
    *names, image_sum, feature_sum = json.loads(result.stdout.splitlines()[-1])
    assert names == ["StructuralGANPipeline", "StructuralGenerator", "StructuralDiscriminatorModel"]
    assert image_sum == pytest.approx(images.double().sum().item(), rel=1e-5)
    assert feature_sum == pytest.approx(features.double().sum().item(), rel=1e-4)
    own = StructuralGANPipeline.from_pretrained(tmp_path / "model")  # the package's class needs no trust
    assert type(own) is StructuralGANPipeline and type(own.discriminator) is StructuralDiscriminatorModel
    again = DiffusionPipeline.from_pretrained(tmp_path / "again", trust_remote_code=True)
    torch.testing.assert_close(again(latents=latents, output_type="pt").images, images)
    assert isinstance(AutoModel.from_pretrained(tmp_path / "model" / "discriminator"), StructuralDiscriminatorModel)
    assert gan_output(pipeline).shape == (2, 144 + 16 + 6)


def test_commands_sample_from_the_pipeline(pipeline, tmp_path):
    pipeline.save_pretrained(tmp_path / "model")
    arguments = ["sample", str(tmp_path / "model"), "--num", "5", "--output", str(tmp_path / "samples")]
    assert main(arguments) == 0
    assert len(list((tmp_path / "samples" / "images").glob("*.png"))) == 5
    record = json.loads((tmp_path / "samples" / "sampling.json").read_text())
    assert record["num_inference_steps"] == 1 and record["scheduler"] is None
    arguments = ["evaluate", str(tmp_path / "model"), "--num_samples", "12", "--bootstraps", "2"]
    folders = ["--samples_dir", tmp_path / "cache", "--features_dir", tmp_path / "features"]
    assert main([*arguments, *map(str, folders), "--output", str(tmp_path / "distances.json")]) == 0
    results = json.loads((tmp_path / "distances.json").read_text())
    assert results["protocol"]["sampling"]["num_inference_steps"] == 1


# Training.


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (["--gradient_accumulation_steps", "2"], "--gradient_accumulation_steps must be 1: moments and neighbours"),
        (["--bank_size", "100"], "--bank_size 100 is not divisible by --batch_size 64: use 64"),
        (
            ["--set_generator", "latent_dims=3"],
            "'latent_dims' is not a field of the config; did you mean 'latent_dim'",
        ),
        (["--set_generator", "sample_size=32"], "sample_size follows from --image_size and --num_channels"),
        (["--set", "num_channels=3"], "num_channels follows from --image_size and --num_channels"),
        (["--hinge_side", "left"], "--hinge_side: invalid choice: 'left'"),
        (["--smoothness_images", "24"], "--batch_size 64 is not divisible by --smoothness_images 24: use 8"),
        (["--short_side", "20"], "--short_side 20 is smaller than --image_size 28"),
    ],
)
def test_flags_that_are_refused(flags, sentence, capsys):
    with pytest.raises(SystemExit) as stopped:
        structural_gan.parse_arguments(flags)
    lines = capsys.readouterr().err.strip().splitlines()
    assert stopped.value.code == 2 and len(lines) == 1 and sentence in lines[0]


def test_batches_smaller_than_the_embedding_are_refused():
    def build(*flags):
        return structural_gan.build_networks(structural_gan.parse_arguments(list(flags))[0])

    with pytest.raises(
        ValueError, match="--batch_size 16 is smaller than the embedding, 32, .* or --covariance diagonal"
    ):
        build("--batch_size", "16")
    build("--batch_size", "16", "--covariance", "diagonal")
    discriminator, _ = build("--objective", "hinge", "--shortcut_decay", "0.5")
    assert discriminator.config.projection_size == 1 and discriminator.config.shortcut_decay == 0.5


@pytest.mark.parametrize("recipe", ["tiny", "fashion_mnist", "cifar10", "cifar100", "imagenet10_128"])
def test_recipes_build_networks(recipe):
    options, _ = structural_gan.parse_arguments(["--recipe", recipe])
    with torch.device("meta"):
        discriminator, generator = structural_gan.build_networks(options)
    assert generator.config.sample_size == options.image_size
    assert discriminator.config.num_channels == generator.config.out_channels


@pytest.mark.parametrize(
    "recipe, values",
    [
        ("cifar10", {"batch_size": 512, "num_train_epochs": 1000, "image_size": 32, "short_side": None}),
        ("cifar100", {"batch_size": 512, "num_train_epochs": 1000, "image_size": 32, "short_side": None}),
        ("imagenet10_128", {"batch_size": 320, "num_train_epochs": 500, "image_size": 128, "short_side": 144}),
    ],
)
def test_recipes_have_the_dissertation_s_values(recipe, values):
    options, _ = structural_gan.parse_arguments(["--recipe", recipe])
    of_all = {"learning_rate": 2e-4, "weight_decay": 0.1, "adam_beta1": 0.5, "adam_beta2": 0.999, "ema_decay": 0.99}
    of_all |= {"divergence": "jsd", "covariance": "full", "hinge_side": "below", "objective": "structural"}
    of_all |= {"cluster_weight": 3, "num_neighbours": 1, "bank_size": 10_240, "crop_scale": [0.5, 1.0]}
    of_all |= {"smoothness_weight": 5, "lipschitz": 1, "power_iterations": 1, "norm_weight": 4}
    of_all |= {"smoothness_images": values["batch_size"], "num_channels": 3, "horizontal_flip": True}
    assert {name: getattr(options, name) for name in of_all | values} == of_all | values
    with torch.device("meta"):
        discriminator, generator = structural_gan.build_networks(options)
    if recipe.startswith("cifar"):
        assert (count(discriminator), count(generator)) == (11_498_314 - 5_130, 5_025_667)
    else:
        assert tuple(discriminator.config.hidden_sizes) == (64, 64, 128, 256, 512)
        assert tuple(generator.config.block_out_channels) == (2048, 1024, 512, 256, 128)


def test_runaway_warnings():
    assert runaway_warning(1.2, 1.0, 1.0) is None
    assert "raise --smoothness_weight" in runaway_warning(50.0, 1.0, 1.0)
    assert "raise --norm_weight" in runaway_warning(1.0, 0.001, 1.0)
    assert "--hinge_side above" in runaway_warning(1.0, 1e4, 1.0)


SCRIPT = [
    "--set",
    "hidden_sizes=(8,16)",
    "--set",
    "depths=(1,1)",
    "--set",
    "group_size=4",
    "--set",
    "projection_size=6",
]
SCRIPT += ["--set_generator", "block_out_channels=(16,8)", "--set_generator", "latent_dim=6", "--bank_size", 64]
SCRIPT += ["--batch_size", 16, "--max_train_steps", 10, "--max_train_samples", 96, "--eval_train_samples", 40]
SCRIPT += ["--eval_test_samples", 20, "--smoothness_images", 2, "--sample_images", 4, "--checkpointing_steps", 3]
SCRIPT += ["--log_every", 1, "--cpu_threads", 1, "--compare_hinge", "false"]


def all_weights(folder):
    from safetensors.torch import load_file

    return {
        f"{path.parent.name}.{name}": tensor
        for path in sorted(folder.glob("*/*.safetensors"))
        for name, tensor in load_file(path).items()
    }


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("processes", [1, 2])
def test_a_killed_run_ends_with_the_same_bits(processes, tmp_path):
    run_script("structural_gan.py", *SCRIPT, "--output_dir", tmp_path / "whole", processes=processes)
    flags = [*SCRIPT, "--output_dir", tmp_path / "killed", "--resume_from_checkpoint", "latest"]
    process = start_script("structural_gan.py", *flags, processes=processes)
    while process.poll() is None and not list((tmp_path / "killed" / "checkpoints").glob("step-*")):
        time.sleep(0.01)
    assert process.poll() is None, process.communicate()
    kill(process)
    assert "resumed at step" in run_script("structural_gan.py", *flags, processes=processes).stdout
    whole, resumed = all_weights(tmp_path / "whole"), all_weights(tmp_path / "killed")
    assert {name.split(".")[0] for name in whole} == {"generator", "discriminator"}
    assert [name for name in whole if not torch.equal(whole[name], resumed[name])] == []
    if processes == 1:
        assert main(["publish", str(tmp_path / "whole"), "--repo_id", "user/gan", "--dry_run"]) == 0
        features = ["--features_dir", str(tmp_path / "features"), "--max_train_samples", "60"]
        arguments = ["evaluate", str(tmp_path / "whole" / "discriminator"), "--metrics", "knn,kmeans,svm", "--k", "5"]
        output = tmp_path / "evaluated.json"
        assert main([*arguments, *features, "--max_eval_samples", "40", "--output", str(output)]) == 0
        assert {"knn_accuracy", "kmeans_accuracy", "svm_accuracy"} <= json.loads(output.read_text())["rows"][
            "last.mean"
        ].keys()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("objective", ["structural", "hinge"])
def test_one_and_two_processes_train_alike(objective, tmp_path):
    """Moments, neighbours, batch norms and images of the penalty are of the whole batch, whoever holds its parts."""
    flags = [*SCRIPT, "--max_train_steps", 3, "--smoothness_images", 4, "--objective", objective]
    for processes in (1, 2):
        run_script("structural_gan.py", *flags, "--output_dir", tmp_path / str(processes), processes=processes)
    one, two = all_weights(tmp_path / "1"), all_weights(tmp_path / "2")
    # All paths from the biases of blocks end in batch norms, where they change nothing. Their gradient is rounding, and Adam
    # makes whole steps of it: these biases, and the means of the norms, differ by at most twice the learning rate, 1e-3, in
    # each of the three steps.
    silent = re.compile(r"generator\..*(conv[1-4]\.bias|running_mean)")
    tolerance = {name: 6e-3 if silent.fullmatch(name) else 1e-4 for name in one}
    different = [name for name in one if not torch.allclose(one[name], two[name], rtol=1e-2, atol=tolerance[name])]
    assert different == []
    flags += ["--smoothness_images", 1, "--output_dir", tmp_path / "odd"]
    error = run_script("structural_gan.py", *flags, processes=2, code=1).stderr  # the launcher's code
    assert "--smoothness_images 1 is not divisible by 2 processes." in error


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_probe_never_touches_the_encoder(tmp_path):
    """Weights are the same whatever the probe learns; a Jacobian that is far too large is told once."""
    for name, rate in (("slow", 1e-3), ("fast", 1.0)):
        flags = [*SCRIPT, "--max_train_steps", 3, "--probe_learning_rate", rate, "--lipschitz", 0.001]
        stdout = run_script("structural_gan.py", *flags, "--output_dir", tmp_path / name).stdout
        assert stdout.count("warning: the Jacobian's norm is") == 1 and "raise --smoothness_weight" in stdout
    slow, fast = all_weights(tmp_path / "slow"), all_weights(tmp_path / "fast")
    assert all(torch.equal(slow[name], fast[name]) for name in slow)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_hinge_gan_is_trained_and_compared(tmp_path):
    """As by itself, also when it is resumed; the structural one is what it is without it."""
    flags = [*SCRIPT, "--max_train_steps", 3]
    for name, more in (("alone", []), ("hinge", ["--objective", "hinge"])):
        run_script("structural_gan.py", *flags, *more, "--output_dir", tmp_path / name)
    compare = [*flags, "--compare_hinge", "true", "--output_dir", tmp_path / "both"]
    stdout = run_script("structural_gan.py", *compare).stdout
    weights = {name: all_weights(tmp_path / name) for name in ("alone", "hinge", "both", "both/runs/hinge")}
    for one, other in (("alone", "both"), ("hinge", "both/runs/hinge")):
        assert weights[one].keys() == weights[other].keys()
        assert all(torch.equal(weights[one][name], weights[other][name]) for name in weights[one])
    titles, *rows = stdout[stdout.index("features, in percent") :].splitlines()
    assert titles.split()[3:] == ["this", "run", "hinge", "GAN", "untrained", "pixels"]
    own, hinge = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("both", "both/runs/hinge"))
    assert hinge["objective"] == "hinge"
    knn = [own["knn_accuracy"], hinge["knn_accuracy"], own["knn_accuracy_untrained"], own["knn_accuracy_pixels"]]
    assert rows[0].split() == ["kNN", *(f"{100 * value:.1f}" for value in knn)]
    shutil.rmtree(tmp_path / "both" / "runs" / "hinge" / "discriminator")
    resumed = run_script("structural_gan.py", *compare, "--resume_from_checkpoint", "latest").stdout
    assert resumed.count("resumed at step 3") == 2 and resumed.splitlines()[-3:] == stdout.splitlines()[-3:]
    assert (tmp_path / "both" / "runs" / "hinge" / "discriminator" / "model.safetensors").exists()


def spiral(number, generator, arms=5, scale=8.0):
    """Points on the arms of a spiral, in a disk of radius `scale`."""
    arm = torch.randint(arms, (number,), generator=generator)
    radius = torch.rand(number, generator=generator).sqrt()
    angle = 2 * math.pi * arm / arms + 3 * radius + 0.1 * torch.randn(number, generator=generator)
    return scale * torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_training_on_a_spiral_is_healthy():
    """Optimisation only: the Jacobian near 1, samples where the data is and everywhere it is, nothing infinite."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)

    def mlp(*sizes):
        layers = [
            module
            for first, second in zip(sizes, sizes[1:-1])
            for module in (nn.Linear(first, second), nn.GroupNorm(8, second), nn.ELU())
        ]
        return nn.Sequential(*layers, nn.Linear(sizes[-2], sizes[-1]))

    trunk, head, drawer = mlp(2, 128, 128, 128), mlp(128, 128, 32), mlp(16, 128, 128, 128, 2)
    discriminator = nn.Sequential(trunk, nn.ELU(), head)
    optimizers = [
        torch.optim.AdamW(network.parameters(), lr=5e-4, betas=(0.5, 0.999)) for network in (discriminator, drawer)
    ]
    for _ in range(700):
        real = spiral(256, generator)
        generated = drawer(torch.randn(256, 16, generator=generator)).detach()
        raw = discriminator(torch.cat([real, generated]))
        first, second = F.normalize(raw, dim=1).chunk(2)
        sigma = jacobian_norm(discriminator, torch.cat([real, generated]), torch.randn(512, 32, generator=generator))
        loss = -gaussian_divergence(first, second) + 5 * ((sigma - 1).square().mean() + 4 * norm_hinge(raw[:256]))
        optimizers[0].zero_grad()
        loss.backward()
        optimizers[0].step()
        drawn = drawer(torch.randn(256, 16, generator=generator))
        with torch.no_grad():
            first = F.normalize(discriminator(real), dim=1)
        loss = gaussian_divergence(first, F.normalize(discriminator(drawn), dim=1))
        optimizers[1].zero_grad()
        loss.backward()
        optimizers[1].step()
    points, drawn = spiral(2000, generator), drawer(torch.randn(2000, 16, generator=generator)).detach()
    assert torch.isfinite(drawn).all()
    assert exact_norms(discriminator, points[:200]).mean().item() == pytest.approx(1.0, abs=0.25)
    radius = torch.cdist(points, points).fill_diagonal_(torch.inf).min(dim=1).values.quantile(0.95)
    distances = torch.cdist(drawn, points)
    disk = (
        8
        * torch.rand(2000, 1, generator=generator).sqrt()
        * F.normalize(torch.randn(2000, 2, generator=generator), dim=1)
    )
    control = (torch.cdist(disk, points).min(dim=1).values < radius).double().mean()
    precision = (distances.min(dim=1).values < radius).double().mean()
    recall = (distances.min(dim=0).values < 3 * radius).double().mean()
    assert precision > control and recall >= 0.9, (precision, control, recall)


def test_random_numbers_belong_to_the_image():
    from hf_decayed.data.datasets import AdversarialImages
    from hf_decayed.data.sources import load_image_splits
    from hf_decayed.data.transforms import Augmentation

    splits = load_image_splits().take(4)
    augmentation = Augmentation((28, 28), 1, 0, [0.5], [0.5], seed=0, crop_scale=(0.7, 1.0))
    images = AdversarialImages(splits.train, "image", augmentation, latent_dim=3, projection_size=2)
    both, alone = images.__getitems__([(0, 1), (2, 3)]), images.__getitems__([(2, 3)])
    assert both["latents"].shape == (2, 2, 3) and both["directions"].shape == (2, 2, 2)
    for name in ("pixel_values", "latents", "directions"):
        assert torch.equal(both[name][1:], alone[name])
    assert not torch.equal(both["latents"][0], both["latents"][1])
    assert both["pixel_values"].abs().max() <= 1.001


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_bank_of_a_run_has_real_images_alone(tmp_path):
    """Its keys are features of the images of the last batches, by networks that do not learn."""
    from hf_decayed.data.datasets import EpochBatchSampler, TrainingImages
    from hf_decayed.data.sources import load_image_splits
    from hf_decayed.data.transforms import Augmentation
    from hf_decayed.run.state_files import load_state

    flags = [*SCRIPT, "--max_train_steps", 3, "--learning_rate", 0, "--crop_scale", 1, 1, "--horizontal_flip", "false"]
    run_script("structural_gan.py", *flags, "--output_dir", tmp_path)
    augmentation = Augmentation((28, 28), 1, 0, [0.5], [0.5], 0, (1.0, 1.0), horizontal_flip=False)
    images = TrainingImages(load_image_splits().take(96).train, "image", augmentation)
    keys = [key for batch in EpochBatchSampler(96, 16, 0, 0, 3) for key in batch]
    model = AutoModel.from_pretrained(tmp_path / "discriminator")
    with torch.no_grad():
        features = F.normalize(model(images.__getitems__(keys)["pixel_values"]).pooler_output, dim=1)
    bank = load_state(tmp_path / "checkpoints" / "step-00000003" / "bank.safetensors")
    assert int(bank["count"]) == 48
    torch.testing.assert_close(bank["keys"][:48], features, rtol=1e-3, atol=1e-4)
    assert bank["keys"][48:].eq(0).all()


# The page.


def test_the_page_has_the_numbers_of_the_runs():
    page = (ROOT / "docs" / "structural_gan.md").read_text()
    for data in structural_gan_report.DATA:
        if structural_gan_report.read_results(data)["full"]:
            results = structural_gan_report.read_results(data)
            assert shown_table(page, data) == structural_gan_report.table(results)
            assert shown_table(page, f"{data}_seeds") == structural_gan_report.seed_table(data)
    for recipe in structural_gan_report.RECIPES:
        results = structural_gan_report.read_recipe(recipe)
        assert shown_table(page, recipe) == structural_gan_report.table(results)
        same = ("steps", "images_seen", "seed", "dataset")
        assert len({json.dumps([runs[0][name] for name in same]) for runs in results.values()}) == 1


def shown_table(page: str, name: str) -> str:
    return page.split(f"<!-- table structural_gan_{name} -->\n")[1].split("\n<!-- end -->")[0]


def test_records_are_of_the_report_s_runs(tmp_path, monkeypatch):
    """All of one length, with the same seeds for every objective; what was trained with other flags is trained anew."""
    report = structural_gan_report
    records = [path.stem.split("-") for path in report.RESULTS.glob("*.json")]
    seeds = {}
    for data, objective, seed in records:
        seeds.setdefault(data, {}).setdefault(objective, set()).add(int(seed.removeprefix("seed")))
    assert seeds.keys() == report.DATA.keys()
    for objectives in seeds.values():
        assert objectives.keys() == report.OBJECTIVES.keys() and len(set(map(frozenset, objectives.values()))) == 1
    started = []
    monkeypatch.setattr(report.subprocess, "run", lambda command, check: started.append(command))
    for data, objective, seed in records:
        report.train(data, objective, int(seed.removeprefix("seed")), tmp_path)
    assert started == []
    monkeypatch.setattr(report, "FLAGS", [*report.FLAGS, "--max_train_steps", "2"])
    with pytest.raises(FileNotFoundError):  # results of the run that did not take place
        report.train("grey", "full", 0, tmp_path)
    assert len(started) == 1


def test_commands_of_the_page_are_understood():
    page = (ROOT / "docs" / "structural_gan.md").read_text()
    commands = re.findall(r"^accelerate launch training/structural_gan.py(.*)$", page, re.MULTILINE)
    assert len(commands) >= 4
    for flags in commands:
        structural_gan.parse_arguments(shlex.split(flags))
