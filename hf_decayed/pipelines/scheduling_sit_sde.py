"""SiT's stochastic sampler: Euler-Maruyama steps from noise to data; the last step adds no noise.

The path is `x_t = t * data + (1 - t) * noise`. A flow along its velocity v ends at the same distribution as

    dx = (v + w * score) dt + sqrt(2 w) dW,    score = (t * v - x) / (1 - t)

for any w(t) >= 0 (Ma et al., ECCV 2024). Timesteps and velocities follow diffusers' convention for flow matching: a
timestep is `1000 * (1 - t)`, a velocity points from data to noise. This file travels alone to the Hub.
"""

import math
from dataclasses import dataclass

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from diffusers.utils import BaseOutput
from diffusers.utils.torch_utils import randn_tensor


__all__ = ["SiTSDEScheduler"]


@dataclass
class SiTSDESchedulerOutput(BaseOutput):
    prev_sample: torch.Tensor


class SiTSDEScheduler(SchedulerMixin, ConfigMixin):
    """
    Args:
        num_train_timesteps (`int`, defaults to 1000): The timestep of pure noise, `t = 0`.
        diffusion (`str`, defaults to `"sigma"`): `w(t)`: `sigma` and `linear` are `1 - t`, `constant` is 1, `decreasing`
            is `(cos(pi t) + 1)^2 / 4`.
        diffusion_norm (`float`, defaults to 1.0): Factor of w; 0 is the flow itself.
        last_step_size (`float`, defaults to 0.04): Length of the last step, in (0, 1).
    """

    order = 1
    init_noise_sigma = 1.0

    @register_to_config
    def __init__(
        self,
        num_train_timesteps: int = 1000,
        diffusion: str = "sigma",
        diffusion_norm: float = 1.0,
        last_step_size: float = 0.04,
    ):
        if diffusion not in ("sigma", "linear", "constant", "decreasing"):
            raise ValueError(f"`diffusion` must be sigma, linear, constant or decreasing, got {diffusion!r}.")
        if not 0 < last_step_size < 1:
            raise ValueError(f"`last_step_size` must lie in (0, 1), got {last_step_size}.")
        if not 0 <= diffusion_norm < math.inf:
            raise ValueError(f"`diffusion_norm` must be finite and not negative, got {diffusion_norm}.")
        if not isinstance(num_train_timesteps, int) or num_train_timesteps < 1:
            raise ValueError(f"`num_train_timesteps` must be a positive integer, got {num_train_timesteps!r}.")
        self.set_timesteps(250)

    def set_timesteps(self, num_inference_steps: int, device: str | torch.device | None = None) -> None:
        if num_inference_steps < 2:
            raise ValueError(f"`num_inference_steps` must be at least 2, got {num_inference_steps}.")
        self.num_inference_steps = num_inference_steps
        self.times = torch.linspace(0, 1 - self.config.last_step_size, num_inference_steps, dtype=torch.float64)
        self.timesteps = ((1 - self.times) * self.config.num_train_timesteps).float().to(device)
        self.step_index = 0

    def scale_model_input(self, sample: torch.Tensor, timestep=None) -> torch.Tensor:
        return sample

    def diffusion(self, time: float) -> float:
        """The coefficient w at time t."""
        forms = {"constant": 1.0, "decreasing": 0.25 * (torch.cos(torch.tensor(torch.pi * time)).item() + 1) ** 2}
        return self.config.diffusion_norm * forms.get(self.config.diffusion, 1 - time)

    def step(
        self,
        model_output: torch.Tensor,
        timestep: float | torch.Tensor,
        sample: torch.Tensor,
        generator: torch.Generator | list[torch.Generator] | None = None,
        return_dict: bool = True,
    ) -> SiTSDESchedulerOutput | tuple:
        """One step towards data. Steps must be taken in the order of `timesteps`."""
        time = self.times[self.step_index].item()
        velocity, weight = -model_output, self.diffusion(time)
        drift = velocity + weight * (time * velocity - sample) / (1 - time)
        if self.step_index == len(self.times) - 1:
            sample = sample + drift * self.config.last_step_size
        else:
            step_size = self.times[self.step_index + 1].item() - time
            noise = randn_tensor(sample.shape, generator=generator, device=sample.device, dtype=sample.dtype)
            sample = sample + drift * step_size + (2 * weight * step_size) ** 0.5 * noise
        self.step_index += 1
        return SiTSDESchedulerOutput(prev_sample=sample) if return_dict else (sample,)

    def scale_noise(self, sample: torch.Tensor, timestep: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """The forward path: data and noise, interpolated at a timestep."""
        noise_level = (timestep / self.config.num_train_timesteps).to(sample).view(-1, *[1] * (sample.ndim - 1))
        return (1 - noise_level) * sample + noise_level * noise
