"""Which parts of a command and its environment are recorded in run files, which anyone may read.

An allowlist of what is harmless, not a blocklist of secrets: an unforeseen name is left out.
"""

from collections.abc import Iterator, Mapping, Sequence

from meshwright.job.load import field_names
from meshwright.job.sanitize import HIDDEN, without_secrets

_BY_PREFIX = {
    "": """
        RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK ROLE_RANK NODE_RANK MASTER_ADDR MASTER_PORT
        CUBLAS_WORKSPACE_CONFIG NVIDIA_TF32_OVERRIDE NVIDIA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES
        PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF PYTORCH_HIP_ALLOC_CONF TORCHDYNAMO_DISABLE TORCHINDUCTOR_CACHE_DIR
        MKL_NUM_THREADS MKL_DYNAMIC KMP_AFFINITY KMP_BLOCKTIME GOMP_CPU_AFFINITY GOMP_SPINCOUNT GLOO_SOCKET_IFNAME
        FI_PROVIDER TRITON_CACHE_DIR TORCHELASTIC_RESTART_COUNT
    """,
    "CUDA_": "VISIBLE_DEVICES DEVICE_ORDER DEVICE_MAX_CONNECTIONS LAUNCH_BLOCKING MODULE_LOADING HOME CACHE_PATH",
    "OMP_": "NUM_THREADS PROC_BIND PLACES SCHEDULE DYNAMIC MAX_ACTIVE_LEVELS WAIT_POLICY",
    "NCCL_": """
        ALGO PROTO DEBUG DEBUG_SUBSYS SOCKET_IFNAME SOCKET_FAMILY SOCKET_NTHREADS NSOCKS_PERTHREAD IB_DISABLE IB_HCA
        IB_TIMEOUT IB_RETRY_CNT IB_GID_INDEX IB_SL IB_TC IB_QPS_PER_CONNECTION IB_ADAPTIVE_ROUTING NET NET_PLUGIN
        NET_GDR_LEVEL NET_GDR_READ P2P_DISABLE P2P_LEVEL P2P_NET_CHUNKSIZE SHM_DISABLE BUFFSIZE NTHREADS MIN_NCHANNELS
        MAX_NCHANNELS MIN_CTAS MAX_CTAS CROSS_NIC CUMEM_ENABLE NVLS_ENABLE COLLNET_ENABLE LAUNCH_MODE
        GRAPH_MIXING_SUPPORT PXN_DISABLE TOPO_FILE BLOCKING_WAIT ASYNC_ERROR_HANDLING TIMEOUT
    """,
    "TORCH_": """
        DISTRIBUTED_DEBUG CPP_LOG_LEVEL SHOW_CPP_STACKTRACES LOGS COMPILE_DISABLE ALLOW_TF32_CUBLAS_OVERRIDE
        NCCL_ASYNC_ERROR_HANDLING NCCL_BLOCKING_WAIT NCCL_HEARTBEAT_TIMEOUT_SEC NCCL_AVOID_RECORD_STREAMS
        NCCL_HIGH_PRIORITY NCCL_TRACE_BUFFER_SIZE NCCL_ENABLE_MONITORING NCCL_USE_COMM_NONBLOCKING
    """,
    "SLURM_": """
        CLUSTER_NAME JOB_ID JOB_NAME JOB_PARTITION JOB_QOS JOB_ACCOUNT JOB_NODELIST JOB_NUM_NODES JOB_CPUS_PER_NODE
        JOB_GPUS JOB_START_TIME JOB_END_TIME NODELIST NNODES NTASKS NPROCS NTASKS_PER_NODE TASKS_PER_NODE CPUS_PER_TASK
        CPUS_ON_NODE CPU_BIND GPUS GPUS_ON_NODE GPUS_PER_NODE MEM_PER_NODE NODEID PROCID LOCALID STEP_ID STEP_GPUS
        STEP_NODELIST STEP_NUM_NODES STEP_NUM_TASKS STEP_TASKS_PER_NODE RESTART_COUNT SUBMIT_DIR SUBMIT_HOST
    """,
    "MESHWRIGHT_": "RUN_FOLDER STOP_FILE PROFILES",
}
VARIABLES = frozenset(prefix + name for prefix, names in _BY_PREFIX.items() for name in names.split())
"""Variables that affect a run or say where it ran."""
_COMMANDS = ("train", "rehearse", "submit", "verify", "checkpoint", "import")
_FLAGS = ("--resume", "--json", "--debug", "--per-rank", "--ladder", "--run", "--trust", "--nvtx", "--each-stage")
_VALUED = (
    "--nproc", "--nodes", "--node-rank", "--master", "--site", "--time", "--partition", "--qos", "--chain",
    "--signal-before", "--budget", "--container", "--steps", "--device", "--dtype", "--out", "--trace", "--rank",
)  # fmt: skip


def recorded_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The part of the environment that may be recorded."""
    return {name: without_secrets(environment[name]) for name in sorted(VARIABLES & environment.keys())}


def recorded_command(argv: Sequence[str]) -> list[str]:
    """The command line with everything hidden except the job, its fields and known options."""
    return ["meshwright", *_words(list(argv[1:]))]


def _words(left: list[str]) -> Iterator[str]:
    fields, named = set(field_names()), False
    while left:
        word = left.pop(0)
        option, equals, value = word.partition("=")
        if not word.startswith("-"):
            command = word in _COMMANDS and not named
            yield word if command else HIDDEN if named else without_secrets(word)
            named = named or not command
        elif word in _FLAGS:
            yield word
        elif option == "--set" or option in _VALUED:
            if not equals and left and not left[0].startswith("-"):
                value = left.pop(0)
            known = option != "--set" or ".".join(value.partition("=")[0].strip().split(".")[:2]) in fields
            yield from (option, without_secrets(value) if known else HIDDEN)
        else:
            yield HIDDEN
            if not equals and left and not left[0].startswith("-"):
                left.pop(0)  # its value, or what could be one
