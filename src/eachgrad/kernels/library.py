"""The namespace of the ops: `torch.ops.eachgrad`."""

import torch

library = torch.library.Library("eachgrad", "DEF")
