"""Every argument of Megatron-LM (megatron/training/arguments.py) that is not a field of ours under another name."""

from meshwright.job.convert import ANY, Field, Noted, Passed, Rule

_SPEED = "it tunes how Megatron moves data and changes no results: remove it"
_DENSE = "experts are not translated: remove it, and set model.experts and layout.ep in the job"
_LATENT = "latent attention is not translated: remove it, and set model.latent in the job"
_DECODER = "only decoder-only language models are supported"
_WEIGHTS = "Megatron's checkpoints are not read: convert one to a Hugging Face folder and set model.init_from"
_SCALE = "the loss scale here has no such setting: remove it"
_TOKENS = "set data.tokenizer to the tokenizer.json, if the text is to become the same tokens"

_ANYTHING = """
use-mcore-models transformer-impl attention-backend use-flash-attn use-te-activation-func deterministic-attention
apply-layernorm-1p openai-gelu make-vocab-size-divisible-by init-model-with-meta-device use-cpu-initialization
attention-softmax-in-fp32 apply-query-key-layer-scaling disable-bf16-reduced-precision-matmul te-rng-tracker
accumulate-allreduce-grads-in-fp32 initial-loss-scale fp8-interval fp8-amax-history-len fp8-amax-compute-algo
keep-fp8-transpose-cache reuse-grad-buf-for-mxfp8-param-ag
no-masked-softmax-fusion no-bias-gelu-fusion no-bias-swiglu-fusion no-bias-dropout-fusion no-rope-fusion
no-persist-layer-norm no-gradient-accumulation-fusion cross-entropy-loss-fusion cross-entropy-fusion-impl
use-fused-weighted-squared-relu no-async-tensor-model-parallel-allreduce no-clone-scatter-output-in-embedding
overlap-grad-reduce overlap-param-gather overlap-param-gather-with-optimizer-step no-align-grad-reduce
no-align-param-gather no-scatter-gather-tensors-in-pipeline ddp-num-buckets ddp-bucket-size
ddp-pad-buckets-for-high-nccl-busbw ddp-average-in-collective no-gradient-reduce-div-fusion
ddp-reduce-scatter-with-fp32-accumulation fsdp-double-buffer suggested-communication-unit-size
tp-comm-overlap-cfg disable-tp-comm-overlap-ag disable-tp-comm-overlap-rs tp-comm-overlap-rs-dgrad
disable-tp-comm-bulk-dgrad disable-tp-comm-bulk-wgrad tp-comm-bootstrap-backend disable-tp-comm-split-ag
disable-tp-comm-split-rs no-overlap-p2p-communication overlap-p2p-communication-warmup-flush
microbatch-group-size-per-virtual-pipeline-stage defer-embedding-wgrad-compute wgrad-deferral-limit
account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split delay-wgrad-compute
pipeline-model-parallel-comm-backend high-priority-stream-groups use-ring-exchange-p2p use-nccl-ub
disable-symmetric-registration use-sharp sharp-enabled-group nccl-communicator-config-path distributed-backend
distributed-timeout-minutes distributed-timeout-seconds-after-init disable-gloo-process-groups local-rank lazy-mpu-init
hierarchical-context-parallel-sizes calculate-per-token-loss
overlap-cpu-optimizer-d2h-h2d use-torch-optimizer-for-cpu-offload no-pin-cpu-grads no-pin-cpu-params
empty-unused-memory-level manual-gc manual-gc-interval no-manual-gc-eval train-sync-interval
check-weight-hash-across-dp-replicas-interval no-check-for-nan-in-loss-and-grad check-for-large-grads
rerun-mode result-rejected-tracker-filename error-injection-type exit-signal-handler exit-duration-in-mins
adlr-autoresume adlr-autoresume-interval log-straggler disable-straggler-on-startup straggler-ctrlr-port
straggler-minmax-count run-workload-inspector-server enable-ft-package calc-ft-timeouts
ckpt-format use-dist-ckpt dist-ckpt-format auto-detect-ckpt-format async-save use-persistent-ckpt-worker
ckpt-fully-parallel-save no-ckpt-fully-parallel-save ckpt-fully-parallel-load ckpt-assume-constant-structure
dist-ckpt-strictness dist-ckpt-save-pre-mcore-014 dist-ckpt-optim-fully-reshardable
distrib-optim-fully-reshardable-mem-efficient no-strict-fsdp-dtensor-load replication replication-jump
replication-factor non-persistent-save-interval non-persistent-ckpt-type non-persistent-global-ckpt-dir
non-persistent-local-ckpt-dir non-persistent-local-ckpt-algo exit-on-missing-checkpoint no-load-rng no-save-rng
override-opt-param-scheduler no-initialization
log-params-norm log-num-zeros-in-grad log-throughput log-progress log-energy log-memory-interval timing-log-level
timing-log-option no-barrier-with-level-1-timing tensorboard-log-interval tensorboard-queue-size
log-timers-to-tensorboard no-log-loss-scale-to-tensorboard no-log-learning-rate-to-tensorboard
log-loss-scale-to-tensorboard log-learning-rate-to-tensorboard log-batch-size-to-tensorboard
log-validation-ppl-to-tensorboard log-memory-to-tensorboard log-world-size-to-tensorboard
wandb-entity wandb-exp-name wandb-save-dir logging-level no-one-logger
one-logger-project one-logger-run-name one-logger-async app-tag-run-name app-tag-run-version config-logger-dir
profile profile-step-start profile-step-end profile-ranks use-pytorch-profiler record-memory-history
memory-snapshot-path dump-param-to-param-group-map
dataloader-type data-path train-data-path valid-data-path test-data-path data-args-path per-split-data-args-path
data-cache-path no-mmap-bin-files no-create-attention-mask-in-dataloader num-dataset-builder-threads
object-storage-cache-path mid-level-dataset-surplus trust-remote-code tokenizer-metadata legacy-tokenizer
tiktoken-pattern tiktoken-num-special-tokens tiktoken-special-tokens vocab-extra-ids
test-mode bert-no-binary-head onnx-safe enable-experimental enable-gloo-process-groups
relative-attention-num-buckets relative-attention-max-distance mask-prob short-seq-prob retriever-seq-length
"""
"""Kernels, communication, checkpoint files, logs and profiles: the numbers of a run do not depend on them here, or what
they ask for is always the case."""
_ONLY: dict[str, tuple[list[object], str]] = {
    # changes results, and has no counterpart
    "rampup-batch-size": ([], "the batch is constant here: remove it, or train in two runs"),
    "decrease-batch-size-if-needed": ([False], "run.may_shrink keeps the batch on fewer ranks"),
    "decoupled-lr": ([], "there is one rate for all weights: remove it"),
    "decoupled-min-lr": ([], "there is one rate for all weights: remove it"),
    "start-weight-decay": ([], "weight decay is constant here: write --weight-decay"),
    "end-weight-decay": ([], "weight decay is constant here: write --weight-decay"),
    "weight-decay-incr-style": (["constant"], "weight decay is constant here: write --weight-decay"),
    "lr-warmup-init": ([0, 0.0], "the warm-up starts at 0 here: write 0"),
    "eod-mask-loss": ([False], "ends of documents count in the loss here: remove it"),
    "attention-dropout": ([0, 0.0], "no fused kernel could give the same mask in every layout: write 0"),
    "iterations-to-skip": ([[]], "run.on_bad_step skips bad steps: remove it"),
    "check-for-spiky-loss": ([False], "run.spike_score and run.on_bad_step do this here"),
    "error-injection-rate": ([0], "remove it"),
    "exit-interval": ([], "run.steps ends a run: write it as --train-iters"),
    "skip-train": ([False], "use meshwright eval"),
    "full-validation": ([False], "an evaluation is evaluation.batches here: write --eval-iters"),
    "multiple-validation-sets": ([False], "name them in evaluation.sets"),
    "sample-rate": ([1, 1.0], "data.weights blends sources"),
    "init-method-xavier-uniform": ([False], "weights are drawn from a normal distribution: remove it"),
    "data-parallel-random-init": ([False], "all replicas start equal: remove it"),
    "apply-residual-connection-post-layernorm": ([False], "norms come before the blocks here"),
    "squared-relu": ([False], "use --swiglu or GELU"),
    "quick-geglu": ([False], "use --swiglu or GELU"),
    "activation-func-clamp-value": ([], "remove it"),
    "glu-linear-offset": ([0, 0.0], "remove it"),
    "softmax-type": (["vanilla"], "remove it"),
    "window-attn-skip-freq": ([], "every layer has the same window here: remove it"),
    "rotary-percent": ([1, 1.0], "all of a head is rotated here: write 1.0"),
    "rotary-interleaved": ([False], "halves of a head are rotated here, as in Llama: remove it"),
    "rotary-seq-len-interpolation-factor": ([], "model.rope_scaling is Llama 3.1's scaling: use --use-rope-scaling"),
    "no-rope-freq": ([], "every layer has rotary positions: remove it"),
    "rope-type": (["rope"], "use rope"),
    "mrope-section": ([], _DECODER),
    "qk-l2-norm": ([False], "model.qk_norm is an RMSNorm with weights: use --qk-layernorm"),
    "fp32-residual-connection": ([False], "residuals have precision.compute's format: remove it"),
    "fp16-lm-cross-entropy": ([False], "the loss is computed in fp32: remove it"),
    "loss-scale": ([], "the scale of fp16 is dynamic here: remove it"),
    "min-loss-scale": ([1, 1.0], _SCALE),
    "loss-scale-window": ([1000, 500], _SCALE),
    "hysteresis": ([2], _SCALE),
    "fp8-margin": ([0], "scales have no margin here: remove it"),
    "no-fp8-wgrad": ([False], "all three products of a layer are in fp8 here: remove it"),
    "first-last-layers-bf16": ([False], "every block has fp8 products here: remove it"),
    "fp8-quantizer-factory": ([], "remove it"),
    "fp4-format": ([], "fp4 is not supported: use --fp8-format hybrid or --bf16"),
    "fp4-param-gather": ([False], "fp4 is not supported"),
    "distribute-saved-activations": ([False], "layout.tp with layout.sp shards them instead: use --sequence-parallel"),
    "checkpoint-activations": ([False], "write --recompute-granularity"),
    "cpu-offloading-num-layers": ([0], 'memory.offload = ["activations"] offloads all layers'),
    "optimizer-offload-fraction": ([1, 1.0], "all of the optimizer is offloaded here: write 1"),
    "pipeline-model-parallel-layout": ([], "set layout.split, the layers of every stage"),
    "enable-full-sharding-in-hsdp": ([False], "layout.dp_replicate keeps whole copies of the states: remove it"),
    "no-save-optim": ([False], "checkpoints hold the whole state; meshwright checkpoint export writes weights alone"),
    "no-load-optim": ([False], _WEIGHTS),
    "finetune": ([False], _WEIGHTS),
    "pretrained-checkpoint": ([], _WEIGHTS),
    "ckpt-step": ([], _WEIGHTS),
    "load-main-params-from-ckpt": ([False], _WEIGHTS),
    "use-checkpoint-args": ([False], "write the model's arguments"),
    "use-mp-args-from-checkpoint-args": ([False], "write the layout's arguments"),
    "use-checkpoint-opt-param-scheduler": ([False], "write the schedule's arguments"),
    "ckpt-convert-format": ([], _WEIGHTS),
    "ckpt-convert-save": ([], _WEIGHTS),
    "inprocess-restart": ([False], "run.max_restarts restarts from the last checkpoint"),
    "enable-cuda-graph": ([False], _SPEED),
    "external-cuda-graph": ([False], _SPEED),
    "cuda-graph-impl": (["none"], _SPEED),
    "use-legacy-models": ([False], "remove it"),
    "multi-latent-attention": ([False], _LATENT),
    "num-experts": ([], _DENSE),
    "expert-model-parallel-size": ([1], _DENSE),
    "expert-tensor-parallel-size": ([1], _DENSE),
    "overlap-moe-expert-parallel-comm": ([False], _DENSE),
    "is-hybrid-model": ([False], _DECODER),
    "hybrid-attention-ratio": ([0, 0.0], _DECODER),
    "hybrid-mlp-ratio": ([0, 0.0], _DECODER),
    "hybrid-override-pattern": ([], _DECODER),
    "spec": ([], "a model of your own goes in model.file"),
    "yaml-cfg": ([], "give that file, or write its arguments here"),
    "encoder-num-layers": ([], "write --num-layers"),
    "decoder-num-layers": ([], "write --num-layers"),
    "encoder-seq-length": ([], "write --seq-length"),
    "decoder-seq-length": ([], _DECODER),
    "vision-pretraining": ([False], _DECODER),
    "perform-rl-step": ([False], "only language modelling is supported"),
    "batch-size": ([], "write --micro-batch-size"),
    "model-parallel-size": ([], "write --tensor-model-parallel-size"),
    "warmup": ([], "write --lr-warmup-iters"),
}  # fmt: skip
"""Arguments with their values that have no effect, and what to do about any other."""
_NOTED = {
    "vocab-file": _TOKENS,
    "merge-file": _TOKENS,
    "tokenizer-model": _TOKENS,
    "load": "a run resumes from its own folder (meshwright train --resume); weights come from model.init_from",
    "no-use-tokenizer-model-from-checkpoint-args": _TOKENS,
    "save-retain-interval": "the newest two are kept as well",
}
"""Arguments that something is lost of, said at the top of the job."""
_FAMILIES = {
    "moe-": Passed([False], _DENSE),
    "mtp-": Passed([0], "set model.extra_tokens and model.extra_tokens_weight by hand"),
    "mamba-": Passed([], _DECODER),
    "heterogeneous-": Passed([], "all layers have one shape here"),
    "retro-": Passed([False], _DECODER),
    "bert-": Passed([], _DECODER),
    "biencoder-": Passed([], _DECODER),
    "dino-": Passed([], _DECODER),
    "muon-": Passed([], "set [optimizer] by hand"),
    "inference-": Passed(ANY),
    "inprocess-": Passed(ANY),  # has an effect only with --inprocess-restart
    "rl-": Passed(ANY),  # these three have an effect only with --perform-rl-step
    "grpo-": Passed(ANY),
    "langrl-": Passed(ANY),
    "cuda-graph-": Passed(ANY),  # has an effect only with --cuda-graph-impl
    "kitchen-": Passed([], "remove it"),
}
"""By the beginning of their names."""
RULES: dict[str, Rule] = {
    **{f"--{name}": Passed(ANY) for name in _ANYTHING.split()},
    **{f"--{name}": Passed(values, instead) for name, (values, instead) in _ONLY.items()},
    **{f"--{name}": Noted(note) for name, note in _NOTED.items()},
    "--init-method-std": Field("model.init_std", float),
    "--embedding-init-method-std": Field("model.embed_std", float),
}


def rule_of(name: str) -> Rule | None:
    """How an argument is handled that is no field of ours; None if it is not known."""
    family = next((rule for start, rule in _FAMILIES.items() if name.startswith(f"--{start}")), None)
    return RULES.get(name, family)
