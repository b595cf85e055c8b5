"""`hf_decayed.spectral`: graphs, solvers, regions and the two estimators, on toys whose answer is known."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse
import scipy.sparse.linalg
import sklearn.base
import torch
from conftest import TINY_SIZES, random_weights
from torch.nn import functional as F

from hf_decayed import DecayedViTMAEConfig, DecayedViTMAEModel
from hf_decayed.errors import UserError
from hf_decayed.evaluation.segmentation import cluster_miou, coordinate_probe, oracle_miou
from hf_decayed.spectral.capture import record_attention
from hf_decayed.spectral.clustering import DatasetSpectralClustering, LayerSpectralClustering
from hf_decayed.spectral.graphs import (
    affinity,
    check_grid,
    check_memory,
    cosine_logits,
    graph_stack,
    pooling_matrix,
    query_key_logits,
    row_normalize,
    sparse_graph,
    sum_of_walks,
    symmetric_normalize,
    upsample_graph,
)
from hf_decayed.spectral.regions import (
    best_silhouette_clusters,
    components_to_rgb,
    connected_regions,
    instance_proposals,
    k_means_clusters,
    ward_merges,
)
from hf_decayed.spectral.solvers import (
    association,
    average_graph,
    exact_eigenvectors,
    nystrom_eigenvectors,
    pool_maps,
    quadratic_form,
    reorthogonalize,
    soft_cut_loss,
    soft_memberships,
    sparse_eigenvectors,
    symmetric_parts,
)


SIDE = 20
SUBSETS = [(1,), (2,), (3,), (1, 2), (1, 3), (2, 3)]


def toy_mask() -> torch.Tensor:
    """Background, a disk, a square and a bar."""
    rows, columns = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    mask = torch.zeros(SIDE, SIDE, dtype=torch.long)
    mask[(rows - 5) ** 2 + (columns - 5) ** 2 <= 12] = 1
    mask[11:17, 2:8] = 2
    mask[3:17, 13:16] = 3
    return mask


def toy_layers(seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Six layers; each tells one subset of the regions from the rest. The attention logits are 1.5 F F^T."""
    generator = torch.Generator().manual_seed(seed)
    mask, layers = toy_mask().flatten(), []
    for subset in SUBSETS:
        codes = 1.5 * F.normalize(torch.randn(2, 16, generator=generator), dim=1)
        inside = torch.isin(mask, torch.tensor(subset)).long()
        features = codes[inside] + 0.3 * torch.randn(SIDE**2, 16, generator=generator)
        layers.append((1.5 * math.sqrt(16) * features, features))
    return layers


def toy_miou(layers, **settings) -> float:
    labels = LayerSpectralClustering("qk", n_components=8, **settings).fit_predict(layers)
    return oracle_miou(labels[None], toy_mask()[None])


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]


@pytest.mark.parametrize("seed", SEEDS)
def test_no_layer_suffices_but_all_together_do(seed):
    layers = toy_layers(seed)
    assert toy_miou(layers, solver="eigh") >= 0.95
    assert max(toy_miou([layer], solver="eigh") for layer in layers) <= 0.5


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_gradient_solver_does_as_well_as_exact_eigenvectors(seed):
    layers = toy_layers(seed)
    gradient, exact = toy_miou(layers, solver="gradient", seed=seed, steps=300), toy_miou(layers, solver="eigh")
    assert gradient >= 0.95 and gradient == pytest.approx(exact, abs=0.03)


@pytest.mark.slow
def test_convolutional_prior_beats_every_single_layer():
    layers = toy_layers(0)
    assert toy_miou(layers, solver="gradient", parameterization="convolution", steps=200) >= 0.6


def test_checkerboard_lines_up_between_resolutions():
    rows, columns = torch.meshgrid(torch.arange(10), torch.arange(10), indexing="ij")
    coarse = ((rows + columns) % 2).float()
    fine = coarse.repeat_interleave(2, 0).repeat_interleave(2, 1)
    assert torch.equal(pool_maps(fine[None], (10, 10))[0], coarse)
    pooled = pooling_matrix((20, 20), (10, 10)) @ fine.flatten()
    torch.testing.assert_close(pooled.view(10, 10), coarse)
    graph = row_normalize((coarse.view(-1, 1) == coarse.view(1, -1)).float())
    larger = upsample_graph(graph, (10, 10), (20, 20))
    torch.testing.assert_close(larger, row_normalize((fine.view(-1, 1) == fine.view(1, -1)).float()))


@pytest.mark.parametrize("solver", ["eigh", "gradient"])
def test_layers_on_two_grids_share_one_segmentation(solver):
    """The coarse layer has the columns of the image, the fine one its rows; only together they give four quarters."""
    generator = torch.Generator().manual_seed(0)
    layers = []
    for side, axis in ((10, 1), (20, 0)):
        half = torch.arange(side) >= side // 2
        codes = torch.randn(2, 16, generator=generator)
        features = codes[(half[None] if axis else half[:, None]).expand(side, side).long()].flatten(0, 1)
        layers.append(features + 0.2 * torch.randn(features.shape, generator=generator))
    half = (torch.arange(20) >= 10).long()
    clustering = LayerSpectralClustering("features", n_components=6, n_clusters=4, solver=solver, temperature=0.3)
    labels = clustering.fit_predict(layers)
    assert clustering.grid_ == (20, 20)
    assert cluster_miou(labels[None], (2 * half[:, None] + half)[None]) >= 0.9


def shapes_data(num_images: int = 32, side: int = 8):
    """Squares, wide and high bars at random positions: masks, features of the class, features of the position."""
    generator = torch.Generator().manual_seed(0)
    masks = torch.zeros(num_images, side, side, dtype=torch.long)
    for index, mask in enumerate(masks):
        top, left = torch.randint(side - 4, (2,), generator=generator).tolist()
        height, width = [(4, 4), (2, 5), (5, 2)][index % 3]
        mask[top : top + height, left : left + width] = 1 + index % 3
    codes = torch.randn(4, 16, generator=generator)
    what = codes[masks].flatten(1, 2)
    angles = torch.arange(side) * math.pi / side
    waves = torch.stack([wave(scale * angles) for scale in (0.5, 1, 2) for wave in (torch.sin, torch.cos)], dim=-1)
    where = torch.cat([waves[:, None].expand(side, side, 6), waves[None].expand(side, side, 6)], dim=-1).flatten(0, 1)
    what = what + 0.4 * torch.randn(what.shape, generator=generator)
    return masks, what, where + 0.15 * torch.randn(num_images, *where.shape, generator=generator)


@pytest.mark.parametrize("solver", ["eigsh", pytest.param("gradient", marks=pytest.mark.slow)])
def test_values_say_what_queries_and_keys_say_where(solver):
    masks, what, where = shapes_data()
    settings = {
        "n_components": 8,
        "n_clusters": 6,
        "solver": solver,
        "n_channels": 12,
        "epochs": 15,
        "learning_rate": 0.1,
    }
    values = DatasetSpectralClustering("vv", **settings).fit([what])
    attention = DatasetSpectralClustering("qk", **settings).fit([(where, where)])
    assert (
        cluster_miou(values.labels_, masks, "greedy") >= 0.9
        and cluster_miou(attention.labels_, masks, "greedy") <= 0.4
    )
    r2 = [coordinate_probe(model.embedding_.unflatten(1, (8, 8))).r2 for model in (values, attention)]
    assert r2[0] <= 0.15 and r2[1] >= 0.85


def test_nystrom_finds_the_classes_of_a_data_set():
    masks, what, _ = shapes_data()
    labels = DatasetSpectralClustering("vv", n_components=4, n_clusters=4, solver="nystrom").fit_predict([what])
    assert cluster_miou(labels, masks) >= 0.9


def test_new_images_get_the_clusters_of_the_data_set():
    masks, what, where = shapes_data()
    for solver in ("eigsh", "nystrom"):
        model = DatasetSpectralClustering("vv", n_components=4, n_clusters=4, solver=solver).fit([what[:24]])
        assert (model.predict([what[:24]]) == model.labels_).float().mean() > 0.9
        assert cluster_miou(model.predict([what[24:]]), masks[24:]) >= 0.85


def test_symmetric_graphs_have_associations_of_at_most_one():
    logits = query_key_logits(torch.randn(3, 36, 8) * 3, torch.randn(3, 36, 8) * 3)
    memberships = torch.randn(5, 6, 6).softmax(dim=0)
    stack = graph_stack(logits, symmetric=True)
    associations, gram = association(memberships, stack)
    assert associations.shape == (3, 5) and associations.max() <= 1 + 1e-5
    torch.testing.assert_close(gram.diagonal(dim1=1, dim2=2), torch.ones(3, 5))
    # All rows attend to one patch: the symmetric part of a row-normalised graph exceeds 1.
    star = torch.full((1, 16, 16), -50.0)
    star[:, :, 0] = 0
    leading = torch.linalg.eigh(symmetric_parts([graph_stack(star)])[0].matrices[0]).eigenvectors[:, -1:]
    assert quadratic_form(leading, symmetric_parts([graph_stack(star)])[0].matrices) == pytest.approx(
        (1 + 4) / 2, abs=1e-4
    )


def test_loss_ignores_the_order_of_channels_and_equals_its_formula():
    stacks = [graph_stack(torch.randn(2, 16, 16)), graph_stack(torch.randn(1, 64, 64))]
    memberships = torch.randn(4, 8, 8).softmax(dim=0)
    loss = soft_cut_loss(memberships, symmetric_parts(stacks))
    torch.testing.assert_close(soft_cut_loss(memberships[[2, 0, 3, 1]], symmetric_parts(stacks)), loss)
    distances, penalties = [], []
    for stack in stacks:
        for graph in stack.matrices:
            side = stack.grid[0]
            pooled = memberships.view(4, side, 8 // side, side, 8 // side).mean(dim=(2, 4)).flatten(1)
            vectors = pooled / pooled.norm(dim=1, keepdim=True)
            distances.append(torch.stack([(1 - vector @ graph @ vector).abs() for vector in vectors]).mean())
            penalties.append((vectors @ vectors.T - torch.eye(4)).square().mean())
    torch.testing.assert_close(loss, 2 * torch.stack(distances).mean() + 2 * torch.stack(penalties).mean())


def test_gradient_of_the_quadratic_form_is_autograds():
    matrices = symmetric_parts([graph_stack(torch.randn(3, 9, 9).double())])[0].matrices
    vectors = torch.randn(9, 2, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(3, 2, dtype=torch.float64)
    plain = torch.einsum("nc,gnm,mc->gc", vectors, matrices, vectors)
    expected = torch.autograd.grad((weights * plain).sum(), vectors)[0]
    ours = quadratic_form(vectors, matrices)
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(torch.autograd.grad((weights * ours).sum(), vectors)[0], expected)


def test_reorthogonalized_columns_are_orthogonal_and_sorted():
    columns = reorthogonalize(torch.randn(50, 6).softmax(dim=1))
    gram = columns.T @ columns
    torch.testing.assert_close(gram, torch.diag(gram.diagonal()), atol=1e-5, rtol=0)
    assert (gram.diagonal().diff() <= 1e-6).all()


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_eigenvectors_are_those_of_scipy(kind):
    graph = row_normalize(affinity(cosine_logits(torch.randn(80, 6), temperature=0.5)))
    graph = (graph + graph.T).double()
    degrees = graph.sum(dim=1)
    values, vectors = scipy.sparse.linalg.eigsh(graph.numpy(), 5, M=np.diag(degrees.numpy()), which="LA")
    sparse = scipy.sparse.csr_array(graph.numpy())
    spectrum = exact_eigenvectors(graph, 5) if kind == "dense" else sparse_eigenvectors(sparse, 5)
    np.testing.assert_allclose(spectrum.eigenvalues.numpy(), values[::-1], atol=1e-4)
    theirs = torch.from_numpy(vectors[:, ::-1].copy())
    cosines = (spectrum.eigenvectors.double() * degrees[:, None] * theirs).sum(dim=0).abs()  # B-orthonormal vectors
    torch.testing.assert_close(cosines / degrees.sum().sqrt(), torch.ones(5).double(), atol=1e-3, rtol=0)
    torch.testing.assert_close(spectrum.eigenvectors[:, 0], torch.ones(80), atol=1e-3, rtol=0)


def test_nystrom_with_all_landmarks_is_exact():
    tokens = F.normalize(torch.randn(3, 8)[torch.arange(60) % 3] + 0.3 * torch.randn(60, 8), dim=1)

    def kernel(rows, columns):
        return ((rows @ columns.T - 1) / 0.5).exp()

    exact = exact_eigenvectors(kernel(tokens, tokens), 4)
    nystrom = nystrom_eigenvectors(tokens, 4, kernel, num_landmarks=60, chunk_size=7)
    torch.testing.assert_close(nystrom.eigenvalues, exact.eigenvalues, atol=2e-3, rtol=0)
    torch.testing.assert_close(nystrom.eigenvectors[:, :3], exact.eigenvectors[:, :3], atol=0.05, rtol=0)
    few = nystrom_eigenvectors(tokens, 3, kernel, num_landmarks=20, generator=torch.Generator().manual_seed(0))
    labels = k_means_clusters(few.eigenvectors, 3).labels
    assert len(set(zip(labels.tolist(), (torch.arange(60) % 3).tolist()))) == 3


def test_attention_is_the_row_normalised_affinity():
    query, key = torch.randn(2, 9, 4), torch.randn(2, 9, 4)
    logits = query_key_logits(query, key)
    torch.testing.assert_close(row_normalize(affinity(logits)), logits.softmax(dim=-1))
    torch.testing.assert_close(average_graph([graph_stack(logits)]), logits.softmax(dim=-1).mean(dim=0))
    torch.testing.assert_close(sum_of_walks(query / 2, key), logits.softmax(dim=-1).sum(dim=0))
    large = affinity(1e4 * logits)
    assert torch.isfinite(large).all() and large.amax() == 1


def test_isolated_patches_are_clamped():
    affinities = torch.zeros(4, 4)
    affinities[:3, :3] = 1
    assert torch.equal(row_normalize(affinities)[3], torch.zeros(4))
    normalized, _ = symmetric_normalize(affinities)
    assert torch.isfinite(normalized).all() and torch.isfinite(exact_eigenvectors(affinities, 2).eigenvectors).all()
    padded = scipy.sparse.block_array([[np.ones((9, 9)), None], [None, np.zeros((1, 1))]], format="csr")
    assert torch.equal(sparse_eigenvectors(padded, 2).eigenvectors[9], torch.zeros(2))


def test_sparse_graph_has_the_nearest_patches():
    tokens = F.normalize(torch.randn(5, 7, 3), dim=-1)
    graph = sparse_graph(tokens, intra=2, inter=3, threshold=0.1).toarray()
    flat = tokens.flatten(0, 1)
    similarity, expected = flat @ flat.T, torch.zeros(35, 35)
    for patch in range(35):
        same = torch.arange(35) // 7 == patch // 7
        same_image = torch.where(same, similarity[patch], -1.0)
        same_image[patch] = -1
        for values, number in ((same_image, 2), (torch.where(same, -1.0, similarity[patch]), 3)):
            for other in values.topk(number).indices:
                if values[other] >= 0.1:
                    expected[patch, other] = values[other]
    np.testing.assert_allclose(graph, ((expected + expected.T) / 2).numpy(), atol=1e-6)
    assert (np.diag(graph) == 0).all()


def test_mini_batches_connect_all_images():
    tokens = torch.randn(1, 4, 8).expand(24, 4, 8) + 0.1 * torch.randn(24, 4, 8)
    settings = {"images_per_batch": 6, "generator": torch.Generator().manual_seed(0)}
    parts = [
        scipy.sparse.csgraph.connected_components(
            sparse_graph(tokens, rounds=rounds, inter=8, threshold=-1, **settings)
        )
        for rounds in (1, 3)
    ]
    assert parts[0][0] >= 4 and parts[1][0] < parts[0][0]


def test_silhouette_returns_the_clusters_that_it_scored():
    points = torch.randn(4, 3)[torch.arange(80) % 4] * 8 + 0.3 * torch.randn(80, 3)
    clusters = best_silhouette_clusters(points)
    assert max(clusters.silhouettes, key=clusters.silhouettes.get) == clusters.k_means.n_clusters == 4
    assert np.array_equal(clusters.k_means.labels_, clusters.labels.numpy())
    expected = sklearn.metrics.silhouette_score(points.numpy(), clusters.labels.numpy())
    assert clusters.silhouettes[4] == pytest.approx(expected, abs=1e-5)


def test_regions_are_connected_and_every_label_counts():
    labels = torch.tensor([[0, 0, 1], [1, 1, 1], [0, 1, 0]])
    regions = connected_regions(labels)
    assert regions.min() == 1 and len(regions.unique()) == 4
    assert regions[0, 0] == regions[0, 1] != regions[2, 0] != regions[2, 2]


def test_ward_merges_similar_neighbours_first():
    regions = torch.tensor([[1, 2, 3, 4]])
    points = torch.tensor([[0.0], [5.0], [6.0], [0.1]])  # the ends are alike, but not adjacent
    merged = [mask[0].int().tolist() for mask in ward_merges(points, regions)[4:]]
    assert merged[0] == [0, 1, 1, 0] and merged[-1] == [1, 1, 1, 1] and len(merged) == 3


def test_instance_proposals_find_the_objects():
    mask = torch.zeros(12, 12, dtype=torch.long)
    mask[2:6, 2:6], mask[7:10, 6:11] = 1, 2
    codes = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, 1]])
    embedding = codes[mask.flatten()] + 0.03 * torch.randn(144, 3)
    proposals = instance_proposals(embedding, cluster_numbers=range(2, 5))
    assert (proposals.scores.diff() <= 0).all() and (proposals.scores > 0).all()
    for number in (1, 2):
        overlaps = [((mask == number) & own).sum() / ((mask == number) | own).sum() for own in proposals.masks]
        assert max(overlaps) == 1
    assert proposals.masks[0].float().mean() < 0.9


def test_colours_are_fitted_jointly():
    first, second = torch.rand(16, 5), 2 * torch.rand(6, 5)
    pictures = components_to_rgb([first, second], [(4, 4), (2, 3)])
    joined = torch.cat([first, second])[:, 1:4]
    expected = (joined - joined.amin(dim=0)) / (joined.amax(dim=0) - joined.amin(dim=0))
    torch.testing.assert_close(torch.cat([picture.flatten(0, 1) for picture in pictures]), expected)
    pictures = components_to_rgb([first[:, :2], second[:, :2]], [(4, 4), (2, 3)], method="pca")
    assert [tuple(picture.shape) for picture in pictures] == [(4, 4, 3), (2, 3, 3)]
    assert components_to_rgb(first)[0].aminmax() == (0, 1)


def test_records_and_tensors_give_the_same_graph():
    tensors = {name: torch.randn(1, 2, 12, 4) for name in ("query", "key", "value", "output")}
    record = SimpleNamespace(name="layer.0", grid=(3, 4), **tensors)
    for graph, layer in {
        "qk": (tensors["query"][0], tensors["key"][0]),
        "vv": tensors["value"][0],
        "features": tensors["output"][0].transpose(0, 1).flatten(1),
    }.items():
        clustering = LayerSpectralClustering(graph, n_components=4, n_clusters=3)
        ours = clustering.fit_transform([record])
        torch.testing.assert_close(ours, clustering.fit_transform([layer], grid=(3, 4)))
        assert clustering.labels_.shape == (3, 4)


def test_recorded_attention_is_clustered(pixel_values):
    model = random_weights(DecayedViTMAEModel(DecayedViTMAEConfig(**TINY_SIZES))).eval()
    with torch.no_grad(), record_attention(model) as record:
        model(pixel_values[:1])
    query, key = record.layers[0].query[0], record.layers[0].key[0]
    clustering = LayerSpectralClustering("qk", n_components=3, n_clusters=2)
    ours = clustering.fit_transform(record.layers[:1])
    torch.testing.assert_close(ours, clustering.fit_transform([(query, key)]), atol=1e-4, rtol=0)
    assert clustering.fit_predict(record).shape == (4, 4) and len(clustering.layers_) == 4
    with torch.no_grad(), record_attention(model) as record:
        model(pixel_values)
    assert DatasetSpectralClustering("vv", 3, 2).fit_predict(record).shape == (3, 4, 4)
    with pytest.raises(UserError, match="`output` of .* was not recorded"):
        LayerSpectralClustering("features").fit(record)


def test_new_image_takes_the_clusters_of_the_fitted_one():
    layers = toy_layers(0)
    for solver in ("eigh", "gradient"):
        clustering = LayerSpectralClustering("qk", n_components=8, solver=solver, steps=100).fit(layers)
        assert (clustering.predict(layers) == clustering.labels_).float().mean() > 0.9
        order = torch.randperm(SIDE**2)
        shuffled = clustering.transform([(query[order], key[order]) for query, key in layers])
        torch.testing.assert_close(shuffled, clustering.transform(layers)[order], atol=1e-4, rtol=0)


def test_results_repeat_and_follow_the_seed():
    layers = toy_layers(1)
    settings = {"n_components": 8, "solver": "gradient", "steps": 5, "n_clusters": 4}
    state = torch.get_rng_state()
    first, again = (LayerSpectralClustering(**settings, seed=3).fit_transform(layers) for _ in range(2))
    assert torch.equal(first, again) and torch.equal(state, torch.get_rng_state())
    assert not torch.equal(first, LayerSpectralClustering(**settings, seed=4).fit_transform(layers))


def test_estimators_have_the_parameters_of_scikit_learn():
    for estimator in (LayerSpectralClustering("vv", n_components=7), DatasetSpectralClustering(n_clusters=5)):
        copy = sklearn.base.clone(estimator)
        assert copy is not estimator and copy.get_params() == estimator.get_params()
        assert copy.set_params(seed=9).seed == 9
        with pytest.raises(ValueError, match="has no parameter 'sed'"):
            copy.set_params(sed=1)
        with pytest.raises(ValueError, match="not fitted yet"):
            copy.transform([torch.randn(1, 4, 3)])


FEATURES = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "settings, layers, message",
    [
        ({}, [FEATURES[:1]], "has 1 patch; a graph needs at least two"),
        ({}, [FEATURES / 0], "has NaN or infinite values"),
        ({}, [FEATURES[:8]], "8 patches are not a square grid: pass `grid="),
        ({"n_clusters": 10}, [FEATURES], "10 clusters are more than the 9 patches"),
        ({"n_components": 10}, [FEATURES], "`n_components` must be between 1 and the 9 patches, got 10"),
        ({}, [], "There are no layers"),
        ({"graph": "kq"}, [FEATURES], "`graph` must be one of qk, vv, features, got 'kq'"),
        ({"graph": "qk"}, [FEATURES], r"needs a pair \(query, key\) per layer"),
        ({"solver": "svd"}, [FEATURES], "`solver` must be one of eigh, gradient, nystrom, got 'svd'"),
        ({"heads": "all"}, [FEATURES], "`heads` must be 'separate' or 'concatenated'"),
        ({"solver": "gradient", "parameterization": "mlp"}, [FEATURES], "must be 'map' or 'convolution', got 'mlp'"),
        ({"graph": "qk", "solver": "nystrom"}, [(FEATURES, FEATURES)], "needs symmetric affinities"),
        ({}, [torch.stack([FEATURES, FEATURES])[:, None]], "has 2 images: pass one at a time"),
        ({"n_components": 3}, [torch.ones(9, 4)], None),
    ],
)
def test_bad_input_gets_one_sentence(settings, layers, message):
    clustering = LayerSpectralClustering(**{"graph": "features", "n_components": 3, **settings})
    if message is None:  # equal patches: any single cluster number is as good, nothing is not finite
        assert torch.isfinite(clustering.set_params(n_clusters=1).fit_transform(layers)).all()
        return
    with pytest.raises(ValueError, match=message) as caught:
        clustering.fit(layers)
    assert "\n" not in str(caught.value)


def test_grid_must_fit_the_tokens():
    with pytest.raises(ValueError, match="A grid of 2 x 4 has 8 patches, but the tokens have 9"):
        LayerSpectralClustering("features").fit([FEATURES], grid=(2, 4))
    assert check_grid((2, 4), 8) == (2, 4)


@pytest.mark.parametrize(
    "settings, advice",
    [
        ({"solver": "eigh"}, "choose solver='nystrom'"),
        ({"solver": "gradient"}, "choose solver='eigh'"),
    ],
)
def test_memory_is_told_before_it_is_taken(settings, advice):
    layers = [torch.randn(2, 10_000, 2)] * 3
    with pytest.raises(UserError, match=rf"would need [\d.]+ GB, more than max_memory_gb=1: {advice}"):
        LayerSpectralClustering("vv", max_memory_gb=1, **settings).fit(layers)
    check_memory(2**30, 1, "A graph", "")


def test_data_set_memory_is_told_before_it_is_taken():
    tokens = torch.zeros(1, 49, 2).expand(100_000, 49, 2)
    with pytest.raises(UserError, match="Clustering 100,000 images of 49 patches would need"):
        DatasetSpectralClustering("vv", max_memory_gb=2).fit([tokens])
    with pytest.raises(ValueError, match="27 clusters are more than the 9 patches"):
        DatasetSpectralClustering("vv").fit([FEATURES[None]])
    with pytest.raises(ValueError, match="needs layers of one grid"):
        DatasetSpectralClustering("vv", n_clusters=2).fit([torch.randn(3, 9, 2), torch.randn(3, 4, 2)])


def test_large_images_are_clustered_without_their_graph():
    """10,000 patches: the graph alone would take 400 MB; two halves with different features come apart."""
    half = (torch.arange(100) >= 50).long()[:, None].expand(100, 100)
    features = torch.randn(2, 8)[half.flatten()] + 0.3 * torch.randn(10_000, 8)
    clustering = LayerSpectralClustering("features", 4, n_clusters=2, solver="nystrom", max_memory_gb=0.1)
    assert cluster_miou(clustering.fit_predict([features])[None], half[None]) >= 0.95


def test_points_that_cannot_be_clustered():
    with pytest.raises(ValueError, match="`n_clusters` must be between 1 and the 3 points, got 4"):
        k_means_clusters(torch.randn(3, 2), 4)
    with pytest.raises(ValueError, match="there are 2 points"):
        best_silhouette_clusters(torch.randn(2, 2))
    with pytest.raises(ValueError, match="All points are equal"):
        best_silhouette_clusters(torch.ones(8, 2))
    with pytest.raises(ValueError, match="needs 4 components, got 3"):
        components_to_rgb(torch.randn(4, 3))
    with pytest.raises(ValueError, match="NaN"):
        components_to_rgb(torch.full((4, 5), math.nan))


def test_soft_memberships_sum_to_one():
    memberships = soft_memberships([graph_stack(torch.randn(2, 9, 9))], 4, steps=3)
    torch.testing.assert_close(memberships.sum(dim=1), torch.ones(9))
