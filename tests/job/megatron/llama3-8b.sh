#!/bin/bash
# Llama 3 8B on two nodes
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NUM_NODES=${NNODES:-2}
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
CHECKPOINT_PATH=${1:-"checkpoints/llama3_8b"}
DATA_PATH=$2
TP_SIZE=2     # within a node
CP_SIZE=1
GLOBAL=128

if [ ! -f pretrain_gpt.py ]; then
    echo "--not-an-argument of ours"; exit 1
fi

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
    --master_port ${MASTER_PORT:-6000}
)
MODEL_ARGS=(
    --use-mcore-models
    --num-layers 32 --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8   # a comment
    --kv-channels 128
    --seq-length 8192
    --max-position-embeddings 8192
    --position-embedding-type rope
    --rotary-base 500000
    --rotary-percent 1.0
    --attention-dropout 0.0 --hidden-dropout 0.0
    --swiglu --normalization RMSNorm --norm-epsilon 1e-5
    --untie-embeddings-and-output-weights
    --disable-bias-linear
    --init-method-std 0.0134
    # --add-qkv-bias
)
TRAINING_ARGS=(
    "--micro-batch-size 1"
    "--global-batch-size $GLOBAL"
    --train-samples 1280000
    --lr-decay-samples 1280000
    --lr-warmup-samples 12800
    --lr 3e-4 --min-lr 3.0e-5 --lr-decay-style cosine
    --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95
    --bf16
)
DDP_ARGS=(--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather)
TRAINING_ARGS+=("${DDP_ARGS[@]}")
DATA_ARGS=(
    --data-path $DATA_PATH
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model /models/llama3
    --vocab-size 128256
    --split '99,1,0'
    --num-workers 4
)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \
    ${MODEL_ARGS[@]} \
    ${TRAINING_ARGS[@]} \
    --tensor-model-parallel-size $TP_SIZE --context-parallel-size $CP_SIZE --sequence-parallel \
    ${DATA_ARGS[@]} \
    --save "$CHECKPOINT_PATH" --save-interval 1000 --eval-interval 500 --eval-iters 10 --log-interval 10
