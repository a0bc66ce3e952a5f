"""LSTM-VAE as in Minder: rebuilds windows of one metric, trained on healthy jobs. Only measured beside the median."""

import numpy as np
import torch
from torch import Tensor, nn


class WindowDenoiser(nn.Module):
    """Encoder LSTM, a normal latent, decoder LSTM. Windows are centred, so that a constant changes nothing."""

    def __init__(self, length: int, hidden: int = 4, latent: int = 8) -> None:
        super().__init__()
        self.length = length
        self.encode = nn.LSTM(1, hidden, batch_first=True)
        self.moments = nn.Linear(hidden, 2 * latent)
        self.decode = nn.LSTM(latent, hidden, batch_first=True)
        self.out = nn.Linear(hidden, 1)

    def forward(self, windows: Tensor) -> tuple[Tensor, Tensor]:
        """Return rebuilt windows and the KL term. windows: [n, length]."""
        _, (state, _) = self.encode(windows[..., None])
        mean, log_var = self.moments(state[0]).chunk(2, dim=-1)
        latent = mean + torch.randn_like(mean) * (0.5 * log_var).exp() if self.training else mean
        rebuilt, _ = self.decode(latent[:, None].expand(-1, self.length, -1))
        kl = 0.5 * (mean**2 + log_var.exp() - 1 - log_var).sum(-1).mean()
        return self.out(rebuilt)[..., 0], kl

    @torch.no_grad()
    def rebuild(self, windows: np.ndarray) -> np.ndarray:
        """Return denoised windows, [moments, machines, length]."""
        flat = torch.from_numpy(windows.reshape(-1, self.length))
        return self.eval()(flat)[0].reshape(windows.shape).numpy()


def train_denoiser(series: list[np.ndarray], length: int, steps: int = 400) -> WindowDenoiser:
    """Train on windows of these series, each [samples, machines]; loss: mean squared error and a small KL term."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    model = WindowDenoiser(length)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for step in range(steps):
        values = series[step % len(series)]
        begin, machine = rng.integers(0, len(values) - length, 256), rng.integers(0, values.shape[1], 256)
        batch = torch.from_numpy(values[begin[:, None] + np.arange(length), machine[:, None]])
        rebuilt, kl = model(batch)
        loss = ((rebuilt - batch) ** 2).mean() + 1e-5 * kl
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model
