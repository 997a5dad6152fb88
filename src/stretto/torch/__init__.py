"""The training library: at most three changed lines make an ordinary PyTorch loop elastic.

from stretto.torch import Run
"""

from __future__ import annotations

from stretto.torch.run import Run

__all__ = ["Run"]
