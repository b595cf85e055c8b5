"""Latent intrinsics: losses, the network, data, the pipeline, metrics, and the script `relight.py`."""

import math
import os
import random
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from torch.nn import functional as F

from hf_decayed.losses.coding_rate import coding_rate, max_coding_rate, uniform_coding_rate
from hf_decayed.losses.relighting import (
    gradient_difference,
    invariance_loss,
    pixel_loss,
    spread_loss,
    structural_similarity,
)


def unit_rows(number, dim):
    return F.normalize(torch.randn(number, dim), dim=1)


# Losses.


def test_coding_rate_of_spread_and_of_collapsed_rows():
    assert coding_rate(unit_rows(50_000, 16)) == pytest.approx(8 * math.log(6), abs=0.02)
    assert coding_rate(torch.eye(8).repeat(5, 1)) == pytest.approx(4 * math.log(6), abs=1e-5) == max_coding_rate(40, 8)
    assert coding_rate(torch.eye(8)[:3]) == pytest.approx(max_coding_rate(3, 8), abs=1e-5)
    collapsed = coding_rate(unit_rows(1, 16).expand(1000, 16))
    assert collapsed == pytest.approx(math.log(1 + 16 / 0.2) / 2, abs=1e-3)
    assert uniform_coding_rate(64, 16) == pytest.approx(13.6, abs=0.2)  # measured by the specification
    assert uniform_coding_rate(64, 16) == pytest.approx(coding_rate(unit_rows(64, 16)).item(), abs=0.5)
    maps = torch.randn(2, 5, 7, 16)
    torch.testing.assert_close(coding_rate(maps), coding_rate(maps.reshape(-1, 16)))
    with pytest.raises(ValueError, match="must have rows and columns"):
        coding_rate(torch.zeros(0, 4))


def test_coding_rate_in_half_precision():
    rows = unit_rows(64, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(coding_rate(rows), coding_rate(rows.double()).float())


TWO_PROCESSES = """
import os, sys, torch
from hf_decayed.losses.coding_rate import coding_rate
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
torch.manual_seed(0)
model = torch.nn.Linear(6, 5)
rows = torch.randn(12, 6)
network = torch.nn.parallel.DistributedDataParallel(model)
share = rows[:4] if rank == 0 else rows[4:]
rate = coding_rate(torch.nn.functional.normalize(network(share), dim=1))
rate.backward()
if rank == 0:
    torch.save({"rate": rate.detach(), "gradient": model.weight.grad}, sys.argv[1])
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_coding_rate_of_two_processes_is_that_of_one(tmp_path):
    """Value and gradients, for shares of different sizes."""
    (tmp_path / "two.py").write_text(TWO_PROCESSES)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port"]
    command += [str(random.randint(20000, 40000)), str(tmp_path / "two.py"), str(tmp_path / "two.pt")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    two = torch.load(tmp_path / "two.pt", weights_only=True)
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 5)
    rate = coding_rate(F.normalize(model(torch.randn(12, 6)), dim=1))
    rate.backward()
    torch.testing.assert_close(two["rate"], rate.detach())
    torch.testing.assert_close(two["gradient"], model.weight.grad)


def test_structural_similarity_of_one_window():
    """An image of one window: the formula of the paper, with weighted moments."""
    first, second = torch.rand(2, 1, 1, 11, 11, dtype=torch.float64)
    weights = torch.exp(-((torch.arange(11) - 5.0) ** 2) / (2 * 1.5**2)).double()
    weights = weights[:, None] * weights / weights.sum() ** 2
    means = [(weights * image).sum() for image in (first, second)]
    variances = [(weights * (image - mean) ** 2).sum() for image, mean in zip((first, second), means)]
    covariance = (weights * (first - means[0]) * (second - means[1])).sum()
    expected = (2 * means[0] * means[1] + 0.0004) * (2 * covariance + 0.0036)
    expected /= (means[0] ** 2 + means[1] ** 2 + 0.0004) * (sum(variances) + 0.0036)
    assert structural_similarity(first, second).item() == pytest.approx(expected.item(), abs=1e-5)
    images = torch.rand(3, 3, 16, 12)
    torch.testing.assert_close(structural_similarity(images, images), torch.ones(3))
    with pytest.raises(ValueError, match="at least 11 x 11 pixels, got .8, 12."):
        structural_similarity(images[:, :, :8], images[:, :, :8])
    with pytest.raises(ValueError, match="one shape"):
        structural_similarity(images, images[:1])


def test_pixel_loss_has_three_terms():
    predicted, target = torch.rand(2, 2, 3, 16, 16)
    assert pixel_loss(target, target) == pytest.approx(0, abs=1e-6)
    brighter = target + 0.5
    assert gradient_difference(brighter, target) == pytest.approx(0, abs=1e-6)
    edge = torch.zeros(1, 1, 4, 4)
    edge[..., 2:] = 1.0  # one of three columns of slopes
    assert gradient_difference(edge, torch.zeros(1, 1, 4, 4)) == pytest.approx(1 / 3)
    terms = [pixel_loss(predicted, target, *weights) for weights in ((1, 0, 0), (0, 1, 0), (0, 0, 1))]
    assert pixel_loss(predicted, target) == pytest.approx((10 * terms[0] + 0.1 * terms[1] + terms[2]).item())
    assert terms[0] == pytest.approx(F.mse_loss(predicted, target).item())


def test_invariance_in_both_forms():
    maps, others = ([F.normalize(torch.randn(2, dim, 4, 4), dim=1) for dim in (6, 8)] for _ in range(2))
    assert invariance_loss(maps, maps) == pytest.approx(-1) and invariance_loss(maps, maps, "distance") == 0
    opposite = [-tensor for tensor in maps]
    assert invariance_loss(maps, opposite) == pytest.approx(1)
    assert invariance_loss(maps, opposite, "distance") == pytest.approx(4)  # 2 at either scale
    assert invariance_loss(maps, others) > -1 and invariance_loss(maps, others, "distance") > 0
    leaves = [tensor.clone().requires_grad_() for tensor in maps]
    invariance_loss(leaves, maps, "distance").backward()
    assert all(torch.isfinite(tensor.grad).all() for tensor in leaves)  # where they are equal, too
    with pytest.raises(ValueError, match="`form` must be 'cosine' or 'distance', got 'l1'"):
        invariance_loss(maps, others, "l1")


def test_spread_loss_has_its_own_target_for_every_tensor():
    maps = [F.normalize(torch.randn(8, dim, 8, 8), dim=1) for dim in (4, 16)]
    collapsed = [F.normalize(torch.ones_like(tensor), dim=1) for tensor in maps]
    assert spread_loss(maps) < 0.1 < 10 < spread_loss(collapsed)
    light = unit_rows(16, 8)
    expected = (coding_rate(light) - uniform_coding_rate(16, 8)) ** 2
    assert spread_loss([light]) == pytest.approx(expected.item(), abs=1e-5)
    expected = (coding_rate(light) - 4 * math.log(6)) ** 2
    assert spread_loss([light], "max") == pytest.approx(expected.item(), rel=1e-4)
    with pytest.raises(ValueError, match="`target` must be 'own' or 'max', got 'none'"):
        spread_loss([light], "none")
