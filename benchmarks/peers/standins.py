"""An empty `datasets` package where it is missing: torchtitan imports it, and tokens from memory need nothing of it.

To be imported before torchtitan. The real one is used where it is installed.
"""

import sys
from importlib.util import find_spec
from types import ModuleType

if find_spec("datasets") is None:
    datasets, distributed = ModuleType("datasets"), ModuleType("datasets.distributed")
    datasets.__dict__.update(Dataset=object, load_dataset=None, distributed=distributed)
    distributed.__dict__.update(split_dataset_by_node=None)
    sys.modules |= {"datasets": datasets, "datasets.distributed": distributed}
