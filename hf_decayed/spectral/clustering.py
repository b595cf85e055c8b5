"""Spectral clustering of the layers of a vision model, for one image or for a data set, in the style of scikit-learn.

>>> clustering = LayerSpectralClustering(graph="vv", n_components=10)
>>> labels = clustering.fit_predict(layers)  # (height, width)

Layers are records of `record_attention`, or plain tensors: `(query, key)` pairs for `graph="qk"`, values for `"vv"`, features
for `"features"`.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from .graphs import (
    TEMPERATURE,
    check_grid,
    check_memory,
    check_tokens,
    concatenate_heads,
    cosine_factors,
    describe,
    graph_stack,
    pooling_matrix,
    query_key_factors,
    sparse_graph,
    sum_of_walks,
    upsample_graph,
)
from .regions import Clusters, best_silhouette_clusters, k_means_clusters
from .solvers import (
    Spectrum,
    dataset_memberships,
    exact_eigenvectors,
    finest_grid,
    nystrom_eigenvectors,
    reorthogonalize,
    soft_memberships,
    sparse_eigenvectors,
)


__all__ = ["DatasetSpectralClustering", "LayerSpectralClustering"]

GRAPHS = ("qk", "vv", "features")
HEADS = ("separate", "concatenated")


@dataclass
class LayerTokens:
    """Tokens of one layer whose similarities are the graph: `rows` attend to `columns`; both are equal unless `qk`.

    Args:
        rows, columns (`torch.Tensor`): `(images, heads, patches, dim)`.
        grid (`tuple[int, int]`): Rows and columns of patches.
    """

    rows: torch.Tensor
    columns: torch.Tensor
    grid: tuple[int, int]

    def concatenate(self) -> "LayerTokens":
        """One head, with the dimensions of all heads."""
        rows = concatenate_heads(self.rows).unsqueeze(1)
        columns = rows if self.columns is self.rows else concatenate_heads(self.columns).unsqueeze(1)
        return LayerTokens(rows, columns, self.grid)


def read_layers(layers: Any, graph: str, heads: str, grid: Any = None, dataset: bool = False) -> list[LayerTokens]:
    """Layers of one image or of a data set, from records with `query`, `key`, `value`, `output` and `grid`, or from tensors.

    Args:
        layers: One layer or a list. Tensors are `(patches, dim)` or `(heads, patches, dim)`, those of a data set
            `(images, patches, dim)` or `(images, heads, patches, dim)`.
        grid: `(height, width)`, or one per layer; by default that of the record, or square.
    """
    if graph not in GRAPHS:
        raise ValueError(f"`graph` must be one of {', '.join(GRAPHS)}, got {graph!r}.")
    if heads not in HEADS:
        raise ValueError(f"`heads` must be 'separate' or 'concatenated', got {heads!r}.")
    layers = getattr(layers, "layers", layers)  # what `record_attention` returns
    if isinstance(layers, torch.Tensor) or hasattr(layers, "grid"):
        layers = [layers]
    layers = list(layers)
    if not layers:
        raise ValueError("There are no layers to cluster.")
    grids = list(grid) if grid is not None and not isinstance(grid[0], int) else [grid] * len(layers)
    if len(grids) != len(layers):
        raise ValueError(f"There are {len(layers)} layers, but {len(grids)} grids.")
    result = [read_layer(layer, graph, one, dataset) for layer, one in zip(layers, grids)]
    if len({len(layer.rows) for layer in result}) > 1:
        raise ValueError(f"Layers have different numbers of images: {sorted({len(layer.rows) for layer in result})}.")
    return [layer.concatenate() for layer in result] if heads == "concatenated" else result


def read_layer(layer: Any, graph: str, grid: Sequence[int] | None, dataset: bool) -> LayerTokens:
    """One layer as `(images, heads, patches, dim)`; features of a record are the attention's output, all heads together."""
    is_record = hasattr(layer, "grid")
    if is_record:
        names = {"qk": ("query", "key"), "vv": ("value",), "features": ("output",)}[graph]
        tensors, grid = [getattr(layer, name) for name in names], grid or layer.grid
    elif graph == "qk":
        if isinstance(layer, torch.Tensor) or len(layer) != 2:
            raise ValueError(f"`graph='qk'` needs a pair (query, key) per layer, got {describe(layer)}.")
        names, tensors = ("query", "key"), list(layer)
    else:
        names, tensors = ("value" if graph == "vv" else "features",), [layer]
    if missing := [name for name, tensor in zip(names, tensors) if tensor is None]:
        raise ValueError(f"The layer has no {' and '.join(missing)}, which `graph={graph!r}` needs.")
    tensors = [check_tokens(tensor, name) for name, tensor in zip(names, tensors)]
    tensors = [add_axes(tensor, name, dataset) for name, tensor in zip(names, tensors)]
    if tensors[0].shape != tensors[-1].shape:
        raise ValueError(f"`query` and `key` differ: {tuple(tensors[0].shape)} and {tuple(tensors[-1].shape)}.")
    if graph == "qk" and hasattr(layer, "scaling"):  # attention that does not divide by sqrt(dim)
        tensors[0] = tensors[0] * (layer.scaling * tensors[0].shape[-1] ** 0.5)
    tokens = LayerTokens(tensors[0], tensors[-1], check_grid(grid, tensors[0].shape[-2]))
    return tokens.concatenate() if is_record and graph == "features" else tokens


def add_axes(tensor: torch.Tensor, name: str, dataset: bool) -> torch.Tensor:
    """A tensor as `(images, heads, patches, dim)`."""
    if dataset:
        tensor = tensor.unsqueeze(1) if tensor.ndim == 3 else tensor
    elif tensor.ndim < 4:
        tensor = tensor[None] if tensor.ndim == 3 else tensor[None, None]
    if tensor.ndim != 4:
        raise ValueError(f"`{name}` of a data set must be (images, [heads,] patches, dim), got {describe(tensor)}.")
    if not dataset and len(tensor) != 1:
        raise ValueError(
            f"`{name}` has {len(tensor)} images: pass one at a time, or use `DatasetSpectralClustering` for all together."
        )
    return tensor


class ParametersMixin:
    """scikit-learn's `get_params` and `set_params`, written out: `BaseEstimator` would make it a base dependency."""

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The arguments of the constructor and their values."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def set_params(self, **parameters: Any):
        """Changes arguments of the constructor; returns the estimator itself."""
        known = self.get_params()
        for name, value in parameters.items():
            if name not in known:
                raise ValueError(f"{type(self).__name__} has no parameter '{name}': it has {', '.join(known)}.")
            setattr(self, name, value)
        return self

    def check_fitted(self) -> None:
        if not hasattr(self, "embedding_"):
            raise ValueError(f"This {type(self).__name__} is not fitted yet: call `fit` first.")


class LayerSpectralClustering(ParametersMixin):
    """Spectral clustering of one image over all layers and heads of a vision model.

    Args:
        graph (`str`): `qk`, attention from queries to keys; `vv`, similarity of values; `features`, of the layer's output.
        n_components (`int`): Eigenvectors, or soft clusters of the gradient solver: at least twice the regions expected.
        n_clusters (`int`, *optional*): By default the number from 2 to 10 with the best silhouette.
        solver (`str`): `eigh`, exact eigenvectors of the averaged graph; `gradient`, soft clusters over all graphs;
            `nystrom`, for images whose graph does not fit memory (`vv` and `features`).
        heads (`str`): `separate`, every head is a graph of its own, or `concatenated`.
        temperature (`float`): For `vv` and `features`: affinities are exp(cosine / temperature).
        parameterization, steps, learning_rate: For the gradient solver, see `soft_memberships`.
        n_init (`int`): Starts of k-means. A single one can end with a few outliers as a cluster, which silhouettes prefer.
        max_memory_gb (`float`): A fit that needs more is refused before it starts.

    Attributes:
        embedding_ (`torch.Tensor`): `(patches, components)`. Eigenvectors times eigenvalues, which is one step of the random
            walk; of the gradient solver the soft clusters, scaled to unit length and made orthogonal.
        labels_ (`torch.Tensor`): `(height, width)`.
        n_clusters_, silhouettes_, k_means_: The clusters, see `Clusters`.
        eigenvalues_ (`torch.Tensor`), memberships_ (`torch.Tensor`): From the exact and from the gradient solver.
        grid_ (`tuple[int, int]`): The finest grid of the layers.
    """

    def __init__(
        self,
        graph: str = "qk",
        n_components: int = 10,
        n_clusters: int | None = None,
        solver: str = "eigh",
        heads: str = "separate",
        temperature: float = TEMPERATURE,
        parameterization: str = "map",
        steps: int | None = None,
        learning_rate: float | None = None,
        n_init: int = 3,
        max_memory_gb: float = 4.0,
        seed: int = 0,
    ):
        self.graph, self.n_components, self.n_clusters, self.solver = graph, n_components, n_clusters, solver
        self.heads, self.temperature, self.parameterization = heads, temperature, parameterization
        self.steps, self.learning_rate, self.n_init = steps, learning_rate, n_init
        self.max_memory_gb, self.seed = max_memory_gb, seed

    def fit(self, layers: Any, y: None = None, grid: Any = None) -> "LayerSpectralClustering":
        """Finds the embedding and the clusters of one image; see `read_layers` for what `layers` and `grid` may be."""
        solvers = {"eigh": self.solve_exactly, "gradient": self.solve_by_gradient, "nystrom": self.solve_by_nystrom}
        if self.solver not in solvers:
            raise ValueError(f"`solver` must be one of {', '.join(solvers)}, got {self.solver!r}.")
        tokens = read_layers(layers, self.graph, self.heads, grid)
        self.grid_ = finest_grid([layer.grid for layer in tokens])
        if self.n_clusters is not None and self.n_clusters > self.grid_[0] * self.grid_[1]:
            raise ValueError(f"{self.n_clusters} clusters are more than the {self.grid_[0] * self.grid_[1]} patches.")
        self.embedding_ = solvers[self.solver](tokens)
        self.layers_ = tokens
        vars(self).pop("projection_", None)  # of an earlier fit
        clusters = self.cluster()
        self.k_means_, self.silhouettes_ = clusters.k_means, clusters.silhouettes
        self.n_clusters_ = clusters.k_means.n_clusters
        self.labels_ = clusters.labels.view(self.grid_)
        return self

    def fit_predict(self, layers: Any, y: None = None, grid: Any = None) -> torch.Tensor:
        """Clusters of the patches of one image, `(height, width)`."""
        return self.fit(layers, grid=grid).labels_

    def fit_transform(self, layers: Any, y: None = None, grid: Any = None) -> torch.Tensor:
        """Embedding of the patches of one image, `(patches, components)`."""
        return self.fit(layers, grid=grid).embedding_

    def transform(self, layers: Any, grid: Any = None) -> torch.Tensor:
        """Embedding of the patches of another image, `(patches, components)`, such as the next frame of a video.

        Its patches take one step of the random walk to the fitted patches, and average their embeddings. A linear map
        follows, with which the fitted image itself comes closest to `embedding_`.
        """
        self.check_fitted()
        tokens = read_layers(layers, self.graph, self.heads, grid)
        if len(tokens) != len(self.layers_):
            raise ValueError(f"The fitted image has {len(self.layers_)} layers, this one {len(tokens)}.")
        if not hasattr(self, "projection_"):
            self.projection_ = torch.linalg.lstsq(self.walk(self.layers_), self.embedding_, driver="gelsd").solution
        return self.walk(tokens) @ self.projection_

    def walk(self, tokens: list[LayerTokens]) -> torch.Tensor:
        """Mean embedding of the fitted patches that the patches of another image walk to, `(patches, components)`."""
        fine = finest_grid([layer.grid for layer in tokens])
        total = torch.zeros(fine[0] * fine[1], self.embedding_.shape[1])
        for layer, fitted in zip(tokens, self.layers_):
            entries = layer.rows.shape[2] * fitted.columns.shape[2]
            check_memory(4 * 3 * entries, self.max_memory_gb, "The walk into the fitted image", "use a smaller image")
            walks = sum_of_walks(*self.factors(LayerTokens(layer.rows, fitted.columns, layer.grid)))
            total += spread(walks @ pool(self.embedding_, self.grid_, fitted.grid), layer.grid, fine)
        return total / sum(layer.rows.shape[1] for layer in tokens)

    def predict(self, layers: Any, grid: Any = None) -> torch.Tensor:
        """Clusters of the patches of another image, `(height, width)`: the fitted centre nearest to `transform`."""
        tokens = read_layers(layers, self.graph, self.heads, grid)
        labels = self.k_means_.predict(self.transform(layers, grid).numpy())
        return torch.from_numpy(labels).long().view(finest_grid([layer.grid for layer in tokens]))

    def cluster(self) -> Clusters:
        if self.n_clusters is None:
            return best_silhouette_clusters(self.embedding_, range(2, 11), self.seed, self.n_init)
        return k_means_clusters(self.embedding_, self.n_clusters, self.seed, self.n_init)

    def factors(self, layer: LayerTokens) -> tuple[torch.Tensor, torch.Tensor]:
        """Two tensors `(heads, patches, dim)`; the softmax of their product is the row-normalised graph."""
        if self.graph == "qk":
            return query_key_factors(layer.rows[0], layer.columns[0])
        return cosine_factors(layer.rows[0], layer.columns[0], self.temperature)

    def solve_exactly(self, tokens: list[LayerTokens]) -> torch.Tensor:
        """Eigenvectors of the mean of all graphs, which are added up a few at a time."""
        num_patches = self.grid_[0] * self.grid_[1]
        needed = 4 * 8 * num_patches**2
        instead = "choose solver='nystrom'" if self.graph != "qk" else "choose graph='vv' with solver='nystrom'"
        what = f"The averaged graph of {num_patches:,} x {num_patches:,} patches"
        check_memory(needed, self.max_memory_gb, what, f"{instead}, or a smaller image")
        total = torch.zeros(num_patches, num_patches)
        for layer in tokens:
            total += upsample_graph(sum_of_walks(*self.factors(layer)), layer.grid, self.grid_)
        spectrum = exact_eigenvectors(total / sum(layer.rows.shape[1] for layer in tokens), self.n_components)
        return self.use_spectrum(spectrum)

    def use_spectrum(self, spectrum: Spectrum) -> torch.Tensor:
        self.eigenvalues_ = spectrum.eigenvalues
        return spectrum.eigenvectors * spectrum.eigenvalues

    def solve_by_gradient(self, tokens: list[LayerTokens]) -> torch.Tensor:
        """Soft clusters over all graphs, which are all in memory."""
        entries = sum(layer.rows.shape[1] * layer.rows.shape[2] ** 2 for layer in tokens)
        num_graphs = sum(layer.rows.shape[1] for layer in tokens)
        instead = "choose solver='eigh', heads='concatenated', fewer layers or a smaller image"
        check_memory(4 * 3 * entries, self.max_memory_gb, f"The {num_graphs} graphs of the gradient solver", instead)
        factors = [self.factors(layer) for layer in tokens]
        stacks = [graph_stack(rows @ columns.mT, layer.grid) for (rows, columns), layer in zip(factors, tokens)]
        self.memberships_ = soft_memberships(
            stacks, self.n_components, self.grid_, self.parameterization, self.steps, self.learning_rate, self.seed
        )
        return reorthogonalize(self.memberships_)

    def solve_by_nystrom(self, tokens: list[LayerTokens]) -> torch.Tensor:
        """Approximate eigenvectors of the mean of all affinities, which is never stored."""
        spectrum = nystrom_spectrum(tokens, self.graph, self.n_components, self.temperature, self.seed)
        return self.use_spectrum(spectrum)


def pool(values: torch.Tensor, fine: tuple[int, int], coarse: tuple[int, int]) -> torch.Tensor:
    """Values `(..., patches, dim)` of a fine grid, averaged over the cells of a coarse one."""
    return values if fine == coarse else pooling_matrix(fine, coarse) @ values


def spread(values: torch.Tensor, coarse: tuple[int, int], fine: tuple[int, int]) -> torch.Tensor:
    """Values `(patches, dim)` of a coarse grid on a fine one, equal within a cell."""
    if coarse == fine:
        return values
    maps = F.interpolate(values.T.reshape(1, -1, *coarse), size=fine, mode="nearest-exact")
    return maps.flatten(2)[0].T


def nystrom_spectrum(
    tokens: list[LayerTokens], graph: str, n_components: int, temperature: float, seed: int
) -> Spectrum:
    """Nystrom eigenvectors of the mean over layers and heads of exp(cosine / temperature), over all images together."""
    if graph == "qk":
        raise ValueError(
            "`solver='nystrom'` needs symmetric affinities: choose graph='vv' or 'features', or another solver."
        )
    if len({layer.grid for layer in tokens}) > 1:
        raise ValueError(
            "`solver='nystrom'` needs layers of one grid: choose solver='gradient', or layers of one size."
        )
    normalized = [F.normalize(layer.rows, dim=-1) for layer in tokens]
    heads = [head.flatten(0, 1) for layer in normalized for head in layer.unbind(dim=1)]
    kernel = partial(mean_cosine_affinity, sizes=[head.shape[1] for head in heads], temperature=temperature)
    joined = heads[0] if len(heads) == 1 else torch.cat(heads, dim=1)
    return nystrom_eigenvectors(joined, n_components, kernel, generator=torch.Generator().manual_seed(seed))


def mean_cosine_affinity(
    tokens: torch.Tensor, landmarks: torch.Tensor, sizes: list[int], temperature: float
) -> torch.Tensor:
    """Mean of exp((cosine - 1) / temperature) over parts of unit length, which have `sizes` dimensions."""
    pairs = list(zip(tokens.split(sizes, dim=1), landmarks.split(sizes, dim=1)))
    return sum(((part @ other.T - 1) / temperature).exp() for part, other in pairs) / len(pairs)


class DatasetSpectralClustering(ParametersMixin):
    """Spectral clustering of all patches of a data set together; memory grows linearly with the number of images.

    Args:
        graph (`str`): `vv`, similarity of values ("what"); `features`; `qk`, of queries to keys ("where"). Heads are
            concatenated and scaled to unit length, affinities are cosine similarities.
        n_components (`int`): Eigenvectors, or leading singular vectors of the soft clusters.
        n_clusters (`int`): For mini-batch k-means.
        solver (`str`): `eigsh`, eigenvectors of a sparse graph; `nystrom`, of exp(cosine / temperature) with 512 landmarks
            (`vv` and `features`), the fastest; `gradient`, one map of soft clusters per image, as the authors do.
        intra, inter (`int`), threshold (`float`): For the sparse graph, see `sparse_graph`.
        images_per_batch (`int`), rounds (`int`): Images that are compared with one another, and how often batches are
            drawn.
        n_channels, epochs, inner_steps, learning_rate: For the gradient solver, see `dataset_memberships`.

    Attributes:
        embedding_ (`torch.Tensor`): `(images, patches, components)`.
        labels_ (`torch.Tensor`): `(images, height, width)`.
        eigenvalues_ (`torch.Tensor`), k_means_, grid_: As in `LayerSpectralClustering`.
    """

    def __init__(
        self,
        graph: str = "vv",
        n_components: int = 27,
        n_clusters: int = 27,
        solver: str = "eigsh",
        intra: int = 10,
        inter: int = 10,
        threshold: float = 0.1,
        images_per_batch: int = 32,
        rounds: int = 2,
        temperature: float = TEMPERATURE,
        n_channels: int = 50,
        epochs: int = 200,
        inner_steps: int = 5,
        learning_rate: float = 1e-2,
        max_memory_gb: float = 4.0,
        seed: int = 0,
    ):
        self.graph, self.n_components, self.n_clusters, self.solver = graph, n_components, n_clusters, solver
        self.intra, self.inter, self.threshold = intra, inter, threshold
        self.images_per_batch, self.rounds, self.temperature = images_per_batch, rounds, temperature
        self.n_channels, self.epochs, self.inner_steps = n_channels, epochs, inner_steps
        self.learning_rate, self.max_memory_gb, self.seed = learning_rate, max_memory_gb, seed

    def fit(self, layers: Any, y: None = None, grid: Any = None) -> "DatasetSpectralClustering":
        """Finds the embedding and the clusters of all images; see `read_layers` for what `layers` and `grid` may be."""
        solvers = {"eigsh": self.solve_sparse, "nystrom": self.solve_by_nystrom, "gradient": self.solve_by_gradient}
        if self.solver not in solvers:
            raise ValueError(f"`solver` must be one of {', '.join(solvers)}, got {self.solver!r}.")
        tokens = read_layers(layers, self.graph, "concatenated", grid, dataset=True)
        self.grid_ = finest_grid([layer.grid for layer in tokens])
        self.check_sizes(tokens)
        self.embedding_ = solvers[self.solver](tokens).view(len(tokens[0].rows), self.grid_[0] * self.grid_[1], -1)
        self.store_anchors(tokens)
        points = self.embedding_.flatten(0, 1)
        clusters = k_means_clusters(points, self.n_clusters, self.seed, mini_batch=len(points) > 20_000)
        self.k_means_ = clusters.k_means
        self.labels_ = clusters.labels.view(-1, *self.grid_)
        return self

    def fit_predict(self, layers: Any, y: None = None, grid: Any = None) -> torch.Tensor:
        """Clusters of the patches of all images, `(images, height, width)`."""
        return self.fit(layers, grid=grid).labels_

    def fit_transform(self, layers: Any, y: None = None, grid: Any = None) -> torch.Tensor:
        """Embedding of the patches of all images, `(images, patches, components)`."""
        return self.fit(layers, grid=grid).embedding_

    def transform(self, layers: Any, grid: Any = None) -> torch.Tensor:
        """Embedding of other images, `(images, patches, components)`: the mean of the most similar of 4,096 fitted patches."""
        self.check_fitted()
        tokens = read_layers(layers, self.graph, "concatenated", grid, dataset=True)
        fine = finest_grid([layer.grid for layer in tokens])
        tokens_of_images = zip(*(layer.rows[:, 0] for layer in tokens))
        return torch.stack([self.transform_image(rows, tokens, fine) for rows in tokens_of_images])

    def transform_image(
        self, rows: Sequence[torch.Tensor], tokens: list[LayerTokens], fine: tuple[int, int]
    ) -> torch.Tensor:
        """One image `(patches, components)` from its tokens in every layer."""
        total = torch.zeros(fine[0] * fine[1], self.embedding_.shape[-1])
        for row, layer, (columns, targets) in zip(rows, tokens, self.anchors_):
            similarity = F.normalize(row, dim=-1) @ columns.T
            nearest = similarity.topk(min(self.intra + self.inter, len(columns)))
            weights = nearest.values.clamp_min(0)
            weights = weights / weights.sum(dim=1, keepdim=True).clamp_min(1e-8)
            total += spread((weights.unsqueeze(-1) * targets[nearest.indices]).sum(dim=1), layer.grid, fine)
        return total / len(tokens)

    def predict(self, layers: Any, grid: Any = None) -> torch.Tensor:
        """Clusters of the patches of other images, `(images, height, width)`."""
        tokens = read_layers(layers, self.graph, "concatenated", grid, dataset=True)
        labels = self.k_means_.predict(self.transform(layers, grid).flatten(0, 1).numpy())
        return torch.from_numpy(labels).long().view(-1, *finest_grid([layer.grid for layer in tokens]))

    def check_sizes(self, tokens: list[LayerTokens]) -> None:
        num_images, num_patches = len(tokens[0].rows), self.grid_[0] * self.grid_[1]
        num_points = num_images * num_patches
        if self.n_clusters > num_points:
            raise ValueError(f"{self.n_clusters} clusters are more than the {num_points} patches.")
        if self.solver != "gradient" and len({layer.grid for layer in tokens}) > 1:
            raise ValueError(f"`solver={self.solver!r}` needs layers of one grid: choose solver='gradient'.")
        batch = min(self.images_per_batch, num_images) * max(layer.rows.shape[2] for layer in tokens)
        edges = 2 * (self.intra + self.inter) * num_points * len(tokens)
        needed = {
            "eigsh": 8 * batch**2 + 40 * edges + 8 * num_points * (3 * self.n_components + 20),
            "nystrom": 4 * num_points * (tokens[0].rows.shape[-1] * len(tokens) + 3 * self.n_components),
            "gradient": 8 * batch**2 + 20 * num_points * self.n_channels,
        }[self.solver]
        instead = "choose fewer images"
        instead += " or images_per_batch" if self.solver != "nystrom" else " or layers"
        instead += ", or solver='nystrom'" if self.solver != "nystrom" and self.graph != "qk" else ""
        what = f"Clustering {num_images:,} images of {num_patches} patches"
        check_memory(needed, self.max_memory_gb, what, instead)

    def store_anchors(self, tokens: list[LayerTokens], number: int = 4096) -> None:
        """Keeps tokens and embeddings of some patches per layer, which new images are compared with."""
        generator = torch.Generator().manual_seed(self.seed)
        self.anchors_ = []
        for layer in tokens:
            num_images, _, num_patches, _ = layer.columns.shape
            chosen = torch.randperm(num_images * num_patches, generator=generator)[:number]
            images, patches = chosen // num_patches, chosen % num_patches
            targets = pool(self.embedding_, self.grid_, layer.grid)[images, patches]
            self.anchors_.append((F.normalize(layer.columns[images, 0, patches], dim=-1), targets))

    def sparse_graph(self, layer: LayerTokens, images: torch.Tensor | None = None):
        """The sparse graph of one layer; with `images`, only of these, all compared with one another."""
        chosen = slice(None) if images is None else images
        rows = layer.rows[chosen, 0]
        columns = None if layer.columns is layer.rows else layer.columns[chosen, 0]
        return sparse_graph(
            rows,
            columns,
            self.intra,
            self.inter,
            self.threshold,
            images_per_batch=self.images_per_batch if images is None else len(images),
            rounds=self.rounds if images is None else 1,
            generator=torch.Generator().manual_seed(self.seed),
        )

    def solve_sparse(self, tokens: list[LayerTokens]) -> torch.Tensor:
        graph = self.sparse_graph(tokens[0])
        for layer in tokens[1:]:
            graph = graph + self.sparse_graph(layer)
        return self.use_spectrum(sparse_eigenvectors(graph, self.n_components))

    def solve_by_nystrom(self, tokens: list[LayerTokens]) -> torch.Tensor:
        return self.use_spectrum(nystrom_spectrum(tokens, self.graph, self.n_components, self.temperature, self.seed))

    def use_spectrum(self, spectrum: Spectrum) -> torch.Tensor:
        self.eigenvalues_ = spectrum.eigenvalues
        return spectrum.eigenvectors * spectrum.eigenvalues

    def solve_by_gradient(self, tokens: list[LayerTokens]) -> torch.Tensor:
        def build_graphs(images: torch.Tensor) -> list[tuple[Any, tuple[int, int]]]:
            return [(self.sparse_graph(layer, images), layer.grid) for layer in tokens]

        self.memberships_ = dataset_memberships(
            build_graphs,
            len(tokens[0].rows),
            self.grid_,
            self.n_channels,
            self.epochs,
            self.inner_steps,
            self.learning_rate,
            self.images_per_batch,
            self.seed,
        )
        flat = self.memberships_.permute(0, 2, 3, 1).flatten(0, 2)  # (all patches, channels)
        return reorthogonalize(flat, unit_columns=False)[:, : self.n_components]
