"""The data set that comes with the package, so that a first try needs no download."""

from importlib.resources import as_file, files

import numpy as np
import torch
from torch import Tensor


def digits() -> tuple[Tensor, Tensor]:
    """1797 handwritten digits: pixels in [0, 1], float32 (1797, 64), and labels 0 to 9, int64 (1797,).

    Example:
        >>> pixels, labels = digits()
        >>> pixels.shape, labels[:5].tolist()
        (torch.Size([1797, 64]), [0, 1, 2, 3, 4])
    """
    with as_file(files(__name__) / "digits.csv.gz") as path:
        table = torch.from_numpy(np.loadtxt(path, delimiter=",", dtype=np.float32))
    return table[:, :-1] / 16, table[:, -1].long()
