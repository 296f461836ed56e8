# What type checkers see: the functions, where at run time some names are packages that can be called.
from meshwright.api import Checkpoint as Checkpoint
from meshwright.api import Run as Run
from meshwright.api import bench as bench
from meshwright.api import data as data
from meshwright.api import load_job as load_job
from meshwright.api import open_run as open_run
from meshwright.api import plan as plan
from meshwright.api import ray as ray
from meshwright.api import rehearse as rehearse
from meshwright.api import train as train
from meshwright.api import verify as verify
from meshwright.errors import UserError as UserError
from meshwright.job import Job as Job
from meshwright.registries import register_loss as register_loss
from meshwright.registries import register_optimizer as register_optimizer
from meshwright.registries import register_schedule as register_schedule
from meshwright.registries import register_sink as register_sink
from meshwright.registries import register_source as register_source
from meshwright.runs.callbacks import Callback as Callback

__version__: str
