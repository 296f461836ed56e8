#!/bin/bash
#SBATCH --nodes=128 --exclusive --job-name=gpt3

DIR=`pwd`
NNODES=128
GPUS_PER_NODE=8
TP=8; PP=8
VIRTUAL=3
LAYERS_PER_STAGE=$(( 96 / (PP * VIRTUAL) ))

options=" \
    --num-layers 96 \
    --hidden-size 12288 \
    --num-attention-heads 96 \
    --seq-length 2048 \
    --max-position-embeddings 2048 \
    --tensor-model-parallel-size ${TP} \
    --sequence-parallel \
    --pipeline-model-parallel-size $PP \
    --num-layers-per-virtual-pipeline-stage $LAYERS_PER_STAGE \
    --micro-batch-size 1 \
    --global-batch-size 1536 \
    --train-iters 95368 \
    --lr-warmup-fraction .001 \
    --lr 6.0e-5 \
    --min-lr 6.0e-6 \
    --lr-decay-style cosine \
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 \
    --hidden-dropout 0.1 --attention-dropout 0.0 \
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 \
    --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt \
    --data-path my-gpt3_text_document --split 949,50,1 \
    --log-interval 10 --eval-iters 10 --eval-interval 1000 \
    --save $DIR/checkpoints --load $DIR/checkpoints --save-interval 1000 \
    --init-method-std 0.006 \
    --tensorboard-dir $DIR/logs --fp16"

run_cmd="python -u ${DIR}/pretrain_gpt.py $@ ${options}"
srun -l --output=$DIR/logs/%x_%j.log sh -c "${run_cmd}"
set +x
