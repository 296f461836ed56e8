"""Empty packages in place of `datasets` and tensorboard where these cannot be imported: torchtitan imports them, and a
run with tokens in memory and no logs needs none of it.

To be imported before torchtitan. Real ones are used where there are any.
"""

import sys
from types import ModuleType

try:
    import datasets  # noqa: F401
except ImportError:
    standin, distributed = ModuleType("datasets"), ModuleType("datasets.distributed")
    standin.__dict__.update(Dataset=object, load_dataset=None, distributed=distributed)
    distributed.__dict__.update(split_dataset_by_node=None)
    sys.modules |= {"datasets": standin, "datasets.distributed": distributed}

try:
    import torch.utils.tensorboard  # noqa: F401
except ImportError:
    writer = ModuleType("torch.utils.tensorboard")
    writer.__dict__.update(SummaryWriter=None)
    sys.modules["torch.utils.tensorboard"] = writer
