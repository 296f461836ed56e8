"""An empty `datasets` package where none can be imported: torchtitan imports it, and tokens in memory need none of it.

To be imported before torchtitan. A real one is used where there is one.
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
