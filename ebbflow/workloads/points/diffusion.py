"""Diffusion of point clouds: noise schedules, training targets, and the samplers DDPM and DDIM.

The notation is that of Salimans and Ho 2022: a noised cloud is x_t = alpha_t · x_0 + sigma_t ·
noise, where alpha_t² + sigma_t² = 1, and t runs from 0 (little noise) to T - 1 (almost only noise).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_COSINE_OFFSET = 0.008  # Nichol and Dhariwal 2021, equation 17
_LARGEST_BETA = 0.999
_LINEAR_BETAS = (1e-4, 2e-2)  # Ho et al. 2020, section 4, for 1,000 timesteps

SCHEDULES = ("cosine", "linear")
PREDICTIONS = ("v", "epsilon")
SAMPLERS = ("ddim", "ddpm")

Denoise = Callable[[Tensor, Tensor], Tensor]


class NoiseSchedule:
    """Noise schedule: the factors `alpha` and `sigma` of each timestep.

    Both are `[timesteps]`, in float64 on the CPU.
    """

    def __init__(self, kind: str, timesteps: int) -> None:
        if kind == "cosine":
            steps = torch.arange(timesteps + 1, dtype=torch.float64) / timesteps
            kept = torch.cos((steps + _COSINE_OFFSET) / (1 + _COSINE_OFFSET) * math.pi / 2).square()
            betas = (1 - kept[1:] / kept[:-1]).clamp(max=_LARGEST_BETA)
        else:  # the same noise at the end for any number of timesteps
            low, high = (beta * 1000 / timesteps for beta in _LINEAR_BETAS)
            betas = torch.linspace(low, high, timesteps, dtype=torch.float64).clamp(
                max=_LARGEST_BETA
            )
        kept = torch.cumprod(1 - betas, dim=0)
        self.timesteps = timesteps
        self.alpha = kept.sqrt()
        self.sigma = (1 - kept).sqrt()
        self._tables: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def factors(self, t: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return alpha and sigma for the timesteps `t`, `[batch]`.

        They are shaped to be multiplied with `like`, `[batch, points, 3]`.
        """
        kind = like.device, like.dtype
        # Kept there, since a copy in each step would wait for the device
        if kind not in self._tables:
            self._tables[kind] = torch.stack([self.alpha, self.sigma]).to(like)
        alpha, sigma = self._tables[kind][:, t.to(like.device)][..., None, None]
        return alpha, sigma

    def add_noise(self, clean: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        alpha, sigma = self.factors(t, clean)
        return alpha * clean + sigma * noise

    def target(self, prediction: str, clean: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """Return the training target of the denoiser: the noise, or v = alpha · noise - sigma ·
        clean.
        """
        if prediction == "epsilon":
            return noise
        alpha, sigma = self.factors(t, clean)
        return alpha * noise - sigma * clean

    def split(
        self, prediction: str, output: Tensor, noised: Tensor, t: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute the clean cloud and the noise from an output of the denoiser."""
        alpha, sigma = self.factors(t, noised)
        if prediction == "epsilon":
            return (noised - sigma * output) / alpha, output
        return alpha * noised - sigma * output, sigma * noised + alpha * output

    def sampling_times(self, steps: int) -> list[int]:
        """Return `steps` timesteps from T - 1 down to 0, evenly spaced."""
        return [
            round(float(t))
            for t in torch.linspace(self.timesteps - 1, 0, min(steps, self.timesteps))
        ]


def sample(  # noqa: PLR0913 - the parameters of the published sampler
    denoise: Denoise,
    schedule: NoiseSchedule,
    start: Tensor,
    generators: Sequence[torch.Generator],
    *,
    prediction: str,
    sampler: str,
    steps: int,
    limit: float,
) -> Tensor:
    """Generate clouds `[batch, points, 3]` with the denoiser, from the noise `start`.

    DDIM (Song et al. 2021, equation 12 with eta = 0) adds no noise. DDPM is the same equation with
    eta = 1, which over all timesteps is the ancestral sampler of Ho et al. 2020. Noise comes from
    the clouds' own `generators`, so a cloud does not depend on the batch in which it is made.
    Coordinates of the clean estimate are clipped to ± `limit`.
    """
    x = start
    times = schedule.sampling_times(steps)
    for number, now in enumerate(times):
        t = torch.full((len(x),), now, dtype=torch.int64)
        clean, _ = schedule.split(prediction, denoise(x, t.to(x.device)), x, t)
        clean = clean.clamp(-limit, limit)
        if number == len(times) - 1:
            return clean
        alpha = float(schedule.alpha[now])
        sigma = float(schedule.sigma[now])
        later_alpha, later_sigma = (
            float(table[times[number + 1]]) for table in (schedule.alpha, schedule.sigma)
        )
        noise = (x - alpha * clean) / sigma
        spread = 0.0
        if sampler == "ddpm":
            spread = later_sigma / sigma * math.sqrt(max(0.0, 1 - (alpha / later_alpha) ** 2))
        x = later_alpha * clean + math.sqrt(max(0.0, later_sigma**2 - spread**2)) * noise
        if spread:
            x = x + spread * draw_normal(generators, x.shape[1]).to(x)
    return x


def draw_normal(generators: Sequence[torch.Generator], points: int) -> Tensor:
    """Draw normally distributed noise `[batch, points, 3]`, with one generator per cloud."""
    return torch.stack([torch.randn(points, 3, generator=generator) for generator in generators])
