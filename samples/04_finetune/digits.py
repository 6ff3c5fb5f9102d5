"""The task: scikit-learn's handwritten digits, and a small vision transformer that reads an image row by row."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

SIZE = 8
"""Images are 8 x 8 pixels."""


class Block(nn.Module):
    """Attention and FFN, normalization first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, width] -> the same."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Reader(nn.Module):
    """[batch, 8, 8] pixels -> [batch, 10] logits. A row of pixels is a token."""

    def __init__(self, width: int = 64, depth: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.embed, self.places = nn.Linear(SIZE, width), nn.Parameter(torch.zeros(SIZE, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """See the class."""
        x = self.blocks(self.embed(images) + self.places)
        return self.head(self.norm(x.mean(1)))


def load(*, turned: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns (training images, training labels, test images, test labels), the images turned by 90 degrees or not."""
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).reshape(-1, SIZE, SIZE) / 16
    if turned:
        images = images.rot90(dims=(1, 2))
    parts = train_test_split(images.numpy(), labels, test_size=0.5, random_state=0, stratify=labels)
    train_x, test_x, train_y, test_y = (torch.from_numpy(part) for part in parts)
    return train_x, train_y, test_x, test_y
