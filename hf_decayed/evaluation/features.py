"""Features of a whole data set: extracted once, in shards that outlive an interruption, in the data's own order.

    encode = transformer_encoder(model, ["last.mean", "6.cls"])
    features = extract_features(encode, images, "outputs/features", identity={"model": fingerprint(model)})
    features["last.mean"], features["6.cls"], features["labels"]

What is extracted is asked for by name. Of a transformers encoder: `<layer>.<pooling>`, with a layer's number (0 is the
embedding) or `last` (after the final norm, where there is one), and `cls`, `mean` (all tokens), `patch_mean` or
`pooler` (the model's own). Of a diffusion model: `<module>@<noise level>`.
"""

import numpy as np
import torch

from ..data.datasets import EvaluationDataset
from ..data.keyed_random import sample_generator
from ..data.shards import Encoder, read_shards, write_shards
from ..models.modeling_decayed_vit_mae import pool


def extract_features(encode: Encoder, images: EvaluationDataset, *arguments, **settings) -> dict[str, torch.Tensor]:
    """Features by name, `labels` and pixel `checksums` of all images, in order; all processes call it and get the same.

    Takes what [`write_shards`] takes.
    """
    return read_shards(write_shards(encode, images, *arguments, **settings))


def transformer_encoder(model: torch.nn.Module, names: list[str]) -> Encoder:
    """Encodes with a transformers vision model, ours or anybody's; maps of convolutional models are averaged."""
    wanted = [name.rpartition(".") for name in names]
    for (layer, _, pooling), name in zip(wanted, names):
        if pooling not in ("cls", "mean", "patch_mean", "pooler") or not (layer == "last" or layer.isdecimal()):
            raise ValueError(
                f"A feature is `<layer>.<pooling>`: a number or 'last', and cls, mean, patch_mean or pooler; got '{name}'."
            )
    model.eval()
    hidden = any(layer != "last" for layer, _, _ in wanted)
    if getattr(model.config, "model_type", "") == "vit_mae":
        model.config.mask_ratio = 0.0  # it masks in evaluation too

    def encode(pixel_values, places):
        outputs = model(pixel_values.to(next(model.parameters()).dtype), output_hidden_states=hidden)
        features = {}
        for name, (layer, _, pooling) in zip(names, wanted):
            if layer != "last" and int(layer) >= len(outputs.hidden_states):
                raise ValueError(f"'{name}': the model has layers 0 to {len(outputs.hidden_states) - 1}.")
            if pooling == "pooler":
                features[name] = outputs.pooler_output.flatten(1)
            else:
                tokens = outputs.last_hidden_state if layer == "last" else outputs.hidden_states[int(layer)]
                features[name] = pool_features(tokens, pooling)
        return features

    return encode


def diffusion_encoder(
    model: torch.nn.Module, scheduler, blocks: list[str], levels: list[float], seed: int = 0, **inputs
) -> Encoder:
    """Encodes with a diffusers model: the average over places of what the named modules put out, at given noise levels.

    Levels count from 0, data, to 1, noise: parts of the scheduler's timesteps, or, where images flow to noise in a straight
    line, of the way, so levels of the two kinds are not the same. The noise belongs to the image and the level, so features
    do not depend on batches or processes. `pixel_values` must come in the range that the model was trained on, usually
    [-1, 1]; `inputs` go to the model as they are, each repeated for the batch if it has one entry.
    """
    from diffusers import DDPMScheduler  # here: other encoders need not wait for it

    model.eval()
    modules = dict(model.named_modules())
    unknown = [block for block in blocks if block not in modules]
    if unknown:
        raise ValueError(f"The model has no module {', '.join(unknown)}; it has {', '.join(list(modules)[1:30])}, ...")
    outside = [level for level in levels if not 0 <= level <= 1]
    if outside:
        raise ValueError(f"Noise levels lie in [0, 1], from data to noise; got {outside[0]}.")
    flows = not hasattr(scheduler, "add_noise") or getattr(scheduler.config, "use_flow_sigmas", False)
    last = scheduler.config.num_train_timesteps - 1
    # DDPM's, of the same levels: solvers add noise by the steps that they are set up for, and DPM-Solver, before it is set
    # up for any, by the levels in reverse.
    diffusion = None if flows else DDPMScheduler.from_config(scheduler.config)

    def noised(pixel_values, noise, level):
        """The sample at a level, and the time that the model takes."""
        if not flows:
            time = torch.tensor([min(round(level * (last + 1)), last)], device=pixel_values.device)
            return diffusion.add_noise(pixel_values, noise, time.expand(len(noise))), time
        own_time = getattr(model, "time_of_noise_level", lambda level: level * (last + 1))
        return torch.lerp(pixel_values, noise, level), torch.tensor([own_time(level)], device=pixel_values.device)

    extra = getattr(model, "num_extra_tokens", 0)  # time and class, which say nothing of the image

    def keep(features, name):
        def hook(module, arguments, output):
            output = output[0] if isinstance(output, tuple) else output
            output = getattr(output, "sample", output)
            features[name] = pool_features(output[:, extra:] if output.ndim == 3 else output, "mean")

        return hook

    def encode(pixel_values, places):
        features = {}
        for level in levels:
            draws = [sample_generator(seed, round(level * 1000), place) for place in places]
            noise = np.stack([each.standard_normal(pixel_values.shape[1:]) for each in draws])
            sample, time = noised(pixel_values, torch.from_numpy(noise).to(pixel_values), level)
            handles = [modules[block].register_forward_hook(keep(features, f"{block}@{level:g}")) for block in blocks]
            try:
                repeated = {name: each.expand(len(places), *each.shape[1:]) for name, each in inputs.items()}
                model(sample.to(model.dtype), time.expand(len(places)), **repeated)
            except TypeError as error:
                raise ValueError(
                    f"{type(model).__name__} cannot be called with a sample and a time: {error}"
                ) from error
            finally:
                for handle in handles:
                    handle.remove()
        return features

    return encode


def pool_features(tokens: torch.Tensor, pooling: str) -> torch.Tensor:
    """One feature per image, from tokens `(batch, number, dim)` or a map `(batch, dim, height, width)`."""
    if tokens.ndim == 4:
        if pooling != "mean":
            raise ValueError(f"A convolutional model has no class token: pool by `mean`, not `{pooling}`.")
        return tokens.mean(dim=(2, 3))
    return pool(tokens, pooling)
